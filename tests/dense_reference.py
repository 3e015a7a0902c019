"""The loss written down as plainly as possible: one (n + m) x (n + m) score matrix, autograd, loops for masks."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import normalize

from contaccum import BankedInfoNCE


def dense_loss(
    rows: list[Tensor],
    columns: list[Tensor],
    positives: list[int],
    local_rows: int,
    temperature: float,
    normalize_by: str = "local",
    masked: Tensor | None = None,
    moved: Tensor | None = None,
    weight: float = 1.0,
) -> Tensor:
    """Mean row loss over local rows (or all), of every row against every column.

    Args:
        rows, columns: parts to concatenate; gradients flow to the ones that require them.
        positives: the column of each row's positive.
        masked: bool (rows, columns), columns that a row leaves out.
        moved: (rows, d), how far a row counts as moved in its push on the columns, though not in its scores.
        weight: how often a banked row counts in the sum, and a banked column other than the own positive in a row.
    """
    q, c = torch.cat(rows), torch.cat(columns)
    scores = q @ c.T / temperature
    if moved is not None:
        push = moved @ c.T / temperature
        scores = scores + push - push.detach()
    if masked is not None:
        scores = scores.masked_fill(masked, -torch.inf)
    counts = torch.ones_like(scores)
    counts[:, len(columns[0]) :] = weight
    counts[torch.arange(len(positives)), positives] = 1.0
    losses = torch.nn.functional.cross_entropy(scores + counts.log(), torch.tensor(positives), reduction="none")
    of_rows = torch.ones_like(losses)
    of_rows[local_rows:] = weight
    return (losses * of_rows).sum() / (local_rows if normalize_by == "local" else of_rows.sum())


def masked_columns(rows: Tensor, positives: list[int], columns: Tensor, table: set[tuple[int, int]]) -> Tensor:
    """True where a column other than a row's own holds its passage again, came with its query, or is in the table.

    Args:
        rows: int64 (r, 2): the ids of each row's query and of its passage.
        columns: int64 (c, 2): the id of the query that a column came with (-1 for hard negatives), and its own.
        table: pairs of ids below 100, as all ids are.
    """
    known = torch.zeros(100, 100, dtype=torch.bool)
    for query, passage in table:
        known[query, passage] = True
    mask = (rows[:, None] == columns).any(2) | known[rows[:, :1], columns[:, 1]]
    mask[torch.arange(len(rows)), positives] = False
    return mask


def too_good(rows: Tensor, columns: Tensor, positives: list[int], margin: float, rule: str) -> Tensor:
    """True where a column other than a row's own positive scores beyond it by a rule; vectors are those of the bank.

    They do not change while they are in it, and neither do their scores: so this is what was decided when they met.
    """
    scores = rows.detach() @ columns.detach().T
    own = scores[torch.arange(len(rows)), positives][:, None]
    bound = {"above": own + margin, "absolute": own - margin, "relative": own - own.abs() * margin}[rule]
    mask = scores > bound
    mask[torch.arange(len(rows)), positives] = False
    return mask


@dataclass
class History:
    """All pairs that a loss has seen, as it saw them: from these, and not from its sums, comes the dense loss."""

    loss_fn: BankedInfoNCE
    table: set[tuple[int, int]] = field(default_factory=set)
    pairs: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)  # (d,), (1 + h, d), ids
    guided: list[Tensor] = field(default_factory=list)  # (2 + h, g) of each, of length 1: query, passage, negatives
    masked_share: float = 0.0  # of the last micro-batch's columns, positives aside

    def dense(self, inputs: list[Tensor], ids: list[Tensor], guide: list[Tensor] = []) -> Tensor:  # noqa: B006
        """The dense loss of a micro-batch against the pairs in use, with gradients as drift compensation has them."""
        fn, bank = self.loss_fn, self.loss_fn.bank
        n, d = inputs[0].shape
        units = [normalize(x, dim=-1) if fn.similarity == "cos" else x * 1 for x in inputs]
        queries, columns = units[0], torch.cat([units[1][:, None], *units[2:]], dim=1)
        passages, moved = units[1].detach(), None
        used = [] if bank is None else self.pairs[bank.first :]
        if fn.drift_compensation == "auto" and bank is not None and bank.aged:
            for part in (queries, columns):
                if part.numel() > d:  # a mean over one would leave nothing
                    part.register_hook(lambda g: g - g.reshape(-1, d).mean(0))
        if fn.passage_mean is not None and fn.query_mean is not None:
            mean = fn.passage_mean.mean if fn.probe is not None else fn.passage_mean.after(passages)[0]
            columns = columns - mean.to(columns)
            slots = torch.arange(bank.first, bank.pairs) % bank.slots
            moved = (fn.query_mean.mean - bank.origins[slots // bank.note]).to(columns) if len(bank.queries) else None
        width = columns.shape[1]
        rows = [queries, *(q[None].to(queries) for q, _, _ in used if len(bank.queries))]
        parts = [columns.reshape(-1, d), *(c.to(columns) for _, c, _ in used)]
        starts = torch.tensor([0, *(len(c) for _, c, _ in used)]).cumsum(0)[:-1] + n * width
        positives = [*range(0, n * width, width), *(starts.tolist() if bank is not None and len(bank.queries) else [])]
        moved = None if moved is None else torch.cat([torch.zeros_like(queries), moved])
        masked = torch.zeros(sum(map(len, rows)), sum(map(len, parts)), dtype=torch.bool)
        if ids:
            about = [*self._ids(ids), *(i for _, _, i in used)]
            columns_of = torch.cat([torch.stack([torch.full_like(i[1:], -1), i[1:]], dim=1) for i in about])
            columns_of[[*range(0, n * width, width), *starts.tolist()], 0] = torch.stack([i[0] for i in about])
            rows_of = torch.stack([i[:2] for i in about])[: len(positives)]
            masked = masked_columns(rows_of, positives, columns_of, self.table)
        if fn.false_negative_margin is not None:
            masked |= too_good(torch.cat(rows), torch.cat(parts), positives, fn.false_negative_margin, "above")
        if guide:
            seen = [*self._guided(guide), *([] if bank is None else self.guided[bank.first :])]
            rows_seen = torch.stack([x[0] for x in seen])[: len(positives)]
            columns_seen = torch.cat([x[1:] for x in seen])
            masked |= too_good(rows_seen, columns_seen, positives, fn.guide_margin, fn.guide_margin_strategy)
        self.masked_share = masked[:n].sum().item() / max(n * (masked.shape[1] - 1), 1)
        weight = fn.bank_weight if fn.bank_weight <= 1 else min(1.0, fn.bank_weight / max(len(used), 1))
        return dense_loss(rows, parts, positives, n, fn.temperature, fn.normalize_by, masked, moved, weight)

    def add(self, inputs: list[Tensor], ids: list[Tensor], guide: list[Tensor] = []) -> None:  # noqa: B006
        """Note a micro-batch that the loss has enqueued by now."""
        fn = self.loss_fn
        units = [normalize(x.detach(), dim=-1) if fn.similarity == "cos" else x.detach() for x in inputs]
        columns = torch.cat([units[1][:, None], *units[2:]], dim=1)
        if not fn.bank_hard_negatives:
            columns = columns[:, :1]
        if fn.passage_mean is not None:
            columns = columns - fn.passage_mean.mean
        known = self._ids(ids)[:, : 1 + columns.shape[1]] if ids else [torch.empty(0)] * len(columns)
        self.pairs += list(zip(units[0], columns, known, strict=True))
        self.guided += [x[: 1 + columns.shape[1]] for x in self._guided(guide)] if guide else []

    @staticmethod
    def _guided(guide: list[Tensor]) -> Tensor:
        """(n, 2 + h, g): of queries, passages and hard negatives."""
        return normalize(torch.cat([guide[0][:, None], guide[1][:, None], *guide[2:]], dim=1), dim=-1)

    @staticmethod
    def _ids(ids: list[Tensor]) -> Tensor:
        """(n, 2 + h): of queries, passages and hard negatives."""
        return torch.cat([ids[0][:, None], ids[1][:, None], *ids[2:]], dim=1)


def errors(value: Tensor, tensors: list[Tensor], true_value: Tensor, true: list[Tensor]) -> tuple[float, float]:
    """Relative errors of a loss and of its gradient."""
    gradient, exact = (torch.cat([x.grad.flatten().double() for x in each]) for each in (tensors, true))
    loss_error = abs(value.item() - true_value.item()) / max(1.0, abs(true_value.item()))
    return loss_error, ((gradient - exact).norm() / exact.norm()).item()
