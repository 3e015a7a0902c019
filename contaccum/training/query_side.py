"""Query-side training in a run: the store of documents, and the data that fit it.

The store is made before the run (``passage_store``), or from ``corpus`` when the run starts. What
the loss does with it is in `contaccum.losses.query_side`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from datasets import IterableDataset
from sentence_transformers import SentenceTransformer

from contaccum.data.records import quoted
from contaccum.data.sampling import text_ids
from contaccum.distributed import rank
from contaccum.errors import ConfigError, DataError
from contaccum.evaluation.evaluator import RetrievalEvaluator
from contaccum.losses.query_side import (
    QuerySideCollator,
    QuerySideLoss,
    collect_positives,
    iterate_pairs,
)
from contaccum.retrieval.corpus import CorpusEncoder, require_texts
from contaccum.retrieval.documents import StoreDocuments
from contaccum.retrieval.encode import encode_texts
from contaccum.retrieval.store import EmbeddingStore
from contaccum.training.arguments import ContAccumTrainingArguments
from contaccum.training.train_data import parts_of

logger = logging.getLogger(__name__)

STORE_FOLDER = "passage_store"
"""Folder in ``output_dir`` of the store that is made from ``corpus``."""

USELESS_SHARE_OF_BM25 = 0.5
"""Below this share of BM25's score, the base model's documents teach a query tower too little."""

_SHOWN = 3  # missing passages in a message


class QuerySide:
    """Loss, collator and data of a run with ``method=query_side``.

    Args:
        args: name the store or the corpus.
        model: gets a query tower of its own, and its document tower is frozen.
        train_dataset: the training set, or several by name.
        eval_dataset: pairs whose loss is computed while training, likewise.

    Attributes:
        dataset, eval_dataset: the data, without the rows that ``missing=drop`` leaves out.
        documents: of the store, with the passages that ``missing=add`` adds.
        loss: a `QuerySideLoss`.
        collator: for the trainer.

    Raises:
        ConfigError: for a store that this model did not write.
        DataError: for a store that is not whole, or that lacks passages of the data with
            ``missing=stop``.
    """

    def __init__(
        self,
        args: ContAccumTrainingArguments,
        model: SentenceTransformer,
        train_dataset: Any,
        eval_dataset: Any = None,
    ) -> None:
        store = _open_store(args, model)
        _check_similarity(args, store)
        self.documents = StoreDocuments(store)
        temperature = args.loss_settings(self.documents.similarity)["temperature"]
        self.loss = QuerySideLoss(model, self.documents, scale=1.0 / temperature)
        self.dataset = _settle_missing(self.documents, model, train_dataset, args.missing)
        self.eval_dataset = _settle_missing(self.documents, model, eval_dataset, args.missing)
        datasets = [part for part in parts_of(self.dataset) if part is not None]
        datasets += [part for part in parts_of(self.eval_dataset) if part is not None]
        roles: Any = args.router_mapping  # a dictionary by now, not JSON
        self.collator = QuerySideCollator(
            preprocess_fn=model.preprocess,
            router_mapping=roles,
            prompts=args.prompts,
            positives=collect_positives(self.documents, datasets),
        )
        if rank() == 0:
            logger.info(
                f"query side: every query is contrasted with all {len(self.documents):,} "
                f"documents of {store.folder}, including those that only dev or test queries need"
            )


def require_sources(args: ContAccumTrainingArguments) -> None:
    """Refuse a store or a corpus that cannot be read, before a model is loaded.

    Raises:
        ConfigError: for a store that is compared by another similarity than the arguments name.
        DataError: for a store that is not whole, or a corpus that cannot be read.
    """
    if args.passage_store is not None:
        _check_similarity(args, EmbeddingStore.open(args.passage_store))
    if args.corpus is not None:
        require_texts(Path(args.corpus), "document")


def _check_similarity(args: ContAccumTrainingArguments, store: EmbeddingStore) -> None:
    if args.similarity not in (None, store.similarity):
        raise ConfigError(
            f"similarity={args.similarity}, but the documents of {store.folder} are compared by "
            f"{store.similarity}: drop similarity"
        )


def _open_store(args: ContAccumTrainingArguments, model: SentenceTransformer) -> EmbeddingStore:
    """Open the store of a run; encode its corpus first if it has one.

    What an earlier start of the same run has encoded is used again.
    """
    if args.passage_store is not None:
        return EmbeddingStore.open(args.passage_store)
    folder = Path(str(args.output_dir)) / STORE_FOLDER
    with args.main_process_first(desc="encoding the corpus"):
        if args.process_index == 0:
            base_model = getattr(model.model_card_data, "base_model", None)
            encoder = CorpusEncoder(
                model,
                str(base_model or "the model of this run"),
                Path(str(args.corpus)),
                folder,
                batch_size=args.per_device_eval_batch_size,
            )
            encoder.encode(show_progress=not args.disable_tqdm)
    return EmbeddingStore.open(folder)


def _settle_missing(
    documents: StoreDocuments, model: SentenceTransformer, dataset: Any, missing: str
) -> Any:
    """Do what ``missing`` says about positives that the documents lack.

    Returns:
        The data set, of which ``drop`` leaves out rows.

    Raises:
        DataError: with ``stop``, or if no row of a data set would be left.
    """
    if isinstance(dataset, dict):
        settled = {}
        for name, part in dataset.items():
            settled[name] = _settle_missing(documents, model, part, missing)
        return type(dataset)(settled)
    if dataset is None or isinstance(dataset, IterableDataset):
        return dataset  # of a stream, the collator refuses a row that has such a positive
    missing_texts: dict[str, None] = {}
    whole_rows = []
    for row, (_, positives) in enumerate(iterate_pairs(dataset)):
        has_document = documents.contains(text_ids(positives))
        if has_document.all():
            whole_rows.append(row)
        for index in np.flatnonzero(~has_document):
            missing_texts[positives[index]] = None
    if not missing_texts:
        return dataset
    folder = documents.store.folder
    shown = ", ".join(quoted(text) for text in list(missing_texts)[:_SHOWN])
    fault = f"{folder}: lacks {len(missing_texts):,} positives of the data (such as {shown})"
    if missing == "stop":
        raise DataError(
            f"{fault}: set missing=add to encode them as well or missing=drop to leave out the "
            "rows that may use them, or encode a corpus that has them"
        )
    if missing == "add":
        logger.warning(f"{fault}: they are encoded and added")
        texts = list(missing_texts)
        documents.add(texts, encode_texts(model, texts, "document"))
        return dataset
    num_dropped = len(dataset) - len(whole_rows)
    if not whole_rows:
        raise DataError(f"{fault}: no row is left without them")
    logger.warning(f"{fault}: {num_dropped:,} of {len(dataset):,} rows are left out")
    return dataset.select(whole_rows)


def warn_of_useless_documents(evaluator: Any, model: SentenceTransformer) -> None:
    """Warn if the model as it is scores far below BM25 on the evaluation data.

    Its document embeddings never change. If they are no better than those of a fresh encoder, no
    query tower can learn to find them.
    """
    if not isinstance(evaluator, RetrievalEvaluator):
        return
    scores: Mapping[str, float] = evaluator.score(model)
    bm25_scores = evaluator.score_bm25()
    metric = evaluator.primary_metric
    score = scores[metric]
    bm25_score = bm25_scores[metric]
    figures = f"{metric} {score:.3f}, BM25 {bm25_score:.3f}"
    if score < USELESS_SHARE_OF_BM25 * bm25_score:
        logger.warning(
            f"query side: before training, {figures} on the evaluation data: its "
            "documents teach a query tower too little. Train both towers first, with "
            "method=contaccum"
        )
    else:
        logger.info(f"query side: before training, {figures} on the evaluation data")
