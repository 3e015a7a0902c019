from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.optim.optimizer import register_optimizer_step_post_hook

from sentence_transformers.base.losses.gradcache import _create_minibatch
from sentence_transformers.base.losses.merged_forward import embed_columns
from sentence_transformers.sentence_transformer.model import SentenceTransformer
from sentence_transformers.util import all_gather, all_gather_with_grad, cos_sim, dot_score

# The drift probe: this number of texts per column is embedded again, at most once every PAIRS_PER_PROBE pairs.
# It needs no backward pass and takes about 2% of the training time.
NUM_PROBE_TEXTS = 8
PAIRS_PER_PROBE = 128
# Number of banked queries whose scores with all banked documents are in memory at the same time.
BANK_CHUNK_SIZE = 1024


class BankedMultipleNegativesRankingLoss(nn.Module):
    def __init__(
        self,
        model: SentenceTransformer,
        bank_size: int = 1024,
        scale: float = 20.0,
        similarity_fct: Callable[[Tensor, Tensor], Tensor] = cos_sim,
        gather_across_devices: bool = False,
        mask_duplicates: bool = True,
        drift_compensation: bool = True,
        max_drift: float | None = 0.08,
        max_age: int | None = None,
    ) -> None:
        """
        This loss adds thousands of negatives to small batches. It stores the embeddings of past queries and documents
        in two memory banks and contrasts each batch with them as well. It is made for gradient accumulation, which
        adds no in-batch negatives by itself.

        The rows of the score matrix are the queries of the batch, followed by the banked queries. The columns are the
        documents of the batch (positives and hard negatives), followed by the banked documents. The loss of a row is
        the softmax cross-entropy with its own positive, and the loss is the sum of the row losses divided by the
        batch size. Banked embeddings receive no gradient. Banked queries do contribute to the gradients of the
        documents of the batch, so that the gradients of queries and documents have similar norms. If the model does
        not change and the banks contain exactly the other batches of an optimizer update, then the accumulated
        gradient equals the gradient of one large batch.

        Banked embeddings are stale. Without a correction, the model can lower the loss by moving all new embeddings
        away from all old ones. With ``drift_compensation``, the loss embeds a few texts of the first batch again
        after optimizer updates. Banked embeddings are shifted by the change of the mean of these texts, so that
        moving all embeddings together does not lower the loss. They are removed once the remaining drift exceeds
        ``max_drift``.

        Args:
            model: SentenceTransformer model.
            bank_size: Maximum number of past pairs in the bank. Each batch computes all scores between banked queries
                and banked documents, so time and memory grow with the square of ``bank_size``. Up to about 8,000
                pairs, they are small compared to those of an encoder.
            scale: Factor of the similarities, the inverse of the temperature.
            similarity_fct: Similarity function, :func:`~sentence_transformers.util.cos_sim` or
                :func:`~sentence_transformers.util.dot_score`. The latter is usually combined with ``scale=1``.
            gather_across_devices: If True, the batches of all devices are gathered into one batch, and all devices
                hold the same banks. If False, each device has its own banks.
            mask_duplicates: If True, a document is not used as a negative of a query if it equals the positive of
                this query, or if it is the positive of an equal query. Texts are compared by their tokens, so nothing
                is masked if the inputs are not texts.
            drift_compensation: If True, banked embeddings are shifted by the mean shift of the model's embeddings.
            max_drift: Banked pairs are removed once the document embeddings of the probe have moved further than
                this since the pairs were stored. The move is measured without the mean shift, in units of the
                standard deviation of the embeddings. None disables the removal. It requires ``drift_compensation``.
            max_age: Banked pairs are removed after this number of optimizer updates. None disables the removal.

        References:
            - A Gradient Accumulation Method for Dense Retriever under Memory Constraint: https://huggingface.co/papers/2406.12356

        Requirements:
            1. Pairs, triplets or n-tuples as below, with the same number of columns in every batch

        Inputs:
            +-------------------------------------------------+--------+
            | Inputs                                          | Labels |
            +=================================================+========+
            | (anchor, positive) pairs                        | none   |
            +-------------------------------------------------+--------+
            | (anchor, positive, negative) triplets           | none   |
            +-------------------------------------------------+--------+
            | (anchor, positive, negative_1, ..., negative_n) | none   |
            +-------------------------------------------------+--------+

        Recommendations:
            - Set ``gradient_accumulation_steps`` so that an update has at least 100 pairs, and start with a
              ``bank_size`` of the pairs of a few updates.
            - Checkpoints do not contain the banks. After training resumes, the banks fill again.

        Relations:
            - :class:`MultipleNegativesRankingLoss` equals this loss with ``bank_size=0`` or in evaluation, if there
              are no duplicates.
            - :class:`CachedMultipleNegativesRankingLoss` uses a larger batch as negatives and embeds each text twice.
              This loss embeds each text once, but its negatives are older.
            - This loss does not work inside :class:`MatryoshkaLoss` and :class:`AdaptiveLayerLoss`, because they call
              a loss several times per batch.

        Example:
            ::

                from datasets import load_dataset
                from sentence_transformers import (
                    SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments, losses
                )

                model = SentenceTransformer("microsoft/mpnet-base")
                train_dataset = load_dataset("sentence-transformers/gooaq", split="train[:100000]")
                loss = losses.BankedMultipleNegativesRankingLoss(model, bank_size=1024)
                args = SentenceTransformerTrainingArguments(
                    output_dir="models/mpnet-base-gooaq", per_device_train_batch_size=8, gradient_accumulation_steps=16
                )
                SentenceTransformerTrainer(model=model, args=args, train_dataset=train_dataset, loss=loss).train()
        """
        super().__init__()
        if bank_size < 0:
            raise ValueError(f"bank_size must not be negative, got {bank_size}.")
        if not scale > 0:
            raise ValueError(f"scale must be a positive value, got {scale}.")
        if similarity_fct not in (cos_sim, dot_score):
            raise ValueError("similarity_fct must be util.cos_sim or util.dot_score; no other function is supported.")
        if max_age is not None and max_age < 1:
            raise ValueError(f"max_age must be None or at least 1 update, got {max_age}.")
        self.model = model
        self.bank_size = bank_size
        self.scale = scale
        self.similarity_fct = similarity_fct
        self.gather_across_devices = gather_across_devices
        self.mask_duplicates = mask_duplicates
        self.drift_compensation = drift_compensation
        self.max_drift = max_drift
        self.max_age = max_age

        self._bank: _Pairs | None = None
        self._num_pairs = 0  # total number of pairs stored since the start
        self._num_updates = 0  # number of optimizer updates between the batches so far
        _OptimizerStepCounter.register()
        self._num_optimizer_steps = _OptimizerStepCounter.count
        self._probe_features: list[dict[str, Any]] = []
        # The probe's embeddings (2, texts, dim) after each update, from the update of the oldest banked pair on
        self._probe_embeddings: list[Tensor] = []
        self._num_pairs_at_probe = 0  # value of _num_pairs when the probe was embedded last
        # (updates, 2, dim): shift of the mean query and the mean document since each entry of _probe_embeddings
        self._mean_shifts: Tensor | None = None

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None) -> Tensor:
        features = list(sentence_features)
        ids = _hash_columns(features) if self.mask_duplicates else None
        if self._uses_bank:
            self._update_bank(features)
        embeddings = embed_columns(self.model, features)
        return self.compute_loss_from_embeddings(embeddings, labels, ids)

    def compute_loss_from_embeddings(
        self, embeddings: list[Tensor], labels: Tensor | None = None, ids: Tensor | None = None
    ) -> Tensor:
        """
        Compute the loss of embedded columns and store them in the bank.

        Args:
            embeddings: Embeddings of queries, positives and hard negatives, (batch_size, dim) each.
            labels: Not used.
            ids: Ids of the texts, (batch_size, columns). Equal texts have equal ids. None: no texts are equal.
        """
        if len(embeddings) < 2:
            raise ValueError(f"Expected at least 2 embeddings, got {len(embeddings)}")
        if self.gather_across_devices:
            # Every device computes the loss of the gathered batch, so that the banks of all devices stay equal. The
            # backward pass of the gathering sums the gradients of the devices, and data parallelism averages them:
            # the result is the gradient of the gathered batch.
            embeddings = [all_gather_with_grad(column) for column in embeddings]
            if ids is not None:
                ids = all_gather(ids)
        # Half precision is not precise enough for sums over a whole bank
        with torch.autocast(embeddings[0].device.type, enabled=False):
            batch = self._make_pairs(embeddings, ids)
            if self._uses_bank and self._bank is not None:
                bank = self._bank
            else:
                bank = batch.select(slice(0, 0))  # an empty bank
            batch_shape = tuple(batch.documents.shape[1:])
            bank_shape = tuple(bank.documents.shape[1:])
            if batch_shape != bank_shape:
                raise ValueError(
                    f"Documents of shape {batch_shape} do not fit a bank with documents of shape {bank_shape}: "
                    "create a separate loss for each number of columns and each embedding dimension."
                )
            loss = self._compute_loss(batch, bank)
        if self._uses_bank and loss.isfinite():
            self._enqueue(batch, bank)
        return loss

    @torch.no_grad()
    def _enqueue(self, batch: _Pairs, bank: _Pairs) -> None:
        """Append the batch to the bank and keep the newest ``bank_size`` pairs."""
        fields = []
        for bank_field, batch_field in zip(bank, batch, strict=True):
            fields.append(torch.cat([bank_field, batch_field])[-self.bank_size :])
        self._bank = _Pairs(*fields)
        self._num_pairs += len(batch.queries)

    def _compute_loss(self, batch: _Pairs, bank: _Pairs) -> Tensor:
        """Sum the losses of all rows, of the batch and of the bank, and divide by the batch size."""
        query_shift_scores: Tensor | float = 0.0
        if self._mean_shifts is not None and len(bank.queries):
            # The last entry of _mean_shifts belongs to the current update. Shape: (banked pairs, 2, dim)
            shifts = self._mean_shifts[bank.updates - self._num_updates - 1]
            bank = bank._replace(documents=bank.documents + shifts[:, None, 1])
            # The shift of a banked query changes the gradient of the documents, but not the scores: the term has the
            # value 0. Without it, the documents would follow the old positions of the queries.
            query_shift_scores = self.scale * shifts[:, 0] @ batch.documents.flatten(0, 1).T
            query_shift_scores = query_shift_scores - query_shift_scores.detach()

        batch_positives = self._score_positives(batch)
        batch_scores = [
            batch_positives[:, None],
            self._score_negatives(batch, batch),
            self._score_negatives(batch, bank),
        ]
        batch_losses = torch.cat(batch_scores, dim=1).logsumexp(1) - batch_positives

        bank_positives = self._score_positives(bank)
        with torch.no_grad():
            bank_log_sums = [self._compute_log_sums(chunk, bank) for chunk in bank.split(BANK_CHUNK_SIZE)]
        bank_scores = [
            torch.cat(bank_log_sums)[:, None],
            self._score_negatives(bank, batch) + query_shift_scores,
        ]
        bank_losses = torch.cat(bank_scores, dim=1).logsumexp(1) - bank_positives
        return (batch_losses.sum() + bank_losses.sum()) / len(batch_losses)

    def _score_positives(self, rows: _Pairs) -> Tensor:
        """Return the scores (rows,) of queries with their own positives."""
        return self.scale * (rows.queries * rows.documents[:, 0]).sum(1)

    def _score_negatives(self, rows: _Pairs, columns: _Pairs) -> Tensor:
        """Return scores (rows, columns * documents per pair), -inf if a document is not a negative of the row."""
        scores = self.scale * rows.queries @ columns.documents.flatten(0, 1).T
        # This masks a row's own positive as well, if rows and columns are the same pairs
        is_masked = rows.ids[:, 1, None, None] == columns.ids[:, 1:]
        has_same_query = rows.ids[:, :1] == columns.ids[:, 0]
        is_masked[:, :, 0] |= has_same_query
        return scores.masked_fill(is_masked.flatten(1), -torch.inf)

    def _compute_log_sums(self, rows: _Pairs, columns: _Pairs) -> Tensor:
        """Return the logsumexp (rows,) of each row's scores with its positive and the negatives of ``columns``."""
        scores = [self._score_positives(rows)[:, None], self._score_negatives(rows, columns)]
        return torch.cat(scores, dim=1).logsumexp(1)

    def _make_pairs(self, embeddings: list[Tensor], ids: Tensor | None) -> _Pairs:
        """Prepare the columns of a batch for scoring."""
        queries, *documents = [self._prepare_for_scoring(column) for column in embeddings]
        if ids is None:
            # Every text gets an id of its own, so that nothing is masked
            num_texts = len(queries) * len(embeddings)
            ids = torch.arange(num_texts, device=queries.device).view(len(queries), -1)
            ids = ids + self._num_pairs * len(embeddings)
        updates = torch.full_like(ids[:, 0], self._num_updates)
        return _Pairs(queries, torch.stack(documents, dim=1), ids, updates)

    def _prepare_for_scoring(self, embeddings: Tensor) -> Tensor:
        """Convert embeddings to float32 or better, and normalize them for the cosine similarity."""
        embeddings = embeddings.to(torch.promote_types(embeddings.dtype, torch.float32))
        return normalize(embeddings, dim=-1) if self.similarity_fct is cos_sim else embeddings

    @property
    def _uses_bank(self) -> bool:
        # Trainers disable gradients for evaluation, but leave the loss in training mode
        return self.bank_size > 0 and self.training and torch.is_grad_enabled()

    def _update_bank(self, features: list[dict[str, Any]]) -> None:
        """If there was an optimizer step since the last batch, measure the drift and remove old pairs."""
        has_stepped = self._num_optimizer_steps != _OptimizerStepCounter.count
        self._num_optimizer_steps = _OptimizerStepCounter.count
        if self.drift_compensation and not self._probe_embeddings:
            self._probe_features = [_select_first_texts(column, NUM_PROBE_TEXTS) for column in features[:2]]
            self._probe_embeddings = [self._embed_probe()]
        if not has_stepped or self._bank is None:
            return
        self._num_updates += 1
        oldest_update = 0
        if self.max_age is not None:
            oldest_update = self._num_updates + 1 - self.max_age
        if self.drift_compensation:
            if self._num_pairs - self._num_pairs_at_probe >= PAIRS_PER_PROBE:
                self._probe_embeddings.append(self._embed_probe())
            else:
                self._probe_embeddings.append(self._probe_embeddings[-1])
            oldest_update = max(oldest_update, self._measure_drift())
        self._bank = self._bank.select(self._bank.updates >= oldest_update)
        num_updates_in_use = 1
        if len(self._bank.updates):
            num_updates_in_use = self._num_updates + 1 - int(self._bank.updates[0])
        self._probe_embeddings = self._probe_embeddings[-num_updates_in_use:]

    def _measure_drift(self) -> int:
        """Compute the mean shifts; return the first update whose banked embeddings have not drifted too far."""
        probes = torch.stack(self._probe_embeddings)  # (updates, 2, texts, dim)
        moves = probes[-1] - probes
        self._mean_shifts = moves.mean(2)
        if self.max_drift is None:
            return 0
        residual_moves = moves - self._mean_shifts[:, :, None]
        document_drift = residual_moves[:, 1].square().sum(-1).mean(-1).sqrt()  # (updates,)
        document_spread = probes[-1, 1].var(0, correction=0).sum().sqrt()
        drifted_too_far = (document_drift > self.max_drift * document_spread).nonzero()
        if not len(drifted_too_far):
            return 0
        first_update = self._num_updates + 1 - len(probes)  # the update of probes[0]
        return first_update + int(drifted_too_far[-1]) + 1

    @torch.no_grad()
    def _embed_probe(self) -> Tensor:
        """Embed the probe's queries and documents with the current model, without dropout: (2, texts, dim)."""
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        embeddings = [self.model(dict(column))["sentence_embedding"].clone() for column in self._probe_features]
        # Each module gets its own mode back, because some modules may be frozen in evaluation mode
        for module, is_training in modes:
            module.training = is_training
        if self.gather_across_devices:
            embeddings = [all_gather(column) for column in embeddings]
        self._num_pairs_at_probe = self._num_pairs
        return torch.stack([self._prepare_for_scoring(column) for column in embeddings])

    def get_config_dict(self) -> dict[str, Any]:
        return {
            "bank_size": self.bank_size,
            "scale": self.scale,
            "similarity_fct": self.similarity_fct.__name__,
            "gather_across_devices": self.gather_across_devices,
            "mask_duplicates": self.mask_duplicates,
            "drift_compensation": self.drift_compensation,
            "max_drift": self.max_drift,
            "max_age": self.max_age,
        }

    @property
    def citation(self) -> str:
        return """
@inproceedings{kim2024contaccum,
    title={A Gradient Accumulation Method for Dense Retriever under Memory Constraint},
    author={Jaehee Kim and Yukyung Lee and Pilsung Kang},
    booktitle={Advances in Neural Information Processing Systems},
    year={2024},
    eprint={2406.12356},
    archivePrefix={arXiv},
}
"""


