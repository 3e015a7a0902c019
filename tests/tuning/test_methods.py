"""The methods of a search: those that are possible, and the batches of query-side training."""

from __future__ import annotations

import pytest

from contaccum.encoders import adapters
from contaccum.errors import ConfigError
from contaccum.training.arguments import ContAccumTrainingArguments
from contaccum.tuning.methods import (
    adapt_options,
    make_base_options,
    round_up,
    select_methods,
)
from contaccum.tuning.options import Options, all_options, parse, to_command_line
from contaccum.tuning.space import METHODS

RUN: Options = {
    "model": ["model"],
    "train_data": ["pairs.jsonl"],
    "output_dir": ["unused"],
    "passage_store": ["store"],
    "use_cpu": ["true"],
}


def parse_query_side(
    options: Options, num_processes: int, fixed_keys: tuple[str, ...] = ()
) -> ContAccumTrainingArguments:
    """Parse the options as a query-side training does."""
    run_options = adapt_options(
        {**RUN, **options}, "query_side", "s", fixed_keys=fixed_keys, num_processes=num_processes
    )
    return parse(to_command_line(run_options))[1]


@pytest.mark.parametrize("num_processes", [1, 2, 4, 8])
def test_query_side_batches_are_divided_among_the_processes(num_processes, monkeypatch):
    """The totals are those that `make_start_options` rounds up for micro-batches of 8 pairs."""
    monkeypatch.setattr(ContAccumTrainingArguments, "world_size", num_processes)
    totals = {round_up(pairs, 8 * num_processes) for pairs in range(8, 129, 8)}
    for total in sorted(totals):
        args = parse_query_side({"total_train_batch_size": [str(total)]}, num_processes)
        assert args.total_train_batch_size == total
        assert 8 <= args.per_device_train_batch_size <= 32
    assert parse_query_side({}, num_processes).total_train_batch_size == 128


def test_query_side_batch_that_cannot_be_divided_is_refused():
    for total in ("2", "6"):
        with pytest.raises(ConfigError, match="give a multiple of 4, the number of processes"):
            parse_query_side({"total_train_batch_size": [total]}, 4)


def test_sizes_that_the_user_has_fixed_are_those_of_query_side_training():
    key = "per_device_train_batch_size"
    options = {key: ["4"], "total_train_batch_size": ["64"]}
    assert parse_query_side(options, 1, (key,)).per_device_train_batch_size == 4
    assert parse_query_side(options, 1).per_device_train_batch_size == 32
    args = parse_query_side({key: ["24"]}, 1, (key,))
    assert (args.per_device_train_batch_size, args.total_train_batch_size) == (24, 144)
    options = {key: ["8"], "gradient_accumulation_steps": ["4"]}
    args = parse_query_side(options, 1, ("gradient_accumulation_steps",))
    assert args.total_train_batch_size == 32


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"matryoshka_dims": ["384", "96"]}, r"matryoshka_dims=\[384, 96\]: the method has no"),
        ({"no_mask_duplicates": []}, "mask_duplicates=False: the method has no"),
        ({"guide": ["other/model"]}, "guide=other/model: the method has no"),
        ({"lora_r": ["4"], "load_in_4bit": ["true"]}, "load_in_4bit: the store would not fit"),
    ],
)
def test_query_side_is_left_out_if_it_lacks_a_setting(options, reason, monkeypatch):
    """Otherwise the setting would be lost if query_side was chosen."""
    monkeypatch.setattr(adapters, "make_4bit_kwargs", dict)
    lines: list[str] = []
    methods = select_methods({**RUN, **options}, list(options), 1, lines.append)
    assert methods == ["contaccum", "grad_cache"]
    [line] = lines
    assert line.startswith("query_side is not tried: method=query_side with ")
    with pytest.raises(ConfigError, match=reason):
        select_methods({**RUN, **options, "method": ["query_side"]}, ["method"], 1, lines.append)


def test_settings_of_the_bank_leave_out_no_method():
    lines: list[str] = []
    options = {**RUN, "bank_size": ["64"], "bank_weight": ["0.5"]}
    assert select_methods(options, list(options), 1, lines.append) == list(METHODS)
    assert lines == []


def test_base_model_has_no_adapter():
    """Its embeddings of documents fit the document tower of a query-side training."""
    options = all_options([], ["--lora_r", "4", "--lora_dropout=0.1", "--no_tied", "--bf16"])
    base_options = make_base_options({**RUN, **options})
    assert {"lora_r", "lora_dropout", "passage_store"}.isdisjoint(base_options)
    model_args, args = parse(to_command_line(base_options))
    assert (model_args.lora_r, model_args.tied, args.bf16) == (None, False, True)


@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_plain_batch_is_the_whole_update(num_processes, monkeypatch):
    monkeypatch.setattr(ContAccumTrainingArguments, "world_size", num_processes)
    options = {**RUN, "per_device_train_batch_size": ["8"], "total_train_batch_size": ["128"]}
    del options["passage_store"]
    adapted = adapt_options(options, "in_batch", None, num_processes=num_processes)
    args = parse(to_command_line(adapted))[1]
    assert args.per_device_train_batch_size == 128 // num_processes
    fixed_keys = ("per_device_train_batch_size",)
    adapted = adapt_options(
        options, "in_batch", None, fixed_keys=fixed_keys, num_processes=num_processes
    )
    args = parse(to_command_line(adapted))[1]
    assert args.total_train_batch_size == 8 * num_processes


def test_a_method_of_the_config_that_is_not_tried_is_named():
    lines: list[str] = []
    options = {**RUN, "method": ["contaccum_cached"]}
    assert "contaccum_cached" not in select_methods(options, (), 1, lines.append)
    assert [line.partition(" of")[0] for line in lines] == ["method=contaccum_cached"]


def test_a_plain_batch_whose_sizes_contradict_each_other_is_refused():
    options = {**RUN, "per_device_train_batch_size": ["8"], "total_train_batch_size": ["128"]}
    del options["passage_store"]
    fixed_keys = ("per_device_train_batch_size", "total_train_batch_size")
    adapted = adapt_options(options, "in_batch", None, fixed_keys=fixed_keys)
    with pytest.raises(ConfigError, match="total_train_batch_size=128"):
        parse(to_command_line(adapted))
