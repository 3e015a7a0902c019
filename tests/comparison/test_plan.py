"""Which runs there are: nothing twice, nothing unfair, and every mistake before the first run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from contaccum.comparison.command import _train_fingerprints
from contaccum.comparison.plan import make_plan, read_entries, read_grid, read_options
from contaccum.errors import ConfigError
from contaccum.training.config import parse

Options = dict[str, list[str]]


def plan(options: Options, methods: list[str], variants: Any = (), grid: Any = (), seeds: Any = (0, 1), **more: Any):
    return make_plan(options, read_entries(methods, variants, "contaccum"), read_grid(grid), seeds, **more)


def arguments_of(run: Any) -> Any:
    return parse(list(run.options))[2]


def test_a_method_without_the_gridded_setting_runs_once_for_all_cells(options: Options):
    found = plan(
        options,
        ["in_batch", "grad_accum", "grad_cache", "contaccum", "pre_batch"],
        grid=["bank_size=8,16", "drift_compensation=mean,none"],
    )
    counts = {entry.name: sum(g.entry == entry.name for g in found.groups.values()) for entry in found.entries}
    assert counts == {"in_batch": 1, "grad_accum": 1, "grad_cache": 1, "contaccum": 4, "pre_batch": 4}
    assert len(found.runs) == 2 * 11 and len({run.name for run in found.runs}) == 22
    assert [groups["grad_accum"] for _, groups in found.cells] == ["grad_accum"] * 4
    cell, groups = found.cells[1]
    assert cell == {"bank_size": "8", "drift_compensation": "none"}
    args = arguments_of(found.groups[groups["contaccum"]].runs[1])
    assert (args.bank_size, args.drift_compensation, args.seed) == (8, "none", 1)


def test_data_columns_reach_every_run_and_other_columns_are_other_data(options: Options, tmp_path: Path):
    data, config = tmp_path / "a.jsonl", tmp_path / "a.yaml"
    data.write_text('{"frage": "q", "gut": "p", "anders": "r"}\n')
    config.write_text(f"train_data: {data}\ndata_columns: {{query: frage, positive: gut}}\n")
    read = {**options, **read_options([str(config)], [])}
    fingerprints = []
    words = read_options([], ["--data_columns", "query=frage", "positive=anders"])
    for found in (plan(read, ["grad_accum"], seeds=[0]), plan({**read, **words}, ["grad_accum"], seeds=[0])):
        (run,) = found.runs
        assert parse(list(run.options))[1].data_columns == run.data.data_columns
        fingerprints.append(_train_fingerprints(found)[run.name])
    assert len(set(fingerprints)) == 2


def test_a_setting_that_every_method_has_is_crossed_with_all(options: Options):
    found = plan(options, ["grad_accum", "contaccum"], grid=["learning_rate=1e-5,5e-5"], seeds=[3])
    assert sorted(arguments_of(run).learning_rate for run in found.runs) == [1e-5, 1e-5, 5e-5, 5e-5]
    assert {run.labels["learning_rate"] for run in found.runs} == {"1e-5", "5e-5"}


def test_in_batch_is_one_batch_of_all_the_pairs_of_an_update(options: Options):
    found = plan(options, ["in_batch", "grad_accum"], seeds=[0])
    both = {run.method: arguments_of(run) for run in found.runs}
    assert (both["in_batch"].per_device_train_batch_size, both["in_batch"].gradient_accumulation_steps) == (12, 1)
    assert (both["grad_accum"].per_device_train_batch_size, both["grad_accum"].gradient_accumulation_steps) == (4, 3)
    assert {run.pairs_per_update for run in found.runs} == {12}


def test_in_batch_is_shared_by_cells_that_split_the_same_batch_in_other_ways(options: Options):
    grid = ["per_device_train_batch_size=4,8", "gradient_accumulation_steps=2,4"]
    found = plan(options, ["in_batch", "grad_accum"], grid=grid, seeds=[0])
    batches = {run.pairs_per_update for run in found.runs if run.entry == "in_batch"}
    assert batches == {8, 16, 32} and sum(run.entry == "in_batch" for run in found.runs) == 3
    for _, groups in found.cells:
        assert len({found.groups[name].runs[0].pairs_per_update for name in groups.values()}) == 1


def test_settings_of_the_bank_do_not_reach_methods_without_one(options: Options):
    options |= {"query_bank_size": ["10"], "mask_duplicates": ["false"], "grad_cache_mini_batch_size": ["2"]}
    options |= {"gradient_accumulation_steps": ["1"]}
    by_method = {r.method: arguments_of(r) for r in plan(options, ["grad_accum", "grad_cache", "pre_batch"]).runs}
    assert by_method["grad_accum"].bank_size == 0 and by_method["grad_accum"].grad_cache_mini_batch_size is None
    assert by_method["grad_cache"].grad_cache_mini_batch_size == 2
    assert (by_method["pre_batch"].bank_size, by_method["pre_batch"].query_bank_size) == (20, 0)


def test_a_variant_is_a_method_with_settings_of_its_own(options: Options):
    variants = [
        ["published", "method=contaccum", "drift_compensation=none", "bank_size=8"],
        ["plain", "bank_size=null"],
    ]
    found = plan(options, ["contaccum"], variants, ["bank_size=16,32"], seeds=[0], baseline="published")
    published = [run for run in found.runs if run.entry == "published"]
    assert len(published) == 1  # it has a bank of its own, whatever the grid says
    args = arguments_of(published[0])
    assert (args.method, args.drift_compensation, args.bank_size) == ("contaccum", "none", 8)
    assert {arguments_of(run).bank_size for run in found.runs if run.entry == "plain"} == {1024}
    assert found.baseline == "published"


def test_what_a_run_is_does_not_depend_on_where_it_lies(options: Options, tmp_path: Path):
    one, other = plan(options, ["contaccum"]), plan(options, ["contaccum"], folder=tmp_path)
    assert [run.arguments for run in one.runs] == [run.arguments for run in other.runs]
    assert one.runs[0].arguments["seed"] == 0 and one.runs[0].arguments["bank_size"] == 20
    assert "output_dir" not in one.runs[0].arguments and "temperature" not in one.runs[0].arguments


def test_values_that_no_folder_can_be_named_after_do_not_meet_in_one(options: Options):
    found = plan(options, ["contaccum"], grid=["query_prompt=a b,a/b,a-b"], seeds=[0])
    assert len({run.name for run in found.runs}) == 3
    assert all("/" not in run.name and " " not in run.name for run in found.runs)


def test_config_files_come_first_and_the_command_line_overrides(tmp_path: Path):
    path = tmp_path / "config.yaml"
    path.write_text("model: m\nseed: 3\noutput_dir: o\nbank_size: 8\nmask_duplicates: false\n")
    found = read_options([str(path)], ["--bank-size", "16", "--no_bank_hard_negatives", "--bf16"])
    expected = {"model": ["m"], "bank_size": ["16"], "mask_duplicates": ["false"], "bank_hard_negatives": ["false"]}
    assert found == {**expected, "bf16": []}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--bank_sise", "3"], "unknown key 'bank_sise' on the command line; did you mean 'bank_size'"),
        (["--metods", "contaccum"], "did you mean 'methods'"),
        (["--seed", "3"], "--seeds 0 1 2"),
        (["--method=contaccum"], "--methods"),
        (["--resume_from_checkpoint", "last"], "finished runs are kept"),
    ],
)
def test_options_that_are_no_ones_or_the_comparisons_own_are_refused(arguments: list[str], message: str):
    with pytest.raises(ConfigError, match=message):
        read_options([], arguments, frozenset({"methods", "seeds"}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"grid": ["bank_sise=3"]}, "'bank_sise' in --grid; did you mean 'bank_size'"),
        ({"grid": ["bank_size"]}, "write key=value,value"),
        ({"grid": ["bank_size=[3]"]}, "YAML scalars"),
        ({"grid": ["seed=1,2"]}, "--seeds"),
        ({"grid": ["method=contaccum"]}, "--methods"),
        ({"grid": ["bank_size=8", "bank_size=9"]}, "twice"),
        ({"grid": ["bank_size=8,many"]}, "contaccum_bank_size-many: .*invalid int"),
        ({"grid": ["bank_size=8,16", "query_bank_size=12"]}, "contaccum_bank_size-8_.*query_bank_size=12"),
        ({"methods": ["contacum"]}, "unknown method 'contacum'.*did you mean 'contaccum'"),
        ({"methods": []}, "nothing to compare"),
        ({"variants": [["a", "bank_sise=3"]]}, "in --variant a; did you mean 'bank_size'"),
        ({"variants": [["a", "method=grad_accum", "bank_size=8"]]}, "a: method=grad_accum with bank_size=8"),
        ({"variants": [["a", "method=contacum"]]}, "method must be one of"),
        ({"variants": [["contaccum", "bank_size=8"]]}, "of that name already"),
        ({"variants": [["bank_size=8"]]}, "a name comes first"),
        ({"baseline": "grad_cache"}, "not among what is compared"),
        ({"grid": ["dataloader_drop_last=true"]}, "would not see the same data"),
        ({"grid": ["eval_strategy=steps"]}, "eval_updates"),
    ],
)
def test_mistakes_are_refused_before_anything_runs(options: Options, changes: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        plan(options, **{"methods": ["contaccum"], **changes})
