"""Setup of query-side training: the store of document embeddings, the loss and the collator.

The store exists before the run (``passage_store``), or the run first encodes ``corpus`` into one.
The loss itself is in `contaccum.losses.query_side`.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import PartialState
from sentence_transformers import SentenceTransformer

from contaccum.data.sampling import text_ids
from contaccum.distributed import rank
from contaccum.encoders.dual_encoder import SIMILARITY_NAMES
from contaccum.errors import DataError, quoted
from contaccum.losses.query_side import (
    QuerySideCollator,
    QuerySideLoss,
    collect_positives,
    iterate_pairs,
)
from contaccum.retrieval.documents import StoreDocuments
from contaccum.retrieval.encode import CorpusEncoder, encode_texts
from contaccum.retrieval.store import EmbeddingStore
from contaccum.training.arguments import ContAccumTrainingArguments
from contaccum.training.checkpoint import parse_resume_request
from contaccum.training.losses import list_parts

logger = logging.getLogger(__name__)

STORE_FOLDER = "passage_store"
"""Folder in ``output_dir`` for the store that is encoded from ``corpus``."""

USELESS_SHARE_OF_BM25 = 0.5
"""A base model below this share of BM25's score has document embeddings that teach nothing."""

_MAX_TEXTS_SHOWN = 3  # missing passages in a message


def set_up_query_side(
    args: ContAccumTrainingArguments,
    model: SentenceTransformer,
    train_dataset: Any,
    eval_dataset: Any,
) -> tuple[QuerySideLoss, QuerySideCollator]:
    """Return loss and collator of ``method=query_side``; the model gets a query tower to train.

    Raises:
        UserError: for a store of another model, an incomplete one, or, with ``missing=stop``, one
            that lacks passages of the data.
    """
    if args.similarity is not None:
        model.similarity_fn_name = SIMILARITY_NAMES[args.similarity]
    documents = StoreDocuments(_open_store(args, model))
    scale = 1.0 / args.get_temperature(documents.similarity)
    loss = QuerySideLoss(model, documents, scale=scale)
    parts = list_parts(train_dataset) + list_parts(eval_dataset)
    datasets = [part for part in parts if part is not None]
    _handle_missing(documents, model, datasets, args.missing)
    roles: Any = args.router_mapping  # a dictionary; its declared type also allows JSON text
    collator = QuerySideCollator(
        preprocess_fn=model.preprocess,
        router_mapping=roles,
        prompts=args.prompts,
        positives=collect_positives(documents, datasets),
    )
    if rank() == 0:
        logger.info(
            f"query side: every query is contrasted with all {len(documents):,} documents of "
            f"{documents.store.folder}, including documents that are relevant only to dev or test "
            "queries"
        )
    return loss, collator


def _open_store(args: ContAccumTrainingArguments, model: SentenceTransformer) -> EmbeddingStore:
    """Open the store of a run; with ``args.corpus``, encode the corpus into a store first.

    If an earlier start of the same run has encoded documents already, they are not encoded again.
    """
    if args.passage_store is not None:
        return EmbeddingStore.open(args.passage_store)
    folder = Path(str(args.output_dir)) / STORE_FOLDER
    is_new_run = parse_resume_request(args.resume_from_checkpoint) is None
    # The first process creates the store. Then all of them encode, each its own shards.
    with args.main_process_first(local=False, desc="creating the store"):
        encoder = CorpusEncoder(
            model,
            str(getattr(model.model_card_data, "base_model", None) or "the model of this run"),
            Path(str(args.corpus)),
            folder,
            batch_size=args.per_device_eval_batch_size,
            overwrite=args.overwrite_output_dir and is_new_run and args.process_index == 0,
        )
    show_progress = not args.disable_tqdm and args.process_index == 0
    encoder.encode(args.process_index, args.world_size, show_progress)
    PartialState().wait_for_everyone()
    return EmbeddingStore.open(folder)


def _handle_missing(
    documents: StoreDocuments, model: SentenceTransformer, datasets: list[Any], missing: str
) -> None:
    """Encode and add the positives that the documents lack; with "stop", raise `DataError`."""
    missing_texts: dict[str, None] = {}  # used as a set that keeps the order of the data
    for dataset in datasets:
        for _, positives in iterate_pairs(dataset):
            for index in np.flatnonzero(~documents.contains(text_ids(positives))):
                missing_texts[positives[index]] = None
    if not missing_texts:
        return
    texts = list(missing_texts)
    shown = ", ".join(map(quoted, texts[:_MAX_TEXTS_SHOWN]))
    folder = documents.store.folder
    problem = f"{folder}: lacks {len(texts):,} positives of the data (such as {shown})"
    if missing == "stop":
        raise DataError(
            f"{problem}. Set missing=add to encode and add them, or encode a corpus that contains "
            "them"
        )
    logger.warning(f"{problem}: they are encoded and added for this run")
    documents.add(texts, encode_texts(model, texts, "document"))
