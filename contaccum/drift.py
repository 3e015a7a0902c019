"""Drift: bank entries were made by an older encoder. This module estimates how far a tower has moved as a whole.

Without that, an encoder can lower the loss by moving every new embedding away from every old one, because "new or
old" is easier to learn than "relevant or not". It knows neither the loss nor the bank. docs/drift.md tells the story.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from contaccum.shards import WHOLE, Shard

DRIFT_COMPENSATIONS = ("auto", "mean", "fresh", "none")
MOVES_ENTRIES = ("auto", "mean")
"""Those that follow the encoder; the others need no measurement of it."""

RESIDUAL_BOUND = 0.08
"""What may be left of an entry's drift once the mean shift is taken off, in units of its tower's spread."""

PROBES_KEPT = 32
"""Probes over the life of a bank; a larger bank keeps them further apart."""

PAIRS_PER_FRAME = 64
"""Pairs between two moves of the query tower's frame of reference, at least: bounds how many a bank holds."""


class RunningMean(nn.Module):
    """Exponentially weighted mean of one tower's embeddings, the compensation ``"mean"`` of drift.

    An entry is stored as ``x - mean then`` and used as ``stored + mean now``: it moves along with its tower, at the
    cost of one vector instead of one per entry.

    Args:
        dim: the embedding size d.
        horizon: pairs after which an old embedding's weight has fallen to 1/e. Shorter follows faster, longer is
            less noisy; the same number means the same thing at any micro-batch size.
    """

    mean: Tensor
    weight: Tensor
    variance: Tensor

    def __init__(
        self, dim: int, horizon: float = 128.0, dtype: torch.dtype = torch.float32, device: torch.device | None = None
    ) -> None:
        super().__init__()
        self.horizon = horizon
        self.register_buffer("mean", torch.zeros(dim, dtype=dtype, device=device))
        # Total weight seen so far, in [0, 1]: divides out the zeros that the averages start from.
        self.register_buffer("weight", torch.zeros((), dtype=dtype, device=device))
        # Running squared distance of embeddings from the mean, summed over dimensions.
        self.register_buffer("variance", torch.zeros((), dtype=dtype, device=device))

    @torch.no_grad()
    def observe(self, embeddings: Tensor) -> None:
        """Take in a micro-batch of embeddings, (n, d).

        A micro-batch whose mean lies further off than sampling explains is a jump of the encoder, and the running
        mean goes there at once: entries stored while it still lags would be shifted too far later on. A micro-batch of
        one tells nothing of how samples vary, and never counts as a jump.
        """
        n = embeddings.shape[0]
        embeddings = embeddings.to(self.mean)
        fresh = embeddings.mean(0)
        seen = self.weight > 0
        distance = (fresh - self.mean).square().sum()
        # What |fresh - mean|^2 is on average when nothing moved: the variances of the two means.
        noise = self.variance * (1 / n + 1 / (2 * self.horizon))
        jump = (1 - 2 * noise / distance.clamp_min(1e-30)).clamp_min(0)
        jump = torch.where(seen, jump, torch.zeros_like(distance)) if n > 1 else torch.zeros_like(distance)
        step = -math.expm1(-n / self.horizon)
        self.weight += step * (1 - self.weight)
        gain = step / self.weight
        within = (embeddings - fresh).square().sum() / max(n - 1, 1)
        spread = torch.where(seen & (jump == 0), (embeddings - self.mean).square().sum(1).mean(), within)
        self.variance += gain * (spread - self.variance)
        self.mean += torch.maximum(gain, jump) * (fresh - self.mean)

    def snapshot(self) -> list[Tensor]:
        """Copies of the state, for :meth:`restore`."""
        return [buffer.clone() for buffer in self.buffers()]

    @torch.no_grad()
    def restore(self, state: list[Tensor], unless: Tensor) -> None:
        """Go back to a :meth:`snapshot`, unless the bool scalar ``unless`` is True."""
        for buffer, value in zip(self.buffers(), state, strict=True):
            buffer.copy_(torch.where(unless, buffer, value))


