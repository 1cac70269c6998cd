"""Expressions: values and texts, errors that say what is there, and attacks that are refused quickly."""

from __future__ import annotations

import contextlib
import time
import tracemalloc
from collections.abc import Mapping
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentmesh_dagster.errors import ExpressionError
from agentmesh_dagster.runtime.scope import step_view
from agentmesh_dagster.specs.expressions import check, evaluate, references, render, secrets_used

ITEMS = [
    {"sku": "a", "n": 1, "kind": "x"},
    {"sku": "b", "n": 2.5, "kind": "y"},
    {"sku": "c", "n": 3, "kind": "x"},
]
NAMES = {
    "input": {
        "amount": 700,
        "items": ITEMS,
        "name": "Ada Lovelace",
        "none": None,
        "ok": True,
        "_id": 7,
        "big": "x" * 900_000,
    },
    "steps": {"classify": {"output": {"risk": "high"}, "status": "succeeded"}},
    "context": {"count": 2},
    "secret": lambda name: f"secret of {name}",
}


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("no braces", "no braces"),
        ("{{ input.amount }}", 700),
        ("{{ input.items }}", ITEMS),
        ("{{ input.ok }} {{ input.none }} {{ 1.5 }}", "true null 1.5"),
        ("n: {{ input.items[0] }}", 'n: {"sku": "a", "n": 1, "kind": "x"}'),
        ("{{ input.amount }}\n", "700\n"),
        ("{{ input['items'][-1].sku }}", "c"),
        ("{{ input._id }}", 7),
        ("{{ '12' }}", "12"),
        ("{{ (1, 2) }}", [1, 2]),
        ("{{ input.amount * 2 + 1 }}", 1401),
        ("{{ 7 // 2 }}/{{ 7 % 4 }}/{{ 2 ** 10 }}/{{ -3 }}", "3/3/1024/-3"),
        ("{{ 'a' ~ 1 ~ true ~ none }}", "a1truenull"),
        ("{{ input.items | map(attribute='n') | sum }}", 6.5),
        ("{{ input.items | selectattr('n', 'gt', 1) | map(attribute='sku') | join(', ') }}", "b, c"),
        ("{{ input.items | rejectattr('kind', 'eq', 'x') | length }}", 1),
        ("{{ input.items | groupby('kind') | map(attribute='grouper') | list }}", ["x", "y"]),
        ("{{ input.items | sort(attribute='n', reverse=true) | first }}", ITEMS[2]),
        ("{{ ['b', 'A', 'c', 'a'] | sort | unique }}", ["A", "b", "c"]),
        ("{{ [3, 1, 2] | max }} {{ [3, 1, 2] | min }}", "3 1"),
        ("{{ [1, 2, 3] | batch(2) }}", [[1, 2], [3]]),
        ("{{ [1, 2, 3, 4, 5] | slice(2) }}", [[1, 2, 3], [4, 5]]),
        ("{{ {'b': 1, 'a': 2} | dictsort }}", [["a", 2], ["b", 1]]),
        ("{{ '{\"a\": [1]}' | fromjson }}", {"a": [1]}),
        ("{{ input.items[0] | tojson }}", '{"sku": "a", "n": 1, "kind": "x"}'),
        ("{{ '%s: %.2f%%' | format('x', 1.005) }}", "x: 1.00%"),
        ("{{ '5' | int + 1 }} {{ 'x' | int(0) }} {{ 2.567 | round(1) }}", "6 0 2.6"),
        ("{{ input.name.upper() }} {{ input.name.split(' ')[1] }}", "ADA LOVELACE Lovelace"),
        ("{{ input.missing | default('none') }}", "none"),
        ("{{ input.missing.deeper.still | default(3) }}", 3),
        ("{{ input.none.deeper is defined }}", False),
        ("{{ steps.other is undefined }}", True),
        ("{{ input.amount if input.amount > 1000 else 'small' }}", "small"),
        (
            "{% for i in input.items if i.n > 1 %}{{ loop.index }}{{ i.sku }}{{ loop.last }}{% endfor %}",
            "1bfalse2ctrue",
        ),
        ("{% for k, v in {'a': 1}.items() %}{{ k }}={{ v }}{% endfor %}", "a=1"),
        ("{% for x in [] %}x{% else %}empty{% endfor %}", "empty"),
        (
            "{% set t = input.amount %}{% if t > 500 %}large{% elif t %}small{% else %}zero{% endif %}",
            "large",
        ),
        ("{% set x = 1 %}{% for i in [1, 2] %}{% set x = i %}{% endfor %}{{ x }}", "1"),
        ("{# note #}{% raw %}{{ x }}{% endraw %}", "{{ x }}"),
        ("{% with a = 2 %}{{ a }}{% endwith %}", "2"),
        ("{{ range(3) | list }}", [0, 1, 2]),
        ("Bearer {{ secret('KEY') }}", "Bearer secret of KEY"),
    ],
)
def test_renders(template: str, expected: object) -> None:
    result = render(template, NAMES)
    assert result == expected
    assert type(result) is type(expected)


