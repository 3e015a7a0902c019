"""Saving and uploading of models without credentials, pickles and local paths.

A pickle could run code when it is loaded, and the other two would be published with the model.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sentence_transformers import SentenceTransformer

from contaccum.files import redact, write_text
from contaccum.training.arguments import ContAccumTrainingArguments


def clean_saved_model(folder: Path) -> None:
    """Remove the pickled arguments from a saved model, and credentials from its card."""
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
    """Upload a model and its card.

    The other files of ``output_dir`` contain local paths, so they are not uploaded.

    Args:
        model: the model.
        args: the arguments of the run, with the name and the options of the upload.
        save: function that saves the model in a folder. All ranks must call it.
        is_writer: whether this rank uploads.
        commit_message: message of the commit.
        overrides: the keys ``token``, ``revision`` and ``private``, if present, replace the values
            of the arguments.

    Returns:
        The URL of the commit; None on other ranks.
    """
    name = args.hub_model_id or Path(str(args.output_dir)).resolve().name
    model.model_card_data.set_model_id(name)
    options: dict[str, Any] = {
        "token": args.hub_token,
        "revision": args.hub_revision,
        "private": args.hub_private_repo,
    }
    for key in options.keys() & overrides.keys():
        options[key] = overrides[key]
    with tempfile.TemporaryDirectory() as folder:
        save(folder)
        if not is_writer:
            return None
        return model.push_to_hub(
            name, exist_ok=True, commit_message=commit_message, local_model_path=folder, **options
        )
