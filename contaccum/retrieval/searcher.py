"""Dense retrieval behind BEIR's interface: `EvaluateRetrieval(FaissSearcher(model), score_function="cos_sim")`.

Joins `encoding` and `index`. Unlike BEIR's own searchers it never reads or writes a pickle: embeddings on disk are
.npz files without objects, and a .pkl is refused. It computes no metric. Importing this module imports beir.
"""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from beir.retrieval.search import BaseSearch

from contaccum.errors import ConfigError, DataError
from contaccum.retrieval.encoding import check_autocast_dtype, encode_corpus, encode_queries
from contaccum.retrieval.exact_scores import Metric
from contaccum.retrieval.gpus import GpuMode
from contaccum.retrieval.index import build_index, search
from contaccum.retrieval.recall import recall_against_exact

logger = logging.getLogger(__name__)

Run = dict[str, dict[str, float]]

# BEIR's names, and those of sentence-transformers, for the two similarities that an inner-product index can rank by.
_METRICS: dict[str, Metric] = {"cos_sim": "cos", "cos": "cos", "cosine": "cos", "dot": "dot"}


class FaissSearcher(BaseSearch):
    """Encodes a corpus and queries with one model and searches them with FAISS.

    Args:
        model: a SentenceTransformer (encoded with `encode_texts`), or any object with `encode_queries` and
            `encode_corpus` as BEIR calls them.
        batch_size: texts of the greatest length per batch, see `encode_texts`.
        index: a FAISS factory string; "Flat" is exact and equals BEIR's DenseRetrievalExactSearch.
        index_parameters: FAISS search parameters, such as "nprobe=32".
        use_gpu: for FAISS: "auto", True or False. The model stays on the device it is on.
        gpu_mode, gpu_float16: see `Gpus`.
        autocast_dtype: None, "bfloat16" or "float16".
        corpus_chunk_size: documents per file that `encode` writes.

    After a search, `timing` holds seconds per stage, `last_index` the index that was searched, and `recall`, of an
    approximate one, what `recall_against_exact` says.
    """

    def __init__(
        self,
        model: Any,
        batch_size: int = 32,
        index: str = "Flat",
        index_parameters: str | None = None,
        use_gpu: bool | Literal["auto"] = "auto",
        autocast_dtype: str | None = None,
        show_progress_bar: bool = True,
        corpus_chunk_size: int = 50_000,
        gpu_mode: GpuMode = "replicate",
        gpu_float16: bool = False,
    ) -> None:
        check_autocast_dtype(autocast_dtype)
        self.model = model
        self.batch_size = batch_size
        self.index = index
        self.index_parameters = index_parameters
        self.use_gpu = use_gpu
        self.autocast_dtype = autocast_dtype
        self.show_progress_bar = show_progress_bar
        self.corpus_chunk_size = corpus_chunk_size
        self.results: Run = {}
        self.timing: dict[str, float] = {}
        self.gpu_mode: GpuMode = gpu_mode
        self.gpu_float16 = gpu_float16
        self.last_index: Any = None
        self.recall: dict[str, Any] | None = None

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

        Raises `ConfigError` for an unknown score function or an index that cannot be built, `DataError` for an
        empty corpus.
        """
        metric = self.metric(score_function)
        if not corpus:
            raise DataError("the corpus has no documents to search")
        document_ids, query_ids = list(corpus), list(queries)
        started = time.perf_counter()
        query_embeddings = self._encode_queries([queries[qid] for qid in query_ids])
        queries_encoded = time.perf_counter()
        document_embeddings = self._encode_corpus([corpus[docid] for docid in document_ids])
        corpus_encoded = time.perf_counter()
        self.timing = {
            "encode_queries_seconds": queries_encoded - started,
            "encode_corpus_seconds": corpus_encoded - queries_encoded,
        }
        return self._search_embeddings(query_ids, query_embeddings, document_ids, document_embeddings, top_k, metric)

    def encode(
        self,
        corpus: Mapping[str, Mapping[str, str]],
        queries: Mapping[str, str],
        encode_output_path: str | os.PathLike[str] = "./embeddings/",
        overwrite: bool = False,
        query_filename: str = "queries.npz",
        corpus_filename: str = "corpus.*.npz",
        **kwargs: Any,
    ) -> None:
        """Write embeddings to `encode_output_path`: one file of queries, and one per `corpus_chunk_size` documents.

        Each .npz holds `embeddings` float32 (n, d) and `ids`. A file that is there already is kept unless
        `overwrite`; one with other ids is refused, since it belongs to other data.

        Raises `ConfigError` for a .pkl name (BEIR's defaults: pass both names to `encode_and_retrieve`).
        """
        for name in (query_filename, corpus_filename):
            _require_npz(name)
        if "*" not in corpus_filename and len(corpus) > self.corpus_chunk_size:
            raise ConfigError(f"corpus_filename {corpus_filename!r} needs a * to number {len(corpus)} documents' files")
        folder = Path(encode_output_path)
        folder.mkdir(parents=True, exist_ok=True)
        query_ids, document_ids = list(queries), list(corpus)
        if overwrite or not _holds(folder / query_filename, query_ids):
            embeddings = self._encode_queries([queries[qid] for qid in query_ids])
            save_embeddings(folder / query_filename, query_ids, embeddings)
        for number, start in enumerate(range(0, len(document_ids), self.corpus_chunk_size)):
            chunk = document_ids[start : start + self.corpus_chunk_size]
            path = folder / corpus_filename.replace("*", str(number))
            if overwrite or not _holds(path, chunk):
                save_embeddings(path, chunk, self._encode_corpus([corpus[docid] for docid in chunk]))

    def search_from_files(
        self,
        query_embeddings_file: str | os.PathLike[str],
        corpus_embeddings_files: Sequence[str | os.PathLike[str]],
        top_k: int,
        score_function: str | None = None,
        **kwargs: Any,
    ) -> Run:
        """`search` on files that `encode` wrote. `score_function` None is the model's own (BEIR's is always "dot").

        Raises `ConfigError` for a .pkl, `DataError` for a file that is not ours or a document that two files hold.
        """
        metric = self.metric(score_function)
        query_ids, query_embeddings = load_embeddings(query_embeddings_file)
        if not corpus_embeddings_files:
            raise DataError(f"{query_embeddings_file}: no corpus files were given to search with it")
        shards = [load_embeddings(path) for path in corpus_embeddings_files]
        document_ids = [docid for ids, _ in shards for docid in ids]
        if len(set(document_ids)) < len(document_ids):
            raise DataError(
                f"{corpus_embeddings_files[0]}: some documents are in two of the corpus files; "
                "delete files of an earlier run"
            )
        document_embeddings = np.concatenate([embeddings for _, embeddings in shards])
        self.timing = {}
        return self._search_embeddings(query_ids, query_embeddings, document_ids, document_embeddings, top_k, metric)

    def metric(self, score_function: str | None = None) -> Metric:
        """The index's metric for a score function's name; None is the model's own, cosine where it has none."""
        if score_function is None:
            score_function = getattr(self.model, "similarity_fn_name", "cosine")
            if score_function not in _METRICS:
                raise ConfigError(
                    f"the model compares by {score_function!r}, and an index here ranks by cosine or dot product: "
                    "choose one of the two"
                )
        if score_function not in _METRICS:
            raise ConfigError(f"score function must be 'cos_sim' or 'dot', not {score_function!r}")
        return _METRICS[score_function]

    def _encode_queries(self, texts: list[str]) -> np.ndarray:
        return encode_queries(self.model, texts, self.batch_size, self.autocast_dtype, self.show_progress_bar)

    def _encode_corpus(self, documents: list[Mapping[str, str]]) -> np.ndarray:
        return encode_corpus(self.model, documents, self.batch_size, self.autocast_dtype, self.show_progress_bar)

    def _search_embeddings(
        self,
        query_ids: list[str],
        query_embeddings: np.ndarray,
        document_ids: list[str],
        document_embeddings: np.ndarray,
        top_k: int,
        metric: Metric,
    ) -> Run:
        started = time.perf_counter()
        index = build_index(
            document_embeddings,
            self.index,
            metric,
            self.use_gpu,
            document_ids,
            self.index_parameters,
            self.gpu_mode,
            self.gpu_float16,
        )
        built = time.perf_counter()
        self.results, self.recall = {}, None
        rows = np.empty((0, 0), dtype=np.int64)
        if query_ids:
            scores, rows = search(index, query_embeddings, top_k + 1)
            names = np.array(document_ids, dtype=object)
            for qid, line_scores, line_rows in zip(query_ids, scores, rows, strict=True):
                there = int((line_rows >= 0).sum())  # rows that are not there come last
                hits = dict(zip(names[line_rows[:there]].tolist(), line_scores[:there].tolist(), strict=True))
                if hits.pop(qid, None) is None and len(hits) > top_k:
                    hits.popitem()
                self.results[qid] = hits
        self.timing["index_seconds"] = built - started
        searched = time.perf_counter()
        self.timing["search_seconds"] = searched - built
        self.last_index = index
        if not index.is_exact:
            self.recall = recall_against_exact(index, query_embeddings, rows[:, :top_k])
            self.timing["recall_seconds"] = time.perf_counter() - searched
        return self.results


