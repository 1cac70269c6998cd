"""Messages to people about approvals: over real HTTP and real SMTP, retried, signed, and without secrets anywhere."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from fake_http import FakeHttp
from fake_smtp import FakeSmtp
from store_samples import a_run, a_step

from agentmesh_dagster.clock import SystemClock
from agentmesh_dagster.constants import GROUP_NOTIFIERS
from agentmesh_dagster.deployment import Deployment, MailServer
from agentmesh_dagster.errors import AgentMeshError, ApprovalError, StoreError
from agentmesh_dagster.records import Delegation, Entry, Event, Notice, StepStatus, Wait, WaitKind, WaitStatus
from agentmesh_dagster.runtime.environment import Environment
from agentmesh_dagster.runtime.functions import FunctionRegistry
from agentmesh_dagster.runtime.how_to_decide import how_to_decide
from agentmesh_dagster.runtime.notify import registry
from agentmesh_dagster.runtime.notify.base import Notifier, NotifyContext
from agentmesh_dagster.runtime.notify.deliver import BACKOFF_S, TAKEN_S, Deliveries, deliver
from agentmesh_dagster.runtime.notify.message import NoticeMessage
from agentmesh_dagster.runtime.secrets import EnvironmentSecrets, Secrets
from agentmesh_dagster.runtime.tools.http_client import HttpClient
from agentmesh_dagster.runtime.tools.http_guard import AddressPolicy
from agentmesh_dagster.specs.notify import BUILTIN_NOTIFY_CONFIGS, NotifyConfig
from agentmesh_dagster.store import Store

KEY = "k3y-that-signs"
PASSWORD = "pa55word-of-the-mailer"
NOW = datetime(2026, 7, 1, 12, 0, tzinfo=timezone.utc)


class TestClock(SystemClock):
    __test__ = False

    def __init__(self) -> None:
        self.at = NOW

    def now(self) -> datetime:
        return self.at

    def pass_(self, seconds: float) -> None:
        self.at += timedelta(seconds=seconds)


def a_wait(**changes: Any) -> Wait:
    made = Wait(
        id="1a2b3c4d-0000-4000-8000-000000000001",
        project="default",
        run_id="0a0b0c0d-0000-4000-8000-000000000002",
        step_key="review",
        kind=WaitKind.HUMAN,
        node_id="review",
        title="Refund of 700 EUR?",
        body="Order **A-17** is *old*.",
        data={"order": "A-17", "amount": 700},
        assignees=("ann", "group:finance"),
        created_at=NOW,
        deadline_at=NOW + timedelta(hours=4),
    )
    return replace(made, **changes)


class Table:
    """Notices and waits as a store keeps them: one that was taken is not due until then."""

    def __init__(self, *notices: Notice, wait: Wait | None = None) -> None:
        self.rows = {notice.id: notice for notice in notices}
        self.wait = wait or a_wait()
        self.taken: list[tuple[str, datetime]] = []
        self.broken: set[str] = set()

    def due(self, project: str, now: datetime, /, *, limit: int = 50) -> Sequence[Notice]:
        found = [n for n in self.rows.values() if n.next_at is not None and n.next_at <= now]
        return [n for n in found if n.project == project][:limit]

    def take(self, notice_id: str, /, *, now: datetime, until: datetime) -> bool:
        row = self.rows[notice_id]
        if row.next_at is None or row.next_at > now:
            return False
        self.taken.append((notice_id, until))
        self.rows[notice_id] = replace(row, next_at=until, attempts=row.attempts + 1)
        return True

    def sent(self, notice_id: str, at: datetime, /) -> None:
        if notice_id in self.broken:
            raise StoreError("the database is away", code="unreachable")
        self.rows[notice_id] = replace(self.rows[notice_id], next_at=None, sent_at=at, error="")

    def failed(self, notice_id: str, error: str, next_at: datetime | None, /) -> None:
        self.rows[notice_id] = replace(self.rows[notice_id], error=error, next_at=next_at)

    def get(self, project: str, wait_id: str, /) -> Wait:
        if (project, wait_id) != (self.wait.project, self.wait.id):
            raise ApprovalError(f"there is no approval {wait_id!r}", code="no-approval")
        return self.wait


class Events:
    """The part of a journal that is used here."""

    def __init__(self) -> None:
        self.seen: list[Event] = []

    async def record_events(self, events: Sequence[Event]) -> None:
        self.seen.extend(events)


@dataclass
class World:
    """One process that delivers."""

    table: Any
    """A `Table`, or a store."""
    clock: TestClock = field(default_factory=TestClock)
    journal: Any = field(default_factory=Events)
    lines: list[tuple[str, str]] = field(default_factory=list)
    allow: tuple[str, ...] = ("127.0.0.0/8",)
    secrets: Secrets = field(
        default_factory=lambda: Secrets(
            EnvironmentSecrets({"HOOK_KEY": KEY, "MAIL_PASSWORD": PASSWORD}),
            Deployment.of(secrets=["HOOK_KEY", "NOT_THERE"]),
        )
    )

    def deliver(self, **changes: Any) -> Deliveries:
        async def body() -> Deliveries:
            environment = Environment(
                journal=self.journal,
                models=None,  # type: ignore[arg-type]
                secrets=self.secrets,
                functions=FunctionRegistry(),
                http=HttpClient(AddressPolicy(self.allow)),
                clock=self.clock,
                deployment=Deployment.of(mail=Mail.server),
                **changes,
            )
            try:
                notices = self.table if isinstance(self.table, Table) else self.table.notices
                waits = self.table if isinstance(self.table, Table) else self.table.waits
                return await deliver("default", notices, waits, environment, say=self.say)
            finally:
                await environment.http.aclose()

        return asyncio.run(body())

    def say(self, level: str, line: str) -> None:
        self.lines.append((level, line))

    @property
    def written(self) -> str:
        """All that is kept or shown of the deliveries."""
        return repr((self.table.rows, self.lines, self.journal.seen))


def a_notice(channel: dict[str, Any], id: str = "notice-1", **changes: Any) -> Notice:
    made = Notice(
        id=id, wait_id=a_wait().id, project="default", reason="opened", channel=channel, next_at=NOW
    )
    return replace(made, **changes)


def hook(url: str, **config: Any) -> dict[str, Any]:
    return {"type": "webhook", "url": url, "secret": "{{ secret('HOOK_KEY') }}", **config}


class Mail:
    """The deployment's mail server: that of the last notifier that was made ready."""

    server: MailServer | None = None


