"""Overwriting of a saved model that has adapters by the full model, so that neither can be lost.

The adapters are often the only copy of the trained weights. They are removed only after the full
model, which may be a hundred times larger, is completely on the disk.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from sentence_transformers import SentenceTransformer

from contaccum.encoders.adapters import remove_stale_files
from contaccum.files import AnyPath, atomic_folder

MERGED_FOLDER = ".merged"
"""Subfolder in which the full model is written before it replaces the model with adapters."""


def replace_saved_adapter(folder: AnyPath, model: SentenceTransformer) -> None:
    """Save a full model into a folder, in place of a model with adapters.

    If the process is killed, either the model with adapters is in the folder, or the complete full
    model is in the subfolder `MERGED_FOLDER`, which is removed at the end.

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
            _replace_by_copy(path, target)
    shutil.rmtree(merged_folder)


def _replace_by_copy(source: Path, target: Path) -> None:
    """Replace a file in one step by a copy of another, if possible without more disk space."""
    new_file = target.with_name(f".new-{target.name}")
    new_file.unlink(missing_ok=True)  # of a process that was killed
    try:
        os.link(source, new_file)
    except OSError:  # the file system has no hard links
        shutil.copyfile(source, new_file)
    new_file.replace(target)
