"""Pairs of texts, and the logits of queries against documents with false negatives masked.

`masked_logits` scores the queries of any pairs (rows) against the documents of any pairs (columns),
which are a micro-batch or the contents of a bank. Every rule that excludes a document as a negative
belongs there, and then holds in all blocks of the score matrix alike.

A false negative of a row is a copy of its positive, or another document that is (probably) relevant
to its query.

Letters in shapes: n pairs in the micro-batch, r pairs whose queries are rows, c pairs whose
documents are columns, h hard negatives per query, d the embedding size. The texts of a pair are its
query, its positive passage, then its hard negatives; its documents are all but the query.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from contaccum.settings import InfoNCESettings

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


def stack_embeddings(columns: Sequence[Tensor], may_be_empty: bool = False) -> Tensor:
    """Stack the embeddings of each pair's texts, (n, 2 + h, d), in float32 at least.

    All that follows is computed for the whole stack: with a small micro-batch, a GPU waits for the
    number of operators, not for their size.

    Args:
        columns: queries (n, d), passages (n, d) and, if any, hard negatives (n, h, d).
        may_be_empty: True if n may be 0.

    Raises:
        ValueError: for other shapes.
    """
    queries, passages = columns[:2]
    if queries.ndim != 2 or queries.shape != passages.shape:
        shapes = f"{tuple(queries.shape)} and {tuple(passages.shape)}"
        raise ValueError(f"queries and passages must have the same shape (n, d), got {shapes}")
    n, d = queries.shape
    if n == 0 and not may_be_empty:
        raise ValueError(
            "the micro-batch is empty: skip it (only with several ranks and "
            "gather_across_devices=True may a rank have no pairs)"
        )
    for negatives in columns[2:]:
        if negatives.ndim != 3 or len(negatives) != n or negatives.shape[2] != d:
            shape = tuple(negatives.shape)
            raise ValueError(f"negatives must be (n, h, d) = ({n}, h, {d}), got {shape}")
    embeddings = torch.cat([queries[:, None], passages[:, None], *columns[2:]], dim=1)
    return embeddings.to(torch.promote_types(embeddings.dtype, torch.float32))


def stack_ids(
    query_ids: Tensor | None,
    passage_ids: Tensor | None,
    negative_ids: Tensor | None,
    embeddings: Tensor,
) -> Tensor:
    """Stack the ids of each pair's texts, int64 (n, 2 + h, IDS_PER_TEXT).

    Args:
        query_ids, passage_ids, negative_ids: integers (n,), (n,) and (n, h), or with one more
            dimension at the end, of size `IDS_PER_TEXT`; None where texts have no ids, which
            become `NO_ID`.
        embeddings: (n, 2 + h, d), from `stack_embeddings`.

    Raises:
        ValueError: for ids of another shape, or that are not integers.
    """
    n, num_texts, _ = embeddings.shape
    columns: list[tuple[str, tuple[int, ...], Tensor | None]] = [
        ("queries", (n,), query_ids),
        ("passages", (n,), passage_ids),
    ]
    if num_texts > 2 or negative_ids is not None:
        columns.append(("negatives", (n, num_texts - 2), negative_ids))
    stacked = []
    for name, shape, ids in columns:
        if ids is None:
            ids = torch.full((*shape, IDS_PER_TEXT), NO_ID, device=embeddings.device)
        if ids.shape not in (shape, (*shape, IDS_PER_TEXT)) or ids.is_floating_point():
            raise ValueError(
                f"ids of {name} must be integers {shape} or {(*shape, IDS_PER_TEXT)}, "
                f"got {ids.dtype} {tuple(ids.shape)}"
            )
        ids = ids.to(embeddings.device, torch.int64)
        if ids.shape == shape:  # one id per text
            ids = pad(ids[..., None], (0, 1), value=NO_ID)
        if ids.ndim == 2:  # queries or passages, one text per pair
            ids = ids[:, None]
        stacked.append(ids)
    return torch.cat(stacked, dim=1)


def make_pairs(
    embeddings: Tensor,
    ids: Tensor,
    temperature: float,
    passage_mean: Tensor | None = None,
) -> Pairs:
    """Make `Pairs` of a micro-batch: embeddings (n, 2 + h, d) without a gradient, with their ids.

    The vector ``passage_mean``, (d,), is subtracted from the documents.
    """
    queries = embeddings[:, 0]
    documents = embeddings[:, 1:]
    if passage_mean is not None:
        documents = documents - passage_mean
    return Pairs(
        queries=queries,
        documents=documents,
        query_ids=ids[:, 0].T,
        document_ids=ids[:, 1:].movedim(-1, 0),
        positive_logits=(queries * documents[:, 0]).sum(1) / temperature,
    )


def masked_logits(
    rows: Pairs,
    columns: Pairs,
    settings: InfoNCESettings,
    positives: PositivesTable | None = None,
) -> Tensor:
    """Score the queries of ``rows`` (r pairs) against the documents of ``columns`` (c pairs).

    The logit is the inner product of query and document, divided by the temperature. It is `MASKED`
    if the document is not valid or, with ``mask_duplicates``, is a false negative of the row: by
    the ids of the texts or by the table of positives. If ``rows`` and ``columns`` are the same
    object, a row's own positive is masked too: it is no negative, and `Pairs` has its logit.

    A mask depends on one query and one document only, and is made when the two are first scored
    against each other. The bank keeps the masked logits in its log-sums, so a mask must never
    change later.

    Returns:
        (r, c, 1 + h).
    """
    documents = columns.documents.flatten(0, 1)  # (c * (1 + h), d)
    products = _compute_inner_products(rows.queries, documents, settings.temperature)
    logits = products.unflatten(1, columns.documents.shape[:2])  # (r, c, 1 + h)

    if settings.mask_duplicates:
        logits.masked_fill_(find_duplicates(rows, columns), MASKED)
        if positives is not None:
            logits.masked_fill_(positives.find_listed(rows, columns), MASKED)
    if columns.invalid is not None:
        logits.masked_fill_(columns.invalid, MASKED)
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


def find_duplicates(rows: Pairs, columns: Pairs) -> Tensor:
    """Find copies of a row's own positive, and positives of the same query: bool (r, c, 1 + h)."""
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
    if row_keys.shape[1] > column_keys[0].numel():
        # The result gets the layout of the logits in memory, with which it is combined faster.
        is_equal = row_keys[:, None, None, :] == column_keys[:, :, :, None]
        return is_equal.any(0).movedim(-1, 0)
    is_equal = row_keys[:, :, None, None] == column_keys[:, None]
    return is_equal.any(0)


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

    def find_listed(self, rows: Pairs, columns: Pairs) -> Tensor:
        """Find documents that are listed as positives of a row's query: bool (r, c, 1 + h)."""
        query_ids = rows.query_ids[0]  # (r,)
        document_ids = columns.document_ids[0].flatten()  # (c * (1 + h),)
        # A lookup copies one list per key, so the side with fewer texts provides the keys.
        if len(query_ids) <= len(document_ids):
            is_listed = self.passages_by_query.contains(query_ids, document_ids)
        else:
            is_listed = self.queries_by_passage.contains(document_ids, query_ids).T
        return is_listed.unflatten(1, columns.document_ids.shape[1:])


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
        """Return bool (k, v), True where the list of a key, int64 (k,), has a value, int64 (v,)."""
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
