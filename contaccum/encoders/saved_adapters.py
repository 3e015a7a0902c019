"""Replacement of a saved model with adapters by the full model, without the risk of losing both.

The adapters are often the only copy of the trained weights. They are removed only after the full
model, which may be a hundred times larger, is completely on the disk.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from sentence_transformers import SentenceTransformer

from contaccum.encoders.adapters import remove_stale_files
from contaccum.files import AnyPath, atomic_folder

MERGED_FOLDER = "merged"
"""Subfolder in which the full model is written before it replaces the model with adapters."""


def replace_saved_adapter(folder: AnyPath, model: SentenceTransformer) -> None:
    """Save a full model into a folder, in place of a model with adapters.

    If the process is killed, either the model with adapters is in the folder, or the full model is
    in the subfolder `MERGED_FOLDER`.

    Args:
        folder: the folder of the saved model. Files that the full model does not have, such as the
            model card, stay.
        model: the full model, whose adapters are merged.

    Raises:
        UserError: if the full model cannot be written. The folder is not changed then.
    """
    folder = Path(folder)
    merged_folder = folder / MERGED_FOLDER
    with atomic_folder(merged_folder) as new_folder:
        model.save_pretrained(str(new_folder), create_model_card=False)
    remove_stale_files(folder, is_adapted=False)
    for path in sorted(merged_folder.rglob("*")):  # a folder comes before its files
        target = folder / path.relative_to(merged_folder)
        if path.is_dir():
            target.mkdir(exist_ok=True)
        else:
            path.replace(target)
    shutil.rmtree(merged_folder)
