"""Loading of backbones with weights of 4 bits, for QLoRA (arXiv 2305.14314)."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from transformers import BitsAndBytesConfig

from contaccum.errors import ConfigError


def make_4bit_kwargs() -> dict[str, Any]:
    """Return ``model_kwargs`` that load weights in 4 bits (NF4, arXiv 2305.14314).

    Raises:
        ConfigError: if bitsandbytes is not installed, or there is no accelerator.
    """
    if find_spec("bitsandbytes") is None:
        raise ConfigError(
            "load_in_4bit needs bitsandbytes, which is not installed: pip install bitsandbytes"
        )
    if not torch.accelerator.is_available():
        raise ConfigError(
            "load_in_4bit needs an accelerator, and this machine has none: leave it out"
        )
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    return {"quantization_config": config}
