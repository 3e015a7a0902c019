"""TextProbe: a few training pairs that are encoded again as the encoder learns; what that shows is read in ``drift``.

It knows no loss: when a probe is due is decided in ``losses``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from sentence_transformers.sentence_transformer.losses.matryoshka import ForwardDecorator
from torch import Tensor, nn

from contaccum.distributed import gather_states, rank, world_size
from contaccum.features import first_rows

PROBE_TEXTS = 8


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """For a while, a model in eval mode; each of its modules is then in the mode that it had."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


class TextProbe:
    """A few training pairs, kept as the tokenizer gave them, to be encoded again as the encoder learns.

    They are the first pairs of a micro-batch, of all ranks that share a bank: ``PROBE_TEXTS`` together, one of each at
    least. Every rank knows them all, a part from each of them, and encodes its share of the parts. Only tensors and
    numbers are stored; what a column has beside them (the ``task`` that a Router goes by) comes with each micro-batch.
    """

    def __init__(self, parts: list[list[dict[str, Tensor]]], shared: bool) -> None:
        self.parts, self.shared = parts, shared  # queries and passages of each

    @classmethod
    def of(cls, features: list[dict[str, Any]], shared: bool) -> TextProbe | None:
        """Of this rank's micro-batch and the others'; None on every rank where first texts cannot be told apart."""
        wanted = -(-PROBE_TEXTS // world_size()) if shared else PROBE_TEXTS
        parts = [[first_rows(column, wanted) or {} for column in features[:2]]]
        if shared:
            device = next(x.device for column in features for x in column.values() if isinstance(x, Tensor))
            parts = [list(part) for part in zip(*(gather_states(x, device) for x in parts[0]), strict=True)]
        return cls(parts, shared) if all(x for part in parts for x in part) else None

    def encode(self, model: nn.Module, features: list[dict[str, Any]]) -> list[Tensor]:
        """Embeddings of this rank's share, queries and passages: (S, d) each, without dropout or any random number.

        All ranks that share call it together, with the ``features`` of the present micro-batch.
        """
        ranks, own = (world_size(), rank()) if self.shared else (1, 0)
        first, end = (len(self.parts) * r // ranks for r in (own, own + 1))
        forward, device, found = model.forward, next(model.parameters()).device, []
        encode = forward.fn if isinstance(forward, ForwardDecorator) else model
        with without_dropout(model):
            for column, present in enumerate(features[:2]):
                embeddings = []
                for part in self.parts[first : max(end, first + 1)]:  # FSDP's forwards are collectives: none skips them
                    stored = {key: x.to(device) if x.ndim else x.item() for key, x in part[column].items()}
                    about = {key: x for key, x in present.items() if not isinstance(x, (Tensor, int, float))}
                    with torch.no_grad():
                        embeddings.append(encode({**about, **stored})["sentence_embedding"].detach().clone())
                found.append(torch.cat(embeddings)[: None if end > first else 0])
        return found

    def state_dict(self) -> dict[str, Tensor]:
        """All texts, the same on every rank."""
        return {f"{i}.{j}.{key}": x for i, part in enumerate(self.parts) for j in (0, 1) for key, x in part[j].items()}

    @classmethod
    def from_state_dict(cls, state: dict[str, Tensor], shared: bool) -> TextProbe:
        """What `state_dict` gave, on any number of ranks."""
        parts: dict[int, list[dict[str, Tensor]]] = {}
        for name, x in state.items():
            part, column, key = name.split(".", 2)
            parts.setdefault(int(part), [{}, {}])[int(column)][key] = x
        return cls([parts[i] for i in sorted(parts)], shared)
