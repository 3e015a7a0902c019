"""The loss written down as plainly as possible: one (n + m) x (n + m) score matrix, autograd, loops for masks."""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from contaccum import BankedInfoNCE

TOWERS = {"query_to_doc": (0, 1), "query_to_query": (0, 0), "doc_to_query": (1, 0), "doc_to_doc": (1, 1)}


def dense_loss(
    rows: list[Tensor],
    columns: list[Tensor],
    positives: list[int],
    local_rows: int,
    temperature: float,
    moved: Tensor | None = None,
) -> Tensor:
    """Sum of all row losses over the local rows, of every row against every column; see :func:`logits`."""
    found = logits(rows, columns, temperature, moved=moved, positives=positives)
    return mean_loss([found], [positives], local_rows, "local", 1.0)


def mean_loss(
    found: list[Tensor], positives: list[list[int]], local_rows: int, normalize_by: str, weight: float | Tensor
) -> Tensor:
    """Of rows whose losses are means over several softmaxes; banked ones count ``weight`` times."""
    losses = [cross_entropy(x, torch.tensor(y), reduction="none") for x, y in zip(found, positives, strict=True)]
    losses = torch.stack(losses).mean(0)
    of_rows = torch.ones_like(losses)
    of_rows[local_rows:] = weight
    return (losses * of_rows).sum() / (local_rows if normalize_by == "local" else of_rows.sum())


def logits(
    rows: list[Tensor],
    columns: list[Tensor],
    temperature: float,
    masked: Tensor | None = None,
    moved: Tensor | None = None,
    weight: float | Tensor = 1.0,
    positives: list[int] = [],  # noqa: B006
    strength: Tensor | None = None,
) -> Tensor:
    """Scores over the temperature of every row with every column, and the logarithm of how often it counts.

    Args:
        rows, columns: parts to concatenate; gradients flow to the ones that require them.
        positives: the column of each row's positive.
        masked: bool (rows, columns), columns that a row leaves out.
        moved: (rows, d), how far a row counts as moved in its push on the columns, though not in its scores.
        weight: how often a banked column other than the own positive counts in a row, all or each.
        strength: (rows, columns), of the similarity that is added to the score, with no gradient.
    """
    q, c = torch.cat(rows), torch.cat(columns)
    similarities = q @ c.T
    scores = similarities / temperature
    if moved is not None:
        push = moved @ c.T / temperature
        scores = scores + push - push.detach()
    if strength is not None:
        scores = scores + strength * similarities.detach()
    if masked is not None:
        scores = scores.masked_fill(masked, -torch.inf)
    counts = torch.ones_like(scores)
    counts[:, len(columns[0]) :] = weight
    if positives:
        counts[torch.arange(len(positives)), positives] = 1.0
    return scores + counts.log()


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


def too_good(
    rows: Tensor, columns: Tensor, positives: list[int], margin: float, rule: str, own: Tensor | None = None
) -> Tensor:
    """True where a column other than a row's own positive scores beyond it, or ``own``, by a rule; vectors are those of
    the bank.

    They do not change while they are in it, and neither do their scores: so this is what was decided when they met.
    """
    scores = rows.detach() @ columns.detach().T
    own = scores[torch.arange(len(rows)), positives][:, None] if own is None else own
    bound = {"above": own + margin, "absolute": own - margin, "relative": own - own.abs() * margin}[rule]
    mask = scores > bound
    mask[torch.arange(len(rows)), positives] = False
    return mask


