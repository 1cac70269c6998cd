"""Files that would keep an import busy: each is refused by its bound, at its line."""

from __future__ import annotations

import pytest

from agentmesh_dagster.errors import DefinitionError
from agentmesh_dagster.specs.loading import MAX_ANCHORS, MAX_DOCUMENTS, MAX_INT_BITS, load_documents

pytestmark = pytest.mark.timeout(30)

TOO_LARGE = 2**MAX_INT_BITS
FILES = {
    "120,000 documents": (
        "a: 1\n---\n" * 120_000,
        "document-too-large",
        f"more than {MAX_DOCUMENTS} documents",
    ),
    "500,000 empty documents": (
        "---\n" * 400_000,
        "document-too-large",
        f"more than {MAX_DOCUMENTS} documents",
    ),
    "150,000 anchors": (
        "a:\n" + "".join(f"- &a{n} x\n" for n in range(150_000)),
        "document-alias",
        f"more than {MAX_ANCHORS} anchors",
    ),
    "anchors of lists": ("a: [" + "&a [], " * 200_000 + "1]", "document-alias", "anchors"),
    "1,000,000 items": ("a: [" + "1," * 990_000 + "1]", "document-too-large", "too many values"),
    "600,000 objects": ("a: [" + "{}," * 600_000 + "1]", "document-too-large", "too many values"),
    "300,000 aliases": ("a: &a 1\nb:\n" + "- *a\n" * 300_000, "document-alias", "expand to too much"),
    "a decimal": (f"a: {TOO_LARGE}", "document-number", f"more than {MAX_INT_BITS} bits"),
    "a negative": (f"a: -{TOO_LARGE}", "document-number", f"more than {MAX_INT_BITS} bits"),
    "a hexadecimal": (f"a: {hex(TOO_LARGE)}", "document-number", f"more than {MAX_INT_BITS} bits"),
    "an octal": (f"a: {oct(TOO_LARGE)}", "document-number", f"more than {MAX_INT_BITS} bits"),
    "a hexadecimal of 1.9 MB": (
        "a: 0x" + "f" * 1_900_000,
        "document-number",
        f"more than {MAX_INT_BITS} bits",
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_refused_by_its_bound(name: str) -> None:
    text, code, message = FILES[name]
    with pytest.raises(DefinitionError, match=message) as caught:
        load_documents(text, source="file.yaml")
    assert caught.value.code == code
    assert caught.value.context["line"] >= 1


@pytest.mark.parametrize("number", [TOO_LARGE, -TOO_LARGE])
def test_integers_of_json_are_bounded(number: int) -> None:
    with pytest.raises(DefinitionError, match=f"more than {MAX_INT_BITS} bits") as caught:
        load_documents(f'{{"a": [{number}]}}', source="file.json")
    assert caught.value.code == "document-number"


def test_what_is_within_the_bounds_is_loaded() -> None:
    assert len(load_documents("a: 1\n---\n" * (MAX_DOCUMENTS - 1), source="file.yaml")) == MAX_DOCUMENTS - 1
    for source, text in (("x.yaml", f"a: {TOO_LARGE - 1}"), ("x.json", f'{{"a": {TOO_LARGE - 1}}}')):
        assert load_documents(text, source=source) == [{"a": TOO_LARGE - 1}]
    anchors = "a:\n" + "".join(f"- &a{n} x\n" for n in range(MAX_ANCHORS)) + "b: *a7\n"
    assert load_documents(anchors, source="file.yaml")[0]["b"] == "x"
