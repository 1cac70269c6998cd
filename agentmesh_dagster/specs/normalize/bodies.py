"""Finds the bodies in a raw object, whatever spelling its keys have, and names the places in them."""

from __future__ import annotations

from collections.abc import Callable

from pydantic import BaseModel

from agentmesh_dagster.specs.base import Body
from agentmesh_dagster.specs.documents import BodySpec
from agentmesh_dagster.specs.fields import JsonObject, accepted_keys, as_object, model_of
from agentmesh_dagster.specs.normalize.keys import known_key
from agentmesh_dagster.specs.problems import child_path

BODY_KEY = "body"
"""The field of a container that has one body."""


def map_bodies(
    model: type[BaseModel],
    raw: JsonObject,
    path: str,
    change: Callable[[JsonObject, str, tuple[str, ...]], JsonObject],
) -> JsonObject:
    """A raw object with each of its bodies changed; bodies of nodes in a body are left to `change`.

    Args:
        model: What the object wants to be.
        raw: The object.
        path: Its path.
        change: Gets a body, its path, and what it is called among the bodies of its owner: nothing for `body`, else a
            branch's name, or the field's.
    """
    keys = accepted_keys(model)
    done = dict(raw)
    for key, value in raw.items():
        name = known_key(model, key)
        info = keys.get(name) if name is not None else None
        if name is None or info is None or not any(isinstance(mark, Body) for mark in info.metadata):
            continue
        place = child_path(path, key)
        if model_of(info.annotation, value) is BodySpec:
            body = as_object(value)
            if body is not None:
                done[key] = change(body, place, () if name == BODY_KEY else (name,))
            continue
        branches = as_object(value)
        if branches is not None:
            done[key] = {
                branch: given
                if (body := as_object(given)) is None
                else change(body, child_path(place, branch), (branch,))
                for branch, given in branches.items()
            }
    return done
