"""A search by several ranks writes the run of a search by one process.

The ranks are forks of a new process and use gloo; see forked_searches.py. Each rank runs the whole
command. Scores of embeddings of small integers have no rounding errors, and many of them are equal.
"""

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from programs import run_forking_script
from sample_texts import sentences
from small_data import write_lines

from contaccum import DualEncoder
from contaccum.cli import main
from contaccum.evaluation.results import read_trec_run
from contaccum.retrieval.corpus import CorpusEncoder
from contaccum.retrieval.store import EmbeddingStore, StoreWriter

IDENTITY = {"model": "a" * 64, "dtype": "float32"}
NUM_QUERIES = 9


class Case(NamedTuple):
    """A search that is run by one process and by several ranks."""

    embeddings: str
    shard_size: int
    top_k: int
    num_ranks: int


# Stores of integers have 55 documents, the store of floats has 200.
CASES = {
    "ties at place k": Case("integers", shard_size=10, top_k=20, num_ranks=2),
    "k larger than a shard": Case("integers", shard_size=10, top_k=23, num_ranks=3),
    "more ranks than shards": Case("integers", shard_size=40, top_k=15, num_ranks=3),
    "k larger than the store": Case("integers", shard_size=10, top_k=99, num_ranks=2),
    "cosine": Case("floats", shard_size=35, top_k=12, num_ranks=3),
}
CASES_OF_INTEGERS = [name for name, case in CASES.items() if case.embeddings == "integers"]


def write_store(folder: Path, kind: str, embeddings: np.ndarray, shard_size: int, similarity: str):
    """Write a store whose ids are not in the order of its rows."""
    numbers = np.random.default_rng(len(embeddings)).permutation(len(embeddings))
    # The text of a passage is the number of its row.
    passages = []
    for row, number in enumerate(numbers):
        passages.append((f"{kind}-{number:03}", "", str(row)))

    def encode(texts: list[str]) -> np.ndarray:
        rows = [int(text) for text in texts]
        return embeddings[rows]

    identity = {**IDENTITY, "kind": kind, "similarity": similarity, "shard_size": shard_size}
    assert StoreWriter(folder, identity).fill(passages, encode)


def make_embeddings(kind: str) -> tuple[np.ndarray, np.ndarray, str]:
    """Return embeddings of 55 or 200 documents and of the queries, and their similarity."""
    generator = np.random.default_rng(3)
    if kind == "integers":
        documents = generator.integers(-1, 2, (55, 4)).astype(np.float32)
        queries = generator.integers(-1, 2, (NUM_QUERIES, 4)).astype(np.float32)
        return documents, queries, "dot"
    documents = generator.standard_normal((200, 24)).astype(np.float32)
    documents[150:] = documents[:50]
    queries = generator.standard_normal((NUM_QUERIES, 24)).astype(np.float32)
    return documents, queries, "cos"


@pytest.fixture(scope="module")
def root(tiny_model_path, tmp_path_factory) -> Path:
    """Return a folder with the runs of all cases.

    For each case, NAME.trec is the run of one process, and NAME-ranks.trec the run of several
    ranks. The file exit_codes.json has a list of the ranks' exit codes for each command.
    """
    root = tmp_path_factory.mktemp("ranks")
    # Each command is a number of ranks and the arguments of `contaccum search`.
    commands = []
    for name, case in CASES.items():
        commands.append([case.num_ranks, search_in_one_process(root, name, case)])
    commands.append([2, search_with_model_in_one_process(root, tiny_model_path)])
    # The last --output counts.
    arguments = commands[0][1]
    refused = [*arguments, "--output", str(root / "refused.trec"), "--index", "HNSW8"]
    commands.append([2, refused])

    (root / "commands.json").write_text(json.dumps(commands))
    printed = run_forking_script(
        Path(__file__).with_name("forked_searches.py"), str(root / "commands.json"), root
    )
    (root / "exit_codes.json").write_text(json.dumps(printed["exit_codes"]))
    return root


