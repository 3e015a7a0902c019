"""`contaccum fit`: the verdict, what it is judged on, and going on after a kill."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from sample_texts import WORDS
from small_data import write_lines
from tiny_models import tiny_encoder

import contaccum
from contaccum.cli import main
from contaccum.data.beir import load_beir_folder
from contaccum.errors import ConfigError, UserError
from contaccum.evaluation.evaluator import RetrievalEvaluator
from contaccum.fitting import folds, pipeline
from contaccum.fitting.baselines import pool_documents
from contaccum.fitting.folder import FitFolder
from contaccum.fitting.settings import check_settings
from contaccum.fitting.source import DataSource

HALF = len(WORDS) // 2
SETTINGS: dict[str, Any] = {
    "method": "contaccum",
    "temperature": 0.05,
    "total_train_batch_size": 32,
    "num_train_epochs": 4,
    "bank_size": 64,
    "use_cpu": True,
    "disable_tqdm": True,
}


def translations(count: int, seed: int) -> list[dict[str, str]]:
    """Pairs whose passage has a word of its own for each word of the query: nothing for BM25 to find."""
    generator = random.Random(seed)
    pairs = []
    for _ in range(count):
        words = [generator.randrange(HALF) for _ in range(5)]
        query = " ".join(WORDS[word] for word in words)
        passage = " ".join(WORDS[HALF + word] for word in words)
        pairs.append({"query": query, "positive": passage})
    return pairs


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh model and pairs to train on."""
    root = tmp_path_factory.mktemp("fit")
    tiny_encoder().save_pretrained(str(root / "fresh"))
    write_lines(root / "pairs.jsonl", translations(200, 0))
    write_lines(root / "more.jsonl", translations(160, 1))
    return root


@pytest.fixture(scope="module")
def trained(root: Path) -> pipeline.FitResult:
    """A fit at a good rate, on one split: 100 test queries are enough."""
    said: list[str] = []
    result = contaccum.fit(
        root / "pairs.jsonl",
        model=str(root / "fresh"),
        budget="10m",
        output=root / "better",
        test=100,
        say=said.append,
        learning_rate=0.01,
        **SETTINGS,
    )
    (root / "said.txt").write_text("\n".join(said))
    return result


def test_a_model_that_learns_is_better_and_everything_lies_in_one_folder(root, trained):
    assert trained.verdict.word == "BETTER"
    assert trained.verdict.queries == 100
    said = (root / "said.txt").read_text().splitlines()
    assert said[0].startswith("held out: 20 dev and 100 test queries")
    assert any(
        re.match(r"BM25 0\.000   \S*fresh 0\.\d{3}   \(nDCG@10 on dev\)", line) for line in said
    )
    assert said[-2].startswith("BETTER: nDCG@10 0.")
    assert str(trained.verdict) == said[-2]
    assert said[-1] == (
        f"model: {root}/better/model   report: {root}/better/report.html   "
        f"again: contaccum train {root}/better/config.yaml"
    )
    card = (root / "better" / "model" / "README.md").read_text()
    front_matter, opening = card.split("\n---\n")[:2]
    assert front_matter.startswith("---")
    assert opening.strip().splitlines()[1].startswith("**BETTER: nDCG@10")
    assert not list((root / "better" / "model").glob("checkpoint-*"))
    assert trained.report.read_text().count("BETTER") > 1
    query = translations(1, 5)[0]["query"]
    assert trained.model.encode_query([query]).shape == (1, trained.model.get_embedding_dimension())


def test_the_verdict_is_that_of_an_evaluation_of_both_models_on_the_test_folder(root, trained):
    """By the command that evaluates any model, on the folder that the fit left."""
    scores = {}
    for name, model in {"base": root / "fresh", "trained": root / "better" / "model"}.items():
        output = root / f"{name}.json"
        assert (
            main(
                [
                    "evaluate",
                    str(model),
                    "--data",
                    str(root / "better/data/test"),
                    "--output",
                    str(output),
                ]
            )
            == 0
        )
        scores[name] = json.loads(output.read_text())["metrics"]["NDCG@10"]
    assert scores["base"] == pytest.approx(trained.verdict.base, abs=1e-9)
    assert scores["trained"] == pytest.approx(trained.verdict.trained, abs=1e-9)
    assert trained.verdict.difference == pytest.approx(scores["trained"] - scores["base"])