def mail(server: FakeSmtp, **config: Any) -> dict[str, Any]:
    of_server = {key: config.pop(key) for key in ("user", "password", "starttls", "tls") if key in config}
    Mail.server = MailServer(host="127.0.0.1", port=server.port, **{"starttls": False, **of_server})
    return {"type": "email", "to": "ann@example.com", "sender": "mesh@example.com", **config}


@pytest.fixture
def server() -> Iterator[FakeHttp]:
    with FakeHttp() as fake:
        yield fake


@pytest.fixture
def smtp() -> Iterator[FakeSmtp]:
    with FakeSmtp() as fake:
        yield fake


# How to decide ----------------------------------------------------------------------------------------------------


def test_how_to_decide_names_commands_job_and_form() -> None:
    schema = {
        "type": "object",
        "required": ["amount"],
        "properties": {"amount": {"type": "number"}, "why": {"enum": ["old", "bad"], "default": "old"}},
    }
    lines = how_to_decide(a_wait(form_schema=schema, project="sales"))
    assert lines == (
        "agentmesh --project sales approvals approve 1a2b3c4d --data JSON",
        "agentmesh --project sales approvals reject 1a2b3c4d --comment TEXT",
        (
            "in Dagster: launch the job agentmesh_decide with your name as `by`, approval '1a2b3c4d' and decision "
            "'approved' or 'rejected'"
        ),
        'the data has amount (number, required), why (one of ["old", "bad"], default "old")',
    )


def test_how_to_decide_between_options() -> None:
    one = how_to_decide(a_wait(options=("pay all", "half")))
    assert one[0] == "agentmesh approvals decide 1a2b3c4d 'pay all'"
    assert one[-1].endswith("approval '1a2b3c4d' and decision 'pay all' or 'half'")
    several = how_to_decide(a_wait(options=("a", "b"), multiple=True))
    assert several[:2] == (
        "agentmesh approvals decide 1a2b3c4d OPTION [OPTION ...]",
        "the options are a, b",
    )


