"""Directions: whose similarities a loss is made of, beside those of queries with documents, as in its models.

Each has rows of one tower and columns of one, and a bank of its own, so that its log-sums are as exact as those of
``query_to_doc``. Here they are put together: in one softmax, or as the mean of several losses; and what a micro-step
tells about itself, in tensors that nobody has to read. It owns no bank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from contaccum.bank.logits import Guided, Pairs, PositivesTable, Scores
from contaccum.bank.memory_bank import MemoryBank
from contaccum.errors import ConfigError, check_choice

DIRECTIONS = {"query_to_doc": (0, 1), "query_to_query": (0, 0), "doc_to_query": (1, 0), "doc_to_doc": (1, 1)}
"""The towers that rows and columns are of: 0, queries; 1, passages, and as columns their hard negatives too."""


def in_order(directions: Sequence[str], partition_mode: str) -> tuple[str, ...]:
    """The directions, ``query_to_doc`` first; raises `ConfigError` for what makes no loss."""
    check_choice("partition_mode", partition_mode, ("joint", "per_direction"))
    directions = (directions,) if isinstance(directions, str) else tuple(directions)
    for name in directions:
        check_choice("directions", name, tuple(DIRECTIONS))
    if "query_to_doc" not in directions:
        raise ConfigError(f"directions={','.join(directions)}: add query_to_doc, which has the positives")
    alike = [name for name in directions if name in ("query_to_query", "doc_to_doc")]
    if partition_mode == "per_direction" and alike:
        raise ConfigError(f"partition_mode=per_direction with {alike[0]}, which has no positives: set joint")
    return tuple(name for name in DIRECTIONS if name in directions)


def pairs_of(name: str, whole: Pairs, means: Sequence[Tensor | None], needs_mean: bool) -> Pairs:
    """Rows and columns of a direction.

    Args:
        whole: those of ``query_to_doc``, with columns as they are.
        means: what the columns of each tower are to be relative to, (d,), or None.
        needs_mean: whether the loss asks for that.
    """
    towers = whole.queries[:, None], whole.columns
    rows, columns = DIRECTIONS[name]
    mean, ids, guide = means[columns], whole.ids, whole.guide
    if columns == 0:
        ids = ids[:, :, :1]
    if (rows, columns) == (1, 0):
        ids = ids.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)  # a query came with its passage
    if guide is not None:
        seen = guide.queries[:, None], guide.columns
        guide = Guided(seen[rows][:, 0], seen[columns], guide.ceiling)
    return whole._replace(
        queries=towers[rows][:, 0],
        columns=towers[columns] if mean is None else towers[columns] - mean,
        ids=ids,
        guide=guide,
        hardness=whole.hardness if name == "query_to_doc" else None,
        mean=mean if needs_mean else None,
        alike=rows == columns,
    )


class Direction(NamedTuple):
    """A direction's part of a micro-step, of local rows (n,) and of banked rows (m,)."""

    pairs: Pairs
    scores: Scores
    log_sums: tuple[Tensor, Tensor]  # over all columns
    positives: tuple[Tensor, Tensor]
    levels: list[Tensor | float]  # what both lack, where the pairs know their mean

    @classmethod
    def of(
        cls,
        pairs: Pairs,
        bank: MemoryBank | None,
        table: PositivesTable | None,
        origin: Tensor | None,
        log_weight: float,
        base: Direction | None,
    ) -> Direction:
        """Scores and sums of a direction, whose rows have the positives of ``base``, where that is given."""
        queries, hardness = pairs.queries / pairs.temperature, pairs.hardness
        levels: list[Tensor | float] = [0.0, 0.0]
        if pairs.mean is not None:
            levels = [pairs.of_mean(queries), 0.0 if bank is None else bank.of_mean(pairs)]
        if base is not None and pairs.margin is not None:
            local, banked = (x + y - z for x, y, z in zip(base.positives, base.levels, levels, strict=True))
            pairs = pairs._replace(positives=(local.detach(), banked))
        if bank is None:
            scores, none = pairs.scores(queries, table), queries.new_zeros(0)
            banked_sum, banked_positive, by_block = none, none, scores.by_block
        else:
            scores = bank.scores(pairs, table, origin)
            banked_sum, banked_positive = bank.row_sums(pairs, scores, log_weight)
            by_block = scores.by_block + bank.log_weights[: scores.by_block.shape[1]] + log_weight
        log_sum = torch.cat([scores.own.flatten(1), by_block], dim=1).logsumexp(1)
        positive = scores.positive
        if hardness is not None:
            positive = positive - hardness.off(pairs.of_mean(queries))
            levels = [x if isinstance(x, float) else hardness.penalised(x) for x in levels]
        return cls(pairs, scores, (log_sum, banked_sum), (positive, banked_positive), levels)


