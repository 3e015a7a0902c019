"""`contaccum encode`: documents, precision, dtype, two processes, refused arguments.

Killed processes are tested in tests/retrieval/test_store.py.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from programs import run_torchrun
from sample_texts import sentences
from small_data import make_documents, write_beir
from tiny_models import tiny_encoder

from contaccum import DualEncoder
from contaccum.cli import main
from contaccum.data import Passage, RecordReport
from contaccum.data.corpus import read_texts
from contaccum.errors import DataError
from contaccum.files import fingerprint
from contaccum.retrieval.encode import model_fingerprint, tokenisation_fingerprint
from contaccum.retrieval.store import TOKENISATION, EmbeddingStore

# Passages of three lengths; every second one has a title.
PASSAGES = [
    Passage(f"d{number}", f"title {number}" if number % 2 else "", sentence * (1 + number % 3))
    for number, sentence in enumerate(sentences(45, 1, 5))
]


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Return a folder with a saved untied model with prompts, and a BEIR folder."""
    root = tmp_path_factory.mktemp("encode")
    prompts = {"query_prompt": "who: ", "passage_prompt": "text: "}
    model = tiny_encoder(tied=False, normalize=False, passage_max_length=24, **prompts)
    model.save_pretrained(str(root / "model"))
    documents = {passage.id: (passage.title, passage.text) for passage in PASSAGES}
    write_beir(root / "beir", documents, {}, [])
    return root


@pytest.fixture(scope="module")
def model(root) -> DualEncoder:
    return DualEncoder.from_pretrained(str(root / "model"), device="cpu")


def run_encode(
    root: Path, output: Path, *options: object, corpus: str = "beir/corpus.jsonl"
) -> None:
    argv = ["encode", root / "model", "--corpus", root / corpus, "--output", output]
    argv += ["--no_progress", "--device", "cpu", "--shard_size", 16, *options]
    assert main([str(argument) for argument in argv]) == 0


@pytest.fixture(scope="module")
def store_folder(root) -> Path:
    """Return the store of corpus.jsonl."""
    run_encode(root, root / "store")
    return root / "store"


def test_passages_are_encoded_as_documents_and_recorded(store_folder, model):
    store = EmbeddingStore.open(store_folder)
    assert store.ids(range(45)) == [passage.id for passage in PASSAGES]
    expected = model.encode_document([passage.passage for passage in PASSAGES])
    np.testing.assert_allclose(store[:], expected, atol=1e-5)
    record = store.metadata
    assert record["model"] == model_fingerprint(model, "document")
    fields = [part for passage in PASSAGES for part in passage]
    assert record["corpus"]["fingerprint"] == fingerprint(*fields)
    assert record[TOKENISATION] == tokenisation_fingerprint(model, "document")
    assert record["similarity"] == "dot"
    assert record["kind"] == "document"
    assert record["precision"] == "float32"
    assert record["versions"]["torch"]


def test_precision_and_dtype_are_independent(root, store_folder, tmp_path):
    exact = EmbeddingStore.open(store_folder)[:]

    # --precision is the precision of the model, --dtype the number type of the store.
    run_encode(root, tmp_path / "bfloat16", "--precision", "bfloat16")
    autocast_store = EmbeddingStore.open(tmp_path / "bfloat16")
    assert autocast_store.dtype == "float32"
    greatest_error = np.abs(autocast_store[:] - exact).max()
    assert 1e-5 < greatest_error < 0.1

    run_encode(root, tmp_path / "float16", "--dtype", "float16")
    rounded = EmbeddingStore.open(tmp_path / "float16")[:]
    np.testing.assert_array_equal(rounded, exact.astype(np.float16).astype(np.float32))


@pytest.mark.long
def test_two_processes_write_the_store_of_one_process(root, store_folder, tmp_path):
    argv = ["encode", root / "model", "--no_progress", "--shard_size", 16]
    argv += ["--corpus", root / "beir" / "corpus.jsonl", "--output", tmp_path / "s"]
    done = run_torchrun("--standalone", "--nproc_per_node", 2, "-m", "contaccum.cli", *argv)
    assert done.returncode == 0, done.stderr[-3000:]
    store = EmbeddingStore.open(tmp_path / "s")
    expected = EmbeddingStore.open(store_folder)
    assert store.metadata == expected.metadata
    np.testing.assert_array_equal(store[:], expected[:])
    # Rank 0 has the shards of 16 and 13 rows, rank 1 the shard of 16 rows between them.
    assert "29 encoded by rank 0" in done.stdout
    assert "16 encoded by rank 1" in done.stdout
    assert done.stdout.count("45 records in ") == 1
    assert "written:" in done.stdout


def test_a_json_array_with_other_column_names_is_encoded(root, tmp_path):
    """A document may have no text: published sets have such documents, which count in scores."""
    rows = [{"chunk": f"c{i}", "content": text} for i, text in enumerate([*sentences(2), ""])]
    (root / "chunks.json").write_text(json.dumps(rows))
    columns = ["--corpus_columns", "id=chunk", "text=content"]
    options = [*columns, "--bm25", "--format", "parquet"]
    run_encode(root, tmp_path / "store", *options, corpus="chunks.json")
    assert EmbeddingStore.open(tmp_path / "store").ids(range(3)) == ["c0", "c1", "c2"]


@pytest.mark.parametrize("last", [65_535, 65_540])
def test_repeated_ids_are_refused(tmp_path, last):
    """Ids are checked in blocks of 65,536. The repeated id is in the same block, or in another."""
    lines = [f'{{"_id": "d{number}", "text": "a"}}\n' for number in [*range(last), 2]]
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(lines))
    with pytest.raises(DataError, match="id 'd2' occurs again"):
        list(read_texts(path, "document", RecordReport("skip")))


def test_passages_longer_than_the_model_reads_are_counted(root, tmp_path, capsys):
    """A passage of eight tokens fits; the one that occurs twice counts once."""
    texts = ["cat " * num_words for num_words in (6, 7, 7, 1, 6)]  # and two special tokens
    documents = make_documents("d", texts)
    write_beir(tmp_path / "beir", documents, {}, [])
    tiny_encoder().save_pretrained(str(tmp_path / "model"))
    argv = ["encode", str(tmp_path / "model"), "--corpus", str(tmp_path / "beir")]
    line = "33.3% of the passages are longer than 8 tokens; the rest is not read"
    for length in ("8", "9"):
        output = str(tmp_path / length)
        assert main([*argv, "--passage_max_length", length, "--output", output]) == 0
        assert (line in capsys.readouterr().out) == (length == "8")