def test_how_to_decide_what_is_no_approval() -> None:
    hostile = "'; rm -rf / #"
    suspended = how_to_decide(a_wait(kind=WaitKind.SUSPEND, label=hostile))
    run_id = a_wait().run_id
    assert shlex.split(suspended[0]) == [
        *("agentmesh", "runs", "resume", run_id, "--label", hostile, "--data", "JSON"),
    ]
    assert (
        suspended[1]
        == "in Dagster: launch the job agentmesh_decide with your name as `by`, approval '1a2b3c4d' and data"
    )
    event = how_to_decide(a_wait(kind=WaitKind.EVENT, event_name="paid", event_key="A 17"))
    assert event == ("agentmesh events send paid --key 'A 17' --data JSON",)
    assert how_to_decide(a_wait(kind=WaitKind.TIMER)) == ("goes on by itself at 2026-07-01 16:00:00 UTC",)
    assert how_to_decide(a_wait(status=WaitStatus.DECIDED)) == ()


def test_a_tool_call_can_be_approved_with_other_arguments() -> None:
    wait = a_wait(kind=WaitKind.TOOL, form_schema={"type": "object"})
    assert how_to_decide(wait)[:2] == (
        "agentmesh approvals approve 1a2b3c4d",
        "agentmesh approvals approve 1a2b3c4d --data JSON  # with other arguments",
    )


# Webhook ----------------------------------------------------------------------------------------------------------


def verified(call: Any, key: str = KEY) -> dict[str, Any]:
    """The body of a call whose signature is right, worked out as a receiver would."""
    parts = dict(part.split("=", 1) for part in call.headers["x-agentmesh-signature"].split(","))
    made = hmac.new(key.encode(), f"{parts['t']}.{call.body}".encode(), hashlib.sha256).hexdigest()
    assert hmac.compare_digest(made, parts["v1"])
    return json.loads(call.body)


def test_a_webhook_is_signed_and_says_how_to_decide(server: FakeHttp) -> None:
    table = Table(a_notice(hook(server.url + "/echo", headers={"X-Team": "{{ approval.node_id }}"})))
    world = World(table)
    assert world.deliver() == Deliveries(sent=1)
    [call] = server.calls
    body = verified(call)
    assert call.headers["x-agentmesh-signature"].startswith(f"t={int(NOW.timestamp())},v1=")
    assert call.headers["x-agentmesh-delivery"] == body["id"] == "notice-1"
    assert (call.method, call.headers["x-team"]) == ("POST", "review")
    assert call.headers["content-type"] == "application/json"
    assert body["type"] == "approval.opened"
    assert body["approval"]["title"] == "Refund of 700 EUR?"
    assert body["approval"]["data"] == {"order": "A-17", "amount": 700}
    assert body["approval"]["deadline_at"] == "2026-07-01T16:00:00+00:00"
    assert body["how_to_decide"] == list(how_to_decide(a_wait()))
    row = table.rows["notice-1"]
    assert (row.sent_at, row.next_at) == (NOW, None)
    [event] = world.journal.seen
    assert (event.type, event.run_id, event.step_key) == ("approval.notified", a_wait().run_id, "review")


def test_without_a_secret_nothing_is_signed(server: FakeHttp) -> None:
    World(Table(a_notice({"type": "webhook", "url": server.url + "/echo"}))).deliver()
    assert "x-agentmesh-signature" not in server.calls[0].headers


def test_a_failing_receiver_gets_the_same_delivery_again(server: FakeHttp) -> None:
    server.script({"status": 500, "json": "oops"}, {"cut": True})
    table = Table(a_notice(hook(server.url + "/script")))
    world = World(table)
    assert world.deliver() == Deliveries(failed=1)
    assert "answered with status 500" in table.rows["notice-1"].error
    assert table.rows["notice-1"].next_at == NOW + timedelta(seconds=BACKOFF_S[0])
    assert world.deliver() == Deliveries()
    world.clock.pass_(BACKOFF_S[0])
    assert world.deliver() == Deliveries(failed=1)
    assert table.rows["notice-1"].next_at == world.clock.at + timedelta(seconds=BACKOFF_S[1])
    world.clock.pass_(BACKOFF_S[1])
    assert world.deliver() == Deliveries(sent=1)
    assert [call.headers["x-agentmesh-delivery"] for call in server.calls] == ["notice-1"] * 3
    assert len({call.headers["x-agentmesh-signature"] for call in server.calls}) == 3
    for call in server.calls:
        verified(call)
    assert table.rows["notice-1"].error == ""


