"""Data and models of a training run from its settings.

``args`` are the training arguments of the settings, which also know the machine. `contaccum train`
and `fit` both use these functions, so that the same settings always give the same run.
"""

from __future__ import annotations

import logging
from typing import Any

from transformers import set_seed

from contaccum.data import TrainingSets, load_training_sets, parse_columns, parse_training_sets
from contaccum.encoders import adapters
from contaccum.encoders.dual_encoder import DualEncoder, add_query_adapter, untie
from contaccum.encoders.loading import is_sentence_transformer
from contaccum.encoders.names import require_model
from contaccum.encoders.settings import configure, is_tied, set_max_lengths
from contaccum.errors import ConfigError
from contaccum.evaluation.beir import load_data as load_beir
from contaccum.evaluation.evaluator import RetrievalEvaluator, sample
from contaccum.settings import Settings, for_method
from contaccum.training.arguments import ContAccumTrainingArguments
from contaccum.training.proposal import compute_start_rate, make_query_side_sizes, read_width

logger = logging.getLogger(__name__)


def load_data(settings: Settings) -> TrainingSets:
    """Load the training data; raise `DataError` for data that cannot be used."""
    common = {
        "split": settings.split,
        "num_hard_negatives": settings.num_hard_negatives,
        "positives": settings.positives,
        "missing_negatives": settings.missing_negatives,
        "columns": parse_columns(settings.data_columns),
    }
    return load_training_sets(
        parse_training_sets(settings.train_data, common), on_bad_record=settings.on_bad_record
    )


def load_model(settings: Settings, device: str | None = None) -> DualEncoder:
    """Load the encoder to train: a SentenceTransformer, or a backbone with pooling added to it."""
    options: dict[str, Any] = {"device": device}
    if settings.load_in_4bit:
        options["model_kwargs"] = adapters.make_4bit_kwargs()
    # Two towers with adapters share one base model, but are loaded with one each: on the CPU.
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
    configure(model, settings.dropout, settings.attn_implementation)
    if settings.lora_r is not None:
        add_adapter = add_query_adapter if settings.method == "query_side" else adapters.add_adapter
        add_adapter(
            model,
            settings.lora_r,
            settings.lora_alpha,
            settings.lora_dropout,
            settings.lora_target_modules,
        )
    elif adapters.has_adapter(model):
        adapters.make_adapter_trainable(model)
    elif settings.load_in_4bit:
        raise ConfigError(
            "load_in_4bit without lora_r: 4-bit weights cannot train. Set lora_r, or drop it"
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
    elif settings.towers and not is_tied(model):
        raise ConfigError(
            f"towers=one with {settings.model}, which has two encoders: give another model, or "
            "drop towers"
        )
    elif settings.tied and not is_tied(model):
        logger.info(f"{settings.model} has two encoders, and keeps both: tied has no effect")
    set_max_lengths(model, settings.query_max_length, settings.passage_max_length)
    if settings.query_prompt is not None:
        model.prompts["query"] = settings.query_prompt
    if settings.passage_prompt is not None:
        model.prompts["document"] = settings.passage_prompt
    return model


def load_run_data(
    settings: Settings, args: ContAccumTrainingArguments
) -> tuple[TrainingSets, RetrievalEvaluator | None]:
    """Load the training sets of a run, and the evaluator of the model during training.

    On each host, the first process caches them for the others.
    """
    with args.main_process_first(desc="reading the data"):
        training = load_data(settings)
        if settings.eval_data is None:
            return training, None
        full_set = load_beir(settings.eval_data, settings.eval_split, settings.on_bad_record)
        dataset = sample(full_set, settings.eval_queries, settings.eval_corpus_size)
    metric = settings.metric_for_best_model
    evaluator = RetrievalEvaluator(
        dataset,
        primary_metric=None if metric == "loss" else metric,
        batch_size=settings.per_device_eval_batch_size,
        similarity=settings.similarity,
        notes={"of_queries": len(full_set.queries), "of_documents": len(full_set.corpus)},
    )
    return training, evaluator


def load_encoder(settings: Settings, args: ContAccumTrainingArguments) -> DualEncoder:
    """Load the encoder to train."""
    set_seed(args.seed)  # some weights may be initialised at random, such as those of an adapter
    return load_model(settings, str(args.device))


def make_second_stage(settings: Settings, model: str) -> Settings:
    """Return the settings of a second stage: query-side training of the first stage's ``model``.

    It has as many updates and pairs per update, and the learning rate that query-side training
    tries first.
    """
    args = ContAccumTrainingArguments.from_settings(settings)
    rate = compute_start_rate(
        "query_side", read_width(model), has_adapter=False, is_base_weak=False
    )
    return for_method(
        settings,
        "query_side",
        model=model,
        # A SentenceTransformer keeps its own modules.
        pooling=Settings().pooling,
        normalize=Settings().normalize,
        corpus=settings.second_stage,
        missing="add",
        learning_rate=rate,
        learning_rates=None,  # those of the first stage
        max_steps=args.max_steps,
        **make_query_side_sizes(args.total_train_batch_size, given={}),
    )
