"""Measuring the gradient norms of the two towers, whose ratio shows whether training is balanced.

GradNormRatio (arXiv 2406.12356, section 5) is the passage tower's norm over the query tower's. Untied towers have a
gradient each, so it is taken from the weights. Tied towers share theirs, so there it is taken from the gradients of
the embeddings. It measures; it changes nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn

from contaccum.encoders import is_tied, tower


class TowerGradNorms:
    """Collects what each tower's gradient is over the micro-steps of an update.

    Args:
        model: the unwrapped model. For tied towers a forward hook is placed on it, which tells queries from passages
            by the ``task`` of their features ("query", or anything else).
    """

    def __init__(self, model: SentenceTransformer) -> None:
        self.tied = is_tied(model)
        self._parameters = {
            name: [p for p in tower(model, task).parameters() if p.requires_grad]
            for name, task in (("query", "query"), ("passage", "document"))
        }
        self._squares: dict[str, Tensor] = {}
        self._hook = model.register_forward_hook(self._watch) if self.tied else None

    def _watch(self, module: nn.Module, arguments: tuple[Any, ...], output: dict[str, Any]) -> None:
        embeddings = output.get("sentence_embedding")
        if not isinstance(embeddings, Tensor) or not embeddings.requires_grad:
            return
        name = "query" if output.get("task", arguments[0].get("task")) == "query" else "passage"

        def add(gradient: Tensor) -> None:
            # Stays on the device: reading it here would wait for the device at every micro-step.
            square = gradient.detach().float().square().sum()
            self._squares[name] = self._squares[name] + square if name in self._squares else square

        embeddings.register_hook(add)

    def read(self, scale: float = 1.0) -> dict[str, float]:
        """``grad_norm_query``, ``grad_norm_passage`` and ``grad_norm_ratio`` of the update so far; then starts over.

        Args:
            scale: what the loss was multiplied with (a gradient scaler's scale); divided out.
        """
        norms: dict[str, Tensor] = {}
        if self.tied:
            norms = {name: square.sqrt() for name, square in self._squares.items()}
        else:
            for name, parameters in self._parameters.items():
                gradients = [p.grad for p in parameters if p.grad is not None]
                if gradients:
                    norms[name] = torch.stack(torch._foreach_norm(gradients)).norm()
        self._squares = {}
        values = {f"grad_norm_{name}": norm.item() / scale for name, norm in norms.items()}
        if values.get("grad_norm_query") and "grad_norm_passage" in values:
            values["grad_norm_ratio"] = values["grad_norm_passage"] / values["grad_norm_query"]
        return values

    def close(self) -> None:
        """Take the hook off the model."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
