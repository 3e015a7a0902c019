"""Which settings of the loss can work together: asked by the loss, and by the trainer before a model is loaded."""

from __future__ import annotations

from contaccum.drift import DRIFT_COMPENSATIONS
from contaccum.errors import ConfigError


def check_settings(
    bank_size: int,
    query_bank_size: int | None,
    temperature: float,
    similarity: str,
    normalize_by: str,
    drift_compensation: str,
) -> None:
    """Refuse settings that cannot work, before anything is allocated.

    Raises:
        ConfigError: naming the setting, its value and the way out.
    """
    if not isinstance(bank_size, int) or bank_size < 0:
        raise ConfigError(f"bank_size must be a whole number of at least 0, got {bank_size!r}")
    if query_bank_size is not None:
        if not isinstance(query_bank_size, int) or query_bank_size < 0:
            raise ConfigError(f"query_bank_size must be a whole number of at least 0, got {query_bank_size!r}")
        if query_bank_size > bank_size:
            raise ConfigError(
                f"query_bank_size={query_bank_size} is larger than bank_size={bank_size}: a banked query needs the "
                "passage it came with. Raise bank_size or lower query_bank_size."
            )
    if not 0 < temperature < float("inf"):
        raise ConfigError(f"temperature must be a positive number, got {temperature!r}")
    choices = {
        "similarity": (similarity, ("dot", "cos")),
        "normalize_by": (normalize_by, ("local", "all")),
        "drift_compensation": (drift_compensation, DRIFT_COMPENSATIONS),
    }
    for name, (value, allowed) in choices.items():
        if value not in allowed:
            raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")


def check_sharding(shard_bank: bool, gather_across_devices: bool | None, bank_device: object) -> None:
    """Refuse to shard a bank that the ranks do not share, or that does not lie with the embeddings.

    Raises:
        ConfigError: naming both settings and the way out.
    """
    if shard_bank and gather_across_devices is False:
        raise ConfigError(
            "shard_bank=True with gather_across_devices=False: without gathering, each rank has a bank of its own, and "
            "nobody to share it with. Set gather_across_devices=True, or drop shard_bank"
        )
    if shard_bank and bank_device is not None:
        raise ConfigError(
            f"shard_bank=True with bank_device={bank_device}: a sharded bank lies where the ranks talk to each other, "
            "with the embeddings. Drop one of them"
        )
