"""A smaller data set to evaluate on while training: the same one every time, with every relevant document.

Figures of a sample are higher than those of the whole corpus, and compare with figures of the same sample alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import replace
from itertools import islice

import numpy as np

from contaccum.data.beir_folder import BeirDataset, passage_text

SAMPLES = ("random", "bm25")

# Candidates of BM25 looked at for each place to fill: queries share some of theirs.
_SPARE = 3


def sample(
    dataset: BeirDataset, queries: int | None = None, corpus: int | None = None, hardest: Iterable[str] = ()
) -> BeirDataset:
    """The same part of a data set every time: what has the smallest hashes of its ids.

    Args:
        queries: judged queries to keep; None: all.
        corpus: documents to keep; every relevant document of a kept query is among them, even where these are more.
            Judgements of documents that are left out go as well.
        hardest: ids of documents that take the other places, in this order, before those with the smallest hashes.
    """
    if (queries is None or queries >= len(dataset.queries)) and (corpus is None or corpus >= len(dataset.corpus)):
        return dataset
    kept_queries = set(sorted(dataset.queries, key=_order)[:queries])
    positives = {
        document
        for query in kept_queries
        for document, grade in dataset.qrels[query].items()
        if grade > 0 and document in dataset.corpus
    }
    how = f"queries={queries} corpus={corpus}"
    if corpus is None:
        kept = set(dataset.corpus)
    else:
        places = max(0, corpus - len(positives))
        first = dict.fromkeys(document for document in hardest if document not in positives)
        others = sorted((d for d in dataset.corpus if d not in positives and d not in first), key=_order)
        chosen = list(islice((*first, *others), places))
        how += f" hardest={','.join(sorted(chosen))}" if first else ""
        kept = positives | set(chosen)
    digest = hashlib.sha256(f"{dataset.fingerprint} {how}".encode())
    return replace(
        dataset,
        corpus={document: text for document, text in dataset.corpus.items() if document in kept},
        queries={query: text for query, text in dataset.queries.items() if query in kept_queries},
        qrels={
            query: {document: grade for document, grade in judged.items() if document in kept}
            for query, judged in dataset.qrels.items()
            if query in kept_queries
        },
        fingerprint=digest.hexdigest(),
    )


def hard_sample(dataset: BeirDataset, queries: int | None = None, corpus: int | None = None) -> BeirDataset:
    """:func:`sample` whose other documents are judged ones first, then the best by BM25: each query's first, each
    query's second, and so on.

    Raises:
        ConfigError: bm25s is not installed.
        DataError: no document has a word.
    """
    from contaccum.mining.candidates import BM25Index

    some = sample(dataset, queries)
    if corpus is None or corpus >= len(dataset.corpus):
        return some
    judged = [document for grades in some.qrels.values() for document, grade in grades.items() if grade <= 0]
    ids = list(dataset.corpus)
    texts = [passage_text(document["title"], document["text"]) for document in dataset.corpus.values()]
    index = BM25Index(texts, str(dataset.path), show_progress=False)
    depth = min(len(ids), max(10, _SPARE * corpus // len(some.queries)))
    best = np.full((depth, len(some.queries)), -1)
    for column, text in enumerate(some.queries.values()):
        rows = index.best(text, depth)
        best[: len(rows), column] = rows
    return sample(dataset, queries, corpus, (*judged, *(ids[row] for row in best.flat if row >= 0)))


def _order(identifier: str) -> bytes:
    return hashlib.sha256(identifier.encode()).digest()
