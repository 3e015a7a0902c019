"""Gradient norms of the two towers.

GradNormRatio (arXiv 2406.12356, section 5) is the norm of the passage tower's gradient over that of
the query tower's. Two banks of equal size keep the ratio near 1; with a passage bank alone it moves
away from 1.

Untied towers have a gradient each, so the norms are those of the weights' gradients. Tied towers
share one gradient, and engines that shard weights (FSDP2, ZeRO) leave no rank a whole one. In both
cases the norms are those of the embeddings' gradients.
"""

from __future__ import annotations

from typing import Any

from sentence_transformers import SentenceTransformer
from torch import Tensor, nn

from contaccum.distributed import over_ranks, world_size
from contaccum.encoders.towers import is_tied, tower


class TowerGradNorms:
    """Collects the gradient norm of each tower over the micro-steps of an update.

    Args:
        model: the model itself. If the norms are those of the embeddings' gradients, a forward hook
            takes outputs whose ``task`` is "query" for queries, and all others for passages.
        wrapper: the module that losses call, which is the model in its wrappers; None: the model. A
            compiled model cannot be hooked from inside.
        has_whole_gradients: whether every rank holds whole gradients of the weights.
    """

    def __init__(
        self,
        model: SentenceTransformer,
        wrapper: nn.Module | None = None,
        has_whole_gradients: bool = True,
    ) -> None:
        self._parameters = {
            "query": list(tower(model, "query").parameters()),
            "passage": list(tower(model, "document").parameters()),
        }
        self._squares: dict[str, Tensor] = {}
        self._hook = None
        if is_tied(model) or not has_whole_gradients:
            self._hook = (wrapper or model).register_forward_hook(self._watch)

    def read(self, scale: float = 1.0) -> dict[str, float]:
        """Return the norms of the update so far, and start over.

        Reading them waits for the device.

        Args:
            scale: the scale of a gradient scaler, by which norms are divided.

        Returns:
            ``grad_norm_query``, ``grad_norm_passage`` and ``grad_norm_ratio``, as far as there are
            gradients.
        """
        norms = self._norms_of_weights() if self._hook is None else self._norms_of_embeddings()
        values = {}
        for name, norm in norms.items():
            values[f"grad_norm_{name}"] = norm.item() / scale
        if len(values) == 2 and values["grad_norm_query"]:
            values["grad_norm_ratio"] = values["grad_norm_passage"] / values["grad_norm_query"]
        return values

    def close(self) -> None:
        """Remove the hook from the model."""
        if self._hook is not None:
            self._hook.remove()

    def _norms_of_weights(self) -> dict[str, Tensor]:
        norms = {}
        for name, parameters in self._parameters.items():
            gradients = [weight.grad for weight in parameters if weight.grad is not None]
            if gradients:
                norms[name] = nn.utils.get_total_norm(gradients)
        return norms

    def _norms_of_embeddings(self) -> dict[str, Tensor]:
        norms = {}
        # Sorted, so that all ranks sum in one order.
        for name, square in sorted(self._squares.items(), reverse=True):
            # The gradients of embeddings are scaled up for the average over ranks that the
            # gradients of weights go through.
            norms[name] = over_ranks("SUM", square).sqrt() / world_size()
        self._squares = {}
        return norms

    def _watch(self, module: nn.Module, arguments: tuple[Any, ...], output: dict[str, Any]) -> None:
        """Add the squared norm of an output's gradient once the backward pass has computed it."""
        embeddings = output.get("sentence_embedding")
        if not isinstance(embeddings, Tensor) or not embeddings.requires_grad:
            return
        task = output.get("task", arguments[0].get("task"))
        name = "query" if task == "query" else "passage"

        def add(gradient: Tensor) -> None:
            # The sum stays on the device, so that no micro-step waits for it.
            square = gradient.detach().float().square().sum()
            self._squares[name] = square + self._squares.get(name, 0)

        embeddings.register_hook(add)
