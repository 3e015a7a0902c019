"""Search by BM25: how texts are cut into words, the scores of bm25s, and its index of a store."""

from __future__ import annotations

import logging
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from contaccum import progress
from contaccum.data.corpus import Corpus, get_passage_texts
from contaccum.data.rows import passage_text
from contaccum.errors import DataError
from contaccum.files import AnyPath, atomic_folder, read_json, write_json
from contaccum.retrieval.store import BM25_FOLDER, EmbeddingStore

if TYPE_CHECKING:
    import bm25s

WEIGHT_FILE = "bm25_weight.json"
"""File beside a model with the weight of BM25 that `contaccum fit` has chosen."""
FUSION_DEPTH = 100
"""Number of the best documents of a query whose scores are scaled to 0..1 before they are added.

It is the same however many documents are retrieved: the best weight depends on the scale.
"""

# DPR's values of the saturation of term frequencies and the influence of the passage's length
_K1 = 0.9
_B = 0.4

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
# Letters of full width and katakana of half width. Other characters keep their form: NFKC would
# make "cm2" of "cm²".
_WIDE_OR_NARROW = re.compile("[\uff01-\uffef]+")
# Groups: a word of two characters or more, a run of _CJK, a run of _SOUTHEAST_ASIAN.
_TOKENS = re.compile(
    rf"((?:[^\W{_CJK}{_SOUTHEAST_ASIAN}]|[{_VOWEL_SIGNS}]){{2,}})|([{_CJK}]+)|([{_SOUTHEAST_ASIAN}]+)"
)


def bm25_run(corpus: Corpus, queries: Mapping[str, str], top_k: int) -> dict[str, dict[str, float]]:
    """Return what `search` finds in a corpus, without documents with the query's id, as in BEIR."""
    document_ids = list(corpus)
    index = build_index(get_passage_texts(corpus))
    run = search(index, lambda rows: [document_ids[row] for row in rows], queries, top_k + 1)
    for query_id, hits in run.items():
        hits.pop(query_id, None)
        run[query_id] = dict(list(hits.items())[:top_k])
    return run


def fuse_runs(
    run: Mapping[str, Mapping[str, float]],
    bm25: Mapping[str, Mapping[str, float]],
    bm25_weight: float,
) -> dict[str, dict[str, float]]:
    """Add the scores of BM25 to those of an encoder, each scaled to 0..1 per query.

    Of each, the best `FUSION_DEPTH` documents are scaled and added; one that the other lacks there
    has a score of 0 from it. The other documents follow, with scores below 0 on the same scale; one
    that the other lacks counts as its last.

    Both runs and the result, best documents first, are {query id: {document id: score}}; BM25 may
    lack queries. Its weight is from 0 to 1, and the encoder has the rest.
    """
    fused = {}
    for query_id, scores in run.items():
        bm25_scores = bm25.get(query_id, {})
        sums: dict[str, float] = {}
        rest = dict.fromkeys([*scores, *bm25_scores], 0.0)
        for weight, part in ((1.0 - bm25_weight, scores), (bm25_weight, bm25_scores)):
            if not part:
                continue
            hits = sorted(part.items(), key=lambda hit: -hit[1])
            lowest = hits[:FUSION_DEPTH][-1][1]
            width = hits[0][1] - lowest
            for document_id, score in hits[:FUSION_DEPTH]:
                scaled = (score - lowest) / width if width > 0.0 else 1.0
                sums[document_id] = sums.get(document_id, 0.0) + weight * scaled
            for document_id in rest:
                score = part.get(document_id, hits[-1][1])
                rest[document_id] += weight * (score - lowest) / (width or 1.0)
        for document_id, score in rest.items():
            sums.setdefault(document_id, score)
        fused[query_id] = dict(sorted(sums.items(), key=lambda item: -item[1]))
    return fused


