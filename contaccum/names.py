"""What other tools call the options here: taken where it can mean one option alone, else a hint."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from contaccum.errors import closest

_BATCH = ("per_device_train_batch_size", "total_train_batch_size")
_LENGTH = ("query_max_length", "passage_max_length")
OTHERS = {
    **dict.fromkeys(("model_name_or_path", "model_name"), ("model",)),
    **dict.fromkeys(("data", "dataset", "dataset_name", "train_file"), ("train_data", "data")),
    **dict.fromkeys(("batch_size", "train_batch_size"), (*_BATCH, "batch_size")),
    **dict.fromkeys(("max_seq_length", "max_length"), _LENGTH),
    **dict.fromkeys(("epochs", "num_epochs"), ("num_train_epochs",)),
    **dict.fromkeys(("output", "output_dir", "output_path"), ("output_dir", "output")),
    **dict.fromkeys(("precision", "dtype"), ("precision", "bf16", "fp16")),
    "query_max_len": _LENGTH[:1],
    "passage_max_len": _LENGTH[1:],
    "lora_rank": ("lora_r",),
    "lr": ("learning_rate",),
}
"""Another tool's name -> the options that it can mean, of which a command has some."""


def our_name(name: str, known: Collection[str]) -> str:
    """The one of the ``known`` options that ``name`` can mean; itself, where it is none or several."""
    plain = name.replace("-", "_")
    meant = [plain] if plain in known else [option for option in OTHERS.get(plain, ()) if option in known]
    return meant[0] if len(meant) == 1 else name


def in_our_names(argv: Sequence[str], known: Collection[str]) -> list[str]:
    """``argv`` with each ``--name`` and ``--name=value`` in the name that it has here."""
    parts = [(token, *token.partition("=")) for token in argv]
    return [f"--{our_name(key[2:], known)}{x}{value}" if key[:2] == "--" else token for token, key, x, value in parts]


def hint(name: str, known: Collection[str]) -> str:
    """To end an error line with: which options a ``name`` that is none could mean, or which one is like it."""
    meant = [option for option in OTHERS.get(name.replace("-", "_"), ()) if option in known]
    return f"; did you mean {' or '.join(map(repr, meant))}?" if meant else closest(name.replace("-", "_"), known)
