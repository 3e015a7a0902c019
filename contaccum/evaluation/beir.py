"""BEIR evaluation: the data sets that a name stands for, and the scores of a model or a run on one.

Wrong settings are refused before the first text of a data set is encoded.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contaccum.data import CQADUPSTACK_PARTS, PUBLIC_NAMES, BeirDataset, get_default_split
from contaccum.data.beir import get_set_name, is_beir_folder, load_beir_folder, resolve_beir_data
from contaccum.data.rows import OnBadRecord, RecordReport
from contaccum.errors import ConfigError, DataError, warn_once
from contaccum.evaluation.metrics import (
    DEFAULT_K_VALUES,
    ignored_judgements,
    score_run,
    warn_of_ignored_judgements,
)
from contaccum.evaluation.results import EvaluationResult, read_result, write_result
from contaccum.files import fingerprint

if TYPE_CHECKING:
    import numpy as np
    from sentence_transformers import SentenceTransformer

    from contaccum.encoders.settings import Kind
    from contaccum.retrieval.search import FaissSearcher


def describe_data(dataset: BeirDataset) -> dict[str, Any]:
    """Return name, split, path, counts and fingerprint of a data set, for results and reports."""
    description = {
        "name": dataset.name,
        "split": dataset.split,
        "path": str(dataset.path),
        "documents": len(dataset.corpus),
        "queries": len(dataset.queries),
        "judgements": sum(map(len, dataset.qrels.values())),
        "fingerprint": dataset.fingerprint,
    }
    if ignored := ignored_judgements(dataset.qrels):
        description["ignored_judgements"] = len(ignored)
    if missing := dataset.list_missing_documents():
        description["judgements_outside_corpus"] = len(missing)
    return description


def load_data(
    source: str | os.PathLike[str], split: str | None = None, on_bad_record: OnBadRecord = "stop"
) -> BeirDataset:
    """Load a BEIR data set: a BEIR folder or a public name; see `resolve_beir_data`.

    Args:
        split: split of the judgements; None: the default split of the data set.
        on_bad_record: "stop", or "skip" records that cannot be used; a warning counts them.
    """
    split = split or get_default_split(source)
    report = RecordReport(on_bad_record)
    dataset = load_beir_folder(resolve_beir_data(source), split, report)
    if report.reported:
        warn_once(report.summary())
    return dataset


def evaluate_beir(
    model: SentenceTransformer,
    dataset: BeirDataset,
    k_values: Sequence[int] = DEFAULT_K_VALUES,
    model_name: str | None = None,
    show_progress: bool = True,
    embeddings: Mapping[Kind, np.ndarray] | None = None,
    **settings: Any,
) -> EvaluationResult:
    """Encode the corpus and the queries of a data set, search, and score.

    Args:
        k_values: cut-offs of the metrics. As many documents as the largest are retrieved.
        model_name: name of the model in the record.
        embeddings: see `FaissSearcher`.
        settings: index, index_parameters, batch_size and precision of `FaissSearcher`; similarity,
            "cos" or "dot" (None: see `get_similarity`). Wrong ones raise `ConfigError`.
    """
    warn_of_ignored_judgements(dataset.qrels, dataset.name)
    settings = {**settings, "show_progress_bar": show_progress, "embeddings": embeddings}
    searcher, plan = _plan(model, dataset, k_values, model_name, **settings)
    similarity = plan["model"]["similarity"]
    run = searcher.search(dataset.corpus, dataset.queries, max(k_values), similarity)
    plan["search"].update(searcher.search_details)
    metrics, per_query = score_run(dataset.qrels, run, k_values)
    return EvaluationResult(metrics, per_query, run, **plan)


def _plan(
    model: SentenceTransformer,
    dataset: BeirDataset,
    k_values: Sequence[int],
    model_name: str | None,
    similarity: str | None = None,
    **settings: Any,
) -> tuple[FaissSearcher, dict[str, Any]]:
    """Check the settings of an evaluation; return the searcher, and what is known of the record."""
    from contaccum.retrieval import encode
    from contaccum.retrieval.search import FaissSearcher, check_factory

    searcher = FaissSearcher(model, **settings)
    index = searcher.index
    dimension = model.get_embedding_dimension()
    assert dimension is not None, "the model gives no embeddings of a fixed dimension"
    _, parameters = check_factory(index, dimension, len(dataset.corpus), searcher.index_parameters)
    plan: dict[str, Any] = {
        "data": describe_data(dataset),
        "model": {
            "fingerprint": encode.model_fingerprint(model),
            "similarity": encode.get_similarity(model, similarity),
            "dimension": dimension,
            "name": model_name,
        },
        "tokenisation": encode.tokenisation_fingerprint(model),
        "search": {"index": index, "index_parameters": parameters, "k": max(k_values)},
        "precision": searcher.precision,
    }
    return searcher, {**plan, "identity": fingerprint(plan, list(k_values))}


def evaluate_once(
    model: SentenceTransformer,
    dataset: BeirDataset,
    file: Path,
    k_values: Sequence[int],
    model_name: str,
    show_progress: bool = True,
    **settings: Any,
) -> dict[str, Any]:
    """Return the record in a file, or evaluate by `evaluate_beir` and write it.

    A record is used again if it has the same model, data, settings and metrics.
    """
    with suppress(DataError):  # there is no record, or a damaged one
        record = read_result(file)
        _, plan = _plan(model, dataset, k_values, model_name, **settings)
        if record.get("identity") == plan["identity"]:
            print(f"kept: {file} (same model, data and settings)")
            return record
    result = evaluate_beir(model, dataset, k_values, model_name, show_progress, **settings)
    return write_result(result, file)


def score_beir_run(
    dataset: BeirDataset, run: Mapping[str, Mapping[str, float]], k_values: Sequence[int], name: str
) -> EvaluationResult:
    """Score the run of any system, whose name is in the result, as `score_run` does.

    Raises `DataError` for a run that has results for none of the judged queries.
    """
    judged_run = {query: dict(run[query]) for query in dataset.qrels if query in run}
    if not judged_run:
        raise DataError(
            f"{name}: has results for none of {dataset.name}'s judged queries (check that the run "
            "and the data have the same query ids)"
        )
    warn_of_ignored_judgements(dataset.qrels, dataset.name)
    metrics, per_query = score_run(dataset.qrels, judged_run, k_values)
    data = describe_data(dataset)
    data["queries_without_results"] = len(dataset.qrels) - len(judged_run)
    return EvaluationResult(
        metrics, per_query, judged_run, data, model={"name": name}, search={"k": max(k_values)}
    )


def evaluation_sets(data: Sequence[str]) -> dict[str, str]:
    """Return {label: folder or public name, for `load_data`} of the values of ``--data``.

    "beir" stands for all public sets; "cqadupstack", or a folder with its twelve parts, for these
    parts. A label is the name of the set or of its folder; of several with the same name, labels of
    folders are such as "scifact/dev". A set that is named twice raises `ConfigError`.
    """
    named_sources: list[tuple[str, str]] = []  # (label, folder or public name)
    for item in data:
        # "beir" may also be a BEIR folder.
        is_all_of_beir = item == "beir" and not is_beir_folder(item)
        for name in PUBLIC_NAMES if is_all_of_beir else [item]:
            folder = os.path.expanduser(name)
            parts = {part: os.path.join(folder, get_set_name(part)) for part in CQADUPSTACK_PARTS}
            if all(map(is_beir_folder, parts.values())):
                named_sources.extend(parts.items())
            elif name == "cqadupstack":
                named_sources.extend((part, part) for part in parts)
            else:
                named_sources.append((get_set_name(folder), name))
    counts = Counter(label for label, _ in named_sources)
    sources: dict[str, str] = {}
    for label, source in named_sources:
        is_public_name = source == label and not os.path.isdir(source)
        if counts[label] > 1 and not is_public_name:
            parent = os.path.dirname(os.path.abspath(os.path.expanduser(source)))
            label = f"{os.path.basename(parent)}/{label}"
        if label in sources:
            raise ConfigError(f"--data: two sets are called {label}; name each set once")
        sources[label] = source
    return sources
