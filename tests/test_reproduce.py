"""scripts/reproduce_table1.py: all steps with tiny data, the dry run, and the recipes' settings."""

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
import reproduce_table1  # noqa: E402  # a script outside the package


def write_gzip(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.encode()))


@pytest.fixture
def server_url(tmp_path):
    """Write the files of CuratedTREC as on DPR's server; return the address of their folder.

    There are 60 passages, 20 training questions and 12 test questions.
    """
    titles = sentences(60, 1, 2)
    texts = sentences(60, 2, 9)
    passages = [{"title": title, "text": text} for title, text in zip(titles, texts, strict=True)]
    server = tmp_path / "server"

    passage_lines = ["id\ttext\ttitle\n"]
    for number, passage in enumerate(passages, start=1):
        passage_lines.append(f"{number}\t{passage['text']}\t{passage['title']}\n")
    write_gzip(server / "wikipedia_split" / "psgs_w100.tsv.gz", "".join(passage_lines))

    train_records = []
    for number, question in enumerate(sentences(20, 3)):
        train_records.append(
            {
                "question": question,
                "positive_ctxs": [passages[number]],
                "negative_ctxs": [],
                "hard_negative_ctxs": passages[30:32],
            }
        )
    retriever_folder = server / "data" / "retriever"
    train_file = retriever_folder / "biencoder-curatedtrec-train.json.gz"
    write_gzip(train_file, json.dumps(train_records))

    test_lines = []
    for question, word in zip(sentences(12, 4), WORDS, strict=False):
        test_lines.append(f"{question}\t['{word[:2]}[a-z]+']\n")
    (retriever_folder / "curatedtrec-test.qa.csv").write_text("".join(test_lines))
    return server.as_uri()


@pytest.fixture
def reproduce(tmp_path, server_url, monkeypatch):
    """Return a function that runs the program in ``tmp_path``."""
    monkeypatch.chdir(tmp_path)

    def run(*argv: str) -> int:
        return reproduce_table1.main(["--files_from", server_url, *argv])

    return run


@pytest.mark.slow
def test_finished_steps_are_skipped_and_failed_steps_repeated(
    reproduce, tiny_model_path, tmp_path, monkeypatch, capsys
):
    commands_run: list[str] = []

    def run_in_this_process(command: Sequence[str]) -> int:
        """Run a command without starting a process; fail the first `encode`."""
        commands_run.append(command[0])
        if commands_run == ["train", "encode"]:
            return 2
        return contaccum(command)

    monkeypatch.setattr(reproduce_table1, "run_command", run_in_this_process)
    argv = ["--datasets", "trec", "--methods", "contaccum", "--model", tiny_model_path]
    argv += ["--use_cpu", "true", "--max_steps", "2", "--total_train_batch_size", "8"]
    argv += ["--query_max_length", "20", "--passage_max_length", "60"]
    assert reproduce(*argv) == 2
    assert "trec/11gb/contaccum: encode ended with exit code 2" in capsys.readouterr().err
    assert reproduce(*argv, "--learning_rate", "1e-3") == 2
    assert "train was done with other settings" in capsys.readouterr().err
    assert reproduce(*argv) == 0
    assert commands_run == ["train", "encode", "encode", "search", "open_qa"]
    capsys.readouterr()
    assert reproduce(*argv) == 0
    assert len(commands_run) == 5
    assert capsys.readouterr().out.count(" is done\n") == 7

    folder = tmp_path / "runs" / "paper" / "trec" / "11gb" / "contaccum"
    scores = json.loads((folder / "scores.json").read_text())["metrics"]
    assert 0 < scores["Accuracy@20"] <= 1
    assert (folder / "model").is_dir()
    assert not (folder / "passages").exists()
    page = (tmp_path / "runs" / "paper" / "table1.md").read_text()
    ours = ", ".join(f"{name} {100 * scores[name]:.1f}" for name in ("Accuracy@20", "Accuracy@100"))
    assert f"| CuratedTREC | 11gb | contaccum | {ours} | here |" in page
    assert "| DPR, 128 in-batch | Accuracy@20 79.8, Accuracy@100 89.1 |" in page


def test_dry_run_prints_all_commands_and_writes_nothing(reproduce, tmp_path, capsys):
    files_before = sorted(tmp_path.iterdir())
    cells = ["--datasets", "nq", "msmarco", "--memory", "11gb", "24gb", "--dry-run"]
    assert reproduce(*cells, "--learning_rate", "1e-4") == 0
    printed = capsys.readouterr().out
    assert sorted(tmp_path.iterdir()) == files_before
    assert printed.count("contaccum train ") == printed.count("--learning_rate 1e-4") == 16
    assert printed.count("psgs_w100.tsv.gz\n") == 1
    assert printed.count("contaccum mine --method bm25") == 1
    assert "contaccum evaluate --run" in printed
    assert "--split dev" in printed


def test_unknown_train_option_is_refused_in_one_line(reproduce, capsys):
    assert reproduce("--datasets", "nq", "--learning_rat", "1") == 2
    error = capsys.readouterr().err
    assert "learning_rate" in error
    assert error.count("\n") == 1


def test_incomplete_download_leaves_no_file(server_url, tmp_path, monkeypatch):
    url = f"{server_url}/wikipedia_split/psgs_w100.tsv.gz"
    reproduce_table1.download(url, tmp_path / "deep" / "psgs.tsv.gz")
    assert (tmp_path / "deep" / "psgs.tsv.gz").read_bytes() == urlopen(url).read()
    response = urlopen(url)
    response.headers.replace_header("Content-Length", "1000000")
    monkeypatch.setattr(reproduce_table1, "urlopen", lambda *args, **settings: response)
    with pytest.raises(DataError, match="of 1,000,000 bytes"):
        reproduce_table1.download(url, tmp_path / "b.gz")
    assert not (tmp_path / "b.gz").exists()


BANK_SIZES = {"msmarco": 1024, "nq": 2048, "trivia": 512, "webq": 128, "trec": 128}
NUM_EPOCHS = {"msmarco": 10, "nq": 40, "trivia": 40, "webq": 100, "trec": 100}


@pytest.mark.parametrize("dataset", BANK_SIZES)
@pytest.mark.parametrize(("memory", "num_pairs"), [("11gb", 8), ("24gb", 32), ("80gb", 128)])
@pytest.mark.parametrize("method", reproduce_table1.METHODS)
def test_recipes_have_the_settings_of_the_paper(dataset, memory, num_pairs, method):
    options, train_options = reproduce_table1.parse_arguments([])
    steps = reproduce_table1.make_plan(dataset, memory, method, options, train_options)
    train_command = next(step.command for step in steps if "train" in step.command)
    model, source, args = parse(train_command[1:])
    assert args.method == method
    assert args.pairs_per_micro_batch == num_pairs
    assert args.total_train_batch_size == (num_pairs if method == "in_batch" else 128)
    assert args.bank_size == (BANK_SIZES[dataset] if method == "contaccum" else 0)
    assert args.num_train_epochs == NUM_EPOCHS[dataset]
    assert args.warmup_steps == 1237
    assert args.learning_rate == 2e-5
    assert args.adam_epsilon == 1e-8
    assert args.weight_decay == 0.0
    assert args.max_grad_norm == 2.0
    assert args.similarity == "dot"
    assert args.temperature == 1.0
    assert args.drift_compensation == "none"
    assert args.normalize_by == "all"
    assert args.mask_duplicates is False
    assert model.tied is False
    assert model.pooling == "cls"
    assert source.num_hard_negatives == 1
