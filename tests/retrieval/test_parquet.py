"""Parquet files of a store hold its rows bit for bit, and other programs read them."""

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from small_data import contents, write_lines

from contaccum import DualEncoder
from contaccum.cli import main
from contaccum.errors import ConfigError, DataError, UserError
from contaccum.retrieval import parquet
from contaccum.retrieval.encode import encode_texts
from contaccum.retrieval.index import build_index, search
from contaccum.retrieval.parquet import describe_store, write_parquet
from contaccum.retrieval.store import EmbeddingStore, StoreWriter

ENCODING_PAGE = Path(__file__).parents[2] / "docs" / "encoding.md"
NUM_ROWS = 25
DIMENSION = 8
EMBEDDINGS = np.random.default_rng(0).standard_normal((NUM_ROWS, DIMENSION)).astype(np.float32)
PASSAGES = [(f"id-{row}", f"title {row}", f"text {row} é") for row in range(NUM_ROWS)]


def write_store(folder: Path, **changes: Any) -> EmbeddingStore:
    """Write a store of 25 rows in shards of 10."""
    identity = {
        "kind": "document",
        "model": "a" * 64,
        "similarity": "cos",
        "dtype": "float32",
        "shard_size": 10,
        **changes,
    }

    def encode(texts: list[str]) -> np.ndarray:
        rows = [int(text.split()[1]) for text in texts]
        return EMBEDDINGS[rows]

    writer = StoreWriter(folder, identity, {"model_name": "my-model"})
    assert writer.fill(PASSAGES, encode)
    return EmbeddingStore.open(folder)


@pytest.fixture(params=["float32", "float16"])
def store(request, tmp_path) -> EmbeddingStore:
    return write_store(tmp_path / "store", dtype=request.param)


def get_expected_columns(dtype: str) -> dict[str, list[Any]]:
    """Return all columns of the files as Python values."""
    ids, titles, texts = zip(*PASSAGES, strict=True)
    return {
        "id": list(ids),
        "title": list(titles),
        "text": list(texts),
        "embedding": EMBEDDINGS.astype(dtype).tolist(),
    }


def read_embeddings(path: Path) -> np.ndarray:
    """Return the embeddings of a file, or of a folder of files, one after the other in 1-D."""
    return pq.read_table(path)["embedding"].combine_chunks().flatten().to_numpy()


def test_files_hold_the_rows_of_the_shards_bit_for_bit(store, tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "ROWS_PER_GROUP", 4)
    paths = write_parquet(store, tmp_path / "p", PASSAGES)
    names = [path.name for path in paths]
    assert names == ["shard-00000.parquet", "shard-00001.parquet", "shard-00002.parquet"]
    assert pq.read_metadata(paths[0]).num_row_groups == 3  # of 4, 4 and 2 rows
    expected = EMBEDDINGS.astype(store.dtype)
    expected_of_shards = [expected[:10], expected[10:20], expected[20:]]
    for path, expected_embeddings in zip(paths, expected_of_shards, strict=True):
        assert pq.read_metadata(path).num_rows == len(expected_embeddings)
        embeddings = read_embeddings(path)
        assert embeddings.dtype == store.dtype
        assert embeddings.tobytes() == expected_embeddings.tobytes()
    columns = pq.read_table(tmp_path / "p").to_pydict()
    assert columns == get_expected_columns(store.dtype)


def test_schema_has_fixed_size_lists_and_names_the_model(store, tmp_path):
    (path, *_) = write_parquet(store, tmp_path / "p", PASSAGES)
    schema = pq.read_schema(path)
    assert schema.names == ["id", "title", "text", "embedding"]
    value_name = {"float32": "float", "float16": "halffloat"}[store.dtype]
    embedding_type = schema.field("embedding").type
    assert embedding_type.list_size == DIMENSION
    assert str(embedding_type.value_type) == value_name
    metadata = {key.decode(): value.decode() for key, value in schema.metadata.items()}
    assert metadata == describe_store(store)
    assert metadata["contaccum.model_name"] == "my-model"
    assert metadata["contaccum.similarity"] == "cos"
    assert metadata["contaccum.fingerprint"] == store.fingerprint