def test_it_is_given_up_after_its_attempts_and_says_so(server: FakeHttp) -> None:
    table = Table(a_notice(hook(server.url + "/status/503", max_attempts=7)))
    world = World(table)
    waits: list[float] = []
    while (next_at := table.rows["notice-1"].next_at) is not None:
        waits.append((next_at - world.clock.at).total_seconds())
        world.clock.at = next_at
        outcome = world.deliver()
    assert waits == [0, *BACKOFF_S, BACKOFF_S[-1]]
    assert outcome == Deliveries(given_up=1)
    assert len(server.calls) == 7
    assert table.wait.status is WaitStatus.OPEN
    level, line = world.lines[-1]
    assert level == "warning"
    assert "attempt 7 of 7: POST http://127.0.0.1" in line
    assert "status 503" in line
    assert line.endswith("it is given up, and the approval stays open")
    assert [event.type for event in world.journal.seen] == ["approval.notify_failed"]


def test_redirects_are_not_followed(server: FakeHttp) -> None:
    table = Table(a_notice(hook(f"{server.url}/redirect/302?to={server.url}/echo")))
    assert World(table).deliver() == Deliveries(failed=1)
    assert len(server.calls) == 1
    assert "redirects are not followed" in table.rows["notice-1"].error


def test_a_slow_receiver_is_left(server: FakeHttp) -> None:
    table = Table(a_notice(hook(server.url + "/slow/60", timeout_s=0.2)))
    assert World(table).deliver() == Deliveries(failed=1)
    assert "took longer than 0.2 s" in table.rows["notice-1"].error


def test_addresses_that_are_not_allowed_are_not_reached(server: FakeHttp) -> None:
    table = Table(a_notice(hook(server.url + "/echo")))
    assert World(table, allow=()).deliver() == Deliveries(failed=1)
    assert "not on the public internet" in table.rows["notice-1"].error
    assert server.calls == []


def test_an_approval_cannot_change_where_the_message_goes(server: FakeHttp) -> None:
    table = Table(
        a_notice(hook(server.url + "/echo/{{ approval.data.order }}/x")),
        wait=a_wait(data={"order": "../../admin?a=b#c"}),
    )
    assert World(table).deliver() == Deliveries(sent=1)
    assert server.calls[0].path == "/echo/..%2F..%2Fadmin%3Fa%3Db%23c/x"


@pytest.mark.parametrize(
    "headers",
    [
        {"X-A": "{{ approval.body }}"},
        {"X-AgentMesh-Signature": "t=1,v1=00"},
        {"Host": "internal"},
        {"X A": "1"},
    ],
)
def test_headers_that_are_refused(server: FakeHttp, headers: dict[str, str]) -> None:
    table = Table(a_notice(hook(server.url + "/echo", headers=headers)), wait=a_wait(body="a\r\nX-Evil: yes"))
    assert World(table).deliver() == Deliveries(failed=1)
    assert "field headers" in table.rows["notice-1"].error
    assert server.calls == []


def test_no_secret_is_in_what_is_kept_or_shown(
    server: FakeHttp, smtp: FakeSmtp, caplog: pytest.LogCaptureFixture
) -> None:
    token = f"path-{KEY}"
    # Receivers that quote in their answer what they were sent.
    server.script({"status": 401, "json": f"bad key {KEY}, {KEY.encode().hex()}, header-in-clear, {token}"})
    smtp.user, smtp.password = "mesh", "another"
    login = {"user": "mesh", "password": "{{ secret('MAIL_PASSWORD') }}"}
    table = Table(
        a_notice(hook(f"{server.url}/script/{token}", headers={"X": "header-in-clear"}), "a"),
        a_notice(hook(f"{server.url}/cut/{token}", max_attempts=1), "b"),
        a_notice(hook("{{ secret('HOOK_KEY') }}"), "d"),
        a_notice(hook(server.url + "/echo", timeout_s="{{ secret('HOOK_KEY') }}"), "e"),
        a_notice(mail(smtp, **login), "f"),
        a_notice(hook(server.url + "/echo", secret="{{ secret('NOT_THERE') }}"), "h"),
        a_notice(hook(server.url + "/echo", headers={"X": "{{ secret('HOOK_KEY').nothing }}"}), "i"),
    )
    world = World(table)
    with caplog.at_level(logging.DEBUG):
        outcome = world.deliver()
    assert outcome == Deliveries(failed=6, given_up=1)
    assert "status 401" in table.rows["a"].error
    kept = repr([replace(row, channel=None) for row in table.rows.values()])
    for shown in (kept, repr(world.lines), repr(world.journal.seen), caplog.text):
        for secret in (KEY, KEY.encode().hex(), PASSWORD, token, "header-in-clear"):
            assert secret not in shown
    assert "secret('HOOK_KEY')" in table.rows["a"].channel["secret"]
    assert "535" in table.rows["f"].error
    assert "'NOT_THERE' is not configured" in table.rows["h"].error


