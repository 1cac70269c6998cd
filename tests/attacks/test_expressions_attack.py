"""Templates that would hold the event loop: each ends in a named error, after a bounded number of steps."""

from __future__ import annotations

from typing import Any

import pytest

from agentmesh_dagster.errors import ExpressionError
from agentmesh_dagster.specs.evaluator import MAX_TOKENS, compile_text
from agentmesh_dagster.specs.expressions import check, evaluate, render
from agentmesh_dagster.specs.sandbox import MAX_INT_BITS, MAX_STEPS, Evaluation, Refusal

pytestmark = pytest.mark.timeout(30)

LARGEST = 2**MAX_INT_BITS - 1
TOO_LARGE = 2**MAX_INT_BITS
LITERALS = {
    "decimal": str(TOO_LARGE),
    "underscored": f"{TOO_LARGE:_}",
    "hexadecimal": hex(TOO_LARGE),
    "octal": oct(TOO_LARGE),
    "binary": bin(TOO_LARGE),
    "hexadecimal, underscored": "0x" + "_f" * (MAX_INT_BITS // 4 + 1),
    "hexadecimal of 100 KB": "0x" + "f" * 100_000,
}


def refused(template: Any, names: dict[str, Any] | None = None) -> ExpressionError:
    with pytest.raises(ExpressionError) as caught:
        render(template, names or {})
    return caught.value


@pytest.mark.parametrize("literal", LITERALS)
def test_integers_are_bounded_as_literals(literal: str) -> None:
    with pytest.raises(ExpressionError, match=f"more than {MAX_INT_BITS} bits") as caught:
        check(f"{{{{ {LITERALS[literal]} }}}}", bare=False)
    assert caught.value.code == "expression-limit"
    check(f"{{{{ {hex(LARGEST)} }}}}", bare=False)


OPERATIONS = """\
a + 1;  0 - a - 2;  a * 2;  2 ** 5000;  a + a;  -b;  b // 3;  b % 7;  b / 2;  b ~ '';  '%d' % b;  b | abs | string
[b, b] | sum;  [a, a] | sum;  b | round;  b is divisibleby 3;  9999 ** 999;  ('F' * 1000) | int(0, 36)
"""


@pytest.mark.parametrize(
    "expression", [part.strip() for part in OPERATIONS.replace("\n", ";").split(";") if part]
)
def test_integers_are_bounded_as_operands_and_results(expression: str) -> None:
    with pytest.raises(ExpressionError, match=f"more than {MAX_INT_BITS} bits") as caught:
        evaluate(expression, {"a": LARGEST, "b": TOO_LARGE})
    assert caught.value.code == "expression-limit"


def test_integers_that_fit_are_calculated_exactly() -> None:
    assert evaluate("a // 3 + a % 3 - 5", {"a": LARGEST}) == LARGEST // 3 + LARGEST % 3 - 5
    assert evaluate("{'x': a}", {"a": TOO_LARGE}) == {"x": TOO_LARGE}  # data passes through


BIG = hex(LARGEST)
HALF = hex(2 ** (MAX_INT_BITS // 2) - 1)
KILOBYTES_135 = {
    "//": f"{{{{ {'0x' + 'f' * 60_000} // {'0x' + 'e' * 30_000} }}}}" + f"{{{{ {'0x' + 'f' * 45_000} }}}}",
    "// of integers that fit": f"{{{{ {BIG} // {HALF} }}}}" * 85,
    "one long sum": "{{ 1" + "+1" * 67_000 + " }}",
    "list of literals": "{{ [" + "1," * 67_000 + "] }}",
    "many expressions": "{{ 1 }}" * 19_000,
    "many blocks": "{% if 1 %}{% endif %}" * 6_400,
    "a loop of divisions": "{% for i in range(99999) %}"
    + f"{{% set x = {BIG} // {HALF} %}}" * 80
    + "{% endfor %}",
}


@pytest.mark.parametrize("name", KILOBYTES_135)
def test_a_template_of_135_kilobytes_ends_in_a_clear_error(name: str) -> None:
    template = KILOBYTES_135[name]
    if name == "// of integers that fit":
        assert render(template, {}) == str(LARGEST // (2 ** (MAX_INT_BITS // 2) - 1)) * 85
        state = Evaluation({})
        compile_text(template, False).run(state)
        assert MAX_STEPS - state.steps > 85 * (MAX_INT_BITS >> 5)  # each is paid for
        return
    error = refused(template)
    assert error.code == "expression-limit"
    assert len(error.message) < 300


def test_the_number_of_words_and_signs_is_bounded_before_they_are_parsed() -> None:
    error = refused("{{ a " + "}}{{ a " * MAX_TOKENS + "}}")
    assert f"more than {MAX_TOKENS} words and signs" in error.message
    assert len(render("x" * 190_000 + "{{ 1 }}", {})) == 190_001  # text is one of them


def test_the_templates_of_one_value_share_a_budget() -> None:
    rows = list(range(30_000))
    loop = "{% for i in rows %}{% endfor %}"
    assert render([loop], {"rows": rows}) == [""]
    error = refused({"body": [loop] * 50}, {"rows": rows})
    assert f"more than {MAX_STEPS} steps" in error.message
    assert "body[" in error.message
    assert refused([f"{{{{ {n} + 1 }}}}" for n in range(20_000)]).code == "expression-limit"


def test_variables_of_one_template_are_not_seen_by_the_next() -> None:
    assert refused(["{% set a = 1 %}{{ a }}", "{{ a }}"]).code == "expression-missing"


def spent(template: str, names: dict[str, Any]) -> int:
    state = Evaluation(names)
    try:
        compile_text(template, False).run(state)
    except Refusal as refusal:
        assert refusal.code == "expression-limit"  # noqa: PT017 - what did not fit is paid for too
    return MAX_STEPS - state.steps


@pytest.mark.parametrize(
    ("template", "least"),
    [
        ("{{ big | title }}", 300_000),
        ("{{ big.strip(big ~ 'y') }}", MAX_STEPS),
        ("{{ big | trim(big ~ 'y') }}", MAX_STEPS),
        ("{{ big | wordcount }}", 18_000),
        ("{{ lines | indent(1) }}", 75_000),
        ("{{ 'a'.startswith(words) }}", 20_000),
        ("{{ rows | tojson(indent=2) }}", 300_000),
        ("{{ rows | map('tojson') | list }}", 200_000),
        ("{% for i in rows %}{{ i.f | round(2) }}{% endfor %}", 200_000),
        (
            "".join(f"{{% set v{n} = 1 %}}" for n in range(1_000)) + "{% for i in words %}{% endfor %}",
            MAX_STEPS,
        ),
    ],
)
def test_what_takes_long_costs_much(template: str, least: int) -> None:
    names = {
        "big": "x" * 300_000,
        "lines": "a\n" * 150_000,
        "words": ["w"] * 20_000,
        "rows": [{"f": n * 1.5, "t": f"text {n}"} for n in range(20_000)],
    }
    assert spent(template, names) >= least


def test_an_error_about_a_large_object_shows_a_part_of_its_keys() -> None:
    error = refused("{{ input.nothing }}", {"input": {f"k{n}": n for n in range(500_000)}})
    assert "and 499988 more" in error.message
