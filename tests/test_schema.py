"""JSON Schema: schemas taken and refused, issues of values, coercion, instances, and what fits what."""

from __future__ import annotations

import copy
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentmesh_dagster.errors import DefinitionError
from agentmesh_dagster.specs.schema import (
    check_schema,
    fill_and_coerce,
    is_static_subset,
    smallest_instance,
    validate_value,
)

ORDER = {
    "type": "object",
    "required": ["order_id", "amount"],
    "additionalProperties": False,
    "properties": {
        "order_id": {"type": "string", "pattern": "^[A-Z0-9-]{4,32}$"},
        "amount": {"type": "number", "minimum": 0},
        "items": {"type": "array", "items": {"$ref": "#/$defs/item"}},
        "note": {"type": ["string", "null"], "maxLength": 5},
        "size": {"enum": ["s", "m"]},
    },
    "$defs": {
        "item": {
            "type": "object",
            "required": ["sku"],
            "properties": {"sku": {"type": "string"}, "n": {"type": "integer"}},
        }
    },
}


@pytest.mark.parametrize(
    "schema",
    [
        {},
        True,
        ORDER,
        {"type": "string", "pattern": r"^([a-z]+-)*[a-z]+$"},
        {"type": "string", "pattern": r"^(\w+\.)+\w+$"},
        {"properties": {"$ref": {"type": "string"}, "next": {"$ref": "#"}}},
        {"const": {"$ref": "http://example.com"}},
        {"$id": "https://example.com/x", "$ref": "#/$defs/a", "$defs": {"a": {"type": "null"}}},
        {"anyOf": [{"type": "null"}, {"properties": {"child": {"$ref": "#"}}}]},
    ],
)
def test_schemas_that_are_taken(schema: object) -> None:
    assert check_schema(schema) == []


@pytest.mark.parametrize(
    ("schema", "issue"),
    [
        ("x", "$: must be an object, is string"),
        ({"type": "strng"}, "type: "),
        ({"properties": {"amount": {"minimum": "0"}}}, "properties.amount.minimum: must be of type number"),
        ({"required": "a"}, "required: must be of type array"),
        ({"properties": {"a": {"items": [{}]}}}, "properties.a.items: "),
        (
            {"properties": {"a": {"$ref": "https://example.com/s.json"}}},
            'properties.a["$ref"]: refers to "https',
        ),
        ({"$ref": "other.json#/a"}, "only local references"),
        ({"$ref": "#/$defs/none"}, "which is not in this schema"),
        ({"$ref": "#"}, "refers back to itself"),
        (
            {
                "$ref": "#/$defs/a",
                "$defs": {"a": {"allOf": [{"$ref": "#/$defs/b"}]}, "b": {"$ref": "#/$defs/a"}},
            },
            "refers back",
        ),
        (
            {
                "$ref": "#/$defs/a0",
                "$defs": {f"a{n}": {"allOf": [{"$ref": f"#/$defs/a{n + 1}"}] * 2} for n in range(40)}
                | {"a40": {}},
            },
            "stands for more than",
        ),
        ({"pattern": "("}, "pattern: is not a regular expression"),
        ({"patternProperties": {"(": {}}}, "is not a regular expression"),
        ({"pattern": "a" * 2000}, "longer than 1000"),
        ({"pattern": "^(?!x)a$"}, "uses negative look-ahead (?!...)"),
        ({"items": {"pattern": r"(a)\1"}}, r"items.pattern: the regular expression uses a back reference \1"),
        ({"properties": {"a": {"$dynamicRef": "#x"}}}, "$dynamicRef is not supported"),
    ],
)
def test_schemas_that_are_refused(schema: object, issue: str) -> None:
    issues = check_schema(schema)
    assert any(issue in str(found) for found in issues), issues


def test_a_schema_that_is_nested_too_deeply() -> None:
    schema: dict[str, object] = {}
    for _ in range(5000):
        schema = {"items": schema}
    assert "levels deep" in str(check_schema(schema)[0])


