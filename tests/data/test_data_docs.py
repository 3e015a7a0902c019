"""The examples of docs/data.md can be read, and its tables list every field name."""

import re
from pathlib import Path

import pytest
from data_files import put, read

from contaccum.data import Record, sniff_format
from contaccum.data.dataset import SET_KEYS
from contaccum.data.records import FIELDS

DOCS = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")


def example(begins: str) -> str:
    """Return the indented block after the paragraph of the docs that begins with a text."""
    (text,) = re.findall(
        rf"^{re.escape(begins)}.*?\n\n((?:    [^\n]*\n)+)", DOCS, re.MULTILINE | re.DOTALL
    )
    return re.sub("^    ", "", text, flags=re.MULTILINE)


@pytest.mark.parametrize(
    ("begins", "data_format", "positives", "negatives"),
    [
        ("**`dpr`**", "dpr", ["Rain Water."], ["Snow Frozen."]),
        ("**`tevatron`**", "pairs", ["Rain Water."], []),
        ("**`pairs`", "pairs", ["Water that falls."], []),
        ("**A list of labels**", "pairs", ["Water that falls."], ["Frozen water."]),
        ("**`csv`**", "csv", ["Water, falling."], ["Snow is frozen."]),
    ],
)
def test_example_of_a_file_is_sniffed_and_read(tmp_path, begins, data_format, positives, negatives):
    path = put(tmp_path / "example", example(begins))
    assert sniff_format(path) == data_format
    assert read(path)[0][0] == Record("what is rain", positives, negatives)


def test_example_of_a_folder_is_sniffed_and_read(tmp_path):
    for line in example("**`beir`**").splitlines():
        name, content = line.split(None, 1)
        put(tmp_path / name, content + "\n")
    assert sniff_format(tmp_path) == "beir"
    (record,) = read(tmp_path)[0]
    assert record.query == "what is rain" and record.positives[0].endswith("Water that falls.")


def test_every_usual_name_and_key_of_a_set_is_documented():
    roles = "query|positive|negatives|title|score"
    rows = re.findall(rf"^\| `(?:{roles})` \|(.*)\|$", DOCS, re.MULTILINE)
    named = {name for row in rows for name in re.findall("`([a-z_0-9]+)`", row)}
    assert set().union(*FIELDS.values()) <= named
    (section,) = re.findall(r"^## Several sets\n(.*?)^## ", DOCS, re.MULTILINE | re.DOTALL)
    assert {name for name in SET_KEYS if f"`{name}`" not in section} == set()
