"""Training on several sets: resuming, shares, prompts, negatives of different numbers, what a run says of it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from datasets import Dataset, DatasetDict
from sample_texts import sentences
from test_config import backbone, train  # noqa: F401  # backbone is a fixture
from test_trainer import arguments, build, log_of, pairs, state_of  # noqa: F401  # build is a fixture

from contaccum import ContAccumTrainer
from contaccum.comparison.trainer import ComparedTrainer
from contaccum.data.training_sets import TrainingSets, load_training_sets, parse_training_sets
from contaccum.errors import ConfigError
from contaccum.training.config import parse

SIZES = {"large": 30, "small": 9, "other": 5}


def write(folder: Path) -> dict[str, str]:
    """Three sets of pairs; of "small", each row has several positives and negatives."""
    paths = {}
    for place, (name, size) in enumerate(SIZES.items()):
        queries, passages = sentences(size, 10 * place + 1), sentences(3 * size, 10 * place + 2, 9)
        records: list[dict[str, Any]] = [
            {"query": query, "positives": passages[3 * i : 3 * i + (2 if name == "small" else 1)]}
            for i, query in enumerate(queries)
        ]
        if name == "small":
            negatives = sentences(4 * size, 5, 9)
            records = [{**r, "negatives": negatives[4 * i : 4 * i + 4]} for i, r in enumerate(records)]
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        paths[name] = str(path)
    return paths


def load(folder: Path, *given: Any) -> TrainingSets:
    paths = write(folder)
    small = {"path": paths["small"], "num_hard_negatives": 2}
    return load_training_sets(parse_training_sets(given or [paths["large"], small, paths["other"]], {}))


def trainer_of(build: Any, folder: Path, sets: TrainingSets, **settings: Any) -> ComparedTrainer:  # noqa: F811
    args = arguments(folder, **{"multi_dataset_batch_sampler": "temperature", **settings})
    return ComparedTrainer(model=build(), args=args, train_dataset=sets.dataset, quiet=True)


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["temperature", "proportional", "round_robin"])
def test_a_run_on_several_sets_resumes_bit_for_bit(build: Any, sampler: str, tmp_path: Path) -> None:  # noqa: F811
    sets = load(tmp_path)
    settings = {"multi_dataset_batch_sampler": sampler, "num_train_epochs": 2}
    straight = trainer_of(build, tmp_path / "a", sets, save_strategy="steps", save_steps=1, **settings)
    straight.train()
    expected, losses = state_of(straight), [line["loss"] for line in log_of(tmp_path / "a")]
    for update in (1, len(losses) - 1):  # inside the first epoch, inside the second
        resumed = trainer_of(build, tmp_path / f"b{update}", load(tmp_path), **settings)
        resumed.train(resume_from_checkpoint=str(tmp_path / "a" / f"checkpoint-{update}"))
        state = state_of(resumed)
        assert [key for key in expected if not torch.equal(state[key], expected[key])] == []
        assert [line["loss"] for line in log_of(tmp_path / f"b{update}")] == losses[update:]


def test_the_order_depends_on_the_seed_alone(build: Any, tmp_path: Path) -> None:  # noqa: F811
    def order(name: str, **settings: Any) -> str | None:
        trainer = trainer_of(build, tmp_path / name, load(tmp_path), **{"num_train_epochs": 1, **settings})
        trainer.train()
        return trainer.data_order()

    base = order("base")
    assert order("workers", dataloader_num_workers=2) == base == order("weights", seed=6, data_seed=5)
    assert order("seed", seed=6) != base
    assert order("proportional", multi_dataset_batch_sampler="proportional", data_seed=5, seed=1) == order(
        "proportional again", multi_dataset_batch_sampler="proportional", data_seed=5, seed=2
    )


def test_ranks_share_the_batches_of_one_order(build: Any, tmp_path: Path) -> None:  # noqa: F811
    """Whatever wraps the sampler for two ranks deals its batches out; it does not change them.

    On several devices sentence-transformers sets dataloader_drop_last, because a short batch would stop the others.
    """
    from accelerate.data_loader import BatchSamplerShard

    trainer = trainer_of(build, tmp_path, load(tmp_path), dataloader_drop_last=True)
    sampler: Any = trainer.get_train_dataloader().batch_sampler
    alone = list(sampler)
    ranks = [list(BatchSamplerShard(sampler, 2, rank, even_batches=False)) for rank in (0, 1)]
    dealt = [batch for pair in zip(*ranks, strict=False) for batch in pair]
    assert dealt == alone[: len(dealt)] and len(alone) - len(dealt) < 2


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"multi_dataset_batch_sampler": "proportional"}, [8, 3, 2]),
        ({"multi_dataset_batch_sampler": "round_robin"}, [2, 2, 2]),
        ({"sampling_temperature": 1e9}, [5, 4, 4]),
        ({"sampling_temperature": 1.0}, [9, 3, 1]),  # by rows, where proportional goes by batches
        ({"multi_dataset_batch_sampler": "weights", "sampling_weights": {"other": 11}}, [1, 1, 11]),
    ],
)
def test_micro_batches_are_of_one_set_in_the_shares_asked_for(
    build: Any,  # noqa: F811
    settings: dict[str, Any],
    expected: list[int],
    tmp_path: Path,
) -> None:
    sets = load(tmp_path)
    trainer = trainer_of(build, tmp_path / "run", sets, prompts={name: {"query": "a "} for name in SIZES}, **settings)
    queries = {row["query"]: name for name, part in sets.dataset.items() for row in part}
    seen: list[str] = []
    collate = trainer.data_collator

    class Counted:
        valid_label_columns = collate.valid_label_columns

        def __call__(self, rows: list[dict[str, Any]]) -> Any:
            (name,) = {queries[row["query"]] for row in rows}
            assert {row["dataset_name"] for row in rows} == {name}
            seen.append(name)
            return collate(rows)

    trainer.data_collator = Counted()
    for _ in trainer.get_train_dataloader():
        pass
    assert [Counter(seen)[name] for name in SIZES] == expected
    shares = {name: (about["batches_per_epoch"], about["rows"]) for name, about in trainer.set_shares.items()}
    assert shares == {name: (count, SIZES[name]) for name, count in zip(SIZES, expected, strict=True)}


def test_each_set_keeps_its_prompts(build: Any, tmp_path: Path) -> None:  # noqa: F811
    paths = write(tmp_path)
    asked = [{"path": paths["large"], "query_prompt": "query: "}, paths["small"]]
    asked += [{"path": paths["other"], "query_prompt": "", "passage_prompt": "passage: "}]
    sets = load(tmp_path, *asked)
    model = build(query_prompt="what ", passage_prompt="the ")
    prompts = sets.prompts(model.prompts)
    assert prompts == {
        "large": {"query": "query: ", "positive": "the "},
        "small": {"query": "what ", "positive": "the "},
        "other": {"positive": "passage: "},
    }
    args = arguments(tmp_path / "run", prompts=prompts)
    trainer = ContAccumTrainer(model=model, args=args, train_dataset=sets.dataset)
    texts = {row["query"]: (name, row) for name, part in sets.dataset.items() for row in part}
    checked = Counter()
    for rows in (list(part.select(range(4))) for part in trainer.train_dataset.values()):
        inputs = trainer.data_collator(rows)
        name, _ = texts[rows[0]["query"]]
        for column in ("query", "positive"):
            expected = model.preprocess([row[column] for row in rows], prompt=prompts[name].get(column))
            assert torch.equal(inputs[f"{column}_input_ids"], expected["input_ids"])
            checked[name] += 1
    assert checked == dict.fromkeys(SIZES, 2)
    assert load(tmp_path).prompts(model.prompts) is None


def test_columns_that_mean_two_things_get_their_roles_by_set(build: Any, tmp_path: Path) -> None:  # noqa: F811
    one = pairs(9)
    parts = DatasetDict({"one": one, "two": Dataset.from_dict({"positive": one["query"], "text": one["positive"]})})
    model = build(tied=False, query_prompt="q: ", passage_prompt="p: ")
    trainer = ContAccumTrainer(model=model, args=arguments(tmp_path, max_steps=2), train_dataset=parts)
    assert trainer.args.prompts == {
        "one": {"query": "q: ", "positive": "p: "},
        "two": {"positive": "q: ", "text": "p: "},
    }
    assert trainer.args.router_mapping["two"] == {"positive": "query", "text": "document"}
    trainer.train()
    with pytest.raises(ConfigError, match="prompts by training set with one eval_dataset"):
        ContAccumTrainer(model=model, args=arguments(tmp_path), train_dataset=parts, eval_dataset=one)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["in_batch", "grad_accum", "grad_cache", "contaccum", "pre_batch"])
def test_every_method_trains_on_sets_with_different_numbers_of_negatives(
    build: Any,  # noqa: F811
    method: str,
    tmp_path: Path,
) -> None:
    sets = load(tmp_path)
    args = arguments(tmp_path / "run", method, num_train_epochs=1, multi_dataset_batch_sampler="temperature")
    trainer = ContAccumTrainer(model=build(), args=args, train_dataset=sets.dataset, data_sets=sets.records())
    trainer.train()
    trainer.save_model(str(tmp_path / "run"))
    if method == "contaccum":
        assert next(trainer.bank_losses()).info_nce.bank.hard_negatives == 2
        assert trainer.loss._positives is not None


def test_no_row_is_its_own_negative_whichever_sets_it_is_in(build: Any, tmp_path: Path) -> None:  # noqa: F811
    """One loss with one bank, over two sets that have a passage and a query in common, under other prompts."""
    (tmp_path / "a.jsonl").write_text('{"query": "what is rain", "positive": "water"}\n')
    (tmp_path / "b.jsonl").write_text('{"query": "what is rain", "positive": "falling"}\n')
    given = [str(tmp_path / "a.jsonl"), {"path": str(tmp_path / "b.jsonl"), "query_prompt": "q: "}]
    sets = load_training_sets(parse_training_sets(given, {}))
    model = build()
    args = arguments(tmp_path / "r", per_device_train_batch_size=1, prompts=sets.prompts(model.prompts))
    trainer = ContAccumTrainer(model=model, args=args, train_dataset=sets.dataset)
    loss = trainer.loss.train()
    for inputs in [*trainer.get_train_dataloader()] * 2:
        inputs.pop("dataset_name", None)
        assert loss(*trainer.collect_features(inputs)).item() == 0.0  # the bank holds positives of the query alone
    assert loss.info_nce.bank.fill == 4


def test_different_numbers_of_negatives_on_several_devices_are_refused(
    build: Any,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    args = arguments(tmp_path / "r", gather_across_devices=True)
    ContAccumTrainer(model=build(), args=args, train_dataset=load(tmp_path).dataset)
    monkeypatch.setattr(type(args), "world_size", property(lambda self: 2))
    with pytest.raises(ConfigError, match="gather_across_devices=true with training sets of different numbers"):
        ContAccumTrainer(model=build(), args=args, train_dataset=load(tmp_path).dataset)


CONFIG = """
train_data:
  - {large}
  - {{path: {small}, weight: 2, query_prompt: "query: ", num_hard_negatives: 2}}
  - {{path: {other}, weight: 0.5, name: faq, columns: {{query: query, positive: positives}}}}
