"""Training on streams: the same pairs as stored data, resuming, what cannot be combined, the command."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from sample_texts import sentences
from test_config import backbone  # noqa: F401  # a fixture
from test_trainer import arguments, build, log_of, state_of  # noqa: F401  # build is a fixture

from contaccum import ContAccumTrainer
from contaccum.cli import main
from contaccum.comparison.trainer import ComparedTrainer
from contaccum.data.stream_batches import STREAM_FILE, StreamedSets
from contaccum.data.training_sets import parse_training_sets
from contaccum.errors import ConfigError
from contaccum.training.config import parse

N = 26


def write(folder: Path, name: str = "data", n: int = N) -> str:
    path = folder / f"{name}.jsonl"
    if not path.exists():
        queries, passages = sentences(n, len(name)), sentences(5 * n, 2, 9)
        rows = [
            {
                "query": f"{queries[i]} {i}",
                "positives": passages[5 * i : 5 * i + 2],
                "negatives": passages[5 * i + 2 :][:3],
            }
            for i in range(n)
        ]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def load(folder: Path, *names: str) -> StreamedSets:
    given = [{"path": write(folder, name), "num_hard_negatives": 1 + (name == "b")} for name in names or ["data"]]
    return StreamedSets(parse_training_sets(given, {}), buffer_size=7)


def trainer_of(build: Any, folder: Path, data: Any, **settings: Any) -> ComparedTrainer:  # noqa: F811
    args = arguments(folder, **{"max_steps": 6, **settings})
    return ComparedTrainer(model=build(), args=args, train_dataset=data, quiet=True)


@pytest.mark.slow
@pytest.mark.parametrize("names", [("data",), ("a", "b")], ids=["one set", "two sets"])
def test_a_streamed_run_resumes_bit_for_bit(build: Any, names: tuple[str, ...], tmp_path: Path) -> None:  # noqa: F811
    """6 updates of 3 micro-batches of 4: almost three passes over 26 rows, whose ends lie within micro-batches."""
    settings: dict[str, Any] = {"sampling_weights": {"b": 2}} if len(names) > 1 else {}
    straight = trainer_of(
        build, tmp_path / "a", load(tmp_path, *names), save_strategy="steps", save_steps=1, **settings
    )
    straight.train()
    expected, losses = state_of(straight), [line["loss"] for line in log_of(tmp_path / "a")]
    for update in (1, 5):  # inside the first pass, inside the last
        checkpoint = tmp_path / "a" / f"checkpoint-{update}"
        known = json.loads((checkpoint / STREAM_FILE).read_text())["rows_per_pass"]
        assert [*known.values()][-1] == (None if update == 1 else N)
        resumed = trainer_of(build, tmp_path / f"b{update}", load(tmp_path, *names), **settings)
        resumed.train(resume_from_checkpoint=str(checkpoint))
        state = state_of(resumed)
        assert [key for key in expected if not torch.equal(state[key], expected[key])] == []
        assert [line["loss"] for line in log_of(tmp_path / f"b{update}")] == losses[update:]
        assert [line["epoch"] for line in log_of(tmp_path / f"b{update}")] == [
            line["epoch"] for line in log_of(tmp_path / "a")
        ][update:]


def test_skipped_micro_batches_are_not_tokenized(build: Any, tmp_path: Path) -> None:  # noqa: F811
    first = trainer_of(build, tmp_path / "a", load(tmp_path), save_strategy="steps", save_steps=5, max_steps=5)
    first.train()
    resumed = trainer_of(build, tmp_path / "b", load(tmp_path))
    collate, calls = resumed.data_collator, []
    resumed.data_collator = lambda rows: calls.append(len(rows)) or collate(rows)  # type: ignore[func-returns-value]
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-5"))
    assert calls == [4] * 4  # those of one update, and the one that the loader reads ahead


def test_the_order_depends_on_the_seed_alone(build: Any, tmp_path: Path) -> None:  # noqa: F811
    def order(name: str, **settings: Any) -> str | None:
        trainer = trainer_of(build, tmp_path / name, load(tmp_path), **{"max_steps": 2, **settings})
        trainer.train()
        return trainer.data_order()

    base = order("base")
    assert order("other weights", seed=6, data_seed=5) == base != order("seed", seed=6)
    assert order("method", method="grad_accum", bank_size=None) == base
    assert order("one batch", method="grad_cache", bank_size=None) == base


def test_the_bank_knows_equal_texts_of_a_stream(build: Any, tmp_path: Path) -> None:  # noqa: F811
    """One pair over and over: every column is the row's own positive, so that there is nothing to learn."""
    path = tmp_path / "one.jsonl"
    path.write_text('{"query": "what is rain", "positive": "water"}\n')
    data = StreamedSets(parse_training_sets([str(path)], {}))
    trainer_of(build, tmp_path / "run", data, max_steps=2).train()
    assert [line["loss"] for line in log_of(tmp_path / "run")] == [0.0, 0.0]


