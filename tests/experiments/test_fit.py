"""`contaccum fit`: the verdict, the test data, and continuing after a kill."""

from __future__ import annotations

import os
import random
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from programs import run_torchrun
from sample_texts import WORDS
from small_data import read_lines, write_lines
from tiny_models import tiny_encoder
from translations import make_questions, make_translations

import contaccum
from contaccum.cli import main
from contaccum.data.beir import load_beir_folder
from contaccum.data.split import read_split
from contaccum.errors import ConfigError, UserError
from contaccum.experiments import fit as fit_module
from contaccum.experiments import folds
from contaccum.experiments import ladder as ladder_module
from contaccum.experiments.candidates import Candidate
from contaccum.experiments.fit import FitResult
from contaccum.experiments.folds import Pairs
from contaccum.experiments.request import read_given
from contaccum.experiments.run import Job, Trained
from contaccum.experiments.verdict import ScoreColumns, compute_verdicts
from contaccum.files import read_json, write_json
from contaccum.progress import StatusLine
from contaccum.retrieval.encode import model_fingerprint
from contaccum.retrieval.store import EmbeddingStore
from contaccum.settings import Settings, replace
from contaccum.training import micro_batch, proposal
from contaccum.training.trainer import train_and_save
from contaccum.work import Budget

SETTINGS: dict[str, object] = {
    "method": "contaccum",
    "temperature": 0.05,
    "total_train_batch_size": 32,
    "num_train_epochs": 6,
    "bank_size": 64,
    "use_cpu": True,
    "bf16": False,
    "disable_tqdm": True,
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained model, and pairs to train on."""
    root = tmp_path_factory.mktemp("fit")
    tiny_encoder().save_pretrained(str(root / "fresh"))
    write_lines(root / "pairs.jsonl", make_translations(200, 0))
    write_lines(root / "questions.jsonl", make_questions(200, 0))
    write_lines(root / "more.jsonl", make_translations(160, 1))
    return root


def run_fit(
    root: Path, output: Path, pairs: str | Path = "pairs.jsonl", **options: Any
) -> FitResult:
    """Fit the untrained model to pairs on one split, unless the options say otherwise."""
    defaults = {"model": root / "fresh", "budget": "10m", "test": 100, **SETTINGS}
    return contaccum.fit(root / pairs, output=output, **{**defaults, **options})


@pytest.fixture(scope="module")
def trained(root: Path) -> FitResult:
    """A fit at a good learning rate, on one split: 100 test queries are enough.

    Half of them are about passages that training knows from other queries.
    """
    lines: list[str] = []
    options = {"print_line": lines.append, "learning_rate": 0.01}
    result = run_fit(root, root / "better", "questions.jsonl", **options)
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
    assert "the query tower is not trained alone: method=contaccum is given" in lines
    assert "chosen on dev: 8. both towers, contaccum, 18 updates" in "\n".join(lines)
    assert lines[-4].startswith("BETTER on new documents: nDCG@10 0.")
    assert "from fresh with BM25 to both towers, contaccum, 18 updates" in lines[-4]
    assert [str(verdict) for verdict in trained.verdicts.values()] == lines[-4:-2]
    assert lines[-2].startswith("the vectors alone: nDCG@10 0.")
    assert lines[-1] == f"model: {root}/better/model   report: {root}/better/report.html"


def test_candidates_have_one_numbering_in_terminal_and_record(root, trained):
    record = read_json(root / "better" / "result.json")
    printed = (root / "printed.txt").read_text()
    assert [row["number"] for row in record["candidates"]] == list(range(9))
    assert [row["rung"] for row in record["candidates"]] == [0] * 2 + [1] * 6 + [3]
    chosen = record["candidates"][record["chosen"]]
    assert record["chosen"] == record["recommended"] == 8
    assert f"\n8. {chosen['name']}" in printed
    assert f": {chosen['scores']['mean']:.3f} on dev (the best so far), " in printed
    assert record["bm25_weight"] == chosen["bm25_weight"]
    assert record["seconds"]["total"] < record["budget_seconds"] == 600


def test_all_results_are_in_one_folder(root, trained):
    card = (root / "better" / "model" / "README.md").read_text()
    front_matter, opening = card.split("\n---\n")[:2]
    assert front_matter.startswith("---")
    assert opening.strip().splitlines()[1].startswith("**BETTER on new documents: nDCG@10")
    assert "**BETTER on known documents: nDCG@10" in opening
    assert not list((root / "better" / "model").glob("checkpoint-*"))
    assert not (root / "better" / "model" / "store").exists()
    page = trained.report.read_text()
    assert "<strong>BETTER on known documents</strong>" in page
    assert page.count("nDCG@10, new<") == 1
    query = make_translations(1, 5)[0]["query"]
    assert trained.model.encode_query([query]).shape == (1, trained.model.get_embedding_dimension())


def test_generated_questions_are_compared_on_dev_and_are_never_in_dev_or_test(root, tmp_path):
    """The data are generated too, and the verdict says so."""
    data = [{**pair, "generated_by": "a model"} for pair in make_translations(200, 0)]
    generated = [{**pair, "generated_by": "a model"} for pair in make_translations(100, 3)]
    file = write_lines(tmp_path / "data.jsonl", data)
    options = {"generated": write_lines(tmp_path / "generated.jsonl", generated)}
    result = run_fit(root, tmp_path / "out", file, num_train_epochs=1, **options)
    assert " on generated questions: " in str(result.verdict)
    record = read_json(tmp_path / "out" / "result.json")
    names = {row["name"] for row in record["candidates"]}
    assert {"linear map, ridge 1", "linear map, ridge 1, with generated questions"} <= names
    maps = [row for row in record["candidates"] if row["system"] == "map"]
    best = max(maps, key=lambda row: row["scores"]["mean"])
    trained = [row for row in record["candidates"] if row["system"] == "trained"]
    assert {row["train_file"] for row in trained} == {best["train_file"]}
    train_file = str(tmp_path / "out" / "data" / best["train_file"])
    assert trained[0]["settings"]["train_data"] == [train_file]
    texts = {row["query"] for row in generated}
    for side in ("dev", "test"):
        held_out = read_lines(tmp_path / "out" / "data" / side / "queries.jsonl")
        assert texts.isdisjoint(row["text"] for row in held_out)


@pytest.fixture(scope="module")
def searched(root: Path, trained: FitResult) -> dict[str, Path]:
    """{"free", "chosen": the run on test}, with the commands and the weights of the report."""
    test_folder = root / "better" / "data" / "test"
    record = read_json(root / "better" / "result.json")
    runs = {}
    for system, model in (("free", root / "fresh"), ("chosen", root / "better" / "model")):
        weight = record["candidates"][record[system]]["bm25_weight"]
        store = root / f"{system}_store"
        runs[system] = root / f"{system}.trec"
        options = ["--corpus", str(test_folder / "corpus.jsonl"), "--output", str(store), "--bm25"]
        assert main(["encode", str(model), *options, "--no_progress"]) == 0
        options = ["--store", str(store), "--queries", str(test_folder / "queries.jsonl")]
        options += ["--bm25_weight", str(weight), "--output", str(runs[system]), "--no_progress"]
        assert main(["search", str(model), *options]) == 0
    return runs


@pytest.mark.parametrize("kind", ["new", "known"])
def test_verdict_equals_an_evaluation_of_both_searches_on_the_test_folder(
    root, trained, searched, kind
):
    """`contaccum search` gives the same scores with the model and the weight of the report."""
    test_folder = root / "better" / "data" / "test"
    scores = {}
    for system, run in searched.items():
        output = root / f"{system}_on_{kind}.json"
        options = ["--data", str(test_folder), "--split", kind, "--output", str(output)]
        assert main(["evaluate", "--run", str(run), *options]) == 0
        scores[system] = read_json(output)["metrics"]["NDCG@10"]
    verdict = trained.verdicts[kind]
    assert scores["free"] == pytest.approx(verdict.free, abs=1e-6)
    assert scores["chosen"] == pytest.approx(verdict.chosen, abs=1e-6)
    assert verdict.difference == pytest.approx(verdict.chosen - verdict.free)
    record = read_json(root / "better" / "result.json")
    assert record["candidates"][record["free"]]["bm25_weight"] > 0.0
    assert record["verdicts"][kind]["chosen"] == verdict.chosen
    assert [row[kind] for row in record["scores"]][2] == pytest.approx(verdict.free)


def test_config_trains_the_same_model_again(root, trained):
    assert main(["train", str(root / "better" / "config.yaml"), "--disable_tqdm", "true"]) == 0
    retrained = root / "better" / "again" / "model.safetensors"
    trained_weights = root / "better" / "model" / "model.safetensors"
    assert retrained.read_bytes() == trained_weights.read_bytes()
    config = yaml.safe_load((root / "better" / "config.yaml").read_text())
    settings = {**SETTINGS, "learning_rate": 0.01}
    assert {name: config.get(name, settings[name]) for name in settings} == settings


def test_no_text_is_in_two_of_train_dev_and_test(root, trained):
    data = root / "better" / "data"
    texts = {}
    for part in ("dev", "test"):
        dataset = load_beir_folder(data / part, "test")
        texts[part] = set(dataset.queries.values())
        for judgements in load_beir_folder(data / part, "new").qrels.values():
            texts[part].update(dataset.corpus[document]["text"] for document in judgements)
    rows = read_lines(data / "train.jsonl")
    texts["train"] = {row["query"] for row in rows} | {row["positive"] for row in rows}
    assert not texts["train"] & texts["dev"]
    assert not texts["train"] & texts["test"]
    assert not texts["dev"] & texts["test"]


@pytest.mark.parametrize("rate", [1e-12, 5.0])
def test_rates_that_teach_nothing_leave_the_base_model(root, trained, tmp_path, capsys, rate):
    """`--require better` then gives exit code 1."""
    arguments = ["fit", str(root / "more.jsonl"), "--model", str(root / "better" / "model")]
    arguments += ["--output", str(tmp_path / "out"), "--budget", "10m", "--test", "100"]
    arguments += ["--require", "better", "--learning_rate", str(rate), "--towers", "one"]
    arguments += [f"--{key}={value}" for key, value in SETTINGS.items()]
    assert main(arguments) == 1
    verdict = capsys.readouterr().out.strip().splitlines()[-3]
    assert verdict.startswith(
        "LEVEL: nothing that was trained is clearly better on dev than better/model"
    )
    assert "keep it**" in (tmp_path / "out" / "model" / "README.md").read_text()
    kept = contaccum.DualEncoder.from_pretrained(str(tmp_path / "out" / "model"), device="cpu")
    assert model_fingerprint(kept) == model_fingerprint(trained.model)
    config = (tmp_path / "out" / "config.yaml").read_text()
    assert yaml.safe_load(config) is None


@pytest.mark.parametrize(
    ("num_known", "kinds"), [(0, ["new"]), (9, ["all"]), (10, ["new", "known"]), (40, ["known"])]
)
def test_each_kind_of_documents_has_a_verdict_if_it_has_ten_queries(num_known, kinds):
    columns = ("base_with_bm25", "trained_with_bm25", "bm25", "group", "known")
    scores: ScoreColumns = {name: {} for name in columns}
    for number in range(40):
        is_known = number < num_known
        values = (0.5, 0.6 if is_known else 0.5, 0.4, number, is_known)
        for column, value in zip(scores.values(), values, strict=True):
            column[f"q{number}"] = value
    free, chosen = Candidate("base", 0, "base", 0.2), Candidate("both towers", 3, "trained")
    verdicts = compute_verdicts(scores, free, chosen)
    assert list(verdicts) == kinds
    assert [verdict.kind for verdict in verdicts.values()] == (kinds if len(kinds) > 1 else [""])
    assert sum(verdict.queries for verdict in verdicts.values()) == 40
    if "known" in kinds:
        assert verdicts["known"].difference == pytest.approx(0.1)
        assert verdicts["known"].word == "BETTER"
    for verdict in verdicts.values():
        assert "; from base with BM25 to both towers" in str(verdict)


@pytest.mark.parametrize(("left_for_splits", "num_folds"), [(1000.0, 3), (1.0, 1)])
def test_verdict_on_few_test_queries_is_over_the_splits_for_which_there_is_time(
    root, tmp_path, monkeypatch, left_for_splits, num_folds
):
    lines: list[str] = []
    options = {"test": 40, "future": "both", "print_line": lines.append}

    def climb_and_set_clock(ladder: Any) -> None:
        climb(ladder)
        monkeypatch.setattr(Budget, "left", lambda budget: left_for_splits)

    climb = fit_module.climb
    monkeypatch.setattr(fit_module, "climb", climb_and_set_clock)
    few = write_lines(tmp_path / "few.jsonl", make_questions(120, 3))
    options |= {"learning_rate": 0.01, "num_train_epochs": 1}
    result = run_fit(root, tmp_path / "out", few, **options)
    assert [verdict.folds for verdict in result.verdicts.values()] == [num_folds, num_folds]
    assert any(line.startswith("40 test queries are few: ") for line in lines)
    short = "the verdict is over 1 of 3 splits, because the budget is not enough for more"
    assert (short in lines) == (num_folds == 1)
    num_queries = sum(verdict.queries for verdict in result.verdicts.values())
    if num_folds == 1:
        assert num_queries == 40
        return
    assert result.verdicts["known"].groups <= 30  # of 30 passages, most in several splits
    # The dev queries, on which the candidate was chosen, are left out of the other test sets.
    dev = load_beir_folder(tmp_path / "out" / "data" / "dev", "test").queries.values()
    assert 110 - len(dev) <= num_queries <= 120
    assert min(verdict.queries for verdict in result.verdicts.values()) >= 50 - len(dev)
    splits = tmp_path / "out" / "folds"
    assert sorted(path.name for path in splits.iterdir()) == ["1", "2"]
    for folder in splits.iterdir():  # the user needs none of their models
        assert sorted(path.name for path in folder.iterdir()) == ["identity.json", "result.json"]


def test_a_fit_continues_from_another_working_directory(root, tmp_path, monkeypatch):
    """Data and output are named by relative paths first, and by absolute paths later."""
    monkeypatch.chdir(root)
    options = {"model": "fresh", "test": 100, "learning_rate": 0.01, **SETTINGS}
    relative_output = os.path.relpath(tmp_path / "out", root)
    with monkeypatch.context() as patch:
        kill_in_stage(patch, "climb", after=True)
        with pytest.raises(Killed):
            contaccum.fit("pairs.jsonl", output=relative_output, **options)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ladder_module, "train", lambda *_: pytest.fail("trained again"))
    options["model"] = str(root / "fresh")
    contaccum.fit(root / "pairs.jsonl", output=tmp_path / "out", **options)
    config = yaml.safe_load((tmp_path / "out" / "config.yaml").read_text())
    assert Path(config["train_data"][0]).is_absolute()


def test_the_home_folder_is_expanded_in_all_paths(root, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(root))
    monkeypatch.chdir(tmp_path)
    kill_in_stage(monkeypatch, "climb", after=False)
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
    write_json(output / "result.json", {})
    assert source.describe(output) == before
    (folder / "more.jsonl").write_text("{}")
    assert source.describe(output) != before


def make_job(folder: Path) -> Job:
    args = proposal.check_given("model", {"use_cpu": True})
    return Job(folder, {}, {}, args, Budget(600.0, folder), StatusLine(print, str))


@pytest.mark.parametrize("rung", [1, 2, 3])
def test_trainings_on_other_splits_have_the_settings_of_the_chosen_one(
    root, tmp_path, monkeypatch, rung
):
    """But the results in a folder do not allow remote code: it may come from somebody else."""
    seen: list[tuple[Settings, Path]] = []

    def train(settings: Settings, folder: Path, status: StatusLine) -> Trained:
        seen.append((settings, folder))
        base.save_pretrained(str(folder / "training"))
        return Trained(3, 1.0, [])

    monkeypatch.setattr(folds, "train", train)
    base = contaccum.DualEncoder.from_pretrained(str(root / "fresh"), device="cpu")
    pairs = Pairs(write_lines(tmp_path / "few.jsonl", make_translations(60, 4)))
    job = make_job(tmp_path / "out")
    pairs.hold_out(job.data)
    settings = {
        "model": str(root / "fresh"),
        "train_data": [str(job.data / "train.jsonl")],
        "learning_rates": [0.3, 0.2, 0.1],
        "trust_remote_code": True,
    }
    if rung == 2:
        settings |= {"method": "query_side", "passage_store": str(job.store)}
    else:
        settings |= {"method": "contaccum", "second_stage": str(job.data / "corpus.jsonl")}
    chosen = Candidate("chosen", rung, "trained", 0.3, settings=settings, blend=0.5)
    if rung == 1:
        chosen = Candidate("chosen", rung, "map", 0.3, ridge=1.0)
    ladder: Any = SimpleNamespace(
        job=job,
        base=base,
        base_candidate=Candidate("base", 0, "base", 0.3),
        given_vectors=None,
        get_folder=lambda _: job.folder,
    )

    def score() -> ScoreColumns:
        return folds.score_fold(1, ladder, chosen, pairs)

    scores = score()
    assert len(scores["base"]) > 0
    if rung == 1:  # a map needs no training
        assert seen == []
        assert scores["base"] != scores["trained"]
        return
    assert scores["base"] == scores["trained"]
    [(used, folder)] = seen
    assert folder == tmp_path / "out" / "folds" / "1"
    assert used.train_data == [str(folder / "data" / "train.jsonl")]
    assert used.learning_rates == [0.3, 0.2, 0.1]
    assert used.trust_remote_code is False
    assert used.blend == 1.0
    if rung == 2:
        assert used.passage_store == str(folder / "base_store")
    else:
        assert used.second_stage == str(folder / "data" / "corpus.jsonl")
    # The files of a start that was killed after it had scored the split are removed too.
    (folder / "data").mkdir()
    assert score() == scores
    assert sorted(path.name for path in folder.iterdir()) == ["identity.json", "result.json"]
    assert len(seen) == 1


class Killed(BaseException):
    """An exception in place of SIGKILL: nothing catches it."""


def kill_in_stage(
    monkeypatch: pytest.MonkeyPatch, name: str, after: bool, module: Any = fit_module
) -> None:
    """Raise `Killed` in place of a function of a module, or after the function."""
    function: Callable[..., object] = getattr(module, name)

    def kill(*args: Any, **kwargs: Any) -> Any:
        if after:
            function(*args, **kwargs)
        raise Killed

    monkeypatch.setattr(module, name, kill)


KILLS = (
    (fit_module, "encode_texts", True),
    (fit_module, "encode_documents", False),
    (ladder_module, "write_linear_maps", True),
    (ladder_module, "train", True),
    (fit_module, "climb", True),
    (fit_module, "write_model", True),
    (fit_module, "build_fit_page", False),
)
"""Module and function, and whether the kill comes after the function or before it."""


def test_fit_that_is_killed_in_each_stage_continues_to_the_same_verdict(
    root, trained, tmp_path, monkeypatch
):
    def fit() -> FitResult:
        return run_fit(root, tmp_path / "out", "questions.jsonl", learning_rate=0.01)

    for module, stage, after in KILLS:
        with monkeypatch.context() as patch:
            kill_in_stage(patch, stage, after, module)
            with pytest.raises(Killed):
                fit()
    assert fit().verdicts == trained.verdicts
    continued, whole = (
        read_json(folder / "result.json") for folder in (tmp_path / "out", trained.folder)
    )
    assert continued["scores"] == whole["scores"]
    for record in (continued, whole):
        for candidate in record["candidates"]:
            for name in ("seconds", "training_seconds", "settings"):
                del candidate[name]
    assert continued["candidates"] == whole["candidates"]


def test_a_fit_does_not_continue_with_files_or_settings_that_have_changed(tmp_path, monkeypatch):
    """The paths are the same; the stored documents and scores are of the earlier content."""
    all_pairs = make_translations(60, 0)
    all_documents = [{"_id": f"d{row}", "text": text} for row, text in enumerate(WORDS[:30])]
    other = tiny_encoder()
    with torch.no_grad():
        next(other.parameters()).add_(1.0)
    other.save_pretrained(str(tmp_path / "other"))
    tiny_encoder().save_pretrained(str(tmp_path / "same"))
    tiny_encoder(query_prompt="query: ").save_pretrained(str(tmp_path / "prompt"))

    def fit(
        model: str = "same", pairs: Any = all_pairs, documents: Any = all_documents, **settings: Any
    ) -> None:
        shutil.rmtree(tmp_path / "model", ignore_errors=True)
        shutil.copytree(tmp_path / model, tmp_path / "model")
        write_lines(tmp_path / "pairs.jsonl", pairs)
        corpus = write_lines(tmp_path / "corpus.jsonl", documents)
        options = {"model": tmp_path / "model", "corpus": corpus, "test": None, **settings}
        run_fit(tmp_path, tmp_path / "out", **options)

    kill_in_stage(monkeypatch, "climb", after=False)
    for _ in range(2):
        with pytest.raises(Killed):
            fit()
    changes: list[tuple[dict[str, Any], str]] = [
        ({"model": "other"}, "another model "),
        ({"model": "prompt"}, "another model "),
        ({"pairs": all_pairs[1:]}, "another data "),
        ({"documents": all_documents[1:]}, "another corpus "),
        ({"bank_size": 32}, "another bank_size "),
    ]
    for change, message in changes:
        with pytest.raises(ConfigError, match=message):
            fit(**change)
    monkeypatch.setattr(fit_module, "world_size", lambda: 2)
    with pytest.raises(ConfigError, match="another number of processes "):
        fit()
    monkeypatch.undo()
    monkeypatch.setattr(fit_module, "__version__", "9.0.0")
    with pytest.raises(ConfigError, match="another version "):
        fit()


def test_store_for_query_side_fits_a_training_with_an_adapter(root, tmp_path):
    """The document tower of a query-side training has no adapter, as the base model has none."""
    options = {"method": "query_side", "learning_rate": 0.01, "num_train_epochs": 1, "lora_r": 2}
    result = run_fit(root, tmp_path / "out", **options)
    candidates = read_json(result.folder / "result.json")["candidates"]
    rungs = [candidate["rung"] for candidate in candidates]
    assert rungs == [0] * 2 + [1] * 6 + [2] * 3  # nothing else is trained with this method
    assert candidates[-1]["settings"]["lora_r"] == 2


@pytest.mark.parametrize(("speed_up", "bf16"), [(2.0, True), (0.2, False)])
def test_training_is_in_bf16_where_the_machine_is_faster_with_it(
    root, tmp_path, monkeypatch, speed_up, bf16
):
    def measure(encoder: Any, texts: list[str], batch_size: int, precision: str) -> float:
        return 1.0 / speed_up if precision == "bfloat16" else 1.0

    def make_ladder(job: Job, base: Any, settings: Settings, *_: Any) -> None:
        proposed_settings.append(settings)
        raise Killed

    monkeypatch.setattr(fit_module, "measure_seconds_per_document", measure)
    monkeypatch.setattr(fit_module, "Ladder", make_ladder)
    proposed_settings: list[Settings] = []
    lines: list[str] = []
    for _ in range(2):
        with pytest.raises(Killed):
            run_fit(root, tmp_path / "out", bf16=None, print_line=lines.append)
    assert [settings.bf16 for settings in proposed_settings] == [bf16, bf16]
    line = "training in bf16, which is 2.0 times as fast as float32"
    assert (line in lines) == bf16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--push_to_hub"], "push_to_hub"),
        (["--method", "query_side", "--matryoshka_dims", "8"], "method=query_side with matryoshka"),
        (["--method"], "method"),
        (["--method", "query_side", "--towers", "one"], "towers=one"),
        (["--device", "tpu"], "--device"),
        (["--learning_rates", "1", "2"], "learning_rates is not an option of contaccum fit"),
        (["--bm25", "perhaps"], "bm25"),
        (
            ["--corpus", "{root}/more.jsonl", "--corpus_columns", "id=query", "text=passage"],
            "more.jsonl:1: missing text: its fields are 'query, positive'",
        ),
    ],
)
def test_wrong_options_give_one_line(root, tmp_path, options, message, capsys):
    arguments = ["fit", str(root / "pairs.jsonl"), "--model", str(root / "fresh")]
    arguments += ["--output", str(tmp_path / "out"), "--use_cpu", "true"]
    assert main([*arguments, *(option.format(root=root) for option in options)]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert message in error
    assert not (tmp_path / "out").exists()


def test_one_tower_refuses_a_model_with_two(root, tmp_path):
    tiny_encoder(tied=False).save_pretrained(str(tmp_path / "two"))
    with pytest.raises(ConfigError, match=r"towers=one with .*two encoders"):
        run_fit(root, tmp_path / "out", model=tmp_path / "two", towers="one")


def test_passages_longer_than_the_model_reads_are_counted(root, tmp_path, monkeypatch):
    """Each passage has five words and two special tokens."""

    def stop(*_: Any) -> None:
        raise UserError("stopped")

    monkeypatch.setattr(fit_module, "climb", stop)
    counted = []
    for length in (6, 7):
        lines: list[str] = []
        with pytest.raises(UserError, match="stopped"):
            options = {"print_line": lines.append, "passage_max_length": length}
            run_fit(root, tmp_path / str(length), **options)
        counted.append([line for line in lines if "not read" in line])
    assert counted == [["100% of the passages are longer than 6 tokens; the rest is not read"], []]


def test_a_base_model_that_does_not_know_the_language_is_named(root, tmp_path, monkeypatch):
    monkeypatch.setattr(fit_module, "climb", lambda ladder: sys.exit(1))
    warnings = []
    for number_of_words in (1, 4):  # of five
        pairs = make_translations(200, 0)
        for pair in pairs:
            pair["query"] = re.sub(r"\w+ ", "σκύλος ", pair["query"], count=number_of_words)
        data = write_lines(tmp_path / f"{number_of_words}.jsonl", pairs)
        lines: list[str] = []
        with pytest.raises(SystemExit):
            output = tmp_path / str(number_of_words)
            run_fit(root, output, data, test=None, print_line=lines.append)
        warnings.append([line for line in lines if "does not know" in line])
    none, [warning] = warnings
    assert none == []
    assert re.match(r"warning: fresh does not know \d\d% of the tokens of the queries", warning)


def test_refused_data_can_be_corrected_and_used_in_the_same_folder(root, tmp_path, monkeypatch):
    data = write_lines(tmp_path / "pairs.jsonl", [{"query": "a question", "positive": "a text"}])
    options = {"model": str(root / "fresh"), "output": tmp_path / "out", "use_cpu": True}
    with pytest.raises(UserError, match="1 distinct queries"):
        contaccum.fit(data, **options)
    assert not (tmp_path / "out").exists()
    data.write_bytes((root / "pairs.jsonl").read_bytes())
    kill_in_stage(monkeypatch, "encode_documents", after=False)
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
    kill_in_stage(monkeypatch, "encode_documents", after=False)
    with pytest.raises(Killed):
        contaccum.fit(root / "more.jsonl", model=root / "fresh", budget=600, **options)
    split = read_json(tmp_path / "out" / "data" / "split.json")
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
    [(None, 1, 16), (32, 1, 32), (None, 3, 18), ("auto", 1, 16)],
)
def test_proposed_batch_size_suits_the_micro_batch_and_the_processes(
    root, tmp_path, monkeypatch, micro_batch, num_processes, pairs_per_update
):
    Pairs(root / "pairs.jsonl").hold_out(tmp_path / "data")
    given = {}
    if micro_batch is not None:
        given["per_device_train_batch_size"] = micro_batch
    proposal.check_given(str(root / "fresh"), given)
    monkeypatch.setattr(proposal, "world_size", lambda: num_processes)
    train_file = tmp_path / "data" / "train.jsonl"
    settings = proposal.propose_settings(train_file, str(root / "fresh"), given)
    assert settings.total_train_batch_size == pairs_per_update


def test_on_a_gpu_the_micro_batch_is_the_largest_that_its_memory_allows(
    root, tmp_path, monkeypatch
):
    Pairs(root / "pairs.jsonl").hold_out(tmp_path / "data")
    train_file = tmp_path / "data" / "train.jsonl"
    with monkeypatch.context() as gpu:
        gpu.setattr(torch.cuda, "is_available", lambda: True)
        gpu.setattr(torch.cuda, "is_bf16_supported", lambda: True)
        settings = proposal.propose_settings(train_file, str(root / "fresh"), {})
        given = {"gradient_accumulation_steps": 2}
        with_steps = proposal.propose_settings(train_file, str(root / "fresh"), given)
    assert settings.per_device_train_batch_size == "auto"
    assert settings.total_train_batch_size == 16
    assert settings.transformers["dataloader_num_workers"] == 2
    assert with_steps.per_device_train_batch_size == 16  # two micro-batches of any size may not fit

    try_micro_batch = micro_batch.try_micro_batch

    def run_out_of_memory_above_4(size: int, *arguments: Any) -> None:
        if size > 4:
            raise torch.OutOfMemoryError
        try_micro_batch(size, *arguments)

    monkeypatch.setattr(micro_batch, "try_micro_batch", run_out_of_memory_above_4)
    settings = replace(settings, output_dir=str(tmp_path / "run"), max_steps=2, use_cpu=True)
    train_and_save(settings)
    record = read_json(tmp_path / "run" / "identity.json")
    assert (record["micro_batch"], record["resume"]["pairs per update"]) == (4, 16)


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
    suited = proposal.propose_settings(train_file, str(root / "fresh"), settings)
    assert suited.total_train_batch_size == pairs_per_update


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


def test_existing_split_is_used_unchanged(root, tmp_path, monkeypatch):
    assert main(["split", str(root / "pairs.jsonl"), str(tmp_path / "split"), "--test", "100"]) == 0
    kill_in_stage(monkeypatch, "encode_documents", after=False)
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
    shutil.rmtree(tmp_path / "out" / "documents" / "store")
    record = (tmp_path / "out" / "result.json").read_bytes()
    with pytest.raises(ConfigError, match=r"has a finished fit \(BETTER on new documents: "):
        run_fit(root, tmp_path / "out", "questions.jsonl")
    assert (tmp_path / "out" / "result.json").read_bytes() == record


def test_arguments_of_python_are_settings(tmp_path):
    given = read_given(
        {"learning_rate": None, "bf16": True, "matryoshka_dims": (8, 4), "corpus": tmp_path}
    )
    assert given == {"bf16": True, "matryoshka_dims": [8, 4], "corpus": str(tmp_path)}


@pytest.mark.long
def test_two_processes_fit_one_model(root, tmp_path):
    """Under torchrun both processes train; the first one decides and writes."""
    argv = ["fit", root / "pairs.jsonl", "--model", root / "fresh", "--output", tmp_path / "out"]
    argv += ["--budget", "10m", "--test", 100, "--learning_rate", 0.01]
    argv += [f"--{key}={value}" for key, value in SETTINGS.items()]
    done = run_torchrun("--standalone", "--nproc_per_node", 2, "-m", "contaccum.cli", *argv)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("BETTER: nDCG@10")]
    assert len(lines) == 1
    assert read_json(tmp_path / "out" / "result.json")["verdict"]["line"] == lines[0]


KILLED_FIT = """
import os, signal, sys
import contaccum
from contaccum import work
from contaccum.experiments import fit, ladder

pairs, fresh, other, output, module, function, kill_at = sys.argv[1:]
module = {"ladder": ladder, "fit": fit}[module]
work = getattr(module, function)
num_calls = 0

def count_calls(*args, **kwargs):
    global num_calls
    result = work(*args, **kwargs)
    num_calls += 1
    if num_calls == int(kill_at):
        os.kill(os.getpid(), signal.SIGKILL)
    return result

setattr(module, function, count_calls)
contaccum.fit(
    pairs, model=[fresh, other], output=output, test=100, learning_rate=0.01,
    total_train_batch_size=32, max_steps=8, bank_size=64, use_cpu=True, bf16=False,
    disable_tqdm=True,
)
"""


@pytest.mark.long
def test_two_processes_give_the_same_verdict_after_kills_in_all_stages(root, tmp_path):
    """Several base models and all rungs, with kill -9 in each of them."""
    (tmp_path / "program.py").write_text(KILLED_FIT)
    tiny_encoder(query_prompt="query: ").save_pretrained(str(tmp_path / "other"))
    command = ["--standalone", "--nproc_per_node", 2, tmp_path / "program.py"]
    command += [root / "questions.jsonl", root / "fresh", tmp_path / "other"]

    def fit(
        output: Path, module: str = "fit", function: str = "read_given", kill_at: int = 0
    ) -> str:
        done = run_torchrun(*command, output, module, function, kill_at)
        assert (done.returncode == 0) == (kill_at == 0), done.stderr[-2000:]
        return done.stdout

    lines = fit(tmp_path / "whole").splitlines()
    assert len([line for line in lines if line.startswith("base model: ")]) == 1
    assert len([line for line in lines if line.startswith("chosen on dev: ")]) == 1
    fit(tmp_path / "killed", "fit", "choose_base_model", 1)
    for number in (1, 2):
        fit(tmp_path / "killed", "ladder", "train", number)
    assert not (tmp_path / "killed" / "result.json").exists()
    fit(tmp_path / "killed")
    whole, killed = (read_json(tmp_path / name / "result.json") for name in ("whole", "killed"))
    assert {row["rung"] for row in whole["candidates"]} == {0, 1, 2, 3, 4}
    for key in ("model", "verdicts", "scores", "chosen", "lines"):
        assert killed[key] == whole[key]
    names = [[row["name"] for row in record["candidates"]] for record in (whole, killed)]
    assert names[0] == names[1]


def test_best_of_several_base_models_is_trained(root, trained, tmp_path, monkeypatch):
    """A model that cannot be loaded is left out with a line."""
    kill_in_stage(monkeypatch, "encode_documents", after=False)
    models = [root / "fresh", root / "nowhere", root / "better" / "model"]
    lines: list[str] = []

    for _ in range(2):
        with pytest.raises(Killed):
            run_fit(root, tmp_path / "out", "more.jsonl", model=models, print_line=lines.append)
    assert any(line.startswith("nowhere is left out: ") for line in lines)
    assert lines.count("base model: better/model") == 1  # the second start does not choose again
    scored = [line for line in lines if line.endswith(" ms per document on this machine")]
    assert len(scored) == 2


def test_base_models_that_were_left_out_are_compared_when_the_budget_grows(
    root, trained, tmp_path, monkeypatch
):
    """Without time for any, the fastest one is used; with another choice, its work is replaced."""
    seconds = {"fresh": 1.0, "better/model": 2.0}
    monkeypatch.setattr(
        fit_module, "measure_seconds_per_document", lambda *_: seconds.pop(next(iter(seconds)))
    )
    kill_in_stage(monkeypatch, "climb", after=False)
    lines: list[str] = []

    options = {"model": [root / "fresh", trained.folder / "model"], "print_line": lines.append}

    def fit(budget: float) -> None:
        with pytest.raises(Killed):
            run_fit(root, tmp_path / "out", "more.jsonl", budget=budget, **options)

    fit(100.0)
    assert len([line for line in lines if " is left out: encoding " in line]) == 2
    assert "base model: fresh, the fastest one" in lines
    store = tmp_path / "out" / "documents" / "store"
    better = model_fingerprint(trained.model, "document")
    assert EmbeddingStore.open(store).metadata["model"] != better
    seconds |= {"fresh": 1.0, "better/model": 2.0}
    fit(1e6)
    assert EmbeddingStore.open(store).metadata["model"] == better
