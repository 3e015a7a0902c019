"""Retrieval tasks of MTEB, which mteb itself loads, runs, scores and writes results of.

Added is what these lack: scores by query, for tables and for tests against earlier results, as of BEIR sets.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from contaccum.errors import ConfigError, DataError
from contaccum.evaluation.beir import EvaluationSet, place
from contaccum.evaluation.metrics import score_run
from contaccum.evaluation.results import EvaluationResult
from contaccum.files import fingerprint, read_json

SetData = tuple[EvaluationSet, dict[str, Any]]
"""A set, and what its result says of the data."""


def find_tasks(names: Sequence[str], output: Path) -> list[tuple[Any, list[SetData]]]:
    """The tasks that names of tasks or benchmarks stand for, and their sets: of most one, else by language or part.

    Raises:
        ConfigError: mteb is not installed, has no such name, or it is of no retrieval task.
    """
    if find_spec("mteb") is None:
        raise ConfigError("--mteb needs mteb (Python >= 3.11), which is not installed: pip install 'contaccum[mteb]'")
    import mteb
    from mteb.abstasks import AbsTaskRetrieval

    benchmarks = {benchmark.name: benchmark.tasks for benchmark in mteb.get_benchmarks()}
    try:
        tasks = {task.metadata.name: task for name in names for task in benchmarks.get(name) or [mteb.get_task(name)]}
    except KeyError as error:
        raise ConfigError(f"--mteb: {error.args[0]}") from error
    found: dict[str, dict[str, Any]] = {}
    for name, task in tasks.items():
        parts = _parts(task).items()
        if not all(isinstance(part, AbsTaskRetrieval) for _, part in parts):
            raise ConfigError(f"--mteb {name}: is no retrieval task; mteb's own command runs it")
        cells = [(part, subset, split) for part, x in parts for subset in x.hf_subsets for split in x.eval_splits]
        differ = [len(set(column)) > 1 for column in zip(*cells, strict=True)]
        for cell in cells:
            label = "/".join([name, *(word for word, differs in zip(cell, differ, strict=True) if differs)])
            data = {
                **dict(parts)[cell[0]].metadata.dataset,
                **dict(zip(("task", "subset", "split"), cell, strict=True)),
            }
            found[label] = {**data, "name": label, "fingerprint": fingerprint("mteb", data)}
    sets = [(one, found[one.label]) for one in place({label: data["task"] for label, data in found.items()}, output)]
    of = {name: [pair for pair in sets if pair[0].label.partition("/")[0] == name] for name in tasks}
    return [(task, of[name]) for name, task in tasks.items()]


def _parts(task: Any) -> dict[str, Any]:
    """The tasks that an aggregate, such as CQADupStack's, is the mean of, by name; or the task itself."""
    return {part.metadata.name: part for part in getattr(task, "tasks", [task])}


def run_task(
    model: Any,
    task: Any,
    sets: Sequence[SetData],
    about: dict[str, Any],
    folder: Path,
    k_values: Sequence[int],
    **how: Any,
) -> list[EvaluationResult]:
    """Have mteb evaluate a model on a task, and score what was found by query, for each of the task's sets.

    Args:
        about: what results say of the model and how it was searched with; see :func:`plan_search`.
        folder: where `mteb.ResultCache` finds mteb's result files.
        how: mteb's `encode_kwargs`.
    """
    import mteb
    from mteb.models import SentenceTransformerEncoderWrapper

    encoder, parts = SentenceTransformerEncoderWrapper(model), _parts(task)
    given = Path(about["model"]["name"]).expanduser()
    if given.is_dir():  # all of these have one name and revision in mteb, which takes one's results for another's
        names = {"name": "/".join(given.resolve().parts[-2:]), "revision": about["model"]["fingerprint"]}
        encoder.mteb_model_meta = encoder.mteb_model_meta.model_copy(update=names)
    with TemporaryDirectory() as found:
        try:
            for part in parts.values():
                part.load_data()
        except Exception as error:  # the hub's, the network's and Arrow's own have no common ancestor
            raise DataError(f"{task.metadata.name}: mteb cannot load its data ({str(error)[:300]})") from error
        cache = mteb.ResultCache(folder)
        settings: Any = {"overwrite_strategy": "always", "co2_tracker": False, "prediction_folder": found}
        mteb.evaluate(encoder, task, cache=cache, encode_kwargs=how, **settings)
        runs = {name: read_json(os.path.join(found, part.prediction_file_name)) for name, part in parts.items()}
    results = []
    for one, data in sets:
        part, subset, split = parts[one.given], data["subset"], data["split"]
        held, run = part.dataset[subset][split], runs[one.given][subset][split]
        qrels = dict(sorted(held["relevant_docs"].items()))  # mteb has them in any order
        metrics, per_query = score_run(qrels, run, k_values, part.ignore_identical_ids)
        counts = {"documents": len(held["corpus"]), "queries": len(qrels), "judgements": sum(map(len, qrels.values()))}
        results.append(EvaluationResult(metrics, per_query, run, data | counts, **about))
    for part in parts.values():
        part.unload_data()
    return results
