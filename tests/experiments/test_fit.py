"""`contaccum fit`: the verdict, the test data, and continuing after a kill."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from contaccum.experiments.tune import Choice, Tuned
from sample_texts import WORDS
from small_data import write_lines
from tiny_models import tiny_encoder

import contaccum
from contaccum.cli import main
from contaccum.data.beir import load_beir_folder
from contaccum.data.split import read_split, write_part
from contaccum.errors import ConfigError, UserError
from contaccum.evaluation.evaluator import RetrievalEvaluator
from contaccum.experiments import budget as budget_module
from contaccum.experiments import fit as fit_module
from contaccum.experiments import folds
from contaccum.experiments import tune as tune_module
from contaccum.experiments.budget import Budget
from contaccum.experiments.fit import FitResult, pool_documents
from contaccum.experiments.folds import Pairs
from contaccum.experiments.run import Result, run_and_keep
from contaccum.experiments.verdict import ScoreColumns, compute_verdicts
from contaccum.files import atomic_folder, lock_folder, write_json
from contaccum.retrieval.encode import model_fingerprint
from contaccum.retrieval.store import EmbeddingStore
from contaccum.settings import Settings, replace
from contaccum.training import log, update
from contaccum.training.setup import make_evaluator
from contaccum.training.trainer import train_and_save

HALF = len(WORDS) // 2
SETTINGS: dict[str, object] = {
    "method": "contaccum",
    "temperature": 0.05,
    "total_train_batch_size": 32,
    "num_train_epochs": 4,
    "bank_size": 64,
    "use_cpu": True,
    "bf16": False,
    "disable_tqdm": True,
}


def make_translations(count: int, seed: int) -> list[dict[str, str]]:
    """Return pairs whose passage has another word for each word of the query.

    Query and passage have no word in common, so BM25 finds nothing.
    """
    generator = random.Random(seed)
    pairs = []
    for _ in range(count):
        words = [generator.randrange(HALF) for _ in range(5)]
        query = " ".join(WORDS[word] for word in words)
        passage = " ".join(WORDS[HALF + word] for word in words)
        pairs.append({"query": query, "positive": passage})
    return pairs


def make_questions(count: int, seed: int) -> list[dict[str, str]]:
    """Return pairs with four queries for each passage: its translation, with words in any order."""
    generator = random.Random(seed)
    pairs = []
    for pair in make_translations(count // 4, seed):
        words = pair["query"].split()
        for _ in range(4):
            pairs.append({**pair, "query": " ".join(generator.sample(words, len(words)))})
    return pairs


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained model, and pairs to train on."""
    root = tmp_path_factory.mktemp("fit")
    tiny_encoder().save_pretrained(str(root / "fresh"))
    write_lines(root / "pairs.jsonl", make_translations(200, 0))
    write_lines(root / "questions.jsonl", make_questions(200, 0))
    write_lines(root / "more.jsonl", make_translations(160, 1))
    return root


@pytest.fixture(scope="module")
def trained(root: Path) -> FitResult:
    """A fit at a good learning rate, on one split: 100 test queries are enough.

    Half of them are about passages that training knows from other queries.
    """
    lines: list[str] = []
    result = contaccum.fit(
        root / "questions.jsonl",
        model=str(root / "fresh"),
        budget="10m",
        output=root / "better",
        test=100,
        print_line=lines.append,
        learning_rate=0.01,
        **SETTINGS,
    )
    (root / "printed.txt").write_text("\n".join(lines))
    return result


def test_model_that_learns_is_better(root, trained):
    assert list(trained.verdicts) == ["new", "known"]
    assert trained.verdict == trained.verdicts["new"]
    for verdict in trained.verdicts.values():
        assert verdict.word == "BETTER"
        assert verdict.queries == pytest.approx(50, abs=4)
    lines = (root / "printed.txt").read_text().splitlines()
    assert ": the first record is query=" in lines[0]
    assert lines[1].endswith("questions.jsonl (1 repeated): 200 used, 0 left out")
    assert re.match(r"held out: 18 dev and 102 test queries \(10 and 50 on known", lines[2])
    baselines_pattern = r"BM25 0\.000   \S*fresh 0\.\d{3}   both 0\.\d{3}   \(nDCG@10 on dev\)"
    assert any(re.match(baselines_pattern, line) for line in lines)
    assert lines[-4].startswith("BETTER on new documents: nDCG@10 0.")
    assert lines[-3].startswith("BETTER on known documents: nDCG@10 0.")
    assert [str(verdict) for verdict in trained.verdicts.values()] == lines[-4:-2]
    assert lines[-2].startswith("with BM25 beside the vectors: nDCG@10 0.")
    assert lines[-1] == (
        f"model: {root}/better/model   report: {root}/better/report.html   "
        f"again: contaccum train {root}/better/config.yaml"
    )


def test_all_results_are_in_one_folder(root, trained):
    card = (root / "better" / "model" / "README.md").read_text()
    front_matter, opening = card.split("\n---\n")[:2]
    assert front_matter.startswith("---")
    assert opening.strip().splitlines()[1].startswith("**BETTER on new documents: nDCG@10")
    assert "**BETTER on known documents: nDCG@10" in opening
    assert not list((root / "better" / "model").glob("checkpoint-*"))
    page = trained.report.read_text()
    assert "<strong>BETTER on known documents</strong>" in page
    assert page.count("NDCG@10 on new documents") == 1
    query = make_translations(1, 5)[0]["query"]
    assert trained.model.encode_query([query]).shape == (1, trained.model.get_embedding_dimension())


@pytest.mark.parametrize("kind", ["new", "known"])
def test_verdict_equals_an_evaluation_of_both_models_on_the_test_folder(root, trained, kind):
    """`contaccum evaluate` gives the same scores on the test folder that the fit has written."""
    models = {"base": root / "fresh", "trained": root / "better" / "model"}
    test_folder = root / "better" / "data" / "test"
    scores = {}
    for name, model in models.items():
        output = root / f"{name}.json"
        arguments = ["--data", str(test_folder), "--split", kind, "--output", str(output)]
        assert main(["evaluate", str(model), *arguments]) == 0
        scores[name] = json.loads(output.read_text())["metrics"]["NDCG@10"]
    verdict = trained.verdicts[kind]
    assert scores["base"] == pytest.approx(verdict.base, abs=1e-9)
    assert scores["trained"] == pytest.approx(verdict.trained, abs=1e-9)
    assert verdict.difference == pytest.approx(scores["trained"] - scores["base"])
    record = json.loads((root / "better" / "fit.json").read_text())
    assert record["verdicts"][kind]["trained"] == verdict.trained
    assert [row[kind] for row in record["scores"]][1] == pytest.approx(verdict.base)


def test_config_trains_the_same_model_again(root, trained):
    assert main(["train", str(root / "better" / "config.yaml"), "--disable_tqdm", "true"]) == 0
    retrained = root / "better" / "again" / "model.safetensors"
    trained_weights = root / "better" / "model" / "model.safetensors"
    assert retrained.read_bytes() == trained_weights.read_bytes()


