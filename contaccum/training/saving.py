"""Saved and uploaded models without credentials, pickles and paths."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sentence_transformers import SentenceTransformer

from contaccum.files import redact, write_text
from contaccum.training.arguments import ContAccumTrainingArguments


def clean_saved_model(folder: Path) -> None:
    """Remove the pickle of the arguments, and credentials from the model card."""
    (folder / "training_args.bin").unlink(missing_ok=True)
    card = folder / "README.md"
    if card.is_file():
        write_text(card, redact(card.read_text(encoding="utf-8")))


def upload_model(
    model: SentenceTransformer,
    args: ContAccumTrainingArguments,
    save: Callable[[str], None],
    is_writer: bool,
    commit_message: str | None,
    overrides: Mapping[str, Any],
) -> Any:
    """Upload a model and its card, without other files of ``output_dir``: they contain paths.

    Args:
        save: saves the model in a folder; all ranks call it.
        is_writer: whether this rank uploads.
        overrides: ``token``, ``revision`` and ``private`` in place of those of the arguments.

    Returns:
        The address of the commit; None on other ranks.
    """
    name = hub_model_id(args)
    model.model_card_data.set_model_id(name)
    options = hub_options(args, overrides)
    with tempfile.TemporaryDirectory() as folder:
        save(folder)
        if not is_writer:
            return None
        options |= {"commit_message": commit_message, "local_model_path": folder}
        return model.push_to_hub(name, exist_ok=True, **options)


def hub_model_id(args: ContAccumTrainingArguments) -> str:
    """Return the name to upload a model by: the folder's where the user gave none."""
    return args.hub_model_id or Path(str(args.output_dir)).resolve().name


def hub_options(args: ContAccumTrainingArguments, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return token, revision and privacy of an upload; None in ``overrides`` changes nothing."""
    options = {
        "token": args.hub_token,
        "revision": args.hub_revision,
        "private": args.hub_private_repo,
    }
    for key in options:
        if overrides.get(key) is not None:
            options[key] = overrides[key]
    return options
