"""Names of the fields of a training record: the usual ones, and those that a user gives.

`contaccum.data.fields` reads the values of the fields.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from contaccum.data.records import quoted
from contaccum.errors import ConfigError, check_choice

FIELDS: dict[str, tuple[str, ...]] = {
    "query": ("query", "anchor", "question", "query_text", "messages", "sentence1"),
    "positive": (
        "positive",
        "positives",
        "positive_passages",
        "positive_ctxs",
        "passage",
        "answer",
        "text",
        "document",
        "pos",
        "pos_doc",
        "positive_document_ids",
        "positive_messages",
        "response",
        "sentence2",
    ),
    "negatives": (
        "negatives",
        "negative",
        "negative_passages",
        "hard_negatives",
        "hard_negative_ctxs",
        "neg",
        "neg_doc",
        "negative_document_ids",
        "negative_messages",
        "rejected_response",
        # Random negatives of DPR, which its own trainer uses where a record has no hard ones.
        "negative_ctxs",
    ),
    # Title of the positives that are plain texts. A passage object has its own "title".
    "title": ("title",),
    # Teacher scores, in one list for all positives and then all negatives, or in one list for the
    # positives and another for the negatives. A passage object may have its own "score" instead.
    "scores": ("scores",),
    "positive_scores": ("positive_scores", "positive_score", "pos_scores"),
    "negative_scores": ("negative_scores", "neg_scores"),
    # Similarity score of query and positive; it is a match if the score is at least `min_score`.
    "score": ("score", "label"),
}
"""{role: usual names of the field}. The first name that a record has is used.

The fields `negative_1`, `negative_2` ... hold negatives too. The names include those of
FlagEmbedding, NeMo Automodel (docs/guides/llm/retrieval-dataset.mdx), Tevatron
(src/tevatron/retriever/dataset.py), ms-swift (docs/source_en/BestPractices/Embedding.md, and
`response` of its earlier versions), and sentence-transformers' scored pairs.
"""


def parse_columns(columns: Mapping[str, str] | Sequence[str] | str | None) -> dict[str, str]:
    """Return column names by role.

    Args:
        columns: a mapping, a word ``ROLE=NAME``, a JSON object such as
            ``'{"query": "user_text"}'``, or a list of words or of one JSON object; None: no
            columns.

    Raises:
        ConfigError: for a role that `FIELDS` does not have, a role with several columns, or words
            of another form.
    """
    if columns is None:
        return {}
    if isinstance(columns, str):
        columns = [columns]
    pairs: list[Any]
    try:
        if isinstance(columns, Mapping):
            pairs = list(columns.items())
        elif len(columns) == 1 and columns[0].startswith("{"):
            pairs = json.loads(columns[0], object_pairs_hook=list)
        else:
            pairs = [word.split("=", 1) for word in columns]
        name_by_role = dict(pairs)
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"data_columns: neither ROLE=NAME nor one JSON object: {quoted(columns)} "
            '(for example query=user_text, or {"query": "user_text"})'
        ) from error
    for role in name_by_role:
        check_choice("data_columns: a role", role, FIELDS)
    has_names_only = all(isinstance(name, str) for name in name_by_role.values())
    if len(pairs) > len(name_by_role) or not has_names_only:
        raise ConfigError(
            f"data_columns: {quoted(columns)}: a role has the name of one column (rename several "
            "columns of negatives to negative_1, negative_2, ...)"
        )
    return name_by_role