class _Pairs(NamedTuple):
    """Embedded pairs of a query and its documents, oldest first."""

    queries: Tensor  # (pairs, dim)
    documents: Tensor  # (pairs, 1 + hard negatives, dim), the positive first
    ids: Tensor  # int64 (pairs, 2 + hard negatives), ids of the query and its documents: equal texts have equal ids
    updates: Tensor  # int64 (pairs,), number of optimizer updates before the pair was embedded

    def select(self, rows: Tensor | slice) -> _Pairs:
        return _Pairs(*(field[rows] for field in self))

    def split(self, size: int) -> list[_Pairs]:
        """Split the pairs into chunks of ``size``. Without pairs, return one empty chunk."""
        starts = range(0, max(len(self.queries), 1), size)
        return [self.select(slice(start, start + size)) for start in starts]


class _OptimizerStepCounter:
    """Counter of the optimizer steps in this process. Fused optimizers do not change the versions of parameters, so
    the versions cannot serve as the counter."""

    count = 0
    is_registered = False

    @classmethod
    def register(cls) -> None:
        if not cls.is_registered:
            register_optimizer_step_post_hook(cls._increment)
        cls.is_registered = True

    @classmethod
    def _increment(cls, *_: Any) -> None:
        cls.count += 1


def _hash_columns(features: list[dict[str, Any]]) -> Tensor | None:
    """Return ids of all texts, (batch_size, columns), or None if a column contains more than tokens."""
    columns = []
    for column in features:
        hashes = _hash_tokens(column)
        if hashes is None:
            return None
        columns.append(hashes)
    return torch.stack(columns, dim=1)


