"""Search for texts with a model, behind BEIR's interface, and search by BM25.

`FaissSearcher` joins `encode` and `index`: `EvaluateRetrieval(FaissSearcher(model))`.
No metric is computed here, no file is written, and beir is not imported.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from sentence_transformers import SentenceTransformer

from contaccum.data import passage_text
from contaccum.encoders.towers import Kind
from contaccum.errors import DataError
from contaccum.retrieval.encode import encode_texts, get_similarity
from contaccum.retrieval.index import DenseIndex, build_index, recall_against_exact, search

Run = dict[str, dict[str, float]]
"""{query id: {document id: score}}"""

Corpus = Mapping[str, Mapping[str, str]]
"""{document id: {"title": title, "text": text}}; the title may be missing."""

Encode = Callable[[SentenceTransformer, Sequence[str]], np.ndarray]
"""Function of a model and n texts that returns embeddings (n, d)."""

# Parameters of BM25, with DPR's values: the saturation of the term frequency (k1) and the influence
# of the passage's length (b).
_BM25_K1 = 0.9
_BM25_B = 0.4

# Words of these scripts cannot be found by blanks, so their texts are cut into overlapping n-grams.
# Bigrams of Han, kana, Bopomofo, Yi and Hangul, as in Lucene's CJK analyzer. Korean has blanks, but
# particles are joined to its words: nDCG@10 on KorQuAD's dev set is 0.84 by words, 0.95 by bigrams.
_CJK = (
    r"\u1100-\u11ff\u2e80-\u2fdf\u3005-\u3007\u3031-\u3035\u3041-\u309f\u30a1-\u30fa\u30fc-\u31ff"
    r"\u3400-\u4dbf\u4e00-\ua4cf\ua960-\ua97f\uac00-\ud7ff\uf900-\ufaff\uff66-\uffdc"
    r"\U0001aff0-\U0001b16f\U00020000-\U0003ffff"
)
# Trigrams of Thai, Lao, Myanmar, Khmer and Tai, which have few letters: nDCG@10 on XQuAD in Thai is
# 0.92 by bigrams, 0.97 by trigrams.
_SOUTHEAST_ASIAN = (
    r"\u0e01-\u0e3a\u0e40-\u0e4e\u0e80-\u0ecf\u1000-\u103f\u1050-\u109f\u1780-\u17d3\u1950-\u19cf"
    r"\u1a20-\u1a7f\ua9e0-\ua9ef\uaa60-\uaadf"
)
# Scripts of India and Sri Lanka, Thaana and Tibetan: their vowel signs belong to a word, but not to
# the pattern \w.
_VOWEL_SIGNS = r"\u0780-\u07bf\u0900-\u0963\u0966-\u0dff\u0f40-\u0fbc"
# Groups: a word of two characters or more, a run of _CJK, a run of _SOUTHEAST_ASIAN.
_BM25_TOKENS = re.compile(
    rf"((?:[^\W{_CJK}{_SOUTHEAST_ASIAN}]|[{_VOWEL_SIGNS}]){{2,}})|([{_CJK}]+)|([{_SOUTHEAST_ASIAN}]+)"
)


class FaissSearcher:
    """Searcher that encodes a corpus and queries with one model and searches with FAISS.

    Its method `search` has the arguments and the result of BEIR's search classes.

    Args:
        model: a SentenceTransformer, which stays on its device.
        batch_size: texts per forward pass; see `encode_texts`.
        index: FAISS factory string; see `build_index`. "Flat" is exact and gives the results of
            BEIR's DenseRetrievalExactSearch.
        index_parameters: FAISS search parameters; see `build_index`.
        precision: type of autocast; see `encode_texts`.
        show_progress_bar: show progress bars.
        encode_queries, encode_documents: functions that return the embeddings (n, d) of the texts
            of queries and of documents, given the model and the texts; None: `encode_texts`.

    Attributes:
        timing: seconds per stage of the last search.
        search_details: the number of ``gpus`` of the last search and, for an approximate index, the
            ``recall`` (see `recall_against_exact`).
    """

    def __init__(
        self,
        model: SentenceTransformer,
        batch_size: int = 32,
        index: str = "Flat",
        index_parameters: str | None = None,
        precision: str = "float32",
        show_progress_bar: bool = True,
        encode_queries: Encode | None = None,
        encode_documents: Encode | None = None,
    ) -> None:
        self.model = model
        self.batch_size = batch_size
        self.index = index
        self.index_parameters = index_parameters
        self.precision = precision
        self.show_progress_bar = show_progress_bar
        self.encode_queries = encode_queries
        self.encode_documents = encode_documents
        self.timing: dict[str, float] = {}
        self.search_details: dict[str, int | dict[str, float]] = {}

    def search(
        self,
        corpus: Corpus,
        queries: Mapping[str, str],
        top_k: int,
        score_function: str | None = None,
        **kwargs: Any,
    ) -> Run:
        """Find the ``top_k`` best documents of every query.

        A document with the query's id is dropped from the results, as BEIR does.

        Args:
            corpus: {document id: {"title": title, "text": text}}.
            queries: {query id: text}.
            top_k: number of documents per query.
            score_function: "cos_sim" or "dot"; None: the model's own similarity.
            kwargs: further keywords of BEIR; they are ignored.

        Returns:
            {query id: {document id: score}}, best documents first.

        Raises:
            ConfigError: the score function is unknown, or the index cannot be built.
        """
        metric = get_similarity(self.model, score_function)
        self.timing = {}
        with self._measure_time("encode_queries"):
            query_embeddings = self._encode(list(queries.values()), "query", self.encode_queries)
        passages = get_passage_texts(corpus)
        with self._measure_time("encode_corpus"):
            document_embeddings = self._encode(passages, "document", self.encode_documents)
        with self._measure_time("index"):
            index = build_index(
                document_embeddings, self.index, metric, list(corpus), self.index_parameters
            )
        with self._measure_time("search"):
            # One more than top_k, because the document with the query's id is dropped.
            scores, rows = search(index, query_embeddings, top_k + 1)
        self.search_details = {"gpus": len(index.gpus)}
        recall = recall_against_exact(index, query_embeddings, rows[:, :top_k])
        if recall is not None:
            self.search_details["recall"] = recall
        run: Run = {}
        for query_id, query_scores, query_rows in zip(queries, scores, rows, strict=True):
            run[query_id] = _get_hits(index, query_id, query_scores, query_rows, top_k)
        return run

    def _encode(self, texts: Sequence[str], kind: Kind, encode: Encode | None) -> np.ndarray:
        if encode is not None:
            return encode(self.model, texts)
        return encode_texts(
            self.model, texts, kind, self.batch_size, self.precision, self.show_progress_bar
        )

    @contextmanager
    def _measure_time(self, stage: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.timing[f"{stage}_seconds"] = time.perf_counter() - started


def _get_hits(
    index: DenseIndex, query_id: str, scores: np.ndarray, rows: np.ndarray, top_k: int
) -> dict[str, float]:
    """Return {document id: score} of a query's ``top_k`` best documents, without its own document.

    Args:
        index: the index that was searched.
        query_id: id of the query.
        scores: (top_k + 1,), descending.
        rows: (top_k + 1,); -1 where an approximate index found no further document.
    """
    found_rows = rows[rows >= 0]
    found_scores = scores[: len(found_rows)].tolist()  # rows of -1 come last
    hits = dict(zip(index.ids(found_rows), found_scores, strict=True))
    has_own_document = hits.pop(query_id, None) is not None
    if not has_own_document and len(hits) > top_k:
        hits.popitem()
    return hits


def get_passage_texts(corpus: Corpus) -> list[str]:
    """Return the texts of all documents as they are encoded: title, space, text."""
    texts = []
    for document in corpus.values():
        title = document.get("title") or ""
        texts.append(passage_text(title, document["text"]))
    return texts


def bm25_run(corpus: Corpus, queries: Mapping[str, str], top_k: int) -> Run:
    """Find the ``top_k`` best documents of every query by BM25.

    A document with the query's id is dropped, as BEIR does, and so are documents that share no word
    with the query.

    Raises:
        DataError: no document has a word; see `bm25_scores`.
    """
    document_ids = list(corpus)
    passages = get_passage_texts(corpus)
    all_scores = bm25_scores(passages, list(queries.values()))
    run: Run = {}
    for query_id, scores in zip(queries, all_scores, strict=True):
        best_rows = np.argsort(-scores, kind="stable")[: top_k + 1]
        hits = {document_ids[row]: float(scores[row]) for row in best_rows if scores[row] > 0}
        hits.pop(query_id, None)
        run[query_id] = dict(list(hits.items())[:top_k])
    return run


def bm25_scores(
    passages: list[str], queries: list[str], show_progress: bool = False
) -> Iterator[np.ndarray]:
    """Yield the scores of all n passages for each query, float32 (n,), by bm25s.

    The variant is Lucene's, with DPR's parameters k1 and b. A passage without any word of the query
    has a score of 0. See `_split_words` for what a word is.

    Raises:
        DataError: no passage has a word.
    """
    import bm25s

    # bm25s logs its progress at level DEBUG and attaches a handler that prints it.
    logging.getLogger("bm25s").setLevel(logging.WARNING)
    passage_words = [_split_words(passage) for passage in passages]
    if not any(passage_words):
        raise DataError(
            "no passage has a word of two letters or more, so BM25 can find nothing (check the "
            "corpus file)"
        )
    index = bm25s.BM25(k1=_BM25_K1, b=_BM25_B)
    index.index(passage_words, show_progress=show_progress)
    for query in queries:
        query_words = _split_words(query)
        if query_words:
            yield index.get_scores(query_words)
        else:
            yield np.zeros(len(passages), dtype=np.float32)


def _split_words(text: str) -> list[str]:
    """Return the words of a text in lower case, for BM25.

    Words have two letters or more. Where a script has no blanks between words, all bigrams or
    trigrams of characters stand for them, or the whole run if it is shorter.
    """
    words = []
    for word, cjk_run, southeast_asian_run in _BM25_TOKENS.findall(text.lower()):
        if word:
            words.append(word)
            continue
        run = cjk_run or southeast_asian_run
        length = 2 if cjk_run else 3
        last_start = max(0, len(run) - length)
        words.extend(run[start : start + length] for start in range(last_start + 1))
    return words
