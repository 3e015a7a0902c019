r"""A plain float64 reference of `BankedInfoNCE`: the history of all pairs, and one dense matrix.

Every micro-step scores all rows against all columns again, and autograd computes the gradients.
Nothing is taken from the package, neither code nor constants nor the state of a loss.

Row i is a local or a banked query q_i, column j a local or a banked document d_j. A banked document
has moved with the mean of the passage tower, which was m_j when it came and is m now:

    s_ij = q_i · (d_j - m_j + m)
    l_i  = log(sum_j w_j exp(s_ij / tau)) - s_ii+ / tau
    loss = (sum of l_i over local rows + w * sum of l_i over banked rows) / n

i+ is the passage that came with query i. w is the weight of a banked pair, and w_j is w for banked
columns other than i+, else 1. The sum over j leaves out the false negatives of row i. A banked row
pushes on the local documents from where its query is by now: their gradient is that of q_i plus the
movement of the mean of the query tower. Other directions than ``query_to_doc``, and hardness
weights, contrast the micro-batch alone.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

NO_ID = -(2**63)
HORIZON = 128  # pairs over which a running mean forgets
RESIDUAL_BOUND = 0.08  # drift beyond the mean shift at which an entry retires
PAIRS_PER_MEAN = 64  # at most so many pairs share one mean of the query tower
MAX_PROBES = 34
ROW_TOWERS = {"query_to_query": "query", "doc_to_query": "document", "doc_to_doc": "document"}
COLUMN_TOWERS = {"query_to_query": "query", "doc_to_query": "query", "doc_to_doc": "document"}


class Pair(NamedTuple):
    """A pair as it came, with the mean of the passage tower at that time."""

    query: Tensor  # (d,)
    documents: Tensor  # (1 + h, d), its passage and its hard negatives
    query_id: Tensor  # (), NO_ID without one
    document_ids: Tensor  # (1 + h,)
    guide_query: Tensor  # (g,), g = 0 without a guide
    guide_documents: Tensor  # (1 + h, g)
    passage_mean: Tensor  # (d,)
    is_finite: bool = True


class Texts(NamedTuple):
    """Texts of one tower, in the order of their pairs: rows or columns of the matrix."""

    embeddings: Tensor  # (t, d)
    pair_index: Tensor  # (t,), the pair that a text belongs to
    query_ids: Tensor  # (t,), id of the query of that pair, NO_ID for hard negatives
    document_ids: Tensor  # (t,), id of the document; of a query's passage, for queries
    guide: Tensor  # (t, g)


class TowerMean:
    """Exponentially weighted mean of one tower; it follows a jump of the encoder at once."""

    def __init__(self, mean: Tensor, weight: float = 0.0, variance: float = 0.0) -> None:
        self.mean = mean
        self.weight = weight
        self.variance = variance

    def after(self, embeddings: Tensor) -> TowerMean:
        """Return the mean after a micro-batch (n, d)."""
        n = len(embeddings)
        batch_mean = embeddings.mean(0)
        batch_variance = (embeddings - batch_mean).square().sum(1).mean().item()
        distance = (batch_mean - self.mean).square().sum().item()
        noise = self.variance * (1 / n + 1 / (2 * HORIZON))
        jump = 0.0
        if n > 1 and self.weight > 0 and distance > 0:
            jump = max(1 - 2 * noise / distance, 0.0)
        forgotten = 1 - math.exp(-n / HORIZON)
        weight = self.weight * (1 - forgotten) + forgotten
        gain = forgotten / weight
        if self.weight > 0 and jump == 0:
            new_variance = batch_variance + distance
        else:
            new_variance = batch_variance * n / max(n - 1, 1)
        return TowerMean(
            mean=self.mean + max(gain, jump) * (batch_mean - self.mean),
            weight=weight,
            variance=self.variance + gain * (new_variance - self.variance),
        )


class DenseReference:
    """The loss of each micro-batch against the pairs in use; settings are named as in the package.

    Args:
        dim: the embedding size d.
        positives: pairs of (query id, passage id) that are never negatives of each other.

    Attributes:
        history: all pairs since the start.
        oldest_in_use: number of the oldest pair that the ring holds and that has not retired.
        masked_share: of the local rows' columns of ``query_to_doc``, their positives aside, in the
            last micro-step.
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
        bank_weight: float = 1.0,
        false_negative_margin: float | None = None,
        guide_margin: float = 0.0,
        guide_margin_strategy: str = "absolute",
        hardness_mode: str | None = None,
        hardness_strength: float = 0.0,
        directions: Sequence[str] = ("query_to_doc",),
        partition_mode: str = "joint",
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
        self.bank_weight = bank_weight
        self.false_negative_margin = false_negative_margin
        self.guide_margin = guide_margin
        self.guide_margin_strategy = guide_margin_strategy
        self.hardness_mode = hardness_mode
        self.hardness_strength = hardness_strength
        self.directions = directions
        self.partition_mode = partition_mode

        self.history: list[Pair] = []
        self.query_means: list[Tensor] = []  # of the query tower, when each pair was stored
        zeros = torch.zeros(dim, dtype=torch.float64)
        self.query_mean = TowerMean(zeros)
        self.passage_mean = TowerMean(zeros)
        self.probes: list[tuple[int, Tensor, Tensor]] = []  # pairs seen, queries, passages
        self.age_limit = bank_size
        self.oldest_in_use = 0
        self.update_start = 0
        self.masked_share = 0.0
        self.block_size = 1
        while 2 * self.block_size * 32 <= bank_size:
            self.block_size *= 2

    # What happens to a loss

    def micro_step(
        self,
        inputs: Sequence[Tensor],
        ids: Sequence[Tensor] = (),
        guide: Sequence[Tensor] = (),
    ) -> Tensor:
        """Compute the loss of a micro-batch, and store it.

        Args:
            inputs: queries (n, d), passages (n, d) and, if any, hard negatives (n, h, d).
            ids: of the same texts, or nothing.
            guide: embeddings of the same texts by a guide, or nothing.
        """
        embeddings = [self._normalize(x) for x in inputs]
        queries = embeddings[0]
        documents = join_documents(embeddings)
        if self._centres_passages(documents):
            documents.register_hook(_subtract_mean_over_documents)
        query_mean = self.query_mean
        passage_mean = self.passage_mean
        if self._moves_entries() and not self.probes:
            query_mean = query_mean.after(queries.detach())
            passage_mean = passage_mean.after(embeddings[1].detach())
        local = make_pairs(queries, documents, ids, guide, passage_mean.mean)
        loss = self._loss(local)
        is_finite = bool(loss.isfinite()) and all(bool(x.isfinite().all()) for x in inputs)
        if is_finite:
            self.query_mean = query_mean
            self.passage_mean = passage_mean
        if self.bank_size:
            self._store(local, is_finite)
        return loss

    def end_update(self) -> None:
        """Entries that are stored now are of an older encoder."""
        self.update_start = len(self.history)
        if self.drift_compensation == "fresh":
            self.oldest_in_use = len(self.history)

    def observe_probe(self, queries: Tensor, passages: Tensor) -> None:
        """Move the means as the means of the probe's texts (S, d) have moved."""
        queries = self._normalize(queries)
        passages = self._normalize(passages)
        num_pairs = len(self.history)
        is_first = not self.probes
        if not is_first:
            _, old_queries, old_passages = self.probes[-1]
            if self._moves_entries():
                self.query_mean.mean = self.query_mean.mean + (queries - old_queries).mean(0)
                self.passage_mean.mean = self.passage_mean.mean + (passages - old_passages).mean(0)
        spacing = max(64, self.bank_size // 32 + 1)
        if len(self.probes) > 1 and self.probes[-1][0] - self.probes[-2][0] < spacing:
            del self.probes[-1]  # the latest one stays only if it is far from the one before it
        self.probes.append((num_pairs, queries, passages))
        self.probes = self.probes[-MAX_PROBES:]
        if self.drift_compensation != "auto":
            return
        self.age_limit = int(min(self._age_at_residual_bound(), self.bank_size))
        if not is_first:
            self.update_start = num_pairs

    # The loss

    def _loss(self, local: list[Pair]) -> Tensor:
        """Compute the loss over the local and the banked rows."""
        n = len(local)
        banked_numbers = []
        for number in range(self.oldest_in_use, len(self.history)):
            if self.history[number].is_finite:
                banked_numbers.append(number)
        pairs = local + [self.history[number] for number in banked_numbers]
        num_rows = len(pairs) if self.has_query_bank else n
        passage_mean = local[0].passage_mean

        rows = query_texts(pairs[:num_rows])
        columns = document_texts(pairs, passage_mean)
        drift = torch.zeros_like(rows.embeddings)
        if self._moves_entries():
            for row, number in enumerate(banked_numbers[: num_rows - n], start=n):
                drift[row] = self.query_mean.mean - self._stored_query_mean(number)
        similarities = rows.embeddings @ columns.embeddings.T
        gradient_only = columns.embeddings - columns.embeddings.detach()
        similarities = similarities + drift @ gradient_only.T

        is_local_column = columns.pair_index < n
        is_positive = _first_column_of_pair(rows, columns)
        positive_similarities = similarities[is_positive]
        guide_cosines = (rows.guide * columns.guide[is_positive.int().argmax(1)]).sum(1)
        excluded = self._false_negatives(
            "query_to_doc", rows, columns, similarities, positive_similarities, guide_cosines
        )
        excluded &= ~is_positive
        self.masked_share = excluded[:n].sum().item() / max(n * (len(is_local_column) - 1), 1)

        weight = self._weight()
        counts = torch.full_like(similarities, weight)
        counts[is_positive | is_local_column] = 1.0
        logits = similarities / self.temperature + counts.log()
        if self.hardness_mode is not None:
            is_weighted = self._has_hardness(rows, columns) & is_local_column
            is_weighted[n:] = False
            logits = logits + is_weighted * self.hardness_strength * similarities.detach()
        logits = logits.masked_fill(excluded, -math.inf)
        log_sums = logits.logsumexp(1)
        positive_logits = positive_similarities / self.temperature
        banked_losses = log_sums[n:] - positive_logits[n:]

        local_sums = [log_sums[:n]]
        for direction in self.directions:
            if direction != "query_to_doc":
                other = self._direction_log_sums(
                    direction, local, positive_similarities[:n], guide_cosines[:n]
                )
                local_sums.append(other)
        if self.partition_mode == "joint":
            local_losses = torch.stack(local_sums).logsumexp(0) - positive_logits[:n]
            banked_share = 1.0
        else:
            local_losses = torch.stack(local_sums).mean(0) - positive_logits[:n]
            banked_share = 1 / len(self.directions)

        total = local_losses.sum() + banked_share * weight * banked_losses.sum()
        if self.normalize_by == "all":
            return total / (n + weight * len(banked_losses))
        return total / n

    def _direction_log_sums(
        self,
        direction: str,
        local: list[Pair],
        positive_similarities: Tensor,
        guide_cosines: Tensor,
    ) -> Tensor:
        """Contrast the micro-batch with itself in another direction: (n,)."""
        passage_mean = local[0].passage_mean
        documents = document_texts(local, passage_mean)
        texts = {"query": query_texts(local), "document": documents}
        rows = texts[ROW_TOWERS[direction]]
        columns = texts[COLUMN_TOWERS[direction]]
        if ROW_TOWERS[direction] == "document":
            passages = _positions_of_passages(documents)
            rows = Texts(*(values[passages] for values in documents))
        similarities = rows.embeddings @ columns.embeddings.T
        excluded = self._false_negatives(
            direction, rows, columns, similarities, positive_similarities, guide_cosines
        )
        is_own_pair = rows.pair_index[:, None] == columns.pair_index
        if direction == "doc_to_query":
            excluded &= ~is_own_pair  # the query of the pair is the positive of its passage
        else:
            excluded |= is_own_pair
        return (similarities / self.temperature).masked_fill(excluded, -math.inf).logsumexp(1)

    def _false_negatives(
        self,
        direction: str,
        rows: Texts,
        columns: Texts,
        similarities: Tensor,
        positive_similarities: Tensor,
        guide_cosines: Tensor,
    ) -> Tensor:
        """Find the columns that a row must not be contrasted with, its own positive perhaps.

        The decision was taken when row and column first met. It is the same now: all documents of
        the matrix have moved by one vector since.

        Args:
            positive_similarities: (r,), of each row's pair.
            guide_cosines: (r,), of the same pairs, by the guide.
        """
        excluded = torch.zeros(similarities.shape, dtype=torch.bool)
        if self.mask_duplicates:
            excluded |= _have_equal_ids(rows.document_ids, columns.document_ids)
            excluded |= _have_equal_ids(rows.query_ids, columns.query_ids)
            for query_id, passage_id in self.positives:
                if direction == "doc_to_query":
                    is_row = rows.document_ids == passage_id
                    is_column = columns.query_ids == query_id
                else:
                    is_row = rows.query_ids == query_id
                    is_column = columns.document_ids == passage_id
                excluded |= is_row[:, None] & is_column
        if self.false_negative_margin is not None:
            ceilings = positive_similarities + self.false_negative_margin
            excluded |= similarities > ceilings[:, None]
        if rows.guide.shape[1] > 0:
            margins = torch.full_like(guide_cosines, self.guide_margin)
            if self.guide_margin_strategy == "relative":
                margins = self.guide_margin * guide_cosines.abs()
            ceilings = guide_cosines - margins
            excluded |= rows.guide @ columns.guide.T > ceilings[:, None]
        return excluded

    def _has_hardness(self, rows: Texts, columns: Texts) -> Tensor:
        """Find the negatives that ``hardness_mode`` names."""
        is_own_pair = rows.pair_index[:, None] == columns.pair_index
        is_positive = _first_column_of_pair(rows, columns)
        if self.hardness_mode == "in_batch_negatives":
            return ~is_own_pair
        if self.hardness_mode == "hard_negatives":
            return is_own_pair & ~is_positive
        return ~is_positive

    def _weight(self) -> float:
        """Return how often a banked pair counts."""
        if self.bank_weight <= 1:
            return self.bank_weight
        in_use = len(self.history) - self.oldest_in_use
        return min(self.bank_weight / max(in_use, 1), 1.0)

    def _normalize(self, embeddings: Tensor) -> Tensor:
        if self.similarity == "cos":
            return normalize(embeddings, dim=-1)
        return embeddings

    # The pairs in use

    def _store(self, local: list[Pair], is_finite: bool) -> None:
        """Append the micro-batch, and forget whole blocks of the oldest pairs."""
        for pair in local:
            documents = pair.documents.detach()
            document_ids = pair.document_ids
            guide_documents = pair.guide_documents
            if not self.bank_hard_negatives:
                documents = documents[:1]
                document_ids = document_ids[:1]
                guide_documents = guide_documents[:1]
            stored = pair._replace(
                query=pair.query.detach(),
                documents=documents,
                document_ids=document_ids,
                guide_documents=guide_documents,
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

    def _stored_query_mean(self, number: int) -> Tensor:
        """Return the mean of the query tower for a pair: that of the first pair of its run."""
        pairs_per_run = min(self.block_size, PAIRS_PER_MEAN)
        return self.query_means[number - number % pairs_per_run]

    def _moves_entries(self) -> bool:
        return self.drift_compensation in ("auto", "mean")

    def _centres_passages(self, documents: Tensor) -> bool:
        """Whether an entry of an older encoder is in use; one document would leave no gradient."""
        has_aged_entries = self.update_start > self.oldest_in_use
        num_documents = documents.shape[0] * documents.shape[1]
        return self.drift_compensation == "auto" and has_aged_entries and num_documents > 1

    def _age_at_residual_bound(self) -> float:
        """Interpolate the age in pairs at which the passages' residual drift reaches the bound."""
        latest_pairs, _, latest = self.probes[-1]
        younger_age = 0.0
        younger_residual = 0.0
        for pairs, _, passages in reversed(self.probes[:-1]):
            residual = math.sqrt(_variance(latest - passages) / _variance(latest))
            age = latest_pairs - pairs
            if residual > RESIDUAL_BOUND:
                share = (RESIDUAL_BOUND - younger_residual) / (residual - younger_residual)
                return younger_age + share * (age - younger_age)
            younger_age = age
            younger_residual = residual
        return math.inf


def join_documents(embeddings: Sequence[Tensor]) -> Tensor:
    """Join passages (n, d) and hard negatives (n, h, d), the queries aside: (n, 1 + h, d)."""
    return torch.cat([embeddings[1][:, None], *embeddings[2:]], dim=1)


def make_pairs(
    queries: Tensor,
    documents: Tensor,
    ids: Sequence[Tensor],
    guide: Sequence[Tensor],
    passage_mean: Tensor,
) -> list[Pair]:
    """Split a micro-batch into pairs; queries are (n, d) and documents (n, 1 + h, d)."""
    n = len(queries)
    query_ids = torch.full((n,), NO_ID)
    document_ids = torch.full(documents.shape[:2], NO_ID)
    if ids:
        query_ids = ids[0]
        document_ids = torch.cat([ids[1][:, None], *ids[2:]], dim=1)
    guide_queries = torch.zeros(n, 0, dtype=torch.float64)
    guide_documents = torch.zeros(*documents.shape[:2], 0, dtype=torch.float64)
    if guide:
        guide_queries = normalize(guide[0], dim=-1)
        guide_documents = normalize(join_documents(guide), dim=-1)
    pairs = []
    for i in range(n):
        pair = Pair(
            query=queries[i],
            documents=documents[i],
            query_id=query_ids[i],
            document_ids=document_ids[i],
            guide_query=guide_queries[i],
            guide_documents=guide_documents[i],
            passage_mean=passage_mean,
        )
        pairs.append(pair)
    return pairs


def query_texts(pairs: Sequence[Pair]) -> Texts:
    """Return the queries of pairs."""
    return Texts(
        embeddings=torch.stack([pair.query for pair in pairs]),
        pair_index=torch.arange(len(pairs)),
        query_ids=torch.stack([pair.query_id for pair in pairs]),
        document_ids=torch.stack([pair.document_ids[0] for pair in pairs]),
        guide=torch.stack([pair.guide_query for pair in pairs]),
    )


def document_texts(pairs: Sequence[Pair], passage_mean: Tensor) -> Texts:
    """Return the passages and hard negatives of pairs, moved to the present ``passage_mean``."""
    embeddings = []
    pair_index = []
    query_ids = []
    for index, pair in enumerate(pairs):
        num_documents = len(pair.documents)
        query_ids_of_pair = torch.full((num_documents,), NO_ID)
        query_ids_of_pair[0] = pair.query_id
        embeddings.append(pair.documents - pair.passage_mean + passage_mean)
        pair_index.append(torch.full((num_documents,), index))
        query_ids.append(query_ids_of_pair)
    return Texts(
        embeddings=torch.cat(embeddings),
        pair_index=torch.cat(pair_index),
        query_ids=torch.cat(query_ids),
        document_ids=torch.cat([pair.document_ids for pair in pairs]),
        guide=torch.cat([pair.guide_documents for pair in pairs]),
    )


def _positions_of_passages(documents: Texts) -> Tensor:
    """Return the position of each pair's passage, which is the first of its documents."""
    return torch.searchsorted(documents.pair_index, documents.pair_index.unique())


def _first_column_of_pair(rows: Texts, columns: Texts) -> Tensor:
    """Return bool (r, c), True where the column is the passage of the row's pair."""
    is_passage = torch.zeros(len(columns.pair_index), dtype=torch.bool)
    is_passage[_positions_of_passages(columns)] = True
    return (rows.pair_index[:, None] == columns.pair_index) & is_passage


def _have_equal_ids(row_ids: Tensor, column_ids: Tensor) -> Tensor:
    return (row_ids[:, None] == column_ids) & (row_ids[:, None] != NO_ID)


def _subtract_mean_over_documents(gradient: Tensor) -> Tensor:
    return gradient - gradient.flatten(0, 1).mean(0)


def _variance(embeddings: Tensor) -> float:
    """Return the mean squared distance of texts (S, d) from their mean."""
    return (embeddings - embeddings.mean(0)).square().sum(1).mean().item()


def relative_errors(
    loss: Tensor, inputs: Sequence[Tensor], true_loss: Tensor, true_inputs: Sequence[Tensor]
) -> tuple[float, float]:
    """Return the relative errors of a loss and of the gradients of its inputs."""
    loss_error = abs(loss.item() - true_loss.item()) / max(1.0, abs(true_loss.item()))
    gradient = torch.cat([x.grad.flatten().double() for x in inputs])
    true_gradient = torch.cat([x.grad.flatten() for x in true_inputs])
    scale = true_gradient.norm().clamp_min(1e-3)
    gradient_error = (gradient - true_gradient).norm() / scale
    return loss_error, gradient_error.item()