def _hash_tokens(features: dict[str, Any]) -> Tensor | None:
    """Return a 64-bit hash of the tokens of each text, without padding, or None if there are inputs beside tokens."""
    tokens = features.get("input_ids")
    inputs = [value for key, value in features.items() if isinstance(value, Tensor) and "_embedding" not in key]
    has_other_inputs = any(value.is_floating_point() for value in inputs)
    if tokens is None or has_other_inputs:
        return None
    if "offsets" in features:  # StaticEmbedding
        texts = tokens.cpu().tensor_split(features["offsets"][1:].cpu())
    elif "cu_seq_lens_q" in features:  # flattened for Flash Attention
        texts = tokens.flatten().cpu().tensor_split(features["cu_seq_lens_q"][1:-1].long().cpu())
    else:
        mask = features.get("attention_mask", torch.ones_like(tokens)).bool().cpu()
        texts = [row[row_mask] for row, row_mask in zip(tokens.cpu(), mask, strict=True)]
    # Python's hash of integers is the same in all processes, unlike its hash of strings
    hashes = [hash(tuple(text.tolist())) for text in texts]
    return torch.tensor(hashes, device=tokens.device)


def _select_first_texts(features: dict[str, Any], num_texts: int) -> dict[str, Any]:
    """Return the features of the first texts of a column."""
    offsets = features.get("offsets")
    if offsets is None:
        return _create_minibatch(features, 0, num_texts)
    # StaticEmbedding has the tokens of all texts in one tensor, with the offset of each text
    end = int(offsets[num_texts]) if len(offsets) > num_texts else None
    return {**features, "input_ids": features["input_ids"][:end], "offsets": offsets[:num_texts]}
