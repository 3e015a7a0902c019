"""ModelLoss: base class of the losses, which start anew when their model is replaced.

A bank belongs to a model. sentence-transformers assigns ``loss.model`` in two cases: another model,
in `hyperparameter_search` and with `model_init`; and a wrapper of the model in use, such as DDP or
a compiled model, which has the same weights.
"""

from __future__ import annotations

from typing import Any

from torch import nn


class ModelLoss(nn.Module):
    """Loss that calls `start_with_model` whenever ``model`` becomes a model with other weights."""

    def __setattr__(self, name: str, value: Any) -> None:
        # nn.Module registers modules in its own __setattr__, so a property would never be set.
        if name == "model" and not self._has_weights_of_model(value):
            self.start_with_model(value)
        super().__setattr__(name, value)

    def _has_weights_of_model(self, model: Any) -> bool:
        """Return True if a model has all weights of the present one: it wraps it, or is it."""
        present = self._modules.get("model")
        if present is None or not isinstance(model, nn.Module):
            return False
        return set(present.parameters()) <= set(model.parameters())

    def start_with_model(self, model: Any) -> None:
        """Check a new model, and start everything anew that depends on the model."""
        raise NotImplementedError
