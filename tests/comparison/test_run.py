"""One run: the same data and weights for every method, and scoring that leaves no trace in training."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from sample_texts import sentences
from transformers import set_seed

from contaccum import ContAccumTrainingArguments, DualEncoder
from contaccum.comparison.evaluating import METRICS, EvaluationSettings, Evaluator, _plain_forward
from contaccum.comparison.plan import make_plan, read_entries
from contaccum.comparison.run import differences, job_of, run_job
from contaccum.comparison.trainer import ComparedTrainer, pairs_hash
from contaccum.data.pairs import load_training_data
from contaccum.errors import DataError
from contaccum.evaluation.beir import about_data
from contaccum.training.curves import read_log

METHODS = ["in_batch", "grad_accum", "grad_cache", "contaccum", "pre_batch"]
Options = dict[str, list[str]]


def results(
    options: Options, places: dict[str, str], folder: Path, methods: list[str], **settings: Any
) -> dict[str, Any]:
    evaluation = EvaluationSettings([places["beir"]], **settings)
    plan = make_plan(options, read_entries(methods, [], "contaccum"), {}, [3], folder=folder)
    fingerprint = places.get("fingerprint") or load_training_data(places["pairs"]).fingerprint
    sets = [about_data(dataset) for dataset in evaluation.load()]
    found = {}
    for run in plan.runs:
        path = folder / "runs" / run.name
        path.mkdir(parents=True)
        found[run.method] = run_job(job_of(run, evaluation, fingerprint, sets), path)
    return found


def test_every_method_starts_from_the_same_weights_and_sees_the_same_pairs_in_each_update(
    options: Options, places: dict[str, str], tmp_path: Path
):
    found = results(options, places, tmp_path, METHODS)
    assert len({result["initial_weights"] for result in found.values()}) == 1
    assert len({result["data_order"] for result in found.values()}) == 1
    assert len({result["final_weights"] for result in found.values()}) == 5
    for result in found.values():
        assert (result["updates"], result["pairs_per_update"], result["train_pairs"]) == (8, 12, 43)
        assert result["train_seconds"] > 0 and result["peak_memory_mb"] > 10 and result["grad_norm_ratio"] > 0
        scored = result["evaluations"]["beir"]
        for metric in METRICS:
            assert np.mean(scored["per_query"][metric]) == pytest.approx(scored["metrics"][metric])
        assert len(scored["query_ids"]) == 12 and result["curve"] == []
    assert json.loads(json.dumps(found)) == found


def test_every_method_draws_the_same_and_how_it_draws_is_part_of_what_a_run_is(
    options: Options, places: dict[str, str], tmp_path: Path
):
    path = tmp_path / "drawn.jsonl"
    passages = sentences(150, 6)
    records = [
        {"query": query, "positives": passages[2 * i : 2 * i + 1 + i % 2], "negatives": passages[100 : 100 + i % 5]}
        for i, query in enumerate(sentences(43, 1))
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    options = {**options, "train_data": [str(path)], "num_hard_negatives": ["2"], "num_train_epochs": ["3"]}
    found = {}
    for name, more in (("draw", {}), ("first", {"positives": ["first"]})):
        plan_options = {**options, **more}
        data = {key: value[0] for key, value in more.items()}
        fingerprint = load_training_data(path, num_hard_negatives=2, **data).fingerprint  # type: ignore[arg-type]
        found[name] = results(plan_options, {**places, "fingerprint": fingerprint}, tmp_path / name, METHODS[1:4])
        assert len({result["data_order"] for result in found[name].values()}) == 1
    draw, first = (found[name]["contaccum"] for name in ("draw", "first"))
    assert draw["data_order"] != first["data_order"]
    changed = differences(first["identity"], draw["identity"])
    assert len(changed) == 2 and "positives was first, is default" in changed[0] and changed[1].startswith("train_data")


def encoder(tiny_config: Any, tiny_tokenizer: Any) -> DualEncoder:
    set_seed(7)
    return DualEncoder.from_backbone(tiny_config, pooling="mean", normalize=True, tokenizer=tiny_tokenizer)


def test_a_sampler_that_orders_by_batch_size_is_noticed(tiny_config: Any, tiny_tokenizer: Any, tmp_path: Path):
    queries = [text for text in sentences(8) for _ in range(3)]  # so that batches without duplicates differ
    data = Dataset.from_dict({"query": queries, "positive": sentences(24, 1)})
    orders = {}
    for sampler in ("batch_sampler", "no_duplicates"):
        for method in ("grad_accum", "grad_cache"):
            args = ContAccumTrainingArguments(
                output_dir=str(tmp_path / sampler / method),
                method=method,
                batch_sampler=sampler,
                per_device_train_batch_size=4,
                gradient_accumulation_steps=2,
                num_train_epochs=1,
                save_strategy="no",
                disable_tqdm=True,
            )
            trainer = ComparedTrainer(
                model=encoder(tiny_config, tiny_tokenizer), args=args, train_dataset=data, quiet=True
            )
            trainer.train()
            orders[sampler, method] = trainer.data_order()
    assert orders["batch_sampler", "grad_accum"] == orders["batch_sampler", "grad_cache"]
    assert orders["no_duplicates", "grad_accum"] != orders["no_duplicates", "grad_cache"]


def tokens(rows: list[tuple[list[int], list[int]]], width: int, left: bool = False) -> dict[str, torch.Tensor]:
    batch = {}
    for place, name in enumerate(("query", "positive")):
        ids = [row[place] for row in rows]
        pads = [[0] * (width - len(row)) for row in ids]
        ones = [[1] * len(row) for row in ids]
        join = (lambda pad, row: pad + row) if left else (lambda pad, row: row + pad)
        batch[f"{name}_input_ids"] = torch.tensor([join(p, r) for p, r in zip(pads, ids, strict=True)])
        batch[f"{name}_attention_mask"] = torch.tensor([join(p, r) for p, r in zip(pads, ones, strict=True)])
    return batch


def test_hash_of_pairs_is_about_pairs_and_not_about_batches():
    rows = [([1, 2, 3], [4, 5]), ([6, 7], [8, 9, 10, 11]), ([1, 2], [5, 4]), ([3], [3])]
    whole = pairs_hash(tokens(rows, 5))
    assert whole == pairs_hash(tokens(rows[::-1], 9, left=True))
    assert whole == pairs_hash(tokens(rows[:1], 3)) + pairs_hash(tokens(rows[1:], 6))
    exchanged = [(rows[0][0], rows[1][1]), (rows[1][0], rows[0][1]), *rows[2:]]
    reordered = [([1, 3, 2], [4, 5]), *rows[1:]]
    turned = [(positive, query) for query, positive in rows]
    assert len({int(h) for h in (whole, *(pairs_hash(tokens(r, 5)) for r in (exchanged, reordered, turned)))}) == 4


@pytest.mark.parametrize("noisy", [False, True], ids=["as it is", "scoring that draws numbers"])
def test_scored_run_equals_the_unscored_one_bit_for_bit(
    options: Options, places: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, noisy: bool
):
    # Dropout is on, so that one number drawn from the training's generator would show.
    (plain,) = results(options, places, tmp_path / "plain", ["contaccum"]).values()
    first = Evaluator.first

    def drawing(self: Evaluator, model: Any) -> Any:
        torch.rand(3), np.random.rand(3), random.random()
        return first(self, model)

    if noisy:
        monkeypatch.setattr(Evaluator, "first", drawing)
    (scored,) = results(options, places, tmp_path / "scored", ["contaccum"], updates=3, before=True).values()
    assert scored["final_weights"] == plain["final_weights"] != plain["initial_weights"]
    logs = [read_log(tmp_path / name / "runs" / plain["name"] / "train_log.jsonl") for name in ("plain", "scored")]
    assert [r["loss"] for r in logs[0]] == [r["loss"] for r in logs[1]]
    assert [point["update"] for point in scored["curve"]] == [0, 3, 6, 8]
    assert scored["curve"][-1]["NDCG@10"] == scored["evaluations"]["beir"]["metrics"]["NDCG@10"]
    assert plain["evaluations"]["beir"]["per_query"] == scored["evaluations"]["beir"]["per_query"]
    seconds = [point["train_seconds"] for point in scored["curve"]]
    assert seconds == sorted(seconds) and seconds[0] == 0 and seconds[-1] == pytest.approx(scored["train_seconds"])


def test_time_of_scoring_is_not_time_of_training(
    options: Options, places: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    clock, late = time.perf_counter, [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + late[0])

    def slow(self: Evaluator, model: Any) -> dict[str, float]:
        late[0] += 1000.0
        return dict.fromkeys(METRICS, 0.5)

    monkeypatch.setattr(Evaluator, "first", slow)
    (found,) = results(options, places, tmp_path, ["grad_accum"], updates=1).values()
    assert found["train_seconds"] < 500 and found["seconds_per_update"] < 100
    assert found["evaluation_seconds"] > 7000


def test_scores_in_training_are_float32_whatever_the_training(tiny_config: Any, tiny_tokenizer: Any, tmp_path: Path):
    args = ContAccumTrainingArguments(
        output_dir=str(tmp_path), bf16=True, max_steps=1, bank_size=8, save_strategy="no", disable_tqdm=True
    )
    data = Dataset.from_dict({"query": sentences(8), "positive": sentences(8, 1)})
    model = encoder(tiny_config, tiny_tokenizer)
    ComparedTrainer(model=model, args=args, train_dataset=data, quiet=True).train()
    fresh = encoder(tiny_config, tiny_tokenizer)
    fresh.load_state_dict(model.state_dict())
    expected = fresh.encode_query(sentences(3))
    assert not np.array_equal(model.encode_query(sentences(3)), expected)  # the trap: autocast stays on the model
    with _plain_forward(model):
        assert np.array_equal(model.encode_query(sentences(3)), expected)
    assert not np.array_equal(model.encode_query(sentences(3)), expected)


def test_data_that_changed_meanwhile_is_refused(options: Options, places: dict[str, str], tmp_path: Path):
    evaluation = EvaluationSettings([places["beir"]])
    (run,) = make_plan(options, read_entries(["grad_accum"], [], "contaccum"), {}, [3], folder=tmp_path).runs
    with pytest.raises(DataError, match="has changed"):
        run_job(job_of(run, evaluation, "0" * 64, [about_data(d) for d in evaluation.load()]), tmp_path)


def test_what_changed_between_two_runs_is_named():
    before = {"contaccum": "1", "arguments": {"bank_size": 8}, "train_data": "a" * 64, "evaluation": {"updates": 0}}
    now = {"contaccum": "1", "arguments": {"learning_rate": 1e-4}, "train_data": "b" * 64, "evaluation": {"updates": 5}}
    assert differences(before, before) == []
    assert differences(before, now) == [
        "bank_size was 8, is default",
        "learning_rate was default, is 0.0001",
        "train_data was aaaaaaaa, is bbbbbbbb",
        "evaluation updates was 0, is 5",
    ]