@dataclass
class History:
    """All pairs that a loss has seen, as it saw them: from these, and not from its sums, comes the dense loss."""

    loss_fn: BankedInfoNCE
    table: set[tuple[int, int]] = field(default_factory=set)
    pairs: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)  # (2 + h, d) twice, and ids: see add
    guided: list[Tensor] = field(default_factory=list)  # (2 + h, g) of each, of length 1: query, passage, negatives
    masked_share: float = 0.0  # of the last micro-batch's columns of query_to_doc, positives aside

    def dense(self, inputs: list[Tensor], ids: list[Tensor], guide: list[Tensor] = []) -> Tensor:  # noqa: B006
        """The dense loss of a micro-batch against the pairs in use, with gradients as drift compensation has them."""
        fn, bank = self.loss_fn, self.loss_fn.bank
        n, d = inputs[0].shape
        units = [normalize(x, dim=-1) if fn.similarity == "cos" else x * 1 for x in inputs]
        queries, columns = units[0], torch.cat([units[1][:, None], *units[2:]], dim=1)
        if fn.drift_compensation == "auto" and bank is not None and bank.aged and columns.numel() > d:
            columns.register_hook(lambda g: g - g.reshape(-1, d).mean(0))  # a mean over one would leave nothing
        towers, used = (fn.query_mean, fn.passage_mean), [] if bank is None else self.pairs[bank.first :]
        now = torch.zeros(2, d).to(queries)
        for i, mean in enumerate(towers if fn.query_mean is not None else ()):
            now[i] = mean.mean if fn.probe is not None else mean.after(units[i].detach())[0]
        weights = torch.ones(len(used), dtype=queries.dtype)
        if bank is not None and fn.bank_weight == "auto":
            weights = bank.log_weights[torch.arange(bank.first, bank.pairs) % bank.slots // bank.block].exp()
        elif bank is not None:
            weights *= fn.bank_weight if fn.bank_weight <= 1 else min(1.0, fn.bank_weight / max(len(used), 1))
        banked = used if bank is None or len(bank.queries) else []
        # A pair is its query, its passage, its hard negatives; as columns, banked ones are where their tower is by now.
        stale = [*torch.cat([queries[:, None], columns], dim=1), *(x.to(queries) for x, _, _ in banked)]
        pairs = [*stale[:n], *(x.to(queries) + now[[0] + [1] * (len(x) - 1)] for _, x, _ in used)]
        about = [*self._ids(ids), *(i for _, _, i in used)] if ids else []
        seen = [*self._guided(guide), *([] if bank is None else self.guided[bank.first :])] if guide else []
        level = torch.stack([x[0] @ y[1] for x, y in zip(stale, pairs, strict=False)])[:, None].detach()
        found, places = [], []
        for name in fn.directions:
            r, c = TOWERS[name]
            part = slice(1, None) if c else slice(0, 1)
            rows, parts = torch.stack([x[r] for x in stale]), [x[part] for x in pairs]
            own = torch.arange(len(rows))[:, None] == torch.tensor([i for i, x in enumerate(parts) for _ in x])
            positives = own.int().argmax(1).tolist()
            masked = own & (r == c)
            if ids and fn.mask_duplicates:
                masked |= self._masked_by_ids(name, about, positives)
            if fn.false_negative_margin is not None:
                given = None if (r, c) == (1, 0) and fn.partition_mode != "joint" else level
                masked |= too_good(rows, torch.cat(parts), positives, fn.false_negative_margin, "above", given)
            if guide:
                rows_seen, rule = torch.stack([x[:2] for x in seen])[: len(rows)], fn.guide_margin_strategy
                by_guide = (rows_seen[:, 0] * rows_seen[:, 1]).sum(1)[:, None]
                columns_seen = torch.cat([x[part] for x in seen])
                masked |= too_good(rows_seen[:, r], columns_seen, positives, fn.guide_margin, rule, by_guide)
            self.masked_share = self.masked_share if found else masked[:n].sum().item() / max(n * (own.shape[1] - 1), 1)
            moved = strength = None
            if fn.query_mean is not None and len(rows) > n:
                slots = torch.arange(bank.first, bank.pairs) % bank.slots
                origins = fn.banks[name].origins[slots // bank.note].to(queries)
                moved = torch.cat([torch.zeros_like(queries), towers[r].mean - origins])
            if fn.hardness_mode is not None and name == "query_to_doc":
                which = {"in_batch_negatives": ~own, "hard_negatives": own, "all_negatives": own | True}
                strength = which[fn.hardness_mode] * fn.hardness_strength
                strength[torch.arange(len(own)), positives] = 0
            local, counted = [torch.cat(parts[:n]), *parts[n:]], positives if r != c else []
            weight = weights.repeat_interleave(torch.tensor([len(x) for x in parts[n:]], dtype=torch.int64))
            found.append(logits([rows], local, fn.temperature, masked, moved, weight, counted, strength))
            places.append(positives)
        if fn.partition_mode == "joint":
            found, places = [torch.cat(found, dim=1)], places[:1]
        return mean_loss(found, places, n, fn.normalize_by, weights[: len(banked)])

    def _masked_by_ids(self, name: str, about: list[Tensor], positives: list[int]) -> Tensor:
        """By those of pairs, (2 + h,) each. A query is a column that came with its passage."""
        (r, c), table = TOWERS[name], self.table
        ends = torch.stack([i[:2] for i in about])
        columns = ends
        if c:
            columns = torch.cat([torch.stack([torch.full_like(i[1:], -1), i[1:]], dim=1) for i in about])
            starts = torch.tensor([0, *(len(i) - 1 for i in about)]).cumsum(0)[:-1]
            columns[starts, 0] = ends[:, 0]
        if (r, c) == (1, 0):
            ends, columns, table = ends.flip(1), columns.flip(1), {(p, q) for q, p in table}
        return masked_columns(ends[: len(positives)], positives, columns, table)

    def add(self, inputs: list[Tensor], ids: list[Tensor], guide: list[Tensor] = []) -> None:  # noqa: B006
        """Note a micro-batch that the loss has enqueued by now: as it was, and as it was beside the means by then."""
        fn = self.loss_fn
        units = [normalize(x.detach(), dim=-1) if fn.similarity == "cos" else x.detach() for x in inputs]
        whole = torch.cat([units[0][:, None], units[1][:, None], *units[2:]], dim=1)
        if not fn.bank_hard_negatives:
            whole = whole[:, :2]
        beside = whole
        if fn.query_mean is not None:
            means = torch.stack([fn.query_mean.mean, fn.passage_mean.mean])
            beside = whole - means[[0] + [1] * (whole.shape[1] - 1)]
        known = self._ids(ids)[:, : whole.shape[1]] if ids else [torch.empty(0)] * len(whole)
        self.pairs += list(zip(whole, beside, known, strict=True))
        self.guided += [x[: whole.shape[1]] for x in self._guided(guide)] if guide else []

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
    return loss_error, ((gradient - exact).norm() / exact.norm().clamp_min(1e-3)).item()
