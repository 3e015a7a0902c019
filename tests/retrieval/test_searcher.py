"""FaissSearcher is BEIR's exact search behind BEIR's own interface."""

import numpy as np
import pytest
import torch

from contaccum.retrieval.searcher import FaissSearcher


class StoredModel:
    """Model that looks up embeddings, with the methods of sentence-transformers and of BEIR."""

    device = torch.device("cpu")
    training = False

    def __init__(self, embeddings):
        self.embeddings = embeddings

    def train(self, mode):
        pass

    def encode_query(self, texts, **kwargs):
        return torch.tensor(np.stack([self.embeddings[text] for text in texts]))

    encode_document = encode_query
    encode_queries = encode_query

    def encode_corpus(self, corpus, **kwargs):
        return self.encode_query([document["text"] for document in corpus])


@pytest.fixture
def search_data():
    """150 documents, 20 queries and a model; three queries share their id with a document."""
    rng = np.random.default_rng(0)
    corpus = {f"d{number}": {"title": "", "text": f"document {number}"} for number in range(150)}
    queries = {f"q{number}": f"query {number}" for number in range(17)}
    for number in (17, 18, 19):
        queries[f"d{number}"] = f"query {number}"
    texts = [document["text"] for document in corpus.values()] + list(queries.values())
    embeddings = {text: rng.normal(size=24).astype(np.float32) for text in texts}
    for document_id in ("d17", "d18", "d19"):
        embeddings[corpus[document_id]["text"]] = embeddings[queries[document_id]]
    return corpus, queries, StoredModel(embeddings)


@pytest.mark.parametrize("score_function", ["cos_sim", "dot"])
def test_retrieve_equals_beirs_exact_search(search_data, score_function):
    evaluation = pytest.importorskip("beir.retrieval.evaluation")
    from beir.retrieval.search.dense import DenseRetrievalExactSearch

    corpus, queries, model = search_data
    runs = []
    beir_searcher = DenseRetrievalExactSearch(model, show_progress_bar=False)
    faiss_searcher = FaissSearcher(model, show_progress_bar=False)
    for searcher in (beir_searcher, faiss_searcher):
        retriever = evaluation.EvaluateRetrieval(searcher, [1, 10, 50], score_function)
        runs.append(retriever.retrieve(corpus, queries))
    expected, actual = runs
    assert actual.keys() == expected.keys()
    for query_id in queries:
        assert actual[query_id].keys() == expected[query_id].keys()
        assert len(actual[query_id]) == 50
        for document_id, score in expected[query_id].items():
            assert actual[query_id][document_id] == pytest.approx(score, abs=1e-4)


def test_the_document_with_the_querys_id_is_replaced_by_the_next_best(search_data):
    """Each query still has top_k documents, best first, with scores of type float."""
    corpus, queries, model = search_data
    run = FaissSearcher(model).search(corpus, queries, top_k=5, score_function="cos_sim")
    for query_id, hits in run.items():
        scores = list(hits.values())
        assert query_id not in hits
        assert len(hits) == 5
        assert scores == sorted(scores, reverse=True)
        assert all(type(score) is float for score in scores)


def test_an_approximate_index_may_find_fewer_documents_and_measures_recall(search_data):
    corpus, queries, model = search_data
    searcher = FaissSearcher(model, index="IVF8,Flat", index_parameters="nprobe=1")
    run = searcher.search(corpus, queries, top_k=100)
    for hits in run.values():
        assert 0 < len(hits) < 100
        assert set(hits) <= set(corpus)
    recall = searcher.search_details["recall"]
    assert recall["queries"] == 20
    assert 0 < recall["recall@100"] < 1
    assert list(searcher.timing) == [
        "encode_queries_seconds",
        "encode_corpus_seconds",
        "index_seconds",
        "search_seconds",
    ]
