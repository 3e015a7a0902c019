"""Retrieval tasks of MTEB, which mteb itself loads, runs, scores and writes results of.

Added is what these lack: scores by query, for tables and for tests against earlier results, as of BEIR sets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from contaccum.errors import ConfigError, DataError
from contaccum.evaluation.metrics import score_run, warn_of_ignored_judgements
from contaccum.evaluation.results import EvaluationResult, Run
from contaccum.files import fingerprint, read_json


def find_tasks(names: Sequence[str]) -> dict[str, Any]:
    """{name: task} of the retrieval tasks or benchmarks of some names; `ConfigError` for others, or without mteb."""
    if find_spec("mteb") is None:
        raise ConfigError(
            "--mteb needs mteb (Python >= 3.11), which is not installed: pip install 'contaccum[mteb]'"
        )
    import mteb
    from mteb.abstasks import AbsTaskRetrieval

    benchmarks = {benchmark.name: benchmark.tasks for benchmark in mteb.get_benchmarks()}
    try:
        tasks = {
            task.metadata.name: task
            for name in names
            for task in benchmarks.get(name) or [mteb.get_task(name)]
        }
    except KeyError as error:
        raise ConfigError(f"--mteb: {error.args[0]}") from error
    for name, task in tasks.items():
        if not all(isinstance(part, AbsTaskRetrieval) for part, *_ in _cells(task)):
            raise ConfigError(f"--mteb {name}: is no retrieval task; mteb's own command runs it")
    return tasks


def _cells(task: Any) -> list[tuple[Any, str, str]]:
    """What a task is the mean of: (itself or a part of an aggregate, CQADupStack's say; language; split)."""
    parts = getattr(task, "tasks", [task])
    return [
        (part, subset, split)
        for part in parts
        for subset in part.hf_subsets
        for split in part.eval_splits
    ]


def about_task(task: Any) -> dict[str, Any]:
    """What a result says of a task before its data is loaded."""
    name, rows = (
        task.metadata.name,
        [{**part.metadata.dataset, "at": at} for part, *at in _cells(task)],
    )
    path, revision = (
        ", ".join(dict.fromkeys(str(row[key]) for row in rows)) for key in ("path", "revision")
    )
    about = {"name": name, "split": rows[0]["at"][1], "path": path, "revision": revision}
    return about | {"fingerprint": fingerprint("mteb", name, rows)}


def run_task(
    task: Any, model: Any, about: Mapping[str, Any], how: Any, folder: Path, k_values: Sequence[int]
) -> EvaluationResult:
    """Have mteb run a task, and score what it found by query. Languages, splits and parts count alike, as in mteb.

    Args:
        about: what the result says of the model and of how it was searched with; see `plan_search`.
        how: mteb's `encode_kwargs`.
        folder: where `mteb.ResultCache` finds mteb's own results.
    """
    import mteb
    from mteb.models import SentenceTransformerEncoderWrapper

    encoder, given = (
        SentenceTransformerEncoderWrapper(model),
        Path(about["model"]["name"]).expanduser(),
    )
    if given.is_dir():  # mteb has one name and revision for all of these, and would take one's results for another's
        names = {
            "name": "/".join(given.resolve().parts[-2:]),
            "revision": about["model"]["fingerprint"],
        }
        encoder.mteb_model_meta = encoder.mteb_model_meta.model_copy(update=names)
    cells = _cells(task)
    try:
        for part in (part for part, *_ in cells if not part.data_loaded):
            part.load_data()
    except Exception as error:  # the hub's, the network's and Arrow's own have no common ancestor
        raise DataError(
            f"{task.metadata.name}: mteb cannot load its data ({str(error)[:300]})"
        ) from error
    with TemporaryDirectory() as found:
        settings: Any = {
            "overwrite_strategy": "always",
            "co2_tracker": False,
            "encode_kwargs": dict(how),
        }
        mteb.evaluate(
            encoder, task, cache=mteb.ResultCache(folder), prediction_folder=found, **settings
        )
        files = {part.prediction_file_name for part, *_ in cells}
        hits = {name: read_json(Path(found) / name) for name in files}
    data: dict[str, Any] = about_task(task) | {"documents": 0, "queries": 0, "judgements": 0}
    means, per_query, run = [], Run(), Run()
    for part, subset, split in cells:
        texts, ours = part.dataset[subset][split], hits[part.prediction_file_name][subset][split]
        qrels = dict(sorted(texts["relevant_docs"].items()))  # mteb has them in any order
        if part.ignore_identical_ids:
            warn_of_ignored_judgements(qrels, part.metadata.name)
        metrics, scores = score_run(qrels, ours, k_values, part.ignore_identical_ids)
        means.append(metrics)
        prefix = f"{part.metadata.name}/{subset}/{split}/" if len(cells) > 1 else ""
        per_query |= {prefix + query: values for query, values in scores.items()}
        run |= {prefix + query: values for query, values in ours.items()}
        data["documents"] += len(texts["corpus"])
        data["queries"] += len(qrels)
        data["judgements"] += sum(map(len, qrels.values()))
    for part, *_ in cells:
        part.unload_data()
    return EvaluationResult(
        {x: fmean(one[x] for one in means) for x in means[0]}, per_query, run, data, **about
    )
