"""The final training at the chosen settings, its test, and which queries it changed."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from contaccum.comparison.options import to_command_line
from contaccum.data.beir import BeirDataset
from contaccum.encoders.dual_encoder import DualEncoder
from contaccum.evaluation.evaluator import RetrievalEvaluator
from contaccum.evaluation.results import Run
from contaccum.files import write_text
from contaccum.fitting.folder import FitFolder
from contaccum.fitting.verdict import Verdict
from contaccum.training import config
from contaccum.training.log import EVAL_LOG, read_log, read_run_record
from contaccum.training.run import train_and_save
from contaccum.tuning.trial import count_updates
from contaccum.tuning.tune import Tuned, as_yaml

CHANGES_SHOWN = 10
"""Queries that gained most, and that lost most, in the record."""

_EVALUATIONS = 4  # on dev, during the training: the best of so many checkpoints is kept
_SHOWN_METRICS = ("NDCG@10", "MRR@10", "Recall@100")
_DEV_METRIC = "eval_ndcg@10"
_TOP = 3  # documents that are shown of each query
_TIME_OF_EVALUATIONS = 1.3  # a training with its evaluations and checkpoints, beside a trial


def write_config(folder: FitFolder, tuned: Tuned, seconds_left: float) -> int | None:
    """Write the config of the final training, unless an earlier start has done so.

    Args:
        seconds_left: that the training may take.

    Returns:
        The number of updates if they are fewer than the settings ask for, because of the time;
        None otherwise.
    """
    if folder.config.is_file():
        return None
    options = dict(tuned.options)
    options["output_dir"] = [str(folder.again)]
    _, data_args, args = config.parse(to_command_line({**options, "eval_strategy": ["epoch"]}))
    updates = count_updates(len(config.load_data(data_args, args).dataset), args)
    possible = _possible_updates(tuned, seconds_left)
    cut_to = None
    if possible < updates:
        cut_to = possible
        updates = possible
        options["max_steps"] = [str(updates)]
    lines = as_yaml(options)
    every = math.ceil(updates / _EVALUATIONS)
    lines |= {
        "eval_strategy": "steps",
        "eval_steps": every,
        "save_strategy": "steps",
        "save_steps": every,
    }
    lines |= {"load_best_model_at_end": True, "save_total_limit": 1}
    content = yaml.safe_dump(lines, sort_keys=False, allow_unicode=True)
    write_text(
        folder.config,
        f"# Chosen by contaccum fit on dev data; see {folder.report.name}.\n{content}",
    )
    return cut_to


def _possible_updates(tuned: Tuned, seconds_left: float) -> int:
    """Return the updates that there is time for, by the time of the chosen trial."""
    [chosen] = [trial for trial in tuned.trials if trial["trial"] == tuned.choice.trial]
    seconds_per_update = chosen["seconds"] / chosen["updates"] * _TIME_OF_EVALUATIONS
    return max(_EVALUATIONS, int(seconds_left / seconds_per_update))


def train_final(
    config_file: Path, model_folder: Path, overrides: Mapping[str, str] | None = None
) -> None:
    """Train by a config into a folder; go on with a training that was killed, and leave a finished one.

    Args:
        overrides: keys of the config that have other values here.
    """
    if read_run_record(model_folder).get("finished"):
        return
    given = {"output_dir": str(model_folder), "resume_from_checkpoint": "auto", **(overrides or {})}
    tokens = [str(config_file)]
    for key, value in given.items():
        tokens += [f"--{key}", value]
    model_args, data_args, args = config.parse(tokens)
    train_and_save(model_args, data_args, args)
    if args.process_index == 0:
        for checkpoint in model_folder.glob("checkpoint-*"):
            shutil.rmtree(checkpoint)


class Tested(NamedTuple):
    """The results of one system on the test set.

    Attributes:
        means: {metric: mean over the queries}.
        query_scores: {query id: nDCG@10}.
        run: the documents that were found.
    """

    means: dict[str, float]
    query_scores: dict[str, float]
    run: Run


def search_test(
    evaluator: RetrievalEvaluator,
    base: DualEncoder,
    trained: DualEncoder,
    documents_stand_still: bool,
) -> dict[str, Tested]:
    """Search the test set by BM25, by the model as it is and by the trained one.

    Args:
        evaluator: of the test set, with the documents that the base model has encoded already.
        documents_stand_still: whether the trained model has the documents of the base model.

    Returns:
        Keys are "bm25", "base" and "trained".
    """
    runs = {"bm25": evaluator.search_bm25(), "base": evaluator.search(base)}
    if not documents_stand_still:
        evaluator.documents = None
    runs["trained"] = evaluator.search(trained, show_progress=evaluator.documents is None)
    found = {}
    for name, run in runs.items():
        means = evaluator.score_run(run)
        found[name] = Tested(means, evaluator.query_scores, run)
    return found


def shown_means(means: Mapping[str, float]) -> dict[str, float]:
    """Return the means of a few metrics by the names that tables show."""
    return {name: means[name.lower()] for name in _SHOWN_METRICS}


def best_on_dev(model_folder: Path) -> float:
    """Return the score on dev of the checkpoint that was kept."""
    scores = [
        record[_DEV_METRIC] for record in read_log(model_folder / EVAL_LOG) if _DEV_METRIC in record
    ]
    return max(scores)


def changes_of(dataset: BeirDataset, base: Tested, trained: Tested) -> dict[str, Any]:
    """Return the queries that gained and lost most, with their texts."""
    gains = {}
    for query, score in base.query_scores.items():
        gains[query] = trained.query_scores[query] - score
    gained = sorted((query for query in gains if gains[query] > 0), key=lambda query: -gains[query])
    lost = sorted((query for query in gains if gains[query] < 0), key=lambda query: gains[query])

    def texts_of(query: str) -> dict[str, Any]:
        relevant = [name for name, grade in dataset.qrels[query].items() if grade > 0]
        return {
            "query": dataset.queries[query],
            "before": base.query_scores[query],
            "after": trained.query_scores[query],
            "gold": [dict(dataset.corpus[name]) for name in relevant],
            "top_before": _top_of(dataset, query, base.run),
            "top_after": _top_of(dataset, query, trained.run),
        }

    return {
        "gained": [texts_of(query) for query in gained[:CHANGES_SHOWN]],
        "lost": [texts_of(query) for query in lost[:CHANGES_SHOWN]],
        "num_gained": len(gained),
        "num_lost": len(lost),
        "num_same": len(gains) - len(gained) - len(lost),
    }


def _top_of(dataset: BeirDataset, query: str, run: Run) -> list[dict[str, Any]]:
    """Return the texts of the best documents of a query."""
    found = run.get(query, {})
    best = sorted(found, key=lambda name: -found[name])[:_TOP]
    top = []
    for name in best:
        is_gold = dataset.qrels[query].get(name, 0) > 0
        top.append({**dataset.corpus[name], "is_gold": is_gold})
    return top


def open_card_with(model_folder: Path, verdict: Verdict, base_name: str) -> None:
    """Put the verdict on top of a model card, below its metadata; that of an earlier start is replaced."""
    card = model_folder / "README.md"
    content = card.read_text(encoding="utf-8") if card.is_file() else ""
    begin = "<!-- verdict of contaccum fit -->\n"
    end = "<!-- end of the verdict -->\n"
    content = re.sub(f"{begin}.*?{end}\n", "", content, flags=re.DOTALL)
    metadata = re.match(r"---\n.*?\n---\n", content, flags=re.DOTALL)
    position = metadata.end() if metadata else 0
    lines = f"**{verdict}**\n\nCompared with {base_name} as it is, by contaccum fit.\n"
    if verdict.advice:
        lines += f"\n{verdict.advice}\n"
    write_text(card, f"{content[:position]}{begin}{lines}{end}\n{content[position:]}")
