"""Retrieval tasks of MTEB, which mteb itself loads, runs, scores and writes results of.

Added is what these lack: scores by query, for tables and for tests against earlier results, as of BEIR sets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from contaccum.errors import ConfigError, DataError
from contaccum.evaluation.metrics import score_run
from contaccum.evaluation.results import EvaluationResult
from contaccum.files import fingerprint, read_json


class TaskSet(NamedTuple):
    """What is scored on its own: a split and language of a task, or of a part of one that is a mean (CQADupStack's)."""

    task: Any
    part: Any
    data: dict[str, Any]  # what a result says of it before it is loaded


def find_sets(names: Sequence[str]) -> dict[str, TaskSet]:
    """{label: set} of the tasks that names of tasks or benchmarks stand for; `ConfigError` where that cannot be."""
    if find_spec("mteb") is None:
        raise ConfigError("--mteb needs mteb (Python >= 3.11), which is not installed: pip install 'contaccum[mteb]'")
    import mteb
    from mteb.abstasks import AbsTaskRetrieval

    benchmarks = {benchmark.name: benchmark.tasks for benchmark in mteb.get_benchmarks()}
    try:
        tasks = {task.metadata.name: task for name in names for task in benchmarks.get(name) or [mteb.get_task(name)]}
    except KeyError as error:
        raise ConfigError(f"--mteb: {error.args[0]}") from error
    found = {}
    for name, task in tasks.items():
        parts = getattr(task, "tasks", [task])
        if not all(isinstance(part, AbsTaskRetrieval) for part in parts):
            raise ConfigError(f"--mteb {name}: is no retrieval task; mteb's own command runs it")
        cells = [(part, subset, split) for part in parts for subset in part.hf_subsets for split in part.eval_splits]
        for part, subset, split in cells:
            words = dict.fromkeys((name, part.metadata.name, subset, split))
            label = "/".join(word for word in words if word != "default") if len(cells) > 1 else name
            data = {**part.metadata.dataset, "name": label, "subset": subset, "split": split}
            found[label] = TaskSet(task, part, data | {"fingerprint": fingerprint("mteb", data)})
    return found


def scorer(
    model: Any, sets: Mapping[str, TaskSet], about: Mapping[str, Any], folder: Path, k_values: Sequence[int], **how: Any
) -> Callable[[str], EvaluationResult]:
    """A function of a label, which has mteb run the task when the first of its sets is asked for.

    Args:
        about: what results say of the model and of how it was searched with; see :func:`plan_search`.
        folder: where `mteb.ResultCache` finds mteb's own results.
        how: mteb's `encode_kwargs`.
    """
    import mteb
    from mteb.models import SentenceTransformerEncoderWrapper

    encoder, given = SentenceTransformerEncoderWrapper(model), Path(about["model"]["name"]).expanduser()
    if given.is_dir():  # mteb has one name and revision for all of these, and would take one's results for another's
        names = {"name": "/".join(given.resolve().parts[-2:]), "revision": about["model"]["fingerprint"]}
        encoder.mteb_model_meta = encoder.mteb_model_meta.model_copy(update=names)
    done: dict[str, EvaluationResult] = {}

    def score(label: str) -> EvaluationResult:
        if label in done:
            return done.pop(label)
        task = sets[label].task
        ours = {label: one for label, one in sets.items() if one.task is task}
        parts = {one.part.metadata.name: one.part for one in ours.values()}.values()
        try:
            for part in parts:
                part.load_data()
        except Exception as error:  # the hub's, the network's and Arrow's own have no common ancestor
            raise DataError(f"{task.metadata.name}: mteb cannot load its data ({str(error)[:300]})") from error
        with TemporaryDirectory() as found:
            settings: Any = {"overwrite_strategy": "always", "co2_tracker": False, "prediction_folder": found}
            mteb.evaluate(encoder, task, cache=mteb.ResultCache(folder), encode_kwargs=how, **settings)
            for name, (_, part, data) in ours.items():
                hits = read_json(Path(found) / part.prediction_file_name)[data["subset"]][data["split"]]
                texts = part.dataset[data["subset"]][data["split"]]
                qrels = dict(sorted(texts["relevant_docs"].items()))  # mteb has them in any order
                metrics, per_query = score_run(qrels, hits, k_values, part.ignore_identical_ids)
                counts = {"documents": len(texts["corpus"]), "queries": len(qrels)}
                counts["judgements"] = sum(map(len, qrels.values()))
                done[name] = EvaluationResult(metrics, per_query, hits, data | counts, **about)
        for part in parts:
            part.unload_data()
        return done.pop(label)

    return score
