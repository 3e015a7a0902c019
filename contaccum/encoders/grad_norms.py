"""Gradient norms of the two towers, the encoders of queries and of passages.

GradNormRatio (arXiv 2406.12356, section 5) is that of the passage tower divided by that of the
query tower. With two banks of equal size it stays near 1, with a passage bank alone it does not.

The norms are those of the gradients of the weights. But tied towers share one gradient, and with
engines that shard weights (FSDP2, ZeRO) each rank has only a part of it. Then the norms are those
of the gradients of the embeddings, over all embeddings of an update.
"""

from __future__ import annotations

from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn

from contaccum.distributed import over_ranks, world_size
from contaccum.encoders.settings import get_tower, is_tied


class TowerGradNorms:
    """Gradient norms of the two towers, accumulated over the micro-steps of an update.

    Args:
        model: the model, without wrappers. Embeddings of the ``task`` "query" belong to the query
            tower, others to the passage tower.
        wrapper: the module that losses call, such as the compiled model or the model in DDP, which
            gets the hook.
        has_whole_gradients: True if every rank holds the complete gradients of the weights.
    """

    def __init__(
        self, model: SentenceTransformer, wrapper: nn.Module, has_whole_gradients: bool
    ) -> None:
        self._parameters = {
            "query": list(get_tower(model, "query").parameters()),
            "passage": list(get_tower(model, "document").parameters()),
        }
        self._norms_of_micro_steps: dict[str, list[Tensor]] = {}
        self._hook = None
        if is_tied(model) or not has_whole_gradients:
            self._hook = wrapper.register_forward_hook(self._hook_output)

    def read(self, scale: float = 1.0) -> dict[str, float]:
        """Return ``grad_norm_query``, ``grad_norm_passage`` and ``grad_norm_ratio`` of an update.

        It waits for the device, and resets the norms. A tower without gradients is left out. A
        gradient scaler (fp16) has multiplied the loss by ``scale``.
        """
        norms: dict[str, Tensor] = {}
        if self._hook is None:
            for name, parameters in self._parameters.items():
                gradients = [weight.grad for weight in parameters if weight.grad is not None]
                if gradients:
                    norms[name] = nn.utils.get_total_norm(gradients)
        # Every rank must call the collective for the towers in the same order.
        for name, norms_of_tower in sorted(self._norms_of_micro_steps.items(), reverse=True):
            squared_norm = torch.stack(norms_of_tower).square().sum()
            # The loss is the mean over the ranks, but each rank has the gradients of its own loss,
            # or, with a shared bank, of the common loss times the number of ranks.
            norms[name] = over_ranks("SUM", squared_norm).sqrt() / world_size()
        self._norms_of_micro_steps = {}
        values = {f"grad_norm_{name}": norm.item() / scale for name, norm in norms.items()}
        if len(values) == 2 and values["grad_norm_query"]:
            values["grad_norm_ratio"] = values["grad_norm_passage"] / values["grad_norm_query"]
        return values

    def close(self) -> None:
        """Remove the hook from the model."""
        if self._hook is not None:
            self._hook.remove()

    def _hook_output(
        self, module: nn.Module, arguments: tuple[Any, ...], output: dict[str, Any]
    ) -> None:
        embeddings = output.get("sentence_embedding")
        if not isinstance(embeddings, Tensor) or not embeddings.requires_grad:
            return
        task = output.get("task", arguments[0].get("task"))
        name = "query" if task == "query" else "passage"

        def record_norm(gradient: Tensor) -> None:
            # It stays on the device, so that a micro-step does not wait for it.
            norm = torch.linalg.vector_norm(gradient.detach().float())
            self._norms_of_micro_steps.setdefault(name, []).append(norm)

        embeddings.register_hook(record_norm)