@pytest.mark.parametrize(
    ("value", "issues"),
    [
        ({"order_id": "AB-12", "amount": 5}, []),
        ({"amount": -5}, ["amount: must be >= 0, is -5", "order_id: is required"]),
        (
            {"order_id": "x", "amount": 1},
            ['order_id: must match the regular expression "^[A-Z0-9-]{4,32}$", is "x"'],
        ),
        ({"order_id": "AB-12", "amount": "5"}, ['amount: must be of type number, is string "5"']),
        ({"order_id": "AB-12", "amount": True}, ["amount: must be of type number, is boolean true"]),
        ({"order_id": "AB-12", "amount": None}, ["amount: must be of type number, is null"]),
        (
            {"order_id": "AB-12", "amount": 1, "items": [{"sku": "a"}, {}, {"sku": 1, "n": 1.5}]},
            [
                "items[1].sku: is required",
                "items[2].n: must be of type integer, is number 1.5",
                "items[2].sku: must be of type string, is integer 1",
            ],
        ),
        (
            {"order_id": "AB-12", "amount": 1, "oops": 1, "weird key": 2},
            [
                "oops: is not a known field; known: amount, items, note, order_id, size",
                '["weird key"]: is not a known field; known: amount, items, note, order_id, size',
            ],
        ),
        (
            {"order_id": "AB-12", "amount": 1, "note": "too long"},
            ["note: must have at most 5 characters, has 8"],
        ),
        (
            {"order_id": "AB-12", "amount": 1, "note": None, "size": "l"},
            ['size: must be one of "s", "m", is "l"'],
        ),
        ([], ["$: must be of type object, is array of 0"]),
    ],
)
def test_messages_name_the_field(value: object, issues: list[str]) -> None:
    assert sorted(str(issue) for issue in validate_value(ORDER, value)) == sorted(issues)


def test_messages_are_bounded() -> None:
    schema = {"type": "array", "items": {"type": "integer"}}
    issues = validate_value(schema, ["x" * 100_000] * 5000)
    assert len(issues) == 50
    assert all(len(str(issue)) < 200 for issue in issues)
    assert [issue.path for issue in issues[:12]] == [f"[{i}]" for i in range(12)]
    assert len(str(validate_value({"enum": [[1] * 1000] * 500}, "y" * 100_000)[0])) < 600


def test_alternatives_say_which_is_nearest() -> None:
    schema = {"anyOf": [{"type": "object", "required": ["a"]}, {"type": "string"}]}
    assert "none of the 2 allowed forms" in str(validate_value(schema, {"b": 1})[0])
    assert "more than one" in str(validate_value({"oneOf": [{"type": "number"}, {"minimum": 0}]}, 3)[0])


@pytest.mark.parametrize(
    ("format_name", "good", "bad"),
    [
        ("date", "2024-02-29", "2023-02-29"),
        ("date-time", "2024-01-01T10:00:00Z", "2024-13-01T10:00:00Z"),
        ("email", "a@example.com", "nobody"),
        ("uuid", "00000000-0000-4000-8000-000000000000", "x"),
    ],
)
def test_formats(format_name: str, good: str, bad: str) -> None:
    schema = {"type": "string", "format": format_name}
    assert validate_value(schema, good) == []
    assert "format" in str(validate_value(schema, bad)[0])


def test_values_and_schemas_that_recurse() -> None:
    schema = {"type": "object", "properties": {"next": {"$ref": "#"}}, "additionalProperties": False}
    assert validate_value(schema, {"next": {"next": {}}}) == []
    assert str(validate_value(schema, {"next": {"nxt": 1}})[0]).startswith("next.nxt: is not a known field")
    deep: dict[str, object] = {}
    for _ in range(3000):
        deep = {"next": deep}
    assert fill_and_coerce(schema, deep) is deep
    assert str(validate_value(schema, deep)[0]) == "$: is nested too deeply"
    assert (
        len(str(validate_value({"additionalProperties": {"type": "string"}}, {"k" * 10_000: 10**4000})[0]))
        < 200
    )


