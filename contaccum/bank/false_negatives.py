"""Rules that find false negatives: documents that must not be negatives of a row.

The queries of the row pairs are scored against the documents of the column pairs; see
`contaccum.bank.logits`. A false negative of a row is a copy of its positive, or another document
that is (probably) relevant to its query.

Every rule has the signature of `contaccum.bank.logits.FalseNegativeRule`: it maps rows (r pairs),
columns (c pairs) and their logits (r, c, 1 + h) to a bool tensor that broadcasts to the logits.
`make_rules` lists the rules of the settings, and `masked_logits` applies them.

Letters in shapes: r pairs whose queries are rows, c pairs whose documents are columns, h hard
negatives per query, p pairs in a table. A pair's documents are its positive passage (index 0), then
its hard negatives.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from contaccum.bank.logits import NO_ID, NO_ID_OF_ROW, FalseNegativeRule, Pairs
from contaccum.bank.settings import LossSettings


def make_rules(
    settings: LossSettings, positives: PositivesTable | None, has_guide: bool
) -> list[FalseNegativeRule]:
    """List the rules of the settings.

    Args:
        positives: table of the data set's positives, or None; used only with ``mask_duplicates``.
        has_guide: True if the pairs have guide embeddings.
    """
    rules: list[FalseNegativeRule] = []
    if settings.mask_duplicates:
        rules.append(find_duplicates)
        if positives is not None:
            rules.append(positives.find_listed)
    if settings.false_negative_margin is not None:
        margin = settings.false_negative_margin / settings.temperature
        rules.append(partial(find_above_margin, margin=margin))
    if has_guide:
        rules.append(find_above_guide_ceiling)
    return rules


def find_duplicates(rows: Pairs, columns: Pairs, logits: Tensor) -> Tensor:
    """Find copies of a row's own positive, and the positives of pairs with the same query, by ids.

    The signature is that of `FalseNegativeRule`.
    """
    positive_ids = rows.document_ids[:, :, 0]
    row_keys = torch.cat([positive_ids, rows.query_ids])  # (2 * IDS_PER_TEXT, r)
    # Two missing ids are not equal.
    row_keys = row_keys.masked_fill(row_keys == NO_ID, NO_ID_OF_ROW)
    # If a column pair has the row's query, its passage (index 0) is a positive of the row; its hard
    # negatives are not.
    num_negatives = columns.document_ids.shape[2] - 1
    query_ids = columns.query_ids[:, :, None]
    if num_negatives > 0:
        query_ids = pad(query_ids, (0, num_negatives), value=NO_ID)
    column_keys = torch.cat([columns.document_ids, query_ids])  # (2 * IDS_PER_TEXT, c, 1 + h)
    if logits.stride(0) < logits.stride(1):
        # The result gets the memory layout of the logits, with which it is combined faster.
        is_equal = row_keys[:, None, None, :] == column_keys[:, :, :, None]
        return is_equal.any(0).movedim(-1, 0)
    is_equal = row_keys[:, :, None, None] == column_keys[:, None]
    return is_equal.any(0)


def find_above_margin(rows: Pairs, columns: Pairs, logits: Tensor, margin: float) -> Tensor:
    """Find documents whose logit exceeds that of the row's positive by more than ``margin``.

    Logits are similarities divided by the temperature. The other arguments are those of
    `FalseNegativeRule`.
    """
    ceilings = rows.positive_logits + margin
    return logits > ceilings[:, None, None]


def find_above_guide_ceiling(rows: Pairs, columns: Pairs, logits: Tensor) -> Tensor:
    """Find documents with a cosine above the row's ceiling, both computed by the guide.

    The signature is that of `FalseNegativeRule`.
    """
    assert rows.guide is not None and columns.guide is not None  # see `make_rules`
    cosines = rows.guide.queries @ columns.guide.documents.flatten(0, 1).T
    is_above = cosines > rows.guide.ceilings[:, None]
    return is_above.unflatten(1, columns.documents.shape[:2])


class PositivesTable:
    """Table of relevant pairs (query id, passage id), such as all positives of a data set.

    The ids are the first ids of the texts. The table takes 64 bytes per pair.

    Args:
        query_ids, passage_ids: int64 (p,) each; pairs with a `NO_ID` are left out.
    """

    def __init__(self, query_ids: Tensor, passage_ids: Tensor) -> None:
        has_ids = (query_ids != NO_ID) & (passage_ids != NO_ID)
        query_ids = query_ids[has_ids].long()
        passage_ids = passage_ids[has_ids].long()
        self.passages_by_query = _SortedLists(query_ids, passage_ids)
        self.queries_by_passage = _SortedLists(passage_ids, query_ids)

    def find_listed(self, rows: Pairs, columns: Pairs, logits: Tensor) -> Tensor:
        """Find documents that the table lists as positives of a row's query.

        The signature is that of `FalseNegativeRule`.
        """
        query_ids = rows.query_ids[0]
        document_ids = columns.document_ids[0].flatten()
        # A lookup copies one list per key, so the side with fewer texts provides the keys.
        if len(query_ids) <= len(document_ids):
            is_listed = self.passages_by_query.contains(query_ids, document_ids)
        else:
            is_listed = self.queries_by_passage.contains(document_ids, query_ids).T
        return is_listed.reshape(logits.shape)


class _SortedLists:
    """Mapping of each key to a sorted list of values, in tensors.

    All lists stand one after the other in one tensor, ordered by key.

    Args:
        keys, values: int64 (p,) each; pair i adds ``values[i]`` to the list of ``keys[i]``.
    """

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        by_value = values.argsort()
        by_key_then_value = by_value[keys[by_value].argsort(stable=True)]
        self.values = values[by_key_then_value]
        sorted_keys = keys[by_key_then_value]
        self.keys, self.lengths = sorted_keys.unique_consecutive(return_counts=True)
        self.starts = self.lengths.cumsum(0) - self.lengths
        self.max_length = 0
        if len(self.keys) > 0:
            self.max_length = int(self.lengths.max())

    def contains(self, keys: Tensor, values: Tensor) -> Tensor:
        """Return bool (k, v), True where the list of a key contains a value.

        Args:
            keys: int64 (k,).
            values: int64 (v,).
        """
        if self.max_length == 0:
            return torch.zeros(len(keys), len(values), dtype=torch.bool, device=keys.device)
        if self.keys.device != keys.device:
            self.keys = self.keys.to(keys.device)
            self.lengths = self.lengths.to(keys.device)
            self.starts = self.starts.to(keys.device)
            self.values = self.values.to(keys.device)
        key_index = torch.searchsorted(self.keys, keys.contiguous())
        key_index = key_index.clamp_(max=len(self.keys) - 1)
        is_listed_key = self.keys[key_index] == keys
        lengths = torch.where(is_listed_key, self.lengths[key_index], 0)[:, None]

        # (k, max_length): the list of each key, padded with the largest integer, so that it stays
        # sorted for the binary search.
        offsets = torch.arange(self.max_length, device=keys.device)
        value_index = (self.starts[key_index][:, None] + offsets).clamp_(max=len(self.values) - 1)
        lists = self.values[value_index]
        lists = torch.where(offsets < lengths, lists, torch.iinfo(torch.int64).max)

        position = torch.searchsorted(lists, values.expand(len(keys), -1).contiguous())
        candidates = lists.gather(1, position.clamp(max=self.max_length - 1))
        return (position < lengths) & (candidates == values)
