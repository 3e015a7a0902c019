"""Several training sets: their settings, and the known positives that they share."""

from pathlib import Path

import pytest
from data_files import ids, put_lines

from contaccum.data import TrainingSets, load_training_data, load_training_sets, parse_training_sets
from contaccum.errors import ConfigError


def load(*paths: Path) -> TrainingSets:
    return load_training_sets(parse_training_sets([str(path) for path in paths]))


def test_sets_are_paths_mappings_or_json():
    """The settings of a set override the common ones, unless they are null."""
    common = {"num_hard_negatives": 1, "split": "dev"}
    mapping = {"path": "a.tsv", "name": "n", "split": "test"}
    text = '{"path": "b.csv", "name": null, "columns": {"query": "q"}}'
    sets = [Path("x/pairs.jsonl"), text, mapping]
    assert parse_training_sets(sets, common) == {
        "pairs": {**common, "path": "x/pairs.jsonl", "columns": {}},
        "b": {**common, "path": "b.csv", "columns": {"query": "q"}},
        "n": {**common, "path": "a.tsv", "columns": {}, "split": "test"},
    }


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        ([{"path": "a", "colums": {}}], "did you mean 'columns'"),
        ([{"name": "a"}], "a set has a path"),
        (["{broken"], "train_data: '{broken': "),
        (["x/a.jsonl", "y/a.csv"], "two sets are called 'a'"),
        ([{"path": "a", "min_score": "0.5"}], "min_score must be a number, got '0.5'"),
    ],
)
def test_invalid_settings_of_a_set_are_refused(sets, message):
    with pytest.raises(ConfigError, match=message):
        parse_training_sets(sets)


def test_sets_share_known_positives_and_have_text_ids(tmp_path):
    first = put_lines(
        tmp_path / "a.jsonl", {"query": "q", "positive": "p"}, {"query": "r", "positive": "s"}
    )
    second = put_lines(
        tmp_path / "b.jsonl", {"query": "q", "positive": "t"}, {"query": "u", "positive": "p"}
    )
    sets = load(first, second)
    assert list(sets.dataset) == ["a", "b"]
    for part in sets.parts.values():
        assert part.known_positives.tolist() == sorted([ids("q", "p"), ids("q", "t")])
    assert sets.dataset["b"][1] == {"query": "u", "positive": "p", "label": ids("u", "p")}
    assert sets.fingerprint not in {part.fingerprint for part in sets.parts.values()}
    assert load(second, first).fingerprint != sets.fingerprint == load(first, second).fingerprint
    assert load(first).fingerprint == load_training_data(first).fingerprint
    assert sets.summary().splitlines() == [
        f"a: 2 records in {first}: 2 used, 0 left out",
        f"b: 2 records in {second}: 2 used, 0 left out",
    ]
    content = load_training_data(first).fingerprint
    expected = {"path": str(first), "format": "pairs", "fingerprint": content, "rows": 2}
    assert sets.record()["sets"]["a"] == expected
    assert sets.record()["fingerprint"] == sets.fingerprint


def test_the_summary_names_sets_whose_negatives_are_not_used(tmp_path):
    pair = {"query": "q", "positive": "p"}
    sets = {
        "with": {"path": put_lines(tmp_path / "with.jsonl", {**pair, "negative": "n"}, pair)},
        "without": {"path": put_lines(tmp_path / "without.jsonl", pair)},
    }
    line_with, line_without = load_training_sets(sets).summary().splitlines()
    assert line_with.endswith("its hard negatives are not used (num_hard_negatives=0)")
    assert "not used" not in line_without
    used = load_training_sets({"with": sets["with"]}, num_hard_negatives=1)
    assert "not used" not in used.summary()
