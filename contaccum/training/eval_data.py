"""What `contaccum train` evaluates on while it trains: the data set that was named, or always the same part of it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

from contaccum.distributed import world_size
from contaccum.errors import ConfigError, DataError, UserError
from contaccum.evaluation.retrieval_evaluator import DEFAULT_METRICS, RetrievalEvaluator, check_metric

if TYPE_CHECKING:
    from contaccum.training.arguments import ContAccumTrainingArguments
    from contaccum.training.config import DataArguments

_PARTS = {"eval_split": "dev", "eval_queries": None, "eval_corpus_size": None, "eval_corpus_sample": "random"}


def check_evaluation(data: DataArguments, args: ContAccumTrainingArguments) -> None:
    """Refuse, before anything is loaded, an evaluation that cannot be, or says nothing.

    Raises:
        ConfigError: naming the settings and the way out.
    """
    strategy = getattr(args.eval_strategy, "value", args.eval_strategy)
    if data.eval_data is None:
        for name, default in _PARTS.items():
            if getattr(data, name) != default:
                raise ConfigError(
                    f"{name}={getattr(data, name)} without eval_data: nothing is evaluated. Add eval_data, a BEIR "
                    f"folder, or drop {name}"
                )
        if strategy != "no":
            raise ConfigError(
                f"eval_strategy={strategy} without eval_data: there is nothing to evaluate on. Add eval_data, a BEIR "
                "folder, or drop it"
            )
        return
    if strategy == "no":
        raise ConfigError(
            f"eval_data={data.eval_data} with eval_strategy=no: it would never be looked at. Set eval_strategy=steps "
            "and eval_steps, or drop eval_data"
        )
    for name in ("eval_queries", "eval_corpus_size"):
        value = getattr(data, name)
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")
    if data.eval_corpus_sample != "random":
        if data.eval_corpus_size is None:
            raise ConfigError(
                f"eval_corpus_sample={data.eval_corpus_sample} without eval_corpus_size: the whole corpus is searched. "
                "Set eval_corpus_size, or drop it"
            )
        from contaccum.mining.candidates import check_bm25

        check_bm25(0.9, 0.4)
    metric = args.metric_for_best_model
    if metric not in (None, "loss"):  # which transformers puts where nothing was said
        args.metric_for_best_model = f"eval_{check_metric(str(metric))}"
        if args.greater_is_better is False:
            raise ConfigError(
                f"greater_is_better=false with metric_for_best_model={metric}: that would keep the worst model. Drop it"
            )
    if args.keeps_best and data.eval_split in _splits_trained_on(data):
        raise ConfigError(
            f"eval_data={data.eval_data} with eval_split={data.eval_split}: the best model would be chosen by the very "
            "pairs it trains on. Set eval_split to another split"
        )


def load_evaluator(data: DataArguments, args: ContAccumTrainingArguments) -> RetrievalEvaluator | None:
    """The evaluator that the arguments ask for; the first rank reads, and tells the others what they need.

    Raises:
        UserError: data that cannot be used, on every rank.
    """
    if data.eval_data is None:
        return None
    found: list[Any] = [None, None, None]
    if args.process_index == 0:
        try:
            found[:2] = _read(data)
        except UserError as error:
            found[2] = str(error)
    if world_size() > 1:
        torch.distributed.broadcast_object_list(found, src=0)
    dataset, about, fault = found
    if fault is not None:
        raise DataError(fault)
    metric = args.metric_for_best_model
    chosen = () if metric in (None, "loss") else (check_metric(str(metric)),)
    return RetrievalEvaluator(
        dataset,
        tuple(dict.fromkeys((*DEFAULT_METRICS, *chosen))),
        batch_size=args.per_device_eval_batch_size,
        similarity=args.similarity,  # type: ignore[arg-type]  # checked by the arguments
        primary_metric=chosen[0] if chosen else None,
        about=about,
    )


def _read(data: DataArguments) -> tuple[Any, dict[str, Any]]:
    from contaccum.evaluation.beir import load_data
    from contaccum.evaluation.sampling import hard_sample, sample

    whole = load_data(str(data.eval_data), data.eval_split, data.on_bad_record)  # type: ignore[arg-type]  # checked
    cut = hard_sample if data.eval_corpus_sample == "bm25" else sample
    part = cut(whole, data.eval_queries, data.eval_corpus_size)
    about: dict[str, Any] = {"of_queries": len(whole.queries), "of_documents": len(whole.corpus)}
    if len(part.corpus) < len(whole.corpus):
        about["sampled"] = data.eval_corpus_sample
    return part, about


def _splits_trained_on(data: DataArguments) -> set[str]:
    """The splits of ``eval_data`` that are among the training sets."""
    here = os.path.realpath(str(data.eval_data))
    return {str(one.reading.get("split")) for one in data.sets if os.path.realpath(one.path) == here}
