"""Loading of what the settings of a training name: its model, its data and its evaluator."""

from __future__ import annotations

import logging
from typing import Any

from contaccum.data import TrainingSets, load_training_sets, parse_columns, parse_training_sets
from contaccum.encoders import adapters
from contaccum.encoders.dual_encoder import DualEncoder, add_query_adapter, untie
from contaccum.encoders.loading import is_sentence_transformer, require_model
from contaccum.encoders.settings import configure, is_tied, set_max_lengths
from contaccum.errors import ConfigError
from contaccum.evaluation.beir import load_data as load_beir
from contaccum.evaluation.evaluator import NanoBEIR, RetrievalEvaluator, sample
from contaccum.evaluation.metrics import DEFAULT_METRICS, check_metric
from contaccum.settings import Settings

logger = logging.getLogger(__name__)


def list_training_sets(settings: Settings) -> dict[str, dict[str, Any]]:
    """Return the options of each training set in ``train_data``, by the name of the set.

    An option that a set does not set itself has the value of the settings.

    Raises:
        ConfigError: for invalid options.
    """
    common = {
        "split": settings.split,
        "num_hard_negatives": settings.num_hard_negatives,
        "positives": settings.positives,
        "negatives_from": settings.negatives_from,
        "missing_negatives": settings.missing_negatives,
        "data_format": settings.data_format,
        "columns": parse_columns(settings.data_columns),
    }
    return parse_training_sets(settings.train_data, common)


def load_data(settings: Settings) -> TrainingSets:
    """Load the training data; raise `DataError` for data that cannot be used."""
    return load_training_sets(
        list_training_sets(settings),
        on_bad_record=settings.on_bad_record,
        teacher_scores=settings.distill is not None,
    )


def load_evaluator(settings: Settings) -> RetrievalEvaluator | NanoBEIR | None:
    """Load the evaluator for ``eval_data``; return None if it is not set.

    ``eval_data`` is a BEIR folder, the name of a public set, or ``nanobeir`` or
    ``nanobeir/SET,SET``.

    Raises:
        DataError: for data that cannot be used.
    """
    if settings.eval_data is None:
        return None
    batch_size = settings.per_device_eval_batch_size
    similarity = settings.similarity
    name, *parts = settings.eval_data.split("/")
    if name == "nanobeir":
        set_names = parts[0].split(",") if parts else []
        return NanoBEIR(set_names, batch_size=batch_size, similarity=similarity)
    full_set = load_beir(settings.eval_data, settings.eval_split, settings.on_bad_record)
    dataset = sample(full_set, settings.eval_queries, settings.eval_corpus_size)
    full_size = {"of_queries": len(full_set.queries), "of_documents": len(full_set.corpus)}
    metrics = list(DEFAULT_METRICS)
    primary_metric = None
    if settings.metric_for_best_model not in (None, "loss"):
        primary_metric = check_metric(str(settings.metric_for_best_model))
        metrics.append(primary_metric)
    return RetrievalEvaluator(
        dataset,
        metrics,
        primary_metric=primary_metric,
        batch_size=batch_size,
        similarity=similarity,
        notes=full_size,
    )


def load_model(settings: Settings, device: str | None = None) -> DualEncoder:
    """Load the encoder to train: a SentenceTransformer, or a backbone with pooling added to it.

    Args:
        settings: the settings. With ``method="query_side"``, only the query tower gets the adapter.
        device: the device to load the model on. Default: chosen by sentence-transformers.

    Raises:
        UserError: for a model that cannot be loaded.
    """
    options: dict[str, Any] = {"device": device}
    if settings.load_in_4bit:
        options["model_kwargs"] = adapters.make_4bit_kwargs()
    # Two towers are loaded with separate weights. Once they have adapters, they share one base
    # model. Loading on the CPU first avoids two base models in the device's memory.
    has_two_adapters = bool(settings.lora_r) and not settings.tied
    is_moved_later = has_two_adapters and bool(device) and not settings.load_in_4bit
    if is_moved_later:
        options["device"] = "cpu"
    require_model(settings.model)
    if is_sentence_transformer(settings.model):
        model = _load_sentence_transformer(settings, options)
    else:
        model = DualEncoder.from_backbone(
            settings.model,
            tied=settings.tied,
            pooling=settings.pooling,
            normalize=settings.normalize,
            query_prompt=settings.query_prompt,
            passage_prompt=settings.passage_prompt,
            query_max_length=settings.query_max_length,
            passage_max_length=settings.passage_max_length,
            trust_remote_code=settings.trust_remote_code,
            **options,
        )
    configure(
        model, settings.dropout, settings.freeze_word_embeddings, settings.attn_implementation
    )
    if settings.lora_r is not None:
        add_adapter: Any = adapters.add_adapter
        if settings.method == "query_side":
            add_adapter = add_query_adapter
        add_adapter(
            model,
            settings.lora_r,
            settings.lora_alpha,
            settings.lora_dropout,
            settings.lora_target_modules,
        )
    elif adapters.has_adapter(model):
        adapters.make_adapter_trainable(model)
    else:
        # Only now is it certain that the saved model has no adapter either.
        for name in ("load_in_4bit", "merge_adapter"):
            if getattr(settings, name):
                raise ConfigError(
                    f"{name}=True without lora_r: it has no effect. Set lora_r, or drop {name}"
                )
    if is_moved_later:
        model = model.to(device)
    return model


def _load_sentence_transformer(settings: Settings, options: dict[str, Any]) -> DualEncoder:
    """Load a SentenceTransformer, with two towers if ``tied`` is False."""
    for name in ("pooling", "normalize"):
        value = getattr(settings, name)
        if value:
            logger.warning(
                f"{name}={value} has no effect: {settings.model} is a SentenceTransformer, which "
                f"keeps its own modules. Drop {name}"
            )
    trusted = settings.trust_remote_code
    model = DualEncoder.from_pretrained(settings.model, trust_remote_code=trusted, **options)
    if not settings.tied and is_tied(model):
        untie(model)
    elif settings.tied and not is_tied(model):
        logger.info(f"{settings.model} has two encoders, and keeps both: tied has no effect")
    set_max_lengths(model, settings.query_max_length, settings.passage_max_length)
    if settings.query_prompt is not None:
        model.prompts["query"] = settings.query_prompt
    if settings.passage_prompt is not None:
        model.prompts["document"] = settings.passage_prompt
    return model