def test_the_config_trains_the_same_model_again(root, trained):
    assert main(["train", str(root / "better" / "config.yaml"), "--disable_tqdm", "true"]) == 0
    again = root / "better" / "again" / "model.safetensors"
    assert again.read_bytes() == (root / "better" / "model" / "model.safetensors").read_bytes()


def test_no_text_is_on_two_sides(root, trained):
    data = root / "better" / "data"
    texts = {}
    for side in ("dev", "test"):
        dataset = load_beir_folder(data / side, "test")
        relevant = {document for judged in dataset.qrels.values() for document in judged}
        texts[side] = {
            *dataset.queries.values(),
            *(dataset.corpus[document]["text"] for document in relevant),
        }
    rows = [json.loads(line) for line in (data / "train.jsonl").read_text().splitlines()]
    texts["train"] = {row["query"] for row in rows} | {row["positive"] for row in rows}
    assert not texts["train"] & texts["dev"]
    assert not texts["train"] & texts["test"]
    assert not texts["dev"] & texts["test"]


def test_a_second_fit_in_a_finished_folder_is_refused(root, trained):
    with pytest.raises(ConfigError, match=r"a finished fit lies there \(BETTER"):
        contaccum.fit(
            root / "pairs.jsonl", model=str(root / "fresh"), output=root / "better", test=100
        )


@pytest.mark.parametrize(("rate", "word", "code"), [(1e-12, "LEVEL", 1), (5.0, "WORSE", 1)])
def test_a_rate_that_moves_nothing_is_level_and_one_that_ruins_is_worse(
    root, trained, tmp_path, capsys, rate, word, code
):
    given = [f"--{key}={value}" for key, value in SETTINGS.items()]
    given += [
        "--learning_rate",
        str(rate),
        "--budget",
        "10m",
        "--test",
        "100",
        "--require",
        "better",
    ]
    model = str(root / "better" / "model")
    output = str(tmp_path / "out")
    assert (
        main(["fit", str(root / "more.jsonl"), "--model", model, "--output", output, *given])
        == code
    )
    verdict = capsys.readouterr().out.strip().splitlines()[-2]
    assert verdict.startswith(f"{word}: nDCG@10")
    assert verdict.endswith("keep the base model")
    assert "keep the base model" in (tmp_path / "out" / "model" / "README.md").read_text()


def test_few_test_queries_are_judged_by_several_splits(root, tmp_path):
    said: list[str] = []
    result = contaccum.fit(
        write_lines(tmp_path / "few.jsonl", translations(120, 3)),
        model=str(root / "fresh"),
        budget="10m",
        output=tmp_path / "out",
        test=40,
        say=said.append,
        **{**SETTINGS, "learning_rate": 0.01, "num_train_epochs": 1},
    )
    assert result.verdict.folds == 3
    assert "40 test queries are few: the verdict is over 3 splits, each trained on" in said
    # Without the queries of other splits' test sets by which the settings were chosen.
    dev = load_beir_folder(tmp_path / "out" / "data" / "dev", "test").queries.values()
    assert 120 - len(dev) <= result.verdict.queries < 120 or result.verdict.queries == 120
    assert sorted(path.name for path in (tmp_path / "out" / "folds").iterdir()) == [
        "1.json",
        "2.json",
    ]


