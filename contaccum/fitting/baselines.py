"""The steps before training: encoding of the corpus, and the scores of BM25 and the base model.

The base model is the model before training. Its document embeddings are written to a store once,
and every later search with the base model reads the store. A trial is a short training of the
search for settings. Trials are scored on a pool of the dev documents if there are many of them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from contaccum.data.beir import BeirDataset, load_beir_folder
from contaccum.data.split import Split, write_part
from contaccum.encoders.dual_encoder import DualEncoder
from contaccum.errors import ConfigError
from contaccum.evaluation.evaluator import RetrievalEvaluator
from contaccum.evaluation.results import Run
from contaccum.files import atomic_folder, read_json, write_json
from contaccum.fitting.folder import FitFolder
from contaccum.retrieval.documents import StoreDocuments
from contaccum.retrieval.encode import CorpusEncoder, encode_texts
from contaccum.retrieval.store import SHARD_FILE, EmbeddingStore
from contaccum.tuning.baselines import Baselines
from contaccum.tuning.budget import Budget, format_duration, suggest_budget

MAX_TRIAL_DOCUMENTS = 2000
"""A dev corpus with more documents is reduced to a pool, because each trial encodes it again."""

_NUM_MEASURED_DOCUMENTS = 64  # documents on which the time of encoding is measured
_POOL_DEPTH = 10  # top documents of each query in a run; nDCG@10 depends on no others
_WARM_UP_DOCUMENTS = 4
_MAX_SHARE_OF_BUDGET = 0.75  # of the time left, for encoding before and after the search
_ROWS_PER_SHARD = 2000  # a killed process loses at most one shard


class TimeEstimates(NamedTuple):
    """Seconds to reserve for the stages after the search.

    Attributes:
        corpus: for encoding the corpus of another fold.
        test: for the test of one fold.
        guard: for the scores on the guard sets.
    """

    corpus: float
    test: float
    guard: float

    def sum_reserve(self, num_folds: int) -> float:
        """Return the seconds to reserve for everything but training, if so many folds are used."""
        return self.test + (num_folds - 1) * (self.corpus + self.test) + self.guard


def measure_seconds_per_document(
    encoder: DualEncoder, documents: Iterable[str], num_documents: int, batch_size: int
) -> float:
    """Return the seconds to encode one document, as a mean over a sample of a corpus.

    The sample is evenly spread, because training passages come first, and may be shorter than the
    others.

    Args:
        num_documents: number of documents in the corpus.
    """
    step = max(1, num_documents // _NUM_MEASURED_DOCUMENTS)
    sample = list(islice(documents, 0, step * _NUM_MEASURED_DOCUMENTS, step))
    # The first batch is slower than all others, because it allocates memory.
    encode_texts(encoder, sample[:_WARM_UP_DOCUMENTS], "document", batch_size)
    started = time.perf_counter()
    encode_texts(encoder, sample, "document", batch_size)
    return (time.perf_counter() - started) / len(sample)


def estimate_trial_documents(split: Split) -> int:
    """Return the number of documents of the dev set for trials, or an upper estimate of it.

    A large dev set is reduced to the pool of `pool_documents`: for each query its judged documents
    (about one) and the top documents of BM25 and of the base model.
    """
    num_documents = split.documents["dev"]
    if num_documents <= MAX_TRIAL_DOCUMENTS:
        return num_documents
    documents_per_query = 2 * _POOL_DEPTH + 1
    return min(num_documents, split.dev * documents_per_query)


def count_encoded_documents(store: Path) -> int:
    """Return the number of documents in a store that may be unfinished, or may not exist yet."""
    return sum(read_json(file)["rows"] for file in store.glob(f"*/{SHARD_FILE}"))


def require_encoding_time(
    budget: Budget,
    num_documents: int,
    seconds_per_document: float,
    guard_seconds: float = 0.0,
) -> None:
    """Check before the encoding that the encoding of all documents leaves time for the search.

    Args:
        num_documents: number of documents that the base model and the trained model encode.
        guard_seconds: the seconds that the scores on the guard sets take.

    Raises:
        ConfigError: if the budget is too short.
    """
    needed = num_documents * seconds_per_document + guard_seconds
    if needed > _MAX_SHARE_OF_BUDGET * budget.left():
        budget.save()
        documents = f"{num_documents:,} documents"
        if guard_seconds > 0:
            documents += " and the guard sets"
        sufficient = budget.used() + needed / _MAX_SHARE_OF_BUDGET
        raise ConfigError(
            f"the budget of {format_duration(budget.seconds)} is too short: encoding "
            f"{documents} takes {format_duration(needed)} (give --budget "
            f"{suggest_budget(sufficient)} or more, or fewer documents)"
        )


def encode_corpus(
    encoder: DualEncoder, model_name: str, corpus: Path, store: Path, batch_size: int
) -> None:
    """Write the embeddings of a corpus to a store; a complete store is not changed."""
    corpus_encoder = CorpusEncoder(
        encoder, model_name, corpus, store, batch_size=batch_size, shard_size=_ROWS_PER_SHARD
    )
    corpus_encoder.encode()


def load_evaluator(data: Path, store: Path, batch_size: int) -> RetrievalEvaluator:
    """Return the evaluator of the split ``test`` of a BEIR folder.

    Args:
        store: a store with the embeddings of the documents; they are not encoded again.
    """
    evaluator = RetrievalEvaluator(load_beir_folder(data, "test"), batch_size=batch_size)
    evaluator.documents = StoreDocuments(EmbeddingStore.open(store))
    return evaluator


def score_on_dev(encoder: DualEncoder, folder: FitFolder, batch_size: int) -> Baselines:
    """Score the base model and BM25 on dev, and write the smaller dev set for trials.

    If an earlier start of the command has written the scores, they are read instead.
    """
    if folder.baselines_file.is_file():
        return Baselines(**read_json(folder.baselines_file))
    evaluator = load_evaluator(folder.data / "dev", folder.store, batch_size)
    metric = evaluator.primary_metric
    base_run = evaluator.search(encoder)
    base = evaluator.score_run(base_run)[metric]
    query_scores = evaluator.query_scores
    bm25_run = evaluator.search_bm25()
    bm25 = evaluator.score_run(bm25_run)[metric]
    baselines = Baselines(base, query_scores, bm25)
    is_large = len(evaluator.dataset.corpus) > MAX_TRIAL_DOCUMENTS
    if is_large and not folder.dev_pool.exists():
        with atomic_folder(folder.dev_pool) as new_folder:
            pool = pool_documents(evaluator.dataset, [base_run, bm25_run])
            write_part(evaluator.dataset, pool, new_folder)
    write_json(folder.baselines_file, baselines._asdict())
    return baselines


def pool_documents(dataset: BeirDataset, runs: list[Run]) -> set[str]:
    """Return the ids of the judged documents and of the top documents of each run and query.

    The system that made a run has the same nDCG@10 on this pool as on the whole corpus.

    Args:
        runs: {query id: {document id: score}} for each system.
    """
    pool: set[str] = set()
    for judgements in dataset.qrels.values():
        pool.update(judgements)
    for run in runs:
        for scores in run.values():
            ranking = sorted(scores, key=lambda document_id: -scores[document_id])
            pool.update(ranking[:_POOL_DEPTH])
    return pool


def get_trial_dev_set(folder: FitFolder) -> Path:
    """Return the folder of the dev set on which trials are scored: the pool if there is one."""
    if folder.dev_pool.is_dir():
        return folder.dev_pool
    return folder.data / "dev"