def test_renders_every_string_of_a_value_and_leaves_keys_alone() -> None:
    template = {"a": ["{{ input.amount }}", 5, None], "{{ b }}": {"c": "x {{ context.count }}"}}
    assert render(template, NAMES) == {"a": [700, 5, None], "{{ b }}": {"c": "x 2"}}


def test_keys_come_before_methods() -> None:
    names = {"input": {"items": [1], "keys": 2, "get": 3}}
    assert evaluate("[input.items, input.keys, input.get]", names) == [[1], 2, 3]
    with pytest.raises(ExpressionError, match="input has no key 'values'"):
        evaluate("input.values", names)


def test_reads_any_mapping() -> None:
    class Lazy(Mapping[str, object]):
        def __getitem__(self, key: str) -> object:
            if key != "a":
                raise KeyError(key)
            return {"output": 1}

        def __iter__(self):
            return iter(["a"])

        def __len__(self) -> int:
            return 1

    assert evaluate("steps.a.output", MappingProxyType({"steps": Lazy()})) == 1
    assert evaluate("steps", {"steps": Lazy()}) == {"a": {"output": 1}}
    with pytest.raises(ExpressionError, match="steps has no key 'b'; it has 'a'"):
        evaluate("steps.b.output", {"steps": Lazy()})


def test_conditions() -> None:
    assert evaluate("input.amount > 500 or steps.classify.output.risk == 'low'", NAMES) is True
    assert evaluate("'b' in input.items | map(attribute='sku')", NAMES) is True
    assert evaluate("not input.ok and steps.nowhere.x", NAMES) is False
    assert evaluate("1 < 2 <= 2 != 3", NAMES) is True


def test_a_missing_name_says_which_where_and_what_is_there() -> None:
    with pytest.raises(ExpressionError) as caught:
        render({"order": {"amount": "{{ input.amont }}"}}, NAMES, where="node 'pay', field config.input")
    message = str(caught.value)
    assert message.startswith("node 'pay', field config.input.order.amount: input has no key 'amont'")
    assert "'amount'" in message
    assert "did you mean 'amount'?" in message
    assert caught.value.code == "expression-missing"


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("inptu.x", "unknown name 'inptu'; there is .*did you mean 'input'"),
        ("steps.nope.output", "steps has no key 'nope'; it has 'classify'"),
        ("input.none.x", "input.none is null and has no key 'x'"),
        ("input.items[9]", "input.items has 3 items and none at index 9"),
        ("input.name.upper", r"a method is called: upper\(\)"),
        ("input.missing == 1", "input has no key 'missing'"),
        ("input.missing ~ 'x'", "input has no key 'missing'"),
        ("[input.missing]", "input has no key 'missing'"),
        ("input.missing.upper()", "input has no key 'missing'"),
        ("input.missing | upper", "input has no key 'missing'"),
        ("[] | first", "the list has 0 items"),
        ("input.items | map(attribute='nope')", "the item has no key 'nope'"),
        ("input.name + 1", "cannot add text and a number"),
        ("input.name > 1", "cannot order a number and text"),
        ("1 / 0", "division by zero"),
        ("'x' | int", "text is not an integer"),
        ("1e308 * 10", "not a number that JSON knows"),
        ("{1: 2}", "keys of an object are text"),
        ("input.amount | round(1, 2, 3)", "the filter 'round' cannot be applied"),
        ("secret", "one literal name"),
        ("nofunction()", "there is no function 'nofunction'"),
    ],
)
def test_failures_are_named(expression: str, message: str) -> None:
    with pytest.raises(ExpressionError, match=message):
        evaluate(expression, NAMES)


def test_errors_show_keys_in_bounded_number_and_never_values() -> None:
    names = {"input": {f"key{i:04}": "classified" for i in range(5000)}, "secret": lambda name: "hunter2"}
    with pytest.raises(ExpressionError) as caught:
        evaluate("input.nothing", names)
    assert len(str(caught.value)) < 600
    assert "and 4988 more" in str(caught.value)
    for expression in (
        "secret('X') | int",
        "secret('X') + 1",
        "secret('X').index('nope')",
        "secret('X') | fromjson",
    ):
        with pytest.raises(ExpressionError) as caught:
            evaluate(expression, names)
        assert "hunter2" not in repr(caught.value)
        assert caught.value.__context__ is None


