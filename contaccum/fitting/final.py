"""The final training at the chosen settings, its test, and the queries whose scores changed.

Settings are chosen by short trainings, the trials. The final training uses the settings of the best
trial. It scores several checkpoints on dev, and the best checkpoint becomes the trained model.
"""

from __future__ import annotations

import math
import os
import shutil
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from contaccum.data.beir import BeirDataset
from contaccum.encoders.dual_encoder import DualEncoder
from contaccum.encoders.export import insert_card_section
from contaccum.evaluation.evaluator import RetrievalEvaluator
from contaccum.evaluation.results import Run
from contaccum.files import write_text
from contaccum.fitting.folder import FitFolder
from contaccum.fitting.verdict import Verdict
from contaccum.retrieval.encode import model_fingerprint
from contaccum.training.log import EVAL_LOG, TRAIN_LOG, read_log, read_run_record
from contaccum.training.run import load_data, train_and_save
from contaccum.tuning.options import parse, to_command_line
from contaccum.tuning.result import TunedSettings, to_yaml_values
from contaccum.tuning.trial import count_updates

MAX_SHOWN_QUERIES = 10
"""The record shows so many queries with the largest gains, and as many with the largest losses."""

_NUM_EVALUATIONS = 4  # evaluations on dev during the training, each with a checkpoint
_SHOWN_METRICS = ("NDCG@10", "MRR@10", "Recall@100")
_DEV_METRIC = "eval_ndcg@10"
_NUM_TOP_DOCUMENTS = 3  # retrieved documents that the record shows for a query
# Expected times relative to those of a trial: of loading and scoring, which the final training does
# more often, and of an update.
_OVERHEAD_FACTOR = 1.3
_UPDATE_FACTOR = 1.1
# A training that was cut is repeated if there is time for so many times its updates.
_MUCH_LONGER = 1.5


