"""Regular expressions of documents that would keep a worker, a sensor or a database busy."""

from __future__ import annotations

import random
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from agentmesh_dagster.specs.patterns import PatternRefused, is_found
from agentmesh_dagster.specs.schema import check_schema, fill_and_coerce, smallest_instance, validate_value
from agentmesh_dagster.validation import validate_document

# Python's `re` takes time exponential in the length of the text for each of these; a hang is what they assert against.
pytestmark = pytest.mark.timeout(30)

EXPONENTIAL = ["^(a|a)*$", "^(a+)+$", "^(a|aa)+$", r"^(\w*\s?)*$", "^((a|a+)*)*$", "^(.*a){20}$", "(x+x+)+y"]
LONG = "a" * 50_000 + "!"


@pytest.mark.parametrize("pattern", EXPONENTIAL)
def test_a_pattern_is_searched_for_in_linear_time(pattern: str) -> None:
    schema = {"type": "object", "properties": {"text": {"type": "string", "pattern": pattern}}}
    assert check_schema(schema) == []
    (issue,) = validate_value(schema, {"text": LONG})
    assert issue.path == "text"
    assert "must match the regular expression" in issue.message
    assert validate_value(schema, fill_and_coerce(schema, {"text": "a" * 24 + "!"}))


@pytest.mark.parametrize("pattern", EXPONENTIAL)
@pytest.mark.parametrize(
    "keywords",
    [{"additionalProperties": False}, {"unevaluatedProperties": False}, {"propertyNames": {"maxLength": 1}}],
    ids=lambda keywords: next(iter(keywords)),
)
def test_patterns_of_the_names_of_fields_are_too(pattern: str, keywords: dict[str, Any]) -> None:
    schema = {"type": "object", "patternProperties": {pattern: {"type": "null"}}, **keywords}
    assert validate_value(schema, {LONG: 1})
    assert validate_value({"allOf": [{"$ref": "#/$defs/x"}], "$defs": {"x": schema}}, {"a" * 64 + "!": 1})


def test_a_text_that_is_to_be_a_regular_expression_is_not_compiled_by_python() -> None:
    schema = {"type": "string", "format": "regex"}
    assert validate_value(schema, "^(a|a)*$") == []
    assert "must be in the format" in validate_value(schema, "(?=a)")[0].message


@pytest.mark.parametrize("pattern", ["^(a|a)*b$", "^(a+)+c$"])
def test_the_offline_model_makes_texts_up_for_them(pattern: str) -> None:
    made = smallest_instance({"type": "string", "pattern": pattern, "minLength": 24})
    assert len(made) >= 24
    assert is_found(pattern, made)


REFUSED = {
    "(?=a)b": "look-ahead (?=...)",
    "a(?!b)": "negative look-ahead (?!...)",
    "(?<=a)b": "look-behind (?<=...)",
    "(?<!a)b": "negative look-behind (?<!...)",
    r"(a)\1": r"back reference \1",
    "(?P<x>a)(?P=x)": "back reference (?P=x)",
    r"(?<x>a)\k<x>": r"back reference \k",
    "(?>a+)b": "atomic group (?>...)",
    "a++b": "repeats a repetition",
    "(a)?(?(1)b|c)": "conditional (?(...)...)",
    "a{1,5000}": "more than 1000 times",
    "((a{30}){30}){30}": "more than 1000 times",
    "(a{0,30}){0,30}" * 20: "too large",
    "(": "is not a regular expression",
    "a" * 1_001: "longer than 1000 characters",
}


