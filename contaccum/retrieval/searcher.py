"""Search for texts with a model, behind BEIR's interface: `EvaluateRetrieval(FaissSearcher(model))`; or by BM25.

`FaissSearcher` joins `encode` and `index`. No metric is computed and no file written here, and beir is not imported.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from contaccum.data import passage_text
from contaccum.errors import DataError
from contaccum.retrieval.encode import encode_texts, metric_of
from contaccum.retrieval.index import build_index, recall_against_exact, search

Run = dict[str, dict[str, float]]


class FaissSearcher:
    """Encodes a corpus and queries with one model and searches them with FAISS.

    Args:
        model: a SentenceTransformer, which stays on the device it is on.
        index, index_parameters: see `build_index`; "Flat" is exact and equals BEIR's DenseRetrievalExactSearch.
        batch_size, precision: see `encode_texts`.
        encode_documents: embeds the texts of documents with the model, (n, d); None: `encode_texts`.

    Attributes:
        timing: of the last search, seconds per stage.
        embeddings: of the last search, of queries and of documents, as the model gives them.
        found: of the last search, `gpus`, and of an approximate index `recall` (see `recall_against_exact`).
    """

    def __init__(
        self,
        model: Any,
        batch_size: int = 32,
        index: str = "Flat",
        index_parameters: str | None = None,
        precision: str = "float32",
        show_progress_bar: bool = True,
        encode_documents: Callable[[Any, Sequence[str]], np.ndarray] | None = None,
    ) -> None:
        self.model, self.index, self.index_parameters = model, index, index_parameters
        self.encoding = {
            "batch_size": batch_size,
            "precision": precision,
            "show_progress": show_progress_bar,
        }
        self.encode_documents = encode_documents
        self.timing: dict[str, float] = {}
        self.found: dict[str, Any] = {}
        self.embeddings: tuple[np.ndarray, np.ndarray] | None = None

    def search(
        self,
        corpus: Mapping[str, Mapping[str, str]],
        queries: Mapping[str, str],
        top_k: int,
        score_function: str | None = None,
        **kwargs: Any,
    ) -> Run:
        """The `top_k` best documents of every query as {query id: {document id: score}}, best first.

        `score_function` is "cos_sim" or "dot"; None is the model's own. A document with the query's id is dropped,
        as BEIR does, which is why one more than `top_k` is asked for. Further keywords are BEIR's and are ignored.

        Raises:
            ConfigError: an unknown score function, or an index that cannot be built.
            DataError: an empty corpus.
        """
        metric = metric_of(self.model, score_function)
        if not corpus:
            raise DataError("the corpus has no documents to search")
        self.timing = {}
        passages = [
            passage_text(document.get("title") or "", document["text"])
            for document in corpus.values()
        ]
        asked = self._timed(
            "encode_queries",
            encode_texts,
            self.model,
            [*queries.values()],
            "query",
            **self.encoding,
        )
        settings: Any = self.encoding
        encode = self.encode_documents or partial(encode_texts, kind="document", **settings)
        documents = self._timed("encode_corpus", encode, self.model, passages)
        self.embeddings = asked, documents
        settings = (self.index, metric, list(corpus), self.index_parameters)
        index = self._timed("index", build_index, documents, *settings)
        scores, rows = self._timed("search", search, index, asked, top_k + 1)
        recall = recall_against_exact(index, asked, rows[:, :top_k])
        self.found = {"gpus": index.gpus, **({"recall": recall} if recall else {})}
        run: Run = {}
        for query, line_scores, line_rows in zip(queries, scores, rows, strict=True):
            found = line_rows[line_rows >= 0]  # rows that are not there come last
            hits = dict(zip(index.ids(found), line_scores.tolist(), strict=False))
            if hits.pop(query, None) is None and len(hits) > top_k:
                hits.popitem()
            run[query] = hits
        return run

    def _timed(self, stage: str, function: Any, *args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        result = function(*args, **kwargs)
        self.timing[f"{stage}_seconds"] = time.perf_counter() - started
        return result


def bm25_run(
    corpus: Mapping[str, Mapping[str, str]], queries: Mapping[str, str], top_k: int
) -> Run:
    """Return the ``top_k`` best documents of every query by BM25; raises as `bm25_scores` does."""
    names = list(corpus)
    passages = [
        passage_text(document.get("title") or "", document["text"]) for document in corpus.values()
    ]
    run: Run = {}
    for query, scores in zip(queries, bm25_scores(passages, list(queries.values())), strict=True):
        best = np.argsort(-scores, kind="stable")[: top_k + 1]
        hits = {names[row]: float(scores[row]) for row in best if scores[row] > 0}
        hits.pop(query, None)  # as BEIR drops a document with the query's id
        run[query] = dict(list(hits.items())[:top_k])
    return run


def bm25_scores(
    passages: list[str], queries: list[str], show_progress: bool = False
) -> Iterator[np.ndarray]:
    """For each query the scores of all n passages, float32 (n,), by bm25s (Lucene's variant, DPR's k1 and b).

    Words are of two letters or more, in lower case; a score is 0 where no word of the query occurs.

    Raises:
        DataError: no passage has a word.
    """
    import bm25s

    logging.getLogger("bm25s").setLevel(
        logging.WARNING
    )  # it says at level DEBUG what it does, and is shown
    words_of = partial(bm25s.tokenize, stopwords=[], return_ids=False, show_progress=show_progress)
    words = words_of(passages)
    if not any(words):
        raise DataError("no passage has a word of two letters for BM25 to find")
    index = bm25s.BM25(k1=0.9, b=0.4)
    index.index(words, show_progress=show_progress)
    for query in words_of(queries):
        yield index.get_scores(query) if query else np.zeros(len(words), dtype=np.float32)
