"""Checkpoints from others: a trainer that resumes reads tensors and JSON, and refuses what is more, in one line."""

from __future__ import annotations

from typing import Any

from contaccum.untrusted import check_model_folder, refusing_code


class RefusesCode:
    """Goes before a Trainer among the bases of a class: what the Trainer refuses to unpickle becomes a `UserError`."""

    def _load_from_checkpoint(self, checkpoint: str, *args: Any) -> None:
        check_model_folder(checkpoint, trust_remote_code=getattr(self.model, "trust_remote_code", False))  # type: ignore[attr-defined]  # a Trainer comes next
        with refusing_code(checkpoint):
            super()._load_from_checkpoint(checkpoint, *args)  # type: ignore[misc]  # as above

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with refusing_code(str(checkpoint)):
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]  # as above

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with refusing_code(str(checkpoint)):
            super()._load_rng_state(checkpoint)  # type: ignore[misc]  # as above

    def _load_scaler(self, checkpoint: str | None) -> None:
        with refusing_code(str(checkpoint)):
            super()._load_scaler(checkpoint)  # type: ignore[misc]  # as above