def documents(schema: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Each place of a document that holds a schema, and a document with one there."""

    def workflow(node: dict[str, Any], **fields: Any) -> dict[str, Any]:
        nodes = [{"id": "start", "type": "start"}, node, {"id": "done", "type": "end"}]
        edges = [{"source": "start", "target": node["id"]}, {"source": node["id"], "target": "done"}]
        return {"kind": "workflow", "slug": "w", "nodes": nodes, "edges": edges, **fields}

    plain = {"id": "n", "type": "transform", "config": {"output": 1}}
    asks = {"id": "n", "type": "human", "config": {"title": "t", "form_schema": schema}}
    hears = {
        "id": "n",
        "type": "webhook",
        "config": {"event": "e", "payload_schema": schema, "timeout": "1d"},
    }
    answers = {"id": "n", "type": "agent", "config": {"agent": "a", "prompt": "p", "output_schema": schema}}
    http = {"method": "GET", "url": "https://example.com"}
    tool = {"kind": "tool", "slug": "t", "type": "http", "config": http}
    anything = {"type": "object"}
    return {
        "input_schema": workflow(plain, input_schema=schema),
        "output_schema": workflow(plain, output_schema=schema),
        "state_schema": workflow(plain, state_schema=schema),
        "nodes[1].config.form_schema": workflow(asks),
        "nodes[1].config.payload_schema": workflow(hears),
        "tool.input_schema": {**tool, "input_schema": schema},
        "tool.output_schema": {**tool, "input_schema": anything, "output_schema": schema},
        "nodes[1].config.output_schema": workflow(answers),
    }


@pytest.mark.parametrize("place", documents({}))
def test_every_schema_of_a_document_is_held_to_it_at_import(place: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=a)b"}}}
    problems = [
        p for p in validate_document(documents(schema)[place]).problems if p.code == "pattern-refused"
    ]
    assert [p.path for p in problems] == [f"{place.removeprefix('tool.')}.properties.a.pattern"]
    assert "look-ahead (?=...)" in problems[0].message


@pytest.mark.parametrize("pattern", REFUSED)
@pytest.mark.parametrize("keyword", ["pattern", "patternProperties"])
def test_what_takes_more_than_linear_time_is_refused_by_name(keyword: str, pattern: str) -> None:
    schema = {"type": "string", "pattern": pattern} if keyword == "pattern" else {keyword: {pattern: {}}}
    (issue,) = check_schema(schema)
    assert issue.code == "pattern-refused"
    assert REFUSED[pattern] in issue.message


def test_a_text_too_long_for_a_large_pattern_is_refused_and_not_searched() -> None:
    # RE2 caches no states for this one: it would follow 900 threads through each character.
    pattern, text = "(a|b)*a(a|b){900}c", "".join(random.Random(1).choices("ab", k=200_000))
    with pytest.raises(PatternRefused, match="a text of 200000 bytes is too long"):
        is_found(pattern, text)
    (issue,) = validate_value({"not": {"type": "string", "pattern": pattern}}, text)
    assert "cannot be checked: a text of 200000 bytes is too long" in issue.message


def test_many_texts_together_are_bounded_too() -> None:
    schema = {"type": "array", "items": {"type": "string", "pattern": "(a|b)*a(a|b){900}c"}}
    (issue,) = validate_value(schema, ["ab" * 5_000] * 50)
    assert "too many for the schema's regular expressions" in issue.message


def test_alternatives_that_refer_back_to_themselves_take_no_exponential_time() -> None:
    again = {"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]}
    schema = {"anyOf": [again, {**again, "title": "the same"}, {"type": "integer"}]}
    value: Any = "wrong"
    for _ in range(40):
        value = {"x": value}
    (issue,) = validate_value(schema, value)
    assert "more than 1000 times" in issue.message
    assert validate_value(schema, {"x": {"x": 1}}) == []


def test_half_a_surrogate_pair_is_searched_as_any_other_character() -> None:
    assert validate_value({"type": "string", "pattern": "^a.b$"}, "a\ud800b") == []


UNEVALUATED: list[dict[str, Any]] = [
    {"properties": {"a": {}}},
    {"patternProperties": {"^a": {}, "c$": {"type": "integer"}}},
    {"allOf": [{"properties": {"a": {"type": "integer"}}}, {"patternProperties": {"b": {}}}]},
    {"anyOf": [{"properties": {"a": {"type": "integer"}}}, {"properties": {"b": {"type": "string"}}}]},
    {"oneOf": [{"required": ["a"], "properties": {"a": {}}}, {"required": ["b"], "properties": {"b": {}}}]},
    {
        "if": {"required": ["a"]},
        "then": {"properties": {"a": {}, "b": {}}},
        "else": {"properties": {"c": {}}},
    },
    {"dependentSchemas": {"a": {"properties": {"a": {}, "b": {}}}}},
    {
        "$ref": "#/$defs/x",
        "$defs": {"x": {"properties": {"a": {}}, "additionalProperties": {"type": "string"}}},
    },
    {"$ref": "#/$defs/x", "$defs": {"x": {"properties": {"a": {}}, "unevaluatedProperties": True}}},
    {"not": {"required": ["c"]}, "properties": {"b": {}}},
]


@pytest.mark.parametrize("schema", UNEVALUATED)
@pytest.mark.parametrize("last", [False, {"type": "integer"}, True])
@pytest.mark.parametrize("keyword", ["unevaluatedProperties", "additionalProperties"])
def test_our_keywords_say_what_the_library_says(schema: dict[str, Any], last: Any, keyword: str) -> None:
    whole = {**schema, keyword: last}
    reference = Draft202012Validator(whole)
    for names in ["", "a", "b", "c", "ab", "bc", "abc"]:
        for value in (1, "x"):
            fields = dict.fromkeys(names, value)
            assert (validate_value(whole, fields) == []) is reference.is_valid(fields), (whole, fields)
