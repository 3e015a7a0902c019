"""A linear map of query vectors: the solution, and the model that applies it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sample_texts import sentences
from sentence_transformers import SentenceTransformer
from small_data import write_lines
from tiny_models import tiny_encoder

from contaccum import DualEncoder
from contaccum.encoders.export import export_model
from contaccum.encoders.linear_map import append_linear_map, solve_linear_map
from contaccum.errors import ConfigError
from contaccum.retrieval.encode import CorpusEncoder, check_store_fits
from contaccum.retrieval.store import EmbeddingStore

TEXTS = sentences(6, 1)


@pytest.mark.parametrize("num_pairs", [5, 40])  # fewer and more than dimensions
@pytest.mark.parametrize("ridge", [1e-3, 1.0, 100.0])
def test_solution_is_that_of_augmented_least_squares(num_pairs, ridge):
    """Ridge regression is least squares with sqrt(ridge) I below X, and zeros below the targets."""
    generator = np.random.default_rng(0)
    queries, passages = generator.standard_normal((2, num_pairs, 12))
    rows = np.vstack([queries, np.sqrt(ridge) * np.eye(12)])
    targets = np.vstack([passages - queries, np.zeros((12, 12))])
    expected = np.linalg.lstsq(rows, targets, rcond=None)[0]
    targets = passages - queries
    solved = solve_linear_map(torch.from_numpy(queries), torch.from_numpy(targets), ridge)
    np.testing.assert_allclose(solved.numpy(), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("similarity", ["cos", "dot"])
def test_saved_model_maps_queries_and_leaves_documents(tied, similarity, tmp_path):
    """Plain sentence-transformers loads it, an index of the base stays valid, export works."""
    base = tiny_encoder(tied, similarity=similarity, normalize=similarity == "cos")
    queries, documents = base.encode_query(TEXTS), base.encode_document(TEXTS)
    corpus = write_lines(tmp_path / "corpus.jsonl", [{"_id": t, "text": t} for t in TEXTS])
    CorpusEncoder(base, "base", corpus, tmp_path / "store").encode(show_progress=False)

    matrix = torch.randn(16, 16, dtype=torch.float64)
    append_linear_map(base, matrix)
    base.save_pretrained(str(tmp_path / "model"))
    expected = queries @ matrix.numpy()
    if similarity == "cos":
        expected /= np.linalg.norm(expected, axis=1, keepdims=True)

    plain = SentenceTransformer(str(tmp_path / "model"), device="cpu")
    np.testing.assert_allclose(plain.encode_query(TEXTS), expected, atol=1e-5)
    assert np.array_equal(plain.encode_document(TEXTS), documents)

    loaded = DualEncoder.from_pretrained(str(tmp_path / "model"), device="cpu")
    store = EmbeddingStore.open(tmp_path / "store")
    check_store_fits(loaded, store)
    with pytest.raises(ConfigError, match="another"):
        check_store_fits(tiny_encoder(tied, similarity=similarity, pooling="cls"), store)

    export_model(loaded, tmp_path / "exported")
    for task, vectors in (("query", expected), ("document", documents)):
        exported = SentenceTransformer(str(tmp_path / "exported" / task), device="cpu")
        np.testing.assert_allclose(exported.encode(TEXTS), vectors, atol=1e-5)
