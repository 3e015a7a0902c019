r"""A plain float64 reference of `BankedInfoNCE`: the history of all pairs, and one dense matrix.

Every micro-step scores all rows against all columns again, and autograd computes the gradients.
The reference imports nothing from the package: no code, no constants, no state of a loss.

Row i is a local or banked query q_i, column j a local or banked document d_j. A banked document
moves with the mean of the passage tower, which was m_j when the document was stored and is m now:

    s_ij = q_i · (d_j - m_j + m)
    l_i  = log(sum_j exp(s_ij / tau)) - s_ip(i) / tau
    loss = (sum of l_i over local and banked rows) / n

p(i) is the passage that came with query i. The sum over j excludes the false negatives of row i.
The gradient that a banked row gives to local documents is computed with q_i plus the movement of
the query tower's mean since q_i was stored.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

NO_ID = -(2**63)
HORIZON = 128  # pairs after which the weight in a running mean has fallen to 1/e
RESIDUAL_BOUND = 0.08  # residual drift at which an entry retires
PAIRS_PER_MEAN = 64  # maximum number of pairs that share one mean of the query tower
MAX_PROBES = 34


class Pair(NamedTuple):
    """A pair of the history, with the mean of the passage tower at the time of storing."""

    query: Tensor  # (d,)
    documents: Tensor  # (1 + h, d), its passage and its hard negatives
    query_id: Tensor  # (), NO_ID if it has no id
    document_ids: Tensor  # (1 + h,)
    passage_mean: Tensor  # (d,)
    is_finite: bool = True


class TowerMean:
    """Exponentially weighted mean of one tower, which follows a jump of the encoder at once."""

    def __init__(self, mean: Tensor, weight: float = 0.0, variance: float = 0.0) -> None:
        self.mean = mean
        self.weight = weight
        self.variance = variance

    def compute_next(self, embeddings: Tensor) -> TowerMean:
        """Return the mean after a micro-batch (n, d)."""
        n = len(embeddings)
        batch_mean = embeddings.mean(0)
        batch_variance = (embeddings - batch_mean).square().sum(1).mean().item()
        squared_distance = (batch_mean - self.mean).square().sum().item()
        noise = self.variance * (1 / n + 1 / (2 * HORIZON))
        jump = 0.0
        if n > 1 and self.weight > 0 and squared_distance > 0:
            jump = max(1 - 2 * noise / squared_distance, 0.0)
        step = 1 - math.exp(-n / HORIZON)
        weight = self.weight * (1 - step) + step
        gain = step / weight
        if self.weight > 0 and jump == 0:
            new_variance = batch_variance + squared_distance
        else:
            new_variance = batch_variance * n / max(n - 1, 1)
        return TowerMean(
            mean=self.mean + max(gain, jump) * (batch_mean - self.mean),
            weight=weight,
            variance=self.variance + gain * (new_variance - self.variance),
        )


class DenseReference:
    """The loss of each micro-batch against the pairs in use, with the settings of BankedInfoNCE.

    Args:
        dim: the embedding size d.
        positives: pairs of (query id, passage id) that are never negatives of each other.

    Attributes:
        history: all pairs since the start.
        oldest_in_use: number of the oldest pair that the ring holds and that has not retired.
        masked_share: fraction of the columns that are excluded for the local rows of the last
            micro-step, without their positives.
    """

    def __init__(
        self,
        bank_size: int,
        dim: int = 8,
        positives: Collection[tuple[int, int]] = (),
        query_bank_size: int | None = None,
        temperature: float = 1.0,
        similarity: str = "dot",
        normalize_by: str = "local",
        mask_duplicates: bool = True,
        bank_hard_negatives: bool = True,
        drift_compensation: str = "auto",
    ) -> None:
        self.bank_size = bank_size
        self.positives = positives
        self.has_query_bank = query_bank_size != 0
        self.temperature = temperature
        self.similarity = similarity
        self.normalize_by = normalize_by
        self.mask_duplicates = mask_duplicates
        self.bank_hard_negatives = bank_hard_negatives
        self.drift_compensation = drift_compensation

        self.history: list[Pair] = []
        self.query_means: list[Tensor] = []  # query tower's mean when each pair was stored
        zeros = torch.zeros(dim, dtype=torch.float64)
        self.query_mean = TowerMean(zeros)
        self.passage_mean = TowerMean(zeros)
        self.probes: list[tuple[int, Tensor, Tensor]] = []  # number of pairs, queries, passages
        self.age_limit = bank_size
        self.oldest_in_use = 0
        self.update_start = 0
        self.masked_share = 0.0
        self.block_size = 1
        while 2 * self.block_size * 32 <= bank_size:
            self.block_size *= 2

    # Calls of a training loop

    def micro_step(self, inputs: Sequence[Tensor], ids: Sequence[Tensor] = ()) -> Tensor:
        """Compute the loss of a micro-batch, and store the micro-batch in the history.

        Args:
            inputs: queries (n, d), passages (n, d) and, if any, hard negatives (n, h, d).
            ids: ids of the same texts, or an empty sequence.
        """
        embeddings = [self._normalize(x) for x in inputs]
        queries = embeddings[0]
        documents = torch.cat([embeddings[1][:, None], *embeddings[2:]], dim=1)  # (n, 1 + h, d)
        if self._centres_passages(documents):
            documents.register_hook(_subtract_mean_over_documents)
        query_mean = self.query_mean
        passage_mean = self.passage_mean
        if self.drift_compensation == "auto" and not self.probes:
            query_mean = query_mean.compute_next(queries.detach())
            passage_mean = passage_mean.compute_next(embeddings[1].detach())
        query_ids = torch.full((len(queries),), NO_ID)
        document_ids = torch.full(documents.shape[:2], NO_ID)
        if ids:
            query_ids = ids[0]
            document_ids = torch.cat([ids[1][:, None], *ids[2:]], dim=1)
        columns = (queries, documents, query_ids, document_ids)
        local = [Pair(*texts, passage_mean.mean) for texts in zip(*columns, strict=True)]
        loss = self._compute_loss(local, query_mean.mean)
        is_finite = bool(loss.isfinite()) and all(bool(x.isfinite().all()) for x in inputs)
        if is_finite:
            self.query_mean = query_mean
            self.passage_mean = passage_mean
        if self.bank_size:
            self._store(local, is_finite)
        return loss

    def end_update(self) -> None:
        """End an update: all stored pairs count as encoded by an older encoder."""
        self.update_start = len(self.history)

    def observe_probe(self, queries: Tensor, passages: Tensor) -> None:
        """Move the towers' means by the mean shift of the probe's texts, (S, d) each."""
        queries = self._normalize(queries)
        passages = self._normalize(passages)
        num_pairs = len(self.history)
        is_first = not self.probes
        if not is_first:
            _, old_queries, old_passages = self.probes[-1]
            if self.drift_compensation == "auto":
                self.query_mean.mean = self.query_mean.mean + (queries - old_queries).mean(0)
                self.passage_mean.mean = self.passage_mean.mean + (passages - old_passages).mean(0)
        spacing = max(64, self.bank_size // 32 + 1)
        if len(self.probes) > 1 and self.probes[-1][0] - self.probes[-2][0] < spacing:
            del self.probes[-1]  # the latest probe is too close to the one before it
        self.probes.append((num_pairs, queries, passages))
        self.probes = self.probes[-MAX_PROBES:]
        if self.drift_compensation != "auto":
            return
        self.age_limit = int(min(self._age_at_residual_bound(), self.bank_size))
        if not is_first:
            self.update_start = num_pairs

    # Computation of the loss

    def _compute_loss(self, local: list[Pair], query_mean: Tensor) -> Tensor:
        """Compute the loss over the local and the banked rows.

        Args:
            local: the pairs of the micro-batch.
            query_mean: mean of the query tower, (d,), with the micro-batch included.
        """
        n = len(local)
        in_use = range(self.oldest_in_use, len(self.history))
        banked_numbers = [number for number in in_use if self.history[number].is_finite]
        pairs = local + [self.history[number] for number in banked_numbers]
        num_rows = len(pairs) if self.has_query_bank else n
        passage_mean = local[0].passage_mean

        # The rows: queries, with the ids of the query and of its passage.
        queries = torch.stack([pair.query for pair in pairs[:num_rows]])
        query_ids = torch.stack([pair.query_id for pair in pairs])
        passage_ids = torch.stack([pair.document_ids[0] for pair in pairs[:num_rows]])

        # The columns: documents, moved to the current mean. The first of a pair is its passage,
        # which has the id of its query as well.
        documents = torch.cat([pair.documents - pair.passage_mean + passage_mean for pair in pairs])
        document_ids = torch.cat([pair.document_ids for pair in pairs])
        num_documents = torch.tensor([len(pair.documents) for pair in pairs])
        passages = num_documents.cumsum(0) - num_documents  # column of each pair's passage
        query_ids_of_columns = torch.full_like(document_ids, NO_ID)
        query_ids_of_columns[passages] = query_ids

        drift = torch.zeros_like(queries)
        is_noise = len(self.history) <= PAIRS_PER_MEAN and not self.probes
        if self.drift_compensation == "auto" and not is_noise:
            for row, number in enumerate(banked_numbers[: num_rows - n], start=n):
                drift[row] = query_mean - self._get_stored_query_mean(number)
        similarities = queries @ documents.T + drift @ (documents - documents.detach()).T

        excluded = torch.zeros(similarities.shape, dtype=torch.bool)
        if self.mask_duplicates:
            excluded |= _have_equal_ids(passage_ids, document_ids)
            excluded |= _have_equal_ids(query_ids[:num_rows], query_ids_of_columns)
            for query_id, passage_id in self.positives:
                is_row = query_ids[:num_rows] == query_id
                excluded |= is_row[:, None] & (document_ids == passage_id)
        positives = torch.arange(num_rows), passages[:num_rows]
        excluded[positives] = False
        self.masked_share = excluded[:n].sum().item() / max(n * (excluded.shape[1] - 1), 1)

        logits = (similarities / self.temperature).masked_fill(excluded, -math.inf)
        losses = logits.logsumexp(1) - similarities[positives] / self.temperature
        return losses.sum() / (num_rows if self.normalize_by == "all" else n)

    def _normalize(self, embeddings: Tensor) -> Tensor:
        if self.similarity == "cos":
            return normalize(embeddings, dim=-1)
        return embeddings

    # Pairs in use

    def _store(self, local: list[Pair], is_finite: bool) -> None:
        """Append the micro-batch, and retire whole blocks of the oldest pairs."""
        for pair in local:
            documents = pair.documents.detach()
            document_ids = pair.document_ids
            if not self.bank_hard_negatives:
                documents = documents[:1]
                document_ids = document_ids[:1]
            stored = pair._replace(
                query=pair.query.detach(),
                documents=documents,
                document_ids=document_ids,
                is_finite=is_finite,
            )
            self.history.append(stored)
            self.query_means.append(self.query_mean.mean)
        if len(self.history) <= PAIRS_PER_MEAN and not self.probes:
            self.query_means = [self.query_mean.mean] * len(self.history)

        end = len(self.history)
        num_blocks_too_old = round((end - self.age_limit) / self.block_size)
        num_blocks_of_past_updates = self.update_start // self.block_size
        num_blocks_overwritten = math.ceil((end - self.bank_size) / self.block_size)
        num_blocks_retired = min(num_blocks_too_old, num_blocks_of_past_updates)
        num_blocks_gone = max(num_blocks_retired, num_blocks_overwritten)
        self.oldest_in_use = max(self.oldest_in_use, num_blocks_gone * self.block_size)

    def _get_stored_query_mean(self, number: int) -> Tensor:
        """Return the query tower's mean that is stored for the run of a pair."""
        pairs_per_run = min(self.block_size, PAIRS_PER_MEAN)
        return self.query_means[number - number % pairs_per_run]

    def _centres_passages(self, documents: Tensor) -> bool:
        """Return True if the passages' gradients are centred.

        They are centred if pairs of an older encoder are in use. The gradient of a single document
        is not centred, because it would become zero.
        """
        has_aged_entries = self.update_start > self.oldest_in_use
        num_documents = documents.shape[0] * documents.shape[1]
        return self.drift_compensation == "auto" and has_aged_entries and num_documents > 1

    def _age_at_residual_bound(self) -> float:
        """Interpolate the age in pairs at which the residual of the passages reaches the bound."""
        latest_pairs, _, latest = self.probes[-1]
        younger_age = 0.0
        younger_residual = 0.0
        for pairs, _, passages in reversed(self.probes[:-1]):
            residual = math.sqrt(_compute_variance(latest - passages) / _compute_variance(latest))
            age = latest_pairs - pairs
            if residual > RESIDUAL_BOUND:
                fraction = (RESIDUAL_BOUND - younger_residual) / (residual - younger_residual)
                return younger_age + fraction * (age - younger_age)
            younger_age = age
            younger_residual = residual
        return math.inf


def _have_equal_ids(row_ids: Tensor, column_ids: Tensor) -> Tensor:
    return (row_ids[:, None] == column_ids) & (row_ids[:, None] != NO_ID)


def _subtract_mean_over_documents(gradient: Tensor) -> Tensor:
    return gradient - gradient.flatten(0, 1).mean(0)


def _compute_variance(embeddings: Tensor) -> float:
    """Return the mean squared distance of texts (S, d) from their mean."""
    return (embeddings - embeddings.mean(0)).square().sum(1).mean().item()


def compute_relative_errors(
    loss: Tensor, inputs: Sequence[Tensor], true_loss: Tensor, true_inputs: Sequence[Tensor]
) -> tuple[float, float]:
    """Compute the relative errors of a loss and of the gradients of its inputs."""
    loss_error = abs(loss.item() - true_loss.item()) / max(1.0, abs(true_loss.item()))
    gradient = torch.cat([x.grad.flatten().double() for x in inputs])
    true_gradient = torch.cat([x.grad.flatten() for x in true_inputs])
    scale = true_gradient.norm().clamp_min(1e-3)
    gradient_error = (gradient - true_gradient).norm() / scale
    return loss_error, gradient_error.item()
