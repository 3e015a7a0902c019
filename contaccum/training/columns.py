"""Text columns of the training data: their roles, and what a method requires of them.

The first text column of a data set holds the queries, the second their positives, and further
columns hard negatives.
"""

from __future__ import annotations

from typing import Any

from sentence_transformers import SentenceTransformer
from sentence_transformers.base.losses.gradcache import uses_gradient_cache
from torch import nn

from contaccum.data.sampling import LABELS
from contaccum.encoders.settings import get_prompt
from contaccum.errors import ConfigError
from contaccum.losses.contaccum import ContAccumLoss
from contaccum.losses.query_side import QuerySideLoss
from contaccum.training.arguments import ContAccumTrainingArguments
from contaccum.training.losses import unwrap_matryoshka

Columns = dict[str | None, list[str]]
"""Text columns of each data set, in order, by the set's name; None is the name of a single set."""


def get_text_columns(dataset: Any) -> Columns:
    """Return the text columns of each data set; a set without text columns is left out."""
    parts = dataset if isinstance(dataset, dict) else {None: dataset}
    columns: Columns = {}
    for name, part in parts.items():
        names = getattr(part, "column_names", None) or []
        texts = [column for column in names if column not in LABELS]
        if texts:
            columns[name] = texts
    return columns


def set_column_roles(
    args: ContAccumTrainingArguments, model: SentenceTransformer, columns: Columns
) -> None:
    """Set ``args.router_mapping`` and ``args.prompts`` by column, unless the user has set them.

    sentence-transformers uses both: ``router_mapping`` gives the tower that encodes a column, and
    ``prompts`` the text put before each text of it. The first column of a data set is encoded as
    queries, the others as documents. If a column name has different roles in different data sets,
    both settings are made separately for each data set.
    """
    roles_by_set: dict[Any, dict[str, str]] = {}
    common_roles: dict[str, str] = {}
    for name, (query_column, *document_columns) in columns.items():
        roles_by_set[name] = {query_column: "query", **dict.fromkeys(document_columns, "document")}
        common_roles |= roles_by_set[name]
    # Where the roles of a column differ, a later set has overwritten the role of an earlier set.
    roles_agree = all(roles.items() <= common_roles.items() for roles in roles_by_set.values())

    def list_prompts(roles: dict[str, str]) -> dict[str, str]:
        prompts = {column: get_prompt(model, role) for column, role in roles.items()}
        return {column: prompt for column, prompt in prompts.items() if prompt}

    if not args.router_mapping:
        args.router_mapping = common_roles if roles_agree else roles_by_set
    if args.prompts is None and roles_agree:
        args.prompts = list_prompts(common_roles) or None
    elif args.prompts is None:
        args.prompts = {name: list_prompts(roles) for name, roles in roles_by_set.items()}


def check_columns(args: ContAccumTrainingArguments, loss: nn.Module, columns: Columns) -> int:
    """Return the smallest number of pairs per micro-batch with which every query has a negative.

    It is 1 if all data sets have hard negatives, or the loss has a bank, a document store, or a
    gradient cache; otherwise 2.

    Raises:
        ConfigError: for a data set without positives, or if no query would have a negative.
    """
    for name, column_names in columns.items():
        if len(column_names) < 2:
            data = "the training data" if name is None else f"training set {name!r}"
            raise ConfigError(
                f"{data} has only the column {column_names[0]!r}: it needs a query and a positive"
            )
    loss = unwrap_matryoshka(loss)
    has_hard_negatives = columns and all(len(names) > 2 for names in columns.values())
    has_bank = isinstance(loss, ContAccumLoss) and loss.settings.bank_size
    has_store = isinstance(loss, QuerySideLoss)
    if has_hard_negatives or has_bank or has_store or uses_gradient_cache(loss):
        return 1
    # Other losses may need no negatives. A size of 1 is only temporary with "auto", and other
    # devices may add their pairs.
    needs_negatives = isinstance(loss, ContAccumLoss)
    may_have_more_pairs = args.is_gathered or args.has_auto_micro_batch
    is_single_pair = args.per_device_train_batch_size == 1 and not may_have_more_pairs
    if needs_negatives and is_single_pair:
        raise ConfigError(
            f"method={args.method} with per_device_train_batch_size=1 and no hard negatives in the "
            "data: no query has a negative. Raise per_device_train_batch_size, or set "
            "method=contaccum"
        )
    return 2
