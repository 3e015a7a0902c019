"""A few training pairs, kept as the encoder takes them in, to be encoded again as it learns.

What their embeddings did is what became of the bank's entries, at a small price: eight pairs, forward only, every
128 pairs of training is some 2 % of the work. It keeps and encodes; what to make of it is ``drift``'s affair.
"""

from __future__ import annotations

import itertools
import json
from typing import Any

import torch
from torch import Tensor, nn

from contaccum.distributed import gather_states, rank, world_size

PROBE_TEXTS = 8
PAIRS_PER_PROBE = 128
"""Pairs of training between two probes, at least."""

_OTHER = "other"  # the key of everything that is not a tensor, in a state


class TextProbe:
    """Features of the first two columns (queries, passages) of a micro-batch, its first rows.

    Args:
        features: as a sentence-transformers collator gives them, one dict per column.
        rows: at most so many.

    Raises:
        ValueError: for features whose rows cannot be told apart (see :meth:`fits`).
    """

    def __init__(self, features: list[dict[str, Any]], rows: int = PROBE_TEXTS) -> None:
        if not self.fits(features):
            raise ValueError("a probe needs (n, length) input_ids in the first two columns")
        n = features[0]["input_ids"].shape[0]
        self.features = [
            {
                key: value[:rows].clone() if isinstance(value, Tensor) and value.shape[:1] == (n,) else value
                for key, value in column.items()
            }
            for column in features[:2]
        ]

    @staticmethod
    def fits(features: list[dict[str, Any]]) -> bool:
        """Whether these are padded token ids, one row a text, and nothing that a state could not hold."""
        rows = {tuple(column["input_ids"].shape[:-1]) for column in features[:2] if "input_ids" in column}
        plain = (Tensor, str, int, float, bool, type(None))
        values = [value for column in features[:2] for value in column.values()]
        padded = all(getattr(column.get("input_ids"), "ndim", 0) == 2 for column in features[:2])
        return padded and len(rows) == 1 and all(isinstance(value, plain) for value in values)

    @torch.no_grad()
    def encode(self, model: nn.Module) -> list[Tensor]:
        """Embeddings of the queries and of the passages, (S, d) each, without dropout and drawing no random number."""
        modes = [(module, module.training) for module in model.modules()]
        model.eval()
        try:
            # Modules write into the features they are given.
            return [model(column)["sentence_embedding"].detach().clone() for column in self._on(model)]
        finally:
            for module, training in modes:
                module.training = training

    def _on(self, model: nn.Module) -> list[dict[str, Any]]:
        device = next(model.parameters()).device
        return [
            {key: value.to(device) if isinstance(value, Tensor) else value for key, value in column.items()}
            for column in self.features
        ]

    def state_dict(self) -> dict[str, Tensor]:
        """The features as tensors: what is not one goes into JSON, as bytes."""
        state: dict[str, Tensor] = {}
        for index, column in enumerate(self.features):
            state |= {f"{index}.{key}": value for key, value in column.items() if isinstance(value, Tensor)}
            other = {key: value for key, value in column.items() if not isinstance(value, Tensor)}
            state[f"{index}.{_OTHER}"] = torch.tensor(list(json.dumps(other).encode()), dtype=torch.uint8)
        return state

    @classmethod
    def from_state_dict(cls, state: dict[str, Tensor]) -> TextProbe:
        """What :meth:`state_dict` gave."""
        features: list[dict[str, Any]] = [{}, {}]
        for name, value in state.items():
            index, key = name.split(".", 1)
            features[int(index)] |= json.loads(bytes(value.tolist())) if key == _OTHER else {key: value}
        return cls(features)


class SharedProbe:
    """The probe texts of all ranks that share a bank: ``PROBE_TEXTS`` together, at least one of each.

    Every rank knows them all, and encodes its share: those that it gave itself, as long as there are as many ranks as
    when the probe was made. In rank order, the shares are the same texts in the same order on any number of ranks.

    Args:
        parts: what each rank gave, in rank order.
        shared: whether the ranks of today share a bank; otherwise each encodes all parts.
    """

    def __init__(self, parts: list[TextProbe], shared: bool) -> None:
        self.parts, self.shared = parts, shared

    @classmethod
    def of(cls, features: list[dict[str, Any]], shared: bool) -> SharedProbe | None:
        """Of this rank's micro-batch and those of the others; None on all of them where one does not fit."""
        fits = TextProbe.fits(features)
        if not shared:
            return cls([TextProbe(features)], shared) if fits else None
        mine = TextProbe(features, -(-PROBE_TEXTS // world_size())).state_dict() if fits else {}
        device = next(x.device for column in features for x in column.values() if isinstance(x, Tensor))
        given = gather_states(mine, device)
        return cls([TextProbe.from_state_dict(part) for part in given], shared) if all(given) else None

    def encode(self, model: nn.Module) -> list[Tensor]:
        """Embeddings of this rank's share, queries and passages: (S, d) each. All ranks that share call it together."""
        ranks = world_size() if self.shared else 1
        bounds = [len(self.parts) * r // ranks for r in range(ranks + 1)]
        first, end = (bounds[rank()], bounds[rank() + 1]) if self.shared else (0, len(self.parts))
        # As many passes on every rank, whatever its share: those of FSDP are collectives.
        passes = max(b - a for a, b in itertools.pairwise(bounds))
        found = [self.parts[min(first + i, len(self.parts) - 1)].encode(model) for i in range(passes)]
        kept = found[: end - first] or [[x[:0] for x in found[0]]]
        return [torch.cat(column) for column in zip(*kept, strict=True)]

    def state_dict(self) -> dict[str, Tensor]:
        """All parts, the same on every rank."""
        return {f"{i}.{key}": x for i, part in enumerate(self.parts) for key, x in part.state_dict().items()}

    @classmethod
    def from_state_dict(cls, state: dict[str, Tensor], shared: bool) -> SharedProbe:
        """What :meth:`state_dict` gave, on any number of ranks."""
        parts: dict[int, dict[str, Tensor]] = {}
        for name, value in state.items():
            index, key = name.split(".", 1)
            parts.setdefault(int(index), {})[key] = value
        return cls([TextProbe.from_state_dict(parts[index]) for index in sorted(parts)], shared)