def test_no_text_is_in_two_of_train_dev_and_test(root, trained):
    data = root / "better" / "data"
    texts = {}
    for part in ("dev", "test"):
        dataset = load_beir_folder(data / part, "test")
        texts[part] = set(dataset.queries.values())
        for judgements in load_beir_folder(data / part, "new").qrels.values():
            texts[part].update(dataset.corpus[document]["text"] for document in judgements)
    rows = [json.loads(line) for line in (data / "train.jsonl").read_text().splitlines()]
    texts["train"] = {row["query"] for row in rows} | {row["positive"] for row in rows}
    assert not texts["train"] & texts["dev"]
    assert not texts["train"] & texts["test"]
    assert not texts["dev"] & texts["test"]


@pytest.mark.parametrize(("rate", "word"), [(1e-12, "LEVEL"), (5.0, "WORSE")])
def test_tiny_rate_is_level_and_huge_rate_is_worse(root, trained, tmp_path, capsys, rate, word):
    """`--require better` then gives exit code 1."""
    arguments = ["fit", str(root / "more.jsonl"), "--model", str(root / "better" / "model")]
    arguments += ["--output", str(tmp_path / "out"), "--budget", "10m", "--test", "100"]
    arguments += ["--require", "better", "--learning_rate", str(rate)]
    arguments += [f"--{key}={value}" for key, value in SETTINGS.items()]
    assert main(arguments) == 1
    verdict = capsys.readouterr().out.strip().splitlines()[-3]
    assert verdict.startswith(f"{word}: nDCG@10")
    assert verdict.endswith("keep the base model")
    assert "keep the base model" in (tmp_path / "out" / "model" / "README.md").read_text()


@pytest.mark.parametrize(
    ("num_known", "kinds"), [(0, ["new"]), (9, ["all"]), (10, ["new", "known"]), (40, ["known"])]
)
@pytest.mark.parametrize("gain_of_new", [0.1, 0.0])
def test_each_kind_of_documents_has_a_verdict_if_it_has_ten_queries(
    tmp_path, monkeypatch, num_known, kinds, gain_of_new
):
    """All verdicts must be BETTER for `--require better`."""
    scores: ScoreColumns = {name: {} for name in ("base", "trained", "bm25", "group", "known")}
    for number in range(40):
        is_known = number < num_known
        gain = 0.1 if is_known else gain_of_new
        values = (0.5, 0.5 + gain, 0.4, number, is_known)
        for column, value in zip(scores.values(), values, strict=True):
            column[f"q{number}"] = value
    verdicts = compute_verdicts(scores)
    assert list(verdicts) == kinds
    assert [verdict.kind for verdict in verdicts.values()] == (kinds if len(kinds) > 1 else [""])
    assert sum(verdict.queries for verdict in verdicts.values()) == 40
    if "known" in kinds:
        assert verdicts["known"].difference == pytest.approx(0.1)
    monkeypatch.setattr(fit_module, "fit", lambda *_, **__: FitResult(verdicts, tmp_path, []))
    is_better = gain_of_new > 0 or kinds in (["known"], ["all"])
    assert main(["fit", "pairs.csv", "--require", "better"]) == (0 if is_better else 1)


def test_verdict_on_few_test_queries_is_over_several_splits(root, tmp_path):
    lines: list[str] = []
    settings = {**SETTINGS, "learning_rate": 0.01, "num_train_epochs": 1}
    result = contaccum.fit(
        write_lines(tmp_path / "few.jsonl", make_questions(120, 3)),
        model=str(root / "fresh"),
        budget="10m",
        output=tmp_path / "out",
        test=40,
        future="both",
        print_line=lines.append,
        **settings,
    )
    assert [verdict.folds for verdict in result.verdicts.values()] == [3, 3]
    assert result.verdicts["known"].groups <= 30  # of 30 passages, most in several splits
    message = (
        "40 test queries are few: the verdict is over 3 splits, and a model is trained on each"
    )
    assert message in lines
    # The dev queries, on which the settings were chosen, are left out of the other test sets.
    dev = load_beir_folder(tmp_path / "out" / "data" / "dev", "test").queries.values()
    num_queries = sum(verdict.queries for verdict in result.verdicts.values())
    assert 110 - len(dev) <= num_queries <= 120
    assert min(verdict.queries for verdict in result.verdicts.values()) >= 50 - len(dev)
    files = sorted(path.name for path in (tmp_path / "out" / "folds").iterdir())
    assert files == ["1", "2"]


@pytest.mark.parametrize(("corpus_share", "num_trainings"), [(0.001, 5), (0.35, 1)])
def test_a_large_corpus_leaves_time_for_the_search_on_one_split(
    root, tmp_path, monkeypatch, corpus_share, num_trainings
):
    """Time is reserved for as many of five splits as leave half of the budget for training."""
    write_lines(tmp_path / "few.jsonl", make_translations(60, 4))
    budget = 10_000.0
    seconds_per_document = corpus_share * budget / 60 / 1.3
    monkeypatch.setattr(fit_module, "measure_seconds_per_document", lambda *_: seconds_per_document)
    reserved = []

    def search(*arguments: Any) -> None:
        reserved.append(arguments[7])
        raise Killed

    monkeypatch.setattr(fit_module, "search_settings", search)
    with pytest.raises(Killed):
        contaccum.fit(
            tmp_path / "few.jsonl",
            model=root / "fresh",
            budget=budget,
            output=tmp_path / "out",
            use_cpu=True,
        )
    assert reserved == [num_trainings]


def test_seconds_of_a_stage_are_those_of_all_starts(tmp_path, monkeypatch):
    clock = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(budget_module.time, "monotonic", lambda: clock.seconds)
    for _ in range(2):
        budget = Budget(1000.0, tmp_path / "used_time.json")
        with budget.measure("training"):
            clock.seconds += 3.0
    assert budget.stage_seconds == {"training": 6.0}
    assert Budget(1000.0, tmp_path / "used_time.json").used() == 6.0


def test_a_store_that_was_removed_is_encoded_again(root, tmp_path, monkeypatch):
    """The user may remove the store of an unfinished fit to free space."""
    arguments = {"model": root / "fresh", "output": tmp_path / "out", "use_cpu": True}
    kill_in_stage(monkeypatch, "search_settings", after=False)
    for _ in range(2):
        with pytest.raises(Killed):
            contaccum.fit(root / "pairs.jsonl", **arguments)
        documents = read_split(tmp_path / "out" / "data").documents["train"]
        assert len(EmbeddingStore.open(tmp_path / "out" / "store")) == documents
        shutil.rmtree(tmp_path / "out" / "store")


