"""A linear map of query vectors: the solution, and the model that applies it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sample_texts import sentences
from sentence_transformers import SentenceTransformer
from small_data import write_lines
from tiny_models import tiny_encoder
from torch.nn.functional import cross_entropy, normalize

from contaccum import DualEncoder
from contaccum.bank.full_softmax import DocumentBlock
from contaccum.encoders.export import export_model
from contaccum.encoders.linear_map import append_linear_map, solve_linear_map, train_linear_map
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
    solved = solve_linear_map(torch.from_numpy(queries), torch.from_numpy(passages), ridge)
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


def test_trained_map_has_a_smaller_loss_than_ridge_in_a_dense_reference():
    """The other positives of a query are no negatives; without time, there is no map."""
    generator = torch.Generator().manual_seed(0)
    documents = normalize(torch.randn(60, 8, generator=generator, dtype=torch.float64))
    queries = documents[:40].roll(1, dims=1) + 0.2 * torch.randn(
        40, 8, generator=generator, dtype=torch.float64
    )
    queries = normalize(queries)
    labels = torch.stack([torch.arange(40), torch.arange(40) + 20], dim=1)  # (40, 2)

    def compute_loss(weights: torch.Tensor) -> torch.Tensor:
        logits = normalize(queries + queries @ weights) @ documents.T / 0.05
        logits = logits.scatter(1, labels[:, 1:], -torch.inf)
        return cross_entropy(logits, labels[:, 0]) + 0.01 * weights.square().sum()

    def train(has_time: bool) -> torch.Tensor:
        return train_linear_map(
            queries.float(),
            documents[:40].float(),
            labels,
            lambda: [DocumentBlock(first, documents[first:][:35].float()) for first in (0, 35)],
            0.01,
            0.05,
            lambda: has_time,
        )

    weights = train(has_time=True).requires_grad_()
    loss = compute_loss(weights)
    ridges = [solve_linear_map(queries, documents[:40], ridge) for ridge in (0.1, 1.0, 10.0)]
    assert loss < min(compute_loss(ridge) for ridge in ridges)
    start = torch.zeros(8, 8, dtype=torch.float64, requires_grad=True)
    [at_start] = torch.autograd.grad(compute_loss(start), start)
    [at_end] = torch.autograd.grad(loss, weights)
    assert at_end.norm() < 0.05 * at_start.norm()
    assert not train(has_time=False).any()
