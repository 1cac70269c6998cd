"""Documents from files: YAML 1.2 and JSON, and everything that is refused, by name and place."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from agentmesh_dagster.errors import DefinitionError
from agentmesh_dagster.specs.loading import MAX_BYTES, MAX_DEPTH, load_documents, load_path


def load_one(text: str | bytes, source: str = "flow.yaml") -> dict[str, object]:
    (document,) = load_documents(text, source=source)
    return document


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("yes", "yes"),
        ("no", "no"),
        ("on", "on"),
        ("Off", "Off"),
        ("y", "y"),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("1e3", 1000.0),
        ("1.5", 1.5),
        (".5", 0.5),
        ("-7", -7),
        ("+7", 7),
        ("010", 10),
        ("0o7", 7),
        ("0x1F", 31),
        ("0b11", "0b11"),
        ("1_000", "1_000"),
        ("12:30", "12:30"),
        ("2024-01-01", "2024-01-01"),
        ("2024-01-01T10:00:00Z", "2024-01-01T10:00:00Z"),
        ("'5'", "5"),
        ("!!str 5", "5"),
        ("!!float 5", 5.0),
        ("=", "="),
        ("-", None),
        ("1e", "1e"),
        ("123456789012345678901234567890", 123456789012345678901234567890),
    ],
)
def test_scalars_follow_yaml_1_2(written: str, value: object) -> None:
    found = load_one(f"a: {written}\n")["a"] if written != "-" else load_one("a: ''\n")["a"] or None
    assert found == value
    assert type(found) is type(value)


def test_words_of_yaml_1_1_are_names() -> None:
    assert load_one("on: {id: yes}\nno: 1\n") == {"on": {"id": "yes"}, "no": 1}


def test_both_parsers_of_pyyaml_read_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "a: [yes, 1e3, &x {b: 0o7}, *x]\nc: |\n  two\n  lines\nd: >-\n  folded\n  text\n"
    first = load_one(text)
    monkeypatch.setattr("agentmesh_dagster.specs.loading._LOADER", yaml.SafeLoader)
    assert (
        load_one(text)
        == first
        == {
            "a": ["yes", 1000.0, {"b": 7}, {"b": 7}],
            "c": "two\nlines\n",
            "d": "folded text",
        }
    )


def test_uses_of_an_anchor_share_nothing() -> None:
    document = load_one("a: &x {b: [1]}\nc: *x\n")
    document["a"]["b"].append(2)
    assert document["c"] == {"b": [1]}


def test_several_documents_in_one_file() -> None:
    assert load_documents("---\na: 1\n---\n# nothing\n---\nb: 2\n", source="x.yml") == [{"a": 1}, {"b": 2}]


def laughs(levels: int) -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, levels)]
    return "\n".join(lines)


REFUSED = [
    (
        "a: 1\nb:\n  c: 1\n  c: 2\n",
        "document-duplicate-key",
        r"f:4:3: the key 'c' stands twice .* first in line 3",
    ),
    ("{a: 1, 'a': 2}", "document-duplicate-key", "the key 'a' stands twice"),
    ("1: x", "document-key", "f:1:1: the key 1 is a number"),
    ("true: x", "document-key", "the key true is a boolean"),
    ("null: x", "document-key", "the key null is null"),
    ("? [a]\n: 1", "document-key", "a key is a list"),
    ("a: {{ x }}", "document-key", r"\{\{ ... \}\} must be quoted"),
    ("<<: {a: 1}", "document-key", "merge keys"),
    ("b: &b {a: 1}\nc:\n  <<: *b\n", "document-key", "f:3:3: merge keys"),
    ("a: !foo 1", "document-tag", "the tag '!foo'"),
    ("a: !!python/object/apply:os.system [x]", "document-tag", "'!!python/object/apply:os.system'"),
    ("a: !!int x", "document-tag", "'x' is not of the type !!int"),
    ("a: !!timestamp 2024-01-01", "document-tag", "!!timestamp"),
    ("a: !!binary eA==", "document-tag", "!!binary"),
    ("a: !!set {x}", "document-tag", "!!set"),
    ("a: .nan", "document-number", ".nan is not a number"),
    ("a: -.inf", "document-number", "-.inf is not a number"),
    ("a: 1e999", "document-number", "too large"),
    ("a: " + "9" * 5000, "document-number", "too many digits"),
    ("a: &x [*x]", "document-alias", r"\*x stands inside"),
    ("a: *x", "document-", "x"),
    (laughs(12), "document-alias", "aliases expand"),
    ("a: &a " + "x" * 100_000 + "\nb: [" + "*a, " * 1000 + "1]", "document-alias", "aliases expand"),
    ("[" * 100_000, "document-too-deep", f"more than {MAX_DEPTH} levels"),
    ("a: " + "{a: " * 5000, "document-too-deep", "levels"),
    ("- " * 5000, "document-too-deep", "levels"),
    (
        "".join(f"a{n}: &a{n} [" + (f"*a{n - 1}" if n else "") + "]\n" for n in range(80)),
        "document-too-deep",
        "levels",
    ),
    ("x" * (MAX_BYTES + 1), "document-too-large", f"larger than {MAX_BYTES} bytes"),
    ("x" * 10_000_000, "document-too-large", "larger"),
    (b"a: \xff", "document-encoding", "invalid byte at offset 3"),
    ("a: \x00", "document-control-character", r"f:1:4: .*U\+0000"),
    ("a: 1\nb: x\x1b[0m", "document-control-character", r"f:2:5: .*U\+001B"),
    ('a: "\\0"', "document-control-character", "escaped NUL"),
    ('a: "\\ud800"', "document-", "Unicode"),
    ("\ta: 1", "document-syntax", "f:1:1: .*not tabs"),
    ("a:\n\t- b", "document-syntax", "f:2:1"),
    ("a: [1", "document-syntax", "f:2:1|f:1"),
    ("a: b: c", "document-syntax", "f:1:5"),
    ("%YAML 1.1\n---\na: 1", "document-syntax", "another YAML than 1.2"),
    ("", "document-empty", "is empty"),
    ("# only a comment\n", "document-empty", "is empty"),
    ("---\n---\n", "document-empty", "is empty"),
    ("- a\n- b\n", "document-not-object", "is a list"),
    ("just text", "document-not-object", "is text"),
]


@pytest.mark.parametrize(("text", "code", "message"), REFUSED, ids=lambda part: repr(part)[:40])
def test_refused_yaml(text: str | bytes, code: str, message: str) -> None:
    started = time.process_time()
    with pytest.raises(DefinitionError, match=message) as caught:
        load_documents(text, source="f")
    assert caught.value.code.startswith(code)
    assert caught.value.path == "f"
    assert len(str(caught.value)) < 400
    assert time.process_time() - started < 2


REFUSED_JSON = [
    ('{"a": 1, "a": 2}', "document-duplicate-key", "f.json:1:10: the key 'a' stands twice"),
    ('{\n"b": {"a": 1,\n"a": 2}}', "document-duplicate-key", "f.json:3:1: .*first in line 2"),
    ('{"a": NaN}', "document-number", "NaN is not a JSON number"),
    ('{"a": -Infinity}', "document-number", "-Infinity"),
    ('{"a": 1e999}', "document-number", "too large"),
    ('{"a": ' + "9" * 5000 + "}", "document-number", "too many digits"),
    ("[" * 500_000, "document-too-deep", "levels"),
    ('{"a":' * 5000, "document-too-deep", "levels"),
    ('"' + '\\"' * 900_000, "document-syntax", "Unterminated"),
    ('{"a": "\\ud800"}', "document-encoding", "surrogate"),
    ('{"a": "\\u0000"}', "document-control-character", "NUL"),
    ('{"a": 1} {"b": 2}', "document-syntax", "f.json:1:10"),
    ('{"a": 1,}', "document-syntax", "f.json:1"),
    ("a: 1", "document-syntax", "is not JSON"),
    ("", "document-empty", "is empty"),
    ("[]", "document-not-object", "is a list"),
    (b"\xff\xfe{}", "document-encoding", "offset 0"),
]


@pytest.mark.parametrize(("text", "code", "message"), REFUSED_JSON, ids=lambda part: repr(part)[:40])
def test_refused_json(text: str | bytes, code: str, message: str) -> None:
    started = time.process_time()
    with pytest.raises(DefinitionError, match=message) as caught:
        load_documents(text, source="f.json")
    assert caught.value.code == code
    assert time.process_time() - started < 2


def test_json_keeps_what_it_holds() -> None:
    text = (
        '\ufeff{"on": "yes", "n": 123456789012345678901234567890, "x": "\\\\u0000 [[[[", "d": "2024-01-01"}'
    )
    assert load_one(text.encode(), "f.JSON") == {
        "on": "yes",
        "n": 123456789012345678901234567890,
        "x": "\\u0000 [[[[",
        "d": "2024-01-01",
    }


JSON_OBJECTS = st.dictionaries(
    st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")), max_size=8),
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")), max_size=12),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
        ),
        max_leaves=8,
    ),
    max_size=5,
)


@given(JSON_OBJECTS)
def test_json_reads_the_same_as_json_and_as_yaml(value: dict[str, object]) -> None:
    text = json.dumps(value, ensure_ascii=False)
    assert load_one(text, "f.json") == value
    assert load_one(text, "f.yaml") == value


def test_a_folder_is_read_in_order(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "b" / "two.yml").write_text("n: 2")
    (tmp_path / "a.yaml").write_text("n: 1")
    (tmp_path / "c.json").write_text('{"n": 4}')
    (tmp_path / "b" / "z.yaml").write_text("n: 3\n---\nn: 3.5")
    (tmp_path / "notes.txt").write_text("not: read: at: all")
    (tmp_path / ".hidden" / "x.yaml").write_text("n: 9")
    found = load_path(tmp_path)
    assert [document.data["n"] for document in found] == [1, 2, 3, 3.5, 4]
    assert found[0].source == str(tmp_path / "a.yaml")
    assert found[3].source == str(tmp_path / "b" / "z.yaml") + "#2"


def test_links_do_not_lead_out_of_a_folder(tmp_path: Path) -> None:
    outside, inside = tmp_path / "outside", tmp_path / "inside"
    (outside / "deep").mkdir(parents=True)
    inside.mkdir()
    (outside / "deep" / "secret.yaml").write_text("n: 1")
    (inside / "a.yaml").write_text("n: 2")
    (inside / "folder").symlink_to(outside / "deep")
    (inside / "same.yaml").symlink_to(inside / "a.yaml")
    assert [document.data["n"] for document in load_path(inside)] == [2, 2]
    (inside / "b.yaml").symlink_to(outside / "deep" / "secret.yaml")
    with pytest.raises(DefinitionError, match=r"b\.yaml.*is a link out of"):
        load_path(inside)


def test_paths_that_give_nothing(tmp_path: Path) -> None:
    with pytest.raises(DefinitionError, match="No such file") as caught:
        load_path(tmp_path / "none.yaml")
    assert caught.value.code == "document-unreadable"
    with pytest.raises(DefinitionError, match=r"holds no \.yaml"):
        load_path(tmp_path)
    os.mkfifo(tmp_path / "pipe.yaml")
    with pytest.raises(DefinitionError, match="not a regular file"):
        load_path(tmp_path / "pipe.yaml")
    (tmp_path / "pipe.yaml").unlink()
    (tmp_path / "big.yaml").write_bytes(b"a: " + b"x" * 10_000_000)
    with pytest.raises(DefinitionError, match=r"big\.yaml: is larger"):
        load_path(tmp_path)


def test_folder_leaves_inputs_out(tmp_path):
    (tmp_path / "inputs").mkdir()
    (tmp_path / "inputs" / "small.json").write_text('{"amount": 3}')
    (tmp_path / "a.yaml").write_text("kind: agent\nslug: a\n")
    assert [document.data["slug"] for document in load_path(tmp_path)] == ["a"]
