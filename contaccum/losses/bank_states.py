"""States of banks that ranks do not share.

They are gathered into one state for a checkpoint, and taken apart when it is loaded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from contaccum.distributed import gather_states, rank, world_size
from contaccum.errors import ConfigError

_RANK_PREFIX = "of_rank_"


def gather_bank_states(state: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Gather the states of all ranks, each under a prefix with the number of its rank.

    All ranks call it together.
    """
    gathered = {}
    for index, part in enumerate(gather_states(state, device)):
        for key, value in part.items():
            gathered[f"{_RANK_PREFIX}{index}.{key}"] = value
    return gathered


def own_bank_state(state: dict[str, Tensor], is_shared: bool) -> dict[str, Tensor]:
    """Return this rank's part of a gathered state, or a copy of a state that all ranks share.

    Raises:
        ConfigError: if the state is of another number of ranks.
    """
    ranks = {key.split(".", 1)[0] for key in state if key.startswith(_RANK_PREFIX)}
    if not ranks:
        return dict(state)
    if is_shared or len(ranks) != world_size():
        raise ConfigError(
            f"this state holds the banks of {len(ranks)} ranks: go on with as many, "
            "gather_across_devices=False, or start from the weights alone"
        )
    prefix = f"{_RANK_PREFIX}{rank()}."
    own_state = {}
    for key, value in state.items():
        if key.startswith(prefix):
            own_state[key.removeprefix(prefix)] = value
    return own_state