@pytest.mark.parametrize(
    ("text", "bare", "message"),
    [
        ("{{ x", False, "cannot be parsed"),
        ("{% if x %}", False, "cannot be parsed"),
        ("input.a >", True, "cannot be parsed"),
        ("a b", True, "something follows"),
        ("{{ a }}", True, "without"),
        ("  ", True, "empty"),
        ("a | nofilter", True, "no filter 'nofilter'"),
        ("a is notest", True, "no test 'notest'"),
        ("a if b", True, "needs an 'else'"),
    ],
)
def test_check_finds_what_can_never_work(text: str, bare: bool, message: str) -> None:
    with pytest.raises(ExpressionError, match=message):
        check(text, bare=bare)


FORBIDDEN = [
    "''.__class__",
    "''['__class__']",
    "input.__class__.__mro__",
    "().__class__.__bases__[0].__subclasses__()",
    "input | attr('__class__')",
    "input | attr('keys')",
    "input.items | map(attribute='__class__') | list",
    "input.items | map(attribute='sku.__class__') | list",
    "input.items | map('attr', '__class__') | list",
    "input.items | sort(attribute='__class__')",
    "input.items | groupby('__class__')",
    "input.items | sum(attribute='__len__')",
    "input.items | selectattr('__class__') | list",
    "input.items.append(1)",
    "input.items.pop()",
    "input.items.sort()",
    "input.update({})",
    "input.pop('amount')",
    "input.setdefault('x', 1)",
    "input.clear()",
    "'{0.__class__}'.format(1)",
    "'{:>999999999}'.format(1)",
    "'{a}'.format_map(input)",
    "'x'.encode()",
    "'x'.translate({})",
    "range.__init__",
    "lipsum()",
    "lipsum.__globals__",
    "cycler(1)",
    "joiner()",
    "namespace(a=1)",
    "self",
    "self.__init__",
    "secret.__globals__",
    "secret('A' ~ 'B')",
    "secret(*['A'])",
    "secret(input.name)",
    "[1, 2] | random",
    "'<b>' | safe",
    "input.name.upper.__self__",
    "range(3).__class__",
    "dict(**input)",
    "'%(x)*d' % {'x': 1}",
    "'%r' % [1]",
]


@pytest.mark.parametrize("expression", FORBIDDEN)
def test_nothing_leads_out_of_the_values(expression: str) -> None:
    before = repr(NAMES["input"]["items"])
    with pytest.raises(ExpressionError):
        evaluate(expression, NAMES)
    assert repr(NAMES["input"]["items"]) == before


@pytest.mark.parametrize(
    "template",
    [
        "{% include 'x' %}",
        "{% import 'x' as y %}",
        "{% from 'x' import y %}",
        "{% extends 'x' %}",
        "{% macro f() %}{% endmacro %}",
        "{% block x %}{% endblock %}",
        "{% call f() %}{% endcall %}",
        "{% filter upper %}x{% endfilter %}",
        "{% autoescape true %}{% endautoescape %}",
        "{% for x in y recursive %}{{ loop(x) }}{% endfor %}",
        "{% set ns.x = 1 %}",
        "{% set secret = 1 %}",
        "{% do x %}",
    ],
)
def test_statements_that_do_not_exist(template: str) -> None:
    with pytest.raises(ExpressionError):
        check(template, bare=False)


