"""Setup of a training run from its settings: data, encoder and trainer.

``args`` are the training arguments of the settings, which also know the machine. `contaccum train`,
`tune` and `fit` all use these functions, so that the same settings always give the same run.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, NamedTuple

from sentence_transformers.sentence_transformer.evaluation import SentenceEvaluator
from tqdm.contrib.logging import logging_redirect_tqdm
from transformers import set_seed

from contaccum.data import TrainingSets
from contaccum.encoders.adapters import has_adapter, merge_adapter, replace_saved_adapter
from contaccum.encoders.dual_encoder import DualEncoder
from contaccum.encoders.loading import require_model
from contaccum.errors import ConfigError
from contaccum.files import require_writable
from contaccum.settings import Settings
from contaccum.training import config
from contaccum.training.arguments import ContAccumTrainingArguments
from contaccum.training.checkpoint import find_checkpoints, report_full_disk, require_free_folder
from contaccum.training.log import RUN_RECORD
from contaccum.training.query_side import check_document_source
from contaccum.training.trainer import ContAccumTrainer


class RunData(NamedTuple):
    """The data of a run.

    Attributes:
        training: the training sets.
        evaluator: the evaluator of the model during training; None without evaluation.
    """

    training: TrainingSets
    evaluator: SentenceEvaluator | None


def load_run_data(settings: Settings, args: ContAccumTrainingArguments) -> RunData:
    """Load the data of a run; raise `UserError` for data that cannot be used.

    On each host, the first process reads the files and writes a cache. The other processes of the
    host wait for the first one, and then read the cache.
    """
    with args.main_process_first(desc="reading the data"):
        training = config.load_data(settings)
        evaluator = config.load_evaluator(settings)
    return RunData(training, evaluator)


def load_encoder(settings: Settings, args: ContAccumTrainingArguments) -> DualEncoder:
    """Load the encoder to train; raise `UserError` if it cannot be loaded."""
    set_seed(args.seed)  # some weights may be initialised at random, such as those of an adapter
    return config.load_model(settings, str(args.device))


def load_guide(settings: Settings, args: ContAccumTrainingArguments) -> DualEncoder | None:
    """Load the guide, a frozen model whose scores show which negatives are false; None without."""
    if not settings.guide:
        return None
    return DualEncoder.from_pretrained(
        settings.guide,
        device=str(args.device),
        trust_remote_code=settings.trust_remote_code,
    )


def make_trainer(
    encoder: DualEncoder,
    settings: Settings,
    args: ContAccumTrainingArguments,
    data: RunData,
    **trainer_options: Any,
) -> ContAccumTrainer:
    """Return the trainer of a run.

    Args:
        encoder: the encoder to train, from `load_encoder`. Without an adapter, its weights become
            float32 (with ``method=query_side``, those of the query tower).
        settings: the settings, of which only those of the guide are read here.
        args: the training arguments.
        data: the data, from `load_run_data`.
        **trainer_options: further arguments of the trainer, such as ``callbacks``.

    Raises:
        UserError: for a model that cannot be trained on the data or with the arguments.
    """
    if args.method != "query_side" and not has_adapter(encoder):
        # A SentenceTransformer is loaded in the dtype in which it was saved. In bfloat16 or float16
        # most of an update would be lost to rounding.
        encoder = encoder.float()
    return ContAccumTrainer(
        encoder,
        args,
        data.training.dataset,
        evaluator=data.evaluator,
        data_record=data.training.record(),
        guide=load_guide(settings, args),
        **trainer_options,
    )


def _refuse_checkpoint_as_model(settings: Settings) -> None:
    """Raise `ConfigError` if the run would remove the checkpoint that it starts from."""
    if not settings.overwrite_output_dir:
        return
    checkpoints = {path.resolve() for path in find_checkpoints(settings.output_dir)}
    for name in ("model", "guide"):
        path = Path(getattr(settings, name) or "").resolve()
        if not checkpoints.isdisjoint((path, *path.parents)):
            raise ConfigError(
                f"overwrite_output_dir=true with {name}={path}: the run would remove that "
                "checkpoint. Copy it to another folder, or set another output_dir"
            )


def train_and_save(settings: Settings, args: ContAccumTrainingArguments) -> None:
    """Train a model and save it into ``output_dir``: the work of `contaccum train`.

    Raises:
        UserError: for an ``output_dir`` with another run, or data or a model that cannot be used.
    """
    output_dir = str(args.output_dir)
    # These checks are quick, and come before the data and the model are loaded.
    require_free_folder(args)
    _refuse_checkpoint_as_model(settings)
    require_model(settings.model)
    check_document_source(args)
    if args.process_index == 0:
        require_writable(Path(output_dir) / RUN_RECORD)
    data = load_run_data(settings, args)
    if args.process_index == 0:
        print(data.training.summary())
    encoder = load_encoder(settings, args)
    trainer = make_trainer(encoder, settings, args, data)
    # With the redirection, log lines do not break the progress bar. The logger of transformers has
    # a handler of its own, so redirecting the root logger is not enough.
    loggers = [logging.getLogger(), logging.getLogger("transformers")]
    with logging_redirect_tqdm(loggers):
        trainer.train(args.resume_from_checkpoint)
    with report_full_disk(output_dir):
        trainer.save_model(output_dir)
    if settings.merge_adapter and trainer.is_world_process_zero():
        # The weights are rounded to the dtype of the base model; see `adapters.merge_adapter`.
        trusted = settings.trust_remote_code
        model = DualEncoder.from_pretrained(output_dir, device="cpu", trust_remote_code=trusted)
        merge_adapter(model)
        replace_saved_adapter(output_dir, model)
