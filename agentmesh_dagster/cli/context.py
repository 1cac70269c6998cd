"""What commands share: the project's folder and store, and how results are printed."""

from __future__ import annotations

import getpass
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from agentmesh_dagster.constants import ENV_DATABASE_URL, KINDS
from agentmesh_dagster.errors import NotFound
from agentmesh_dagster.records import Json
from agentmesh_dagster.settings import database_url

if TYPE_CHECKING:
    from agentmesh_dagster.authoring import Authoring
    from agentmesh_dagster.orchestration.agentmesh import AgentMesh
    from agentmesh_dagster.specs.problems import Problem
    from agentmesh_dagster.store import Store

CommandT = TypeVar("CommandT", bound=Callable[..., Any])


class _Kind(click.Choice[str]):
    """The kinds; what is near one is suggested, and for a slug in its place the whole command."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value in self.choices:
            return str(value)
        from agentmesh_dagster.specs.problems import nearest

        near = nearest(str(value)[:120], self.choices)
        takes_slug = ctx is not None and any(each.name == "slug" for each in ctx.command.params)
        if near is not None:
            hint = f"did you mean {near!r}?"
        elif ctx is not None and takes_slug:
            hint = f"a slug stands behind its kind: `{ctx.command_path} workflow {value}`?"
        else:
            hint = f"known are {', '.join(self.choices)}"
        raise click.BadParameter(f"{value!r} is not a kind; {hint}", ctx=ctx, param=param)


KIND = _Kind(KINDS)

_PLACES = 5

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for machines.")


def example(line: str) -> str:
    """The end of a command's help: one line to copy."""
    return f"\b\nExample:\n  {line}"


@dataclass(frozen=True)
class CliContext:
    """The project that a command works on."""

    root: Path
    project: str

    def store_to_read(self) -> Store:
        """The project's store for a command that only reads: where there is no database, none is made.

        Raises:
            StoreError: See `store`.
        """
        from agentmesh_dagster.store import open_store

        file = self._sqlite_file()
        # A place that somebody named by mistake is an error, and not an empty project.
        is_expected = file is not None and (ENV_DATABASE_URL not in os.environ or file.parent.is_dir())
        if file is None or file.exists() or not is_expected:
            return self.store()
        context = click.get_current_context().find_root()
        folder = context.with_resource(TemporaryDirectory(prefix="agentmesh-"))
        return context.with_resource(open_store(f"sqlite:///{folder}/empty.db"))

    def _sqlite_file(self) -> Path | None:
        url = database_url(self.root)
        return Path(url.removeprefix("sqlite:///")) if url.startswith("sqlite:///") else None

    def store(self) -> Store:
        """The project's store; opened once per process.

        Raises:
            StoreError: The database cannot be reached, or its schema does not fit.
        """
        from agentmesh_dagster.store import open_store

        context = click.get_current_context().find_root()
        if "store" not in context.meta:
            file = self._sqlite_file()
            is_new = file is not None and not file.exists()
            context.meta["store"] = context.with_resource(open_store(database_url(self.root)))
            if is_new:
                click.echo(f"note: made a new, empty database: {file}", err=True)
        return context.meta["store"]

    def check_project(self, store: Store | None = None) -> None:
        """Where nothing was found: a project that does not exist is an error, and not an empty one.

        Raises:
            NotFound: There is no such project (code `no-project`).
        """
        if all(project.slug != self.project for project in (store or self.store()).catalog.list_projects()):
            raise NotFound(
                f"there is no project {self.project!r}: `agentmesh project list` shows those that are, "
                f"`agentmesh project create {self.project}` makes it",
                code="no-project",
            )

    def authoring(self, store: Store | None = None, *, resources: AgentMesh | None = None) -> Authoring:
        """Reading, checking, storing and publishing documents, as this user.

        Args:
            store: Default: `store()`.
            resources: What documents may use and call; without it, that is not checked.
        """
        from agentmesh_dagster.authoring import Authoring

        if str(self.root) not in sys.path:
            # Functions of documents are looked up where runs find them, too.
            sys.path.append(str(self.root))
        return Authoring(
            store or self.store(),
            self.project,
            actor=actor(),
            deployment=resources and resources.deployment,
            function_modules=resources.function_modules if resources else (),
        )

    def resources(self) -> AgentMesh:
        """What documents may use and call, as the project's `resources/__init__.py` says.

        Raises:
            DefinitionError: The file cannot be loaded (code `resources`).
        """
        from agentmesh_dagster.orchestration.agentmesh import agentmesh_of_folder

        return agentmesh_of_folder(self.root)


