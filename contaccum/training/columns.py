"""Which columns of the training data are queries, and which passages: routes, prompts and what cannot be trained on."""

from __future__ import annotations

from typing import Any

from sentence_transformers import SentenceTransformer
from sentence_transformers.losses import CachedMultipleNegativesRankingLoss, MultipleNegativesRankingLoss

from contaccum.data.stream_batches import StreamedSets
from contaccum.errors import ConfigError
from contaccum.training.arguments import ContAccumTrainingArguments

_NO_TEXTS = ("label", "labels", "score", "scores", "dataset_name")


def columns_by_set(dataset: Any) -> dict[str | None, list[str]]:
    """Text columns in order, by the name of the set; None for a single one."""
    if isinstance(dataset, StreamedSets):
        return dataset.columns_by_set
    parts = dict(dataset) if isinstance(dataset, dict) else {None: dataset}
    found = {name: list(getattr(part, "column_names", None) or []) for name, part in parts.items()}
    return {name: [column for column in columns if column not in _NO_TEXTS] for name, columns in found.items()}


def text_columns_of(dataset: Any) -> list[str]:
    """Text columns in order; where there are several sets, of the one with the most."""
    return max(columns_by_set(dataset).values(), key=len, default=[])


def fill_roles(args: ContAccumTrainingArguments, model: SentenceTransformer, dataset: Any, evaluated: Any) -> None:
    """First column: query; the others: documents; with the model's own prompts. By set, where names mean two things.

    Raises:
        ConfigError: prompts or routes by set, and data for evaluation that is not in sets.
    """
    by_set = {name: columns for name, columns in columns_by_set(dataset).items() if columns}
    roles = {name: {c: "document" if i else "query" for i, c in enumerate(columns)} for name, columns in by_set.items()}
    flat: dict[str, str] = {}
    agree = all(flat.setdefault(column, role) == role for of_set in roles.values() for column, role in of_set.items())
    if not by_set:
        return
    mapping: dict[Any, Any] = flat if agree else roles
    if not args.router_mapping:
        args.router_mapping = mapping
    if args.prompts is None:
        of_roles = {name: {c: model.prompts.get(r) for c, r in roles[name].items()} for name in roles}
        prompts = {name: {c: prompt for c, prompt in of.items() if prompt} for name, of in of_roles.items()}
        together = {column: prompt for of_set in prompts.values() for column, prompt in of_set.items()}
        args.prompts = (together if agree else prompts) or None  # type: ignore[assignment]  # names are not None there
    nested = [name for name in ("prompts", "router_mapping") if _is_nested(getattr(args, name))]
    if nested and evaluated is not None and not isinstance(evaluated, dict):
        raise ConfigError(
            f"{nested[0]} by training set with one eval_dataset, which is of none of them: give it as a DatasetDict by "
            "the names of the training sets"
        )


def _is_nested(mapping: Any) -> bool:
    return isinstance(mapping, dict) and any(isinstance(value, dict) for value in mapping.values())


def check_columns(args: ContAccumTrainingArguments, loss: Any, dataset: Any) -> None:
    """Refuse data that has no positives, or nothing that could be a negative.

    Raises:
        ConfigError: naming the set, where there are several.
    """
    by_set = {name: columns for name, columns in columns_by_set(dataset).items() if columns}
    baseline = isinstance(loss, (MultipleNegativesRankingLoss, CachedMultipleNegativesRankingLoss))
    alone = args.per_device_train_batch_size == 1 and not (args.gathers or args.finds_micro_batch)
    for name, columns in by_set.items():
        of = "the training data" if name is None else f"training set {name!r}"
        if len(columns) < 2:
            raise ConfigError(f"{of} has only the column {columns[0]!r}: it needs a query and a positive")
        if baseline and len(columns) == 2 and alone:
            raise ConfigError(
                f"method={args.method} with per_device_train_batch_size=1 and no hard negatives in {of}: a query has "
                "no negative and the loss is always 0. Raise the batch size, add hard negatives, or set "
                "method=contaccum"
            )
    widths = {name: max(0, len(columns) - 2) for name, columns in by_set.items()}
    if args.gathers and args.world_size > 1 and len(set(widths.values())) > 1:
        raise ConfigError(
            f"gather_across_devices=true with training sets of different numbers of hard negatives, {widths}: devices "
            "train on different sets at a time. Give all the same num_hard_negatives, or drop gather_across_devices"
        )