@pytest.mark.parametrize(("method", "is_too_short"), [("query_side", False), ("contaccum", True)])
def test_no_time_for_a_second_encoding_is_needed_with_query_side_training(
    root, tmp_path, monkeypatch, method, is_too_short
):
    """Query-side training changes no document, so the documents are encoded only once."""
    monkeypatch.setattr(fit_module, "measure_seconds_per_document", lambda *_: 1.0)
    kill_in_stage(monkeypatch, "encode_corpus", after=False)
    error = ConfigError if is_too_short else Killed
    with pytest.raises(error):
        contaccum.fit(
            root / "pairs.jsonl",
            model=root / "fresh",
            output=tmp_path / "out",
            budget=1.2 * 220 / 0.75,
            test=100,
            use_cpu=True,
            method=method,
        )


def test_a_second_process_in_the_folder_is_refused(root, tmp_path):
    with (
        lock_folder(tmp_path / "out", "contaccum fit"),
        pytest.raises(ConfigError, match="another contaccum fit works in this folder"),
    ):
        contaccum.fit(root / "pairs.jsonl", model=root / "fresh", output=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.long
def test_a_fit_continues_from_another_working_directory(root, tmp_path, monkeypatch):
    """Data and output are named by relative paths first, and by absolute paths later."""
    monkeypatch.chdir(root)
    options = {"model": "fresh", "test": 100, "learning_rate": 0.01, **SETTINGS}
    relative_output = os.path.relpath(tmp_path / "out", root)
    with monkeypatch.context() as patch:
        kill_in_stage(patch, "search_settings", after=True)
        with pytest.raises(Killed):
            contaccum.fit("pairs.jsonl", output=relative_output, **options)
    monkeypatch.chdir(tmp_path)
    kill_in_stage(monkeypatch, "run_and_keep", after=False)
    options["model"] = str(root / "fresh")
    with pytest.raises(Killed):
        contaccum.fit(root / "pairs.jsonl", output=tmp_path / "out", **options)
    config = yaml.safe_load((tmp_path / "out" / "config.yaml").read_text())
    assert Path(config["train_data"][0]).is_absolute()


def test_the_home_folder_is_expanded_in_all_paths(root, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(root))
    monkeypatch.chdir(tmp_path)
    kill_in_stage(monkeypatch, "encode_corpus", after=False)
    with pytest.raises(Killed):
        contaccum.fit("~/pairs.jsonl", model="~/fresh", output="~/home_out", use_cpu=True)
    assert (root / "home_out" / "identity.json").is_file()
    assert not (tmp_path / "~").exists()


def test_a_fit_in_the_folder_of_its_data_can_continue(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "pairs.jsonl").write_text("{}")
    source = Pairs(folder)
    output = folder / "runs" / "fit"
    before = source.describe(output)
    write_json(output / "fit.json", {})
    assert source.describe(output) == before
    (folder / "more.jsonl").write_text("{}")
    assert source.describe(output) != before


def test_other_splits_get_mined_negatives_if_the_first_split_has_them(root, tmp_path, monkeypatch):
    pairs = make_translations(60, 4)
    for pair in pairs:
        pair["positive"] += f" {pair['query']}"  # common words for BM25
    write_lines(tmp_path / "few.jsonl", pairs)
    train_files = []

    def train(settings: Settings, folder: Path) -> Result:
        train_files.append(Path(settings.train_data[0]).read_text())
        base.save_pretrained(str(folder))
        return Result()

    base = contaccum.DualEncoder.from_pretrained(str(root / "fresh"), device="cpu")
    monkeypatch.setattr(folds, "run_and_keep", train)
    scores = score_second_fold(root, tmp_path, None, train_data=["tuning/mined.jsonl"])
    records = [json.loads(line) for line in train_files[0].splitlines()]
    assert sum(len(record["negatives"]) for record in records) > 0
    assert scores["base"] == scores["trained"]


def score_second_fold(
    root: Path, tmp_path: Path, weight: float | None, **changes: Any
) -> ScoreColumns:
    """Hold out the first split of a fit, with a reduced dev set, and score the second split."""
    pairs = Pairs(tmp_path / "few.jsonl")
    data = tmp_path / "out" / "data"
    pairs.hold_out(data)
    dev = load_beir_folder(data / "dev", "test")
    judged = {document for grades in dev.qrels.values() for document in grades}
    with atomic_folder(tmp_path / "out" / "dev_pool") as dev_pool:
        write_part(dev, judged, dev_pool)
    values = {
        "model": str(root / "fresh"),
        "train_data": [str(data / "train.jsonl")],
        "eval_data": str(tmp_path / "out" / "dev_pool"),
        "eval_split": "test",
        "eval_strategy": "epoch",
        "use_cpu": True,
    }
    final = replace(Settings(), **{**values, **changes})
    base = contaccum.DualEncoder.from_pretrained(str(root / "fresh"), device="cpu")
    folder = tmp_path / "out" / "folds" / "1"
    bm25_weights = {"base": 0.3, "trained": 0.3}
    return folds.score_fold(1, folder, pairs, final, weight, base, dev, bm25_weights, 8)


def test_other_splits_are_evaluated_among_as_many_documents_as_the_first(
    root, tmp_path, monkeypatch
):
    """All relevant documents are among them."""
    write_lines(tmp_path / "few.jsonl", make_translations(60, 4))
    base = contaccum.DualEncoder.from_pretrained(str(root / "fresh"), device="cpu")
    evaluated_on = []

    def train(settings: Settings, folder: Path) -> Result:
        evaluated_on.append(make_evaluator(settings).dataset)
        base.save_pretrained(str(folder))
        return Result()

    monkeypatch.setattr(folds, "run_and_keep", train)
    score_second_fold(root, tmp_path, weight=None)
    [dataset] = evaluated_on
    assert len(dataset.queries) == len(dataset.corpus) == 6
    for grades in dataset.qrels.values():
        assert grades.keys() <= dataset.corpus.keys()


def test_no_model_is_trained_on_other_splits_if_the_guard_keeps_the_base_model(
    root, tmp_path, monkeypatch
):
    monkeypatch.setattr(folds, "run_and_keep", lambda *_: pytest.fail("a model is trained"))
    write_lines(tmp_path / "few.jsonl", make_translations(60, 4))
    scores = score_second_fold(root, tmp_path, weight=0.0)
    assert len(scores["base"]) > 0
    assert scores["trained"] == scores["base"]
    # The files of a start that was killed after it had scored the split are removed too.
    split_folder = tmp_path / "out" / "folds" / "1"
    assert sorted(path.name for path in split_folder.iterdir()) == ["identity.json", "result.json"]
    (split_folder / "data").mkdir()
    assert score_second_fold(root, tmp_path, weight=0.0) == scores
    assert not (split_folder / "data").exists()


class Killed(BaseException):
    """An exception in place of SIGKILL: nothing catches it."""


def kill_in_stage(monkeypatch: pytest.MonkeyPatch, name: str, after: bool) -> None:
    """Raise `Killed` in place of a function of the pipeline, or after the function."""
    function: Callable[..., object] = getattr(fit_module, name)

    def kill(*args: Any, **kwargs: Any) -> Any:
        if after:
            function(*args, **kwargs)
        raise Killed

    monkeypatch.setattr(fit_module, name, kill)


@pytest.mark.parametrize(
    ("stage", "after"),
    [
        pytest.param("encode_corpus", False, marks=pytest.mark.long),
        pytest.param("load_evaluator", False, marks=pytest.mark.long),
        ("search_settings", True),
        pytest.param("run_and_keep", True, marks=pytest.mark.long),
        pytest.param("build_fit_page", False, marks=pytest.mark.long),
    ],
)
def test_fit_that_was_killed_continues_to_the_same_verdict(
    root, trained, tmp_path, monkeypatch, stage, after
):
    def fit() -> FitResult:
        return contaccum.fit(
            root / "questions.jsonl",
            model=str(root / "fresh"),
            budget="10m",
            output=tmp_path / "out",
            test=100,
            learning_rate=0.01,
            **SETTINGS,
        )

    with monkeypatch.context() as patch:
        kill_in_stage(patch, stage, after)
        with pytest.raises(Killed):
            fit()
    assert fit().verdicts == trained.verdicts
    trials = json.loads((tmp_path / "out" / "fit.json").read_text())["trials"]
    assert len(trials) == 1


def test_other_call_in_the_folder_of_an_unfinished_fit_is_refused(root, tmp_path, monkeypatch):
    kill_in_stage(monkeypatch, "encode_corpus", after=True)
    options = {
        "model": str(root / "fresh"),
        "output": tmp_path / "out",
        "test": 100,
    }
    with pytest.raises(Killed):
        contaccum.fit(root / "pairs.jsonl", **options)
    with pytest.raises(ConfigError, match="this folder has work with another learning_rate "):
        contaccum.fit(root / "pairs.jsonl", **options, learning_rate=0.5)
    with pytest.raises(ConfigError, match="this folder has work with another data;"):
        contaccum.fit(root / "more.jsonl", **options)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ("weights", "another model;"),
        ("prompt", "another tokenisation "),
        ("guide", "another guide;"),
        ("data", "another data;"),
        ("corpus", "another corpus;"),
        ("version", "another version "),
        ("machine", "another number of processes "),
    ],
)
def test_a_fit_does_not_continue_with_files_that_have_changed(
    root, tmp_path, monkeypatch, changed, message
):
    """The paths are the same; the stored documents and scores are of the earlier content."""
    for name in ("model", "guide"):
        tiny_encoder().save_pretrained(str(tmp_path / name))
    pairs = make_translations(60, 0)
    documents = [{"_id": f"d{row}", "text": text} for row, text in enumerate(WORDS[:30])]

    def fit() -> None:
        contaccum.fit(
            write_lines(tmp_path / "pairs.jsonl", pairs),
            model=tmp_path / "model",
            corpus=write_lines(tmp_path / "corpus.jsonl", documents),
            output=tmp_path / "out",
            guide=tmp_path / "guide",
            **SETTINGS,
        )

    kill_in_stage(monkeypatch, "load_evaluator", after=False)
    for _ in range(2):
        with pytest.raises(Killed):
            fit()
    if changed == "version":
        monkeypatch.setattr(fit_module, "__version__", "9.0.0")
    elif changed == "machine":
        monkeypatch.setattr(fit_module, "world_size", lambda: 2)
    elif changed == "prompt":
        tiny_encoder(query_prompt="query: ").save_pretrained(str(tmp_path / "model"))
    elif changed == "data":
        pairs.pop()
    elif changed == "corpus":
        documents.pop()
    else:
        other = tiny_encoder()
        with torch.no_grad():
            next(other.parameters()).add_(1.0)
        other.save_pretrained(str(tmp_path / {"weights": "model", "guide": "guide"}[changed]))
    with pytest.raises(ConfigError, match=message):
        fit()


