"""The settings of a fit: the check of the user's settings, and the start of the search.

A setting is an option of `contaccum train`, such as ``learning_rate``.
"""

from __future__ import annotations

import os
from pathlib import Path

from contaccum.data.split import TRAIN_FILE
from contaccum.distributed import RANK_TIMEOUT
from contaccum.encoders.loading import is_sentence_transformer
from contaccum.errors import ConfigError
from contaccum.files import refuse_credentials
from contaccum.fitting.folder import FitFolder
from contaccum.settings import find
from contaccum.training.arguments import ContAccumTrainingArguments
from contaccum.training.proposal import propose
from contaccum.tuning.methods import make_base_options, round_up, select_methods
from contaccum.tuning.options import Options, parse, to_command_line

SET_BY_FIT = frozenset(find("set_by_fit"))
"""Options of `contaccum train` that the user cannot give, because `contaccum fit` decides them.

All scores of a fit are nDCG@10 with the similarity of the model. Its final training has few
evaluations, each with a checkpoint, and its models are no results before the verdict.
"""


def check_settings(data: Path, model: str, settings: Options) -> ContAccumTrainingArguments:
    """Check the settings of the user before anything is read or written.

    The settings are parsed as for a training by each method that the search may try. Paths that do
    not exist yet are replaced by "unused".

    Returns:
        The parsed arguments of a training. `contaccum fit` reads the device, the process index and
        the batch sizes from them.

    Raises:
        ConfigError: for an unknown option, an option that `contaccum fit` sets itself, values that
            cannot work, or a credential.
    """
    for key in sorted(SET_BY_FIT & settings.keys()):
        raise ConfigError(f"{key} is not an option of contaccum fit: drop it")
    refuse_credentials(settings)
    options = {
        "model": [model],
        "train_data": [str(data)],
        "output_dir": ["unused"],
        "passage_store": ["unused"],
        "ddp_timeout": [str(int(RANK_TIMEOUT.total_seconds()))],
        **settings,
    }
    if "total_train_batch_size" in settings:
        options.pop("gradient_accumulation_steps", None)  # as in make_start_options
    if len(settings.get("method", ["any"])) != 1:
        raise ConfigError("method: give one method, or drop the option to search for the best one")
    _, training_args = parse(to_command_line(make_base_options(options)))
    # The search prints the reason if it leaves out a method.
    select_methods(options, settings, training_args.world_size, print_line=lambda line: None)
    return training_args


def make_start_options(
    folder: FitFolder, model: str, settings: Options, num_processes: int
) -> dict[str, list[str]]:
    """Return the options that the search starts from.

    They are the options that `contaccum new` proposes for the data, overridden by the user's
    settings. A SentenceTransformer keeps its maximum lengths; a transformers backbone gets lengths
    for the data.

    Args:
        settings: the options that the user gave.
        num_processes: number of processes that train together.
    """
    # Absolute paths, so that a later start may have another working directory.
    train_data = os.path.abspath(folder.data / TRAIN_FILE)
    # With positives="all", an epoch has a row for each positive, so updates may be larger.
    [positives] = settings.get("positives", [None])
    proposal = propose(train_data, model, positives=positives)
    micro_batch = proposal.micro_batch
    if "per_device_train_batch_size" in settings:
        [text] = settings["per_device_train_batch_size"]
        micro_batch = 1 if text.lower() == "auto" else int(text)
    pairs_per_update = proposal.micro_batch * proposal.accumulation_steps
    proposed = {
        "model": os.path.abspath(model) if os.path.isdir(model) else model,
        "train_data": train_data,
        "output_dir": os.path.abspath(folder.retrained_model),
        "bank_size": proposal.bank_size,
        "temperature": proposal.temperature,
        "per_device_train_batch_size": micro_batch,
        "total_train_batch_size": round_up(pairs_per_update, micro_batch * num_processes),
        "num_train_epochs": 3,
        "lr_scheduler_type": "linear",
        "warmup_steps": 0.1,
        "seed": 42,
    }
    if proposal.has_negatives:
        proposed["num_hard_negatives"] = 1
    if proposal.query_prompt:
        proposed["query_prompt"] = proposal.query_prompt
    if proposal.passage_prompt:
        proposed["passage_prompt"] = proposal.passage_prompt
    if not is_sentence_transformer(model):
        proposed["query_max_length"] = proposal.query_max_length
        proposed["passage_max_length"] = proposal.passage_max_length
    if "gradient_accumulation_steps" in settings:
        # The proposed batch size could contradict the number of steps that the user gave.
        del proposed["total_train_batch_size"]
    options = {key: [str(value)] for key, value in proposed.items()}
    for key, values in settings.items():
        options[key] = list(values)
    if "total_train_batch_size" in options:
        options.pop("gradient_accumulation_steps", None)  # it follows from the pairs per update
    return options
