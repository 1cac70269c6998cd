"""The CSV profile of the data-quality pack."""

from __future__ import annotations

from pathlib import Path

import pytest

from definitions import data_quality
from definitions.data_quality import profile_csv


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands for the repository."""
    monkeypatch.setattr(data_quality, "ROOT", tmp_path.resolve())
    return tmp_path


def test_example_file():
    profile = profile_csv("packs/data_quality/orders.csv")
    assert profile["rows"] == 12
    assert profile["duplicate_rows"] == 1
    types = {column["name"]: column["type"] for column in profile["columns"]}
    assert types == {
        "order_id": "integer",
        "ordered_at": "date",
        "customer": "text",
        "country": "text",
        "amount": "number",
        "paid": "boolean",
    }
    assert profile["severity"] == "high"
    assert [(i["severity"], i["column"], i["message"]) for i in profile["issues"]] == [
        ("high", "country", "empty values: 3 of 12"),
        ("high", "amount", "not of type number: 1 value (line 10)"),
        ("low", None, "duplicate rows: 1 of 12"),
        ("low", "customer", "empty values: 1 of 12"),
        ("low", "amount", "empty values: 1 of 12"),
    ]


def test_clean_file(root: Path):
    (root / "a.csv").write_text("id,price\n1,2.5\n2,3\n")
    profile = profile_csv("a.csv")
    assert profile["severity"] == "none"
    assert profile["issues"] == []
    assert profile["columns"][1] == {"name": "price", "type": "number", "nulls": 0, "distinct": 2}


def test_ragged_rows_and_repeated_columns(root: Path):
    (root / "a.csv").write_text("id,id\n1,2\n3\n4,5,6\n")
    messages = [issue["message"] for issue in profile_csv("a.csv")["issues"]]
    assert messages == ["columns share a name: 'id'", "not 2 values in 2 rows (line 3, 4)"]


def test_mixed_types(root: Path):
    (root / "a.csv").write_text("when,x\n2026-01-01,a\n7,b\n2026-01-02,c\nsoon,d\n")
    assert [i["message"] for i in profile_csv("a.csv")["issues"]] == ["mixed types: date, integer, text"]


def test_header_alone(root: Path):
    (root / "a.csv").write_text("id,price\n")
    profile = profile_csv("a.csv")
    assert profile["rows"] == 0
    assert profile["issues"] == [{"severity": "high", "column": None, "message": "no data rows"}]


@pytest.mark.parametrize("path", ["../secret.csv", "/etc/passwd", "sub/../../secret.csv"])
def test_paths_out_of_the_repository_are_refused(root: Path, path: str):
    with pytest.raises(ValueError, match="leaves the repository"):
        profile_csv(path)


def test_links_out_of_the_repository_are_refused(root: Path, tmp_path_factory: pytest.TempPathFactory):
    outside = tmp_path_factory.mktemp("outside") / "secret.csv"
    outside.write_text("a\n1\n")
    (root / "link.csv").symlink_to(outside)
    with pytest.raises(ValueError, match="leaves the repository"):
        profile_csv("link.csv")


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "is empty"), (b"a\n\xff\xfe\n", "not UTF-8"), (b'a\n"' + b"x" * 200_000, "not a CSV file")],
)
def test_files_that_cannot_be_read(root: Path, content: bytes, message: str):
    (root / "a.csv").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        profile_csv("a.csv")


def test_missing_file(root: Path):
    with pytest.raises(ValueError, match=r"no file 'b\.csv'"):
        profile_csv("b.csv")