def test_without_passages_the_files_have_ids_and_embeddings_only(store, tmp_path):
    write_parquet(store, tmp_path / "p")
    columns = get_expected_columns(store.dtype)
    expected = {"id": columns["id"], "embedding": columns["embedding"]}
    assert pq.read_table(tmp_path / "p").to_pydict() == expected


def test_datasets_reads_the_files_bit_for_bit(store, tmp_path):
    import datasets

    write_parquet(store, tmp_path / "p", PASSAGES)
    rows = datasets.load_dataset(
        "parquet",
        data_files=str(tmp_path / "p" / "*.parquet"),
        split="train",
        cache_dir=str(tmp_path / "cache"),
    )
    assert rows.features["embedding"].length == DIMENSION
    expected = get_expected_columns(store.dtype)
    assert rows["id"][:] == expected["id"]
    assert rows["text"][:] == expected["text"]
    embeddings = np.stack(rows.with_format("numpy")["embedding"][:])
    assert embeddings.astype(store.dtype).tobytes() == EMBEDDINGS.astype(store.dtype).tobytes()


def test_duckdb_reads_the_files_bit_for_bit(store, tmp_path):
    duckdb = pytest.importorskip("duckdb")
    write_parquet(store, tmp_path / "p", PASSAGES)
    pattern = f"'{tmp_path}/p/*.parquet'"
    rows = duckdb.sql(f"SELECT * FROM {pattern}").fetchall()
    assert [row[:3] for row in rows] == PASSAGES
    embeddings = np.array([row[3] for row in rows], dtype=store.dtype)
    assert embeddings.tobytes() == EMBEDDINGS.astype(store.dtype).tobytes()
    metadata = duckdb.sql(f"SELECT key, value FROM parquet_kv_metadata({pattern})").fetchall()
    assert (b"contaccum.similarity", b"cos") in metadata
    vector_type = f"FLOAT[{DIMENSION}]"
    query = f"{EMBEDDINGS[7].tolist()}::{vector_type}"
    cosine = f"array_cosine_similarity(embedding::{vector_type}, {query})"
    ranking = duckdb.sql(f"SELECT id FROM {pattern} ORDER BY {cosine} DESC").fetchall()
    assert ranking[0] == ("id-7",)


def test_polars_reads_the_files_bit_for_bit(tmp_path):
    polars = pytest.importorskip("polars")
    write_parquet(write_store(tmp_path / "store"), tmp_path / "p", PASSAGES)
    frame = polars.read_parquet(tmp_path / "p" / "*.parquet")
    assert frame["embedding"].dtype == polars.Array(polars.Float32, DIMENSION)
    assert frame["embedding"].to_numpy().tobytes() == EMBEDDINGS.tobytes()


def test_lancedb_finds_the_documents_and_scores_of_our_search(tmp_path):
    """LanceDB is no dependency of the tests, because it installs 190 MB."""
    lancedb = pytest.importorskip("lancedb")
    import pyarrow.dataset

    store = write_store(tmp_path / "store")
    write_parquet(store, tmp_path / "p", PASSAGES)
    batches = pyarrow.dataset.dataset(tmp_path / "p").to_batches()
    schema = pq.read_schema(tmp_path / "p" / "shard-00000.parquet")
    table = lancedb.connect(tmp_path / "lance").create_table("passages", batches, schema=schema)
    query = EMBEDDINGS[3] + EMBEDDINGS[4]
    hits = table.search(query).distance_type("cosine").limit(5).to_list()
    scores, rows = search(build_index(store), query[None], 5)
    assert [hit["id"] for hit in hits] == store.ids(rows[0])
    cosines = [1 - hit["_distance"] for hit in hits]
    np.testing.assert_allclose(cosines, scores[0], atol=1e-6)