@pytest.mark.parametrize(
    ("schema", "value", "expected"),
    [
        ({"type": "integer"}, "5", 5),
        ({"type": "integer"}, " -12 ", -12),
        ({"type": "integer"}, 5.0, 5),
        ({"type": "integer"}, 5.5, 5.5),
        ({"type": "integer"}, "5.0", 5),
        ({"type": "integer"}, "5.5", "5.5"),
        ({"type": "integer"}, "five", "five"),
        ({"type": "integer"}, "05", "05"),
        ({"type": "integer"}, True, True),
        ({"type": "number"}, "1.5e2", 150.0),
        ({"type": "number"}, "nan", "nan"),
        ({"type": "number"}, "1e999", "1e999"),
        ({"type": "boolean"}, "true", True),
        ({"type": "boolean"}, "False", False),
        ({"type": "boolean"}, 1, 1),
        ({"type": "string"}, 5, "5"),
        ({"type": "string"}, 5.5, 5.5),
        ({"type": "string"}, True, True),
        ({"type": ["integer", "null"]}, "5", 5),
        ({"type": ["integer", "null"]}, None, None),
        ({"type": ["string", "integer"]}, "5", "5"),
        ({"type": ["number", "string"]}, 5, 5),
        ({"enum": [1, 2]}, "2", 2),
        ({}, "5", "5"),
        ({"type": "array", "items": {"type": "integer"}}, ["1", 2, "x"], [1, 2, "x"]),
        ({"$ref": "#/$defs/n", "$defs": {"n": {"type": "integer"}}}, "7", 7),
        (
            {"anyOf": [{"type": "null"}, {"type": "object", "properties": {"n": {"type": "integer"}}}]},
            {"n": "1"},
            {"n": 1},
        ),
        ({"properties": {"a": {"default": 1}, "b": {"default": [1]}}}, {"a": 0}, {"a": 0, "b": [1]}),
        (
            {"properties": {"o": {"default": {}, "properties": {"x": {"default": 3}}}}},
            {},
            {"o": {"x": 3}},
        ),
        ({"properties": {"o": {"properties": {"x": {"default": 3}}}}}, {"o": {}}, {"o": {"x": 3}}),
        ({"properties": {"o": {"properties": {"x": {"default": 3}}}}}, {}, {}),
        (
            {"allOf": [{"properties": {"a": {"default": 1}}}, {"properties": {"b": {"type": "integer"}}}]},
            {"b": "2"},
            {"b": 2, "a": 1},
        ),
        ({"additionalProperties": {"type": "integer"}}, {"k": "1"}, {"k": 1}),
    ],
)
def test_fill_and_coerce(schema: object, value: object, expected: object) -> None:
    before = copy.deepcopy((schema, value))
    result = fill_and_coerce(schema, value)
    assert result == expected
    assert type(result) is type(expected)
    assert (schema, value) == before


def test_defaults_are_not_shared_with_the_schema() -> None:
    schema = {"properties": {"a": {"default": []}}}
    fill_and_coerce(schema, {})["a"].append(1)
    assert fill_and_coerce(schema, {}) == {"a": []}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (
            {
                "type": "object",
                "required": ["risk"],
                "properties": {"risk": {"enum": ["low", "high"]}, "x": {}},
            },
            {"risk": "low"},
        ),
        ({"const": [1]}, [1]),
        ({"type": "string", "minLength": 3}, "xxx"),
        ({"type": "string"}, ""),
        ({"type": "integer", "minimum": 5}, 5),
        ({"type": "integer", "exclusiveMinimum": 5, "multipleOf": 4}, 8),
        ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, 0.5),
        ({"type": "integer", "maximum": -3}, -3),
        ({"type": "boolean"}, False),
        ({"type": ["null", "string"]}, None),
        ({"type": "array", "minItems": 2, "items": {"type": "integer"}}, [0, 0]),
        ({"type": "array", "minItems": 3, "uniqueItems": True, "items": {"type": "integer"}}, [0, 1, 2]),
        ({"anyOf": [{"type": "integer", "minimum": 2}, {"type": "null"}]}, 2),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}, {"type": "string"}]}, ""),
        ({"allOf": [{"required": ["a"]}, {"properties": {"a": {"type": "integer"}}}]}, {"a": 0}),
        (
            {
                "$ref": "#/$defs/p",
                "$defs": {
                    "p": {"type": "object", "required": ["q"], "properties": {"q": {"$ref": "#/$defs/q"}}},
                    "q": {"type": "string", "format": "date"},
                },
            },
            {"q": "2000-01-01"},
        ),
        (
            {
                "type": "object",
                "required": ["child"],
                "properties": {"child": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
            },
            {"child": None},
        ),
        ({"type": "object", "minProperties": 1}, {"field_0": None}),
        ({}, None),
        (True, None),
    ],
)
def test_smallest_instance(schema: object, expected: object) -> None:
    assert smallest_instance(schema) == expected
    assert validate_value(schema, smallest_instance(schema)) == []


@pytest.mark.parametrize(
    "pattern",
    [
        "^[A-Z0-9-]{4,32}$",
        r"^\d{4}-\d{2}$",
        "^(a|b)+c?$",
        r"^[^@\s]+@[^@\s]+\.[a-z]{2,}$",
        "abc",
        "^(ORD|INV)-[0-9]+$",
        r"\w+",
    ],
)
@pytest.mark.parametrize("length", [0, 9])
def test_smallest_text_for_a_pattern(pattern: str, length: int) -> None:
    schema = {"type": "string", "pattern": pattern, "minLength": length}
    if pattern == r"^\d{4}-\d{2}$" and length == 9:
        with pytest.raises(DefinitionError, match="could be made up"):
            smallest_instance(schema)
    else:
        assert validate_value(schema, smallest_instance(schema)) == []


