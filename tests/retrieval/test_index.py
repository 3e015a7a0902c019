"""Search is exact where it says so, and its order does not depend on luck."""

from __future__ import annotations

import numpy as np
import pytest

from contaccum.errors import ConfigError, UserError
from contaccum.retrieval.index import build_index, search


def vectors(n: int, d: int = 16, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, d)).astype(np.float32)


@pytest.mark.parametrize("metric", ["cos", "dot"])
def test_flat_search_equals_numpy(metric):
    documents, queries = vectors(200), vectors(30, seed=1)
    scores, rows = search(build_index(documents, metric=metric), queries, k=10, batch_size=7)
    if metric == "cos":
        documents = documents / np.linalg.norm(documents, axis=1, keepdims=True)
        queries = queries / np.linalg.norm(queries, axis=1, keepdims=True)
    expected = queries @ documents.T
    np.testing.assert_array_equal(rows, np.argsort(-expected, axis=1)[:, :10])
    np.testing.assert_allclose(scores, -np.sort(-expected, axis=1)[:, :10], atol=1e-5)


def test_the_callers_embeddings_are_not_normalised():
    documents, queries = vectors(20), vectors(3, seed=1)
    before = documents.copy(), queries.copy()
    search(build_index(documents, metric="cos"), queries, k=5)
    np.testing.assert_array_equal(documents, before[0])
    np.testing.assert_array_equal(queries, before[1])


@pytest.mark.parametrize("k", [1, 3, 39, 40, 41])
def test_ties_are_ordered_by_id_also_at_the_kth_place(k):
    # 40 equal documents between a better and a worse one: whatever k cuts, the smallest ids are kept.
    rng = np.random.default_rng(0)
    ids = [f"d{number}" for number in rng.permutation(42)]
    documents = np.tile(np.float32([1.0, 0.0]), (42, 1))
    documents[ids.index("d7")] = [2.0, 0.0]
    documents[ids.index("d9")] = [0.5, 0.0]
    for batch in (1, 30):
        _, rows = search(build_index(documents, metric="dot", ids=ids), np.float32([[1.0, 0.0]] * batch), k=k)
        expected = ["d7", *sorted(set(ids) - {"d7", "d9"}), "d9"][:k]
        assert [[ids[row] for row in line] for line in rows] == [expected] * batch


def test_order_does_not_depend_on_the_order_of_the_corpus():
    documents, queries = np.repeat(vectors(30), 4, axis=0), vectors(5, seed=1)
    ids = np.array([f"d{number:03}" for number in range(120)])
    shuffle = np.random.default_rng(2).permutation(120)
    _, rows = search(build_index(documents, ids=ids.tolist()), queries, k=10)
    _, shuffled = search(build_index(documents[shuffle], ids=ids[shuffle].tolist()), queries, k=10)
    np.testing.assert_array_equal(ids[rows], ids[shuffle][shuffled])


def test_k_beyond_the_corpus_gives_the_whole_corpus():
    scores, rows = search(build_index(vectors(4)), vectors(2, seed=1), k=100)
    assert scores.shape == rows.shape == (2, 4)
    assert all(sorted(line) == [0, 1, 2, 3] for line in rows.tolist())


def test_what_an_approximate_index_does_not_find_is_marked_and_last():
    scores, rows = search(build_index(vectors(64), "IVF8,Flat", parameters="nprobe=1"), vectors(5, seed=1), k=60)
    assert (rows == -1).any()
    np.testing.assert_array_equal(rows == -1, np.isneginf(scores))
    assert (np.diff(scores[:, :3]) <= 0).all()


@pytest.mark.parametrize("factory", ["HNSW32", "IVF4,Flat", "SQ8", "PCA15,Flat", "IVF4,Flat,RFlat", "Flat"])
@pytest.mark.parametrize("metric", ["cos", "dot"])
def test_every_kind_of_index_finds_a_document_by_itself(factory, metric):
    documents = vectors(300)
    documents /= np.linalg.norm(documents, axis=1, keepdims=True)
    index = build_index(documents, factory, metric, parameters="nprobe=4" if "IVF" in factory else None)
    _, rows = search(index, documents[:50], k=1)
    assert (rows[:, 0] == np.arange(50)).mean() >= 0.9


def test_an_inverted_index_probes_more_than_one_list_unless_told():
    assert build_index(vectors(400), "IVF16,Flat").parameters == "nprobe=2"
    assert build_index(vectors(400), "IVF16,Flat", parameters="nprobe=9").parameters == "nprobe=9"


@pytest.mark.parametrize(
    ("factory", "parameters", "words"),
    [
        ("Falt", None, "could not parse index string Falt"),
        ("", None, "could not parse"),
        ("PQ7", None, "multiple of the number of subquantizers"),
        ("IVF512,Flat", None, "at least 512 vectors to train and the corpus has 100"),
        ("PQ4", None, "at least 256 vectors"),
        ("IDMap,Flat", None, "does not rank rows"),
        ("IVF4,Flat", "nprobes=4", "does not take parameters 'nprobes=4'"),
        ("IVF4,Flat", "nprobe=0", "does not take parameters 'nprobe=0'"),
    ],
)
def test_an_index_that_cannot_work_is_refused_with_the_reason(factory, parameters, words):
    with pytest.raises(ConfigError, match=words) as caught:
        build_index(vectors(100), factory, parameters=parameters)
    assert "\n" not in str(caught.value) and ".cpp" not in str(caught.value)


def test_nan_is_refused_rather_than_never_found():
    documents = vectors(10)
    documents[3, 2] = np.nan
    with pytest.raises(UserError, match="document embedding 3"):
        build_index(documents)
    with pytest.raises(UserError, match="query embedding 3"):
        search(build_index(vectors(10)), documents, k=2)


def test_a_zero_vector_scores_zero_under_cosine():
    documents = np.float32([[0, 0], [1, 0], [-1, 0]])
    scores, rows = search(build_index(documents), np.float32([[2, 0]]), k=3)
    assert rows.tolist() == [[1, 0, 2]]
    np.testing.assert_allclose(scores, [[1, 0, -1]])


def test_queries_of_another_dimension_are_refused():
    with pytest.raises(ConfigError, match="16 dimensions"):
        search(build_index(vectors(10)), vectors(2, d=8), k=1)
