"""Which runs there are: nothing twice, nothing unfair, and every mistake before the first run."""

from typing import Any

import pytest

from contaccum.comparison.plan import Plan, make_plan, read_options
from contaccum.errors import ConfigError


def plan(
    tokens: list[str], methods: list[str], variants: Any = (), grid: Any = (), baseline: Any = None
) -> Plan:
    return make_plan(read_options([], tokens), methods, variants, grid, [0, 1], baseline)


def arguments(found: Plan, entry: str) -> list[Any]:
    return [group.parsed[2] for group in found.groups.values() if group.entry == entry]


def test_a_method_without_the_gridded_setting_runs_once_for_all_cells(tokens):
    methods = ["in_batch", "grad_accum", "grad_cache", "contaccum", "pre_batch"]
    found = plan(tokens, methods, grid=["bank_size=8,16", "learning_rate=1e-5,5e-5"])
    counts = {entry.name: len(arguments(found, entry.name)) for entry in found.entries}
    assert counts == {
        "in_batch": 2,
        "grad_accum": 2,
        "grad_cache": 2,
        "contaccum": 4,
        "pre_batch": 4,
    }
    rates = ["grad_accum_learning_rate-1e-5", "grad_accum_learning_rate-5e-5"]
    assert [theirs for name, theirs in found.pairs if name.startswith("contaccum")] == rates * 2
    args = found.groups["contaccum_bank_size-8_learning_rate-5e-5"].parsed[2]
    assert (args.bank_size, args.learning_rate) == (8, 5e-5)


def test_in_batch_is_one_batch_of_all_the_pairs_of_an_update(tokens):
    grid = ["per_device_train_batch_size=4,8", "gradient_accumulation_steps=2,4"]
    found = plan(tokens, ["in_batch", "grad_accum"], grid=grid)
    assert {args.gradient_accumulation_steps for args in arguments(found, "in_batch")} == {1}
    assert sorted(args.per_device_train_batch_size for args in arguments(found, "in_batch")) == [
        8,
        16,
        16,
        32,
    ]
    for names in found.pairs:
        assert len({found.groups[name].parsed[2].total_train_batch_size for name in names}) == 1


def test_settings_of_the_bank_do_not_reach_methods_without_one(tokens):
    more = [
        "--mask_duplicates=false",
        "--center_gradients=both",
        "--normalize_by",
        "all",
        "--temperature=0.1",
    ]
    found = plan([*tokens, *more], ["grad_accum", "contaccum"])
    (plain,), (banked,) = (arguments(found, entry) for entry in ("grad_accum", "contaccum"))
    assert [(x.bank_size, x.normalize_by) for x in (plain, banked)] == [
        (None, "local"),
        (20, "all"),
    ]
    for args in (plain, banked):  # which need no bank
        assert (args.mask_duplicates, args.center_gradients, args.temperature) == (
            False,
            "both",
            0.1,
        )


def test_a_variant_that_fixes_a_value_of_the_grid_is_of_that_cell_alone(tokens):
    variants = [
        ["published", "drift_compensation=none", "learning_rate=2e-5"],
        ["other", "method=pre_batch", "learning_rate=3e-5"],
    ]
    found = plan(tokens, ["grad_accum"], variants, ["learning_rate=1e-5,2e-5"])
    (published,), (other,) = arguments(found, "published"), arguments(found, "other")
    assert (published.method, published.drift_compensation) == ("contaccum", "none")
    assert published.learning_rate == 2e-5
    assert (other.method, other.learning_rate) == ("pre_batch", 3e-5)
    slow, fast = "grad_accum_learning_rate-1e-5", "grad_accum_learning_rate-2e-5"
    # `other` is of no cell, and so beside all
    assert list(found.pairs) == [
        ("published_learning_rate-2e-5", fast),
        ("other", slow),
        ("other", fast),
    ]
    assert found.groups["published_learning_rate-2e-5"].labels == {"learning_rate": "2e-5"}


def test_config_files_come_first_and_the_command_line_overrides(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(
        "model: m\nseed: 3\noutput_dir: o\neval_data: d\nbank_size: 8\ntrain_data: [a, b]\n"
    )
    found = read_options([str(path)], ["--bank-size", "16", "--no_bank_hard_negatives", "--bf16"])
    lists = {"model": ["m"], "bank_size": ["16"], "train_data": ["a", "b"]}
    assert found == {**lists, "no_bank_hard_negatives": [], "bf16": []}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"more": ["--bank_sise", "3"]}, "unknown key 'bank_sise'.* did you mean 'bank_size'"),
        ({"more": ["--seed", "3"]}, "seed: a comparison sets it .* use --methods, --seeds"),
        ({"grid": ["bank_size"]}, "write key=value,value"),
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
    more = changes.pop("more", [])
    with pytest.raises(ConfigError, match=message):
        plan([*tokens, *more], **{"methods": ["contaccum"], **changes})