def test_store_for_query_side_fits_a_training_with_an_adapter(root, tmp_path, monkeypatch):
    """The document tower of a query-side training has no adapter, as the base model has none."""
    monkeypatch.setattr(tune_module, "MAX_TRIALS", 1)
    kill_in_stage(monkeypatch, "plan_final_training", after=False)
    settings = {**SETTINGS, "learning_rate": 0.01, "num_train_epochs": 1, "lora_r": 2}
    del settings["method"]
    with pytest.raises(Killed):
        contaccum.fit(
            root / "pairs.jsonl", model=root / "fresh", output=tmp_path / "out", **settings
        )
    [trial] = json.loads((tmp_path / "out" / "tuning" / "tuned.json").read_text())["trials"]
    assert trial["settings"]["method"] == "query_side"
    assert trial["score"] is not None


@pytest.mark.parametrize(("speed_up", "bf16"), [(2.0, True), (0.2, False)])
def test_training_is_in_bf16_where_the_machine_is_faster_with_it(
    root, tmp_path, monkeypatch, speed_up, bf16
):
    def measure_speed(settings: Settings, *_: Any) -> float:
        return 1.0 / speed_up if settings.bf16 else 1.0

    searched = []

    def search(space: Any, *_: Any) -> None:
        searched.append(space.settings.bf16)
        raise Killed

    monkeypatch.setattr(fit_module, "measure_speed", measure_speed)
    monkeypatch.setattr(fit_module, "search_settings", search)
    lines: list[str] = []
    settings = {name: value for name, value in SETTINGS.items() if name != "bf16"}
    for _ in range(2):
        with pytest.raises(Killed):
            contaccum.fit(
                root / "pairs.jsonl",
                model=root / "fresh",
                output=tmp_path / "out",
                print_line=lines.append,
                **settings,
            )
    assert searched == [bf16, bf16]
    line = "training in bf16, which is 2.0 times as fast as float32"
    assert (line in lines) == bf16


