"""FaissSearcher gives the results of BEIR's exact search, and has the interface of BEIR."""

import numpy as np
import pytest
import torch

from contaccum.retrieval.search import FaissSearcher


class StoredModel:
    """Model that looks up embeddings, with the methods of sentence-transformers and of BEIR."""

    device = torch.device("cpu")

    def __init__(self, embeddings):
        self.embeddings = embeddings

    def modules(self):
        return []

    def eval(self):
        pass

    def encode_query(self, texts, **kwargs):
        return torch.tensor(np.stack([self.embeddings[text] for text in texts]))

    encode_document = encode_query
    encode_queries = encode_query

    def encode_corpus(self, corpus, **kwargs):
        return self.encode_query([document["text"] for document in corpus])


# Each of these ids is the id of a document and of a query with the same embedding. So this
# document would be the best result of this query if it were not left out.
SHARED_IDS = ["d17", "d18", "d19"]


@pytest.fixture
def search_data():
    """Return 150 documents, 20 queries and a model."""
    rng = np.random.default_rng(0)
    corpus = {f"d{number}": {"title": "", "text": f"document {number}"} for number in range(150)}
    query_ids = [f"q{number}" for number in range(17)] + SHARED_IDS
    queries = {query_id: f"query {query_id}" for query_id in query_ids}
    texts = [*(document["text"] for document in corpus.values()), *queries.values()]
    embeddings = {text: rng.normal(size=24).astype(np.float32) for text in texts}
    for shared_id in SHARED_IDS:
        embeddings[corpus[shared_id]["text"]] = embeddings[queries[shared_id]]
    return corpus, queries, StoredModel(embeddings)


@pytest.mark.parametrize("score_function", ["cos_sim", "dot"])
def test_retrieve_equals_beirs_exact_search(search_data, score_function):
    evaluation = pytest.importorskip("beir.retrieval.evaluation")
    from beir.retrieval.search.dense import DenseRetrievalExactSearch

    corpus, queries, model = search_data
    beir_searcher = DenseRetrievalExactSearch(model, show_progress_bar=False)
    faiss_searcher = FaissSearcher(model, show_progress_bar=False)

    def retrieve(searcher):
        retriever = evaluation.EvaluateRetrieval(searcher, [1, 10, 50], score_function)
        return retriever.retrieve(corpus, queries)

    expected_run = retrieve(beir_searcher)
    run = retrieve(faiss_searcher)
    assert run.keys() == expected_run.keys()
    for query_id, hits in run.items():
        assert len(hits) == 50
        assert hits == pytest.approx(expected_run[query_id], abs=1e-4)


def test_the_document_with_the_querys_id_is_replaced_by_the_next_best(search_data):
    """Each query still has top_k documents, best first, with scores of type float."""
    corpus, queries, model = search_data
    run = FaissSearcher(model).search(corpus, queries, top_k=5, score_function="cos_sim")
    for query_id, hits in run.items():
        scores = list(hits.values())
        assert query_id not in hits
        assert len(hits) == 5
        assert scores == sorted(scores, reverse=True)
        assert {type(score) for score in scores} == {float}