def build_index(passages: Iterable[str], show_progress: bool = False) -> bm25s.BM25:
    """Index n passages for BM25 by bm25s: Lucene's variant, with DPR's parameters k1 and b.

    Memory holds the words of all passages. Raises `DataError` if no passage has a word.
    """
    import bm25s

    # bm25s logs its progress at level DEBUG and attaches a handler that prints it.
    logging.getLogger("bm25s").setLevel(logging.WARNING)
    passage_words = [split_words(passage) for passage in passages]
    if not any(passage_words):
        raise DataError(
            "no passage has a word of two letters or more, so BM25 can find nothing (check the "
            "corpus file)"
        )
    index = bm25s.BM25(k1=_K1, b=_B)
    index.index(passage_words, show_progress=show_progress and progress.verbose)
    return index


def score_queries(index: bm25s.BM25, queries: Iterable[str]) -> Iterator[np.ndarray]:
    """Yield the scores of all n passages for each query, float32 (n,); 0 without a common word."""
    for query in queries:
        query_words = split_words(query)
        if query_words:
            yield index.get_scores(query_words)
        else:
            yield np.zeros(index.scores["num_docs"], dtype=np.float32)


def find_best(scores: np.ndarray, top_k: int) -> np.ndarray:
    """Return the rows of the ``top_k`` highest scores above 0; equal ones in their order."""
    rows = np.flatnonzero(scores > 0)
    return rows[np.argsort(-scores[rows], kind="stable")[:top_k]]


def search(
    index: bm25s.BM25,
    get_ids: Callable[[np.ndarray], list[str]],
    queries: Mapping[str, str],
    top_k: int,
) -> dict[str, dict[str, float]]:
    """Return {query id: {document id: score}}, the best documents that share a word, best first.

    ``get_ids`` returns the document ids of some rows of the index, as `EmbeddingStore.ids` does.
    """
    run = {}
    for query_id, scores in zip(queries, score_queries(index, queries.values()), strict=True):
        rows = find_best(scores, top_k)
        run[query_id] = dict(zip(get_ids(rows), scores[rows].tolist(), strict=True))
    return run


def write_index(store: EmbeddingStore, show_progress: bool = False) -> Path:
    """Write a BM25 index of the texts of a store to its folder ``bm25``, and return the folder.

    Nothing is done if the folder exists: it appears when it is complete. `UserError`: the store
    holds no texts, none has a word, or the disk is full or cannot be written to.
    """
    folder = store.folder / BM25_FOLDER
    if not folder.exists():
        shards = map(store.get_passages, range(store.num_shards))
        rows = (row for shard in shards for row in shard.to_pylist())
        texts = (passage_text(row["title"], row["text"]) for row in rows)
        index = build_index(texts, show_progress)
        with atomic_folder(folder) as new_folder:
            index.save(new_folder, allow_pickle=False)
    return folder


def open_index(store: EmbeddingStore) -> bm25s.BM25:
    """Memory-map the BM25 index of a store, which has its rows; raise `DataError` without one."""
    import bm25s

    folder = store.folder / BM25_FOLDER
    if not folder.exists():
        raise DataError(
            f"{store.folder}: has no BM25 index (run the same contaccum encode again with --bm25)"
        )
    # The backend numba would not check the row numbers in the files.
    return bm25s.BM25.load(
        folder, mmap=True, allow_pickle=False, override_params={"backend": "numpy"}
    )


def write_bm25_weight(model_folder: Path, weight: float) -> None:
    """Write the weight of BM25 beside a model, for `contaccum search`."""
    write_json(model_folder / WEIGHT_FILE, {"bm25_weight": weight})


def read_bm25_weight(model_folder: AnyPath) -> float:
    """Return the weight of BM25 beside a model; 0 if none was written."""
    file = Path(model_folder) / WEIGHT_FILE
    return float(read_json(file)["bm25_weight"]) if file.is_file() else 0.0


def split_words(text: str) -> list[str]:
    """Return the words of a text in lower case and of normal width, of two letters or more.

    Where a script has no blanks between words, all bigrams or trigrams of characters stand for
    them, or the whole run if it is shorter.
    """
    words = []
    text = _WIDE_OR_NARROW.sub(lambda run: unicodedata.normalize("NFKC", run[0]), text)
    for word, cjk_run, southeast_asian_run in _TOKENS.findall(text.lower()):
        if word:
            words.append(word)
            continue
        run = cjk_run or southeast_asian_run
        length = 2 if cjk_run else 3
        last_start = max(0, len(run) - length)
        words.extend(run[start : start + length] for start in range(last_start + 1))
    return words