class QueryFrames(nn.Module):
    """How far the query tower has moved, as a whole, since each banked query was encoded.

    Scores between stored entries are kept up to date because they never change, so a banked query keeps the softmax
    weights that it was stored with. What moves along is its push on the local passages: without that, passages run
    after the queries' past. A frame of reference is kept for each probe that falls into the bank's life, not for each
    row.

    Args:
        rows: of the query bank.
        dim: the embedding size d.
    """

    origins: Tensor
    of_row: Tensor
    moves: Tensor
    moved_at: Tensor

    def __init__(self, rows: int, dim: int, dtype: torch.dtype, device: torch.device | None = None) -> None:
        super().__init__()
        frames = rows // PAIRS_PER_FRAME + 2
        self.register_buffer("origins", torch.zeros(frames, dim, dtype=dtype, device=device))
        self.register_buffer("of_row", torch.zeros(rows, dtype=torch.int64, device=device))
        # Counts, with Python twins that spare a device read: moves so far, and pairs seen at the last one.
        self.register_buffer("moves", torch.zeros((), dtype=torch.int64, device=device))
        self.register_buffer("moved_at", torch.zeros((), dtype=torch.int64, device=device))
        self._moves, self._moved_at = 0, 0

    @torch.no_grad()
    def move(self, shift: Tensor, pairs: int) -> None:
        """The tower has moved by ``shift`` (d,), after ``pairs`` pairs were seen.

        Frames are ``PAIRS_PER_FRAME`` pairs apart at least, so that those in use never outgrow their table; a move that
        comes sooner is added to the present frame, whose few entries are then taken to have moved already.
        """
        now = self.origins[self._moves % len(self.origins)] + shift.to(self.origins)
        if pairs - self._moved_at >= PAIRS_PER_FRAME:
            self._moves += 1
            self._moved_at = pairs
            self.moves.fill_(self._moves)
            self.moved_at.fill_(pairs)
        self.origins[self._moves % len(self.origins)] = now

    def follow(self, mean: Tensor, pairs: int) -> None:
        """Go to where the tower's running mean (d,) is, if the last move is long enough ago.

        The first call, of a mean that has seen little, sets the first frame: nothing has moved by then.
        """
        if self._moves == 0 and self._moved_at == 0:
            if pairs >= PAIRS_PER_FRAME:
                self.origins.copy_(mean.expand_as(self.origins))
                self._moved_at = pairs
                self.moved_at.fill_(pairs)
        elif pairs - self._moved_at >= PAIRS_PER_FRAME:
            self.move(mean - self.origins[self._moves % len(self.origins)], pairs)

    @torch.no_grad()
    def enter(self, rows: Tensor) -> None:
        """Rows of the query bank that were written just now."""
        self.of_row.index_fill_(0, rows, self._moves % len(self.origins))

    def push(self, weights: Tensor, shard: Shard = WHOLE) -> Tensor:
        """What moving the rows along adds to ``weights.T @ rows``: weights (r, c) of a shard's first r, to (c, d)."""
        by_frame = weights.new_zeros(len(self.origins), weights.shape[1])
        by_frame.index_add_(0, shard.of(self.of_row)[: len(weights)], weights)
        origins = self.origins.to(weights.dtype)
        moved = origins[self._moves % len(self.origins)] - origins
        return by_frame.T @ moved

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._moves, self._moved_at = int(self.moves), int(self.moved_at)


