"""QuerySideLoss: train the query tower against every document of an index that is encoded already.

The documents never change: they are read from a store, and not encoded. So a training pair costs
one query, and all documents of the corpus are its negatives, without drift. This is known as
query-side fine-tuning (Lee et al. 2021, DensePhrases, arXiv 2012.12624). The maths is in
`contaccum.bank.full_softmax`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.data_collator import (
    SentenceTransformerDataCollator,
)
from torch import Tensor, nn
from torch.nn.functional import normalize

from contaccum.bank.full_softmax import full_softmax_loss
from contaccum.data.sampling import LABELS, first_texts, samplings_of, text_ids
from contaccum.distributed import rank, world_size
from contaccum.encoders.query_tower import train_query_tower_alone
from contaccum.errors import ConfigError
from contaccum.files import AnyPath
from contaccum.retrieval.documents import PositiveRows, StoreDocuments
from contaccum.retrieval.encode import get_metric, model_fingerprint, tokenisation_fingerprint
from contaccum.retrieval.store import EmbeddingStore

logger = logging.getLogger(__name__)

PASSES_PER_MICRO_STEP = 3
"""A backward pass costs about two forward passes, so a micro-step costs about three."""

_ROWS_AT_ONCE = 10_000

CITATION = """@inproceedings{lee2021densephrases,
author={Jinhyuk Lee and Mujeen Sung and Jaewoo Kang and Danqi Chen}, year={2021},
title={Learning Dense Representations of Phrases at Scale},
booktitle={Proceedings of ACL-IJCNLP}, eprint={2012.12624}}"""


class QuerySideLoss(nn.Module):
    """Cross-entropy of queries over all documents of a store.

    A tied model gets a query tower of its own, in place: a copy of the model, which is trained. The
    weights of the document tower are frozen and never change, so the store stays valid. Make the
    loss before the trainer, which collects the weights to train.

    Args:
        model: a SentenceTransformer, whose document tower encoded the store. For an adapter in
            place of the copy, call `contaccum.encoders.query_tower.add_query_adapter` first.
        store: an `EmbeddingStore`, its folder (``contaccum encode`` writes one) or
            `StoreDocuments`.
        scale: 1 / temperature. Similarities are those that the store's model compares by.

    Raises:
        ConfigError (a ValueError): for a store of another model, prompt or similarity.
        DataError: for a folder that holds no whole store.

    Inputs:
        One column, the tokenised queries; labels: int64 (n, p), for each query the rows of its
        positives in the store, the positive of this pair first, filled up with `NO_ROW`.
        `QuerySideCollator` makes both of (anchor, positive, ...) rows. Documents are not tokenised.

    Relations:
        - With ranks of ``torch.distributed``, each reads its share of the blocks of the store, and
          the loss is that of the queries of all ranks.
        - A store in float16 or int8 gives the loss over the embeddings that it holds.

    Example:
        ```python
        loss = QuerySideLoss(model, "stores/mine")
        trainer = SentenceTransformerTrainer(
            model=model,
            args=args,
            train_dataset=train_dataset,
            loss=loss,
            data_collator=QuerySideCollator.of_dataset(model, loss.documents, train_dataset),
        )
        trainer.train()
        ```
    """

    def __init__(
        self,
        model: SentenceTransformer,
        store: EmbeddingStore | StoreDocuments | AnyPath,
        scale: float = 20.0,
    ) -> None:
        super().__init__()
        if not scale > 0:
            raise ConfigError(f"scale must be a positive number, got {scale!r}")
        if not isinstance(store, (EmbeddingStore, StoreDocuments)):
            store = EmbeddingStore.open(store)
        if isinstance(store, EmbeddingStore):
            store = StoreDocuments(store)
        check_store_fits(model, store.store)
        self.documents: StoreDocuments = store
        train_query_tower_alone(model)
        self.model = model
        self.scale = scale
        self._num_micro_steps = 0

    def forward(
        self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None
    ) -> Tensor:
        """Compute the loss of a micro-batch of tokenised queries.

        Args:
            sentence_features: one column.
            labels: int64 (n, p); see the class.
        """
        features = list(sentence_features)
        if labels is None or labels.is_floating_point() or labels.ndim != 2 or len(features) != 1:
            raise ValueError(
                "QuerySideLoss needs the queries alone, and the rows of their positives as labels: "
                "pass data_collator=QuerySideCollator.of_dataset(...) to the trainer"
            )
        started = self._read_clock(labels)
        queries = self.model(features[0])["sentence_embedding"]
        encoded = self._read_clock(queries)
        loss = self.compute_loss_from_embeddings(queries, labels)
        scored = self._read_clock(loss)
        if self._is_measured:
            self._report_cost(len(queries), encoded - started, scored - encoded)
        self._num_micro_steps += torch.is_grad_enabled()
        return loss

    def compute_loss_from_embeddings(self, queries: Tensor, labels: Tensor) -> Tensor:
        """Compute the loss of embedded queries, (n, d); ``labels`` are int64 (n, p)."""
        documents = self.documents
        is_partitioned = world_size() > 1
        if documents.similarity == "cos":
            dtype = torch.promote_types(queries.dtype, torch.float32)
            queries = normalize(queries.to(dtype), dim=-1)
        positives = documents.get_embeddings(labels[:, 0])
        blocks = documents.blocks(queries.device, rank(), world_size())
        temperature = 1.0 / self.scale
        return full_softmax_loss(
            queries, positives, labels[:, 1:], blocks, temperature, is_partitioned
        )

    def _read_clock(self, tensor: Tensor) -> float:
        """Return the time; in the micro-step that is measured, wait for the GPU first."""
        if self._is_measured and tensor.device.type == "cuda":
            torch.cuda.synchronize(tensor.device)
        return time.perf_counter()

    @property
    def _is_measured(self) -> bool:
        """True in the second micro-step: the first one allocates, and reads the store's file."""
        return self._num_micro_steps == 1 and torch.is_grad_enabled()

    def _report_cost(self, num_queries: int, encoding: float, scoring: float) -> None:
        """Report what the encoder and the documents cost in a micro-step.

        Args:
            encoding: seconds of the encoder's forward pass.
            scoring: seconds of loss and gradient over all documents.
        """
        if rank() != 0:
            return
        encoder = PASSES_PER_MICRO_STEP * encoding
        figures = (
            f"a micro-step of {num_queries} queries takes some {1e3 * encoder:,.0f} ms in the "
            f"encoder and {1e3 * scoring:,.0f} ms over {len(self.documents):,} documents"
        )
        if scoring > encoder:
            logger.warning(
                f"query side: {figures}: most of the time goes into the documents. Use a GPU, a "
                "smaller corpus, or larger micro-batches"
            )
        else:
            logger.info(f"query side: {figures}")

    def get_config_dict(self) -> dict[str, Any]:
        """Return the settings that sentence-transformers writes into the model card."""
        return {
            "scale": self.scale,
            "similarity": self.documents.similarity,
            "documents": len(self.documents),
            "store": self.documents.fingerprint,
        }

    @property
    def citation(self) -> str:
        """The citation of query-side fine-tuning, for the model card."""
        return CITATION


