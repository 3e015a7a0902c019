"""`contaccum encode`: passages as documents, queries as queries, by one process or two.

Every form of a corpus: tests/data/test_questions.py. Killed at any instant: tests/retrieval/test_store.py.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from sample_texts import sentences
from small_data import contents, write_beir

from contaccum import DualEncoder
from contaccum.cli import main
from contaccum.data import Passage, RecordReport
from contaccum.errors import DataError
from contaccum.files import fingerprint
from contaccum.retrieval import encode as encode_module
from contaccum.retrieval.encode import model_fingerprint, read_texts, tokenisation_fingerprint
from contaccum.retrieval.store import EmbeddingStore

QUERIES = sentences(7, 2)
TEXTS = [text * (1 + n % 3) for n, text in enumerate(sentences(45, 1, 5))]
PASSAGES = [Passage(f"d{n}", f"title {n}" if n % 2 else "", text) for n, text in enumerate(TEXTS)]


@pytest.fixture(scope="module")
def root(tiny_config, tiny_tokenizer, tmp_path_factory) -> Path:
    """A saved model with towers and prompts of its own, a BEIR folder, and its queries as DPR has them."""
    root = tmp_path_factory.mktemp("encode")
    settings = {"tied": False, "query_prompt": "who: ", "passage_prompt": "text: ", "device": "cpu"}
    model = DualEncoder.from_backbone(
        tiny_config, tokenizer=tiny_tokenizer, passage_max_length=24, **settings
    )
    model.save_pretrained(str(root / "model"))
    documents = {p.id: (p.title, p.text) for p in PASSAGES}
    write_beir(root / "beir", documents, {f"q{n}": text for n, text in enumerate(QUERIES)}, [])
    (root / "nq.qa.csv").write_text("".join(f"{query}\t['an answer']\n" for query in QUERIES))
    return root


@pytest.fixture(scope="module")
def model(root) -> DualEncoder:
    return DualEncoder.from_pretrained(str(root / "model"), device="cpu")


def encode(
    root: Path, output: Path, *options: object, corpus: str = "beir/corpus.jsonl", expect: int = 0
) -> None:
    words = [
        "encode",
        root / "model",
        "--corpus",
        root / corpus,
        "--output",
        output,
        "--no_progress",
    ]
    words += ["--device", "cpu", "--shard_size", 16, *options]
    assert main([str(word) for word in words]) == expect


@pytest.fixture(scope="module")
def whole(root) -> Path:
    """The store of corpus.jsonl."""
    encode(root, root / "whole")
    return root / "whole"


def test_passages_are_encoded_as_documents_and_the_record_says_how(whole, model):
    store = EmbeddingStore.open(whole)
    assert store.ids(range(45)) == [p.id for p in PASSAGES]
    np.testing.assert_allclose(
        store[:], model.encode_document([p.passage for p in PASSAGES]), atol=1e-5
    )
    about = store.metadata
    assert about["model"] == model_fingerprint(model, "document")
    assert about["corpus"]["fingerprint"] == fingerprint(*(field for p in PASSAGES for field in p))
    assert about["tokenisation"] == tokenisation_fingerprint(model, "document")
    assert (about["similarity"], about["kind"], about["precision"]) == (
        "dot",
        "document",
        "float32",
    )
    assert about["versions"]["torch"]


@pytest.mark.parametrize(("corpus", "first"), [("beir", "q0"), ("nq.qa.csv", "question-1")])
def test_queries_are_encoded_as_queries(root, model, tmp_path, corpus, first):
    encode(root, tmp_path / "s", "--kind", "query", corpus=corpus)
    store = EmbeddingStore.open(tmp_path / "s")
    np.testing.assert_allclose(store[:], model.encode_query(QUERIES), atol=1e-5)
    assert store.ids([0]) == [first]


def test_precision_and_dtype_are_separate_choices(root, whole, tmp_path):
    encode(root, tmp_path / "16", "--dtype", "float16")
    encode(root, tmp_path / "b16", "--precision", "bfloat16")
    exact, half, autocast = map(EmbeddingStore.open, (whole, tmp_path / "16", tmp_path / "b16"))
    np.testing.assert_array_equal(half[:], exact[:].astype(np.float16).astype(np.float32))
    assert 1e-4 < np.abs(autocast[:] - exact[:]).max() < 0.1 and autocast.dtype == "float32"
    for dtype in ("int8", "binary"):
        encode(root, tmp_path / dtype, "--dtype", dtype)
    codes, bits = (EmbeddingStore.open(tmp_path / dtype)[:] for dtype in ("int8", "binary"))
    assert (np.abs(codes - exact[:]) <= np.ptp(exact[:], axis=0) / 169).all()  # 6.0 cuts towards 0
    np.testing.assert_array_equal(bits, np.where(exact[:] > 0, 1, -1))


@pytest.mark.long
def test_two_processes_end_with_the_store_of_one(root, whole, tmp_path):
    words = [
        "encode",
        root / "model",
        "--corpus",
        root / "beir" / "corpus.jsonl",
        "--output",
        tmp_path / "s",
    ]
    words += ["--no_progress", "--shard_size", "16"]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
    ]
    command += ["-m", "contaccum.cli", *map(str, words)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    ours, theirs = EmbeddingStore.open(tmp_path / "s"), EmbeddingStore.open(whole)
    assert ours.metadata == theirs.metadata
    np.testing.assert_array_equal(ours[:], theirs[:])
    # 16 + 13 and 16, whoever says the last word
    assert "29 encoded by rank 0" in done.stdout and "16 encoded by rank 1" in done.stdout
    assert done.stdout.count("45 records") == 1 and "written:" in done.stdout


def test_an_id_that_occurs_again_is_refused_however_far_apart(root, tmp_path, monkeypatch):
    lines = (root / "beir" / "corpus.jsonl").read_text().splitlines()
    path = tmp_path / "corpus.jsonl"
    path.write_text("\n".join([*lines[:30], lines[2], *lines[30:]]))
    for block in (7, 2**16):
        monkeypatch.setattr(encode_module, "_IDS_PER_BLOCK", block)
        with pytest.raises(DataError, match="id 'd2' occurs again"):
            list(read_texts(path, "document", RecordReport("skip")))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--device", "abacus"], "device 'abacus'"),
        (["--shard", 3], "did you mean 'shard_size'"),
        (["--passage_max_length", 9999], "passage_max_length=9999"),
        (["--output", "WHOLE", "--passage_max_length", 20], "another tokenisation ("),
    ],
)
def test_mistakes_are_refused_before_anything_is_written(
    root, whole, tmp_path, options, told, capsys
):
    before = contents(whole)
    encode(
        root, tmp_path / "s", *(whole if word == "WHOLE" else word for word in options), expect=2
    )
    assert told in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "s").exists() and contents(whole) == before
