"""What there is before training: embeddings of the corpus, and the scores of BM25 and of the model as it is."""

from __future__ import annotations

import time
from itertools import islice
from pathlib import Path

from contaccum.data.beir import BeirDataset, load_beir_folder
from contaccum.data.records import RecordReport
from contaccum.data.split import CORPUS_FILE, Split
from contaccum.data.split_files import write_part
from contaccum.encoders.dual_encoder import DualEncoder
from contaccum.errors import ConfigError
from contaccum.evaluation.evaluator import RetrievalEvaluator
from contaccum.evaluation.results import Run
from contaccum.files import atomic_folder, read_json, write_json
from contaccum.fitting.folder import FitFolder
from contaccum.retrieval.corpus import CorpusEncoder
from contaccum.retrieval.documents import StoreDocuments
from contaccum.retrieval.encode import encode_texts, read_texts
from contaccum.retrieval.store import EmbeddingStore
from contaccum.tuning.budget import Budget, format_duration
from contaccum.tuning.tune import Baselines

LARGEST_HAYSTACK = 2000
"""A larger haystack of dev is made smaller for trials, which encode all of it again."""

_POOL_DEPTH = 10  # results of BM25 and of the base model that stay in it; nDCG@10 reads no more
_SAMPLE = 64  # documents that the speed is measured on
_LARGEST_SHARE = 0.75  # of the budget, for encoding before and after the search
_ROWS_PER_SHARD = 2000  # a killed process loses one shard at most


def seconds_per_document(encoder: DualEncoder, folder: FitFolder, batch_size: int) -> float:
    """Return the time that encoding a document of the corpus takes, measured on a few."""
    documents = read_texts(folder.data / CORPUS_FILE, "document", RecordReport())
    texts = [document.passage for document in islice(documents, _SAMPLE)]
    encode_texts(encoder, texts[:4], "document", batch_size)  # the first batch sets things up
    started = time.perf_counter()
    encode_texts(encoder, texts, "document", batch_size)
    return (time.perf_counter() - started) / len(texts)


def require_time(budget: Budget, split: Split, seconds_of_one: float) -> None:
    """Raise `ConfigError` for a budget that encoding would use up, before it begins.

    The model as it is encodes the corpus, and the trained one the documents of test.
    """
    documents = split.documents["train"] + split.documents["test"]
    needed = documents * seconds_of_one
    if needed > _LARGEST_SHARE * budget.left():
        budget.save()
        enough = budget.used() + needed / _LARGEST_SHARE
        raise ConfigError(
            f"the budget of {format_duration(budget.seconds)} is too short: encoding {documents:,} documents takes "
            f"{format_duration(needed)} (give {format_duration(enough)} or more, or fewer documents)"
        )


def encode_corpus(
    encoder: DualEncoder, model_name: str, corpus: Path, store: Path, batch_size: int
) -> None:
    """Encode a corpus into a store; a store that is whole stays as it is."""
    corpus_encoder = CorpusEncoder(
        encoder, model_name, corpus, store, batch_size=batch_size, shard_size=_ROWS_PER_SHARD
    )
    corpus_encoder.encode()


def evaluator_of(data: Path, store: Path | None, batch_size: int) -> RetrievalEvaluator:
    """Return the evaluator of a BEIR folder's split ``test``.

    Args:
        store: of documents that the model need not encode again.
    """
    evaluator = RetrievalEvaluator(load_beir_folder(data, "test"), batch_size=batch_size)
    if store is not None:
        evaluator.documents = StoreDocuments(EmbeddingStore.open(store))
    return evaluator


def score_on_dev(encoder: DualEncoder, folder: FitFolder, batch_size: int) -> Baselines:
    """Score the model as it is and BM25, and write the dev set that trials are scored on.

    What an earlier start has found is read again.
    """
    if folder.baselines.is_file():
        return Baselines(**read_json(folder.baselines))
    evaluator = evaluator_of(folder.data / "dev", folder.store, batch_size)
    metric = evaluator.primary_metric
    base_run = evaluator.search(encoder)
    base = evaluator.score_run(base_run)[metric]
    query_scores = evaluator.query_scores
    bm25_run = evaluator.search_bm25()
    bm25 = evaluator.score_run(bm25_run)[metric]
    baselines = Baselines(base, query_scores, bm25)
    if len(evaluator.dataset.corpus) > LARGEST_HAYSTACK and not folder.dev_pool.exists():
        with atomic_folder(folder.dev_pool) as new_folder:
            kept = pool_documents(evaluator.dataset, [base_run, bm25_run])
            write_part(evaluator.dataset, kept, new_folder)
    write_json(folder.baselines, baselines._asdict())
    return baselines


def pool_documents(dataset: BeirDataset, runs: list[Run]) -> set[str]:
    """Return the ids of the judged documents, and of the best that each run found for each query.

    The model that made a run has the same nDCG@10 among them as among all documents.
    """
    kept: set[str] = set()
    for judged in dataset.qrels.values():
        kept.update(judged)
    for run in runs:
        for found in run.values():
            best = sorted(found, key=lambda name: -found[name])
            kept.update(best[:_POOL_DEPTH])
    return kept


def dev_folder(folder: FitFolder) -> Path:
    """Return the dev set that trials are scored on."""
    return folder.dev_pool if folder.dev_pool.is_dir() else folder.data / "dev"
