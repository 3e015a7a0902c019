"""A micro-batch of pairs: its scores, and which columns its rows must not treat as negatives.

Those are a row's own positive again, and other positives of its query, by ids and a table of pairs known beforehand;
and what scores too far above a row's own positive, or does by a guide. It is decided when row and column meet: what is
hidden stays hidden, whatever comes and goes beside it. It knows no bank. Letters in shapes: n pairs in the micro-batch,
h hard negatives per query, d the embedding size, g that of the guide.
"""

from __future__ import annotations

import copy
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

NO_ID = torch.iinfo(torch.int64).min
"""The id of an entry that came without one. It never equals anything, itself included."""


IDS_PER_TEXT = 2
"""A text has at most so many ids, for example one that the data set gives and a hash of its tokens."""


class Ids(NamedTuple):
    """Ids of the texts of a micro-batch, int64, or None where there are none.

    A last dimension of ``IDS_PER_TEXT`` may follow the shapes below. Two texts are the same if one of their ids, in the
    same place of that dimension, is equal.
    """

    queries: Tensor | None = None  # (n,)
    passages: Tensor | None = None  # (n,)
    negatives: Tensor | None = None  # (n, h)

    def stack(self, n: int, h: int, device: torch.device) -> Tensor:
        """Stack the ids of all texts: int64 (n, 2 + h, IDS_PER_TEXT), ``NO_ID`` where there is none."""
        stacked = torch.full((n, 2 + h, IDS_PER_TEXT), NO_ID, device=device)
        columns = (stacked[:, 0], stacked[:, 1], stacked[:, 2:])
        for column, ids in zip(columns, self, strict=True):
            if ids is None:
                continue
            if ids.ndim == column.ndim:
                column.copy_(ids)
            else:
                column[..., 0] = ids
        return stacked


class Guided(NamedTuple):
    """A micro-batch as a guide sees it, who has embeddings of length 1."""

    queries: Tensor  # (n, g)
    columns: Tensor  # (n, 1 + h, g)
    ceiling: Tensor  # (n,): what scores above it by the guide is no negative of a row

    @classmethod
    def of(cls, embeddings: list[Tensor], margin: float, relative: bool) -> Guided:
        """Of queries (n, g), passages (n, g) and, if any, negatives (n, h, g): GISTEmbed's rule (arXiv 2402.16829)."""
        queries, passages, *negatives = (normalize(x, dim=-1) for x in embeddings)
        positive = (queries * passages).sum(1)
        ceiling = positive - margin * (positive.abs() if relative else 1.0)
        return cls(queries, torch.cat([passages[:, None], *negatives], dim=1), ceiling)


class Hardness(NamedTuple):
    """What penalties multiply scores by, over and above 1: strength times temperature, or 0.

    As in sentence-transformers' MultipleNegativesRankingLoss: to the logit of a negative comes its similarity times a
    strength, of which no gradient is taken. In all that is its score times 1 + strength * temperature, with the
    gradient of the score alone.

    Columns are relative to the mean of their tower, where entries move along with it. That lowers all scores of a row
    by one number, its score with the mean, which no row loss sees; but penalties do. So a row is taken to be lower by
    the penalty of that number too (`off`): nothing has to be added to the columns of other pairs, which are nearly
    all, and the tables hold numbers that stay true while the mean moves.
    """

    own: float | Tensor  # those of a row with the hard negatives of its own pair
    others: float | Tensor  # and with all columns of other pairs

    @classmethod
    def of(cls, mode: str | None, strength: float, temperature: float | Tensor) -> Hardness | None:
        """That of a setting; None: no penalties."""
        if mode is None:
            return None
        penalty = strength * temperature
        return cls(penalty if mode != "in_batch_negatives" else 0.0, penalty if mode != "hard_negatives" else 0.0)

    def penalised(self, x: Tensor) -> Tensor:
        """Vectors or scores of other pairs' columns, times what they are to be; with their own gradient."""
        return x + self.others * x.detach()

    def off(self, of_mean: Tensor) -> Tensor:
        """How much lower a row is taken to be, (k,), whose scores with the mean are ``of_mean`` (k,)."""
        return self.others * of_mean.detach()

    def off_own(self, of_mean: Tensor) -> Tensor:
        """What a row's own hard negatives then still lack, (k,)."""
        return (self.own - self.others) * of_mean.detach()

    def of_local(self, scores: Tensor, of_mean: Tensor) -> Tensor:
        """Those of a micro-batch with itself, (n, n (1 + h)), with the penalties."""
        n = len(of_mean)
        hard = self.penalised(scores).view(n, n, -1)
        own, found = hard.diagonal(dim1=0, dim2=1), scores.detach().view(n, n, -1).diagonal(dim1=0, dim2=1)
        own[0] -= self.others * found[0] + self.off(of_mean)
        own[1:] += (self.own - self.others) * found[1:] + self.off_own(of_mean)
        return hard.view(n, -1)