@pytest.mark.parametrize(
    ("seconds_left", "max_steps", "num_evaluations", "line"),
    [
        (1000.0, None, 4, "the final training has 35 updates, 5 epochs"),
        # 5 seconds for loading, 1 for each evaluation, and 1.1 * 2 for each update
        (9.0 + 2.2 * 15.5, 15, 4, "the final training is cut to 15 of 35 updates"),
        (7.0, 2, 1, "the final training is cut to 2 of 35 updates"),
    ],
)
def test_final_training_of_cut_trials_is_as_long_as_time_allows(
    root, tmp_path, monkeypatch, seconds_left, max_steps, num_evaluations, line
):
    """The machine is five times as fast as in the chosen trial: an update takes 2 seconds."""
    monkeypatch.setattr(fit_module, "measure_speed", lambda *_: 2.0)
    options = {
        "model": str(root / "fresh"),
        "train_data": [str(root / "pairs.jsonl")],
        "total_train_batch_size": 32,
        "per_device_train_batch_size": 8,
        "use_cpu": True,
        "max_steps": 6,
    }
    settings = {"method": "contaccum", "max_steps": 6}
    trial = {"trial": 0, "settings": settings, "score": 0.5, "updates": 6, "seconds": 90.0}
    trial |= {"seconds_per_update": 10.0, "scoring_seconds": 5.0}
    choice = Choice(settings, trial=0, score=0.5, against_base={}, warnings=[])
    tuned = Tuned(choice, options, base=0.1, bm25=0.1, trials=[trial])
    planned, printed = fit_module.plan_final_training(
        tmp_path, root / "pairs.jsonl", tuned, seconds_left
    )
    assert printed.startswith(line)
    assert planned.get("max_steps") == max_steps
    assert planned["num_train_epochs"] == 5
    assert planned["eval_steps"] == -(-(max_steps or 35) // num_evaluations)


def test_dev_scores_of_a_longer_trial_are_not_compared_with_the_test(root, tmp_path, monkeypatch):
    """The trial is better than the base model on dev, the cut final training is not on test."""
    # Two updates, the first of which has a learning rate of 0. No more are possible later.
    plan = fit_module.plan_final_training

    def plan_short_training(*arguments: Any) -> Any:
        planned, line = plan(*arguments)
        return {**planned, "max_steps": 2, "eval_steps": 2, "save_steps": 2}, line

    monkeypatch.setattr(fit_module, "plan_final_training", plan_short_training)
    monkeypatch.setattr(fit_module, "MODEL_FOLDER", "nowhere")  # the trial's model is not kept
    result = contaccum.fit(
        root / "pairs.jsonl",
        model=root / "fresh",
        output=tmp_path / "out",
        test=100,
        **{**SETTINGS, "learning_rate": 0.002, "num_train_epochs": 6},
    )
    assert result.verdict.word == "LEVEL"
    record = json.loads((result.folder / "fit.json").read_text())
    assert record["choice"]["against_base"]["low"] > 0.0
    assert not [line for line in result.warnings if "disagree" in line]


def test_model_of_the_best_trial_is_kept_if_the_final_training_is_worse(
    root, tmp_path, monkeypatch
):
    """The final training is replaced by one at a rate that spoils the model."""
    monkeypatch.setattr(tune_module, "MAX_TRIALS", 2)
    train = fit_module.run_and_keep

    def spoil(settings: Settings, folder: Path) -> Result:
        return train(replace(settings, learning_rate=10.0), folder)

    monkeypatch.setattr(fit_module, "run_and_keep", spoil)
    lines: list[str] = []
    result = contaccum.fit(
        root / "pairs.jsonl",
        model=root / "fresh",
        output=tmp_path / "out",
        test=100,
        print_line=lines.append,
        learning_rate=0.01,
        **SETTINGS,
    )
    assert [line for line in lines if "is kept, because it is better on dev" in line]
    record = json.loads((tmp_path / "out" / "fit.json").read_text())
    chosen = record["choice"]["trial"]
    models = [path.parent.name for path in (tmp_path / "out" / "tuning" / "trials").glob("*/model")]
    assert models == [str(chosen)]
    expected = contaccum.DualEncoder.from_pretrained(
        str(tmp_path / "out" / "tuning" / "trials" / str(chosen) / "model"), device="cpu"
    )
    assert model_fingerprint(result.model) == model_fingerprint(expected)
    # The config trains this model again.
    options = ["--disable_tqdm", "true", "--output_dir", str(tmp_path / "again")]
    assert main(["train", str(tmp_path / "out" / "config.yaml"), *options]) == 0
    again = contaccum.DualEncoder.from_pretrained(str(tmp_path / "again"), device="cpu")
    assert model_fingerprint(again) == model_fingerprint(result.model)


@pytest.mark.parametrize("gain", [0.1, -0.1])
def test_second_stage_is_kept_if_it_is_better_on_dev(root, tmp_path, monkeypatch, gain):
    """The config then trains both stages again."""
    monkeypatch.setattr(tune_module, "MAX_TRIALS", 2)
    monkeypatch.setattr(fit_module, "_estimate_second_stage", lambda *_: 0.0)
    train = fit_module.run_and_keep

    def shift_score(settings: Settings, folder: Path) -> Result:
        result = train(settings, folder)
        assert result.score is not None
        is_second = folder.name == "second_stage"
        return dataclasses.replace(result, score=0.5 + gain if is_second else 0.5)

    monkeypatch.setattr(fit_module, "run_and_keep", shift_score)
    lines: list[str] = []
    settings = {**SETTINGS, "learning_rate": 0.01, "num_train_epochs": 1}
    del settings["method"]
    result = contaccum.fit(
        root / "pairs.jsonl",
        model=root / "fresh",
        output=tmp_path / "out",
        test=100,
        print_line=lines.append,
        **settings,
    )
    assert f"second stage: {0.5 + gain:.3f} on dev after it, 0.500 before it" in "\n".join(lines)
    config = yaml.safe_load((tmp_path / "out" / "config.yaml").read_text())
    kept = tmp_path / "out" / ("second_stage" if gain > 0 else "trained")
    expected = contaccum.DualEncoder.from_pretrained(str(kept), device="cpu")
    assert model_fingerprint(result.model) == model_fingerprint(expected)
    assert ("second_stage" in config) == (gain > 0)
    if gain > 0:
        options = ["--disable_tqdm", "true", "--output_dir", str(tmp_path / "again")]
        assert main(["train", str(tmp_path / "out" / "config.yaml"), *options]) == 0
        again = contaccum.DualEncoder.from_pretrained(str(tmp_path / "again"), device="cpu")
        assert model_fingerprint(again) == model_fingerprint(result.model)


def test_parts_of_the_pairs_are_nested_and_trained_and_tested(root, tmp_path):
    lines: list[str] = []
    result = contaccum.fit(
        root / "pairs.jsonl",
        model=root / "fresh",
        output=tmp_path / "out",
        test=100,
        curve=True,
        print_line=lines.append,
        **{**SETTINGS, "learning_rate": 0.01},
    )
    queries = {}
    for part in ("data", "curve/25%", "curve/50%"):
        records = (tmp_path / "out" / part / "train.jsonl").read_text().splitlines()
        queries[part] = {json.loads(record)["query"] for record in records}
    assert queries["curve/25%"] < queries["curve/50%"] < queries["data"]
    assert len(queries["curve/50%"]) == pytest.approx(len(queries["data"]) / 2, rel=0.3)
    points = json.loads((tmp_path / "out" / "fit.json").read_text())["curve"]
    assert [share for share, _ in points] == [0.25, 0.5, 1.0]
    assert points[-1][1] == pytest.approx(result.verdict.trained)
    [line] = [line for line in lines if line.startswith("share of the training queries: 25% ")]
    gain = 100 * (points[2][1] - points[1][1])
    assert f"from 50% to 100%: {gain:+.1f} points" in line
    evaluator = RetrievalEvaluator(load_beir_folder(tmp_path / "out" / "data" / "test", "test"))
    half = contaccum.DualEncoder.from_pretrained(tmp_path / "out" / "curve" / "50%" / "model")
    assert evaluator.score(half)["ndcg@10"] == pytest.approx(points[1][1])


def test_stopped_final_training_says_how_to_continue(root, tmp_path, monkeypatch, capsys):
    """The command has no option to resume from a checkpoint: it does so by itself."""
    settings = {**SETTINGS, "model": str(root / "fresh"), "train_data": [str(root / "pairs.jsonl")]}

    def stop(*_: object, **__: object) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(log.UpdateLogCallback, "on_step_begin", stop)
    with pytest.raises(SystemExit):
        run_and_keep(replace(Settings(), **settings), tmp_path / "model")
    line = f"stopped; saved {tmp_path}/model/checkpoint-1. Start the same command again to continue"
    assert capsys.readouterr().out.endswith(f"{line}\n")


def test_restart_counts_only_documents_that_are_not_encoded_yet(root, tmp_path, monkeypatch):
    arguments = {"model": root / "fresh", "output": tmp_path / "out", "use_cpu": True}
    with monkeypatch.context() as patch:
        kill_in_stage(patch, "encode_corpus", after=True)
        with pytest.raises(Killed):
            contaccum.fit(root / "pairs.jsonl", **arguments)
    documents = read_split(tmp_path / "out" / "data").documents
    monkeypatch.setattr(fit_module, "measure_seconds_per_document", lambda *_: 1.0)
    kill_in_stage(monkeypatch, "encode_corpus", after=False)
    # Three quarters of the budget are enough for test, but not for the corpus as well.
    budget = (documents["test"] + documents["dev"] + documents["train"] / 2) / 0.75
    with pytest.raises(Killed):
        contaccum.fit(root / "pairs.jsonl", budget=budget, **arguments)


def test_score_on_pooled_documents_equals_the_score_on_all_documents(root, trained):
    dataset = load_beir_folder(root / "better" / "data" / "test", "test")
    queries = {name: dataset.queries[name] for name in ("q0", "q1")}
    qrels = {name: dataset.qrels[name] for name in queries}
    dataset = dataclasses.replace(dataset, queries=queries, qrels=qrels)
    evaluator = RetrievalEvaluator(dataset)
    run = evaluator.search(trained.model)
    score = evaluator.score_run(run)["ndcg@10"]
    pool = pool_documents(dataset, [run])
    assert len(pool) < len(dataset.corpus)
    pooled_corpus = {name: text for name, text in dataset.corpus.items() if name in pool}
    pooled_dataset = type(dataset)(**{**vars(dataset), "corpus": pooled_corpus})
    pooled_score = RetrievalEvaluator(pooled_dataset).score(trained.model)["ndcg@10"]
    assert pooled_score == pytest.approx(score)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--push_to_hub"], "push_to_hub"),
        (["--method", "query_side", "--matryoshka_dims", "8"], "method=query_side with matryoshka"),
        (["--method"], "method"),
        (["--method", "query_side", "--towers", "one"], "towers=one"),
        (["--device", "tpu"], "device=tpu"),
        (["--learnin_rate", "1"], "learning_rate"),
        (["--budget", "soon"], "budget=soon"),
        (["--budget", "0.01s"], "too short"),
        (["--corpus", "nowhere.jsonl"], "nowhere.jsonl"),
    ],
)
def test_wrong_options_give_one_line(root, tmp_path, options, message, capsys):
    arguments = ["fit", str(root / "pairs.jsonl"), "--model", str(root / "fresh")]
    arguments += ["--output", str(tmp_path / "out"), "--use_cpu", "true", *options]
    assert main(arguments) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert message in error


