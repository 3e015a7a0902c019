"""ModelLoss, the base of losses that hold something that belongs to their model."""

from __future__ import annotations

from typing import Any

from torch import nn


class ModelLoss(nn.Module):
    """Loss that calls `start_with_model` whenever ``model`` becomes a model with other weights.

    A bank belongs to a model. sentence-transformers assigns ``loss.model`` in two cases: another
    model, in `hyperparameter_search` and with `model_init`; and a wrapper of the model in use, such
    as DDP or a compiled model, which has the same weights.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        # nn.Module registers modules in its own __setattr__, so a property would never be set.
        if name == "model":
            present = self._modules.get("model")
            has_same_weights = (
                present is not None
                and isinstance(value, nn.Module)
                and set(present.parameters()) <= set(value.parameters())
            )
            if not has_same_weights:
                self.start_with_model(value)
        super().__setattr__(name, value)

    def start_with_model(self, model: Any) -> None:
        """Check a new model, and start everything anew that depends on the model."""
        raise NotImplementedError