pass_cli = click.make_pass_decorator(CliContext)


def actor() -> str:
    """Who runs the command, for the audit."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "unknown"


def print_json(value: Json) -> None:
    """One JSON document on stdout."""
    click.echo(json.dumps(value, ensure_ascii=False, indent=2, default=_jsonable))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]], *, empty: str) -> None:
    """A table on a terminal; tab-separated lines into a pipe; `empty` where there are no rows."""
    if not rows:
        click.echo(empty, err=True)
        return
    if not sys.stdout.isatty():
        click.echo("\t".join(columns))
        for row in rows:
            click.echo("\t".join(_one_line(cell(value)) for value in row))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell(value)) for value in row))
    Console().print(table)


def print_facts(facts: Mapping[str, object]) -> None:
    """Names and values, one per line; what is not known (None or empty) is left out."""
    known = {name: value for name, value in facts.items() if value is not None and value not in ("", ())}
    width = max((len(name) for name in known), default=0)
    for name, value in known.items():
        click.echo(f"{click.style(name.ljust(width), dim=True)}  {cell(value)}")


def print_warnings(warnings: Iterable[tuple[str, Problem]]) -> None:
    """Warnings on stderr, each with the document that it speaks of; what is said of many nodes is said once."""
    by_source: dict[str, list[Problem]] = {}
    for source, problem in warnings:
        by_source.setdefault(source, []).append(problem)
    for source, problems in by_source.items():
        for line in problem_lines(problems):
            click.secho(f"{source}: {line}", err=True, fg="yellow")


def problem_lines(problems: Iterable[Problem]) -> list[str]:
    """Problems, a line each; missing timeouts come last, in one line, since most nodes of a first draft have none."""
    every = list(problems)
    common = [problem for problem in every if problem.code == "timeout-missing"]
    if len(common) < 2:
        return [str(problem) for problem in every]
    lines = [str(problem) for problem in every if problem.code != "timeout-missing"]
    places = [problem.path.removesuffix(".timeout_s") for problem in common]
    shown = ", ".join(places[:_PLACES]) + (", ..." if len(places) > _PLACES else "")
    first = common[0]
    return [
        *lines,
        f"{first.severity} {first.code}: {len(places)} nodes may wait for ever ({shown}). {first.mend}.",
    ]


def _one_line(text: str) -> str:
    """The text without what would end its cell; spaces in front are kept, for they show depth."""
    return text.replace("\t", " ").replace("\r", " ").replace("\n", " ")


def cell(value: object) -> str:
    """A value as people read it: dates to the second, nothing as `-`."""
    from datetime import datetime

    if value is None or value == "":
        return "-"
    if isinstance(value, datetime):
        return value.astimezone().strftime("%Y-%m-%d %H:%M:%S")
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(str(item) for item in value) or "-"  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType] - any value
    return str(value)


def _jsonable(value: object) -> Json:
    from datetime import datetime

    if isinstance(value, datetime):
        return value.isoformat()
    raise TypeError(f"{type(value).__name__} is no JSON")


def read_json_option(text: str | None, option: str) -> Json:
    """A JSON option: the text itself, `@FILE`, or `-` for standard input; None stands for `{}`.

    Raises:
        click.BadParameter: No such file, or no JSON.
    """
    if text is None:
        return {}
    source, content = option, text
    if text == "-" or text.startswith("@"):
        source = "standard input" if text == "-" else repr(text[1:])
        try:
            data = sys.stdin.buffer.read() if text == "-" else Path(text[1:]).read_bytes()
            content = data.decode("utf-8-sig")
        except OSError as error:
            raise click.BadParameter(f"cannot read {source}: {error.strerror}", param_hint=option) from None
        except UnicodeDecodeError:
            raise click.BadParameter(f"{source} is not UTF-8 text", param_hint=option) from None
    try:
        return json.loads(content, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise click.BadParameter(f"{source} holds no JSON: {error}", param_hint=option) from None


def _finite(word: str) -> float:
    number = float(word)
    return number if math.isfinite(number) else _refuse(word)


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")
