"""Retrieval tasks of MTEB: mteb loads, runs and scores them, and writes its own result files.

An aggregate is a task that consists of other tasks, such as CQADupStack. A task may have several
languages (mteb's subsets) and splits.

This module adds scores per query, so that tasks appear in tables and are compared with earlier
results as BEIR sets are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

from contaccum.errors import ConfigError, DataError
from contaccum.evaluation.metrics import score_run, warn_of_ignored_judgements
from contaccum.evaluation.results import EvaluationResult, Run
from contaccum.files import fingerprint, read_json

if TYPE_CHECKING:
    from mteb.models import SentenceTransformerEncoderWrapper
    from sentence_transformers import SentenceTransformer


class _TaskPart(NamedTuple):
    """Part of a task with its own scores; a task's score is the mean over its parts."""

    task: Any  # the task itself or, for an aggregate, one of its tasks
    subset: str  # language
    split: str


def find_tasks(names: Sequence[str]) -> dict[str, Any]:
    """Return {name: task} of the retrieval tasks with these names, and of benchmarks' tasks.

    Raises:
        ConfigError: mteb is not installed, a name is unknown, or a task is not a retrieval task.
    """
    if find_spec("mteb") is None:
        raise ConfigError(
            "--mteb needs mteb (Python >= 3.11), which is not installed: pip install "
            "'contaccum[mteb]'"
        )
    import mteb
    from mteb.abstasks import AbsTaskRetrieval

    benchmarks = {benchmark.name: benchmark.tasks for benchmark in mteb.get_benchmarks()}
    tasks = {}
    try:
        for name in names:
            for task in benchmarks.get(name) or [mteb.get_task(name)]:
                tasks[task.metadata.name] = task
    except KeyError as error:
        raise ConfigError(f"--mteb: {error.args[0]}") from error
    for name, task in tasks.items():
        for part in _get_parts(task):
            if not isinstance(part.task, AbsTaskRetrieval):
                raise ConfigError(
                    f"--mteb {name}: is not a retrieval task; run it with mteb's own command"
                )
    return tasks


def _get_parts(task: Any) -> list[_TaskPart]:
    """Return the parts of a task: each of its tasks, languages and splits."""
    parts = []
    for subtask in getattr(task, "tasks", [task]):
        for subset in subtask.hf_subsets:
            for split in subtask.eval_splits:
                parts.append(_TaskPart(subtask, subset, split))
    return parts


def describe_task(task: Any) -> dict[str, Any]:
    """Return name, split, path, revision and fingerprint of a task; its data need not be loaded."""
    name = task.metadata.name
    sources = []
    for part in _get_parts(task):
        source = dict(part.task.metadata.dataset)
        source["at"] = [part.subset, part.split]
        sources.append(source)
    return {
        "name": name,
        "split": sources[0]["at"][1],
        "path": _join_distinct(source["path"] for source in sources),
        "revision": _join_distinct(source["revision"] for source in sources),
        "fingerprint": fingerprint("mteb", name, sources),
    }


def _join_distinct(values: Iterable[object]) -> str:
    return ", ".join(dict.fromkeys(map(str, values)))


