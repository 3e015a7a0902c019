"""Which settings a search starts from, and which the user may give."""

from __future__ import annotations

from pathlib import Path

from sentence_transformers.util import is_sentence_transformer_model

from contaccum.comparison.options import to_command_line
from contaccum.data.split import TRAIN_FILE
from contaccum.errors import ConfigError
from contaccum.files import redact
from contaccum.fitting.folder import FitFolder
from contaccum.training import config
from contaccum.training.arguments import ContAccumTrainingArguments
from contaccum.training.proposal import propose
from contaccum.tuning.trial import Options
from contaccum.tuning.tune import options_of_method

SET_BY_FIT = frozenset(
    [
        *("train_data", "split", "eval_data", "eval_split", "eval_queries", "eval_corpus_size"),
        *("output_dir", "overwrite_output_dir", "resume_from_checkpoint"),
        *("eval_strategy", "eval_steps", "save_strategy", "save_steps", "save_total_limit"),
        *("load_best_model_at_end", "passage_store", "missing"),
    ]
)
"""Keys of `contaccum train` that cannot be given: they are what the command is for."""


def check_settings(data: Path, model: str, given: Options) -> ContAccumTrainingArguments:
    """Refuse settings that no run could use, before anything is read or written.

    Returns:
        Arguments of a run, which know of devices and processes.

    Raises:
        ConfigError: for an unknown key, one that `fit` sets itself, values that cannot work, or a
            credential.
    """
    for key in sorted(SET_BY_FIT & given.keys()):
        raise ConfigError(f"{key} is set by contaccum fit itself: drop it")
    if redact(dict(given)) != dict(given):
        raise ConfigError(
            "a credential among the settings, which are written down: put it into the environment"
        )
    options = {"model": [model], "train_data": [str(data)], "output_dir": ["unused"], **given}
    method = given.get("method", ["grad_accum"])[0]
    checked = options_of_method(options, method, Path("unused"))
    return config.parse(to_command_line(checked))[2]


def base_options(folder: FitFolder, model: str, given: Options) -> dict[str, list[str]]:
    """Return the options that the search starts from: what `contaccum new` proposes, and what is given.

    A SentenceTransformer keeps its own lengths; a backbone gets those of the data.
    """
    train_data = str(folder.data / TRAIN_FILE)
    proposal = propose(train_data, model)
    proposed = {
        "model": model,
        "train_data": train_data,
        "output_dir": folder.again,
        "bank_size": proposal.bank_size,
        "temperature": proposal.temperature,
        "per_device_train_batch_size": proposal.micro_batch,
        "total_train_batch_size": proposal.micro_batch * proposal.accumulation_steps,
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
    if not is_sentence_transformer_model(model):
        proposed["query_max_length"] = proposal.query_max_length
        proposed["passage_max_length"] = proposal.passage_max_length
    options = {key: [str(value)] for key, value in proposed.items()}
    if "gradient_accumulation_steps" in given:
        del options["total_train_batch_size"]
    return {**options, **{key: list(values) for key, values in given.items()}}