class Pairs(NamedTuple):
    """A micro-batch as rows and columns of the similarity matrix."""

    queries: Tensor  # (n, d)
    columns: Tensor  # (n, 1 + h, d): the passage that came with each query, then its hard negatives
    # int64 (2 * IDS_PER_TEXT, n, 1 + h): the id of the query that a passage came with (NO_ID at hard negatives), and
    # its own; then the same for the texts' second ids.
    ids: Tensor
    named: bool  # False: no ids came, so that nothing of these pairs is masked by them
    temperature: float | Tensor = 1.0
    margin: float | Tensor | None = None  # over the temperature: what scores that far above a row's positive is masked
    guide: Guided | None = None
    hardness: Hardness | None = None
    mean: Tensor | None = None  # (d,), what columns are relative to, where the loss asks for it
    alike: bool = False  # rows and columns are of one tower: a pair's own columns are none of its row's
    positives: tuple[Tensor, Tensor] | None = None  # scores of local and banked rows that the margin counts from

    @classmethod
    def of(cls, queries: Tensor, columns: Tensor, given: Ids) -> Pairs:
        """The pairs with the ids that there are."""
        n, width, _ = columns.shape
        stacked = given.stack(n, width - 1, columns.device)
        ids = torch.full((IDS_PER_TEXT, 2, n, width), NO_ID, device=columns.device)
        ids[:, 0, :, 0] = stacked[:, 0].T
        ids[:, 1] = stacked[:, 1:].movedim(-1, 0)
        return cls(queries, columns, ids.flatten(0, 1), any(value is not None for value in given))

    @property
    def still_temperature(self) -> float | Tensor:
        """The temperature, with no gradient."""
        return self.temperature.detach() if isinstance(self.temperature, Tensor) else self.temperature

    def of_mean(self, queries: Tensor) -> Tensor:
        """What the mean adds to all scores of a row, (n,), of queries (n, d) over the temperature."""
        return queries.new_zeros(len(queries)) if self.mean is None else queries @ self.mean

    def scores(self, queries: Tensor, positives: PositivesTable | None = None) -> Scores:
        """All scores of a micro-batch where there is no bank, with its queries (n, d) over the temperature."""
        n, width, d = self.columns.shape
        own = queries @ self.columns.reshape(-1, d).T
        positive = own.view(n, n, width)[:, :, 0].diagonal()
        masks = []
        if self.named:
            masks.append(hidden(self.ids[:, :, 0], self.ids.flatten(1), positives, local_rows=True))
        if self.margin is not None:
            masks.append(own > (positive if self.positives is None else self.positives[0])[:, None] + self.margin)
        if self.guide is not None:
            masks.append(self.guide.queries @ self.guide.columns.flatten(0, 1).T > self.guide.ceiling[:, None])
        if self.hardness is not None:
            own = self.hardness.of_local(own, self.of_mean(queries))
        if self.alike:
            masks.append(torch.eye(n, dtype=torch.bool, device=own.device).repeat_interleave(width, 1))
        if masks:
            mask = torch.stack(masks).any(0)
            if not self.alike:
                mask.view(n, n, width)[:, :, 0].fill_diagonal_(False)
            own = own.masked_fill(mask, low(own.dtype))
        none = own.new_zeros(n, 0)
        return Scores(own.view(n, n, width), positive, none, none, own.new_zeros(n, width, 0), own.new_zeros(0))


class Scores(NamedTuple):
    """Similarities over the temperature, masked ones vanishingly low; differentiable with respect to the pairs.

    With a `Hardness` they have its penalties, ``positive`` aside, and each row is lower by its `off`.
    """

    own: Tensor  # (n, n, 1 + h) local queries against local columns
    positive: Tensor  # (n,) of each local query and its passage
    of_columns: Tensor  # (n, m (1 + h)) local queries against the bank's columns
    by_block: Tensor  # (n, blocks) their logsumexp over each block
    of_rows: Tensor  # (n, 1 + h, m) banked queries against local columns
    on_rows: Tensor  # (m,) their logsumexp over all local columns

    def masked(self, in_use: Tensor) -> Tensor:
        """The share of columns that local rows leave out, their positives aside, with the bank's that are ``in_use``,
        bool (m (1 + h),): a scalar."""
        n, vanishing = len(self.own), low(self.own.dtype) / 2
        left_out = (self.own <= vanishing).sum() + ((self.of_columns <= vanishing) & in_use).sum()
        return left_out / (n * (self.own[0].numel() - 1 + in_use.sum())).clamp_min(1)


