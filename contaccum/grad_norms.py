"""Measuring the gradient norms of the two towers, and balancing them where the loss does not.

GradNormRatio (arXiv 2406.12356, section 5) is the passage tower's norm over the query tower's. Untied towers have a
gradient each, so it is taken from the weights. Tied towers share theirs, so there it is taken from the gradients of
the embeddings. Two banks of equal size keep the ratio near 1; with the passage bank alone or a part frozen it leaves 1,
and :class:`GradNormBalancer` can bring it back.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from contaccum.distributed import sum_over_ranks, world_size
from contaccum.encoders import is_tied, tower

BALANCES = ("none", "geometric")
_TASKS = {"query": "query", "passage": "document"}  # names here, and those of sentence-transformers
_HORIZON = 10.0  # updates after which an old norm's weight has fallen to 1/e


class GradNormBalancer(nn.Module):
    """Factors that bring both towers' gradients to the geometric mean of their norms, smoothed over updates.

    The product of the factors is 1, so that the step as a whole keeps its size. Norms are averaged as logarithms, so
    that one wild update counts once and not by its size.
    """

    log_norms: Tensor  # (2,): query, passage
    weight: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("log_norms", torch.zeros(2))
        self.register_buffer("weight", torch.zeros(()))

    def observe(self, query: float, passage: float) -> None:
        """Take in the norms of an update, before balancing. Norms of 0, infinite or NaN are passed over."""
        if not (0 < query < math.inf and 0 < passage < math.inf):
            return
        step = -math.expm1(-1 / _HORIZON)
        self.weight += step * (1 - self.weight)
        fresh = torch.tensor([query, passage]).log().to(self.log_norms)
        self.log_norms += step / self.weight * (fresh - self.log_norms)

    def factors(self) -> dict[str, float]:
        """What to multiply the gradient of "query" and of "passage" with; 1 before the first observation."""
        query, passage = self.log_norms.tolist()
        return {"query": math.exp((passage - query) / 2), "passage": math.exp((query - passage) / 2)}


class TowerGradNorms:
    """Collects what each tower's gradient is over the micro-steps of an update.

    Args:
        model: the unwrapped model. Tied towers get a forward hook, which tells queries by their ``task``, "query".
        balancer: balances the towers' gradients. Untied towers are scaled once an update is complete, by its own norms
            and earlier ones; the embeddings' gradients of tied towers as they come, by those of earlier updates.
    """

    def __init__(self, model: SentenceTransformer, balancer: GradNormBalancer | None = None) -> None:
        self.tied = is_tied(model)
        self.balancer = balancer
        self._parameters = {name: list(tower(model, task).parameters()) for name, task in _TASKS.items()}
        self._squares: dict[str, Tensor] = {}
        self._factors: dict[str, float] = {}
        self._hook = model.register_forward_hook(self._watch) if self.tied else None

    def read(self, scale: float = 1.0) -> dict[str, float]:
        """``grad_norm_query``, ``grad_norm_passage`` and ``grad_norm_ratio`` of the update so far; then starts over.

        A gradient scaler's ``scale`` is divided out. With a balancer these are the norms as balanced,
        ``grad_norm_ratio_unbalanced`` is what they were, and untied towers' gradients are scaled. Reads the device.
        """
        norms = self._embedding_norms() if self.tied else self._weight_norms()
        factors, self._factors, self._squares = self._factors, {}, {}
        values = {f"grad_norm_{name}": norm.item() / scale for name, norm in norms.items()}
        if len(values) < 2 or not values["grad_norm_query"]:
            return values
        if self.balancer is not None:
            values["grad_norm_ratio_unbalanced"] = values["grad_norm_passage"] / values["grad_norm_query"]
            self.balancer.observe(values["grad_norm_query"], values["grad_norm_passage"])
            if not self.tied:
                factors = self.balancer.factors()
                for name in norms:
                    torch._foreach_mul_(self._gradients(name), factors[name])  # as torch's own clip_grad_norm_ does
            for name, factor in factors.items():
                values[f"grad_norm_{name}"] *= factor
        values["grad_norm_ratio"] = values["grad_norm_passage"] / values["grad_norm_query"]
        return values

    def close(self) -> None:
        """Take the hook off the model."""
        if self._hook is not None:
            self._hook.remove()

    def _watch(self, module: nn.Module, arguments: tuple[Any, ...], output: dict[str, Any]) -> None:
        embeddings = output.get("sentence_embedding")
        if not isinstance(embeddings, Tensor) or not embeddings.requires_grad:
            return
        name = "query" if output.get("task", arguments[0].get("task")) == "query" else "passage"
        if self.balancer is not None and not self._factors:
            self._factors = self.balancer.factors()

        def add(gradient: Tensor) -> Tensor | None:
            # Stays on the device: reading it here would wait for the device at every micro-step.
            self._squares[name] = gradient.detach().float().square().sum() + self._squares.get(name, 0)
            return gradient * self._factors[name] if self._factors else None

        embeddings.register_hook(add)

    def _embedding_norms(self) -> dict[str, Tensor]:
        # Gradients of embeddings are scaled for the average over ranks that the weights' gradients go through.
        squares = {name: self._squares[name] for name in _TASKS if name in self._squares}  # in one order on all ranks
        return {name: sum_over_ranks(square).sqrt() / world_size() for name, square in squares.items()}

    def _weight_norms(self) -> dict[str, Tensor]:
        norms = {name: nn.utils.get_total_norm(self._gradients(name)) for name in _TASKS if self._gradients(name)}
        return {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in norms.items()}  # FSDP shards them

    def _gradients(self, name: str) -> list[Tensor]:
        return [p.grad for p in self._parameters[name] if p.grad is not None]
