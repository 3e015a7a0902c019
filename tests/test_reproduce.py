"""scripts/reproduce_table1.py: every step in miniature, done once; the plan; and that the recipes are the paper's."""

import gzip
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from urllib.request import urlopen

import pytest
from sample_texts import WORDS, sentences

from contaccum.cli import main as contaccum
from contaccum.errors import DataError
from contaccum.training.config import parse

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
import reproduce_table1  # noqa: E402  # a script, which lies beside the package

FEW = [
    "--max_steps",
    "2",
    "--query_max_length",
    "20",
    "--passage_max_length",
    "60",
    "--total_train_batch_size",
    "8",
]


@pytest.fixture
def files(tmp_path):
    """The address of CuratedTREC, as if on DPR's server: 60 passages, 20 training questions, 12 test questions."""
    context = [
        {"title": a, "text": b}
        for a, b in zip(sentences(60, 1, 2), sentences(60, 2, 9), strict=True)
    ]
    rows = [f"{n}\t{one['text']}\t{one['title']}\n" for n, one in enumerate(context, start=1)]
    of = {"negative_ctxs": [], "hard_negative_ctxs": context[30:32]}
    train = [
        {"question": q, "positive_ctxs": [context[i]], **of} for i, q in enumerate(sentences(20, 3))
    ]
    questions = zip(sentences(12, 4), WORDS, strict=False)
    server = tmp_path / "server"
    for name, content in {
        "wikipedia_split/psgs_w100.tsv.gz": gzip.compress(
            "".join(["id\ttext\ttitle\n", *rows]).encode()
        ),
        "data/retriever/biencoder-curatedtrec-train.json.gz": gzip.compress(
            json.dumps(train).encode()
        ),
        "data/retriever/curatedtrec-test.qa.csv": "".join(
            f"{q}\t['{w[:2]}[a-z]+']\n" for q, w in questions
        ).encode(),
    }.items():
        (server / name).parent.mkdir(parents=True, exist_ok=True)
        (server / name).write_bytes(content)
    return server.as_uri()


@pytest.fixture
def reproduce(tmp_path, files, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return lambda *argv: reproduce_table1.main(["--files_from", files, *argv])


@pytest.mark.slow
def test_a_cell_is_done_once_and_goes_on_where_it_failed(
    reproduce, tiny_model_path, tmp_path, monkeypatch, capsys
):
    done: list[str] = []

    def here(command: Sequence[str]) -> int:  # spares the start of another process
        done.append(command[0])
        return 2 if done == ["train", "encode"] else contaccum(command)

    monkeypatch.setattr(reproduce_table1, "call", here)
    line = [
        "--datasets",
        "trec",
        "--methods",
        "contaccum",
        "--model",
        tiny_model_path,
        "--use_cpu",
        "true",
        *FEW,
    ]
    assert reproduce(*line) == 2
    assert "trec/11gb/contaccum: encode ended with exit code 2" in capsys.readouterr().err
    assert reproduce(*line, "--learning_rate", "1e-3") == 2
    assert "train was done with other settings" in capsys.readouterr().err
    assert reproduce(*line) == 0
    assert done == ["train", "encode", "encode", "search", "open_qa"]
    capsys.readouterr()
    assert reproduce(*line) == 0
    assert len(done) == 5 and capsys.readouterr().out.count(" is done\n") == 7

    folder = tmp_path / "runs" / "paper" / "trec" / "11gb" / "contaccum"
    scores = json.loads((folder / "scores.json").read_text())["metrics"]
    assert 0 < scores["Accuracy@20"] <= 1
    assert (folder / "model").is_dir() and not (folder / "passages").exists()
    page = (tmp_path / "runs" / "paper" / "table1.md").read_text()
    ours = ", ".join(f"{name} {100 * scores[name]:.1f}" for name in ("Accuracy@20", "Accuracy@100"))
    assert f"| CuratedTREC | 11gb | contaccum | {ours} | here |" in page
    assert "| DPR, 128 in-batch | Accuracy@20 79.8, Accuracy@100 89.1 |" in page


def test_dry_run_does_nothing_and_says_all(reproduce, tmp_path, capsys):
    before = sorted(tmp_path.iterdir())
    cells = ["--datasets", "nq", "msmarco", "--memory", "11gb", "24gb", "--dry-run"]
    assert reproduce(*cells, "--learning_rate", "1e-4") == 0
    shown = capsys.readouterr().out
    assert sorted(tmp_path.iterdir()) == before
    assert shown.count("contaccum train ") == shown.count("--learning_rate 1e-4") == 16
    assert shown.count("psgs_w100.tsv.gz\n") == shown.count("contaccum mine --method bm25") == 1
    assert "contaccum evaluate --run" in shown and "--split dev" in shown
    assert reproduce("--datasets", "nq", "--learning_rat", "1") == 2
    error = capsys.readouterr().err
    assert "learning_rate" in error and error.count("\n") == 1


def test_a_file_is_fetched_whole_or_not_at_all(files, tmp_path, monkeypatch):
    url = f"{files}/wikipedia_split/psgs_w100.tsv.gz"
    reproduce_table1.fetch(url, tmp_path / "deep" / "psgs.tsv.gz")
    assert (tmp_path / "deep" / "psgs.tsv.gz").read_bytes() == urlopen(url).read()
    answer = urlopen(url)
    answer.headers.replace_header("Content-Length", "1000000")
    monkeypatch.setattr(reproduce_table1, "urlopen", lambda *args, **settings: answer)
    with pytest.raises(DataError, match="of 1,000,000 bytes came"):
        reproduce_table1.fetch(url, tmp_path / "b.gz")
    assert not (tmp_path / "b.gz").exists()


BANKS = {"msmarco": 1024, "nq": 2048, "trivia": 512, "webq": 128, "trec": 128}
EPOCHS = {"msmarco": 10, "nq": 40, "trivia": 40, "webq": 100, "trec": 100}


@pytest.mark.parametrize("data", BANKS)
@pytest.mark.parametrize(("memory", "pairs"), [("11gb", 8), ("24gb", 32), ("80gb", 128)])
@pytest.mark.parametrize("method", reproduce_table1.METHODS)
def test_a_recipe_is_taken_and_says_what_the_paper_says(data, memory, pairs, method):
    args, rest = reproduce_table1._parse([])
    train = next(
        step
        for step in reproduce_table1.plan(data, memory, method, args, rest)
        if "train" in step.command
    )
    model, source, args = parse(train.command[1:])
    assert args.method == method and args.pairs_per_micro_batch == pairs
    assert args.total_train_batch_size == (pairs if method == "in_batch" else 128)
    assert args.bank_size == (BANKS[data] if method == "contaccum" else 0)
    assert (args.num_train_epochs, args.warmup_steps) == (EPOCHS[data], 1237)
    assert (args.learning_rate, args.adam_epsilon, args.weight_decay, args.max_grad_norm) == (
        2e-5,
        1e-8,
        0.0,
        2.0,
    )
    assert (args.similarity, args.temperature, model.tied, model.pooling) == (
        "dot",
        1.0,
        False,
        "cls",
    )
    assert source.num_hard_negatives == 1
    assert (args.drift_compensation, args.normalize_by, args.mask_duplicates) == (
        "none",
        "all",
        False,
    )