@pytest.mark.parametrize(
    "schema",
    [
        False,
        {"enum": []},
        {"type": "integer", "minimum": 5, "maximum": 4},
        {"type": "object", "required": ["a"], "properties": {"a": False}},
        {"type": "object", "required": ["a"], "properties": {"a": {"$ref": "#"}}},
        {"type": "string", "minLength": 10**9},
        {"type": "array", "minItems": 10**9},
        {"type": "string", "pattern": "^(?!a)a$"},
        {"type": "string", "pattern": "a{1000000000}"},
        {"$ref": "https://example.com/schema.json"},
        {"type": "object", "required": ["l", "r"], "properties": {"l": {"$ref": "#"}, "r": {"$ref": "#"}}},
        {"type": "object", "required": ["l"], "properties": {"l": {"oneOf": [{"$ref": "#"}, {"$ref": "#"}]}}},
    ],
)
def test_no_instance_is_a_clear_error(schema: object) -> None:
    started = time.process_time()
    with pytest.raises(DefinitionError):
        smallest_instance(schema)
    assert time.process_time() - started < 5


SCHEMAS = st.recursive(
    st.sampled_from(
        [
            {"type": "integer", "minimum": 3},
            {"type": "number", "maximum": -0.5},
            {"type": "string", "minLength": 2},
            {"enum": ["a", 1]},
            {"type": "boolean"},
            {"type": ["null", "integer"]},
            {"const": None},
        ]
    ),
    lambda inner: st.one_of(
        inner.map(lambda s: {"type": "array", "items": s, "minItems": 1}),
        st.dictionaries(st.sampled_from("abc"), inner, min_size=1).map(
            lambda p: {
                "type": "object",
                "properties": p,
                "required": sorted(p)[:2],
                "additionalProperties": False,
            }
        ),
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: {"anyOf": parts}),
    ),
    max_leaves=6,
)


@given(SCHEMAS)
def test_instances_are_valid_fit_their_own_schema_and_are_not_changed(schema: dict[str, object]) -> None:
    assert check_schema(schema) == []
    value = smallest_instance(schema)
    assert validate_value(schema, value) == []
    assert fill_and_coerce(schema, value) == value
    assert is_static_subset(schema, schema) == []


def closed(required: list[str], **properties: object) -> dict[str, object]:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


TEXT, NUMBER, LIST = {"type": "string"}, {"type": "number"}, {"type": "array", "items": {"type": "integer"}}


@pytest.mark.parametrize(
    ("output", "taken", "misfits"),
    [
        (NUMBER, LIST, ["$: gives number, and array is taken"]),
        (TEXT, NUMBER, []),  # '5' is coerced to 5
        (LIST, TEXT, ["$: gives array, and string is taken"]),
        ({"type": ["null", "string"]}, NUMBER, []),
        ({}, TEXT, []),
        (True, TEXT, []),
        ({"anyOf": [LIST]}, TEXT, []),
        (closed(["a"], a=TEXT), closed(["a", "b"], a=TEXT, b=TEXT), ["b: is required, and never given"]),
        (closed(["a"], a=TEXT), closed(["a", "b"], a=TEXT, b={"default": 1}), []),
        ({"type": "object"}, closed(["b"], b=TEXT), []),
        (closed([], b=TEXT), closed(["b"], b=TEXT), []),
        (
            closed(["a", "b"], a=TEXT, b=TEXT),
            closed(["a"], a=TEXT),
            ["b: is always given, and not a known field of what takes it"],
        ),
        (
            closed(["a"], a=closed(["x"], x=LIST)),
            closed(["a"], a=closed(["x"], x=TEXT)),
            ["a.x: gives array, and string is taken"],
        ),
        (closed([], a=LIST), closed([], a=TEXT), []),
        ({"enum": ["a", "b"]}, {"enum": ["c"]}, ["$: gives none of the values that are taken"]),
        ({"enum": ["a", "b"]}, {"enum": ["b", "c"]}, []),
        ({"$ref": "#/$defs/x", "$defs": {"x": LIST}}, TEXT, ["$: gives array, and string is taken"]),
        (
            {"type": "array", "minItems": 1, "items": LIST},
            {"type": "array", "items": TEXT},
            ["[0]: gives array, and string is taken"],
        ),
        ({"type": "array", "items": LIST}, {"type": "array", "items": TEXT}, []),
    ],
)
def test_only_sure_misfits_are_reported(output: object, taken: object, misfits: list[str]) -> None:
    assert is_static_subset(output, taken) == misfits


def test_jsonschema_is_imported_at_the_first_use_only() -> None:
    code = "import sys, agentmesh_dagster.specs.schema; print('jsonschema' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
