"""Saved and uploaded models without credentials, pickles and paths."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from contaccum.files import redact, write_text
from contaccum.training.arguments import ContAccumTrainingArguments


def clean_saved_model(folder: Path) -> None:
    """Remove the pickle of the arguments, and credentials from the model card."""
    (folder / "training_args.bin").unlink(missing_ok=True)
    card = folder / "README.md"
    if card.is_file():
        write_text(card, redact(card.read_text(encoding="utf-8")))


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
