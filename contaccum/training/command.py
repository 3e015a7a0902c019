"""`contaccum train`: arguments, data, model, trainer, and the trained folder."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from sentence_transformers.sentence_transformer.modules import Router
from transformers import set_seed
from transformers.trainer_utils import get_last_checkpoint

from contaccum.data.fields import parse_columns
from contaccum.data.pairs import TrainingData, load_training_data
from contaccum.encoders import (
    DualEncoder,
    freeze_word_embeddings,
    is_tied,
    require_model,
    set_attention,
    set_dropout,
    set_max_lengths,
)
from contaccum.errors import ConfigError, UserError
from contaccum.training.config import DataArguments, ModelArguments, parse
from contaccum.training.trainer import ContAccumTrainer


def run(argv: Sequence[str]) -> int:
    """Train as ``argv`` says and save the model into ``output_dir``; returns the exit code."""
    model_args, data_args, args = parse(argv)
    output_dir = str(args.output_dir)
    check_output_dir(output_dir)
    with args.main_process_first(desc="reading the data"):  # on each host; the others find it in the cache
        data = load_data(data_args, args.topic_column)
    if args.process_index == 0:
        print(data.report.summary())
    set_seed(args.seed)  # before the model: fresh weights are part of the run
    model = load_model(model_args, device=str(args.device))
    trainer = ContAccumTrainer(model=model, args=args, train_dataset=data.dataset, data_fingerprint=data.fingerprint)
    trainer.train(resume_from_checkpoint=resolve_resume(args.resume_from_checkpoint, output_dir))
    trainer.save_model(output_dir)
    if trainer.is_world_process_zero():
        print(f"saved {output_dir}; score it with: contaccum evaluate {output_dir} --data DIR")
    return 0


def load_data(arguments: DataArguments, topic_column: str | None = None) -> TrainingData:
    """The training data that the arguments name, with its topics if asked."""
    return load_training_data(
        arguments.train_data,
        data_format=arguments.data_format,  # type: ignore[arg-type]  # the reader checks it
        split=arguments.split,
        on_bad_record=arguments.on_bad_record,  # type: ignore[arg-type]  # checked by the parser
        columns=parse_columns(arguments.data_columns),
        topic_column=topic_column,
        **asdict(arguments.selection),
    )


def load_model(arguments: ModelArguments, device: str | None = None) -> DualEncoder:
    """The encoder to train: a saved SentenceTransformer as it is, or a transformers backbone with pooling.

    Raises:
        UserError: when it cannot be loaded.
        ConfigError: for settings that do not apply to it.
    """
    model = _build(arguments, device)
    if arguments.dropout is not None:
        set_dropout(model, arguments.dropout)
    if arguments.freeze_word_embeddings:
        freeze_word_embeddings(model)
    if arguments.attn_implementation is not None:
        set_attention(model, arguments.attn_implementation)
    return model


def _build(arguments: ModelArguments, device: str | None) -> DualEncoder:
    if not is_sentence_transformer(arguments.model):
        return DualEncoder.from_backbone(
            arguments.model,
            tied=arguments.tied,
            pooling=arguments.pooling,  # type: ignore[arg-type]  # checked by the parser
            normalize=arguments.normalize,
            query_prompt=arguments.query_prompt,
            passage_prompt=arguments.passage_prompt,
            query_max_length=arguments.query_max_length,
            passage_max_length=arguments.passage_max_length,
            device=device,
            trust_remote_code=arguments.trust_remote_code,
        )
    defaults = ModelArguments()
    for name in ("pooling", "normalize"):
        if getattr(arguments, name) != getattr(defaults, name):
            raise ConfigError(
                f"{name}={getattr(arguments, name)} with model={arguments.model}: that folder is a SentenceTransformer "
                f"with {name} of its own. Drop {name}, or pass a bare backbone"
            )
    model = DualEncoder.from_pretrained(arguments.model, device=device, trust_remote_code=arguments.trust_remote_code)
    if not arguments.tied and is_tied(model):
        modules = list(model.children())
        model = DualEncoder(
            modules=[Router.for_query_document(modules, copy.deepcopy(modules))],  # type: ignore[arg-type]
            prompts={name: prompt for name, prompt in model.prompts.items() if prompt is not None},
            similarity_fn_name=model.similarity_fn_name,
            device=device,
        )
    set_max_lengths(model, arguments.query_max_length, arguments.passage_max_length)
    for role, prompt in (("query", arguments.query_prompt), ("document", arguments.passage_prompt)):
        if prompt is not None:
            model.prompts[role] = prompt
    return model


def is_sentence_transformer(name: str) -> bool:
    """Whether a folder, or a hub repository that can be reached, is a SentenceTransformer rather than a backbone."""
    if os.path.isdir(name):
        return (Path(name) / "modules.json").is_file()
    require_model(name)
    from sentence_transformers.util import is_sentence_transformer_model

    try:
        return is_sentence_transformer_model(name)
    except Exception:  # any of the hub's errors: loading it will fail next, with a message of its own
        return False


def check_output_dir(path: str) -> None:
    """Refuse, before any work, a folder that cannot be made or written; makes nothing itself."""
    nearest = Path(path).absolute()
    while not nearest.exists():
        nearest = nearest.parent
    if not nearest.is_dir():
        raise UserError(f"{path}: cannot be made ({nearest} is a file); choose another --output_dir")
    if not os.access(nearest, os.W_OK):
        raise UserError(f"{path}: {nearest} is not writable; choose another --output_dir")


def resolve_resume(value: str | bool | None, output_dir: str) -> str | None:
    """``true``, ``last`` or ``auto``: the newest checkpoint of ``output_dir``; a path: that one; nothing: None."""
    if value is None or str(value).lower() in ("", "false", "none"):
        return None
    if str(value).lower() in ("true", "last", "auto"):
        found = get_last_checkpoint(output_dir)
        if found is None:
            raise UserError(f"{output_dir}: no checkpoint to resume from; drop --resume_from_checkpoint to start anew")
        return found
    if not os.path.isfile(os.path.join(str(value), "trainer_state.json")):
        raise UserError(f"{value}: not a checkpoint (no trainer_state.json in it)")
    return str(value)