BOMBS = [
    "{{ 'a' * 10**9 }}",
    "{{ 10**9 * 'a' }}",
    "{{ [0] * 10**9 }}",
    "{{ ([0] * 10000) * 10000 }}",
    "{{ range(10**9) }}",
    "{{ range(10**9) | list }}",
    "{{ range(0, 0 - 10**30, -1) | list }}",
    "{{ 10 ** (10 ** 10) }}",
    "{{ (2 ** 9999) ** 9999 }}",
    "{% set x = 2 ** 4000 %}{% set x = x * x %}{% set x = x * x %}{% set x = x * x %}{{ x }}",
    "{{ 9.0 ** 9999 }}",
    "{{ '%0999999999d' % 1 }}",
    "{{ '%999999999s' | format(1) }}",
    "{{ '%.999999999f' % 1 }}",
    "{{ '%*d' % [999999999, 1] }}",
    "{{ 'a' | center(10**9) }}",
    "{{ 'a'.center(10**9) }}",
    "{{ 'a'.ljust(10**9) }}",
    "{{ 'a'.rjust(10**9) }}",
    "{{ 'a'.zfill(10**9) }}",
    "{{ 'a\tb'.expandtabs(10**9) }}",
    "{{ 'a\nb' | indent(10**9) }}",
    "{{ input.big | replace('x', input.big) }}",
    "{{ input.big.replace('', input.big) }}",
    "{{ input.big.join(range(100000) | list) }}",
    "{{ range(1000) | join(input.big) }}",
    "{{ range(1000) | map('center', 900000) | list }}",
    "{{ [input.big, input.big] | join }}",
    "{{ input.big ~ input.big }}",
    "{{ input.big + input.big }}",
    "{{ [1] | batch(10**9, 0) }}",
    "{{ [1] | slice(10**9) }}",
    "{{ 1 | round(10**9, 'ceil') }}",
    "{{ ('9' * 900000) | int }}",
    "{{ ('[' * 900000) | fromjson }}",
    "{{ [[1]] | tojson(indent=10**9) }}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{{ input.big }}{% endfor %}",
    "{% for a in range(99999) %}{{ '' if input.big in input.big else '' }}{% endfor %}",
    "{% for a in range(99999) %}{{ '' if input.big == input.big ~ '' else '' }}{% endfor %}",
    "{% for a in range(99999) %}{% set b = range(99999) | list %}{% endfor %}",
    "{% for a in range(99999) %}{% set b = input.big | upper %}{% endfor %}",
    "{% for a in range(99999) %}{% set b = range(99999) | sum %}{% endfor %}",
    "{% for a in range(99999) %}{% set b = input.big.split('x') %}{% endfor %}",
    "{{ range(99999) | map('string') | map('length') | select('in', range(99999) | list) | list }}",
    "{% set a = [1] %}" + "{% set a = [a, a] %}" * 90 + "{{ a }}",
    "{% set a = [1] %}{% set b = [1] %}" + "{% set a = [a, a] %}{% set b = [b, b] %}" * 60 + "{{ a == b }}",
    "{% set a = [1] %}" + "{% set a = [a, a] %}" * 60 + "{{ a in [a] }}",
    "{% set a = [1] %}" + "{% set a = {'k': a, 'l': a} %}" * 60 + "{{ [a] | unique }}",
    "{% set a = 'x' %}" + "{% set a = a ~ a %}" * 90 + "{{ a }}",
    "{% set a = [1] %}" + "{% set a = a + a %}" * 90 + "{{ a | length }}",
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "{{ " + "not " * 5000 + "1 }}",
    "{{ " + "[" * 5000 + "]" * 5000 + " }}",
    "{{ 1" + "+1" * 50000 + " }}",
    "{{ input" + ".a" * 50000 + " }}",
    "{% if 1 %}" * 5000 + "{% endif %}" * 5000,
    "{{ " + "1" * 100_000 + " }}",
    "{{ 1 }}" * 100_000,
]


@pytest.mark.parametrize("template", BOMBS, ids=lambda template: template[:50].replace("\n", " "))
def test_no_expression_takes_long_or_much_memory(template: str) -> None:
    started = time.process_time()
    with pytest.raises(ExpressionError):
        render(template, NAMES)
    assert (
        time.process_time() - started < 2.5
    )  # each takes a few tenths of a second at most on an idle machine


@pytest.mark.parametrize("template", BOMBS[:36:3], ids=lambda template: template[:50].replace("\n", " "))
def test_refusal_needs_little_memory(template: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ExpressionError):
            render(template, NAMES)
        assert tracemalloc.get_traced_memory()[1] < 64_000_000
    finally:
        tracemalloc.stop()


def test_a_bomb_is_refused_while_it_is_checked_or_compiles_in_no_time() -> None:
    tracemalloc.start()
    started = time.process_time()
    check("{{ 'a' * 10**9 }}{{ 10 ** 10 ** 10 }}{{ [0] * 10**9 }}{{ range(10**9) }}", bare=False)
    assert time.process_time() - started < 0.5
    assert tracemalloc.get_traced_memory()[1] < 5_000_000
    tracemalloc.stop()


def test_large_data_passes_through_untouched() -> None:
    rows = [{"i": i, "text": "x" * 100} for i in range(50_000)]
    assert render("{{ steps.load.output }}", {"steps": {"load": {"output": rows}}}) is rows
    assert evaluate("steps.load.output | length", {"steps": {"load": {"output": rows}}}) == 50_000
    assert len(evaluate("rows | map(attribute='i') | select('odd')", {"rows": rows})) == 25_000