def meet(
    names: Sequence[str],
    partition_mode: str,
    whole: Pairs,
    banks: Mapping[str, MemoryBank],
    means: Sequence[Tensor | None],
    origins: Sequence[Tensor | None],
    table: PositivesTable | None,
    log_weight: float,
) -> list[Direction]:
    """Scores and sums of all directions.

    Args:
        whole: the pairs, with columns as they are.
        means: what the columns of each tower are to be relative to, (d,), or None.
        origins: where the mean of each tower is by now, for rows, or None.
        log_weight: of a banked column.
    """
    joint = partition_mode == "joint" and len(names) > 1
    found: list[Direction] = []
    for name in names:
        pairs = pairs_of(name, whole, means, needs_mean=joint or whole.hardness is not None)
        known = table.swapped() if table is not None and name == "doc_to_query" else table
        base = found[0] if joint and found else None
        found.append(Direction.of(pairs, banks.get(name), known, origins[DIRECTIONS[name][0]], log_weight, base))
    return found


def together(found: Sequence[Direction], partition_mode: str) -> tuple[Tensor, Tensor]:
    """Log-sums of rows over all directions in one softmax, or what gives their mean loss with the first's positives."""
    base, *others = found
    if not others:
        return base.log_sums
    sums = []
    for i in range(2):
        if partition_mode == "joint":
            apart = [x.log_sums[i] + (x.levels[i] - base.levels[i]) for x in others]
            sums.append(torch.stack([base.log_sums[i], *apart]).logsumexp(0))
        else:
            losses = [x.log_sums[i] - x.positives[i] for x in found]
            sums.append(torch.stack(losses).mean(0) + base.positives[i])
    return sums[0], sums[1]


def facts(found: Sequence[Direction], bank: MemoryBank | None, passages: Tensor) -> dict[str, Tensor | int]:
    """For logs: of rows, columns and local ``passages`` (n, d); ``masked`` is that of ``query_to_doc``, the first."""
    n = len(passages)
    in_use = passages.new_zeros(0, dtype=torch.bool) if bank is None else bank.absent[: bank.span].flatten() == 0
    spread = passages.var(0, correction=0).sum() / passages.square().sum() * n
    width = sum(x.pairs.columns.shape[1] for x in found)
    banked_width = sum(x.scores.of_columns.shape[1] for x in found) // max(0 if bank is None else bank.span, 1)
    return {
        "columns": n * width + (0 if bank is None else bank.in_use * banked_width),
        "masked": found[0].scores.masked(in_use),
        "bank_rows": bank.in_use if bank is not None and len(bank.queries) else 0,
        "embedding_spread": spread if n > 1 else spread * math.nan,
    }


@torch.no_grad()
def masses(base: Direction, log_sum: Tensor, bank: MemoryBank, weights: Tensor) -> dict[str, Tensor]:
    """For logs: where the local rows' softmax lies, of which ``weights`` (m (1 + h),) are on the bank's columns.

    Fresh columns are the in-batch negatives and entries of the same update; the positives do not count.
    """
    n, oldest_first = len(log_sum), torch.arange(bank.first, bank.pairs, device=weights.device)
    on_passages = weights.view(bank.span, -1)[oldest_first % bank.slots, 0]
    aged, fresh = on_passages[: bank.aged].sum(), on_passages[bank.aged :].sum()
    local = (base.scores.own[:, :, 0] - log_sum[:, None]).exp()
    in_batch = local.sum() - local.diagonal().sum()
    of_fresh = (in_batch + fresh) / (n - 1 + bank.in_use - bank.aged)
    return {
        "bank_mass": (aged + fresh) / n,
        "bank_mass_aged": aged / bank.aged / of_fresh,
        "in_batch_mass": in_batch / n,
    }