def test_the_other_splits_are_trained_on_with_mined_negatives_where_the_first_one_is(
    root, tmp_path, monkeypatch
):
    pairs = translations(60, 4)
    for pair in pairs:
        pair["positive"] += f" {pair['query']}"  # words for BM25
    source = DataSource(write_lines(tmp_path / "few.jsonl", pairs))
    folder = FitFolder(tmp_path / "out")
    folder.folds.mkdir(parents=True)
    source.hold_out(folder.data)
    base = contaccum.DualEncoder.from_pretrained(str(root / "fresh"), device="cpu")
    folder.config.write_text("model: x\ntrain_data: tuning/mined.jsonl\n")
    trained_on = []

    def train_final(config: Path, model_folder: Path, overrides: dict[str, str]) -> None:
        trained_on.append(overrides["train_data"])
        base.save_pretrained(str(model_folder))

    monkeypatch.setattr(folds, "train_final", train_final)
    args = check_settings(source.path, str(root / "fresh"), {"use_cpu": ["true"]})
    with monkeypatch.context() as patch:
        patch.setattr(folds, "shutil", SimpleNamespace(rmtree=lambda folder: None))
        scores = folds.Fold(source, folder, 1, "contaccum").score(base, args)
    records = [json.loads(line) for line in Path(trained_on[0]).read_text().splitlines()]
    assert sum(len(record["negatives"]) for record in records) > 0
    assert scores["base"] == scores["trained"]


class Killed(BaseException):
    """Stands for SIGKILL: nothing catches it."""


def killed_once(monkeypatch: pytest.MonkeyPatch, name: str, after: bool) -> None:
    """Let a stage of the pipeline be killed, before or after it has done its work."""
    function: Callable[..., Any] = getattr(pipeline, name)

    def replaced(*args: Any, **kwargs: Any) -> Any:
        if after:
            function(*args, **kwargs)
        raise Killed

    monkeypatch.setattr(pipeline, name, replaced)


@pytest.mark.parametrize(
    ("stage", "after"),
    [
        ("encode_corpus", False),
        ("score_on_dev", True),
        ("tune", True),
        ("train_final", True),
        ("build_fit_page", False),
    ],
)
def test_a_fit_that_was_killed_goes_on_to_the_same_verdict(
    root, trained, tmp_path, monkeypatch, stage, after
):
    def call() -> pipeline.FitResult:
        return contaccum.fit(
            root / "pairs.jsonl",
            model=str(root / "fresh"),
            budget="10m",
            output=tmp_path / "out",
            test=100,
            learning_rate=0.01,
            **SETTINGS,
        )

    with monkeypatch.context() as patch:
        killed_once(patch, stage, after)
        with pytest.raises(Killed):
            call()
    assert call().verdict == trained.verdict
    trials = json.loads((tmp_path / "out" / "fit.json").read_text())["trials"]
    assert len(trials) == 1


def test_another_call_in_the_folder_of_an_unfinished_fit_is_refused(root, tmp_path, monkeypatch):
    killed_once(monkeypatch, "encode_corpus", after=False)
    given: dict[str, Any] = {"model": str(root / "fresh"), "output": tmp_path / "out", "test": 100}
    with pytest.raises(Killed):
        contaccum.fit(root / "pairs.jsonl", **given)
    with pytest.raises(ConfigError, match="a fit was begun there with settings="):
        contaccum.fit(root / "pairs.jsonl", **given, learning_rate=0.5)
    with pytest.raises(ConfigError, match="a fit was begun there with path="):
        contaccum.fit(root / "more.jsonl", **given)