@pytest.mark.parametrize(
    ("text", "bare", "expected"),
    [
        ("steps.classify.output.risk == 'high'", True, {("steps", "classify", "output", "risk")}),
        ("steps['classify'].output[0].x", True, {("steps", "classify", "output")}),
        ("input.name.upper() in context.k.values()", True, {("input", "name"), ("context", "k")}),
        ("a[input.key].x", True, {("a",), ("input", "key")}),
        ("{{ input.x | default(context.y) }}", False, {("input", "x"), ("context", "y")}),
        (
            "{% for i in input.rows if i.a > item.b %}{{ i.z }}{{ loop.index }}{% else %}{{ i.q }}{% endfor %}",
            False,
            {("input", "rows"), ("item", "b"), ("i", "q")},
        ),
        (
            "{% set t = input.a %}{{ t.b }}{% with w = t %}{{ w }}{% endwith %}{{ w.d }}",
            False,
            {("input", "a"), ("w", "d")},
        ),
        ("Bearer {{ secret('K') }} {{ range(3) }}", False, set()),
        ("no template: input.x", False, set()),
    ],
)
def test_references(text: str, bare: bool, expected: set[tuple[str, ...]]) -> None:
    assert references(text, bare=bare) == expected


def test_secrets_used() -> None:
    template = {
        "headers": {"a": "Bearer {{ secret('ONE') }}"},
        "b": ["{{ secret('TWO') if input.x else 'no' }}", "secret('NOT')"],
    }
    assert secrets_used(template) == {"ONE", "TWO"}


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(JSON_VALUES)
def test_any_value_passes_with_its_type_and_as_json(value: object) -> None:
    names = {"input": {"x": value}}
    assert evaluate("input.x", names) == value
    assert evaluate("[input.x][0]", names) == value
    assert evaluate("input.x | tojson | fromjson", names) == value


@given(st.text(alphabet="{}%#[]()|.,'\"+-*/~ ainx019_\n", max_size=60))
def test_any_text_gives_a_value_or_an_expression_error(text: str) -> None:
    for bare in (False, True):
        with contextlib.suppress(ExpressionError):
            evaluate(text, NAMES) if bare else render("{{" + text + "}}", NAMES)


SKIPPED = {
    "steps": {
        "ran": {"output": {"text": "yes"}, "error": None, "status": "succeeded"},
        "not_run": step_view(None),
    }
}


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("steps.not_run.output.text or steps.ran.output.text", "yes"),
        ("steps.ran.output.text or steps.not_run.output.text", "yes"),
        ("steps.not_run.output or 'none'", "none"),
        ("steps.not_run.output.a.b or steps.not_run.error.code or 7", 7),
        ("steps.not_run.output.text | default('other')", "other"),
        ("steps.not_run.output is defined", False),
        ("steps.not_run.output.text is undefined", True),
        ("steps.not_run.status", "skipped"),
        ("steps['not_run'].output[0].x or 1", 1),
    ],
)
def test_what_a_skipped_step_would_have_had_is_undefined(expression: str, value: object) -> None:
    assert evaluate(expression, SKIPPED) == value
    assert render(f"{{{{ {expression} }}}}", SKIPPED) == value


@pytest.mark.parametrize(
    "expression",
    [
        "steps.not_run.output",
        "steps.not_run.output.text",
        "steps.not_run.output == 1",
        "steps.not_run.output or steps.not_run.error",
        "steps.not_run.output and 1",
        "not steps.not_run.output",
        "steps.not_run.output | upper",
        "steps.not_run.output ~ ''",
    ],
)
def test_elsewhere_it_is_an_error_that_names_the_step(expression: str) -> None:
    with pytest.raises(
        ExpressionError, match=r"steps\.not_run\.\w+ is undefined, because that step was skipped"
    ) as error:
        evaluate(expression, SKIPPED)
    assert error.value.code == "expression-missing"


def test_a_missing_name_is_not_accepted_by_or() -> None:
    with pytest.raises(ExpressionError, match="has no key 'txt'; it has 'text'; did you mean 'text'"):
        evaluate("steps.ran.output.txt or 'x'", SKIPPED)


def test_selectattr_takes_a_missing_key_for_not_true() -> None:
    items = [{"error": {"code": "x"}}, {"output": 1}, {"error": None}, {"error": {}, "output": 2}]
    assert evaluate("items | selectattr('error') | list | length", {"items": items}) == 1
    assert evaluate("items | rejectattr('error') | list | length", {"items": items}) == 3
    assert evaluate("items | selectattr('error.code') | list | length", {"items": items}) == 1
