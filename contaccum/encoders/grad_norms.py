"""Measuring the gradient norms of the two towers.

GradNormRatio (arXiv 2406.12356, section 5) is the passage tower's norm over the query tower's. Untied towers have a
gradient each, so it is taken from the weights. Tied towers share theirs, and engines that shard (FSDP2, ZeRO) keep it
to themselves, so there it is taken from the gradients of the embeddings. Two banks of equal size keep the ratio near 1;
with the passage bank alone it leaves 1.
"""

from __future__ import annotations

from typing import Any

from sentence_transformers import SentenceTransformer
from torch import Tensor, nn

from contaccum.distributed import over_ranks, world_size
from contaccum.encoders.towers import is_tied, tower


class TowerGradNorms:
    """Collects what each tower's gradient is over the micro-steps of an update.

    Args:
        model: the model itself. Without a gradient per tower, a forward hook tells queries by their ``task``, "query".
        called: what losses call, the model in whatever wraps it (a compiled one cannot be hooked from inside).
        whole: whether weights have whole gradients on every rank.
    """

    def __init__(self, model: SentenceTransformer, called: nn.Module | None = None, whole: bool = True) -> None:
        towers = {"query": tower(model, "query"), "passage": tower(model, "document")}
        self._parameters = {name: list(module.parameters()) for name, module in towers.items()}
        self._squares: dict[str, Tensor] = {}
        by_weights = whole and not is_tied(model)
        self._hook = None if by_weights else (called or model).register_forward_hook(self._watch)

    def read(self, scale: float = 1.0) -> dict[str, float]:
        """``grad_norm_query``, ``grad_norm_passage`` and ``grad_norm_ratio`` of the update so far; then starts over.

        A gradient scaler's ``scale`` is divided out. Reads the device.
        """
        if self._hook is None:
            gradients = {name: [p.grad for p in own if p.grad is not None] for name, own in self._parameters.items()}
            norms = {name: nn.utils.get_total_norm(given) for name, given in gradients.items() if given}
        else:
            # Gradients of embeddings are scaled for the average over ranks that the weights' gradients go through.
            squares = sorted(self._squares.items(), reverse=True)  # in one order on all ranks
            norms = {name: over_ranks("SUM", square).sqrt() / world_size() for name, square in squares}
            self._squares = {}
        values = {f"grad_norm_{name}": norm.item() / scale for name, norm in norms.items()}
        if len(values) == 2 and values["grad_norm_query"]:
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

        def add(gradient: Tensor) -> None:
            # Stays on the device: reading it here would wait for the device at every micro-step.
            self._squares[name] = gradient.detach().float().square().sum() + self._squares.get(name, 0)

        embeddings.register_hook(add)
