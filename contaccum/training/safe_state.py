"""State as safetensors and JSON, with nothing that could run code: optimizers, schedulers, scalers, random numbers.

transformers pickles these. Here a state is a tree of dicts, lists, tuples, numbers, strings and tensors; the tensors go
into a safetensors file and the tree into its JSON header, and reading gives back the same tree, bit for bit. What else
there may be in a state is refused when it is written. Where files lie and when they are whole is not decided here.
"""

from __future__ import annotations

import json
import math
import os
import random
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from contaccum.errors import UserError

_TREE = "state"  # the header's key
_MARKS = ("$tensor", "$tuple", "$items", "$float")


def save_state(path: str | os.PathLike[str], state: Any) -> None:
    """Write a tree of plain values and tensors; one without tensors may go into a ``.json``.

    Raises:
        TypeError: for a value of another kind, naming where in the tree it is.
    """
    tensors: dict[str, Tensor] = {}
    tree = _pack(state, tensors, "")
    if os.fspath(path).endswith(".json"):
        if tensors:
            raise TypeError(f"a state holds a tensor at {next(iter(tensors))}, which JSON cannot say")
        with open(path, "w", encoding="utf-8") as file:
            json.dump(tree, file, indent=1, allow_nan=False)
        return
    save_file(_apart(tensors), path, metadata={_TREE: json.dumps(tree, allow_nan=False)})


def load_state(path: str | os.PathLike[str], device: torch.device | str = "cpu") -> Any:
    """What :func:`save_state` wrote, its tensors on ``device``.

    Raises:
        UserError: when the file cannot be read as such; a pickle cannot.
    """
    # Ranks on a CPU call it cpu:0, which safetensors does not know.
    device = "cpu" if torch.device(device).type == "cpu" else device
    try:
        if os.fspath(path).endswith(".json"):
            with open(path, encoding="utf-8") as text:
                return _unpack(json.load(text), {})
        with safe_open(os.fspath(path), framework="pt", device=str(device)) as file:
            tree = json.loads(file.metadata()[_TREE])
            return _unpack(tree, {name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118  # it is no dict
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{os.fspath(path)}: cannot be read as a state in safetensors or JSON ({error})") from error


def random_states() -> dict[str, Any]:
    """The state of every random number generator that training draws from: Python's, numpy's, torch's."""
    name, keys, position, has_gauss, gauss = np.random.get_state()
    states = {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.asarray(keys).astype(np.int64)), int(position), int(has_gauss), gauss),
        "cpu": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def set_random_states(states: dict[str, Any]) -> None:
    """Draw on from :func:`random_states`; of generators of GPUs, those that are there now."""
    random.setstate(states["python"])
    name, keys, position, has_gauss, gauss = states["numpy"]
    np.random.set_state((name, keys.cpu().numpy().astype(np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(states["cpu"].cpu())
    if torch.cuda.is_available():
        for index, state in enumerate(states.get("cuda", [])[: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(state.cpu(), index)


def _pack(value: Any, tensors: dict[str, Tensor], where: str) -> Any:
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (int, np.integer)):
        return int(value)
    if isinstance(value, (float, np.floating)):
        return float(value) if math.isfinite(value) else {"$float": str(float(value))}
    if isinstance(value, Tensor):
        name = where or "value"
        tensors[name] = value.detach()
        return {"$tensor": name}
    if isinstance(value, tuple):
        return {"$tuple": [_pack(item, tensors, f"{where}.{i}") for i, item in enumerate(value)]}
    if isinstance(value, list):
        return [_pack(item, tensors, f"{where}.{i}") for i, item in enumerate(value)]
    if isinstance(value, dict):
        packed = [(key, _pack(item, tensors, f"{where}.{key}".lstrip("."))) for key, item in value.items()]
        if all(isinstance(key, str) and key not in _MARKS for key in value):
            return dict(packed)
        if all(isinstance(key, (str, int)) for key in value):
            # JSON has no keys but strings, and optimizers count their parameters.
            return {"$items": [[key, item] for key, item in packed]}
    raise TypeError(
        f"a state holds a {type(value).__name__} at {where or 'its root'}, which JSON and tensors cannot say"
    )


def _unpack(tree: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(tree, list):
        return [_unpack(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if "$tensor" in tree:
        return tensors[tree["$tensor"]]
    if "$tuple" in tree:
        return tuple(_unpack(item, tensors) for item in tree["$tuple"])
    if "$float" in tree:
        return float(tree["$float"])
    if "$items" in tree:
        return {key: _unpack(item, tensors) for key, item in tree["$items"]}
    return {key: _unpack(item, tensors) for key, item in tree.items()}


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors that share no memory, which is what safetensors can write."""
    seen: set[int] = set()
    apart = {}
    for name, tensor in tensors.items():
        whole = tensor.contiguous()
        shared = whole.untyped_storage().data_ptr()
        if shared in seen or whole.untyped_storage().nbytes() != whole.nbytes:
            whole = whole.clone()
        seen.add(shared)
        apart[name] = whole
    return apart
