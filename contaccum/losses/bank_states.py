"""Checkpoint states of banks when each rank has a bank of its own.

A state is a dict of named tensors, as `torch.nn.Module.state_dict` returns. A checkpoint holds one
dict for all ranks: `gather_bank_states` puts the states of the ranks together, with keys
"of_rank_<rank>.<name>", and `select_bank_state` selects a rank's state when the checkpoint is
loaded. If the ranks share one bank, the checkpoint holds its state with keys "<name>".
"""

from __future__ import annotations

import torch
from torch import Tensor

from contaccum.distributed import gather_states, rank, world_size
from contaccum.errors import ConfigError

_RANK_PREFIX = "of_rank_"


def gather_bank_states(state: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Gather the states of all ranks into one, with the number of the rank as a prefix of the keys.

    All ranks must call this function together.

    Args:
        state: this rank's state.
        device: the device on which the ranks can communicate.
    """
    gathered = {}
    for index, state_of_rank in enumerate(gather_states(state, device)):
        for key, value in state_of_rank.items():
            gathered[f"{_RANK_PREFIX}{index}.{key}"] = value
    return gathered


def select_bank_state(state: dict[str, Tensor], is_shared: bool) -> dict[str, Tensor]:
    """Select this rank's part of a gathered state, or copy a state without ranks.

    Args:
        state: the state in the checkpoint.
        is_shared: True if all ranks share one bank in the run that loads the checkpoint.

    Raises:
        ConfigError: if the state holds the banks of several ranks, and the run has another number
            of ranks, or its ranks share one bank.
    """
    rank_prefixes = {key.split(".", 1)[0] for key in state if key.startswith(_RANK_PREFIX)}
    if not rank_prefixes:
        return dict(state)
    if is_shared or len(rank_prefixes) != world_size():
        raise ConfigError(
            f"this state holds the banks of {len(rank_prefixes)} ranks: resume with "
            f"{len(rank_prefixes)} ranks and gather_across_devices=False, or start a new run from "
            "the saved weights"
        )
    prefix = f"{_RANK_PREFIX}{rank()}."
    state_of_rank = {}
    for key, value in state.items():
        if key.startswith(prefix):
            state_of_rank[key.removeprefix(prefix)] = value
    return state_of_rank
