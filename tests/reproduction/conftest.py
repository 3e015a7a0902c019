"""DPR's files and MS MARCO in miniature, served on this machine as their publishers serve them."""

from __future__ import annotations

import gzip
import json
import random
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from sample_texts import WORDS, sentences
from transformers import BertForSequenceClassification, BertModel

PASSAGES = 60
QUERIES = 12


class Files(BaseHTTPRequestHandler):
    """Serves ``content`` by path, ranges too; the first answer for a path in ``broken`` ends half-way."""

    content: dict[str, bytes]
    broken: set[str]
    asked: list[tuple[str, str | None]]

    def do_GET(self) -> None:
        body, where = self.content.get(self.path), self.headers.get("Range")
        self.asked.append((self.path, where))
        if body is None:
            self.send_error(404)
            return
        start = int(where.removeprefix("bytes=").removesuffix("-")) if where else 0
        if start >= len(body):
            self.send_error(416)
            return
        self.send_response(206 if where else 200)
        self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        rest = body[start:]
        if self.path in self.broken:
            self.broken.remove(self.path)
            rest = rest[: len(rest) // 2]
            self.close_connection = True
        self.wfile.write(rest)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def served() -> Iterator[tuple[str, type[Files]]]:
    """The address of a server of DPR's files, and what it serves, which a test may change."""
    handler = type("Handler", (Files,), {"content": dpr_files(), "broken": set(), "asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", handler
    server.shutdown()
    server.server_close()


def dpr_files() -> dict[str, bytes]:
    """{path: content}: a corpus, and training and test questions of the four sets whose answers are words of it."""
    titles, texts = sentences(PASSAGES, 1, 2), sentences(PASSAGES, 2, 9)
    rows = ["id\ttext\ttitle", *(f"{i + 1}\t{texts[i]}\t{titles[i]}" for i in range(PASSAGES))]
    context = [{"title": title, "text": text} for title, text in zip(titles, texts, strict=True)]
    draw = random.Random(0)
    train = [
        {
            "question": question,
            "answers": [context[i]["text"].split()[0]],
            "positive_ctxs": [context[i]],
            "negative_ctxs": [],
            "hard_negative_ctxs": draw.sample(context[i + 1 :], 2),
        }
        for i, question in enumerate(sentences(20, 3))
    ]
    words = draw.sample(list(WORDS), QUERIES)
    string = "".join(f"{q}\t['{w}']\n" for q, w in zip(sentences(QUERIES, 4), words, strict=True))
    regex = "".join(f"{q}\t['{w[:2]}[a-z]+']\n" for q, w in zip(sentences(QUERIES, 4), words, strict=True))
    files = {"/wikipedia_split/psgs_w100.tsv.gz": gzip.compress("\n".join(rows).encode())}
    for name in ("nq", "trivia", "webquestions", "curatedtrec"):
        files[f"/data/retriever/biencoder-{name}-train.json.gz"] = gzip.compress(json.dumps(train).encode())
        content = (regex if name == "curatedtrec" else string).encode()
        zipped = name == "trivia"
        files[f"/data/retriever/{name}-test.qa.csv{'.gz' if zipped else ''}"] = (
            gzip.compress(content) if zipped else content
        )
    return files


@pytest.fixture
def msmarco(tmp_path: Path) -> Path:
    """A data folder with MS MARCO in BEIR's form: judged train and dev queries, and one that is judged nowhere."""
    folder = tmp_path / "data" / "beir" / "msmarco"
    (folder / "qrels").mkdir(parents=True)
    texts, queries = sentences(PASSAGES, 5, 9), sentences(30, 6)
    lines = [json.dumps({"_id": str(i), "title": "", "text": text}) for i, text in enumerate(texts)]
    (folder / "corpus.jsonl").write_text("\n".join(lines) + "\n")
    lines = [json.dumps({"_id": f"q{i}", "text": text}) for i, text in enumerate([*queries, "never judged"])]
    (folder / "queries.jsonl").write_text("\n".join(lines) + "\n")
    for split, numbers in (("train", range(20)), ("dev", range(20, 30))):
        rows = ["query-id\tcorpus-id\tscore", *(f"q{i}\t{(7 * i) % PASSAGES}\t1" for i in numbers)]
        (folder / "qrels" / f"{split}.tsv").write_text("\n".join(rows) + "\n")
    return folder


@pytest.fixture(scope="session")
def backbone(tiny_config: Any, tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A saved BERT, as the recipes start from one."""
    path = tmp_path_factory.mktemp("reproduction") / "bert"
    torch.manual_seed(0)
    BertModel(tiny_config).save_pretrained(path)
    tiny_tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="session")
def cross_encoder(tiny_config: Any, tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A saved random cross-encoder whose logits spread over some 10 points."""
    path = tmp_path_factory.mktemp("reproduction") / "cross-encoder"
    options = {"initializer_range": 0.5, "id2label": {0: "relevant"}, "label2id": {"relevant": 0}}
    torch.manual_seed(0)
    BertForSequenceClassification(type(tiny_config)(**{**tiny_config.to_dict(), **options})).save_pretrained(path)
    tiny_tokenizer.save_pretrained(path)
    return str(path)
