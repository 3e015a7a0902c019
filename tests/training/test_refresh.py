"""Hard negatives mined anew while training: what is mined, which texts reach a batch, resuming, and what is refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from datasets import Dataset, DatasetDict
from sample_texts import sentences
from test_trainer import arguments, build, log_of, pairs, state_of  # noqa: F401  # build is a fixture

from contaccum import ContAccumTrainer
from contaccum.comparison.trainer import ComparedTrainer
from contaccum.data import load_training_data
from contaccum.data.text_columns import hash_texts
from contaccum.errors import ConfigError, UserError
from contaccum.mining import SelectionRules, load_mining_data, mine_hard_negatives
from contaccum.training.command import run
from contaccum.training.refresh import NEGATIVES_FILE

N = 43


def without_negatives(h: int = 2) -> Dataset:
    nothing: list[str | None] = [None] * N
    columns = {"query": sentences(N, 1), "positive": sentences(N, 2, 9)}
    features = Dataset.from_dict({**columns, **{f"negative_{i + 1}": nothing for i in range(h)}}).features
    for i in range(h):
        features[f"negative_{i + 1}"] = features["query"]
    return Dataset.from_dict({**columns, **{f"negative_{i + 1}": nothing for i in range(h)}}, features=features)


class Seen(ContAccumTrainer):
    """Keeps the texts of every window, and the model that each began with."""

    def __init__(self, *args: Any, keep: tuple[int, ...] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.labelled = 0
        self.windows: list[list[list[str]]] = []
        self.models: dict[int, Any] = {}
        self.keep = keep

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        if self.state.global_step in self.keep:
            self.models[self.state.global_step] = copy.deepcopy(self.model)
        batches, items = super().get_batch_samples(*args, **kwargs)
        decoded = []
        for inputs in batches:
            features, labels = self.collect_features(inputs)
            texts = [self.processing_class.batch_decode(x["input_ids"], skip_special_tokens=True) for x in features]
            rows = [list(row) for row in zip(*texts, strict=True)]
            if labels is not None:  # the ids that the loss masks by
                assert labels.tolist() == [hash_texts(pa.array(row)).tolist() for row in rows]
                self.labelled += len(rows)
            decoded += rows
        self.windows.append(decoded)
        return batches, items


def refreshed(folder: Path, **overrides: Any) -> Any:
    settings = {"refresh_negatives_every": 3, "refresh_pool": 4, "refresh_relative_margin": 0.0, **overrides}
    return arguments(folder, **settings)


@pytest.mark.parametrize("workers", [0, 2])
def test_every_window_trains_on_what_the_last_refresh_mined(build: Any, tmp_path: Path, workers: int) -> None:  # noqa: F811
    args = refreshed(tmp_path, dataloader_num_workers=workers)
    trainer = Seen(model=build(), args=args, train_dataset=without_negatives(), keep=(0, 3, 6))
    trainer.train()
    assert len(trainer.windows) == 8 and trainer.models.keys() == {0, 3, 6}
    data = load_mining_data({"query": q, "positive": p} for q, p in zip(*columns(without_negatives()), strict=True))
    found = {}
    for update, model in trainer.models.items():
        mined = mine_hard_negatives(
            model, data, rules=SelectionRules(num_negatives=4, relative_margin=0.0), batch_size=4, show_progress=False
        )
        found[update] = {
            query: {data.documents[row].passage for row in rows if row >= 0}
            for query, rows in zip(data.queries, mined.rows.tolist(), strict=True)
        }
    assert found[0] != found[3] != found[6]
    for update, window in enumerate(trainer.windows):
        for query, _positive, *negatives in window:
            mined_for_it = found[update - update % 3][query]
            assert len(negatives) == 2 == len(set(negatives))
            # Fewer may be left than a row takes, and then other passages fill up.
            assert len(mined_for_it & set(negatives)) == min(2, len(mined_for_it))


def columns(dataset: Dataset) -> tuple[list[str], list[str]]:
    return list(dataset["query"]), list(dataset["positive"])


def test_no_known_positive_is_taken_and_given_negatives_serve_until_the_first_refresh(
    build: Any,  # noqa: F811
    tmp_path: Path,
) -> None:
    rows = pairs(N, negatives=1).to_dict()
    rows["query"][:20] = [rows["query"][0]] * 20  # one query, twenty positives
    args = refreshed(tmp_path, refresh_pool=30, per_device_train_batch_size=8)
    trainer = Seen(model=build(), args=args, train_dataset=Dataset.from_dict(rows))
    trainer.train()
    given = {(q, n) for q, n in zip(rows["query"], rows["negative_1"], strict=True)}
    before = {(row[0], row[2]) for window in trainer.windows[:3] for row in window}
    after = {(row[0], row[2]) for window in trainer.windows[3:] for row in window}
    assert before <= given and not after & given
    known = set(zip(rows["query"], rows["positive"], strict=True))
    assert len({n for q, n in after if q == rows["query"][0]}) > 3 and not known & after
    assert trainer.labelled == 2 * N


def test_a_run_resumes_bit_for_bit_between_refreshes_and_at_one(build: Any, tmp_path: Path) -> None:  # noqa: F811
    args = refreshed(tmp_path / "straight", save_strategy="steps", save_steps=1)
    straight = ContAccumTrainer(model=build(), args=args, train_dataset=without_negatives())
    straight.train()
    expected, log = state_of(straight), log_of(tmp_path / "straight")
    assert [line["mined_at"] for line in log if "mined_at" in line] == [0, 3, 6]
    assert [line["update"] for line in log if "mined_at" in line] == [1, 4, 7]
    assert next(line["mined_as_before"] for line in log if "mined_at" in line) == 0.0
    for update in (3, 4):
        args = refreshed(tmp_path / str(update))
        resumed = ContAccumTrainer(model=build(), args=args, train_dataset=without_negatives())
        resumed.train(resume_from_checkpoint=str(tmp_path / "straight" / f"checkpoint-{update}"))
        state = state_of(resumed)
        assert [key for key in expected if not torch.equal(state[key], expected[key])] == []
    (tmp_path / "straight" / "checkpoint-4" / NEGATIVES_FILE).unlink()
    with pytest.raises(UserError, match=NEGATIVES_FILE):
        resumed.train(resume_from_checkpoint=str(tmp_path / "straight" / "checkpoint-4"))
    args = refreshed(tmp_path / "other", refresh_pool=5)
    other = ContAccumTrainer(model=build(), args=args, train_dataset=without_negatives())
    with pytest.raises(UserError, match="another refresh_pool"):
        other.train(resume_from_checkpoint=str(tmp_path / "straight" / "checkpoint-3"))
    with pytest.raises(UserError, match="written without refresh_negatives_every"):
        other.refresh.load(str(tmp_path))


def test_every_method_trains_on_refreshed_negatives_and_the_same_pairs(build: Any, tmp_path: Path) -> None:  # noqa: F811
    orders = {}
    for method in ("in_batch", "grad_accum", "grad_cache", "contaccum", "pre_batch"):
        losses = []
        for every in (None, 2):
            args = arguments(tmp_path / f"{method}-{every}", method, max_steps=3, refresh_negatives_every=every)
            trainer = ComparedTrainer(model=build(), args=args, train_dataset=pairs(N, negatives=1), quiet=True)
            trainer.train()
            losses.append([line["loss"] for line in log_of(tmp_path / f"{method}-{every}")])
            orders[method, every] = trainer.data_order()
        assert losses[0][:2] == losses[1][:2] and losses[0][2] != losses[1][2]
    # Each method mines negatives of its own, for the same pairs in the same order.
    assert len({orders[method, 2] for method in ("grad_accum", "contaccum", "pre_batch")}) == 1


def test_a_file_of_pairs_and_a_beir_folder_train_with_mined_negatives(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    beir = tmp_path / "beir"
    (beir / "qrels").mkdir(parents=True)
    queries, passages = sentences(8, 1), sentences(20, 2, 9)
    (beir / "queries.jsonl").write_text(
        "".join(json.dumps({"_id": f"q{i}", "text": t}) + "\n" for i, t in enumerate(queries))
    )
    (beir / "corpus.jsonl").write_text(
        "".join(json.dumps({"_id": f"d{i}", "title": "", "text": t}) + "\n" for i, t in enumerate(passages))
    )
    (beir / "qrels" / "train.tsv").write_text(
        "query-id\tcorpus-id\tscore\n" + "".join(f"q{i}\td{i}\t1\n" for i in range(8))
    )
    lines = [json.dumps({"query": q, "positive": p}) for q, p in zip(queries, passages, strict=False)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    for source in (beir, tmp_path / "pairs.jsonl"):
        out = tmp_path / f"out-{source.name}"
        options = [
            "--model",
            str(tiny_model),
            "--train_data",
            str(source),
            "--output_dir",
            str(out),
            "--max_steps",
            "3",
        ]
        options += ["--num_hard_negatives", "2", "--refresh_negatives_every", "2", "--per_device_train_batch_size", "4"]
        assert run([*options, "--gradient_accumulation_steps", "2", "--disable_tqdm", "true"]) == 0
        assert [line.get("mined_at") for line in log_of(out)] == [0, None, 2]
        assert all(line["columns"] >= 12 for line in log_of(out))


@pytest.fixture
def tiny_model(build: Any, tmp_path: Path) -> Path:  # noqa: F811
    build().save_pretrained(str(tmp_path / "model"))
    return tmp_path / "model"


def test_what_cannot_be_refreshed_is_refused_in_one_line(build: Any, tmp_path: Path) -> None:  # noqa: F811
    def refuse(pattern: str, dataset: Any = None, mining_data: Any = None, **overrides: Any) -> None:
        with pytest.raises(ConfigError, match=pattern) as caught:
            args = refreshed(tmp_path, **overrides)
            ContAccumTrainer(
                model=build(),
                args=args,
                train_dataset=without_negatives() if dataset is None else dataset,
                mining_data=mining_data,
            )
        assert "\n" not in str(caught.value)

    refuse("at least 1 update", refresh_negatives_every=0)
    refuse("refresh_pool=4 without refresh_negatives_every", refresh_negatives_every=None)
    refuse("relative_margin=2", refresh_relative_margin=2.0)
    refuse("fsdp", fsdp="full_shard")
    refuse("needs query, positive, negative_1", dataset=pairs(N))
    refuse("several by name", dataset=DatasetDict(a=pairs(N, 1), b=pairs(N, 1)))
    refuse("neither a stream", dataset=pairs(N, 1).to_iterable_dataset())
    refuse("column 'label'", dataset=pairs(N, 1).add_column("label", range(N)))
    refuse("row 0 .* a query that the data to mine in lack", mining_data=load_mining_data([("a", "b"), ("c", "d")]))
    one = Dataset.from_dict({"query": ["a"] * 6, "positive": list("bcdefg"), "negative_1": ["x"] * 6})
    args = refreshed(tmp_path, refresh_negatives_every=1, per_device_train_batch_size=2)
    with pytest.raises(UserError, match="no query has a negative left"):
        ContAccumTrainer(model=build(), args=args, train_dataset=one).train()


def test_rows_that_draw_their_positive_know_all_of_them(build: Any, tmp_path: Path) -> None:  # noqa: F811
    queries, passages = sentences(12, 1), sentences(36, 2, 9)
    lines = [{"query": q, "positives": passages[3 * i : 3 * i + 3]} for i, q in enumerate(queries)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = load_training_data(tmp_path / "p.jsonl", num_hard_negatives=1, negatives_to_come=True)
    args = refreshed(tmp_path / "out", refresh_pool=20, num_train_epochs=6)
    trainer = Seen(model=build(), args=args, train_dataset=data.dataset)
    trainer.train()
    rows = [row for window in trainer.windows for row in window]
    own = {line["query"]: set(line["positives"]) for line in lines}
    assert all(row[1] in own[row[0]] and row[2] not in own[row[0]] for row in rows)
    assert len({row[1] for row in rows}) > 20
