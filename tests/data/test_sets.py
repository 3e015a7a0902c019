"""Several sets: what is said of each, and what they know of each other."""

from typing import Any

import pytest
from data_files import ids, put_lines

from contaccum.data import TrainingSets, load_training_data, load_training_sets, parse_training_sets
from contaccum.errors import ConfigError


def load(*given: Any, **common: Any) -> TrainingSets:
    return load_training_sets(
        parse_training_sets([x if isinstance(x, dict) else str(x) for x in given], common)
    )


def test_a_set_is_said_in_paths_mappings_and_json_and_overrides_what_is_common():
    common = {"num_hard_negatives": 1, "split": "dev"}
    own = {"path": "a.tsv", "name": "n", "format": "csv", "split": "test"}
    given = ["x/pairs.jsonl", '{"path": "b.csv", "columns": {"query": "q"}}', own]
    assert parse_training_sets(given, common) == {
        "pairs": {**common, "path": "x/pairs.jsonl", "columns": {}},
        "b": {**common, "path": "b.csv", "columns": {"query": "q"}},
        "n": {**common, "path": "a.tsv", "columns": {}, "split": "test", "data_format": "csv"},
    }


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            [{"path": "a", "colums": {}}],
            "a key of a set must be one of .*, got 'colums'; did you mean 'columns'",
        ),
        ([{"name": "a"}], "a set has a path"),
        (["{broken"], "train_data: '{broken': "),
        ([{"path": "a", "format": "xlsx"}], "train_data: .*: format must be one of"),
        (["x/a.jsonl", "y/a.csv"], "two sets are called 'a'"),
    ],
)
def test_what_cannot_be_said_of_a_set_is_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        parse_training_sets(given)


def test_sets_know_each_others_positives_and_bring_ids(tmp_path):
    one = put_lines(
        tmp_path / "a.jsonl", {"query": "q", "positive": "p"}, {"query": "r", "positive": "s"}
    )
    other = put_lines(
        tmp_path / "b.jsonl", {"query": "q", "positive": "t"}, {"query": "u", "positive": "p"}
    )
    sets = load(one, other)
    assert list(sets.dataset) == ["a", "b"]
    for part in sets.parts.values():
        assert part.known_positives.tolist() == sorted([ids("q", "p"), ids("q", "t")])
    assert sets.dataset["b"][1] == {"query": "u", "positive": "p", "label": ids("u", "p")}
    assert sets.fingerprint not in {part.fingerprint for part in sets.parts.values()}
    assert load(other, one).fingerprint != sets.fingerprint == load(one, other).fingerprint
    assert load(one).fingerprint == load_training_data(one).fingerprint
    assert sets.summary() == "a: 2 records: 2 used, 0 left out\nb: 2 records: 2 used, 0 left out"
    content = load_training_data(one).fingerprint
    about = {"path": str(one), "format": "pairs", "fingerprint": content, "rows": 2}
    assert sets.record()["sets"]["a"] == about and sets.record()["fingerprint"] == sets.fingerprint