def test_only_missing_and_cut_off_files_are_written_again(tmp_path):
    store = write_store(tmp_path / "store")
    paths = write_parquet(store, tmp_path / "p", PASSAGES)
    contents_before = contents(tmp_path / "p")
    paths[1].unlink()
    os.truncate(paths[2], 700)
    inode_before = paths[0].stat().st_ino
    assert write_parquet(store, tmp_path / "p", PASSAGES) == paths
    assert contents(tmp_path / "p") == contents_before
    assert paths[0].stat().st_ino == inode_before


def test_finished_files_are_kept_without_reading_the_passages(tmp_path):
    store = write_store(tmp_path / "store")
    paths = write_parquet(store, tmp_path / "p", PASSAGES)
    unread = iter(PASSAGES)
    assert write_parquet(store, tmp_path / "p", unread) == paths
    assert next(unread) == PASSAGES[0]


def test_an_interrupted_file_leaves_nothing_and_the_next_run_completes(tmp_path):
    store = write_store(tmp_path / "store")

    def read_then_fail() -> Any:
        yield from PASSAGES[:13]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_parquet(store, tmp_path / "p", read_then_fail())
    assert list(contents(tmp_path / "p")) == ["shard-00000.parquet"]
    write_parquet(store, tmp_path / "p", PASSAGES)
    assert pq.read_table(tmp_path / "p").to_pydict() == get_expected_columns("float32")


def replace_passage(row: int, passage: tuple[str, str, str]) -> list[tuple[str, str, str]]:
    """Return `PASSAGES` with another passage in a row."""
    passages = list(PASSAGES)
    passages[row] = passage
    return passages


@pytest.mark.parametrize(
    "passages",
    [
        replace_passage(12, ("id-12", "title 12", "another text")),
        replace_passage(12, ("id-99", "title 12", "text 12 é")),
        PASSAGES[:12],
    ],
    ids=["text", "id", "end"],
)
def test_passages_of_another_corpus_are_refused(tmp_path, passages):
    store = write_store(tmp_path / "store")
    with pytest.raises(DataError, match="another corpus: the passages from row 10 on differ"):
        write_parquet(store, tmp_path / "p", passages)
    assert list(contents(tmp_path / "p")) == ["shard-00000.parquet"]


@pytest.mark.parametrize("difference", ["store", "columns", "number of files"])
def test_other_parquet_files_are_refused_before_anything_is_written(tmp_path, difference):
    store = write_store(tmp_path / "store")
    if difference == "store":
        other_store = write_store(tmp_path / "other", model="b" * 64)
        paths = write_parquet(other_store, tmp_path / "p", PASSAGES)
    elif difference == "columns":
        paths = write_parquet(store, tmp_path / "p")
    else:
        store_of_more_shards = write_store(tmp_path / "other", shard_size=5)
        paths = write_parquet(store_of_more_shards, tmp_path / "p", PASSAGES)
    # Only the last file is left, so the check must look at all files.
    *other_paths, last_path = paths
    for path in other_paths:
        path.unlink()
    contents_before = contents(tmp_path / "p")
    with pytest.raises(UserError, match=rf"{last_path.name}: holds another store or other columns"):
        write_parquet(store, tmp_path / "p", PASSAGES)
    assert contents(tmp_path / "p") == contents_before


@pytest.mark.parametrize("dtype", ["int8", "binary"])
def test_types_that_other_programs_cannot_decode_are_refused(tmp_path, dtype):
    store = write_store(tmp_path / "store", dtype=dtype)
    with pytest.raises(ConfigError, match=f"{dtype} embeddings cannot be written as parquet"):
        write_parquet(store, tmp_path / "p")
    assert not (tmp_path / "p").exists()