def write_final_config(
    folder: FitFolder,
    tuned: TunedSettings,
    full_epochs: Sequence[str],
    measure_seconds_left: Callable[[], float],
    model_folder: Path,
) -> str | None:
    """Write the config of the final training, unless an earlier start has written it.

    The options of the chosen trial are completed with checkpoints. If the trials were cut, the
    training has its full length again. If the time is short, it is limited to fewer updates. If
    such a training has ended and there is time for a much longer one, its model is removed, and a
    longer config is written.

    Args:
        full_epochs: the value of ``num_train_epochs`` at full length.
        measure_seconds_left: measures the time that the training may take.
        model_folder: the folder of the trained model.

    Returns:
        A line for the user about the length of the training, empty if it is that of the chosen
        trial; None if nothing was written.
    """
    trial = get_chosen_trial(tuned)
    seconds_per_update = trial["latest_seconds_per_update"]
    min_updates = 0.0
    if folder.config_file.is_file():
        if not is_trained(model_folder):
            return None
        seconds = [line["seconds"] for line in read_log(model_folder / TRAIN_LOG)]
        seconds_per_update = statistics.median(seconds[len(seconds) // 2 :])
        min_updates = _MUCH_LONGER * len(seconds)
    options = dict(tuned.options)
    options["output_dir"] = [os.path.abspath(folder.retrained_model)]
    if options.get("max_steps") == [str(trial["settings"].get("max_steps"))]:
        del options["max_steps"]
        options["num_train_epochs"] = list(full_epochs)
    # eval_data need an evaluation strategy. Any one will do, because only updates are counted here.
    run_options = {**options, "eval_strategy": ["epoch"]}
    run_settings, args = parse(to_command_line(run_options))
    full_updates = count_updates(load_data(run_settings).dataset, args)
    if full_updates < min_updates:
        return None
    num_updates = full_updates
    line = ""
    if full_updates != trial["updates"]:
        line = f"the final training has its full length, {full_updates} updates"
    possible_updates = _estimate_possible_updates(trial, seconds_per_update, measure_seconds_left())
    if possible_updates < full_updates:
        num_updates = possible_updates
        options["max_steps"] = [str(num_updates)]
        line = (
            f"the final training is cut to {num_updates} of {full_updates} updates, because the "
            "budget is not enough for more"
        )
    if num_updates < min_updates:
        return None
    if min_updates:
        shutil.rmtree(model_folder)
        line = f"it took less time than expected and is repeated with {num_updates} updates"
    # ContAccumTrainer also evaluates after the last update.
    evaluation_steps = math.ceil(num_updates / _NUM_EVALUATIONS)
    settings = {
        **to_yaml_values(options),
        "eval_strategy": "steps",
        "eval_steps": evaluation_steps,
        "save_strategy": "steps",
        "save_steps": evaluation_steps,
        "load_best_model_at_end": True,
        "save_total_limit": 1,
    }
    comment = f"# Chosen by contaccum fit on dev data; see {folder.report.name}.\n"
    text = yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)
    write_text(folder.config_file, comment + text)
    return line


def _estimate_possible_updates(
    trial: Mapping[str, Any], seconds_per_update: float, seconds_left: float
) -> int:
    """Return the number of updates that fit into the time.

    It is at least `_NUM_EVALUATIONS`, so that there is an update before each evaluation.

    Args:
        trial: the record of the chosen trial, for its time of loading and scoring.
        seconds_per_update: the latest time of an update.
    """
    overhead_in_updates = trial["seconds"] / trial["seconds_per_update"] - trial["updates"]
    overhead = _OVERHEAD_FACTOR * overhead_in_updates * seconds_per_update
    possible_updates = (seconds_left - overhead) / (_UPDATE_FACTOR * seconds_per_update)
    return max(_NUM_EVALUATIONS, int(possible_updates))


def get_chosen_trial(tuned: TunedSettings) -> dict[str, Any]:
    """Return the record of the trial whose settings were chosen."""
    [trial] = [record for record in tuned.trials if record["trial"] == tuned.choice.trial]
    return trial


def is_trained(model_folder: Path) -> bool:
    """Return True if the training of the model in a folder has finished."""
    return bool(read_run_record(model_folder).get("finished"))


def train_final(
    config_file: Path, model_folder: Path, overrides: Mapping[str, str] | None = None
) -> None:
    """Train by a config file, and write the model to a folder.

    A training that was killed is resumed; a training that has finished is not repeated.

    Args:
        overrides: {option: value} that replace values of the config.
    """
    options = {"output_dir": str(model_folder), "resume_from_checkpoint": "auto"}
    options.update(overrides or {})
    tokens = [str(config_file)]
    for key, value in options.items():
        tokens += [f"--{key}", value]
    settings, args = parse(tokens)
    if not is_trained(model_folder):
        train_and_save(settings, args)
    # Also after a kill between the end of the training and this removal.
    if args.process_index == 0:
        for checkpoint in model_folder.glob("checkpoint-*"):
            shutil.rmtree(checkpoint)


def load_trained(folder: Path, base: DualEncoder) -> DualEncoder:
    """Load a model that was trained from the base model, on the same device.

    Code that comes with the model is trusted if that of the base model is.
    """
    return DualEncoder.from_pretrained(
        str(folder), device=str(base.device), trust_remote_code=base.trust_remote_code
    )


def read_best_dev_score(model_folder: Path) -> float:
    """Return the score on dev of the best checkpoint, which is the trained model."""
    scores = []
    for record in read_log(model_folder / EVAL_LOG):
        if _DEV_METRIC in record:
            scores.append(record[_DEV_METRIC])
    return max(scores)


class SystemResult(NamedTuple):
    """The results of one system on the test set.

    Attributes:
        means: {metric: mean over the queries}.
        query_scores: {query id: nDCG@10}.
        run: {query id: {document id: score}} of the retrieved documents.
    """

    means: dict[str, float]
    query_scores: dict[str, float]
    run: Run


def search_test_set(
    evaluator: RetrievalEvaluator, base: DualEncoder, trained: DualEncoder
) -> dict[str, SystemResult]:
    """Search the test set with BM25, with the base model and with the trained model.

    The trained model encodes the documents, unless its document tower is that of the base model, as
    after query-side training.

    Args:
        evaluator: the evaluator of the test set. Its ``documents`` are the document embeddings by
            the base model.

    Returns:
        {system: result} with the systems "bm25", "base" and "trained".
    """
    runs = {"bm25": evaluator.search_bm25(), "base": evaluator.search(base)}
    is_encoded_anew = model_fingerprint(trained, "document") != model_fingerprint(base, "document")
    if is_encoded_anew:
        evaluator.documents = None  # the search then encodes the documents with its model
    runs["trained"] = evaluator.search(trained, show_progress=is_encoded_anew)
    results = {}
    for system, run in runs.items():
        means = evaluator.score_run(run)
        results[system] = SystemResult(means, evaluator.query_scores, run)
    return results


def select_shown_metrics(means: Mapping[str, float]) -> dict[str, float]:
    """Return {name in a report, such as "NDCG@10": mean} of the metrics that a report shows."""
    return {name: means[name.lower()] for name in _SHOWN_METRICS}


def compare_queries(
    dataset: BeirDataset, base: SystemResult, trained: SystemResult
) -> dict[str, Any]:
    """Return the queries with the largest gains and losses, and the number of gains and losses.

    Args:
        dataset: the test set.
        base, trained: the results of the base model and of the trained model.
    """
    gains = {}
    for query_id, base_score in base.query_scores.items():
        gains[query_id] = trained.query_scores[query_id] - base_score
    ascending = sorted(gains, key=lambda query_id: gains[query_id])
    descending = sorted(gains, key=lambda query_id: -gains[query_id])
    gained = [query_id for query_id in descending if gains[query_id] > 0]
    lost = [query_id for query_id in ascending if gains[query_id] < 0]

    def describe(query_ids: list[str]) -> list[dict[str, Any]]:
        shown = query_ids[:MAX_SHOWN_QUERIES]
        return [_describe_query(dataset, query_id, base, trained) for query_id in shown]

    return {
        "gained": describe(gained),
        "lost": describe(lost),
        "num_gained": len(gained),
        "num_lost": len(lost),
        "num_same": len(gains) - len(gained) - len(lost),
    }


def _describe_query(
    dataset: BeirDataset, query_id: str, base: SystemResult, trained: SystemResult
) -> dict[str, Any]:
    """Return the texts of a query, its relevant documents and its top documents, with scores."""
    relevant_documents = []
    for document_id, grade in dataset.qrels[query_id].items():
        if grade > 0 and document_id in dataset.corpus:
            relevant_documents.append(dict(dataset.corpus[document_id]))
    return {
        "query": dataset.queries[query_id],
        "before": base.query_scores[query_id],
        "after": trained.query_scores[query_id],
        "gold": relevant_documents,
        "top_before": _get_top_documents(dataset, query_id, base.run),
        "top_after": _get_top_documents(dataset, query_id, trained.run),
    }


def _get_top_documents(dataset: BeirDataset, query_id: str, run: Run) -> list[dict[str, Any]]:
    """Return the texts of a query's top documents, each with a mark whether it is relevant."""
    scores = run.get(query_id, {})
    ranking = sorted(scores, key=lambda document_id: -scores[document_id])
    top_documents = []
    for document_id in ranking[:_NUM_TOP_DOCUMENTS]:
        is_relevant = dataset.qrels[query_id].get(document_id, 0) > 0
        top_documents.append({**dataset.corpus[document_id], "is_gold": is_relevant})
    return top_documents


def write_verdict_to_card(model_folder: Path, verdict: Verdict, base_name: str) -> None:
    """Write the verdict at the top of the model card, below its metadata.

    The verdict of an earlier start is replaced.

    Args:
        base_name: the name of the base model.
    """
    text = f"**{verdict}**\n\nCompared with {base_name} as it is, by contaccum fit."
    if verdict.advice:
        text += f"\n\n{verdict.advice}"
    insert_card_section(model_folder, "verdict of contaccum fit", text)
