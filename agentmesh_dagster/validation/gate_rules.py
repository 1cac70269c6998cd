"""Rules of gates: who may decide, what, until when, and who is told."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from pydantic import ValidationError

from agentmesh_dagster.constants import GROUP_PREFIX, HANDLE_ERROR, HANDLE_TIMEOUT, RESERVED_EVENTS
from agentmesh_dagster.deployment import WHERE
from agentmesh_dagster.records import Json
from agentmesh_dagster.specs import expressions
from agentmesh_dagster.specs.approvals import ApprovalPolicy, ToolApproval
from agentmesh_dagster.specs.fields import JsonObject, as_list, as_object
from agentmesh_dagster.specs.nodes import EmitConfig, HumanConfig, WebhookConfig
from agentmesh_dagster.specs.notify import NotifyConfig
from agentmesh_dagster.specs.problems import Problem, child_path
from agentmesh_dagster.specs.schema import check_schema, fill_and_coerce, validate_value
from agentmesh_dagster.validation.document_rules import joined_path, known_type
from agentmesh_dagster.validation.shape import checked
from agentmesh_dagster.validation.view import NodeView, WorkflowView

_MAX_WORD: Final = 63
_NEVER_ASK: Final = frozenset(
    (
        *("start", "end", "transform", "fail", "emit", "branch", "delay", "webhook"),
        *("parallel", "foreach", "loop", "workflow"),
    )
)
"""Built-in node types at which nobody is ever asked anything; of containers the nodes inside of them may ask."""


def gate_problems(view: WorkflowView) -> Iterator[Problem]:
    """Problems of the human and webhook nodes of a workflow, of all its levels."""
    for node in view.every_node():
        path, config = f"{node.path}.config", node.config
        if isinstance(config, HumanConfig):
            yield from _options(config, path)
            yield from _policy(config, path)
            yield from _choices(config, path)
            yield from _form(config, path)
        elif isinstance(config, EmitConfig):
            yield from _reserved(config.event, path)
        elif isinstance(config, WebhookConfig):
            yield from _timeout(config.timeout, config.on_timeout, config.timeout_data, path)
        if node.type in _NEVER_ASK and node.raw.get("notify"):
            yield _idle(f"{node.path}.notify", f"nobody is asked anything at a node of type {node.type!r}")


def _reserved(event: str, path: str) -> Iterator[Problem]:
    if event.startswith(RESERVED_EVENTS):
        yield Problem.of(
            "event-reserved",
            f"{path}.event",
            f"Events whose name begins with {RESERVED_EVENTS!r} are sent by AgentMesh alone",
            "Choose another name",
        )


def approval_problems(raw: JsonObject) -> Iterator[Problem]:
    """Problems of a tool's approval."""
    given = as_object(raw.get("approval"))
    if given is None:
        return
    if not raw.get("requires_approval", False):
        yield _idle("approval", "the tool has no requires_approval, so that nobody is asked")
    try:
        policy = ToolApproval.model_validate(given)
    except ValidationError:
        return  # told where the document's shape is checked
    yield from _policy(policy, "approval")
    schema = as_object(raw.get("input_schema"))
    if policy.on_timeout == "approve" and policy.timeout_data is not None:
        yield from _fits(schema, policy.timeout_data, "approval.timeout_data", "the tool's input_schema")


def notify_problems(
    node: NodeView, known: Mapping[str, type[NotifyConfig]]
) -> Iterator[tuple[type[NotifyConfig] | None, JsonObject, str, Sequence[Problem]]]:
    """Each notifier of a node: its config model where its type is known, the raw config, its path, its problems."""
    for index, item in enumerate(as_list(node.raw.get("notify")) or []):
        path, raw = f"{node.path}.notify[{index}]", as_object(item)
        if raw is None:
            continue  # told where the node's shape is checked
        problems: list[Problem] = []
        kind = raw.get("type")
        model = known.get(kind) if isinstance(kind, str) else None
        if model is not None:
            checked(model, {k: v for k, v in raw.items() if k not in model.retired_fields}, path, problems)
            problems += _literal_secrets(model, raw, path)
            problems += _of_mail_server(model, raw, path)
        elif isinstance(kind, str):
            problems += known_type("notifier-unknown", f"{path}.type", "notifier", kind, known)
        else:
            code, what = (
                ("field-missing", "is missing") if kind is None else ("field-invalid", "must be text")
            )
            names = ", ".join(repr(name) for name in sorted(known))
            problems.append(
                Problem.of(
                    code, f"{path}.type", f"The notifier's field 'type' {what}", f"Known types are {names}"
                )
            )
        yield model, raw, path, problems


