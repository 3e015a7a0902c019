"""Which sets `--data` stands for: all of BEIR by one word, twelve parts that make one row, splits as published."""

from __future__ import annotations

import pytest

from contaccum.data.beir_names import CQADUPSTACK_FORUMS, NOT_PUBLIC, PUBLIC_NAMES
from contaccum.errors import DataError
from contaccum.evaluation.beir_sets import evaluation_sets


def test_beir_is_all_public_sets_and_counts_cqadupstack_once():
    sets = evaluation_sets(["beir"])
    assert list(dict.fromkeys(one.row for one in sets)) == list(PUBLIC_NAMES)
    assert [one.label for one in sets if one.row == "cqadupstack"] == [f"cqadupstack/{f}" for f in CQADUPSTACK_FORUMS]
    assert len(sets) == len(PUBLIC_NAMES) - 1 + 12 and not {one.row for one in sets} & set(NOT_PUBLIC)
    assert {one.row for one in sets if one.split == "dev"} == {"msmarco"}
    assert {one.split for one in sets} == {"dev", "test"}


def test_a_split_that_is_asked_for_holds_for_all():
    assert {one.split for one in evaluation_sets(["beir"], "train")} == {"train"}


def test_a_folder_with_all_parts_is_cqadupstack_and_one_with_some_is_refused(tmp_path, write_beir_folder):
    folder = tmp_path / "copy"
    for forum in CQADUPSTACK_FORUMS[:-1]:
        write_beir_folder(folder / forum)
    with pytest.raises(DataError, match=r"copy: .* mean over twelve parts, and wordpress is not there"):
        evaluation_sets([str(folder)])
    write_beir_folder(folder / "wordpress")
    sets = evaluation_sets([str(folder)])
    assert {one.row for one in sets} == {"cqadupstack"} and len(sets) == 12
    assert sets[0].given == str(folder / "android")


def test_a_part_by_itself_says_what_it_is_a_part_of(tmp_path, write_beir_folder):
    write_beir_folder(tmp_path / "cqadupstack" / "gis")
    for given in ("cqadupstack/gis", str(tmp_path / "cqadupstack" / "gis")):
        (one,) = evaluation_sets([given])
        assert (one.label, one.row) == ("cqadupstack/gis", "cqadupstack/gis")


@pytest.mark.parametrize("given", ["x" * 5000, "a\0b", ""])
def test_nonsense_is_left_for_the_reader_to_refuse(given):
    assert evaluation_sets([given])[0].given == given