# Email ------------------------------------------------------------------------------------------------------------


def test_an_email_has_all_that_is_needed_to_decide(smtp: FakeSmtp) -> None:
    schema = {"type": "object", "properties": {"amount": {"type": "number"}}}
    wait = a_wait(
        title="Grüße: 700 €?", form_schema=schema, prefill={"amount": 700}, required=2, ordered=True
    )
    table = Table(
        a_notice(mail(smtp, to=["Ann <ann@example.com>", "bob@example.com"]), reason="reminder"), wait=wait
    )
    assert World(table).deliver() == Deliveries(sent=1)
    [seen] = smtp.mails
    assert (seen.sender, seen.receivers) == ("mesh@example.com", ("ann@example.com", "bob@example.com"))
    message = seen.message
    assert message["subject"] == "Reminder: Grüße: 700 €?"
    assert message["to"] == "Ann <ann@example.com>, bob@example.com"
    assert message["message-id"] == "<notice-1@example.com>"
    assert message["date"].datetime == NOW
    assert message.get_content_type() == "text/plain"
    text = seen.text
    for part in (
        "Grüße: 700 €?",
        "Order **A-17** is *old*.",
        '"order": "A-17"',
        "Who may decide: ann, group:finance (2 of them; in this order)",
        "Until: 2026-07-01 16:00:00 UTC",
        "    agentmesh approvals approve 1a2b3c4d --data JSON\n",
        "job agentmesh_decide",
        "the data has amount (number)",
        "The form begins as:",
        f"Run {wait.run_id}, step review",
    ):
        assert part in text


def test_a_title_cannot_add_headers_or_receivers(smtp: FakeSmtp) -> None:
    wait = a_wait(title="Pay?\r\nBcc: eve@example.com\r\n\r\nhello\x00")
    assert World(Table(a_notice(mail(smtp)), wait=wait)).deliver() == Deliveries(sent=1)
    [seen] = smtp.mails
    assert seen.message["subject"] == "Decision wanted: Pay? Bcc: eve@example.com hello"
    assert seen.message["bcc"] is None
    assert seen.receivers == ("ann@example.com",)


@pytest.mark.parametrize(
    "address",
    ["ann@example.com, eve@example.com", "ann@example.com\r\nBcc: eve@example.com", "ann", "a b@c", ""],
)
def test_addresses_that_are_none(smtp: FakeSmtp, address: str) -> None:
    table = Table(a_notice(mail(smtp, to="{{ approval.data }}")), wait=a_wait(data=address))
    assert World(table).deliver() == Deliveries(failed=1)
    assert "not one address" in table.rows["notice-1"].error
    assert smtp.mails == []


def test_receivers_and_subject_are_templates(smtp: FakeSmtp) -> None:
    config = mail(
        smtp, to="{{ approval.assignees }}", subject="{{ approval.reason }}: {{ approval.data.order }}"
    )
    wait = a_wait(assignees=("ann@example.com", "bob@example.com"))
    assert World(Table(a_notice(config), wait=wait)).deliver() == Deliveries(sent=1)
    [seen] = smtp.mails
    assert seen.receivers == ("ann@example.com", "bob@example.com")
    assert seen.message["subject"] == "opened: A-17"


