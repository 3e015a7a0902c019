"""`contaccum train`: arguments, data, model, trainer, and the trained folder."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sentence_transformers.sentence_transformer.modules import Router
from transformers import set_seed

from contaccum.data.fields import parse_columns
from contaccum.data.pairs import TrainingData, load_training_data
from contaccum.data.stream_batches import StreamedSets
from contaccum.data.streams import SHUFFLE_BUFFER
from contaccum.data.training_sets import TrainingSets, load_training_sets
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
from contaccum.mining.pool import MiningData
from contaccum.mining.sources import load_mining_data
from contaccum.training.arguments import ContAccumTrainingArguments
from contaccum.training.config import DataArguments, ModelArguments, parse
from contaccum.training.eval_data import check_evaluation, load_evaluator
from contaccum.training.trainer import ContAccumTrainer
from contaccum.untrusted import check_no_links_out

AnyTrainingData = TrainingData | TrainingSets | StreamedSets


def run(argv: Sequence[str]) -> int:
    """Train as ``argv`` says and save the model into ``output_dir``; returns the exit code."""
    model_args, data_args, args = parse(argv)
    check_evaluation(data_args, args)
    output_dir = str(args.output_dir)
    check_output_dir(output_dir)
    resume = check_resume(args.resume_from_checkpoint, output_dir)
    with args.main_process_first(desc="reading the data"):  # on each host; the others find it in the cache
        data = load_data(data_args, args.topic_column, args.refresh_negatives_every is not None)
        mining_data = load_mining_data_of(data_args, args)
    evaluator = load_evaluator(data_args, args)
    if args.process_index == 0:
        print(data.summary())
    set_seed(args.seed)  # before the model: fresh weights are part of the run
    model = load_model(model_args, device=str(args.device))
    take_prompts(args, data, model)
    trainer = ContAccumTrainer(
        model=model,
        args=args,
        train_dataset=data.dataset,
        data_fingerprint=data.fingerprint,
        mining_data=mining_data,
        data_sets=data.records(),
        evaluator=evaluator,
    )
    trainer.config_beside = {**asdict(model_args), **asdict(data_args)}
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(output_dir)
    if trainer.is_world_process_zero():
        if data_args.streaming:
            print(data.summary())
        print(f"saved {output_dir}; score it with: contaccum evaluate {output_dir} --data DIR")
    return 0


def load_mining_data_of(arguments: DataArguments, args: ContAccumTrainingArguments) -> MiningData | None:
    """What hard negatives are mined in while training: the same data, and its corpus or another; None if none are."""
    if args.refresh_negatives_every is None:
        return None
    return load_mining_data(
        arguments.train_data[0],
        args.refresh_corpus,
        data_format=arguments.data_format,  # type: ignore[arg-type]  # the reader checks it
        split=arguments.split,
        on_bad_record=arguments.on_bad_record,  # type: ignore[arg-type]  # checked by the parser
        columns=parse_columns(arguments.data_columns),
    )


def load_data(
    arguments: DataArguments, topic_column: str | None = None, negatives_to_come: bool = False
) -> AnyTrainingData:
    """The training data that the arguments name, with its topics if asked."""
    on_bad_record: Any = arguments.on_bad_record  # checked by the parser
    if arguments.streaming:
        return StreamedSets(arguments.sets, on_bad_record, arguments.shuffle_buffer_size or SHUFFLE_BUFFER)
    if not arguments.is_one_path:
        return load_training_sets(arguments.sets, on_bad_record, topic_column)
    return load_training_data(
        arguments.train_data[0],
        data_format=arguments.data_format,  # type: ignore[arg-type]  # the reader checks it
        split=arguments.split,
        on_bad_record=on_bad_record,
        columns=parse_columns(arguments.data_columns),
        topic_column=topic_column,
        negatives_to_come=negatives_to_come,
        **asdict(arguments.selection),
    )


def take_prompts(
    args: ContAccumTrainingArguments, data: TrainingData | TrainingSets | StreamedSets, model: DualEncoder
) -> None:
    """Prompts that training sets have of their own, for the trainer; others are the model's."""
    prompts = data.prompts(model.prompts)
    if prompts is None:
        return
    if args.prompts is not None:
        raise ConfigError("prompts with a query_prompt or passage_prompt in train_data: say it once")
    args.prompts = prompts


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
    check_no_links_out(path)


def check_resume(value: str | bool | None, output_dir: str) -> str | None:
    """What to resume from, before any work: ``last``, ``auto`` or a folder, which the trainer will check; or None.

    Raises:
        UserError: when there is nothing of that name.
    """
    if value is None or str(value).lower() in ("", "false", "none"):
        return None
    if str(value).lower() == "auto":
        return "auto"
    if str(value).lower() in ("true", "last"):
        if not any(Path(output_dir).glob("*checkpoint-*")):
            raise UserError(f"{output_dir}: no checkpoint to resume from; drop --resume_from_checkpoint to start anew")
        return "last"
    if not os.path.isfile(os.path.join(str(value), "trainer_state.json")):
        raise UserError(f"{value}: not a checkpoint (no trainer_state.json in it)")
    return str(value)
