"""The drift probe of a loss: a few training pairs that are encoded again as the encoder learns.

`TextProbe` holds the texts; `EncoderProbe` decides when they are encoded, and reports their
embeddings to the bank of every embedding size. `contaccum.bank.drift` measures drift from them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses.matryoshka import ForwardDecorator, shrink
from torch import Tensor, nn

from contaccum.bank.info_nce import BankedInfoNCE
from contaccum.bank.update_clock import UpdateClock
from contaccum.distributed import gather_states, rank, world_size
from contaccum.losses.text_ids import first_rows, rows_in

PROBE_TEXTS = 8
"""Pairs of the probe."""

PAIRS_PER_PROBE = 128
"""Pairs of training between two probes, at least.

The forward passes of the probe's eight pairs are then some 2 % of the work.
"""

_TEXT_PREFIX = "probe."
_PAIRS_KEY = "pairs_at_last_probe"


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Set a model to eval mode, and restore the mode of each of its modules afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


class TextProbe:
    """A few training pairs, stored as the tokenizer returned them.

    They are the first ``PROBE_TEXTS`` pairs of training, collected over as many micro-batches as
    they take; of ranks that share a bank, an equal number of each. Every rank holds all of them, in
    parts, and encodes its share of the parts. Only tensors and numbers are stored; other features
    of a column (the ``task`` that a Router reads) are taken from the present micro-batch.

    Attributes:
        parts: queries and passages, as features, of each rank and micro-batch that pairs came from.
        shared: whether all ranks share one bank, and so one probe.
    """

    def __init__(self, shared: bool, parts: list[list[dict[str, Tensor]]] | None = None) -> None:
        self.shared = shared
        self.parts = parts or []

    @property
    def num_pairs(self) -> int:
        """The number of pairs collected so far."""
        return sum(rows_in(queries) or 0 for queries, _ in self.parts)

    @property
    def is_complete(self) -> bool:
        """True if all pairs have been collected."""
        return self.num_pairs >= PROBE_TEXTS

    @property
    def _num_ranks(self) -> int:
        """The number of ranks that share the probe."""
        return world_size() if self.shared else 1

    def collect(self, features: list[dict[str, Any]]) -> bool:
        """Add the first pairs of a micro-batch, and of the other ranks' if they share the bank.

        Returns:
            False, on every rank, if the first texts of a column cannot be separated from the
            others.
        """
        ranks = self._num_ranks
        missing = PROBE_TEXTS - self.num_pairs
        pairs_per_rank = -(-missing // ranks)
        columns = [first_rows(column, pairs_per_rank) or {} for column in features[:2]]
        new_parts = [columns]
        if self.shared:
            device = _device_of(features)
            columns_of_ranks = [gather_states(column, device) for column in columns]
            new_parts = [list(part) for part in zip(*columns_of_ranks, strict=True)]
        self.parts += new_parts
        return all(column for part in new_parts for column in part)

    def encode(self, model: nn.Module, features: list[dict[str, Any]]) -> list[Tensor]:
        """Encode this rank's share of the queries and passages, (S, d) each.

        It uses neither dropout nor a random number. All ranks that share a bank call it together,
        with the ``features`` of the present micro-batch.
        """
        ranks = self._num_ranks
        index = rank() if self.shared else 0
        first = len(self.parts) * index // ranks
        end = len(self.parts) * (index + 1) // ranks
        # FSDP's forward passes are collectives, so a rank without a share encodes a part and drops
        # it.
        parts = self.parts[first : max(end, first + 1)]
        columns = []
        with without_dropout(model), torch.no_grad():
            for column, present in enumerate(features[:2]):
                embeddings = [_encode(model, part[column], present) for part in parts]
                num_kept = None if end > first else 0
                columns.append(torch.cat(embeddings)[:num_kept])
        return columns

    def state_dict(self) -> dict[str, Tensor]:
        """Return all texts; they are the same on every rank."""
        state = {}
        for index, part in enumerate(self.parts):
            for column, features in enumerate(part):
                for key, value in features.items():
                    state[f"{index}.{column}.{key}"] = value
        return state

    @classmethod
    def from_state_dict(cls, state: dict[str, Tensor], shared: bool) -> TextProbe:
        """Restore what `state_dict` returned, on any number of ranks."""
        parts: dict[int, list[dict[str, Tensor]]] = {}
        for name, value in state.items():
            index, column, key = name.split(".", 2)
            part = parts.setdefault(int(index), [{}, {}])
            part[int(column)][key] = value
        return cls(shared, [parts[index] for index in sorted(parts)])


class EncoderProbe:
    """The texts of a drift probe, and their last embeddings.

    It collects the texts from the first micro-batches, encodes them after updates, and reports the
    embeddings to the loss of every embedding size.

    Args:
        model: the encoder.
        is_used: whether drift compensation needs a probe; otherwise nothing is collected.

    Attributes:
        texts: the `TextProbe`; None before the first micro-batch, or if its texts cannot be
            separated.
    """

    def __init__(self, model: SentenceTransformer, is_used: bool) -> None:
        self.model = model
        self.is_used = is_used
        self.texts: TextProbe | None = None
        self._pairs_at_last_probe = 0
        self._embeddings: list[Tensor] | None = None
        self._shrinks_outputs = False

    def encode_if_due(
        self,
        features: list[dict[str, Any]],
        clock: UpdateClock | None,
        is_shared: bool,
        shrinks_outputs: bool,
    ) -> bool:
        """Collect texts of a micro-batch, and encode the probe if it is due.

        It is due when its texts are complete, and at the start of an update if `PAIRS_PER_PROBE`
        pairs have been seen since the last probe.

        Args:
            clock: of the loss; None before the first micro-step.
            shrinks_outputs: whether a MatryoshkaLoss shrinks the embeddings outside of the model.

        Returns:
            Whether there are new embeddings; `report_to` passes them on.
        """
        if not self.is_used:
            return False
        was_completed = self._collect(features, clock, is_shared)
        if self.texts is None or not self.texts.is_complete:
            return False
        num_pairs = 0
        starts_update = False
        if clock is not None:
            num_pairs = clock.num_pairs
            starts_update = clock.is_at_update_start
        has_enough_pairs = num_pairs - self._pairs_at_last_probe >= PAIRS_PER_PROBE
        if not was_completed and not (starts_update and has_enough_pairs):
            return False
        self._pairs_at_last_probe = num_pairs
        self._embeddings = self.texts.encode(self.model, features)
        # MatryoshkaLoss replaces the model's forward while it calls the loss for each size in turn.
        is_wrapped = isinstance(self.model.forward, ForwardDecorator)
        self._shrinks_outputs = is_wrapped or shrinks_outputs
        return True

    def _collect(
        self, features: list[dict[str, Any]], clock: UpdateClock | None, is_shared: bool
    ) -> bool:
        """Collect texts from the first micro-batches; True for the one that completes them."""
        if self.texts is None and clock is None:
            self.texts = TextProbe(is_shared)
        if self.texts is None or self.texts.is_complete:
            return False
        if not self.texts.collect(features):
            self.texts = None
            return False
        return self.texts.is_complete

    def report_to(self, loss_fn: BankedInfoNCE, size: int) -> None:
        """Report the last embeddings, cut to an embedding size, to the loss of that size."""
        if self._embeddings is None:
            return
        embeddings = self._embeddings
        if self._shrinks_outputs:
            embeddings = [shrink(x, size) for x in embeddings]
        loss_fn.observe_probe(*embeddings)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the texts, and the number of pairs at the last probe."""
        state = {_PAIRS_KEY: torch.tensor(self._pairs_at_last_probe)}
        if self.texts is not None:
            for key, value in self.texts.state_dict().items():
                state[f"{_TEXT_PREFIX}{key}"] = value
        return state

    def load_state_dict(self, state: dict[str, Tensor], is_shared: bool) -> dict[str, Tensor]:
        """Restore what `state_dict` returned, and return the other entries of a state."""
        remaining = {}
        texts = {}
        for key, value in state.items():
            if key.startswith(_TEXT_PREFIX):
                texts[key.removeprefix(_TEXT_PREFIX)] = value
            elif key != _PAIRS_KEY:
                remaining[key] = value
        self._pairs_at_last_probe = int(state.get(_PAIRS_KEY, torch.tensor(0)))
        self._embeddings = None
        self.texts = None
        if texts:
            self.texts = TextProbe.from_state_dict(texts, is_shared)
        return remaining


def _device_of(features: list[dict[str, Any]]) -> torch.device:
    tensors = [x for column in features for x in column.values() if isinstance(x, Tensor)]
    return tensors[0].device


def _encode(model: nn.Module, stored: dict[str, Tensor], present: dict[str, Any]) -> Tensor:
    """Encode stored texts.

    Features that are neither tensors nor numbers come from the ``present`` micro-batch.
    """
    device = next(model.parameters()).device
    features = {}
    for key, value in present.items():
        if not isinstance(value, (Tensor, int, float)):
            features[key] = value
    for key, value in stored.items():
        features[key] = value.to(device) if value.ndim else value.item()
    encode = model
    if isinstance(model.forward, ForwardDecorator):
        encode = model.forward.fn
    return encode(features)["sentence_embedding"].detach().clone()
