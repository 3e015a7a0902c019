"""scripts/reproduce_table1.py: every step in miniature, from files that are served here, done once; plan and costs."""

from __future__ import annotations

import gzip
import json
import random
import sys
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from sample_texts import WORDS, sentences
from transformers import BertModel

from contaccum.cli import main as contaccum
from contaccum.errors import DataError

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
    "--gradient_accumulation_steps",
    "1",
]
CORPUS = "/wikipedia_split/psgs_w100.tsv.gz"


class Files(BaseHTTPRequestHandler):
    """Serves ``content`` by path, ranges too; the first answer for a path in ``broken`` ends half-way."""

    content: dict[str, bytes]
    broken: set[str]
    asked: list[tuple[str, str | None]]

    def do_GET(self) -> None:
        body, where = self.content.get(self.path, b""), self.headers["Range"] or "bytes=0-"
        self.asked.append((self.path, where))
        rest = body[int(where.removeprefix("bytes=").removesuffix("-")) :]
        if not rest:
            self.send_error(416 if body else 404)
            return
        self.send_response(206)
        self.send_header("Content-Length", str(len(rest)))
        self.end_headers()
        self.wfile.write(rest[: len(rest) // 2] if self.path in self.broken else rest)
        self.broken.discard(self.path)

    def log_message(self, *args: Any) -> None:
        pass


def dpr_files() -> dict[str, bytes]:
    """{path: content} of CuratedTREC: 60 passages, 20 training questions, 12 questions whose answers are patterns."""
    titles, texts = sentences(60, 1, 2), sentences(60, 2, 9)
    context = [{"title": title, "text": text} for title, text in zip(titles, texts, strict=True)]
    rows = ["id\ttext\ttitle", *(f"{i + 1}\t{one['text']}\t{one['title']}" for i, one in enumerate(context))]
    rng = random.Random(0)
    train = [
        {"question": question, "answers": ["x"], "positive_ctxs": [context[i]], "negative_ctxs": []}
        | {"hard_negative_ctxs": rng.sample(context[i + 1 :], 2)}
        for i, question in enumerate(sentences(20, 3))
    ]
    questions = zip(sentences(12, 4), rng.sample(list(WORDS), 12), strict=True)
    return {
        CORPUS: gzip.compress("\n".join(rows).encode()),
        "/data/retriever/biencoder-curatedtrec-train.json.gz": gzip.compress(json.dumps(train).encode()),
        "/data/retriever/curatedtrec-test.qa.csv": "".join(f"{q}\t['{w[:2]}[a-z]+']\n" for q, w in questions).encode(),
    }


@pytest.fixture
def served():
    """The address of a server of DPR's files, and what it serves, which a test may change."""
    handler = type("Handler", (Files,), {"content": dpr_files(), "broken": set(), "asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", handler
    server.shutdown()
    server.server_close()


@pytest.fixture
def reproduce(tmp_path, served, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(*argv: str) -> int:
        return reproduce_table1.main(["--configs", str(ROOT / "configs" / "paper"), "--files_from", served[0], *argv])

    return run


@pytest.mark.slow
def test_a_cell_is_done_once_and_goes_on_where_it_failed(
    reproduce, served, tiny_config, tiny_tokenizer, tmp_path, monkeypatch, capsys
):
    torch.manual_seed(0)
    BertModel(tiny_config).save_pretrained(tmp_path / "bert")
    tiny_tokenizer.save_pretrained(tmp_path / "bert")
    done: list[str] = []

    def here(command: Sequence[str]) -> int:  # spares the start of another process
        done.append(command[0])
        return 2 if done == ["train", "encode"] else contaccum(command)

    monkeypatch.setattr(reproduce_table1, "call", here)
    cell = ["--datasets", "trec", "--methods", "contaccum", "--device", "cpu"]
    line = [*cell, "--model", str(tmp_path / "bert"), "--use_cpu", "true", *FEW]
    assert reproduce(*line) == 2
    assert "trec/11gb/contaccum: encode ended with exit code 2" in capsys.readouterr().err
    assert reproduce(*line, "--learning_rate", "1e-3") == 2
    assert "train was done with other settings" in capsys.readouterr().err
    assert reproduce(*line) == 0
    assert done == ["train", "encode", "encode", "search", "open_qa"] and len(served[1].asked) == 3
    capsys.readouterr()
    assert reproduce(*line) == 0
    assert len(done) == 5 and capsys.readouterr().out.count(" is done\n") == 7

    ours, published = json.loads((tmp_path / "runs" / "paper" / "table1.json").read_text())
    folder = tmp_path / "runs" / "paper" / "trec" / "11gb" / "contaccum"
    scores = json.loads((folder / "scores.json").read_text())["metrics"]
    assert ours["metrics"] == {name: scores[name] for name in ("Accuracy@20", "Accuracy@100")}
    assert 0 < ours["metrics"]["Accuracy@20"] <= 1 and published["metrics"]["Accuracy@20"] == 0.798
    assert (folder / "model").is_dir() and not (folder / "passages").exists()
    assert "| CuratedTREC | 11gb | contaccum | Accuracy@20 " in (tmp_path / "runs" / "paper" / "table1.md").read_text()


def test_dry_run_does_nothing_and_says_all(reproduce, served, tmp_path, capsys):
    assert (
        reproduce("--datasets", "nq", "msmarco", "--memory", "11gb", "24gb", "--dry-run", "--learning_rate", "1e-4")
        == 0
    )
    shown = capsys.readouterr().out
    assert served[1].asked == [] and list(tmp_path.iterdir()) == []
    assert (
        shown.count(": train\n") == shown.count("contaccum train ") == 16 and shown.count("--learning_rate 1e-4") == 16
    )
    assert shown.count("download psgs_w100.tsv.gz\n") == shown.count("  mine\n") == 1
    assert "contaccum mine --method bm25" in shown and "contaccum evaluate --run" in shown and "--split dev" in shown
    # 21,015,324 passages of 768 numbers, two bytes each; towers of 110 million weights; hours by those of 85 million.
    assert "   32.3 GB  nq/11gb/contaccum: encode" in shown and "    6.2 GB  nq/11gb/contaccum: train" in shown
    lines = {line.split("  ")[-1]: line for line in shown.splitlines()}
    hours = [float(lines[f"nq/11gb/{x}: train"].split(" h ")[0].replace(",", "")) for x in ("grad_cache", "contaccum")]
    assert hours[0] / hours[1] == pytest.approx(4 / 3, rel=0.01)
    for argv, said in (
        (["--learning_rat", "1"], "learning_rate"),
        (["--train_data", "mine.json"], "is set by the plan"),
        (["--configs", "nowhere"], "no such recipe"),
    ):
        assert reproduce("--datasets", "nq", *argv) == 2
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1 and served[1].asked == []


def test_a_file_is_fetched_whole_and_goes_on_where_it_broke_off(served, tmp_path):
    address, files = served
    path, whole = tmp_path / "deep" / "psgs.tsv.gz", files.content[CORPUS]
    files.broken.add(CORPUS)
    with pytest.raises(DataError, match="start again to go on"):
        reproduce_table1.fetch(address + CORPUS, path)
    half = path.with_name("psgs.tsv.gz.part").stat().st_size
    assert not path.exists() and 0 < half < len(whole)
    reproduce_table1.fetch(address + CORPUS, path)
    assert files.asked[-1] == (CORPUS, f"bytes={half}-") and path.read_bytes() == whole
    assert list(path.parent.iterdir()) == [path]

    files.content[CORPUS] = whole[:-20] + bytes(20)  # damaged: refused, and fetched anew
    with pytest.raises(DataError, match="no whole gzip file"):
        reproduce_table1.fetch(address + CORPUS, tmp_path / "b.gz")
    files.content[CORPUS] = whole
    (tmp_path / "b.gz.part").write_bytes(bytes(len(whole)))  # as long as the file already: thrown away
    with pytest.raises(DataError, match="416"):
        reproduce_table1.fetch(address + CORPUS, tmp_path / "b.gz")
    reproduce_table1.fetch(address + CORPUS, tmp_path / "b.gz")
    assert (tmp_path / "b.gz").read_bytes() == whole
    with pytest.raises(DataError, match="could not be fetched"):
        reproduce_table1.fetch("http://127.0.0.1:9/nothing", tmp_path / "file.csv")
