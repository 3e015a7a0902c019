"""FaissSearcher is BEIR's exact search behind BEIR's own interface, without its pickles."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from beir.retrieval.evaluation import EvaluateRetrieval
from beir.retrieval.search.dense import DenseRetrievalExactSearch

from contaccum.errors import ConfigError, DataError
from contaccum.retrieval.searcher import FaissSearcher, load_embeddings, save_embeddings


class Stored:
    """A model whose embeddings are looked up: BEIR's two methods and nothing else."""

    def __init__(self, embeddings):
        self.embeddings = embeddings

    def encode_queries(self, queries, batch_size=8, **kwargs):
        return torch.tensor(np.stack([self.embeddings[text] for text in queries]))

    def encode_corpus(self, corpus, batch_size=8, **kwargs):
        return torch.tensor(np.stack([self.embeddings[document["text"]] for document in corpus]))


@pytest.fixture
def world():
    """150 documents, 20 queries, of which three share their id with a document; and a model."""
    rng = np.random.default_rng(0)
    corpus = {f"d{number}": {"title": "", "text": f"document {number}"} for number in range(150)}
    queries = {f"q{number}": f"query {number}" for number in range(17)} | {f"d{n}": f"query {n}" for n in (17, 18, 19)}
    texts = [document["text"] for document in corpus.values()] + list(queries.values())
    embeddings = {text: rng.normal(size=24).astype(np.float32) for text in texts}
    for docid in ("d17", "d18", "d19"):
        embeddings[corpus[docid]["text"]] = embeddings[queries[docid]]
    return corpus, queries, Stored(embeddings)


@pytest.mark.parametrize("score_function", ["cos_sim", "dot"])
def test_retrieve_equals_beirs_exact_search(world, score_function):
    corpus, queries, model = world
    k_values = [1, 10, 50]
    expected = EvaluateRetrieval(
        DenseRetrievalExactSearch(model, show_progress_bar=False), k_values, score_function
    ).retrieve(corpus, queries)
    found = EvaluateRetrieval(FaissSearcher(model, show_progress_bar=False), k_values, score_function).retrieve(
        corpus, queries
    )
    assert found.keys() == expected.keys()
    for qid in queries:
        assert found[qid].keys() == expected[qid].keys() and len(found[qid]) == 50
        for docid, score in expected[qid].items():
            assert found[qid][docid] == pytest.approx(score, abs=1e-4)


def test_a_document_with_the_querys_id_is_dropped_and_replaced(world):
    corpus, queries, model = world
    run = FaissSearcher(model).search(corpus, queries, top_k=5, score_function="cos_sim")
    assert all(qid not in hits and len(hits) == 5 for qid, hits in run.items())


def test_results_are_best_first_and_scores_are_floats(world):
    corpus, queries, model = world
    for hits in FaissSearcher(model).search(corpus, queries, top_k=20, score_function="dot").values():
        scores = list(hits.values())
        assert scores == sorted(scores, reverse=True) and all(type(score) is float for score in scores)


def test_k_beyond_the_corpus_and_a_single_query(world):
    corpus, queries, model = world
    run = FaissSearcher(model).search(corpus, {"d17": queries["d17"]}, top_k=1000)
    assert set(run["d17"]) == set(corpus) - {"d17"}


def test_no_queries_give_an_empty_run(world):
    corpus, _, model = world
    model.encode_queries = lambda *args, **kwargs: np.empty((0, 24))
    assert FaissSearcher(model).search(corpus, {}, top_k=3) == {}


def test_an_approximate_index_leaves_out_what_it_does_not_find(world):
    corpus, queries, model = world
    run = FaissSearcher(model, index="IVF8,Flat", index_parameters="nprobe=1").search(corpus, queries, top_k=149)
    assert all(0 < len(hits) < 149 and set(hits) <= set(corpus) for hits in run.values())


@pytest.mark.parametrize("score_function", ["cos_sim", "dot"])
def test_encode_and_retrieve_equals_retrieve(world, tmp_path, score_function):
    corpus, queries, model = world
    searcher = FaissSearcher(model, corpus_chunk_size=40)
    searcher.encode(corpus, queries, tmp_path / "e")
    files = sorted((tmp_path / "e").glob("corpus.*.npz"))
    assert len(files) == 4
    found = searcher.search_from_files(tmp_path / "e" / "queries.npz", files, 10, score_function)
    expected = searcher.search(corpus, queries, 10, score_function)
    for qid in queries:
        assert list(found[qid]) == list(expected[qid])
        np.testing.assert_allclose(list(found[qid].values()), list(expected[qid].values()), atol=1e-6)


def test_beirs_encode_and_retrieve_works_with_npz_names(world, tmp_path):
    corpus, queries, model = world
    names = {"query_filename": "queries.npz", "corpus_filename": "corpus.*.npz"}
    run = EvaluateRetrieval(FaissSearcher(model), [10]).encode_and_retrieve(corpus, queries, str(tmp_path), **names)
    assert run.keys() == queries.keys()


def test_pickles_are_refused_unread(world, tmp_path):
    corpus, queries, model = world
    with pytest.raises(ConfigError, match="never in pickles"):
        EvaluateRetrieval(FaissSearcher(model), [10]).encode_and_retrieve(corpus, queries, str(tmp_path / "e"))
    assert not (tmp_path / "e").exists()
    with pytest.raises(ConfigError, match="never in pickles"):
        load_embeddings(tmp_path / "corpus.0.pkl")


def test_objects_in_an_npz_are_not_unpickled(tmp_path):
    np.savez(tmp_path / "x.npz", ids=np.array([object()], dtype=object), embeddings=np.ones((1, 2)))
    with pytest.raises(DataError, match="not a file of embeddings"):
        load_embeddings(tmp_path / "x.npz")


def test_embeddings_of_other_texts_are_not_taken_for_these(world, tmp_path):
    corpus, queries, model = world
    searcher = FaissSearcher(model)
    searcher.encode(corpus, queries, tmp_path)
    searcher.encode(corpus, queries, tmp_path)
    fewer = dict(list(corpus.items())[:10])
    with pytest.raises(DataError, match="other texts"):
        searcher.encode(fewer, queries, tmp_path)
    searcher.encode(fewer, queries, tmp_path, overwrite=True)
    assert load_embeddings(tmp_path / "corpus.0.npz")[0] == list(fewer)


def test_a_document_in_two_files_is_refused(world, tmp_path):
    for name in ("queries.npz", "corpus.0.npz", "corpus.1.npz"):
        save_embeddings(tmp_path / name, ["a", "b"], np.eye(2))
    with pytest.raises(DataError, match="two of the corpus files"):
        FaissSearcher(world[2]).search_from_files(tmp_path / "queries.npz", sorted(tmp_path.glob("corpus*")), 1)


def test_an_unknown_score_function_is_refused(world):
    corpus, queries, model = world
    with pytest.raises(ConfigError, match="cos_sim"):
        FaissSearcher(model).search(corpus, queries, 1, "euclidean")


def test_importing_contaccum_imports_neither_faiss_nor_beir():
    code = (
        "import sys, contaccum, contaccum.retrieval, contaccum.evaluation, contaccum.retrieval.encoding, "
        "contaccum.retrieval.index, contaccum.evaluation.beir; "
        "print({'faiss', 'beir', 'pytrec_eval', 'torch'} & sys.modules.keys())"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "set()"