@dataclass
class QuerySideCollator(SentenceTransformerDataCollator):
    """Tokenises the queries of (anchor, positive, ...) rows, and labels them with store rows.

    Attributes:
        positives: finds the rows of a query's positives.
    """

    positives: PositiveRows | None = None

    @classmethod
    def of_dataset(
        cls, model: SentenceTransformer, documents: StoreDocuments, dataset: Any
    ) -> QuerySideCollator:
        """Make the collator of a data set whose first columns are queries and positives."""
        column = next(name for name in dataset.column_names if name not in LABELS)
        prompts = {}
        prompt = model.prompts.get("query")
        if prompt:
            prompts[column] = prompt
        return cls(
            preprocess_fn=model.preprocess,
            router_mapping={column: "query"},
            prompts=prompts,
            positives=known_positives(documents, [dataset]),
        )

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, Any]:
        """Collate rows.

        Raises:
            DataError: for a positive that the store does not hold.
        """
        if self.positives is None:
            raise ConfigError("QuerySideCollator: make it with QuerySideCollator.of_dataset(...)")
        columns = [name for name in features[0] if name not in LABELS]
        query_column, positive_column = columns[:2]
        queries = [str(row[query_column]) for row in features]
        positives = [str(row[positive_column]) for row in features]
        labels = self.positives.label_batch(queries, positives)
        rows = []
        for row, label in zip(features, labels, strict=True):
            query_row = {query_column: row[query_column], "label": label}
            if "dataset_name" in row:
                query_row["dataset_name"] = row["dataset_name"]
            rows.append(query_row)
        return super().__call__(rows)


