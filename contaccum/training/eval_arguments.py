"""What training arguments say about evaluation and trackers, beside transformers' own: early stopping, and refusals."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sentence_transformers import SentenceTransformerTrainingArguments
from transformers.trainer_utils import SaveStrategy

from contaccum.errors import ConfigError
from contaccum.redaction import redact_record


@dataclass
class EvaluationArguments(SentenceTransformerTrainingArguments):
    """SentenceTransformerTrainingArguments that know when to stop early, and tell trackers no credentials.

    Raises:
        ConfigError: early stopping without evaluation, or a tracker that is unknown or not installed.
    """

    early_stopping_patience: int | None = field(
        default=None,
        metadata={
            "help": "Stop after so many evaluations in a row without a better metric_for_best_model. Default: never."
        },
    )
    early_stopping_threshold: float = field(
        default=0.0, metadata={"help": "With early_stopping_patience: better means better by more than this."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_early_stopping()
        check_trackers(self.report_to)

    def _check_early_stopping(self) -> None:
        patience, strategy = self.early_stopping_patience, getattr(self.eval_strategy, "value", self.eval_strategy)
        if patience is None:
            if self.early_stopping_threshold:
                raise ConfigError(
                    f"early_stopping_threshold={self.early_stopping_threshold} without early_stopping_patience: "
                    "nothing stops early. Set early_stopping_patience, or drop it"
                )
            return
        if patience < 1:
            raise ConfigError(f"early_stopping_patience must be at least 1 evaluation, got {patience}")
        if self.early_stopping_threshold < 0:
            raise ConfigError(f"early_stopping_threshold must be at least 0, got {self.early_stopping_threshold}")
        if strategy == "no":
            raise ConfigError(
                f"early_stopping_patience={patience} with eval_strategy=no: there is nothing to lose patience with. "
                "Set eval_strategy=steps and eval_steps, or drop it"
            )

    @property
    def keeps_best(self) -> bool:
        """Whether anything depends on which evaluation was the best."""
        by_save = self.save_strategy == SaveStrategy.BEST
        return self.load_best_model_at_end or by_save or self.early_stopping_patience is not None

    def to_dict(self) -> dict[str, Any]:
        """As in transformers, which blanks its own tokens; nor are credentials of the environment or in URLs told."""
        return redact_record(super().to_dict())


def check_trackers(report_to: Any) -> None:
    """Raise `ConfigError` for a tracker that transformers does not know, or whose package is not installed."""
    from transformers.integrations import integration_utils

    for name in report_to or ():
        if name not in integration_utils.INTEGRATION_TO_CALLBACK:
            known = ", ".join(sorted(integration_utils.INTEGRATION_TO_CALLBACK))
            raise ConfigError(f"report_to={name}: transformers knows no such tracker (there are {known})")
        is_available = getattr(integration_utils, f"is_{name}_available", None)
        if is_available is not None and not is_available():
            raise ConfigError(f"report_to={name} needs the package: pip install {name}")