class DriftProbe(nn.Module):
    """What the embeddings of a few fixed texts did while the encoder learned, for both towers.

    The texts are encoded again every so often. Their mean shift is that of the tower, far more exact than from means of
    ever new texts, because the texts do not change; and what they did beyond it is what compensation leaves: it tells
    how old is too old.

    Args:
        texts: probe pairs S.
        dim: the embedding size d.
        life: pairs that the bank holds: how far back probes are kept.
    """

    embeddings: Tensor
    update: Tensor
    pairs: Tensor

    def __init__(
        self, texts: int, dim: int, dtype: torch.dtype, device: torch.device | None = None, life: int = 1024
    ) -> None:
        super().__init__()
        self.spacing = max(PAIRS_PER_FRAME, life // PROBES_KEPT + 1)
        self.register_buffer("embeddings", torch.zeros(PROBES_KEPT + 2, 2, texts, dim, dtype=dtype, device=device))
        self.register_buffer("update", torch.zeros(PROBES_KEPT + 2, dtype=torch.int64, device=device))
        # Pairs of training seen at each probe kept, oldest first, then -1: on the host, but for the state.
        self.register_buffer("pairs", torch.full((PROBES_KEPT + 2,), -1, dtype=torch.int64))
        self._pairs: list[int] = []

    @torch.no_grad()
    def observe(self, queries: Tensor, passages: Tensor, update: Tensor, pairs: int) -> Tensor:
        """Take in embeddings, (S, d) each, as of ``update`` and ``pairs``: the mean shift since the last, (2, d)."""
        fresh = torch.stack([queries, passages]).to(self.embeddings)
        known = len(self._pairs)
        shift = (fresh - self.embeddings[max(known - 1, 0)]).mean(1) * (known > 0)
        # The latest probe stays beside the others once it is far enough from the one before it.
        if known > 1 and self._pairs[-1] - self._pairs[-2] < self.spacing:
            known -= 1
        elif known == len(self.embeddings):
            known -= 1
            for buffer in (self.embeddings, self.update):
                buffer.copy_(buffer.roll(-1, 0))
            del self._pairs[0]
        self._pairs[known:] = [pairs]
        self.embeddings[known] = fresh
        self.update[known] = update
        return shift

    def residuals(self) -> Tensor:
        """What the mean shift leaves of the drift since each probe but the latest, for both towers: (kept - 1, 2).

        Root mean square over the texts, in units of the root mean squared distance of the texts from their mean.
        """
        then, now = self.embeddings[: len(self._pairs) - 1].double(), self.embeddings[len(self._pairs) - 1].double()
        moved = now - then
        left = (moved - moved.mean(2, keepdim=True)).square().sum(-1).mean(-1)
        return (left / _variance(now)).sqrt()

    def age_limit(self, residuals: Tensor, bound: float = RESIDUAL_BOUND) -> float:
        """Pairs of training after which an entry has drifted further than ``bound``; infinite when none kept has.

        Args:
            residuals: of one tower, (kept - 1,), as :meth:`residuals` gives them. Between probes they are interpolated.
        """
        ages = [self._pairs[-1] - pairs for pairs in self._pairs[-2::-1]]
        before, less = 0.0, 0.0
        for age, residual in zip(ages, reversed(residuals.tolist()), strict=True):
            if residual > bound:
                return before + (age - before) * (bound - less) / (residual - less)
            before, less = age, residual
        return math.inf

    def record(self, oldest: int) -> dict[str, float]:
        """Drift over the life of the bank, or over as much of it as is kept; empty before the second probe.

        Args:
            oldest: age in updates of the bank's oldest entry.

        Returns:
            ``drift_age`` (updates between the two probes compared); for each tower ``drift_cosine_query`` and
            ``drift_cosine_passage`` (mean cosine of a text's embeddings then and now), ``drift_shift_...`` (length of
            the mean shift, in units of the texts' root mean squared distance from their mean) and
            ``drift_residual_...`` (what is left without the mean shift, in the same units). Reads the device.
        """
        last = len(self._pairs) - 1
        if last < 1:
            return {}
        updates = self.update.tolist()
        then = next((i for i in range(last) if updates[last] - updates[i] <= max(oldest, 1)), last - 1)
        record: dict[str, float] = {"drift_age": updates[last] - updates[then]}
        residuals = self.residuals()
        for tower, name in enumerate(("query", "passage")):
            new, old = self.embeddings[last, tower].double(), self.embeddings[then, tower].double()
            shift = (new - old).mean(0).norm() / _variance(new).sqrt()
            record[f"drift_cosine_{name}"] = nn.functional.cosine_similarity(new, old).mean().item()
            record[f"drift_shift_{name}"] = shift.item()
            record[f"drift_residual_{name}"] = residuals[then, tower].item()
        return record

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.pairs.fill_(-1)
        self.pairs[: len(self._pairs)] = torch.tensor(self._pairs, dtype=torch.int64)
        super()._save_to_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._pairs = [pairs for pairs in self.pairs.tolist() if pairs >= 0]


def _variance(embeddings: Tensor) -> Tensor:
    """Mean squared distance of texts from their mean: (..., S, d) to (...)."""
    return (embeddings - embeddings.mean(-2, keepdim=True)).square().sum(-1).mean(-1).clamp_min(1e-24)
