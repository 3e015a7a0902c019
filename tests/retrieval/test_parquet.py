"""Parquet files of a store hold its rows bit for bit, and other programs read them."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from small_data import contents, write_lines

from contaccum import DualEncoder
from contaccum.cli import main
from contaccum.retrieval.encode import encode_texts
from contaccum.retrieval.search import build_index, search
from contaccum.retrieval.store import EmbeddingStore, StoreWriter, write_parquet

ENCODING_PAGE = Path(__file__).parents[2] / "docs" / "encoding.md"
NUM_ROWS = 25
DIMENSION = 8
EMBEDDINGS = np.random.default_rng(0).standard_normal((NUM_ROWS, DIMENSION)).astype(np.float32)
PASSAGES = [(f"id-{row}", f"title {row}", f"text {row} é") for row in range(NUM_ROWS)]


@pytest.fixture(params=["float32", "float16"])
def store(request, tmp_path) -> EmbeddingStore:
    """Return a store of 25 rows in shards of 10."""
    identity = {"similarity": "cos", "dtype": request.param, "shard_size": 10}
    writer = StoreWriter(tmp_path / "store", identity, has_passages=True)
    assert writer.fill(PASSAGES, lambda texts: EMBEDDINGS[[int(text.split()[1]) for text in texts]])
    return EmbeddingStore.open(tmp_path / "store")


def test_files_hold_the_rows_of_the_shards_bit_for_bit(store):
    folder = write_parquet(store)
    assert folder == store.folder / "parquet"
    paths = sorted(folder.iterdir())
    names = [path.name for path in paths]
    assert names == ["shard-00000.parquet", "shard-00001.parquet", "shard-00002.parquet"]
    embedding_type = pq.read_schema(paths[0]).field("embedding").type
    assert embedding_type.list_size == DIMENSION
    assert embedding_type.value_type == pa.from_numpy_dtype(store.dtype)
    shards = np.split(EMBEDDINGS.astype(store.dtype), [10, 20])
    for path, expected in zip(paths, shards, strict=True):
        embeddings = pq.read_table(path)["embedding"].combine_chunks().flatten().to_numpy()
        assert embeddings.tobytes() == expected.tobytes()
    columns = pq.read_table(folder).to_pydict()
    assert list(columns) == ["id", "title", "text", "embedding"]
    assert list(zip(columns["id"], columns["title"], columns["text"], strict=True)) == PASSAGES


@pytest.fixture(scope="module")
def encode(tiny_model_path, tmp_path_factory) -> Callable[..., Path]:
    """Return a function that runs `contaccum encode --format parquet`; it returns the store."""
    root = tmp_path_factory.mktemp("encoded")
    rows = [{"_id": name, "title": title, "text": text} for name, title, text in PASSAGES]
    corpus = write_lines(root / "corpus.jsonl", rows)

    def run(*options: str) -> Path:
        argv = ["encode", tiny_model_path, "--corpus", str(corpus), "--output", str(root / "store")]
        argv += ["--format", "parquet", "--shard_size", "10", "--no_progress", "--device", "cpu"]
        assert main([*argv, *options]) == 0
        return root / "store"

    return run


def test_encode_adds_the_files_to_a_finished_store_and_replaces_them_with_it(encode, capsys):
    folder = encode()
    contents_before = contents(folder)
    shutil.rmtree(folder / "parquet")
    encode()
    assert contents(folder) == contents_before
    assert "0 encoded by rank 0" in capsys.readouterr().out
    encode("--dtype", "float16", "--overwrite")
    embedding_type = pq.read_table(folder / "parquet").schema.field("embedding").type
    assert embedding_type.value_type == pa.float16()


def test_duckdb_lines_of_the_page_find_the_documents_and_scores_of_our_search(
    encode, tiny_model_path
):
    pytest.importorskip("duckdb")
    page = ENCODING_PAGE.read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (script,) = [block for block in blocks if "duckdb" in block]
    store = EmbeddingStore.open(encode("--overwrite"))
    script = script.replace("stores/wikipedia", str(store.folder))
    script = script.replace('"MODEL"', repr(tiny_model_path))
    script = script.replace("who wrote the Iliad", "text 7")
    variables: dict[str, Any] = {}
    exec(compile(script, str(ENCODING_PAGE), "exec"), variables)

    model = DualEncoder.from_pretrained(tiny_model_path, device="cpu")
    query = encode_texts(model, ["text 7"], "query")
    scores, rows = search(build_index(store, metric="cos"), query, 10)
    hits = variables["hits"]
    assert [document_id for document_id, _, _ in hits] == store.ids(rows[0])
    np.testing.assert_allclose([score for _, _, score in hits], scores[0], atol=1e-6)
