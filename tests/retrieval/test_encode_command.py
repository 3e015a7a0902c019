"""`contaccum encode`: what `encode_texts` gives, from every form of a corpus, by one process or two, killed or not."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sample_texts import sentences

from contaccum import DualEncoder
from contaccum.cli import main
from contaccum.data.beir_folder import passage_text
from contaccum.data.passages import Passage, count_roughly
from contaccum.data.records import RecordReport
from contaccum.data.seen_ids import SeenIds
from contaccum.errors import DataError
from contaccum.retrieval.corpus_shards import corpus_shards, distinct_passages, encode_shards
from contaccum.retrieval.encoding import encode_texts
from contaccum.retrieval.store import EmbeddingStore
from contaccum.retrieval.store_identity import tokenizer_fingerprint
from contaccum.retrieval.store_writer import StoreWriter

TEXTS = [text * (1 + n % 3) for n, text in enumerate(sentences(45, 1, 5))]
PASSAGES = [Passage(f"d{n}", f"title {n}" if n % 2 else "", text) for n, text in enumerate(TEXTS)]


@pytest.fixture(scope="module")
def root(tiny_config: Any, tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model with towers and prompts of its own, and the corpus in every form."""
    root = tmp_path_factory.mktemp("encode")
    settings = {"tied": False, "query_prompt": "who: ", "passage_prompt": "text: ", "device": "cpu"}
    model = DualEncoder.from_backbone(tiny_config, tokenizer=tiny_tokenizer, passage_max_length=24, **settings)
    model.save_pretrained(str(root / "model"))
    records = [{"_id": p.id, "title": p.title, "text": p.text} for p in PASSAGES]
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (root / "corpus.jsonl").write_text(lines)
    (root / "corpus.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (root / "beir").mkdir()
    (root / "beir" / "corpus.jsonl").write_text(lines)
    queries = [{"_id": f"q{n}", "text": text} for n, text in enumerate(sentences(7, 2))]
    (root / "beir" / "queries.jsonl").write_text("".join(json.dumps(query) + "\n" for query in queries))
    pq.write_table(pa.Table.from_pylist(records), root / "corpus.parquet")
    rows = "".join(f"{p.id}\t{p.text}\t{p.title}\n" for p in PASSAGES)
    (root / "psgs_w100.tsv").write_text("id\ttext\ttitle\n" + rows)
    (root / "collection.tsv").write_text("".join(f"{p.id}\t{p.passage}\n" for p in PASSAGES))
    (root / "nq.qa.csv").write_text("".join(f"{query['text']}\t['an answer']\n" for query in queries))
    return root


@pytest.fixture(scope="module")
def model(root: Path) -> DualEncoder:
    return DualEncoder.from_pretrained(str(root / "model"), device="cpu")


def encode(root: Path, output: Path, *options: object, corpus: str = "corpus.jsonl", expect: int = 0) -> None:
    words = ["encode", root / "model", "--corpus", root / corpus, "--output", output, "--no_progress"]
    words += ["--device", "cpu", "--shard_size", 16, *options]
    assert main([str(word) for word in words]) == expect


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def whole(root: Path) -> Path:
    """The store of corpus.jsonl."""
    encode(root, root / "whole")
    return root / "whole"


@pytest.mark.parametrize(
    "corpus", ["corpus.jsonl", "corpus.jsonl.gz", "corpus.parquet", "psgs_w100.tsv", "collection.tsv", "beir"]
)
def test_embeddings_are_those_of_encode_texts_from_every_form(
    root: Path, model: DualEncoder, tmp_path: Path, corpus: str
) -> None:
    encode(root, tmp_path / "s", corpus=corpus)
    store = EmbeddingStore.open(tmp_path / "s")
    assert store.ids(range(len(store))) == [p.id for p in PASSAGES]
    texts = [passage_text(p.title, p.text) for p in PASSAGES]
    expected = encode_texts(model, texts, "document", show_progress=False)
    np.testing.assert_allclose(store.slice(0, len(store)), expected, atol=1e-6)
    np.testing.assert_allclose(store.slice(0, len(store)), model.encode_document(texts), atol=1e-5)
    assert [len(shard.ids) for shard in store.shards()] == [16, 16, 13]


def test_the_record_tells_what_was_encoded_and_how(whole: Path, model: DualEncoder) -> None:
    from contaccum.evaluation.model_record import model_fingerprint
    from contaccum.evaluation.open_qa import _fingerprint

    store = EmbeddingStore.open(whole)
    assert store.about["model"] == model_fingerprint(model)
    assert store.about["corpus"]["fingerprint"] == _fingerprint(PASSAGES)
    assert store.about["corpus"]["records"] == "45 records: 45 used, 0 left out"
    assert store.about["tokenisation"]["document_max_length"] == 24
    assert store.about["tokenisation"]["document_prompt"] == "text: "
    assert (store.similarity, store.about["kind"], store.about["precision"]) == ("dot", "document", "float32")
    assert store.about["software"][0]["versions"]["torch"]


@pytest.mark.parametrize(("corpus", "first"), [("beir", "q0"), ("nq.qa.csv", "question-1")])
def test_queries_are_encoded_as_queries(
    root: Path, model: DualEncoder, tmp_path: Path, corpus: str, first: str
) -> None:
    encode(root, tmp_path / "s", "--kind", "query", corpus=corpus)
    store = EmbeddingStore.open(tmp_path / "s")
    np.testing.assert_allclose(store.slice(0, 7), model.encode_query(sentences(7, 2)), atol=1e-5)
    assert store.ids([0]) == [first] and len(store) == 7


def test_precision_and_dtype_are_separate_choices(root: Path, whole: Path, tmp_path: Path) -> None:
    encode(root, tmp_path / "16", "--dtype", "float16")
    encode(root, tmp_path / "b16", "--precision", "bfloat16")
    exact = EmbeddingStore.open(whole).slice(0, 45)
    half, autocast = (EmbeddingStore.open(tmp_path / name) for name in ("16", "b16"))
    np.testing.assert_array_equal(half.slice(0, 45), exact.astype(np.float16).astype(np.float32))
    error = np.abs(autocast.slice(0, 45) - exact).max()
    assert 1e-4 < error < 0.1 and autocast.dtype == np.float32


KILLED = """
import os, signal, sys
from contaccum.cli import main
from contaccum.retrieval import encode_command
encode_texts, calls = encode_command.encode_texts, []
def counted(*args, **kwargs):
    calls.append(1)
    if len(calls) == 2:
        kwargs["on_encoded"] = lambda count: os.kill(os.getpid(), signal.SIGKILL)
    return encode_texts(*args, **kwargs)
encode_command.encode_texts = counted
main(sys.argv[1:])
"""


@pytest.mark.slow
def test_a_run_killed_in_a_shard_goes_on_with_it_and_ends_with_the_same_bytes(
    root: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["encode", root / "model", "--corpus", root / "corpus.jsonl", "--output", tmp_path / "s"]
    words += ["--no_progress", "--device", "cpu", "--shard_size", "16"]
    done = subprocess.run([sys.executable, "-c", KILLED, *map(str, words)], capture_output=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    before = files(tmp_path / "s")
    assert "shard-00000/embeddings.npy" in before and "shard-00001/embeddings.npy" not in before
    with pytest.raises(DataError, match="goes on"):
        EmbeddingStore.open(tmp_path / "s")
    from contaccum.retrieval import encode_command

    encoded: list[str] = []

    def counted(model: Any, texts: list[str], *args: Any, **kwargs: Any) -> np.ndarray:
        encoded.extend(texts)
        return encode_texts(model, texts, *args, **kwargs)

    monkeypatch.setattr(encode_command, "encode_texts", counted)
    encode(root, tmp_path / "s")
    assert encoded == [p.passage for p in PASSAGES[16:]]
    assert files(tmp_path / "s") == files(whole)
    # Once finished, nothing is encoded or written again.
    encode(root, tmp_path / "s")
    assert len(encoded) == 29 and files(tmp_path / "s") == files(whole)
    assert "0 encoded" in capsys.readouterr().out


def test_a_store_of_another_model_or_setting_is_refused_by_name(
    root: Path, whole: Path, tmp_path: Path, model: DualEncoder, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(whole)
    other = DualEncoder.from_pretrained(str(root / "model"), device="cpu")
    next(other.parameters()).data[0, 0] += 1
    other.save_pretrained(str(tmp_path / "model"))
    (tmp_path / "corpus.jsonl").write_bytes((root / "corpus.jsonl").read_bytes())
    encode(tmp_path, whole, expect=2)
    assert "made otherwise: model " in capsys.readouterr().err
    for options, told in [
        (["--passage_max_length", 20], "tokenisation document_max_length 24, here 20"),
        (["--dtype", "float16"], 'dtype "float32", here "float16"'),
        (["--precision", "bfloat16"], 'precision "float32", here "bfloat16"'),
        (["--shard_size", 9], "shard_size 16, here 9"),
        (["--kind", "query"], 'kind "document", here "query"'),
    ]:
        encode(root, whole, *options, expect=2)
        (error,) = [line for line in capsys.readouterr().err.splitlines() if "contaccum" in line]
        assert told in error and "--overwrite" in error
    assert files(whole) == before


def test_another_vocabulary_is_another_tokenisation(model: DualEncoder, root: Path) -> None:
    found = tokenizer_fingerprint(model, "document")
    model.encode_document(["a text", "another that is longer"])  # which sets padding and truncation
    assert tokenizer_fingerprint(model, "document") == found
    other = DualEncoder.from_pretrained(str(root / "model"), device="cpu")
    assert tokenizer_fingerprint(other, "document") == found
    other[0].sub_modules["document"][0].tokenizer.add_tokens(["zebra"])
    assert tokenizer_fingerprint(other, "document") != found


@pytest.mark.parametrize("change", ["a text", "an id", "a title", "fewer", "more"])
def test_a_store_of_another_corpus_is_refused_before_anything_is_encoded(
    root: Path, whole: Path, tmp_path: Path, change: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(whole)
    lines = (root / "corpus.jsonl").read_text().splitlines()
    record = json.loads(lines[3])
    changed = {"a text": {"text": "other"}, "an id": {"_id": "other"}, "a title": {"title": "other"}}.get(change, {})
    lines[3] = json.dumps(record | changed)
    lines = {"fewer": lines[:-1], "more": [*lines, '{"_id": "new", "text": "new"}']}.get(change, lines)
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines))
    (tmp_path / "model").symlink_to(root / "model")
    encode(tmp_path, whole, expect=2)
    assert "another corpus" in capsys.readouterr().err
    assert files(whole) == before
    encode(tmp_path, tmp_path / "s")
    encode(root, tmp_path / "s", "--overwrite")
    assert {**files(tmp_path / "s"), "store.json": b""} == {**before, "store.json": b""}


@pytest.mark.slow
def test_two_processes_end_with_the_store_of_one(root: Path, whole: Path, tmp_path: Path) -> None:
    words = ["encode", root / "model", "--corpus", root / "corpus.jsonl", "--output", tmp_path / "s"]
    words += ["--no_progress", "--shard_size", "16"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += ["-m", "contaccum.cli", *map(str, words)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    ours, theirs = EmbeddingStore.open(tmp_path / "s"), EmbeddingStore.open(whole)
    assert ours.about == theirs.about
    np.testing.assert_array_equal(ours.slice(0, 45), theirs.slice(0, 45))
    assert ours.ids(range(45)) == theirs.ids(range(45))
    # 16 + 13 and 16, whoever says the last word
    assert "29 encoded by rank 0" in done.stdout and "16 encoded by rank 1" in done.stdout
    assert done.stdout.count("45 records") == 1 and "written:" in done.stdout


def stub(texts: list[str]) -> np.ndarray:
    return np.array([[len(text), 1.0] for text in texts], dtype=np.float32)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_every_shard_is_encoded_by_one_rank(tmp_path: Path, world_size: int) -> None:
    identity = {"dtype": "float32", "shard_size": 4}
    StoreWriter.start(tmp_path / "s", identity, {}, {})
    counts, done = [], []
    for rank in range(world_size):
        writer = StoreWriter.join(tmp_path / "s", identity)
        progress = encode_shards(corpus_shards(PASSAGES, 4), stub, writer, rank, world_size)
        counts.append(progress.encoded)
        done.append(writer.finish(progress.shards, {}))
    assert sum(counts) == 45 and done == [False] * (world_size - 1) + [True]
    assert EmbeddingStore.open(tmp_path / "s").slice(0, 45)[:, 0].tolist() == [len(p.passage) for p in PASSAGES]


def test_a_shard_that_is_gone_or_cut_off_is_encoded_again(root: Path, tmp_path: Path) -> None:
    encode(root, tmp_path / "s")
    before = files(tmp_path / "s")
    os.truncate(tmp_path / "s" / "shard-00001" / "embeddings.npy", 200)
    encode(root, tmp_path / "s")
    assert files(tmp_path / "s") == before


def test_the_next_shard_is_read_while_one_is_encoded(tmp_path: Path) -> None:
    read = threading.Event()

    def passages() -> Iterator[Passage]:
        yield from PASSAGES[:4]
        read.set()
        yield from PASSAGES[4:8]

    def encode(texts: list[str]) -> np.ndarray:
        assert read.wait(30)
        return stub(texts)

    writer = StoreWriter.start(tmp_path / "s", {"dtype": "float32"}, {}, {})
    assert encode_shards(corpus_shards(passages(), 4), encode, writer).encoded == 8


def test_memory_does_not_grow_with_the_corpus(tmp_path: Path) -> None:
    def peak(rows: int) -> int:
        passages = (Passage(f"id-{n}", "", f"passage {n} " + "word " * 40) for n in range(rows))
        writer = StoreWriter.start(tmp_path / str(rows), {"dtype": "float16"}, {}, {})
        shards = corpus_shards(distinct_passages(passages, "made up", RecordReport()), 500)
        tracemalloc.start()
        progress = encode_shards(shards, stub, writer)
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert writer.finish(progress.shards, {})
        return found

    small, large = peak(10_000), peak(40_000)
    # 16 bytes an id; measured: 19 a passage, and 79 where somebody kept the ids.
    assert large - small < 30_000 * 45


def test_ids_that_occur_again_are_found_however_far_apart() -> None:
    seen = SeenIds()
    rng = np.random.default_rng(0)
    numbers = rng.integers(0, 30_000, 40_000)
    expected, known = [], set()
    for number in numbers.tolist():
        expected.append(number in known)
        known.add(number)
    found = np.concatenate([seen.add([str(n) for n in part]) for part in np.array_split(numbers, 37)])
    assert found.tolist() == expected


def test_equal_halves_of_a_hash_are_not_an_equal_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    from contaccum.data import seen_ids

    class Digest:
        """The first half is the same for all names, the second the name's number."""

        def __init__(self, name: bytes, digest_size: int) -> None:
            self.value = bytes(8) + int(name).to_bytes(digest_size - 8, "little")

        def digest(self) -> bytes:
            return self.value

    monkeypatch.setattr(seen_ids.hashlib, "blake2b", Digest)
    seen = SeenIds()
    assert seen.add(["1", "2", "3", "2"]).tolist() == [False, False, False, True]
    assert seen.add(["4", "3", "5", "1", "4"]).tolist() == [False, True, False, True, True]


def test_an_id_that_occurs_again_stops_or_is_left_out(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model").symlink_to(root / "model")
    lines = (root / "corpus.jsonl").read_text().splitlines()
    (tmp_path / "corpus.jsonl").write_text("\n".join([*lines[:30], lines[2], *lines[30:]]))
    encode(tmp_path, tmp_path / "s", expect=2)
    assert "id 'd2' occurs again" in capsys.readouterr().err
    encode(tmp_path, tmp_path / "s", "--on_bad_record", "skip")
    assert "46 records: 45 used, 1 left out (1 id occurs again)" in capsys.readouterr().out
    assert EmbeddingStore.open(tmp_path / "s").ids(range(45)) == [p.id for p in PASSAGES]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--batch_size", 0], "batch_size must be at least 1"),
        (["--shard_size", 0], "shard_size must be at least 1"),
        (["--corpus", "nowhere.jsonl"], "no such file"),
        (["--device", "abacus"], "device 'abacus'"),
        (["--shard", 3], "did you mean --shard_size"),
        (["--passage_max_length", 9999], "positions"),
    ],
)
def test_mistakes_are_refused_before_anything_is_written(
    root: Path, tmp_path: Path, options: list[object], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    encode(root, tmp_path / "s", *options, expect=2)
    assert told in capsys.readouterr().err
    assert not (tmp_path / "s").exists()


def test_what_cannot_be_written_to_is_refused_before_a_model_is_loaded(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from contaccum.retrieval import encode_command

    monkeypatch.setattr(encode_command, "load_model", lambda args: pytest.fail("the model was loaded"))
    (tmp_path / "notes.txt").write_text("mine")
    encode(root, tmp_path, expect=2)
    assert "notes.txt" in capsys.readouterr().err


def test_the_bar_knows_the_whole_and_counts_what_lay_there(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tqdm.auto

    from contaccum.retrieval import encode_command

    bars: list[Any] = []

    class Bar(tqdm.auto.tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            bars.append(self)
            super().__init__(*args, **kwargs, file=open(os.devnull, "w"))  # noqa: SIM115

    monkeypatch.setattr(tqdm.auto, "tqdm", Bar)
    monkeypatch.setattr(encode_command, "_in_background", lambda function: function())
    words = ["encode", root / "model", "--corpus", root / "corpus.jsonl", "--output", tmp_path / "s"]
    words += ["--device", "cpu", "--shard_size", 16]
    for _ in range(2):
        assert main([str(word) for word in words]) == 0
    ours = [bar for bar in bars if "Encoding" in getattr(bar, "desc", "")]
    assert [(bar.n, bar.total, bar.initial) for bar in ours] == [(45, 45, 0), (45, 45, 45)]


@pytest.mark.parametrize("corpus", ["corpus.jsonl", "corpus.jsonl.gz", "corpus.parquet", "collection.tsv", "beir"])
def test_a_rough_count_of_a_plain_corpus_is_right(root: Path, corpus: str) -> None:
    assert count_roughly(root / corpus) == 45