def _of_mail_server(model: type[NotifyConfig], raw: JsonObject, path: str) -> Iterator[Problem]:
    for name in model.retired_fields:
        if name in raw:
            yield Problem.of(
                "mail-server",
                child_path(path, name),
                f"{name!r} is not a document's to say: the SMTP server is the deployment's",
                f"Write it in mail=MailServer(...) of {WHERE}",
            )


def _literal_secrets(model: type[NotifyConfig], raw: JsonObject, path: str) -> Iterator[Problem]:
    for name in model.secret_fields:
        value = raw.get(name)
        if isinstance(value, str) and value and not expressions.is_template(value):
            yield Problem.of(
                "secret-literal",
                child_path(path, name),
                f"The secret {name!r} stands here in clear, and so in the database and in every export",
                "Write \"{{ secret('NAME') }}\", and configure NAME",
            )


def _idle(path: str, why: str) -> Problem:
    name = path.rpartition(".")[2]
    return Problem.of("setting-without-effect", path, f"{name!r} does nothing here: {why}", "Remove it")


# Human nodes ------------------------------------------------------------------------------------------------


def _options(config: HumanConfig, path: str) -> Iterator[Problem]:
    seen: set[str] = set()
    for index, option in enumerate(config.options or ()):
        place, shown = f"{path}.options[{index}]", option[:80]
        if option in (HANDLE_TIMEOUT, HANDLE_ERROR):
            yield _wrong(
                "gate-options",
                place,
                f"{option!r} is a handle of another meaning",
                "Choose another word for it",
            )
        elif not option or option != option.strip() or len(option) > _MAX_WORD or not option.isprintable():
            yield _wrong(
                "gate-options",
                place,
                f"The option {shown!r} cannot be a handle",
                f"Write 1 to {_MAX_WORD} printable characters, with no space at the ends",
            )
        elif option in seen:
            yield _wrong("gate-options", place, f"The option {shown!r} is there twice", "Keep one of them")
        seen.add(option)
    if config.multiple and config.options is None:
        yield _wrong(
            "gate-options",
            f"{path}.multiple",
            "Several options may be chosen, and there are none",
            "Add 'options', or remove 'multiple'",
        )


def _choices(config: HumanConfig, path: str) -> Iterator[Problem]:
    if config.multiple and config.required > 1:
        yield _wrong(
            "gate-quorum",
            f"{path}.required",
            "Several people who each choose several options have no one choice to agree on",
            "Remove 'multiple', or require one person",
        )
    if config.on_timeout == "approve" and config.options is not None:
        yield _wrong(
            "gate-timeout",
            f"{path}.on_timeout",
            "A timeout cannot approve where one of several options is to be chosen",
            "Write on_timeout: reject, fail or route",
        )


def _form(config: HumanConfig, path: str) -> Iterator[Problem]:
    schema = config.form_schema
    if schema is not None and schema.get("type") != "object":
        given = schema.get("type")
        yield _wrong(
            "gate-form",
            f"{path}.form_schema.type",
            "The form's schema has no type" if given is None else f"The form's schema is of type {given!r}",
            "Write type: object, and put the value into a property",
        )
        return
    is_literal = not _has_template(config.prefill)
    if config.prefill is not None and is_literal:
        # A person fills in what a prefill leaves out.
        yield from _fits(schema, config.prefill, f"{path}.prefill", "the form", is_partial=True)
    if config.on_timeout != "approve" or config.options is not None or config.timeout is None:
        return
    if config.timeout_data is not None:
        yield from _fits(schema, config.timeout_data, f"{path}.timeout_data", "the form")
    elif is_literal and any(_issues(schema, {} if config.prefill is None else config.prefill)):
        yield _wrong(
            "gate-form",
            f"{path}.on_timeout",
            "A timeout would approve with data that does not fit the form",
            "Add 'timeout_data' that fits",
        )


# Policies ---------------------------------------------------------------------------------------------------


