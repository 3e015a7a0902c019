"""Scoring the runs of a comparison: the data sets or fixed samples of them, and curves while a run trains.

What is scored while it trains must train on as if it had not been: random states, train mode, mixed precision's
wrapper, clock and peak memory are as before afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from contaccum.data.beir_folder import BeirDataset
from contaccum.errors import ConfigError
from contaccum.evaluation.beir import evaluate_beir, load_data
from contaccum.evaluation.sampling import sample
from contaccum.training.undisturbed import forget_peak_memory, unchanged_random_states

# Metric as evaluate_beir names it -> as the report does. The first is the one that curves and maps show.
METRICS = {"NDCG@10": "nDCG@10", "Recall@100": "Recall@100", "MRR@10": "MRR@10", "Accuracy@20": "Top-20 accuracy"}


@dataclass(frozen=True)
class EvaluationSettings:
    """What is scored, and when.

    Attributes:
        data: BEIR folders or names of public sets; curves are of the first.
        updates: score the first set every so many updates; 0: only at the end.
        before: score the first set before training as well.
        queries, corpus: how many of them to keep, see :func:`sample`; None: all.
        precision: "float32", or the type to encode in, whatever the training's.
    """

    data: Sequence[str]
    split: str = "test"
    updates: int = 0
    before: bool = False
    queries: int | None = None
    corpus: int | None = None
    precision: str = "float32"
    batch_size: int = 32

    def __post_init__(self) -> None:
        if not self.data:
            raise ConfigError("nothing to evaluate on: give BEIR folders as --eval_data DIR ...")
        for name, least in (("updates", 0), ("queries", 1), ("corpus", 1), ("batch_size", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"--eval_{name} must be at least {least}, got {value}")

    def load(self) -> Iterator[BeirDataset]:
        """The sets, one at a time, sampled; raises `DataError` for one that cannot be used."""
        return (self.load_one(given) for given in self.data)

    def load_one(self, given: str) -> BeirDataset:
        """One of ``data``, sampled."""
        return sample(load_data(given, self.split, "stop"), self.queries, self.corpus)

    def identity(self, sets: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """What decides the scores; ``sets`` as :func:`contaccum.evaluation.beir.about_data` tells them."""
        settings = {key: value for key, value in asdict(self).items() if key not in ("data", "batch_size")}
        return {**settings, "sets": {str(s["name"]): s["fingerprint"] for s in sets}, "curve": sets[0]["name"]}


class Evaluator:
    """Scores a model on the sets of ``settings``; the first set stays in memory once it was needed."""

    def __init__(self, settings: EvaluationSettings, similarity: Any = None) -> None:
        self.settings = settings
        self.similarity = similarity
        self._first: BeirDataset | None = None

    def first(self, model: Any) -> dict[str, float]:
        """Means of METRICS on the first set."""
        if self._first is None:
            self._first = self.settings.load_one(self.settings.data[0])
        metrics = self._score(model, self._first).metrics
        return {name: metrics[name] for name in METRICS}

    def all(self, model: Any) -> dict[str, dict[str, Any]]:
        """By name of the set: ``data``, ``metrics``, ``query_ids``, ``per_query`` (by metric, in their order)."""
        found: dict[str, dict[str, Any]] = {}
        for number, given in enumerate(self.settings.data):
            kept = self._first if number == 0 else None
            dataset = self.settings.load_one(given) if kept is None else kept
            started = time.perf_counter()
            result = self._score(model, dataset)
            ids = list(result.per_query)
            found[dataset.name] = {
                "data": result.data,
                "metrics": {name: result.metrics[name] for name in METRICS},
                "query_ids": ids,
                "per_query": {name: [result.per_query[query][name] for query in ids] for name in METRICS},
                "similarity": result.model["similarity"],
                "seconds": time.perf_counter() - started,
            }
        return found

    def _score(self, model: Any, dataset: BeirDataset) -> Any:
        with _plain_forward(model):
            return evaluate_beir(
                model,
                dataset,
                k_values=(10, 20, 100),
                batch_size=self.settings.batch_size,
                similarity=self.similarity,
                autocast_dtype=None if self.settings.precision == "float32" else self.settings.precision,
                show_progress=False,
            )


class CurveCallback(TrainerCallback):
    """Scores the model every ``settings.updates`` updates, and leaves the run as it was.

    ``points`` holds {"update", metric: value}; the last update is left to whoever scores the finished model.
    """

    def __init__(self, trainer: Any, evaluator: Evaluator) -> None:
        self.trainer = trainer
        self.evaluator = evaluator
        self.points: list[dict[str, float]] = []
        self.seconds = 0.0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.evaluator.settings.before:
            self._score(state.global_step)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        every = self.evaluator.settings.updates
        if every and state.global_step % every == 0 and state.global_step < state.max_steps:
            self._score(state.global_step)

    def _score(self, update: int) -> None:
        started = time.perf_counter()
        with unchanged_random_states():
            metrics = self.evaluator.first(self.trainer.model)
        forget_peak_memory(self.trainer.args.device)
        self.points.append({"update": update, **metrics})
        seconds = time.perf_counter() - started
        self.seconds += seconds
        if self.trainer._update_started:
            # The next update starts after the evaluation, not before it.
            self.trainer._update_started += seconds


@contextmanager
def _plain_forward(model: Any) -> Iterator[None]:
    # In mixed precision, accelerate hangs an autocasting forward on the very model that is trained.
    wrapped = model.__dict__.pop("forward", None) if hasattr(model, "_original_forward") else None
    try:
        yield
    finally:
        if wrapped is not None:
            model.__dict__["forward"] = wrapped