def test_the_best_documents_of_base_and_bm25_are_enough_for_their_scores(root, trained):
    data = load_beir_folder(root / "better" / "data" / "test", "test")
    evaluator = RetrievalEvaluator(data)
    run = evaluator.search(trained.model)
    full = evaluator.score_run(run)["ndcg@10"]
    kept = pool_documents(data, [run])
    assert len(kept) < len(data.corpus)
    pooled = RetrievalEvaluator(
        type(data)(
            **{
                **vars(data),
                "corpus": {name: data.corpus[name] for name in data.corpus if name in kept},
            }
        )
    )
    assert pooled.score(trained.model)["ndcg@10"] == pytest.approx(full)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--eval_data", "x"], "eval_data is set by contaccum fit itself: drop it"),
        (["--learnin_rate", "1"], "learning_rate"),
        (["--budget", "soon"], "budget=soon"),
        (["--budget", "0.01s"], "the budget of 0 seconds is too short"),
        (["--corpus", "nowhere.jsonl"], "nowhere.jsonl: cannot be read"),
    ],
)
def test_what_cannot_be_fitted_is_said_in_one_line(root, tmp_path, given, message, capsys):
    data = str(root / "pairs.jsonl")
    output = str(tmp_path / "out")
    model = str(root / "fresh")
    assert (
        main(["fit", data, "--model", model, "--output", output, "--use_cpu", "true", *given]) == 2
    )
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert message in error


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "empty"),
        ([{"query": "a question", "positive": "a passage"}], "has 1 distinct queries"),
        ([{"query": "a question"}], "positive"),
    ],
)
def test_data_that_are_too_few_or_broken_are_refused(root, tmp_path, lines, message):
    data = write_lines(tmp_path / "pairs.jsonl", lines)
    with pytest.raises(UserError, match=message):
        contaccum.fit(data, model=str(root / "fresh"), output=tmp_path / "out", use_cpu=True)
    assert not (tmp_path / "out" / "data").exists()


def test_data_that_were_refused_may_be_mended_and_given_again(root, tmp_path, monkeypatch):
    data = write_lines(tmp_path / "pairs.jsonl", [])
    given = {"model": str(root / "fresh"), "output": tmp_path / "out", "use_cpu": True}
    with pytest.raises(UserError, match="empty"):
        contaccum.fit(data, **given)
    data.write_bytes((root / "pairs.jsonl").read_bytes())
    killed_once(monkeypatch, "encode_corpus", after=False)
    with pytest.raises(Killed):
        contaccum.fit(data, **given)
    assert (tmp_path / "out" / "data").is_dir()


def test_a_split_that_was_made_before_is_used_as_it_is(root, tmp_path, monkeypatch):
    assert main(["split", str(root / "pairs.jsonl"), str(tmp_path / "split"), "--test", "100"]) == 0
    killed_once(monkeypatch, "encode_corpus", after=False)
    with pytest.raises(Killed):
        contaccum.fit(
            tmp_path / "split", model=str(root / "fresh"), output=tmp_path / "out", use_cpu=True
        )
    copied = tmp_path / "out" / "data"
    for file in sorted((tmp_path / "split").rglob("*.*")):
        assert (copied / file.relative_to(tmp_path / "split")).read_bytes() == file.read_bytes()
    with pytest.raises(ConfigError, match="is a split already"):
        contaccum.fit(
            tmp_path / "split", model=str(root / "fresh"), output=tmp_path / "other", test=50
        )


def test_what_is_given_is_in_the_config_and_is_not_searched(root, trained):
    config = yaml.safe_load((root / "better" / "config.yaml").read_text())
    assert config["learning_rate"] == 0.01
    assert config["num_train_epochs"] == 4
    assert config["use_cpu"] is True
    record = json.loads((root / "better" / "fit.json").read_text())
    assert [trial["settings"] for trial in record["trials"]] == [{"method": "contaccum"}]


@pytest.mark.long
def test_two_processes_fit_together(root, tmp_path):
    """As torchrun starts them: the first decides and writes, both train."""
    given = {
        **SETTINGS,
        "learning_rate": 0.01,
        "budget": "10m",
        "test": 100,
        "output": tmp_path / "out",
    }
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
    ]
    command += [
        "-m",
        "contaccum.cli",
        "fit",
        str(root / "pairs.jsonl"),
        "--model",
        str(root / "fresh"),
    ]
    command += [f"--{key}={value}" for key, value in given.items()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("BETTER: nDCG@10")]
    assert len(lines) == 1
    assert json.loads((tmp_path / "out" / "fit.json").read_text())["verdict"]["line"] == lines[0]
