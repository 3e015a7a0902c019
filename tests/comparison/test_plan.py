"""The plan of the runs: no run twice, equal batch sizes, and mistakes refused before a run."""

from collections.abc import Sequence
from typing import Any

import pytest
import yaml

from contaccum.comparison.options import read_options
from contaccum.comparison.plan import Plan, make_plan
from contaccum.errors import ConfigError
from contaccum.training.arguments import ContAccumTrainingArguments


def plan_runs(
    tokens: list[str],
    methods: list[str],
    variants: Sequence[Sequence[str]] = (),
    grid: Sequence[str] = (),
    baseline: str | None = None,
) -> Plan:
    return make_plan(read_options([], tokens), methods, variants, grid, [0, 1], baseline)


def get_arguments(plan: Plan, entry: str) -> list[ContAccumTrainingArguments]:
    """Return the training arguments of an entry's groups."""
    arguments = []
    for group in plan.groups.values():
        if group.entry == entry:
            arguments.append(group.arguments.training)
    return arguments


def test_method_without_the_grid_setting_runs_once_for_all_cells(tokens):
    methods = ["in_batch", "grad_accum", "grad_cache", "contaccum", "pre_batch"]
    plan = plan_runs(tokens, methods, grid=["bank_size=8,16", "learning_rate=1e-5,5e-5"])
    counts = {entry.name: len(get_arguments(plan, entry.name)) for entry in plan.entries}
    assert counts == {
        "in_batch": 2,
        "grad_accum": 2,
        "grad_cache": 2,
        "contaccum": 4,
        "pre_batch": 4,
    }
    comparisons = [names for names in plan.comparisons if names[0].startswith("contaccum")]
    assert comparisons == [
        ("contaccum_bank_size-8_learning_rate-1e-5", "grad_accum_learning_rate-1e-5"),
        ("contaccum_bank_size-8_learning_rate-5e-5", "grad_accum_learning_rate-5e-5"),
        ("contaccum_bank_size-16_learning_rate-1e-5", "grad_accum_learning_rate-1e-5"),
        ("contaccum_bank_size-16_learning_rate-5e-5", "grad_accum_learning_rate-5e-5"),
    ]
    args = plan.groups["contaccum_bank_size-8_learning_rate-5e-5"].arguments.training
    assert args.bank_size == 8
    assert args.learning_rate == 5e-5


def test_in_batch_has_all_pairs_of_an_update_in_one_batch(tokens):
    grid = ["per_device_train_batch_size=4,8", "gradient_accumulation_steps=2,4"]
    plan = plan_runs(tokens, ["in_batch", "grad_accum"], grid=grid)
    batch_sizes = []
    for args in get_arguments(plan, "in_batch"):
        assert args.gradient_accumulation_steps == 1
        batch_sizes.append(args.per_device_train_batch_size)
    assert sorted(batch_sizes) == [4 * 2, 4 * 4, 8 * 2, 8 * 4]
    for name, baseline in plan.comparisons:
        args = plan.groups[name].arguments.training
        baseline_args = plan.groups[baseline].arguments.training
        assert args.total_train_batch_size == baseline_args.total_train_batch_size


def test_bank_settings_are_dropped_for_methods_without_a_bank(tokens):
    options = [*tokens, "--normalize_by", "all"]
    options += ["--mask_duplicates=false", "--center_gradients=both", "--temperature=0.1"]
    plan = plan_runs(options, ["grad_accum", "contaccum"])
    [without_bank] = get_arguments(plan, "grad_accum")
    assert without_bank.bank_size is None
    assert without_bank.normalize_by == "local"
    [with_bank] = get_arguments(plan, "contaccum")
    assert with_bank.bank_size == 20
    assert with_bank.normalize_by == "all"
    # Settings that need no bank are kept for both methods.
    for args in (without_bank, with_bank):
        assert args.mask_duplicates is False
        assert args.center_gradients == "both"
        assert args.temperature == 0.1


def test_variant_that_fixes_a_grid_value_is_compared_in_that_cell_only(tokens):
    variants = [
        ["published", "drift_compensation=none", "learning_rate=2e-5"],
        ["other", "method=pre_batch", "learning_rate=3e-5"],
    ]
    plan = plan_runs(tokens, ["grad_accum"], variants, ["learning_rate=1e-5,2e-5"])
    [published] = get_arguments(plan, "published")
    [other] = get_arguments(plan, "other")
    assert published.method == "contaccum"
    assert published.drift_compensation == "none"
    assert published.learning_rate == 2e-5
    assert other.method == "pre_batch"
    assert other.learning_rate == 3e-5
    # The value of `other` is in no cell, so it is compared in every cell.
    assert list(plan.comparisons) == [
        ("published_learning_rate-2e-5", "grad_accum_learning_rate-2e-5"),
        ("other", "grad_accum_learning_rate-1e-5"),
        ("other", "grad_accum_learning_rate-2e-5"),
    ]
    assert plan.groups["published_learning_rate-2e-5"].labels == {"learning_rate": "2e-5"}


def test_command_line_overrides_config_files(tmp_path):
    settings_of_comparison = {
        "seed": 3,
        "output_dir": "o",
        "eval_data": "d",
        "eval_strategy": "steps",
        "early_stopping_patience": 3,
        "load_best_model_at_end": True,
        "metric_for_best_model": "mrr@10",
        "save_steps": 2,
        "push_to_hub": True,
    }
    settings = {"model": "m", "bank_size": 8, "train_data": ["a", "b"], **settings_of_comparison}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(settings))
    options = read_options([str(path)], ["--bank-size", "16", "--no_bank_hard_negatives", "--bf16"])
    # A comparison sets the other settings itself, so it ignores their values in config files.
    assert options == {
        "model": ["m"],
        "bank_size": ["16"],
        "train_data": ["a", "b"],
        "no_bank_hard_negatives": [],
        "bf16": [],
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"options": ["--bank_sise", "3"]}, "unknown key 'bank_sise'.* did you mean 'bank_size'"),
        ({"options": ["--seed", "3"]}, "seed: a comparison sets it .* use --methods, --seeds"),
        ({"grid": ["bank_size"]}, "write key=value,value"),
        ({"grid": ["bank_size=8", "bank_size=16"]}, "--grid bank_size: is given twice"),
        ({"grid": ["bank_size=8,many"]}, "contaccum_bank_size-many: .*invalid int"),
        ({"methods": ["contacum"]}, "contacum.*did you mean 'contaccum'"),
        ({"methods": []}, "nothing to compare"),
        (
            {"variants": [["a", "method=grad_accum", "bank_size=8"]]},
            "a: method=grad_accum with bank_size=8",
        ),
        ({"variants": [["contaccum", "bank_size=8"]]}, "a name that is not taken"),
        ({"variants": [["a", "bank_size"]]}, "then key=value"),
        ({"variants": [["a", "seed=3"]]}, "seed: a comparison sets it"),
        ({"baseline": "grad_cache"}, "--baseline must be one of contaccum"),
    ],
)
def test_mistakes_are_refused_before_anything_runs(tokens, changes, message):
    settings: dict[str, Any] = {"methods": ["contaccum"], **changes}
    options = [*tokens, *settings.pop("options", [])]
    with pytest.raises(ConfigError, match=message):
        plan_runs(options, **settings)
