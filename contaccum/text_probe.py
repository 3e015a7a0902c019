"""A few training pairs, kept as the tokeniser gave them, to be encoded again as the encoder learns.

What happened to their embeddings happened to the bank's entries too. Eight pairs, forward only, every 128 pairs of
training are some 2 % of the work. This module stores and encodes; what to make of it is ``drift``'s affair.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from contaccum.distributed import gather_states, rank, world_size

PROBE_TEXTS = 8
PAIRS_PER_PROBE = 128
"""Pairs of training between two probes, at least."""


class TextProbe:
    """The first pairs of a micro-batch, of all ranks that share a bank: ``PROBE_TEXTS`` together, one of each at least.

    Every rank knows them all and encodes its share: in rank order, the same texts on any number of ranks. Only tensors
    are stored; what a column has beside them (the ``task`` that a Router goes by) comes with each micro-batch.

    Args:
        queries, passages: features of S texts, tensors (S, length) and numbers.
        shared: whether the ranks of this process group share a bank; otherwise each encodes all texts.
    """

    def __init__(self, queries: dict[str, Tensor], passages: dict[str, Tensor], shared: bool) -> None:
        self.columns, self.shared = (queries, passages), shared
        self.texts = len(queries["input_ids"])

    @classmethod
    def of(cls, features: list[dict[str, Any]], shared: bool) -> TextProbe | None:
        """Of this rank's micro-batch and the others'; None on every rank when texts are not rows of token ids."""
        tokens = [column.get("input_ids") for column in features[:2]]
        fits = all(isinstance(x, Tensor) and x.ndim == 2 for x in tokens)
        wanted = -(-PROBE_TEXTS // world_size()) if shared else PROBE_TEXTS
        own = [_first_rows(column, wanted) if fits else {} for column in features[:2]]
        if not shared:
            return cls(own[0], own[1], shared) if fits else None
        device = next(x.device for column in features for x in column.values() if isinstance(x, Tensor))
        given = [gather_states(column, device) for column in own]
        return cls(_joined(given[0]), _joined(given[1]), shared) if all(given[0] + given[1]) else None

    def encode(self, model: nn.Module, features: list[dict[str, Any]]) -> list[Tensor]:
        """Embeddings of this rank's share, queries and passages: (S, d) each, without dropout or any random number.

        All ranks that share call it together.

        Args:
            features: of the present micro-batch.
        """
        ranks, own = (world_size(), rank()) if self.shared else (1, 0)
        first, end = (self.texts * r // ranks for r in (own, own + 1))
        rows = slice(first, end) if first < end else slice(1)  # FSDP's forward passes are collectives: nobody skips one
        device = next(model.parameters()).device
        modes = [(module, module.training) for module in model.modules()]
        model.eval()
        try:
            found = []
            for column, present in zip(self.columns, features, strict=False):
                texts = {key: x[rows] if len(x.shape) and len(x) == self.texts else x for key, x in column.items()}
                stored = {key: x.to(device) if x.ndim else x.item() for key, x in texts.items()}
                with torch.no_grad():
                    found.append(model({**present, **stored})["sentence_embedding"].detach().clone()[: end - first])
            return found
        finally:
            for module, training in modes:
                module.training = training

    def state_dict(self) -> dict[str, Tensor]:
        """All texts, the same on every rank."""
        return {f"{i}.{key}": x for i, column in enumerate(self.columns) for key, x in column.items()}

    @classmethod
    def from_state_dict(cls, state: dict[str, Tensor], shared: bool) -> TextProbe:
        """What :meth:`state_dict` gave, on any number of ranks."""
        queries, passages = ({key[2:]: x for key, x in state.items() if key.startswith(f"{i}.")} for i in (0, 1))
        return cls(queries, passages, shared)


def _first_rows(column: dict[str, Any], rows: int) -> dict[str, Tensor]:
    """The tensors and numbers of a column, of its first texts."""
    n = len(column["input_ids"])
    tensors = {key: torch.as_tensor(x) for key, x in column.items() if isinstance(x, (Tensor, int, float))}
    return {key: x[:rows].clone() if x.ndim and len(x) == n else x for key, x in tensors.items()}


def _joined(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Texts of several ranks as one column, padded with zeros to one length, which no attention mask shows."""
    joined = dict(parts[0])
    for key in [key for key, x in joined.items() if x.ndim == 2]:
        rows = [part[key] for part in parts]
        length = max(x.shape[1] for x in rows)
        joined[key] = torch.cat([pad(x, (0, length - x.shape[1])) for x in rows])
    return joined
