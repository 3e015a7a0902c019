"""QuerySideLoss: train the query tower against a corpus whose embeddings already exist.

A tower is the encoder of one side, queries or documents. A store is a folder with the embeddings of
a corpus, one row per document; they are read from it and never change. So a training pair costs the
encoding of one query; all documents of the corpus are its negatives; and no embedding is out of
date. This is known as query-side fine-tuning (Lee et al. 2021, DensePhrases, arXiv 2012.12624). The
formula is in `contaccum.bank.full_softmax`.

`QuerySideCollator` makes the input of the loss: the tokenised queries, labelled with the rows of
their positives in the store.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.data_collator import SentenceTransformerDataCollator
from sentence_transformers.util import truncate_embeddings
from torch import Tensor
from torch.nn.functional import normalize

from contaccum.bank.full_softmax import compute_full_softmax_loss
from contaccum.data.sampling import LABELS, first_texts, get_samplings, text_ids
from contaccum.distributed import rank, world_size
from contaccum.encoders.dual_encoder import train_query_tower_alone
from contaccum.encoders.settings import get_prompt
from contaccum.errors import ConfigError
from contaccum.files import AnyPath
from contaccum.losses.model_loss import ModelLoss
from contaccum.retrieval.documents import PositiveRows, StoreDocuments
from contaccum.retrieval.encode import check_store_fits
from contaccum.retrieval.products import multiply
from contaccum.retrieval.store import EmbeddingStore
from contaccum.settings import DEFAULT_TEMPERATURE

logger = logging.getLogger(__name__)

_ROWS_PER_CHUNK = 10_000
"""Number of rows of a data set whose texts are hashed at once."""

CITATION = """@inproceedings{lee2021densephrases,
author={Jinhyuk Lee and Mujeen Sung and Jaewoo Kang and Danqi Chen}, year={2021},
title={Learning Dense Representations of Phrases at Scale},
booktitle={Proceedings of ACL-IJCNLP}, eprint={2012.12624}}"""


class QuerySideLoss(ModelLoss):
    """Cross-entropy of queries over all documents of a store.

    If the model encodes queries and documents with the same weights, it is changed in place: it
    gets a separate query tower, which is a copy of the encoder and is trained. The weights of the
    document tower are frozen, so the store stays valid. Make the loss before the trainer, because
    the trainer collects the weights to train. A model that is assigned to ``model`` later is
    checked and changed in the same way.

    Args:
        model: the SentenceTransformer whose document tower encoded the store. To train an adapter
            instead of a copy, call `contaccum.encoders.dual_encoder.add_query_adapter` first.
        store: an `EmbeddingStore`, the path of its folder (``contaccum encode`` writes one)
            or `StoreDocuments`.
        scale: 1 / temperature. None: 20 for a store with cosine similarity, 1 for dot product. The
            similarity function is that of the store.

    Raises:
        ConfigError (a ValueError): for a store that was encoded with another model, prompt or
            similarity.
        DataError: for a folder that contains no complete store.

    Inputs:
        One column, the tokenised queries; labels: int64 (n, p), for each query the rows of its
        known positives in the store, at most p. The positive of the training pair comes first; the
        others are not used as negatives. Shorter lists are padded with
        `contaccum.bank.full_softmax.NO_ROW`. `QuerySideCollator` makes both from (anchor, positive,
        ...) rows. Documents are not tokenised.

    Relations:
        - With several ranks of ``torch.distributed``, each rank reads its part of the blocks of the
          store, and the loss is that of the queries of all ranks.
        - With a store in float16, the loss uses the rounded embeddings of the store.

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
        scale: float | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(store, (EmbeddingStore, StoreDocuments)):
            store = EmbeddingStore.open(store)
        if isinstance(store, EmbeddingStore):
            store = StoreDocuments(store)
        self.documents: StoreDocuments = store
        self.scale = scale or 1.0 / DEFAULT_TEMPERATURE[store.similarity]
        self.model = model

    def start_with_model(self, model: SentenceTransformer) -> None:
        """Check that the model fits the store, and freeze its document tower."""
        check_store_fits(model, self.documents.store)
        train_query_tower_alone(model)

    def forward(
        self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None
    ) -> Tensor:
        """Compute the loss of a micro-batch of tokenised queries.

        Args:
            sentence_features: the features of one column, the queries.
            labels: int64 (n, p); see "Inputs" of the class.
        """
        features = list(sentence_features)
        if labels is None or labels.is_floating_point() or labels.ndim != 2 or len(features) != 1:
            raise ValueError(
                "QuerySideLoss needs one column of queries, and store rows of their positives as "
                "labels: pass data_collator=QuerySideCollator.of_dataset(...) to the trainer"
            )
        queries = self.model(features[0])["sentence_embedding"]
        queries = truncate_embeddings(queries, self.documents.dimension)  # a model's truncate_dim
        return self.compute_loss_from_embeddings(queries, labels)

    def compute_loss_from_embeddings(self, queries: Tensor, labels: Tensor) -> Tensor:
        """Compute the loss of embedded queries, (n, d); ``labels`` are int64 (n, p).

        Raises:
            ConfigError: for another embedding size than that of the documents.
        """
        documents = self.documents
        if queries.shape[1] != documents.dimension:
            raise ConfigError(
                f"the queries have {queries.shape[1]} dimensions, the documents of the store "
                f"{documents.dimension}: use QuerySideLoss without MatryoshkaLoss"
            )
        if documents.similarity == "cos":
            dtype = torch.promote_types(queries.dtype, torch.float32)  # as the loss computes
            queries = normalize(queries.to(dtype), dim=-1)
        positives = documents.get_embeddings(labels[:, 0])  # (n, d), of the training pairs
        blocks = documents.blocks(queries.device, rank(), world_size())
        temperature = 1.0 / self.scale
        is_partitioned = world_size() > 1
        return compute_full_softmax_loss(
            queries, positives, labels, blocks, temperature, is_partitioned, multiply
        )

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
    """Collator that tokenises queries and labels them with the store rows of their positives."""

    positives: PositiveRows = field(kw_only=True)

    @classmethod
    def of_dataset(
        cls, model: SentenceTransformer, documents: StoreDocuments, dataset: Any
    ) -> QuerySideCollator:
        """Make the collator for a data set whose first two columns are queries and positives."""
        text_columns = [name for name in dataset.column_names if name not in LABELS]
        query_column = text_columns[0]
        prompt = get_prompt(model, "query")
        return cls(
            preprocess_fn=model.preprocess,
            router_mapping={query_column: "query"},
            prompts={query_column: prompt} if prompt else {},
            positives=collect_positives(documents, [dataset]),
        )

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, Any]:
        """Collate (anchor, positive, ...) rows to tokenised queries and labels.

        Raises:
            DataError: for a positive that is missing in the store.
        """
        columns = [name for name in features[0] if name not in LABELS]
        query_column, positive_column = columns[:2]
        queries = [str(row[query_column]).strip() for row in features]
        positives = [str(row[positive_column]).strip() for row in features]
        labels = self.positives.label_batch(queries, positives)
        query_rows = []
        for row, label in zip(features, labels, strict=True):
            query_row = {query_column: row[query_column], "label": label}
            if "dataset_name" in row:
                query_row["dataset_name"] = row["dataset_name"]
            query_rows.append(query_row)
        return super().__call__(query_rows)


