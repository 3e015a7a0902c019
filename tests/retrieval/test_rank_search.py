"""A search by several ranks writes the run of a search by one process.

The ranks are forks of a new process and use gloo; see forked_searches.py. Each rank runs the whole
command. Stores of small integers have scores without rounding errors, and many equal scores.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from programs import run_forking_script
from sample_texts import sentences

from contaccum import DualEncoder
from contaccum.cli import main
from contaccum.evaluation.results import read_trec_run
from contaccum.retrieval.corpus import CorpusEncoder
from contaccum.retrieval.store import EmbeddingStore, StoreWriter

IDENTITY = {"model": "a" * 64, "dtype": "float32"}
NUM_QUERIES = 9
CASES = {
    # name: store, shard size, k, ranks
    "ties at place k": ("integers", 10, 20, 2),
    "k larger than a shard": ("integers", 10, 23, 3),
    "more ranks than shards": ("integers", 40, 15, 3),
    "k larger than the store": ("integers", 10, 99, 2),
    "cosine": ("floats", 35, 12, 3),
    "remote": ("integers", 10, 20, 2),
}


def write_store(folder: Path, kind: str, embeddings: np.ndarray, shard_size: int, similarity: str):
    """Write a store whose ids are not in the order of its rows."""
    numbers = np.random.default_rng(len(embeddings)).permutation(len(embeddings))
    passages = [(f"{kind}-{number:03}", "", str(row)) for row, number in enumerate(numbers)]
    identity = {**IDENTITY, "kind": kind, "similarity": similarity, "shard_size": shard_size}
    writer = StoreWriter(folder, identity)
    assert writer.fill(passages, lambda texts: embeddings[[int(text) for text in texts]])


def make_embeddings(name: str) -> tuple[np.ndarray, np.ndarray, str]:
    """Return embeddings of 55 or 200 documents and of the queries, and their similarity."""
    generator = np.random.default_rng(3)
    if name == "integers":
        documents = generator.integers(-1, 2, (55, 4)).astype(np.float32)
        queries = generator.integers(-1, 2, (NUM_QUERIES, 4)).astype(np.float32)
        return documents, queries, "dot"
    documents = generator.standard_normal((200, 24)).astype(np.float32)
    documents[150:] = documents[:50]
    queries = generator.standard_normal((NUM_QUERIES, 24)).astype(np.float32)
    return documents, queries, "cos"


@pytest.fixture(scope="module")
def root(tiny_model_path, tmp_path_factory) -> Path:
    """Return a folder with the runs of all cases: NAME.trec by one process, NAME-ranks.trec."""
    root = tmp_path_factory.mktemp("ranks")
    commands = []
    for name, (store, shard_size, k, num_ranks) in CASES.items():
        documents, queries, similarity = make_embeddings(store)
        write_store(root / name / "documents", "document", documents, shard_size, similarity)
        write_store(root / name / "queries", "query", queries, shard_size, similarity)
        argv = ["--store", root / name / "documents", "--queries", root / name / "queries"]
        argv += ["--top_k", k, "--device", "cpu", "--no_progress"]
        assert main(["search", *map(str, argv), "--output", str(root / f"{name}.trec")]) == 0
        if name == "remote":
            argv[1] = "memory://documents"
        commands.append([num_ranks, [*argv, "--output", root / f"{name}-ranks.trec"]])
    commands.append(add_model_case(root, tiny_model_path))
    refused = commands[0][1]
    commands.append([2, [*refused, "--output", root / "refused.trec", "--index", "HNSW8"]])
    texts = [(num_ranks, [str(argument) for argument in argv]) for num_ranks, argv in commands]
    (root / "commands.json").write_text(json.dumps(texts))
    printed = run_forking_script(
        Path(__file__).with_name("forked_searches.py"), str(root / "commands.json"), root
    )
    (root / "exit_codes.json").write_text(json.dumps(printed["exit_codes"]))
    return root


def add_model_case(root: Path, model_path: str) -> list:
    """Write a store of texts and search it with a model; return the command for two ranks."""
    texts = {name: sentences(num_texts, 1) for name, num_texts in (("corpus", 30), ("queries", 5))}
    for name, lines in texts.items():
        records = [{"_id": f"{name}{n}", "text": text} for n, text in enumerate(lines)]
        (root / f"{name}.jsonl").write_text("\n".join(map(json.dumps, records)))
    model = DualEncoder.from_pretrained(model_path, device="cpu")
    encoder = CorpusEncoder(
        model, model_path, root / "corpus.jsonl", root / "encoded", shard_size=8
    )
    encoder.encode(show_progress=False)
    argv = [model_path, "--store", root / "encoded", "--queries", root / "queries.jsonl"]
    argv += ["--device", "cpu", "--no_progress", "--top_k", 30]
    assert main(["search", *map(str, argv), "--output", str(root / "model.trec")]) == 0
    return [2, [*argv, "--output", root / "model-ranks.trec"]]


def test_every_rank_ends_with_exit_code_0(root):
    exit_codes = json.loads((root / "exit_codes.json").read_text())
    num_ranks = [case[3] for case in CASES.values()] + [2]
    assert exit_codes[:-1] == [[0] * count for count in num_ranks]


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case[0] == "integers"])
def test_the_run_without_rounding_errors_has_the_same_bytes(root, name):
    expected = (root / f"{name}.trec").read_text()
    assert (root / f"{name}-ranks.trec").read_text() == expected
    expected_record = json.loads((root / f"{name}.trec.json").read_text())
    record = json.loads((root / f"{name}-ranks.trec.json").read_text())
    assert record["search"]["ranks"] == CASES[name][3]
    assert expected_record["search"]["ranks"] == 1
    for key in ("fingerprint", "rows"):
        assert record["store"][key] == expected_record["store"][key]
    assert record["queries"] == expected_record["queries"]


def test_equal_scores_at_place_k_are_ordered_by_id(root):
    """The case has ties at place k, across shards of different ranks."""
    store = EmbeddingStore.open(root / "ties at place k" / "documents")
    ids = store.ids(range(len(store)))
    _, queries, _ = make_embeddings("integers")
    hits = read_trec_run(root / "ties at place k-ranks.trec")
    queries_store = EmbeddingStore.open(root / "ties at place k" / "queries")
    num_ties_across_ranks = 0
    for row, query_id in enumerate(queries_store.ids(range(NUM_QUERIES))):
        scores = store[:] @ queries[row]
        ranking = sorted(range(len(ids)), key=lambda n: (scores[n], ids[n]), reverse=True)
        assert set(hits[query_id]) == {ids[n] for n in ranking[:20]}
        tied_rows = np.flatnonzero(scores == scores[ranking[19]])
        is_cut = scores[ranking[20]] == scores[ranking[19]]
        tied_ranks = set(tied_rows // 10 % 2)
        num_ties_across_ranks += is_cut and len(tied_ranks) == 2
    assert num_ties_across_ranks >= 5


@pytest.mark.parametrize("name", ["cosine", "model"])
def test_scores_are_those_of_one_process(root, name):
    expected = read_trec_run(root / f"{name}.trec")
    run = read_trec_run(root / f"{name}-ranks.trec")
    assert list(run) == list(expected)
    for query_id, expected_hits in expected.items():
        assert run[query_id].keys() == expected_hits.keys()
        for document_id, score in run[query_id].items():
            assert score == pytest.approx(expected_hits[document_id], abs=1e-6)


def test_an_approximate_index_with_several_ranks_is_refused(root):
    exit_codes = json.loads((root / "exit_codes.json").read_text())
    assert exit_codes[-1] == [2, 2]
    number = len(exit_codes) - 1
    for rank, start in enumerate(["contaccum: error: ", "contaccum: error on rank 1: "]):
        error = (root / f"stderr-{number}-{rank}.txt").read_text().splitlines()[-1]
        assert error.startswith(f"{start}--index HNSW8: several processes")
    assert not (root / "refused.trec").exists()
