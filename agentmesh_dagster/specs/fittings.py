"""Whether data fits the schema of a wait: evaluated outside transactions, and only looked up inside of one."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from agentmesh_dagster.errors import DefinitionError
from agentmesh_dagster.records import Json
from agentmesh_dagster.specs.schema import fill_and_coerce, validate_value

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Fitted:
    """What data came to under a schema."""

    data: Json
    """With the schema's defaults and types."""
    issues: tuple[dict[str, str], ...]
    """`path` and `message` of all that does not fit; empty where it fits."""


Fit = Callable[[Json, Json], Fitted]
"""From a schema and data to what the data came to."""


class NotEvaluated(Exception):
    """A transaction asks for what has not been evaluated yet: it is rolled back, and begun again afterwards."""

    def __init__(self, schema: Json, data: Json) -> None:
        super().__init__("evaluate outside the transaction")
        self.schema = schema
        self.data = data


def fit_now(schema: Json, data: Json) -> Fitted:
    """Evaluates a document's schema: never called while a transaction is open."""
    try:
        filled = fill_and_coerce(schema, data)
        issues = validate_value(schema, filled)
    except DefinitionError as error:
        # Stored before its schema was refused at import.
        return Fitted(data, ({"path": "$", "message": error.message},))
    return Fitted(filled, tuple({"path": issue.path, "message": issue.message} for issue in issues))


class Fittings:
    """What was evaluated for one write, by schema and data: what has changed meanwhile is evaluated anew."""

    def __init__(self) -> None:
        self._known: dict[str, Fitted] = {}

    def look_up(self, schema: Json, data: Json) -> Fitted:
        """What was evaluated.

        Raises:
            NotEvaluated: Nothing was, of that schema and that data.
        """
        found = self._known.get(_key(schema, data))
        if found is None:
            raise NotEvaluated(schema, data)
        return found

    def evaluate(self, asked: NotEvaluated) -> None:
        """Evaluates what a transaction asked for."""
        self._known[_key(asked.schema, asked.data)] = fit_now(asked.schema, asked.data)

    def repeated(self, attempt: Callable[[Fit], T]) -> T:
        """Calls what opens a transaction, until all that it asks for is evaluated."""
        while True:
            try:
                return attempt(self.look_up)
            except NotEvaluated as asked:
                self.evaluate(asked)


def _key(schema: Json, data: Json) -> str:
    return json.dumps([schema, data])
