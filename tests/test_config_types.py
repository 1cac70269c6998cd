"""The typed launch form: JSON Schema as Dagster config types, never narrower than the schema."""

from __future__ import annotations

import dagster as dg
import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentmesh_dagster.compiler.config_types import construct_config_schema
from agentmesh_dagster.specs.schema import validate_value


def job(schema, name="sample"):
    @dg.op(name=f"{name}__only")
    def only():
        pass

    @dg.graph(name=name)
    def graph():
        only()

    mapping = dg.ConfigMapping(
        config_schema=construct_config_schema(name, schema), config_fn=lambda _config: {}
    )
    return graph.to_job(name=name, config=mapping)


def accepts(schema, value):
    """Whether the launch form of a job takes the value as its run config."""
    try:
        dg.validate_run_config(job(schema), value)
    except dg.DagsterInvalidConfigError:
        return False
    return True


def field(schema, *, required=False):
    found = {"type": "object", "properties": {"f": schema}, "additionalProperties": False}
    return {**found, "required": ["f"]} if required else found


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "string"}, ["", "ä"], [5, None, ["a"]]),
        ({"type": "integer"}, [5, 5.0, -(10**30)], ["5", None, [1]]),
        ({"type": "number"}, [5, 5.5, 10**30], ["5.5", None]),
        ({"type": "boolean"}, [True], ["yes", 1]),
        ({"enum": ["low", "sehr groß", "class", ""]}, ["low", "sehr groß", "class", ""], ["high", 1]),
        ({"type": "string", "enum": ["a", "a"]}, ["a"], ["b"]),
        ({"type": "array", "items": {"type": "string"}}, [[], ["a"]], ["a", [1]]),
        ({"type": "array", "items": {"enum": ["a"]}}, [["a", "a"]], [["b"]]),
        ({"type": "array"}, [[1, "a", None, {}]], [{"a": 1}, 5]),
        ({"type": "array", "items": {"type": ["string", "null"]}}, [["a", None]], [[1]]),
        ({"type": ["string", "null"]}, ["a", None], [1]),
        ({"type": ["array", "null"], "items": {"type": "integer"}}, [[1], None], [["a"]]),
        (
            {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}},
            [{"a": 1}, {"a": 1, "more": [None]}],
            [{}, {"a": "x"}, 5],
        ),
        (
            {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False},
            [{}, {"a": 1}],
            [{"b": 1}],
        ),
        (
            {
                "type": "object",
                "properties": {"a": {}},
                "patternProperties": {"^x": {}},
                "additionalProperties": False,
            },
            [{"x1": 1}],
            [5],
        ),
    ],
)
def test_what_the_form_takes_and_refuses(schema, good, bad):
    for value in good:
        assert validate_value(schema, value) == []
        assert accepts(field(schema), {"f": value}), value
    for value in bad:
        assert not accepts(field(schema), {"f": value}), value


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [{"type": "string"}, {"type": "integer"}]},
        {"type": ["string", "integer"]},
        {"enum": ["a", 1, None]},
        {"const": {"a": 1}},
        {"$ref": "#/$defs/x"},
        {"type": "string", "not": {"const": "x"}},
        True,
        {},
        {"description": "anything"},
    ],
)
def test_what_has_no_equal_becomes_any(schema):
    for value in (None, 1, "a", [1], {"a": None}):
        assert accepts({**field(schema), "$defs": {"x": {}}}, {"f": value})


def test_tuples_have_no_equal():
    schema = {"type": "array", "prefixItems": [{"type": "string"}], "items": {"type": "integer"}}
    assert accepts(field(schema), {"f": ["a", 1]})
    assert not accepts(field(schema), {"f": "a"})


def test_a_required_field_may_be_null_where_the_schema_says_so_and_may_not_be_left_out():
    schema = field({"type": ["string", "null"]}, required=True)
    assert accepts(schema, {"f": None})
    assert not accepts(schema, {})


def test_a_default_makes_a_required_field_optional_and_is_shown():
    schema = field({"type": "string", "default": "EUR", "description": "The currency."}, required=True)
    assert accepts(schema, {})
    shown = construct_config_schema("sample", schema).fields["f"]
    assert shown.description == "The currency. Default: 'EUR'."
    assert not shown.is_required


def test_the_error_names_the_field():
    schema = {
        "type": "object",
        "required": ["order"],
        "properties": {"order": {"type": "object", "properties": {"amount": {"type": "integer"}}}},
    }
    with pytest.raises(dg.DagsterInvalidConfigError, match="root:order:amount"):
        dg.validate_run_config(job(schema), {"order": {"amount": "many"}})
    with pytest.raises(dg.DagsterInvalidConfigError, match='"order"'):
        dg.validate_run_config(job(schema), {})


@pytest.mark.parametrize(
    "name", ["ops", "resources", "execution", "loggers", "inputs", "class", "sehr groß", "a.b", "", "x-y"]
)
def test_any_field_name_will_do(name):
    schema = {
        "type": "object",
        "required": [name],
        "properties": {name: {"enum": ["a", "b"]}},
        "additionalProperties": False,
    }
    assert accepts(schema, {name: "b"})
    assert not accepts(schema, {name: "c"})
    assert job(schema).execute_in_process(run_config={name: "a"}).success