def run_encode(model: str, corpus: Path, output: Path, *options: str) -> int:
    """Run `contaccum encode --format parquet` and return its exit code."""
    argv = ["encode", model, "--corpus", str(corpus), "--output", str(output), "--device", "cpu"]
    return main([*argv, "--format", "parquet", "--shard_size", "10", "--no_progress", *options])


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    records = []
    for passage_id, title, text in PASSAGES:
        records.append({"_id": passage_id, "title": title, "text": text})
    return write_lines(tmp_path_factory.mktemp("corpus") / "corpus.jsonl", records)


@pytest.fixture(scope="module")
def encoded_folder(tiny_model_path, corpus, tmp_path_factory) -> Path:
    """Return a store that `contaccum encode --format parquet` has written."""
    folder = tmp_path_factory.mktemp("encoded") / "store"
    assert run_encode(tiny_model_path, corpus, folder) == 0
    return folder


def test_encode_writes_texts_and_the_embeddings_of_its_store(encoded_folder):
    store = EmbeddingStore.open(encoded_folder)
    columns = pq.read_table(encoded_folder / "parquet").to_pydict()
    expected = get_expected_columns("float32")
    expected["embedding"] = store[:].tolist()
    assert columns == expected


def test_encode_completes_the_files_of_a_finished_store(
    encoded_folder, tiny_model_path, corpus, capsys
):
    contents_before = contents(encoded_folder)
    (encoded_folder / "parquet" / "shard-00001.parquet").unlink()
    assert run_encode(tiny_model_path, corpus, encoded_folder) == 0
    assert contents(encoded_folder) == contents_before
    output = capsys.readouterr().out
    assert "0 encoded by rank 0" in output
    assert "parquet (3 parquet files)" in output


def test_overwrite_replaces_the_parquet_files(tiny_model_path, corpus, tmp_path):
    folder = tmp_path / "store"
    assert run_encode(tiny_model_path, corpus, folder) == 0
    assert run_encode(tiny_model_path, corpus, folder, "--dtype", "float16", "--overwrite") == 0
    assert read_embeddings(folder / "parquet").dtype == np.float16


def test_encode_refuses_int8_parquet_before_a_model_is_loaded(corpus, tmp_path, capsys):
    assert run_encode("no/such/model", corpus, tmp_path / "s", "--dtype", "int8") == 2
    assert "int8 embeddings cannot be written as parquet" in capsys.readouterr().err
    assert not (tmp_path / "s").exists()


def test_qdrant_lines_of_the_page_find_the_documents_and_scores_of_our_search(
    encoded_folder, tiny_model_path, tmp_path, monkeypatch
):
    """The Python block of docs/encoding.md runs with another store, model and number of hits."""
    pytest.importorskip("qdrant_client")
    page = ENCODING_PAGE.read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (script,) = [block for block in blocks if "qdrant_client" in block]
    replacements = {
        "stores/wikipedia": str(encoded_folder),
        '"MODEL"': repr(tiny_model_path),
        "who wrote the Iliad": "text 7",
    }
    for old, new in replacements.items():
        assert old in script
        script = script.replace(old, new)
    monkeypatch.chdir(tmp_path)
    variables: dict[str, Any] = {}
    exec(compile(script, str(ENCODING_PAGE), "exec"), variables)

    client = variables["client"]
    query = variables["query"].tolist()
    points = client.query_points("passages", query, limit=10).points
    client.close()
    model = DualEncoder.from_pretrained(tiny_model_path, device="cpu")
    store = EmbeddingStore.open(encoded_folder)
    queries = encode_texts(model, ["text 7"], "query")
    scores, rows = search(build_index(store, metric="cos"), queries, 10)
    assert [point.payload["id"] for point in points] == store.ids(rows[0])
    point_scores = [point.score for point in points]
    np.testing.assert_allclose(point_scores, scores[0], atol=1e-6)
    assert points[0].payload["text"].startswith("text ")