def save_embeddings(path: str | os.PathLike[str], ids: Sequence[str], embeddings: np.ndarray) -> None:
    """Write ids and float32 embeddings (n, d) to an .npz, whole or not at all."""
    path = Path(path)
    _require_npz(path)
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".tmp", delete=False) as file:
        try:
            np.savez(file, embeddings=np.asarray(embeddings, dtype=np.float32), ids=np.asarray(ids, dtype=np.str_))
            file.close()
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def load_embeddings(path: str | os.PathLike[str]) -> tuple[list[str], np.ndarray]:
    """Ids and float32 embeddings (n, d) of an .npz that `save_embeddings` wrote; never unpickles.

    Raises `ConfigError` for another suffix, `DataError` when the file is missing, is not ours, or disagrees with
    itself about n.
    """
    _require_npz(path)
    try:
        with np.load(path, allow_pickle=False) as arrays:
            ids, embeddings = arrays["ids"].tolist(), np.asarray(arrays["embeddings"], dtype=np.float32)
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file") from error
    except Exception as error:  # a damaged zip raises BadZipFile, zlib.error, EOFError, ValueError or KeyError
        raise DataError(f"{path}: not a file of embeddings that contaccum wrote ({error})") from error
    if embeddings.ndim != 2 or len(ids) != len(embeddings):
        raise DataError(f"{path}: {len(ids)} ids for embeddings of shape {embeddings.shape}")
    return ids, embeddings


def _require_npz(name: str | os.PathLike[str]) -> None:
    if Path(name).suffix != ".npz":
        raise ConfigError(
            f"{name}: embeddings are kept in .npz files, never in pickles, which run code when they are read; with "
            "BEIR's encode_and_retrieve pass query_filename='queries.npz', corpus_filename='corpus.*.npz'"
        )


def _holds(path: Path, ids: list[str]) -> bool:
    """Whether the file is there; raises `DataError` when it is, but for other ids."""
    if not path.exists():
        return False
    if load_embeddings(path)[0] != ids:
        raise DataError(f"{path}: holds embeddings of other texts; pass overwrite=True or another folder")
    logger.info("%s is there already and is kept", path)
    return True
