"""Random embeddings in clusters, for measurements of search.

Centres are drawn from a normal distribution. A document is a centre plus a normal vector that is
`spread` times as long, and a query is a document plus another such vector. All embeddings are
normalized. They are clustered because text embeddings are clustered as well; with plain normal
vectors, every approximate index would have a low recall.
"""

from __future__ import annotations

import numpy as np

BLOCK_SIZE = 65_536  # documents that are generated at once


def make_clustered_embeddings(
    num_documents: int,
    num_queries: int,
    dimension: int,
    num_clusters: int = 2000,
    spread: float = 0.7,
    seed: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """Generate normalized float32 embeddings of documents (N, d) and queries (n, d).

    Args:
        num_documents: N.
        num_queries: n.
        dimension: d.
        num_clusters: number of centres.
        spread: length of the noise / length of a centre.
        seed: seed of the random numbers.
    """
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((num_clusters, dimension), dtype=np.float32)

    def add_noise(vectors: np.ndarray) -> np.ndarray:
        """Add noise to the vectors in place; return them normalized."""
        vectors += spread * rng.standard_normal(vectors.shape, dtype=np.float32)
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    documents = np.empty((num_documents, dimension), dtype=np.float32)
    for start in range(0, num_documents, BLOCK_SIZE):
        block = documents[start : start + BLOCK_SIZE]
        block[:] = add_noise(centres[rng.integers(0, num_clusters, len(block))])
    query_documents = documents[rng.integers(0, num_documents, num_queries)]
    # Normalized documents are scaled to the length of a centre, so that the noise has the same
    # share.
    queries = add_noise(query_documents * np.float32(np.sqrt(dimension)))
    return documents, queries
