"""Rules that find false negatives: documents that a row must not be contrasted with.

Every rule has the signature of `contaccum.bank.logits.FalseNegativeRule`: rows (r pairs), columns
(c pairs) and their logits (r, c, 1 + h) to a bool tensor of that shape. `make_rules` lists the
rules of some settings; `masked_logits` applies them.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from contaccum.bank.logits import IDS_PER_TEXT, NO_ID, NO_ID_OF_ROW, FalseNegativeRule, Pairs
from contaccum.bank.settings import LossSettings


def make_rules(settings: LossSettings, positives: PositivesTable | None) -> list[FalseNegativeRule]:
    """List the rules that the settings ask for."""
    rules: list[FalseNegativeRule] = []
    if settings.mask_duplicates:
        rules.append(is_same_text)
        if positives is not None:
            rules.append(positives.is_listed)
    if settings.false_negative_margin is not None:
        rules.append(MarginRule(settings.false_negative_margin / settings.temperature))
    rules.append(is_above_guide_ceiling)
    return rules


def is_same_text(rows: Pairs, columns: Pairs, logits: Tensor) -> Tensor:
    """Find documents that are a row's positive again, or another positive of its query, by ids."""
    is_same = torch.zeros_like(logits, dtype=torch.bool)
    is_equal = torch.empty_like(is_same)  # in the memory layout of the logits, which is faster
    positive_ids = _reserve_no_id(rows.document_ids[:, :, 0])
    query_ids = _reserve_no_id(rows.query_ids)
    for kind in range(IDS_PER_TEXT):
        torch.eq(positive_ids[kind, :, None, None], columns.document_ids[kind], out=is_equal)
        is_same |= is_equal
        torch.eq(query_ids[kind, :, None], columns.query_ids[kind], out=is_equal[:, :, 0])
        is_same[:, :, 0] |= is_equal[:, :, 0]
    return is_same


def _reserve_no_id(ids: Tensor) -> Tensor:
    """Return the ids of rows, with a reserved value for `NO_ID`, which columns have as well."""
    return torch.where(ids == NO_ID, NO_ID_OF_ROW, ids)


class MarginRule:
    """Find documents that score above a row's own positive by more than a margin, in logits."""

    def __init__(self, margin: float) -> None:
        self.margin = margin

    def __call__(self, rows: Pairs, columns: Pairs, logits: Tensor) -> Tensor:
        """Apply the rule; see `FalseNegativeRule`."""
        ceilings = rows.positive_logits + self.margin
        return logits > ceilings[:, None, None]


def is_above_guide_ceiling(rows: Pairs, columns: Pairs, logits: Tensor) -> Tensor:
    """Find documents that a guide scores above the ceiling of their row; none without a guide."""
    if rows.guide is None or columns.guide is None:
        return torch.zeros((), dtype=torch.bool, device=logits.device)
    cosines = rows.guide.queries @ columns.guide.documents.flatten(0, 1).T
    is_above = cosines > rows.guide.ceilings[:, None]
    return is_above.unflatten(1, columns.valid.shape)


class PositivesTable:
    """Relevant pairs of (query id, passage id), such as all positives of a data set.

    Ids are the first ids of the texts. The table takes 64 bytes a pair.

    Args:
        query_ids, passage_ids: int64 (p,) each; pairs with a `NO_ID` are left out.
    """

    def __init__(self, query_ids: Tensor, passage_ids: Tensor) -> None:
        has_ids = (query_ids != NO_ID) & (passage_ids != NO_ID)
        query_ids = query_ids[has_ids].long()
        passage_ids = passage_ids[has_ids].long()
        self.passages_of_query = _SortedLists(query_ids, passage_ids)
        self.queries_of_passage = _SortedLists(passage_ids, query_ids)

    def swapped(self) -> PositivesTable:
        """Return the same table for rows that are passages and columns that are queries."""
        table = copy.copy(self)
        table.passages_of_query = self.queries_of_passage
        table.queries_of_passage = self.passages_of_query
        return table

    def is_listed(self, rows: Pairs, columns: Pairs, logits: Tensor) -> Tensor:
        """Find documents that are listed as positives of a row's query; see `FalseNegativeRule`."""
        query_ids = rows.query_ids[0]
        document_ids = columns.document_ids[0]
        if len(query_ids) <= document_ids.numel():
            listed = self.passages_of_query.contains(query_ids, document_ids.flatten())
        else:
            listed = self.queries_of_passage.contains(document_ids.flatten(), query_ids).T
        return listed.reshape(logits.shape)


class _SortedLists:
    """For each key a sorted list of values; keys and values are int64 (p,), one pair each."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        by_value = values.argsort()
        order = by_value[keys[by_value].argsort(stable=True)]
        self.values = values[order]
        self.keys, self.lengths = keys[order].unique_consecutive(return_counts=True)
        self.starts = self.lengths.cumsum(0) - self.lengths
        self.max_length = int(self.lengths.max()) if len(self.keys) else 0

    def contains(self, keys: Tensor, values: Tensor) -> Tensor:
        """Return bool (k, v): whether the lists of a few ``keys`` (k,) hold ``values`` (v,)."""
        if not self.max_length:
            return torch.zeros(len(keys), len(values), dtype=torch.bool, device=keys.device)
        self._move_to(keys.device)
        key_index = torch.searchsorted(self.keys, keys.contiguous())
        key_index = key_index.clamp_(max=len(self.keys) - 1)
        is_listed_key = self.keys[key_index] == keys
        lengths = torch.where(is_listed_key, self.lengths[key_index], 0)[:, None]

        # (k, max_length): the lists side by side, padded with the largest integer to stay sorted.
        offsets = torch.arange(self.max_length, device=keys.device)
        value_index = (self.starts[key_index][:, None] + offsets).clamp_(max=len(self.values) - 1)
        lists = self.values[value_index]
        lists = torch.where(offsets < lengths, lists, torch.iinfo(torch.int64).max)

        position = torch.searchsorted(lists, values.expand(len(keys), -1).contiguous())
        candidates = lists.gather(1, position.clamp(max=self.max_length - 1))
        return (position < lengths) & (candidates == values)

    def _move_to(self, device: torch.device) -> None:
        if self.keys.device != device:
            self.keys = self.keys.to(device)
            self.lengths = self.lengths.to(device)
            self.starts = self.starts.to(device)
            self.values = self.values.to(device)
