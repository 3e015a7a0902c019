"""FaissSearcher is BEIR's exact search behind BEIR's own interface."""

import numpy as np
import pytest
import torch

from contaccum.retrieval.searcher import FaissSearcher


class Stored:
    """A model whose embeddings are looked up, behind the methods of sentence-transformers and those of BEIR."""

    device, training = torch.device("cpu"), False

    def __init__(self, embeddings):
        self.embeddings = embeddings

    def train(self, mode):
        pass

    def encode_query(self, texts, **kwargs):
        return torch.tensor(np.stack([self.embeddings[text] for text in texts]))

    encode_document = encode_queries = encode_query

    def encode_corpus(self, corpus, **kwargs):
        return self.encode_query([document["text"] for document in corpus])


@pytest.fixture
def world():
    """150 documents, 20 queries, of which three share their id with a document; and a model."""
    rng = np.random.default_rng(0)
    corpus = {f"d{number}": {"title": "", "text": f"document {number}"} for number in range(150)}
    queries = {f"q{number}": f"query {number}" for number in range(17)} | {
        f"d{n}": f"query {n}" for n in (17, 18, 19)
    }
    texts = [document["text"] for document in corpus.values()] + list(queries.values())
    embeddings = {text: rng.normal(size=24).astype(np.float32) for text in texts}
    for docid in ("d17", "d18", "d19"):
        embeddings[corpus[docid]["text"]] = embeddings[queries[docid]]
    return corpus, queries, Stored(embeddings)


@pytest.mark.parametrize("score_function", ["cos_sim", "dot"])
def test_retrieve_equals_beirs_exact_search(world, score_function):
    evaluation = pytest.importorskip("beir.retrieval.evaluation")
    from beir.retrieval.search.dense import DenseRetrievalExactSearch

    corpus, queries, model = world
    exact = DenseRetrievalExactSearch(model, show_progress_bar=False)
    ours = FaissSearcher(model, show_progress_bar=False)
    expected, found = (
        evaluation.EvaluateRetrieval(searcher, [1, 10, 50], score_function).retrieve(
            corpus, queries
        )
        for searcher in (exact, ours)
    )
    assert found.keys() == expected.keys()
    for qid in queries:
        assert found[qid].keys() == expected[qid].keys() and len(found[qid]) == 50
        for docid, score in expected[qid].items():
            assert found[qid][docid] == pytest.approx(score, abs=1e-4)


def test_a_document_with_the_querys_id_is_dropped_and_replaced_and_results_are_best_first(world):
    corpus, queries, model = world
    run = FaissSearcher(model).search(corpus, queries, top_k=5, score_function="cos_sim")
    for qid, hits in run.items():
        scores = list(hits.values())
        assert qid not in hits and len(hits) == 5
        assert scores == sorted(scores, reverse=True) and all(
            type(score) is float for score in scores
        )


def test_an_approximate_index_leaves_out_what_it_does_not_find_and_tells_its_recall(world):
    corpus, queries, model = world
    searcher = FaissSearcher(model, index="IVF8,Flat", index_parameters="nprobe=1")
    run = searcher.search(corpus, queries, top_k=100)
    assert all(0 < len(hits) < 100 and set(hits) <= set(corpus) for hits in run.values())
    assert (
        searcher.search_details["recall"]["queries"] == 20 and 0 < searcher.search_details["recall"]["recall@100"] < 1
    )
    stages = ("encode_queries", "encode_corpus", "index", "search")
    assert list(searcher.timing) == [f"{stage}_seconds" for stage in stages]