def collect_positives(documents: StoreDocuments, datasets: Sequence[Any]) -> PositiveRows:
    """Collect the store rows of all known positives of the queries in the data sets.

    A warning names their columns of hard negatives, which query-side training does not use.
    """
    unused: dict[str, None] = {}  # used as a set that keeps the order of the columns
    for dataset in datasets:
        text_columns = [name for name in dataset.column_names or [] if name not in LABELS]
        unused |= dict.fromkeys(text_columns[2:])
    if unused:
        logger.warning(
            f"query side: the columns {', '.join(unused)} are not used, because all other "
            "documents of the store are negatives"
        )
    # Hashes of query and positive of every pair; `concatenate` refuses an empty list.
    hashes = [np.empty((0, 2), dtype=np.int64)]
    for dataset in datasets:
        rows = iterate_pairs(dataset)
        while chunk := list(islice(rows, _ROWS_PER_CHUNK)):
            # A row may be trained with another of its positives in each epoch: all are included.
            num_positives = [len(positives) for _, positives in chunk]
            query_ids = np.repeat(text_ids(query for query, _ in chunk), num_positives)
            positive_ids = text_ids(text for _, positives in chunk for text in positives)
            hashes.append(np.column_stack([query_ids, positive_ids]))  # (pairs of the chunk, 2)
    query_ids, positive_ids = np.concatenate(hashes).T
    return PositiveRows(documents, query_ids, positive_ids)


def iterate_pairs(dataset: Any) -> Iterator[tuple[str, list[str]]]:
    """Yield the query of each row, in order, with its positives in all epochs.

    White space at their ends is removed, as from the texts of a store.
    """
    samplings = get_samplings(dataset)
    if samplings:
        # A data set that is sampled by epoch stores row numbers in the column "query", and a
        # transform turns them into texts. `with_format(None)` switches the transform off.
        for batch in dataset.with_format(None).iter(1000):
            yield from samplings[0].pairs(batch["query"])
        return
    for texts in first_texts(dataset):
        queries, positives = list(texts.values())[:2]
        for query, positive in zip(queries, positives, strict=True):
            yield str(query).strip(), [str(positive).strip()]