class PositivesTable:
    """(query id, passage id) pairs known beforehand, such as all positives of a data set: r of them, in 64 bytes each.

    Args:
        query_ids, passage_ids: int64 (r,) each, ``NO_ID`` where an id is missing.
    """

    def __init__(self, query_ids: Tensor, passage_ids: Tensor) -> None:
        known = (query_ids != NO_ID) & (passage_ids != NO_ID)
        query_ids, passage_ids = query_ids[known].long(), passage_ids[known].long()
        self.of_queries, self.of_passages = _Lists(query_ids, passage_ids), _Lists(passage_ids, query_ids)

    def swapped(self) -> PositivesTable:
        """The same, with passages for rows."""
        other = copy.copy(self)
        other.of_queries, other.of_passages = self.of_passages, self.of_queries
        return other


class _Lists:
    """For each of many keys the list of its values, in order: int64 (r,) both."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        order = values.argsort()
        order = order[keys[order].argsort(stable=True)]
        keys, lengths = keys[order].unique_consecutive(return_counts=True)
        self.longest = int(lengths.max()) if len(lengths) else 0
        self.tensors = [keys, lengths.cumsum(0) - lengths, lengths, values[order]]

    def hold(self, keys: Tensor, values: Tensor) -> Tensor:
        """Bool (k, c): whether the lists of a few ``keys`` (k,) hold ``values`` (c,)."""
        if not self.longest:
            return torch.zeros(len(keys), len(values), dtype=torch.bool, device=keys.device)
        known, starts, lengths, listed = self.tensors = [x.to(keys.device) for x in self.tensors]
        place = torch.searchsorted(known, keys.contiguous()).clamp_(max=len(known) - 1)
        length = torch.where(known[place] == keys, lengths[place], 0)[:, None]
        step = torch.arange(self.longest, device=keys.device)
        lists = listed[(starts[place][:, None] + step).clamp_(max=len(listed) - 1)]
        lists = torch.where(step < length, lists, torch.iinfo(torch.int64).max)  # in order, for the search
        place = torch.searchsorted(lists, values.expand(len(keys), -1).contiguous())
        return (place < length) & (lists.gather(1, place.clamp(max=self.longest - 1)) == values)


def hidden(local: Tensor, other: Tensor, positives: PositivesTable | None, local_rows: bool) -> Tensor:
    """Where a row must not take a column for a negative, own positives included: bool (k, c).

    Args:
        local: int64 (2 * IDS_PER_TEXT, k), ids of the few rows or columns of the micro-batch: for a row those of its
            query and of the passage that came with it, for a column those of the query that it came with (``NO_ID`` at
            hard negatives) and its own; then their second ids.
        other: int64 (2 * IDS_PER_TEXT, c), those of the columns, or rows, that they meet.
        positives: pairs known beforehand, by the texts' first ids.
        local_rows: whether ``local`` are rows; otherwise they are columns.
    """
    same = local[:, :, None] == other[:, None]
    same &= local[:, :, None] != NO_ID
    mask = same.any(0)
    if positives is None:
        return mask
    if local_rows:
        return mask | positives.of_queries.hold(local[0], other[1])
    return mask | positives.of_passages.hold(local[1], other[0])


def low(dtype: torch.dtype) -> float:
    """The score of what is masked: no softmax sees it, and unlike -inf it makes no NaN where everything is masked."""
    return torch.finfo(dtype).min / 4


def check_embeddings(
    queries: Tensor, passages: Tensor, negatives: Tensor | None, ids: Ids, may_be_empty: bool = False
) -> None:
    """Refuse a micro-batch whose shapes do not agree: (n, d), (n, d) and (n, h, d), with ids for them.

    Raises:
        ValueError: naming the argument, its shape and the shape it should have.
    """
    if queries.ndim != 2 or queries.shape != passages.shape:
        shapes = f"{tuple(queries.shape)} and {tuple(passages.shape)}"
        raise ValueError(f"queries and passages must have the same shape (n, d), got {shapes}")
    n, d = queries.shape
    if n == 0 and not may_be_empty:
        raise ValueError("the micro-batch is empty")
    h = 0 if negatives is None else negatives.shape[1]
    if negatives is not None and negatives.shape != (n, h, d):
        raise ValueError(f"negatives must be (n, h, d) = ({n}, h, {d}), got {tuple(negatives.shape)}")
    for kind, value, shape in zip(("query", "passage", "negative"), ids, ((n,), (n,), (n, h)), strict=True):
        if value is None:
            continue
        fits = value.shape in (shape, (*shape, IDS_PER_TEXT))
        if not fits or value.dtype not in (torch.int64, torch.int32):
            got = f"{value.dtype} {tuple(value.shape)}"
            raise ValueError(f"{kind}_ids must be int64 {shape} or {(*shape, IDS_PER_TEXT)}, got {got}")
