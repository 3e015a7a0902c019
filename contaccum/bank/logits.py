"""Logits of queries against documents, with false negatives masked.

`masked_logits` scores the queries of any pairs (rows) against the documents of any pairs (columns).
The loss calls it for every block of its score matrix: the queries of the micro-batch (local) and of
the memory bank (banked) against the documents of either. So a rule that excludes false negatives
applies to all blocks alike.

Letters in shapes: n pairs in the micro-batch, m pairs in the bank, r pairs whose queries are rows,
c pairs whose documents are columns, h hard negatives per query, d the embedding size, g the
embedding size of a guide. A pair's documents are its positive passage, then its hard negatives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from contaccum.bank.settings import LossSettings

NO_ID = torch.iinfo(torch.int64).min
"""Id of a text that came without one. Such a text is never the same as another text."""

NO_ID_OF_ROW = NO_ID + 1
"""Value that replaces `NO_ID` in the ids of rows before they are compared with those of columns.

No column has it, so two missing ids are never equal.
"""

IDS_PER_TEXT = 2
"""Number of ids per text: for example an id from the data set and a hash of the tokens.

Two texts are the same if their first ids are equal or their second ids are equal. A text with one
id has `NO_ID` as the other.
"""

MASKED = -1e30
"""Logit of an excluded document. It is finite: a softmax over minus infinity alone gives NaN."""

SOFTPLUS_THRESHOLD = 40.0
"""Argument above which softplus(x) = log(1 + exp(x)) is x, which is exact in float64 too."""

ROWS_PER_PRODUCT = 2048
"""Number of documents (or queries) per matrix product; smaller products are faster on a CPU."""


class Pairs(NamedTuple):
    """Query-document pairs: a micro-batch, or the contents of a bank."""

    queries: Tensor  # (n, d)
    documents: Tensor  # (n, 1 + h, d)
    query_ids: Tensor  # int64 (IDS_PER_TEXT, n)
    document_ids: Tensor  # int64 (IDS_PER_TEXT, n, 1 + h)
    positive_logits: Tensor  # (n,), logit of each query and its own positive
    # bool (n, 1 + h), True for padding, retired and non-finite documents; None if there are none
    invalid: Tensor | None = None
    guide: GuideEmbeddings | None = None


class GuideEmbeddings(NamedTuple):
    """L2-normalised embeddings of the texts of `Pairs` by a guide, a second, frozen model."""

    queries: Tensor  # (n, g)
    documents: Tensor  # (n, 1 + h, g)
    ceilings: Tensor  # (n,), a document with a cosine above its row's ceiling is a false negative


class LogitBlocks(NamedTuple):
    """Logits of a micro-batch: the three blocks of the score matrix that have a gradient.

    A ring block is one of the equal parts of the bank's ring buffer; see `MemoryBank`.
    """

    banked: Pairs | None  # the bank's pairs; None without a bank

    in_batch: Tensor  # (n, n, 1 + h), local queries against local documents, own positives masked
    against_bank: Tensor  # (n, m, 1 + h), local queries against banked documents
    from_bank: Tensor  # (m, n, 1 + h), banked queries against local documents; m = 0 without them
    against_bank_sums: Tensor  # (n, ring blocks), logsumexp of against_bank over each ring block


FalseNegativeRule = Callable[[Pairs, Pairs, Tensor], Tensor]
"""Function of rows (r pairs), columns (c pairs) and their logits (r, c, 1 + h).

It returns a bool tensor that broadcasts to the shape of the logits: True where a document is a
false negative of the row, which means that it is (probably) relevant to the row's query.
"""


def masked_logits(
    rows: Pairs, columns: Pairs, temperature: float, rules: Sequence[FalseNegativeRule]
) -> Tensor:
    """Score the queries of ``rows`` (r pairs) against the documents of ``columns`` (c pairs).

    The logit is the inner product of query and document, divided by the temperature. It is `MASKED`
    if the document is not valid, or if one of the ``rules`` excludes it. If ``rows`` and
    ``columns`` are the same object, a row's own positive is masked too: it is no negative, and
    `Pairs` has its logit.

    A rule depends on one query and one document only, and is applied when the two are first scored
    against each other. The bank keeps the masked logits in its log-sums, so a mask never changes
    later.

    Args:
        rows, columns: the pairs.
        temperature: divisor of the inner products.
        rules: the rules that find false negatives.

    Returns:
        (r, c, 1 + h).
    """
    documents = columns.documents.flatten(0, 1)
    products = _compute_inner_products(rows.queries, documents, temperature)
    logits = products.unflatten(1, columns.documents.shape[:2])
    # All rules get the logits before any of them is masked.
    masks = [rule(rows, columns, logits) for rule in rules]
    if columns.invalid is not None:
        masks.append(columns.invalid)
    for mask in masks:
        logits.masked_fill_(mask, MASKED)
    if rows is columns:
        logits[:, :, 0].fill_diagonal_(MASKED)
    return logits


def _compute_inner_products(queries: Tensor, documents: Tensor, temperature: float) -> Tensor:
    """Compute the inner products (r, k) of r queries and k documents, divided by the temperature.

    The longer dimension of the result is contiguous in memory, because a CPU then sums faster over
    the shorter one.
    """
    if len(queries) > len(documents):
        return _compute_inner_products(documents, queries, temperature).T
    scaled = queries / temperature
    products = [scaled @ part.T for part in documents.split(ROWS_PER_PRODUCT)]
    if len(products) == 1:
        return products[0]
    return torch.cat(products, dim=1)


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
