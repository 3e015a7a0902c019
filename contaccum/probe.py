"""A few training pairs, kept as the encoder takes them in, to be encoded again as it learns.

What their embeddings did is what became of the bank's entries, at a small price: eight pairs, forward only, every
128 pairs of training is some 2 % of the work. It keeps and encodes; what to make of it is ``drift``'s affair.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor, nn

PROBE_TEXTS = 8
PAIRS_PER_PROBE = 128
"""Pairs of training between two probes, at least."""

_OTHER = "other"  # the key of everything that is not a tensor, in a state


class TextProbe:
    """Features of the first two columns (queries, passages) of a micro-batch, its first ``PROBE_TEXTS`` rows.

    Args:
        features: as a sentence-transformers collator gives them, one dict per column.

    Raises:
        ValueError: for features whose rows cannot be told apart (see :meth:`fits`).
    """

    def __init__(self, features: list[dict[str, Any]]) -> None:
        if not self.fits(features):
            raise ValueError("a probe needs (n, length) input_ids in the first two columns")
        n = features[0]["input_ids"].shape[0]
        self.features = [
            {
                key: value[:PROBE_TEXTS].clone() if isinstance(value, Tensor) and value.shape[:1] == (n,) else value
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
            return [model(dict(column))["sentence_embedding"].detach().clone() for column in self.features]
        finally:
            for module, training in modes:
                module.training = training

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