def test_a_busy_server_gets_the_same_message_again(smtp: FakeSmtp) -> None:
    smtp.script(DATA="451 4.3.0 busy, come back")
    smtp.script(MAIL="")
    table = Table(a_notice(mail(smtp)))
    world = World(table)
    assert world.deliver() == Deliveries(failed=1)
    world.clock.pass_(BACKOFF_S[0])
    assert world.deliver() == Deliveries(failed=1)
    world.clock.pass_(BACKOFF_S[1])
    assert world.deliver() == Deliveries(sent=1)
    [seen] = smtp.mails
    assert seen.message["message-id"] == "<notice-1@example.com>"


def test_a_server_that_says_nothing_is_left(smtp: FakeSmtp) -> None:
    smtp.script(EHLO="slow")
    table = Table(a_notice(mail(smtp, timeout_s=0.3)))
    assert World(table).deliver() == Deliveries(failed=1)
    assert "SMTP server 127.0.0.1" in table.rows["notice-1"].error
    assert smtp.mails == []


def test_a_receiver_that_is_refused_beside_others_is_named(smtp: FakeSmtp) -> None:
    smtp.refused_receivers.add("eve@example.com")
    world = World(Table(a_notice(mail(smtp, to=["ann@example.com", "eve@example.com"]))))
    assert world.deliver() == Deliveries(sent=1)
    assert "eve@example.com" in world.lines[0][1]
    alone = Table(a_notice(mail(smtp, to="eve@example.com")))
    assert World(alone).deliver() == Deliveries(failed=1)
    assert "eve@example.com with status 550" in alone.rows["notice-1"].error
    assert "nobody here" not in alone.rows["notice-1"].error


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl makes the certificate")
    folder = tmp_path_factory.mktemp("tls")
    key, cert, both = folder / "key.pem", folder / "cert.pem", folder / "both.pem"
    made = subprocess.run(
        [
            *(
                openssl,
                "req",
                "-x509",
                "-newkey",
                "rsa:2048",
                "-nodes",
                "-days",
                "2",
                "-subj",
                "/CN=localhost",
            ),
            *("-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)),
        ],
        capture_output=True,
        text=True,
    )
    assert made.returncode == 0, made.stderr
    both.write_text(key.read_text() + cert.read_text())
    return both


@pytest.mark.parametrize("is_tls", [False, True], ids=["starttls", "tls"])
def test_login_over_tls(certificate: Path, monkeypatch: pytest.MonkeyPatch, is_tls: bool) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    with FakeSmtp(user="mesh", password=PASSWORD, tls=certificate, is_tls=is_tls) as smtp:
        login = {"user": "mesh", "password": "{{ secret('MAIL_PASSWORD') }}"}
        table = Table(a_notice(mail(smtp, starttls=True, tls=is_tls, **login)))
        assert World(table).deliver() == Deliveries(sent=1), table.rows
        [seen] = smtp.mails
        assert (seen.is_encrypted, seen.user) == (True, "mesh")
        # Nothing but the greeting was said in clear.
        assert smtp.commands[: 1 if is_tls else 2] == (["EHLO"] if is_tls else ["EHLO", "STARTTLS"])


def test_a_password_is_not_sent_in_clear_where_starttls_is_asked_for() -> None:
    with FakeSmtp(user="mesh", password=PASSWORD) as smtp:
        login = {"user": "mesh", "password": "{{ secret('MAIL_PASSWORD') }}"}
        table = Table(a_notice(mail(smtp, starttls=True, **login)))
        assert World(table).deliver() == Deliveries(failed=1)
        assert "STARTTLS" in table.rows["notice-1"].error
        assert "AUTH" not in smtp.commands


def test_a_certificate_that_nobody_vouches_for_is_refused(certificate: Path) -> None:
    with FakeSmtp(tls=certificate) as smtp:
        table = Table(a_notice(mail(smtp, starttls=True)))
        assert World(table).deliver() == Deliveries(failed=1)
        assert "CERTIFICATE_VERIFY_FAILED" in table.rows["notice-1"].error
        assert smtp.mails == []


# Log, and all notifiers together ----------------------------------------------------------------------------------


def test_the_log_says_one_line() -> None:
    world = World(
        Table(
            a_notice({"type": "log", "level": "warning"}, reason="escalated"), wait=a_wait(title="Pay\n700?")
        )
    )
    assert world.deliver() == Deliveries(sent=1)
    [(level, line)] = world.lines
    assert level == "warning"
    assert line.startswith("Escalated to you: Pay 700? (approval 1a2b3c4d of run 0a0b0c0d-")
    assert line.endswith("agentmesh approvals approve 1a2b3c4d")


def test_who_is_told_of_a_delegation_sees_by_whom_and_to_whom() -> None:
    delegation = Delegation(by="ann", to="dora", comment="on holiday", at=NOW)
    wait = a_wait(title="Pay?", assignees=("ann",), delegations=(delegation,))
    message = NoticeMessage.of(a_notice({"type": "log"}, reason="delegated"), wait)
    assert message.subject == "Vote delegated: Pay?"
    assert "Who may decide: ann\nDelegated: by ann to dora\n" in message.text
    assert message.approval["delegations"] == [
        {"by": "ann", "to": "dora", "comment": "on holiday", "at": NOW.isoformat()}
    ]


class Failing(Notifier[NotifyConfig]):
    name = "failing"
    config_model = NotifyConfig

    async def send(self, config: NotifyConfig, message: NoticeMessage, context: NotifyContext) -> None:
        raise RuntimeError(f"broken {context.secrets.of_deployment('HOOK_KEY')}\nsecond line")


def test_one_notifier_does_not_stop_another(server: FakeHttp, smtp: FakeSmtp) -> None:
    table = Table(
        a_notice({"type": "failing"}, "a"),
        a_notice({"type": "no-such"}, "b"),
        a_notice({"type": "webhook"}, "c"),
        a_notice(hook(server.url + "/slow/60", timeout_s=0.3), "d"),
        a_notice(hook(server.url + "/echo"), "e"),
        a_notice(mail(smtp), "f"),
        a_notice({"type": "log"}, "g"),
        a_notice({"type": "log"}, "other", project="other"),
        a_notice({"type": "log"}, "later", next_at=NOW + timedelta(seconds=1)),
    )

    def find(name: str) -> Notifier[Any]:
        return Failing() if name == "failing" else registry.find_notifier(name)

    world = World(table)
    assert world.deliver(notifiers=find) == Deliveries(sent=3, failed=4)
    assert {row.id for row in table.rows.values() if row.sent_at} == {"e", "f", "g"}
    assert table.rows["a"].error == "RuntimeError: broken *** second line"
    assert "there is no notifier 'no-such' (known: log, webhook, email)" in table.rows["b"].error
    assert "url" in table.rows["c"].error
    assert table.wait.status is WaitStatus.OPEN


def test_a_notice_is_taken_before_it_is_sent(server: FakeHttp) -> None:
    table = Table(a_notice(hook(server.url + "/echo")))

    class Rival(Table):
        def take(self, notice_id: str, /, *, now: datetime, until: datetime) -> bool:
            assert super().take(notice_id, now=now, until=until)
            return False

    rival = Rival(*table.rows.values())
    assert World(rival).deliver() == Deliveries()
    assert server.calls == []
    World(table).deliver()
    assert table.taken == [("notice-1", NOW + timedelta(seconds=TAKEN_S))]


def test_a_delivery_that_could_not_be_written_down_is_made_again(server: FakeHttp) -> None:
    # The second one is still on its way when the first cannot be written down.
    table = Table(a_notice(hook(server.url + "/echo"), "a"), a_notice(hook(server.url + "/slow/0.5"), "b"))
    table.broken.add("a")
    world = World(table)
    with pytest.raises(StoreError):
        world.deliver()
    assert table.rows["b"].sent_at == NOW
    table.broken.clear()
    assert world.deliver() == Deliveries()
    world.clock.pass_(TAKEN_S)
    assert world.deliver() == Deliveries(sent=1)
    assert sorted(call.headers["x-agentmesh-delivery"] for call in server.calls) == ["a", "a", "b"]


def test_a_notice_whose_attempts_all_were_cut_off_is_given_up(server: FakeHttp) -> None:
    table = Table(a_notice(hook(server.url + "/echo", max_attempts=2), attempts=2))
    assert World(table).deliver() == Deliveries(given_up=1)
    assert server.calls == []
    assert table.rows["notice-1"].next_at is None


@pytest.mark.parametrize("status", [WaitStatus.DECIDED, WaitStatus.CANCELED, WaitStatus.EXPIRED])
def test_nobody_is_told_of_a_closed_approval(server: FakeHttp, status: WaitStatus) -> None:
    table = Table(a_notice(hook(server.url + "/echo")), wait=a_wait(status=status))
    assert World(table).deliver() == Deliveries(dropped=1)
    assert server.calls == []
    assert table.rows["notice-1"].next_at is None
    assert status.value in table.rows["notice-1"].error


def test_over_the_real_store(store: Store, server: FakeHttp) -> None:
    server.script({"status": 500})
    opened = datetime.now(timezone.utc)
    hours = {"created_at": opened, "deadline_at": None, "remind_at": opened + timedelta(hours=1)}
    wait = a_wait(notify=[hook(server.url + "/script"), {"type": "log"}], **hours)

    async def open_it() -> None:
        await store.journal.bind_run(a_run(wait.run_id), "dagster-1")
        step = a_step("review", wait.run_id, node_type="human", status=StepStatus.WAITING, finished_at=None)
        await store.journal.record([Entry(step=step, opened=(wait,))])

    asyncio.run(open_it())
    world = World(store, journal=store.journal)
    # The store's own clock says when a notice is due first.
    world.clock.at = datetime.now(timezone.utc)
    assert world.deliver() == Deliveries(sent=1, failed=1)
    world.clock.pass_(BACKOFF_S[0] - 1)
    assert world.deliver() == Deliveries()
    world.clock.pass_(1)
    assert world.deliver() == Deliveries(sent=1)
    first, second = server.calls
    assert first.headers["x-agentmesh-delivery"] == second.headers["x-agentmesh-delivery"]
    assert KEY not in repr(store.notices.list(wait.id))
    events = [event for event in store.runs.events(wait.run_id) if event.type == "approval.notified"]
    assert sorted(event.payload["notifier"] for event in events) == ["log", "webhook"]
    world.clock.pass_(3600)
    store.waits.settle_due("default", world.clock.at)
    assert world.deliver() == Deliveries(sent=2)
    assert verified(server.calls[-1])["type"] == "approval.reminder"


# Plugins ----------------------------------------------------------------------------------------------------------


class PagerConfig(NotifyConfig):
    number: str


PAGED: list[tuple[str, str]] = []


class Pager(Notifier[PagerConfig]):
    name = "pager"
    config_model = PagerConfig

    async def send(self, config: PagerConfig, message: NoticeMessage, context: NotifyContext) -> None:
        PAGED.append((config.number, message.subject))


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Entry points, by name; the test fills it."""
    offered: dict[str, str] = {}

    def entry_points(*, group: str) -> list[metadata.EntryPoint]:
        assert group == GROUP_NOTIFIERS
        return [metadata.EntryPoint(name, value, group) for name, value in offered.items()]

    registry.find_notifier.cache_clear()
    monkeypatch.setattr(registry, "entry_points", entry_points)
    yield offered
    registry.find_notifier.cache_clear()


def test_a_plugin_delivers(plugins: dict[str, str]) -> None:
    plugins["pager"] = f"{__name__}:Pager"
    PAGED.clear()
    assert World(Table(a_notice({"type": "pager", "number": "112"}))).deliver() == Deliveries(sent=1)
    assert PAGED == [("112", "Decision wanted: Refund of 700 EUR?")]
    assert registry.notifier_configs() == {**BUILTIN_NOTIFY_CONFIGS, "pager": PagerConfig}


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("pager", "no_such_module:Pager", "cannot be loaded: ModuleNotFoundError"),
        ("pager", f"{__name__}:PagerConfig", "no subclass of Notifier"),
        ("log", f"{__name__}:Pager", "takes a name that is taken"),
    ],
)
def test_a_bad_plugin_is_named(plugins: dict[str, str], name: str, value: str, problem: str) -> None:
    plugins[name] = value
    with pytest.raises(AgentMeshError, match=problem) as caught:
        registry.find_notifier(name)
    assert caught.value.code == "bad-plugin"
    with pytest.raises(AgentMeshError, match=problem):
        registry.notifier_configs()
    table = Table(a_notice({"type": name}, "a"), a_notice({"type": "email"}, "b"))
    World(table).deliver()
    assert problem in table.rows["a"].error
    assert "bad-plugin" not in table.rows["b"].error