def test_one_tower_refuses_a_model_with_two(root, tmp_path):
    tiny_encoder(tied=False).save_pretrained(str(tmp_path / "two"))
    with pytest.raises(ConfigError, match=r"towers=one with .*two encoders"):
        contaccum.fit(
            root / "pairs.jsonl",
            tmp_path / "two",
            output=tmp_path / "out",
            towers="one",
            **SETTINGS,
        )


def test_passages_longer_than_the_model_reads_are_counted(root, tmp_path, monkeypatch):
    """Each passage has five words and two special tokens."""

    def stop(*_: Any) -> None:
        raise UserError("stopped")

    monkeypatch.setattr(fit_module, "score_baselines", stop)
    counted = []
    for length in (6, 7):
        lines: list[str] = []
        with pytest.raises(UserError, match="stopped"):
            contaccum.fit(
                root / "pairs.jsonl",
                root / "fresh",
                output=tmp_path / str(length),
                print_line=lines.append,
                passage_max_length=length,
                **SETTINGS,
            )
        counted.append([line for line in lines if "not read" in line])
    assert counted == [["100% of the passages are longer than 6 tokens; the rest is not read"], []]


@pytest.mark.parametrize("stage", ["tuning", "plan"])
def test_the_results_in_a_folder_do_not_allow_remote_code(root, tmp_path, monkeypatch, stage):
    """The folder may come from somebody else."""
    seen: list[Any] = []
    forged = {
        "choice": Choice({"method": "contaccum"}, 0, 0.5, {}, [])._asdict(),
        "options": {"model": str(root / "fresh"), "trust_remote_code": True},
        "base": 0.5,
        "bm25": 0.5,
        "trials": [],
        "has_second_stage": False,
    }
    once = fit_module.once

    def read_forged(folder: Path, *args: Any, **kwargs: Any) -> dict[str, Any]:
        if folder.name in ("tuning", stage):
            names = Tuned._fields if folder.name == "tuning" else forged
            return {name: forged[name] for name in names}
        return once(folder, *args, **kwargs)

    def stop(settings: Settings, folder: Path) -> None:
        seen.append(settings.trust_remote_code)
        raise UserError("stopped")

    def stop_planning(folder: Path, dev: Path, tuned: Tuned, seconds: float) -> None:
        stop(replace(Settings(), **tuned.options), folder)

    monkeypatch.setattr(fit_module, "once", read_forged)
    monkeypatch.setattr(fit_module, "plan_final_training", stop_planning)
    monkeypatch.setattr(fit_module, "run_and_keep", stop)
    with pytest.raises(UserError, match="stopped"):
        contaccum.fit(root / "pairs.jsonl", root / "fresh", output=tmp_path / "out", **SETTINGS)
    assert seen == [False]


