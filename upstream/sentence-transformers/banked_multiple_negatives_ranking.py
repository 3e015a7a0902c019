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

# The probe: so many texts of each tower, embedded again at most once in so many pairs. Forward passes only: some 2%.
PROBE_TEXTS, PAIRS_PER_PROBE = 8, 128
# Banked rows whose scores with the whole bank are in memory at once.
ROWS_AT_ONCE = 1024


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
        Thousands of negatives for small batches: two banks remember the embeddings of past queries and documents, and
        each batch contrasts with them too. Made for gradient accumulation, which by itself adds no negatives.

        Rows of the score matrix are the queries of the batch, then the banked ones; columns are the documents of the
        batch (positives and hard negatives), then the banked ones. Each row is a softmax cross-entropy on its own
        positive; the loss is their sum over the batch size. Banked embeddings take no gradient, but banked queries
        push on the documents of the batch, which keeps the gradients of both sides balanced. If the model stood still
        and the banks held just the other batches of an optimizer update, the accumulated gradient would be that of
        one large batch.

        Banked embeddings are stale, which opens a shortcut: the loss falls when all new embeddings move away from all
        old ones. With ``drift_compensation``, a few texts of the first batch are embedded again after updates. Banked
        embeddings move along with the mean of these texts, so that moving all embeddings together gains nothing, and
        leave once the rest of the drift is larger than ``max_drift``.

        Args:
            model: SentenceTransformer model.
            bank_size: Number of past pairs to contrast with, at most. Each batch computes all scores of the bank with
                itself, so cost and memory grow with its square: up to some 8,000 pairs are small beside an encoder.
            scale: The similarities are multiplied by it: the inverse of the temperature.
            similarity_fct: :func:`~sentence_transformers.util.cos_sim` or, usually with ``scale=1``,
                :func:`~sentence_transformers.util.dot_score`.
            gather_across_devices: If True, the batches of all devices are one batch, and all devices hold the same
                banks. Otherwise each device has banks of its own.
            mask_duplicates: If True, a column is no negative of a row if it holds the row's own positive again, or
                came with the same query. Texts are compared by their tokens. Without text inputs nothing is masked.
            drift_compensation: Whether banked embeddings follow the mean shift of the model.
            max_drift: Banked pairs leave once the documents of the probe have moved further than this since, mean
                shift aside, in units of their spread. None: they stay. Needs ``drift_compensation``.
            max_age: Banked pairs leave after this many optimizer updates. None: they stay.

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
            - Begin with a ``bank_size`` of a few updates of a hundred pairs or more each, by
              ``gradient_accumulation_steps``.
            - Checkpoints do not hold the banks: when training resumes, they fill again.

        Relations:
            - :class:`MultipleNegativesRankingLoss` is this loss with ``bank_size=0`` or in evaluation, and without
              duplicates.
            - :class:`CachedMultipleNegativesRankingLoss` gets its negatives from a larger batch, which it embeds
              twice. Here each text is embedded once, and negatives are older.
            - Not for :class:`MatryoshkaLoss` and :class:`AdaptiveLayerLoss`, which call a loss several times a batch.

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
            raise ValueError("similarity_fct must be util.cos_sim or util.dot_score: others have no mean to follow.")
        if max_age is not None and max_age < 1:
            raise ValueError(f"max_age must be at least 1 update or None, got {max_age}.")
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
        self._num_pairs = 0  # that have come so far
        self._update = 0  # optimizer updates that were noticed so far
        self._steps_seen = _OptimizerSteps.watch()
        self._probe_features: list[dict[str, Any]] = []
        self._probes: list[Tensor] = []  # (2, texts, dim) at each update since that of the oldest banked pair
        self._probed_at = 0  # pairs
        self._shifts: Tensor | None = None  # (updates, 2, dim) from each of the probes to the last

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None) -> Tensor:
        features = list(sentence_features)
        ids = [_token_hashes(column) for column in features if self.mask_duplicates]
        if self._uses_bank:
            self._follow_model(features)
        embeddings = embed_columns(self.model, features)
        known = [column for column in ids if column is not None]
        all_ids = torch.stack(known, dim=1) if len(known) == len(features) else None
        return self.compute_loss_from_embeddings(embeddings, labels, all_ids)

    def compute_loss_from_embeddings(
        self, embeddings: list[Tensor], labels: Tensor | None = None, ids: Tensor | None = None
    ) -> Tensor:
        """The loss of embedded columns, (batch_size, dim) each, with the ids of their texts, (batch_size, columns)."""
        if len(embeddings) < 2:
            raise ValueError(f"Expected at least 2 embeddings, got {len(embeddings)}")
        if self.gather_across_devices:
            # Every device computes the loss of the whole batch, so that all banks stay the same. The gradient of the
            # gathering sums over devices, and data parallelism averages: together that of the whole batch.
            embeddings = [all_gather_with_grad(column) for column in embeddings]
            ids = None if ids is None else all_gather(ids)
        # Sums over a bank are too long for half precision
        with torch.autocast(embeddings[0].device.type, enabled=False):
            batch = self._as_pairs(embeddings, ids)
            bank = self._bank if self._uses_bank and self._bank is not None else batch.select(slice(0, 0))
            shape, banked = batch.documents.shape[1:], bank.documents.shape[1:]
            if shape != banked:
                raise ValueError(f"Documents {tuple(shape)} do not fit a bank of {tuple(banked)}: use a loss each.")
            loss = self._loss(batch, bank)
        if self._uses_bank and loss.isfinite():
            with torch.no_grad():
                self._bank = _Pairs(*(torch.cat(both)[-self.bank_size :] for both in zip(bank, batch, strict=True)))
            self._num_pairs += len(batch.queries)
        return loss

    def _loss(self, batch: _Pairs, bank: _Pairs) -> Tensor:
        push: Tensor | float = 0.0
        if self._shifts is not None and len(bank.queries):
            # (banked pairs, 2, dim), counted from the last probe backwards
            shifts = self._shifts[bank.updates - self._update - 1]
            bank = bank._replace(documents=bank.documents + shifts[:, None, 1])
            # Banked queries keep the softmax weights that they were stored with, and push from where they would be
            # by now. Otherwise the documents would run after the past of the queries.
            push = self.scale * shifts[:, 0] @ batch.documents.flatten(0, 1).T
            push = push - push.detach()
        batch_positives, bank_positives = self._positives(batch), self._positives(bank)
        with torch.no_grad():
            bank_sums = [self._log_sums(rows, bank) for rows in bank.split(ROWS_AT_ONCE)]
        batch_rows = [batch_positives[:, None], self._negatives(batch, batch), self._negatives(batch, bank)]
        bank_rows = [torch.cat(bank_sums)[:, None], self._negatives(bank, batch) + push]
        batch_losses = torch.cat(batch_rows, dim=1).logsumexp(1) - batch_positives
        bank_losses = torch.cat(bank_rows, dim=1).logsumexp(1) - bank_positives
        return (batch_losses.sum() + bank_losses.sum()) / len(batch_losses)

    def _positives(self, rows: _Pairs) -> Tensor:
        return self.scale * (rows.queries * rows.documents[:, 0]).sum(1)

    def _negatives(self, rows: _Pairs, columns: _Pairs) -> Tensor:
        """Scores (rows, columns * documents per pair), -inf where a document is no negative of a row."""
        scores = self.scale * rows.queries @ columns.documents.flatten(0, 1).T
        hidden = rows.ids[:, 1, None, None] == columns.ids[:, 1:]  # its positive, also where both are the same pair
        hidden[:, :, 0] |= rows.ids[:, :1] == columns.ids[:, 0]  # another positive of its query
        return scores.masked_fill(hidden.flatten(1), -torch.inf)

    def _log_sums(self, rows: _Pairs, columns: _Pairs) -> Tensor:
        return torch.cat([self._positives(rows)[:, None], self._negatives(rows, columns)], dim=1).logsumexp(1)

    def _as_pairs(self, embeddings: list[Tensor], ids: Tensor | None) -> _Pairs:
        queries, *documents = [self._as_scored(column) for column in embeddings]
        if ids is None:  # then no two texts are the same
            ids = torch.arange(len(queries) * len(embeddings), device=queries.device).view(len(queries), -1)
            ids = ids + self._num_pairs * len(embeddings)
        updates = torch.full_like(ids[:, 0], self._update)
        return _Pairs(queries, torch.stack(documents, dim=1), ids, updates)

    def _as_scored(self, embeddings: Tensor) -> Tensor:
        embeddings = embeddings.to(torch.promote_types(embeddings.dtype, torch.float32))
        return normalize(embeddings, dim=-1) if self.similarity_fct is cos_sim else embeddings

    @property
    def _uses_bank(self) -> bool:
        # Trainers evaluate without gradients, but leave the loss itself in training mode
        return self.bank_size > 0 and self.training and torch.is_grad_enabled()

    def _follow_model(self, features: list[dict[str, Any]]) -> None:
        """After an optimizer step, see how far the model has moved, and drop what is too old."""
        stepped, self._steps_seen = self._steps_seen != _OptimizerSteps.count, _OptimizerSteps.count
        if self.drift_compensation and not self._probes:
            self._probe_features = [_first_texts(column, PROBE_TEXTS) for column in features[:2]]
            self._probes = [self._embed_probe()]
        if not stepped or self._bank is None:
            return
        self._update += 1
        oldest = 0 if self.max_age is None else self._update + 1 - self.max_age
        if self.drift_compensation:
            due = self._num_pairs - self._probed_at >= PAIRS_PER_PROBE
            self._probes.append(self._embed_probe() if due else self._probes[-1])
            oldest = max(oldest, self._measure_drift())
        self._bank = self._bank.select(self._bank.updates >= oldest)
        updates_in_use = self._update + 1 - int(self._bank.updates[0]) if len(self._bank.updates) else 1
        self._probes = self._probes[-updates_in_use:]

    def _measure_drift(self) -> int:
        """Note the mean shift since each probe; returns the first update whose embeddings have not drifted too far."""
        probes = torch.stack(self._probes)
        moves = probes[-1] - probes
        self._shifts = moves.mean(2)
        if self.max_drift is None:
            return 0
        residuals = (moves - self._shifts[:, :, None])[:, 1].square().sum(-1).mean(-1).sqrt()
        spread = probes[-1, 1].var(0, correction=0).sum().sqrt()
        too_far = (residuals > self.max_drift * spread).nonzero()
        return self._update + 2 - len(probes) + int(too_far[-1]) if len(too_far) else 0

    @torch.no_grad()
    def _embed_probe(self) -> Tensor:
        """(2, texts, dim): the same queries and documents as ever, by the model as it is now, without dropout."""
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        found = [self.model(dict(column))["sentence_embedding"].clone() for column in self._probe_features]
        for module, training in modes:  # one by one, as some may be frozen in eval mode
            module.training = training
        if self.gather_across_devices:
            found = [all_gather(column) for column in found]
        self._probed_at = self._num_pairs
        return torch.stack([self._as_scored(column) for column in found])

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
    """Embedded pairs, oldest first."""

    queries: Tensor  # (pairs, dim)
    documents: Tensor  # (pairs, 1 + hard negatives, dim), the positive first
    ids: Tensor  # (pairs, 2 + hard negatives), of the texts: equal where those are equal
    updates: Tensor  # (pairs,), how many updates the model had seen

    def select(self, rows: Tensor | slice) -> _Pairs:
        return _Pairs(*(part[rows] for part in self))

    def split(self, size: int) -> list[_Pairs]:
        return [self.select(slice(start, start + size)) for start in range(0, max(len(self.queries), 1), size)]