def search_in_one_process(root: Path, name: str, case: Case) -> list[str]:
    """Write the stores of a case and NAME.trec; return the arguments for several ranks."""
    documents, queries, similarity = make_embeddings(case.embeddings)
    document_store = root / name / "documents"
    query_store = root / name / "queries"
    write_store(document_store, "document", documents, case.shard_size, similarity)
    write_store(query_store, "query", queries, case.shard_size, similarity)
    options = ["--queries", str(query_store), "--top_k", str(case.top_k)]
    options += ["--device", "cpu", "--no_progress"]
    output = str(root / f"{name}.trec")
    assert main(["search", "--store", str(document_store), *options, "--output", output]) == 0

    return ["--store", str(document_store), *options, "--output", str(root / f"{name}-ranks.trec")]


def search_with_model_in_one_process(root: Path, model_path: str) -> list[str]:
    """Write a store of texts and model.trec, a search with texts as queries.

    Return the arguments for several ranks.
    """
    for name, num_texts in (("corpus", 30), ("queries", 5)):
        records = []
        for number, text in enumerate(sentences(num_texts, 1)):
            records.append({"_id": f"{name}{number}", "text": text})
        write_lines(root / f"{name}.jsonl", records)
    model = DualEncoder.from_pretrained(model_path, device="cpu")
    encoder = CorpusEncoder(
        model, model_path, root / "corpus.jsonl", root / "encoded", shard_size=8
    )
    encoder.encode(show_progress=False)
    arguments = [model_path, "--store", str(root / "encoded")]
    arguments += ["--queries", str(root / "queries.jsonl")]
    arguments += ["--device", "cpu", "--no_progress", "--top_k", "30"]
    assert main(["search", *arguments, "--output", str(root / "model.trec")]) == 0
    return [*arguments, "--output", str(root / "model-ranks.trec")]


def test_every_rank_ends_with_exit_code_0(root):
    """Only the last command is refused; see below."""
    exit_codes = json.loads((root / "exit_codes.json").read_text())
    num_ranks = [case.num_ranks for case in CASES.values()] + [2]
    assert exit_codes[:-1] == [[0] * count for count in num_ranks]


@pytest.mark.parametrize("name", CASES_OF_INTEGERS)
def test_the_run_without_rounding_errors_has_the_same_bytes(root, name):
    expected = (root / f"{name}.trec").read_text()
    assert (root / f"{name}-ranks.trec").read_text() == expected
    expected_record = json.loads((root / f"{name}.trec.json").read_text())
    record = json.loads((root / f"{name}-ranks.trec.json").read_text())
    assert record["search"]["ranks"] == CASES[name].num_ranks
    assert expected_record["search"]["ranks"] == 1
    for key in ("fingerprint", "rows"):
        assert record["store"][key] == expected_record["store"][key]
    assert record["queries"] == expected_record["queries"]


def test_equal_scores_at_place_k_are_ordered_by_id(root):
    """The case has ties at place k, across shards of different ranks."""
    store = EmbeddingStore.open(root / "ties at place k" / "documents")
    ids = store.ids(range(len(store)))
    _, queries, _ = make_embeddings("integers")
    run = read_trec_run(root / "ties at place k-ranks.trec")
    query_store = EmbeddingStore.open(root / "ties at place k" / "queries")
    num_ties_across_ranks = 0
    for query, query_id in zip(queries, query_store.ids(range(NUM_QUERIES)), strict=True):
        scores = store[:] @ query
        ranking = sorted(zip(scores, ids, strict=True), reverse=True)
        assert run[query_id].keys() == {document_id for _, document_id in ranking[:20]}
        score_at_k, _ = ranking[19]
        next_score, _ = ranking[20]
        tied_rows = np.flatnonzero(scores == score_at_k)
        # Shards have 10 rows, and the two ranks take turns.
        ranks_of_ties = tied_rows // 10 % 2
        if next_score == score_at_k and len(set(ranks_of_ties)) == 2:
            num_ties_across_ranks += 1
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
    command_number = len(exit_codes) - 1
    for rank, start in enumerate(["contaccum: error: ", "contaccum: error on rank 1: "]):
        error = (root / f"stderr-{command_number}-{rank}.txt").read_text().splitlines()[-1]
        assert error.startswith(f"{start}--index HNSW8: several processes")
    assert not (root / "refused.trec").exists()