def known_positives(documents: StoreDocuments, datasets: Sequence[Any]) -> PositiveRows:
    """Return the rows of all known positives of the queries in some data sets."""
    pairs = [pair_ids(dataset) for dataset in datasets]
    ids = np.concatenate(pairs) if pairs else np.empty((0, 2), dtype=np.int64)
    return PositiveRows(documents, ids[:, 0], ids[:, 1])


def pair_ids(dataset: Any) -> np.ndarray:
    """Return hashes of query and positive for every pair of a data set, int64 (p, 2).

    They include the pairs that a row may have in another epoch. Of a stream it returns none, so
    a query's other positives count as negatives there.
    """
    parts = [np.empty((0, 2), dtype=np.int64)]
    if not hasattr(dataset, "__len__"):
        return parts[0]
    pairs = pairs_of_rows(dataset)
    while rows := list(islice(pairs, _ROWS_AT_ONCE)):
        counts = [len(positives) for _, positives in rows]
        query_ids = np.repeat(text_ids(query for query, _ in rows), counts)
        positive_ids = text_ids(text for _, positives in rows for text in positives)
        parts.append(np.column_stack([query_ids, positive_ids]))
    return np.concatenate(parts)


def pairs_of_rows(dataset: Any) -> Iterator[tuple[str, list[str]]]:
    """Yield the query of each row, in order, and the positives that it may have in any epoch."""
    samplings = samplings_of(dataset)
    if samplings:
        for batch in dataset.with_format(None).iter(1000):
            for pair in samplings[0].pairs(batch["query"]):  # a column of row numbers
                yield pair["query"], pair["positive"]
        return
    for texts in first_texts(dataset):
        queries, positives = list(texts.values())[:2]
        for query, positive in zip(queries, positives, strict=True):
            yield str(query), [str(positive)]


def check_store_fits(model: SentenceTransformer, store: EmbeddingStore) -> None:
    """Refuse a store that this model's document tower did not write.

    Raises:
        ConfigError: the message names what differs.
    """
    about = store.metadata
    if about["kind"] != "document":
        raise ConfigError(f"{store.folder}: holds queries; encode documents (--kind document)")
    if store.dtype == "binary":
        raise ConfigError(f"{store.folder}: is binary, too coarse to train on; encode in int8")
    remedy = "encode the corpus with this model, or train the model that wrote the store"
    if about["model"] != model_fingerprint(model, "document"):
        name = about.get("model_name", "of no known name")
        raise ConfigError(f"{store.folder}: was encoded by another model, {name}: {remedy}")
    if about["tokenisation"] != tokenisation_fingerprint(model, "document"):
        raise ConfigError(
            f"{store.folder}: was encoded with another prompt, length or pooling of documents: "
            f"{remedy}"
        )
    similarity = get_metric(model)
    if about["similarity"] != similarity:
        raise ConfigError(
            f"{store.folder}: is compared by {about['similarity']}, this model by {similarity}: "
            f"{remedy}"
        )
