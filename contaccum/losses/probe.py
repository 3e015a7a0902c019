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
from contaccum.losses.text_ids import first_rows, rows_in

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

    They are the first ``PROBE_TEXTS`` pairs of training, collected over as many micro-batches as they take; of ranks
    that share a bank, an equal number of each. Every rank holds all of them, in parts, and encodes its share of the
    parts. Only tensors and numbers are stored; what a column has beside them (the ``task`` that a Router goes by) comes
    with each micro-batch.

    Attributes:
        parts: queries and passages, as features, of each rank and micro-batch that a part of the pairs came from.
        shared: whether all ranks share one bank, and so one probe.
    """

    def __init__(self, shared: bool, parts: list[list[dict[str, Tensor]]] | None = None) -> None:
        self.shared = shared
        self.parts = [] if parts is None else parts

    @property
    def num_pairs(self) -> int:
        """The number of pairs collected so far."""
        return sum(rows_in(queries) or 0 for queries, _ in self.parts)

    @property
    def is_complete(self) -> bool:
        """Whether all pairs are there."""
        return self.num_pairs >= PROBE_TEXTS

    def collect(self, features: list[dict[str, Any]]) -> bool:
        """Add the first pairs of a micro-batch, and of the other ranks' micro-batches if they share the bank.

        Returns:
            False, on every rank, if the first texts of a column cannot be separated from the others.
        """
        ranks = world_size() if self.shared else 1
        wanted = -(-(PROBE_TEXTS - self.num_pairs) // ranks)
        columns = [first_rows(column, wanted) or {} for column in features[:2]]
        new_parts = [columns]
        if self.shared:
            device = next(x.device for column in features for x in column.values() if isinstance(x, Tensor))
            columns_of_ranks = [gather_states(column, device) for column in columns]
            new_parts = [list(part) for part in zip(*columns_of_ranks, strict=True)]
        self.parts += new_parts
        return all(column for part in new_parts for column in part)

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
        """Restore what `state_dict` gave, on any number of ranks."""
        parts: dict[int, list[dict[str, Tensor]]] = {}
        for name, x in state.items():
            part, column, key = name.split(".", 2)
            parts.setdefault(int(part), [{}, {}])[int(column)][key] = x
        return cls(shared, [parts[i] for i in sorted(parts)])
