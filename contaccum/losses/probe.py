"""The drift probe of a loss: a few training pairs that are encoded again as the encoder learns.

The bank holds embeddings by older versions of the encoder. The difference between such an embedding
and the current embedding of the same text is called drift. The same few texts, encoded at several
points in training, show how large it is.

`TextProbe` holds the texts. `EncoderProbe` decides when they are encoded, and passes their
embeddings to the loss of every embedding size. `contaccum.bank.drift` measures the drift.

The features of a column are the dict of tensors that a sentence-transformers model takes as input.
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
from contaccum.losses.text_ids import copy_first_texts, count_texts

PROBE_PAIRS = 8
"""Number of pairs of query and passage in the probe; a few more if ranks share it."""

MIN_PAIRS_BETWEEN_PROBES = 128
"""Minimum number of training pairs between two encodings of the probe.

The forward passes of the probe's eight pairs then take about 2 % of the training time: 8 of 128
forward passes, and a forward pass is about a third of a training step.
"""

_TEXT_PREFIX = "probe."
_PAIRS_KEY = "pairs_at_last_probe"


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Set a model to eval mode inside the block, and restore the mode of each module afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


class TextProbe:
    """The first training pairs, at least ``PROBE_PAIRS``, stored as features.

    The pairs are collected over as many micro-batches as needed. They are stored in parts, because
    micro-batches differ in padding: a part holds the pairs that one rank contributed from one
    micro-batch. If ranks share a bank, each rank contributes at most ceil(missing pairs / ranks)
    pairs and stores all parts; to encode the probe, the ranks divide the parts among themselves.
    Only tensors and numbers are stored; other features of a column, such as the ``task`` for a
    Router, are copied from the current micro-batch.

    Args:
        is_shared: True if all ranks share one bank, and therefore one probe.
        parts: the parts of a restored probe; None to start without any.

    Attributes:
        parts: list of [features of the queries, features of the passages].
        is_shared: as above.
    """

    def __init__(self, is_shared: bool, parts: list[list[dict[str, Tensor]]] | None = None) -> None:
        self.is_shared = is_shared
        self.parts = parts or []

    @property
    def num_pairs(self) -> int:
        """The number of pairs collected so far."""
        return sum(count_texts(queries) or 0 for queries, _ in self.parts)

    @property
    def is_complete(self) -> bool:
        """True if all pairs have been collected."""
        return self.num_pairs >= PROBE_PAIRS

    @property
    def _num_ranks(self) -> int:
        """The number of ranks that share the probe."""
        if self.is_shared:
            return world_size()
        return 1

    def collect(self, features: list[dict[str, Any]]) -> bool:
        """Add the first pairs of the micro-batch, of all ranks if they share the bank.

        Args:
            features: the features of each column: queries, passages, and others, which are ignored.

        Returns:
            False if the first texts of a column cannot be separated from its other texts. Ranks
            that share the bank all return the same value.
        """
        num_missing = PROBE_PAIRS - self.num_pairs
        pairs_per_rank = math.ceil(num_missing / self._num_ranks)
        # An empty dict marks texts that cannot be separated, because only dicts can be gathered.
        queries = copy_first_texts(features[0], pairs_per_rank) or {}
        passages = copy_first_texts(features[1], pairs_per_rank) or {}
        new_parts = [[queries, passages]]
        if self.is_shared:
            queries_of_ranks = gather_states(queries)
            passages_of_ranks = gather_states(passages)
            pairs_of_ranks = zip(queries_of_ranks, passages_of_ranks, strict=True)
            new_parts = [list(part) for part in pairs_of_ranks]
        self.parts += new_parts
        return all(queries and passages for queries, passages in new_parts)

    def encode(self, model: nn.Module, features: list[dict[str, Any]]) -> list[Tensor]:
        """Encode this rank's parts of the probe.

        The model is in eval mode, so no dropout changes the random state of the training. All ranks
        that share a bank must call this method together.

        Args:
            features: the features of the current micro-batch, of which the features that are
                neither tensors nor numbers are used.

        Returns:
            The embeddings of the queries and of the passages of this rank's S pairs, (S, d) each. S
            differs between ranks and may be 0.
        """
        rank_index = 0
        if self.is_shared:
            rank_index = rank()
        first = len(self.parts) * rank_index // self._num_ranks
        end = len(self.parts) * (rank_index + 1) // self._num_ranks
        own_parts = self.parts[first:end]
        # The forward passes of FSDP are collectives, so all ranks encode equally many parts. Ranks
        # with fewer parts of their own encode the first part again and drop these embeddings.
        max_parts_per_rank = math.ceil(len(self.parts) / self._num_ranks)
        extra_parts = [self.parts[0]] * (max_parts_per_rank - len(own_parts))
        embeddings = []
        with without_dropout(model), torch.no_grad():
            for index, current_features in enumerate(features[:2]):
                outputs = []
                for part in [*own_parts, *extra_parts]:
                    outputs.append(_encode_stored_texts(model, part[index], current_features))
                no_rows = outputs[0][:0]  # (0, d), for a rank without parts
                own_outputs = outputs[: len(own_parts)]  # (pairs of the part, d) each
                embeddings.append(torch.cat([no_rows, *own_outputs]))  # (S, d)
        return embeddings

    def state_dict(self) -> dict[str, Tensor]:
        """Return the features of all texts, with keys "<part>.<column>.<feature>".

        If ranks share the bank, the state is the same on every rank.
        """
        state = {}
        for index, part in enumerate(self.parts):
            for column, features in enumerate(part):
                for key, value in features.items():
                    state[f"{index}.{column}.{key}"] = value
        return state

    @classmethod
    def from_state_dict(cls, state: dict[str, Tensor], is_shared: bool) -> TextProbe:
        """Restore the probe that `state_dict` returned, on any number of ranks."""
        parts: dict[int, list[dict[str, Tensor]]] = {}
        for name, value in state.items():
            index, column, key = name.split(".", 2)
            part = parts.setdefault(int(index), [{}, {}])
            part[int(column)][key] = value
        return cls(is_shared, [parts[index] for index in sorted(parts)])


class EncoderProbe:
    """The texts of a drift probe, their last embeddings, and the rule for when they are encoded.

    The texts are collected from the first micro-batches, and encoded when they are complete. Later
    they are encoded at the start of an update, because the encoder changes only between updates.
    The embeddings are passed to the loss of every embedding size.

    Args:
        model: the encoder itself, not a wrapper such as DDP.
        is_used: True if drift compensation needs a probe; otherwise no texts are collected.

    Attributes:
        texts: the `TextProbe`; None before the first micro-batch, or if the texts of a micro-batch
            cannot be separated from each other.
    """

    def __init__(self, model: SentenceTransformer, is_used: bool) -> None:
        self.model = model
        self.is_used = is_used
        self.texts: TextProbe | None = None
        self._pairs_at_last_probe = 0
        self._embeddings: list[Tensor] | None = None
        self._is_inside_matryoshka = False

    def encode_if_due(
        self,
        features: list[dict[str, Any]],
        clock: UpdateClock | None,
        is_shared: bool,
        is_inside_matryoshka: bool,
    ) -> bool:
        """Collect texts of a micro-batch, and encode the probe if it is due.

        The probe is due when its texts become complete, and later at the start of an update if
        there have been `MIN_PAIRS_BETWEEN_PROBES` training pairs since the probe was last encoded.

        Args:
            features: the features of the micro-batch.
            clock: the `UpdateClock` of the loss; None before the first micro-step.
            is_shared: True if all ranks share one bank.
            is_inside_matryoshka: True if MatryoshkaLoss calls the loss. The caller finds out,
                because MatryoshkaLoss changes the model of the loss, which may be a wrapper (DDP).

        Returns:
            True if the probe was encoded. The caller then calls `pass_to_loss`.
        """
        if not self.is_used:
            return False
        if self.texts is None and clock is None:
            # The first micro-batch, when there is no clock yet. If ``texts`` is None later, the
            # texts could not be separated, or the first calls got only embeddings: the probe stays
            # off.
            self.texts = TextProbe(is_shared)
        is_newly_complete = False
        if self.texts is not None and not self.texts.is_complete:
            if not self.texts.collect(features):
                self.texts = None
                return False
            is_newly_complete = self.texts.is_complete
        if self.texts is None or not self.texts.is_complete:
            return False
        num_pairs = 0
        is_at_update_start = False
        if clock is not None:
            num_pairs = clock.num_pairs
            is_at_update_start = clock.is_at_update_start
        has_enough_pairs = num_pairs - self._pairs_at_last_probe >= MIN_PAIRS_BETWEEN_PROBES
        is_due = is_newly_complete or (is_at_update_start and has_enough_pairs)
        if not is_due:
            return False
        self._pairs_at_last_probe = num_pairs
        self._embeddings = self.texts.encode(self.model, features)
        self._is_inside_matryoshka = is_inside_matryoshka
        return True

    def pass_to_loss(self, loss_fn: BankedInfoNCE, size: int) -> None:
        """Pass the probe's last embeddings to the loss for an embedding size, if there are any."""
        if self._embeddings is None:
            return
        embeddings = self._embeddings
        if self._is_inside_matryoshka:
            # MatryoshkaLoss cuts the embeddings of the columns in the same way; `shrink` also
            # normalises them.
            embeddings = [shrink(x, size) for x in embeddings]
        loss_fn.observe_probe(*embeddings)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the texts, and the number of training pairs when they were last encoded."""
        state = {_PAIRS_KEY: torch.tensor(self._pairs_at_last_probe)}
        if self.texts is not None:
            for key, value in self.texts.state_dict().items():
                state[f"{_TEXT_PREFIX}{key}"] = value
        return state

    def load_state_dict(self, state: dict[str, Tensor], is_shared: bool) -> dict[str, Tensor]:
        """Restore the probe from the state of a loss, and return the other entries of the state.

        The last embeddings are not part of the state, because every `BankedInfoNCE` saves its own.
        """
        remaining = {}
        texts = {}
        for key, value in state.items():
            if key.startswith(_TEXT_PREFIX):
                texts[key.removeprefix(_TEXT_PREFIX)] = value
            elif key != _PAIRS_KEY:
                remaining[key] = value
        self._pairs_at_last_probe = 0
        if _PAIRS_KEY in state:
            self._pairs_at_last_probe = int(state[_PAIRS_KEY])
        self._embeddings = None
        self.texts = None
        if texts:
            self.texts = TextProbe.from_state_dict(texts, is_shared)
        return remaining


def _encode_stored_texts(
    model: nn.Module, stored_features: dict[str, Tensor], current_features: dict[str, Any]
) -> Tensor:
    """Encode the stored texts of a column, (texts, d).

    Features that are neither tensors nor numbers are copied from the current micro-batch.
    """
    device = next(model.parameters()).device
    features = {}
    for key, value in current_features.items():
        if not isinstance(value, (Tensor, int, float)):
            features[key] = value
    for key, value in stored_features.items():
        if value.ndim > 0:
            features[key] = value.to(device)
        else:
            features[key] = value.item()  # `copy_first_texts` makes tensors of numbers
    with _original_forward(model):
        # Not `model.forward(...)`: only a call runs the hooks in which FSDP gathers weights.
        output = model(features)
    return output["sentence_embedding"].detach().clone()


@contextmanager
def _original_forward(model: nn.Module) -> Iterator[None]:
    """Undo, inside the block, MatryoshkaLoss's replacement of the model's forward method.

    MatryoshkaLoss replaces it by one that cuts the embeddings. The probe has the full size, and is
    cut to each size later.
    """
    decorated = model.forward
    if not isinstance(decorated, ForwardDecorator):
        yield
        return
    model.forward = decorated.fn
    try:
        yield
    finally:
        model.forward = decorated
