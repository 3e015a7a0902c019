"""The drift probe of a loss: a few training pairs that are encoded again as the encoder learns.

The bank holds embeddings by older versions of the encoder. The difference between such an embedding
and the current embedding of the same text is called drift; `contaccum.bank.drift` measures it. The
features of a column are the dict of tensors that a sentence-transformers model takes as input.
"""

from __future__ import annotations

import math
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
from contaccum.encoders.settings import without_dropout
from contaccum.losses.text_ids import copy_first_texts, count_texts

PROBE_PAIRS = 8
"""Minimum number of pairs of query and passage in the probe."""

MIN_PAIRS_BETWEEN_PROBES = 128
"""Minimum number of training pairs between two encodings of the probe.

The forward passes of the probe's eight pairs then take about 2 % of the training time: 8 of 128
forward passes, and a forward pass is about a third of a training step.
"""

_TEXT_PREFIX = "probe."
_PAIRS_KEY = "pairs_at_last_probe"


class EncoderProbe:
    """The first training pairs, their last embeddings, and the rule for when they are encoded.

    The pairs are collected over as many micro-batches as needed, and encoded when they are
    complete; later at the start of an update, because the encoder changes only between updates.

    The pairs are stored in parts, because micro-batches differ in padding: a part holds the pairs
    that one rank contributed from one micro-batch. If ranks share a bank, each rank contributes at
    most ceil(missing pairs / ranks) pairs and stores all parts; to encode the probe, the ranks
    divide the parts among themselves. Only tensors and numbers are stored; other features of a
    column, such as the ``task`` for a Router, are copied from the current micro-batch.

    Args:
        model: the encoder itself, not a wrapper such as DDP.
        is_used: True if drift compensation needs a probe; otherwise no texts are collected.
        gathers: True if all ranks share one bank, and therefore one probe.
    """

    def __init__(self, model: SentenceTransformer, is_used: bool, gathers: bool) -> None:
        self.model = model
        self.is_used = is_used
        self.gathers = gathers
        # [features of the queries, features of the passages] of each part; None before the first
        # micro-batch, or if its texts cannot be separated from each other.
        self.parts: list[list[dict[str, Tensor]]] | None = None
        self._pairs_at_last_probe = 0
        self._embeddings: list[Tensor] | None = None  # (S, d) of queries and of passages
        self._is_inside_matryoshka = False

    def encode_if_due(
        self, features: list[dict[str, Any]], clock: UpdateClock | None, is_inside_matryoshka: bool
    ) -> bool:
        """Collect texts of a micro-batch, and encode the probe if it is due.

        The probe is due when its texts become complete, and later at the start of an update if
        there have been `MIN_PAIRS_BETWEEN_PROBES` training pairs since the probe was last encoded.

        Args:
            clock: the `UpdateClock` of the loss; None before the first micro-step.
            is_inside_matryoshka: True if MatryoshkaLoss calls the loss. The caller finds out,
                because MatryoshkaLoss changes the model of the loss, which may be a wrapper (DDP).

        Returns:
            True if the probe was encoded. The caller then calls `pass_to_loss`.
        """
        if self.parts is None:
            if clock is not None or not self.is_used:
                # Texts could not be separated, or the first calls got only embeddings: stay off.
                return False
            self.parts = []
        num_pairs = 0 if clock is None else clock.num_pairs
        if _count_pairs(self.parts) < PROBE_PAIRS:
            new_parts = self._collect(features, PROBE_PAIRS - _count_pairs(self.parts))
            if new_parts is None:
                self.parts = None
                return False
            self.parts += new_parts
            is_due = _count_pairs(self.parts) >= PROBE_PAIRS
        else:
            num_new_pairs = num_pairs - self._pairs_at_last_probe
            is_at_update_start = clock is not None and clock.is_at_update_start
            is_due = is_at_update_start and num_new_pairs >= MIN_PAIRS_BETWEEN_PROBES
        if is_due:
            self._pairs_at_last_probe = num_pairs
            self._embeddings = self.encode(features)
            self._is_inside_matryoshka = is_inside_matryoshka
        return is_due

    def _collect(
        self, features: list[dict[str, Any]], num_missing: int
    ) -> list[list[dict[str, Tensor]]] | None:
        """Copy the first pairs of the micro-batch into parts, the same on ranks that share a bank.

        The result is None if the texts of a column cannot be separated.
        """
        num_ranks = world_size() if self.gathers else 1
        pairs_per_rank = math.ceil(num_missing / num_ranks)
        # An empty dict marks texts that cannot be separated, because only dicts can be gathered.
        columns = [copy_first_texts(column, pairs_per_rank) or {} for column in features[:2]]
        parts = [columns]
        if num_ranks > 1:
            parts = [list(part) for part in zip(*map(gather_states, columns), strict=True)]
        if all(queries and passages for queries, passages in parts):
            return parts
        return None

    def encode(self, features: list[dict[str, Any]]) -> list[Tensor]:
        """Return the embeddings of the queries and passages of this rank's S pairs, (S, d) each.

        S differs between ranks and may be 0. All ranks that share a bank must call this method
        together. There is no dropout, so the random state of the training stays the same.
        """
        assert self.parts is not None
        num_ranks, rank_index = (world_size(), rank()) if self.gathers else (1, 0)
        first = len(self.parts) * rank_index // num_ranks
        end = len(self.parts) * (rank_index + 1) // num_ranks
        own_parts = self.parts[first:end]
        # The forward passes of FSDP are collectives, so all ranks encode equally many parts. Ranks
        # with fewer parts of their own encode the first part again and drop these embeddings.
        max_parts_per_rank = math.ceil(len(self.parts) / num_ranks)
        extra_parts = [self.parts[0]] * (max_parts_per_rank - len(own_parts))
        device = next(self.model.parameters()).device
        embeddings = []
        with without_dropout(self.model), _original_forward(self.model), torch.no_grad():
            for index, current_features in enumerate(features[:2]):
                outputs = []
                for part in [*own_parts, *extra_parts]:
                    inputs = {}
                    for key, value in current_features.items():
                        if not isinstance(value, (Tensor, int, float)):
                            inputs[key] = value
                    for key, value in part[index].items():
                        # `copy_first_texts` makes tensors () of numbers.
                        inputs[key] = value.to(device) if value.ndim > 0 else value.item()
                    # Not `model.forward(...)`: only a call runs the hooks in which FSDP gathers
                    # weights.
                    output = self.model(inputs)["sentence_embedding"]  # (pairs of the part, d)
                    outputs.append(output.detach().clone())
                no_rows = outputs[0][:0]  # (0, d), for a rank without parts
                embeddings.append(torch.cat([no_rows, *outputs[: len(own_parts)]]))  # (S, d)
        return embeddings

    def pass_to_loss(self, loss_fn: BankedInfoNCE, dim: int) -> None:
        """Pass the probe's last embeddings to the loss for an embedding size, if there are any."""
        embeddings = self._embeddings
        if embeddings is not None and self._is_inside_matryoshka:
            # MatryoshkaLoss cuts the embeddings of the columns in the same way; `shrink` also
            # normalises them.
            embeddings = [shrink(x, dim) for x in embeddings]  # (S, dim)
        if embeddings is not None:
            loss_fn.observe_probe(*embeddings)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the texts, and the number of training pairs when they were last encoded.

        The keys of the texts are "probe.<part>.<column>.<feature>". The last embeddings are not
        part of the state, because every `BankedInfoNCE` saves its own.
        """
        state = {_PAIRS_KEY: torch.tensor(self._pairs_at_last_probe)}
        for index, part in enumerate(self.parts or ()):
            for column, features in enumerate(part):
                for key, value in features.items():
                    state[f"{_TEXT_PREFIX}{index}.{column}.{key}"] = value
        return state

    def load_state_dict(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Restore the probe from the state of a loss, and return the other entries of the state."""
        remaining = dict(state)
        self._pairs_at_last_probe = int(remaining.pop(_PAIRS_KEY, 0))
        self._embeddings = None
        parts: dict[int, list[dict[str, Tensor]]] = {}
        for key in state:
            if key.startswith(_TEXT_PREFIX):
                index, column, name = key.removeprefix(_TEXT_PREFIX).split(".", 2)
                part = parts.setdefault(int(index), [{}, {}])
                part[int(column)][name] = remaining.pop(key)
        self.parts = [parts[index] for index in sorted(parts)] or None
        return remaining


def _count_pairs(parts: list[list[dict[str, Tensor]]]) -> int:
    return sum(count_texts(queries) for queries, _ in parts)


@contextmanager
def _original_forward(model: nn.Module) -> Iterator[None]:
    """Undo, inside the block, MatryoshkaLoss's replacement of the model's forward method.

    MatryoshkaLoss replaces it by one that cuts the embeddings. The probe has the full size, and is
    cut to each size later.
    """
    decorated = model.forward
    if isinstance(decorated, ForwardDecorator):
        model.forward = decorated.fn
    try:
        yield
    finally:
        if isinstance(decorated, ForwardDecorator):
            model.forward = decorated