def test_enums_of_one_path_in_one_process_keep_their_own_values():
    """As after publishing a workflow again: Dagster keeps config types by name."""
    assert accepts(field({"enum": ["old"]}), {"f": "old"})
    assert accepts(field({"enum": ["new"]}), {"f": "new"})
    assert not accepts(field({"enum": ["new"]}), {"f": "old"})


def test_paths_that_read_alike_do_not_mix_their_enums():
    inner = {"type": "object", "properties": {"b": {"enum": ["y"]}}}
    schema = {"type": "object", "properties": {"a__b": {"enum": ["x"]}, "a": inner}}
    assert accepts(schema, {"a__b": "x", "a": {"b": "y"}})
    assert not accepts(schema, {"a__b": "y"})


def test_two_jobs_with_the_same_enum_fields_load_in_one_repository():
    schema = field({"enum": ["low", "high"]})
    jobs = [job(schema, "first"), job(field({"enum": ["other"]}), "second"), job(schema, "third")]

    @dg.repository
    def location():
        return jobs

    for name, value, refused in (
        ("first", "low", "other"),
        ("second", "other", "low"),
        ("third", "high", "other"),
    ):
        loaded = location.get_job(name)
        dg.validate_run_config(loaded, {"f": value})
        with pytest.raises(dg.DagsterInvalidConfigError):
            dg.validate_run_config(loaded, {"f": refused})


def test_a_form_without_required_fields_needs_no_config():
    for schema in (
        {"type": "object"},
        field({"type": "string"}),
        {"type": "object", "additionalProperties": False},
    ):
        assert job(schema).execute_in_process().success


NAMES = st.sampled_from(["a", "b", "class", "größe", "x y"])
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.sampled_from([1.0, -2.5, 1e30])
    | st.sampled_from(["", "a", "low", "5"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)


def _objects(inner):
    def build(properties, required, extra):
        schema = {"type": "object", "properties": properties, "required": sorted(required & set(properties))}
        return schema if extra is None else {**schema, "additionalProperties": extra}

    return st.builds(
        build,
        st.dictionaries(NAMES, inner, max_size=3),
        st.sets(NAMES),
        st.sampled_from([None, True, False]) | inner,
    )


def _arrays(inner):
    return st.builds(
        lambda items, prefix: {"type": "array", "items": items} | ({"prefixItems": prefix} if prefix else {}),
        inner,
        st.lists(inner, max_size=2),
    )


TYPES = ["string", "integer", "number", "boolean", "null", "object", "array"]
SCHEMAS = st.recursive(
    st.sampled_from(
        [True, {}, {"type": "number", "minimum": 0}, {"enum": ["a", "low"]}, {"enum": ["a", 1, None]}]
    )
    | st.sampled_from(TYPES).map(lambda kind: {"type": kind})
    | st.lists(st.sampled_from(TYPES), min_size=1, max_size=3, unique=True).map(lambda kinds: {"type": kinds})
    | st.just({"type": "string", "default": "a"}),
    lambda inner: (
        _objects(inner)
        | _arrays(inner)
        | st.lists(inner, min_size=1, max_size=2).map(lambda of: {"anyOf": of})
    ),
    max_leaves=5,
)


def _instances(schema):
    """Values that are likely to fit."""
    if not isinstance(schema, dict) or "anyOf" in schema:
        return JSON
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    kinds = schema.get("type", TYPES)
    return st.one_of(*(_of_kind(kind, schema) for kind in ([kinds] if isinstance(kinds, str) else kinds)))


def _of_kind(kind, schema):
    if kind == "object":
        properties = {name: _instances(inner) for name, inner in schema.get("properties", {}).items()}
        required = {name: values for name, values in properties.items() if name in schema.get("required", [])}
        optional = {name: values for name, values in properties.items() if name not in required}
        return st.fixed_dictionaries(required, optional=optional)
    if kind == "array":
        items = _instances(schema.get("items", True))
        heads = [_instances(inner) for inner in schema.get("prefixItems", [])]
        return st.tuples(st.tuples(*heads), st.lists(items, max_size=2)).map(
            lambda parts: [*parts[0], *parts[1]]
        )
    return {
        "string": st.sampled_from(["", "a", "low"]),
        "integer": st.integers(-3, 3) | st.just(2.0),
        "number": st.integers(0, 3) | st.just(0.5),
        "boolean": st.booleans(),
        "null": st.none(),
    }[kind]


@settings(max_examples=150, deadline=None)
@given(st.data(), _objects(SCHEMAS))
def test_no_valid_input_is_refused(data, schema):
    value = data.draw(_instances(schema))
    jsonschema.Draft202012Validator.check_schema(schema)
    if not jsonschema.Draft202012Validator(schema).is_valid(value):
        return
    assert accepts(schema, value), (schema, value)