def run_task(
    task: Any,
    model: SentenceTransformer,
    record_fields: Mapping[str, Any],
    encode_kwargs: Mapping[str, Any],
    folder: Path,
    k_values: Sequence[int],
) -> EvaluationResult:
    """Run a task with mteb, and score its results per query.

    Languages, splits and tasks of an aggregate have the same weight, as in mteb.

    Args:
        task: one of the tasks of `find_tasks`.
        model: a SentenceTransformer.
        record_fields: fields of `EvaluationResult`, such as those of `plan_search`. ``model`` has
            the ``name`` of the model too.
        encode_kwargs: mteb's settings of the encoder.
        folder: folder of mteb's own results, for `mteb.ResultCache`.
        k_values: cut-offs of the metrics.

    Raises:
        DataError: mteb cannot load the data of the task.
    """
    encoder = _wrap_model(model, record_fields["model"])
    parts = _get_parts(task)
    _load_data(task, parts)
    hits_of_files = _run_with_mteb(task, encoder, encode_kwargs, folder)
    num_documents = 0
    num_queries = 0
    num_judgements = 0
    means_of_parts = []
    per_query: dict[str, dict[str, float]] = {}
    run: Run = {}
    for part in parts:
        texts = part.task.dataset[part.subset][part.split]
        hits = hits_of_files[part.task.prediction_file_name][part.subset][part.split]
        name = part.task.metadata.name
        ignore_identical_ids = part.task.ignore_identical_ids
        qrels = dict(sorted(texts["relevant_docs"].items()))  # mteb's order is not fixed
        if ignore_identical_ids:
            warn_of_ignored_judgements(qrels, name)
        means, part_scores = score_run(qrels, hits, k_values, ignore_identical_ids)
        means_of_parts.append(means)
        prefix = ""
        if len(parts) > 1:
            prefix = f"{name}/{part.subset}/{part.split}/"  # parts may share query ids
        for query_id, scores in part_scores.items():
            per_query[prefix + query_id] = scores
        for query_id, query_hits in hits.items():
            run[prefix + query_id] = query_hits
        num_documents += len(texts["corpus"])
        num_queries += len(qrels)
        num_judgements += sum(map(len, qrels.values()))
    for part in parts:
        part.task.unload_data()
    data = describe_task(task)
    data["documents"] = num_documents
    data["queries"] = num_queries
    data["judgements"] = num_judgements
    metrics = {}
    for name in means_of_parts[0]:
        metrics[name] = fmean(means[name] for means in means_of_parts)
    return EvaluationResult(metrics, per_query, run, data, **record_fields)


def _wrap_model(
    model: SentenceTransformer, model_record: Mapping[str, Any]
) -> SentenceTransformerEncoderWrapper:
    """Return mteb's wrapper of a model, with a name and a revision of its own."""
    from mteb.models import SentenceTransformerEncoderWrapper

    encoder = SentenceTransformerEncoderWrapper(model)
    folder = Path(model_record["name"]).expanduser()
    if folder.is_dir():
        # mteb gives all models in folders the same name and revision, and would then read the
        # results of one model as those of another.
        changes = {
            "name": "/".join(folder.resolve().parts[-2:]),
            "revision": model_record["fingerprint"],
        }
        encoder.mteb_model_meta = encoder.mteb_model_meta.model_copy(update=changes)
    return encoder


def _load_data(task: Any, parts: Sequence[_TaskPart]) -> None:
    try:
        for part in parts:
            if not part.task.data_loaded:
                part.task.load_data()
    except Exception as error:  # errors of the hub, the network and Arrow have no common base class
        reason = str(error)[:300]
        raise DataError(
            f"{task.metadata.name}: mteb cannot load its data ({reason}); check the network and "
            "your access to the data set"
        ) from error


def _run_with_mteb(
    task: Any,
    encoder: SentenceTransformerEncoderWrapper,
    encode_kwargs: Mapping[str, Any],
    folder: Path,
) -> dict[str, Any]:
    """Run a task, and return {name of mteb's prediction file: its content}."""
    import mteb

    settings: Any = dict(encode_kwargs)  # a copy, because mteb may change it
    with TemporaryDirectory() as predictions_folder:
        mteb.evaluate(
            encoder,
            task,
            cache=mteb.ResultCache(folder),
            prediction_folder=predictions_folder,
            overwrite_strategy="always",
            co2_tracker=False,
            encode_kwargs=settings,
        )
        predictions = {}
        for part in _get_parts(task):
            file_name = part.task.prediction_file_name
            if file_name not in predictions:
                predictions[file_name] = read_json(Path(predictions_folder) / file_name)
    return predictions