def test_a_checkpoint_of_other_data_is_resumed_with_a_warning(
    build: Any,  # noqa: F811
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    trainer_of(build, tmp_path / "a", load(tmp_path), save_strategy="steps", save_steps=1, max_steps=1).train()
    os.utime(write(tmp_path), (1, 1))
    with caplog.at_level(logging.WARNING):
        resumed = trainer_of(build, tmp_path / "b", load(tmp_path), max_steps=2)
        resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-1"))
    assert "the streamed data has changed since then" in caplog.text


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"max_steps": -1}, "streaming=true without max_steps"),
        ({"train_sampling_strategy": "group_by_length"}, "group_by_length with streaming=true"),
        ({"topic_column": "topic"}, "topic_column=topic with streaming=true"),
        ({"batch_sampler": "no_duplicates"}, "batch_sampler=no_duplicates with streaming=true"),
        ({"dataloader_num_workers": 2}, "dataloader_num_workers=2 with streaming=true"),
        ({"train_data": ["a", "b"]}, "multi_dataset_batch_sampler=proportional with streaming=true: the sizes"),
        (
            {"train_data": ["a", "b"], "multi_dataset_batch_sampler": "temperature"},
            "multi_dataset_batch_sampler=temperature with streaming=true",
        ),
        ({"shuffle_buffer_size": 0}, "shuffle_buffer_size=0 with streaming=true"),
        ({"shuffle_buffer_size": 9, "streaming": False}, "shuffle_buffer_size=9 with streaming=false"),
    ],
)
def test_what_cannot_be_combined_is_one_line_that_names_both(
    keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "c.yaml"
    base = {"model": "m", "output_dir": "o", "train_data": "a", "streaming": True, "max_steps": 3}
    path.write_text(yaml.safe_dump({**base, **keys}))
    with pytest.raises(ConfigError, match=message) as caught:
        parse([str(path)])
    assert "\n" not in str(caught.value)


def test_the_trainer_refuses_the_same(build: Any, tmp_path: Path) -> None:  # noqa: F811
    with pytest.raises(ConfigError, match="streaming=true without max_steps"):
        ContAccumTrainer(model=build(), args=arguments(tmp_path / "run"), train_dataset=load(tmp_path))


def run(backbone: str, folder: Path, data: Any, **keys: Any) -> int:  # noqa: F811
    base = {"model": backbone, "output_dir": str(folder / "out"), "train_data": data, "streaming": True, "max_steps": 3}
    more = {"per_device_train_batch_size": 4, "bank_size": 8, "pooling": "mean", "disable_tqdm": True}
    (folder / "c.yaml").write_text(yaml.safe_dump({**base, **more, "save_strategy": "no", **keys}))
    return main(["train", str(folder / "c.yaml")])


def test_the_command_streams_sets_with_prompts_of_their_own(
    backbone: str,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    a, b = write(tmp_path, "a"), write(tmp_path, "b")
    given = [{"path": a, "weight": 2}, {"path": b, "query_prompt": "query: ", "num_hard_negatives": 2}]
    assert run(backbone, tmp_path, given, shuffle_buffer_size=5, gradient_accumulation_steps=2) == 0
    printed = capsys.readouterr().out
    assert "a: streamed as pairs, 5 rows shuffled; pass 1, so far: " in printed
    assert "  a                   a stream, weight 0.6667, 66.67 % of micro-batches" in printed
    data = json.loads((tmp_path / "out" / "run.json").read_text())["data"]
    assert data["rows"] is None and len(data["fingerprint"]) == 64
    assert [(one["name"], one["share"], one["query_prompt"]) for one in data["sets"]] == [
        ("a", 2 / 3, None),
        ("b", 1 / 3, "query: "),
    ]


def test_a_bad_record_ends_a_streamed_run_with_one_line_or_is_counted(
    backbone: str,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = Path(write(tmp_path, n=10))
    path.write_text(path.read_text() + "broken\n")
    assert run(backbone, tmp_path, str(path)) == 2
    (line,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("contaccum: error")]
    assert "data.jsonl:11: broken JSON" in line and "--on_bad_record skip" in line
    assert run(backbone, tmp_path, {"path": str(path), "query_prompt": "q: "}, on_bad_record="skip") == 0
    assert "11 records: 10 used, 1 left out (1 broken JSON); first: " in capsys.readouterr().out
