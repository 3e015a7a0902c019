"""Which engines of distributed training are refused, and why: asked before a model is loaded."""

from __future__ import annotations

import os
from typing import Any

from contaccum.errors import ConfigError


def refuse_engines(deepspeed: Any) -> None:
    """Refuse DeepSpeed, asked for by argument or by `accelerate launch`, before anything is loaded.

    Raises:
        ConfigError: with the reason and the way out.
    """
    if deepspeed or os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
        raise ConfigError(
            "deepspeed is not supported: its engine owns backward, accumulation and clipping, so that gradient norms "
            "per tower could not be read or balanced, and checkpoints would be its own. FSDP shards the same things: "
            "drop deepspeed, and set fsdp=true"
        )


def refuse_first_fsdp(plugin_args: dict[str, Any] | None) -> None:
    """Refuse FSDP's first version, which flattens the parameters of both towers into one.

    Raises:
        ConfigError: with the setting to change.
    """
    # `accelerate launch` says its version in the environment.
    by_launcher = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true" and os.environ.get("FSDP_VERSION")
    version = (plugin_args or {}).get("fsdp_version") or by_launcher or 2
    if int(version) != 2:
        raise ConfigError(
            f"FSDP version {version} is not supported (transformers has deprecated it, too): set version: 2 in "
            "fsdp_config, or fsdp_version: 2 in the config of accelerate"
        )