class _OptimizerSteps:
    """Counts the steps of this process. Versions of parameters would not do: fused optimizers leave them alone."""

    count = 0
    watched = False

    @classmethod
    def watch(cls) -> int:
        if not cls.watched:
            register_optimizer_step_post_hook(cls._after_step)
        cls.watched = True
        return cls.count

    @classmethod
    def _after_step(cls, *_: Any) -> None:
        cls.count += 1


def _token_hashes(features: dict[str, Any]) -> Tensor | None:
    """A 64-bit hash of the tokens of each text, whatever its padding; None if there is more to inputs than tokens."""
    tokens = features.get("input_ids")
    inputs = [value for key, value in features.items() if isinstance(value, Tensor) and "_embedding" not in key]
    if tokens is None or any(value.is_floating_point() for value in inputs):
        return None
    if "offsets" in features:  # StaticEmbedding
        texts = tokens.cpu().tensor_split(features["offsets"][1:].cpu())
    elif "cu_seq_lens_q" in features:  # flattened for Flash Attention
        texts = tokens.flatten().cpu().tensor_split(features["cu_seq_lens_q"][1:-1].long().cpu())
    else:
        present = features.get("attention_mask", torch.ones_like(tokens)).bool().cpu()
        texts = [row[where] for row, where in zip(tokens.cpu(), present, strict=True)]
    # Unlike those of strings, hashes of integers are the same in all processes
    return torch.tensor([hash(tuple(text.tolist())) for text in texts], device=tokens.device)


def _first_texts(features: dict[str, Any], size: int) -> dict[str, Any]:
    offsets = features.get("offsets")
    if offsets is None:
        return _create_minibatch(features, 0, size)
    end = int(offsets[size]) if len(offsets) > size else None
    return {**features, "input_ids": features["input_ids"][:end], "offsets": offsets[:size]}