def _policy(policy: ApprovalPolicy, path: str) -> Iterator[Problem]:
    yield from _names(policy.assignees, f"{path}.assignees")
    yield from _names(policy.escalate_to, f"{path}.escalate_to")
    yield from _quorum(policy, path)
    yield from _timeout(policy.timeout, policy.on_timeout, policy.timeout_data, path)
    if (policy.escalate_after is None) != (not policy.escalate_to):
        there, missing = (
            ("escalate_after", "escalate_to") if policy.escalate_after else ("escalate_to", "escalate_after")
        )
        yield _wrong(
            "gate-escalation", path, f"{there!r} stands without {missing!r}", f"Add {missing!r}, or remove it"
        )
    for name in ("remind_after", "escalate_after"):
        after: float | None = getattr(policy, name)
        if after is not None and policy.timeout is not None and after >= policy.timeout:
            yield _idle(f"{path}.{name}", f"the gate's time is up after {policy.timeout:g} s")


def _names(entries: Sequence[str], path: str) -> Iterator[Problem]:
    seen: set[str] = set()
    for index, entry in enumerate(entries):
        name = entry.removeprefix(GROUP_PREFIX)
        if not name.strip() or name != name.strip() or not name.isprintable():
            yield _wrong(
                "gate-assignees",
                f"{path}[{index}]",
                f"{entry[:80]!r} names nobody",
                "Write a person's name, or group:<name>",
            )
        elif entry in seen:
            yield _wrong(
                "gate-assignees", f"{path}[{index}]", f"{entry[:80]!r} is there twice", "Keep one of them"
            )
        seen.add(entry)


def _quorum(policy: ApprovalPolicy, path: str) -> Iterator[Problem]:
    entries = policy.assignees
    if not entries:
        for name, is_given in (("required", policy.required > 1), ("ordered", policy.ordered)):
            if is_given:
                yield _wrong(
                    "gate-quorum",
                    f"{path}.{name}",
                    f"{name!r} needs to know who decides, and there are no assignees",
                    "Add 'assignees'",
                )
        return
    has_group = any(entry.startswith(GROUP_PREFIX) for entry in entries)
    if policy.required > len(set(entries)) and (policy.ordered or not has_group):
        yield _wrong(
            "gate-quorum",
            f"{path}.required",
            f"{policy.required} must agree, and {len(set(entries))} are asked",
            "Require fewer, or add assignees",
        )
    if policy.ordered and policy.required == 1 and len(entries) > 1:
        yield _idle(
            f"{path}.ordered",
            "'required' is 1, so that only the first is asked; require as many as are listed",
        )


def _timeout(timeout: float | None, on_timeout: str, data: Json, path: str) -> Iterator[Problem]:
    if timeout is None:
        for name, is_given in (("on_timeout", on_timeout != "fail"), ("timeout_data", data is not None)):
            if is_given:
                yield _wrong(
                    "gate-timeout",
                    f"{path}.{name}",
                    f"{name!r} stands without a 'timeout': it waits for ever",
                    "Add 'timeout', such as 3d",
                )
    elif data is not None and on_timeout == "fail":
        yield _idle(f"{path}.timeout_data", "on_timeout is 'fail'")


def _fits(
    schema: JsonObject | None, value: Json, path: str, what: str, *, is_partial: bool = False
) -> Iterator[Problem]:
    """Literal data that no decision could be made with."""
    if as_object(value) is None:
        yield _wrong("gate-form", path, "The data of a decision is an object", "Write an object")
        return
    for place, message in _issues(schema, value):
        if not (is_partial and message == "is required"):
            yield _wrong(
                "gate-form",
                joined_path(path, place),
                f"The value does not fit {what}: {message.rstrip('.')}",
                "Correct the value",
            )


def _issues(schema: JsonObject | None, value: Json) -> Iterator[tuple[str, str]]:
    if schema is None or check_schema(schema):
        return
    for issue in validate_value(schema, fill_and_coerce(schema, value)):
        yield issue.path, issue.message


def _has_template(value: Json) -> bool:
    return any(expressions.is_template(text) for text in expressions.strings_of(value))


def _wrong(code: str, path: str, message: str, mend: str) -> Problem:
    return Problem.of(code, path, message, mend)