"""


def test_the_command_trains_on_sets_of_a_config_and_records_each(
    backbone: str,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "c.yaml").write_text(CONFIG.format(**write(tmp_path)))
    places = ["--model", backbone, "--output_dir", str(tmp_path / "out"), "--save_strategy=no", "--disable_tqdm=true"]
    from contaccum.cli import main

    settings = ["--num_train_epochs=1", "--per_device_train_batch_size=4", "--bank_size=8", "--pooling=mean"]
    assert main(["train", str(tmp_path / "c.yaml"), *places, *settings]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert "small: 9 records: 9 used, 0 left out; rows with several positives, one drawn in each epoch: 9" in printed[1]
    assert "training sets         3, sampled by weights" in printed
    assert "  small               9 rows, weight 0.5714, 53.85 % of micro-batches, 7 an epoch, 2.333 passes" in printed
    data = json.loads((tmp_path / "out" / "run.json").read_text())["data"]
    assert data["rows"] == sum(SIZES.values())
    assert [(one["name"], one["batches_per_epoch"], one["query_prompt"]) for one in data["sets"]] == [
        ("large", 4, None),
        ("small", 7, "query: "),
        ("faq", 2, None),
    ]
    assert {"path", "format", "fingerprint", "rows", "weight", "share", "passes_per_epoch"} <= data["sets"][0].keys()
    assert data["fingerprint"] not in {one["fingerprint"] for one in data["sets"]}


def test_the_command_line_takes_several_sets_too(backbone: str, tmp_path: Path) -> None:  # noqa: F811
    paths = write(tmp_path)
    more = ["--train_data", paths["large"], json.dumps({"path": paths["small"], "weight": 3})]
    assert train(backbone, paths["other"], tmp_path / "out", *more) == 0
    sets = json.loads((tmp_path / "out" / "run.json").read_text())["data"]["sets"]
    assert [(one["name"], one["weight"]) for one in sets] == [("large", 0.25), ("small", 0.75)]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"train_data": ["a", {"path": "b", "wieght": 2}]}, "unknown key 'wieght'; did you mean 'weight'"),
        ({"train_data": ["a", "x/a"]}, "two sets are called 'a'"),
        ({"train_data": "a", "multi_dataset_batch_sampler": "temperature"}, "temperature with one training set"),
        ({"multi_dataset_batch_sampler": "weights"}, "multi_dataset_batch_sampler=weights without any"),
        ({"multi_dataset_batch_sampler": "randomly"}, "invalid choice: 'randomly'"),
        ({"sampling_weights": {"c": 1}}, "there is no training set 'c', only a, b"),
        ({"sampling_weights": {"a": 0}}, "sampling_weights: a: weight must be a number above 0"),
        ({"sampling_weights": "3"}, "is no mapping of names"),
        ({"sampling_temperature": 3.0}, "sampling_temperature=3.0 with multi_dataset_batch_sampler=proportional"),
        ({"sampling_temperature": 0.0}, "sampling_temperature must be above 0"),
        (
            {"train_data": [{"path": "a", "weight": 2}, "b"], "sampling_weights": {"a": 1}},
            r"sampling_weights=\{'a': 1\} with a weight in train_data \(a\)",
        ),
        (
            {"train_data": [{"path": "a", "weight": 2}, "b"], "multi_dataset_batch_sampler": "round_robin"},
            "multi_dataset_batch_sampler=round_robin with weights of sets",
        ),
    ],
)
def test_sampling_that_cannot_work_is_refused_before_anything_is_loaded(
    keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump({"model": "m", "output_dir": "o", "train_data": ["a", "b"], **keys}))
    with pytest.raises(ConfigError, match=message) as caught:
        parse([str(path)])
    assert "\n" not in str(caught.value)