def test_a_column_that_the_corpus_lacks_is_refused_with_those_that_it_has(root, tmp_path, capsys):
    corpus = str(root / "more.jsonl")
    arguments = ["fit", str(root / "pairs.jsonl"), "--model", str(root / "fresh")]
    arguments += ["--output", str(tmp_path / "out"), "--use_cpu", "true", "--corpus", corpus]
    assert main([*arguments, "--corpus_columns", "id=query", "text=passage"]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert f"{corpus}:1: missing text: its fields are 'query, positive'" in error


def test_refused_data_can_be_corrected_and_used_in_the_same_folder(root, tmp_path, monkeypatch):
    data = write_lines(tmp_path / "pairs.jsonl", [{"query": "a question", "positive": "a text"}])
    options = {"model": str(root / "fresh"), "output": tmp_path / "out", "use_cpu": True}
    with pytest.raises(UserError, match="1 distinct queries"):
        contaccum.fit(data, **options)
    assert not (tmp_path / "out").exists()
    data.write_bytes((root / "pairs.jsonl").read_bytes())
    kill_in_stage(monkeypatch, "encode_corpus", after=False)
    with pytest.raises(Killed):
        contaccum.fit(data, **options)
    assert (tmp_path / "out" / "data").is_dir()


def test_refused_model_can_be_corrected_in_the_same_folder(root, tmp_path, monkeypatch):
    options = {"output": tmp_path / "out", "use_cpu": True}
    with pytest.raises(UserError, match="no such model folder"):
        contaccum.fit(root / "pairs.jsonl", model=tmp_path / "missing", **options)
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{}")
    with pytest.raises(UserError, match="broken"):  # found after dev and test were held out
        contaccum.fit(root / "pairs.jsonl", model=broken, **options)
    kill_in_stage(monkeypatch, "encode_corpus", after=False)
    with pytest.raises(Killed):
        contaccum.fit(root / "more.jsonl", model=root / "fresh", budget=600, **options)
    split = json.loads((tmp_path / "out" / "data" / "split.json").read_text())
    assert split["train"] + split["dev"] + split["test"] == 160  # those of more.jsonl


def test_a_popular_passage_leaves_fewer_splits(tmp_path):
    """Half of the queries share a passage, so they stay in train, and the others are two splits."""
    pairs = make_translations(200, 0)
    for pair in pairs[:100]:
        pair["positive"] = "the same passage"
    source = Pairs(write_lines(tmp_path / "pairs.jsonl", pairs))
    source.hold_out(tmp_path / "0")
    split = read_split(tmp_path / "0")
    assert (split.test, split.folds) == (40, 2)
    assert source.count_folds(split) == 2
    source.hold_out(tmp_path / "1", fold=1)


@pytest.mark.parametrize(
    ("micro_batch", "num_processes", "pairs_per_update"),
    [(None, 1, 16), (32, 1, 32), (None, 3, 24), ("auto", 1, 16)],
)
def test_proposed_batch_size_suits_the_micro_batch_and_the_processes(
    root, tmp_path, micro_batch, num_processes, pairs_per_update
):
    Pairs(root / "pairs.jsonl").hold_out(tmp_path / "data")
    given = {}
    if micro_batch is not None:
        given["per_device_train_batch_size"] = micro_batch
    train_file = tmp_path / "data" / "train.jsonl"
    fit_module.check_given(str(root / "fresh"), given, tmp_path / "store")
    settings = fit_module.propose_settings(train_file, str(root / "fresh"), given, num_processes)
    assert settings.total_train_batch_size == pairs_per_update


def test_on_a_gpu_the_micro_batch_is_the_largest_that_its_memory_allows(
    root, tmp_path, monkeypatch
):
    Pairs(root / "pairs.jsonl").hold_out(tmp_path / "data")
    train_file = tmp_path / "data" / "train.jsonl"
    with monkeypatch.context() as gpu:
        gpu.setattr(torch.cuda, "is_available", lambda: True)
        gpu.setattr(torch.cuda, "is_bf16_supported", lambda: True)
        settings = fit_module.propose_settings(train_file, str(root / "fresh"), {}, 1)
        given = {"gradient_accumulation_steps": 2}
        with_steps = fit_module.propose_settings(train_file, str(root / "fresh"), given, 1)
    assert settings.per_device_train_batch_size == "auto"
    assert settings.total_train_batch_size == 16
    assert settings.dataloader_num_workers == 2
    assert with_steps.per_device_train_batch_size == 8  # two micro-batches of any size may not fit

    try_micro_batch = update.try_micro_batch

    def run_out_of_memory_above_4(size: int, *arguments: Any) -> None:
        if size > 4:
            raise torch.OutOfMemoryError
        try_micro_batch(size, *arguments)

    monkeypatch.setattr(update, "try_micro_batch", run_out_of_memory_above_4)
    settings = replace(settings, output_dir=str(tmp_path / "run"), max_steps=2, use_cpu=True)
    train_and_save(settings)
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (record["micro_batch"], record["pairs_per_update"]) == (4, 16)


@pytest.mark.parametrize(("settings", "pairs_per_update"), [({}, 8), ({"positives": "all"}, 72)])
def test_proposed_batch_size_suits_the_rows_of_an_epoch(root, tmp_path, settings, pairs_per_update):
    """Each query has ten positives, and a row has one of them by default."""
    generator = random.Random(0)
    pairs = []
    for pair in make_translations(90, 0):
        other_positives = [" ".join(generator.choices(WORDS, k=8)) for _ in range(9)]
        pairs.append({"query": pair["query"], "positive": [pair["positive"], *other_positives]})
    Pairs(write_lines(tmp_path / "pairs.jsonl", pairs)).hold_out(tmp_path / "data")
    train_file = tmp_path / "data" / "train.jsonl"
    proposed = fit_module.propose_settings(train_file, str(root / "fresh"), settings, 1)
    assert proposed.total_train_batch_size == pairs_per_update


def test_pairs_below_the_least_score_are_left_out(tmp_path):
    pairs = make_translations(40, 0)
    for pair in pairs:
        pair["label"] = 1
    pairs[0]["label"] = 0
    data = write_lines(tmp_path / "pairs.jsonl", pairs)
    with pytest.raises(UserError, match=r":1: a pair with label 0: .*--min_score 1"):
        Pairs(data).hold_out(tmp_path / "split")
    first_line, counts = Pairs(data, min_score=1).hold_out(tmp_path / "split")
    query = pairs[1]["query"]
    assert first_line.startswith(f"{data}: the first record is query={query!r}, positive='")
    assert "1 score below min_score" in counts
    assert read_split(tmp_path / "split").records == 27  # of 39, without 4 for dev and 8 for test


def test_time_of_holding_out_counts_for_the_budget(root, tmp_path, monkeypatch):
    hold_out = Pairs.hold_out

    def hold_out_slowly(source: Pairs, folder: Path, **options: Any) -> list[str]:
        monkeypatch.setattr(time, "monotonic", lambda: started + 100.0)
        return hold_out(source, folder, **options)

    started = time.monotonic()
    monkeypatch.setattr(Pairs, "hold_out", hold_out_slowly)
    with pytest.raises(ConfigError, match="the budget of 60 seconds is too short"):
        contaccum.fit(
            root / "pairs.jsonl",
            model=str(root / "fresh"),
            budget="60s",
            output=tmp_path / "out",
            use_cpu=True,
        )


def test_existing_split_is_used_unchanged(root, tmp_path, monkeypatch):
    assert main(["split", str(root / "pairs.jsonl"), str(tmp_path / "split"), "--test", "100"]) == 0
    kill_in_stage(monkeypatch, "encode_corpus", after=False)
    with pytest.raises(Killed):
        contaccum.fit(
            tmp_path / "split", model=str(root / "fresh"), output=tmp_path / "out", use_cpu=True
        )
    copied = tmp_path / "out" / "data"
    for file in sorted((tmp_path / "split").rglob("*.*")):
        assert (copied / file.relative_to(tmp_path / "split")).read_bytes() == file.read_bytes()
    for option in ({"test": 50}, {"future": "new"}):
        with pytest.raises(ConfigError, match="is a split already"):
            contaccum.fit(
                tmp_path / "split", model=root / "fresh", output=tmp_path / "other", **option
            )


def test_finished_fit_is_kept_after_its_store_was_removed(root, trained, tmp_path):
    shutil.copytree(trained.folder, tmp_path / "out")
    shutil.rmtree(tmp_path / "out" / "store")
    record = (tmp_path / "out" / "fit.json").read_bytes()
    for learning_rate in (0.01, 0.5):
        with pytest.raises(ConfigError, match=r"has a finished fit \(BETTER on new documents: "):
            contaccum.fit(
                root / "questions.jsonl",
                model=root / "fresh",
                output=tmp_path / "out",
                learning_rate=learning_rate,
                **SETTINGS,
            )
    assert (tmp_path / "out" / "fit.json").read_bytes() == record


def test_folder_with_other_files_is_refused(root, tmp_path):
    (tmp_path / "notes.txt").write_text("keep me")
    with pytest.raises(ConfigError, match="holds other files"):
        contaccum.fit(root / "pairs.jsonl", model=root / "fresh", output=tmp_path, **SETTINGS)
    assert (tmp_path / "notes.txt").is_file()


def test_arguments_of_python_are_settings(tmp_path):
    given = fit_module.read_given(
        {"learning_rate": None, "bf16": True, "matryoshka_dims": (8, 4), "guide": tmp_path}
    )
    assert given == {"bf16": True, "matryoshka_dims": [8, 4], "guide": str(tmp_path)}


def test_settings_of_the_user_are_in_the_config_and_not_searched(root, trained):
    config = yaml.safe_load((root / "better" / "config.yaml").read_text())
    assert config["learning_rate"] == 0.01
    assert config["num_train_epochs"] == 4
    assert config["use_cpu"] is True
    assert config["disable_tqdm"] is True
    record = json.loads((root / "better" / "fit.json").read_text())
    assert [trial["settings"] for trial in record["trials"]] == [{"method": "contaccum"}]


@pytest.mark.long
def test_two_processes_fit_one_model(root, tmp_path):
    """Under torchrun both processes train; the first one decides and writes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc_per_node", "2", "-m", "contaccum.cli"]
    command += ["fit", str(root / "pairs.jsonl"), "--model", str(root / "fresh")]
    command += ["--output", str(tmp_path / "out"), "--budget", "10m", "--test", "100"]
    command += ["--learning_rate", "0.01"]
    command += [f"--{key}={value}" for key, value in SETTINGS.items()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("BETTER: nDCG@10")]
    assert len(lines) == 1
    assert json.loads((tmp_path / "out" / "fit.json").read_text())["verdict"]["line"] == lines[0]


FIT_WITH_ALL_STAGES = """
import os, signal, sys
import contaccum
from contaccum.experiments import fit as fit_module, tune as tune_module

pairs, fresh, other, output, stage, kill_at = sys.argv[1:]
tune_module.MAX_TRIALS = 2
fit_module._estimate_second_stage = lambda *_: 0.0
function = getattr(fit_module, stage)
num_calls = 0

def count_calls(*args, **kwargs):
    global num_calls
    result = function(*args, **kwargs)
    num_calls += 1
    if num_calls == int(kill_at):
        os.kill(os.getpid(), signal.SIGKILL)
    return result

setattr(fit_module, stage, count_calls)
contaccum.fit(
    pairs, model=[fresh, other], output=output, test=100, curve=True, learning_rate=0.01,
    total_train_batch_size=32, num_train_epochs=4, bank_size=64, use_cpu=True, bf16=False,
    disable_tqdm=True,
)
"""


@pytest.mark.long
def test_two_processes_give_the_same_verdict_after_kills_in_all_stages(root, tmp_path):
    """Several base models, a second stage and parts of the pairs, with kill -9 in each of them."""
    (tmp_path / "program.py").write_text(FIT_WITH_ALL_STAGES)
    tiny_encoder(query_prompt="query: ").save_pretrained(str(tmp_path / "other"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc_per_node", "2", str(tmp_path / "program.py")]
    command += [str(root / "pairs.jsonl"), str(root / "fresh"), str(tmp_path / "other")]

    def fit(output: Path, stage: str = "read_given", kill_at: int = 0) -> str:
        done = subprocess.run(
            [*command, str(output), stage, str(kill_at)],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert (done.returncode == 0) == (kill_at == 0), done.stderr[-2000:]
        return done.stdout

    lines = fit(tmp_path / "whole").splitlines()
    assert lines.count("base model: fresh; other is not significantly worse on dev") == 1
    assert len([line for line in lines if line.startswith("second stage: 0.")]) == 1
    fit(tmp_path / "killed", "choose_base_model", 1)
    fit(tmp_path / "killed", "run_and_keep", 2)  # after the second stage
    fit(tmp_path / "killed", "make_part_settings", 2)
    assert (tmp_path / "killed" / "curve" / "25%" / "model" / "result.json").is_file()
    assert not (tmp_path / "killed" / "fit.json").exists()
    fit(tmp_path / "killed")
    whole, killed = (
        json.loads((tmp_path / name / "fit.json").read_text()) for name in ("whole", "killed")
    )
    assert len(whole["curve"]) == 3
    for key in ("model", "verdict", "production", "scores", "curve"):
        assert killed[key] == whole[key]
    assert len(killed["trials"]) == len(whole["trials"]) == 2


def test_best_of_several_base_models_is_trained(root, trained, tmp_path, monkeypatch):
    """A model that cannot be loaded is left out with a line."""
    kill_in_stage(monkeypatch, "search_settings", after=False)
    lines: list[str] = []
    for _ in range(2):
        with pytest.raises(Killed):
            contaccum.fit(
                root / "more.jsonl",
                model=[root / "fresh", root / "nowhere", root / "better" / "model"],
                output=tmp_path / "out",
                print_line=lines.append,
                **SETTINGS,
            )
    assert any(line.startswith("nowhere is left out: ") for line in lines)
    assert lines.count("base model: better/model") == 1  # the second start does not choose again
    scored = [line for line in lines if line.endswith(" ms per document on this machine")]
    assert len(scored) == 2
    fingerprints = json.loads((tmp_path / "out" / "models.json").read_text())
    assert fingerprints["model"] == model_fingerprint(trained.model)
