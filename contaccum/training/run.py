"""From parsed arguments to a trainer that is ready to train: data, model, guide and evaluator.

`contaccum train`, `compare`, `tune` and `fit` all start a run here, so that it is the same run.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, NamedTuple

from sentence_transformers.sentence_transformer.evaluation import SentenceEvaluator
from tqdm.contrib.logging import logging_redirect_tqdm
from transformers import set_seed

from contaccum.data import TrainingSets
from contaccum.encoders.dual_encoder import DualEncoder
from contaccum.files import require_writable
from contaccum.mining import MiningData
from contaccum.training import config
from contaccum.training.arguments import ContAccumTrainingArguments
from contaccum.training.checkpoint import require_free_folder
from contaccum.training.log import RUN_RECORD
from contaccum.training.options import DataArguments, ModelArguments
from contaccum.training.query_side import require_sources
from contaccum.training.trainer import ContAccumTrainer


class RunData(NamedTuple):
    """The data of a run."""

    training: TrainingSets
    mining: MiningData | None  # in which hard negatives are mined while training
    evaluator: SentenceEvaluator | None  # scores the model while it is trained


def load_run_data(data: DataArguments, args: ContAccumTrainingArguments) -> RunData:
    """Read the data of a run; raises `UserError` for data that cannot be used.

    On each host the first process reads, and the others find what it has read in the cache.
    """
    with args.main_process_first(desc="reading the data"):
        training = config.load_data(data, args)
        mining = config.load_mining_data_of(data, args)
        evaluator = config.load_evaluator(data, args)
    return RunData(training, mining, evaluator)


def load_encoder(model: ModelArguments, args: ContAccumTrainingArguments) -> DualEncoder:
    """Load the model to train; raises `UserError` for one that cannot be loaded."""
    set_seed(args.seed)  # fresh weights are part of the run
    return config.load_model(model, str(args.device), args.method)


def make_trainer(
    encoder: DualEncoder,
    model: ModelArguments,
    args: ContAccumTrainingArguments,
    data: RunData,
    **options: Any,
) -> ContAccumTrainer:
    """Return the trainer of a run.

    Args:
        encoder: what `load_encoder` returns.
        options: others of the trainer, such as ``callbacks``.

    Raises:
        UserError: for a model that does not fit the data or the arguments.
    """
    return ContAccumTrainer(
        encoder,
        args,
        data.training.dataset,
        evaluator=data.evaluator,
        data_record=data.training.record(),
        mining_data=data.mining,
        guide=config.load_guide(model, device=str(args.device)),
        **options,
    )


def train_and_save(
    model: ModelArguments, data_args: DataArguments, args: ContAccumTrainingArguments
) -> None:
    """Train as the arguments say and save the model into ``output_dir``.

    Raises:
        UserError: for a folder with another run, and for data or a model that cannot be used.
    """
    output_dir = str(args.output_dir)
    require_free_folder(args)
    require_sources(args)
    if args.process_index == 0:
        require_writable(Path(output_dir) / RUN_RECORD)
    data = load_run_data(data_args, args)
    if args.process_index == 0:
        print(data.training.summary())
    trainer = make_trainer(load_encoder(model, args), model, args, data)
    # Messages stand above the progress bar, not in it.
    loggers = [logging.getLogger(name) for name in (None, "transformers")]
    with logging_redirect_tqdm(loggers):
        trainer.train(args.resume_from_checkpoint)
    trainer.save_model(output_dir)
    if model.merge_adapter and trainer.is_world_process_zero():
        config.merge_saved(output_dir, model)
