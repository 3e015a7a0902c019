"""BEIR evaluation: which sets a name stands for, and a model's or a run's score on one of them.

Puts data, search and metrics together. Whatever can be wrong is refused before the first text is encoded. Reranking,
sparse and late-interaction models are out of scope, and tables are made in `tables`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from contaccum.data import CQADUPSTACK_FORUMS, PUBLIC_NAMES, BeirDataset, default_split
from contaccum.data.beir import is_beir_folder, load_beir_folder, resolve_beir_data
from contaccum.errors import ConfigError, DataError
from contaccum.evaluation.metrics import DEFAULT_K_VALUES, check_k_values, score_run, trec_order
from contaccum.evaluation.results import EvaluationResult, Run


def evaluate_beir(
    model: Any, dataset: BeirDataset, k_values: Sequence[int] = DEFAULT_K_VALUES, **settings: Any
) -> EvaluationResult:
    """Encode a corpus and its queries, search, and score.

    Args:
        model: a SentenceTransformer.
        k_values: cut-offs of the metrics; as many documents as the greatest are retrieved.
        settings: those of :func:`search` and :func:`plan_search`.

    Raises:
        ConfigError: settings that are out of range or do not fit the model or the data; before anything is encoded.
    """
    k_values = check_k_values(k_values)
    run, about = search(model, dataset.corpus, dataset.queries, max(k_values), **settings)
    metrics, per_query = score_run(dataset.qrels, run, k_values)
    return EvaluationResult(metrics, per_query, run, about_data(dataset), **about)


def score_beir_run(
    dataset: BeirDataset, run: Mapping[str, Mapping[str, float]], k_values: Sequence[int], name: str
) -> EvaluationResult:
    """Score a run of any system, which the result calls ``name``.

    Judged queries without results count as zero; results of other queries, and beyond the greatest of ``k_values``,
    are left out.

    Raises:
        DataError: the run has results for none of the judged queries.
    """
    deepest = max(check_k_values(k_values))
    top = {query: dict(trec_order(run[query])[:deepest]) for query in dataset.qrels if query in run}
    if not top:
        raise DataError(f"{name}: has results for none of {dataset.name}'s judged queries")
    metrics, per_query = score_run(dataset.qrels, top, k_values)
    data = about_data(dataset) | {"queries_without_results": len(dataset.qrels) - len(top)}
    return EvaluationResult(metrics, per_query, top, data, model={"name": name}, search={"k": deepest})


def about_data(dataset: BeirDataset) -> dict[str, Any]:
    """What a result or a report says about a data set."""
    return {
        "name": dataset.name,
        "split": dataset.split,
        "path": str(dataset.path),
        "documents": len(dataset.corpus),
        "queries": len(dataset.queries),
        "judgements": sum(map(len, dataset.qrels.values())),
        "fingerprint": dataset.fingerprint,
    }


def load_data(
    given: str | os.PathLike[str], split: str | None = None, on_bad_record: Literal["stop", "skip"] = "stop"
) -> BeirDataset:
    """What `resolve_beir_data` finds, read; raises `DataError` when it cannot be, or nothing is in it."""
    split = split or default_split(given)
    return load_beir_folder(resolve_beir_data(os.fspath(given), split), split, on_bad_record)


def search(
    model: Any,
    corpus: Mapping[str, Mapping[str, str]],
    queries: Mapping[str, str],
    k: int,
    show_progress: bool = True,
    model_name: str | None = None,
    similarity: Literal["cos", "dot"] | None = None,
    **settings: Any,
) -> tuple[Run, dict[str, Any]]:
    """The k best documents of every query, and what a result says of model, tokenisation, search, timing and precision.

    Args:
        corpus: {document id: {"title", "text"}}.
        model_name: what the result calls the model.
        similarity, settings: those of :func:`plan_search`, which is called first.
    """
    from contaccum.retrieval.searcher import FaissSearcher

    about = plan_search(model, len(corpus), k, similarity=similarity, **settings)
    searcher = FaissSearcher(model, show_progress_bar=show_progress, **settings)
    run = searcher.search(corpus, queries, k, similarity)
    about["model"]["name"] = model_name
    about["search"] |= searcher.found
    return run, {**about, "timing": searcher.timing}


def plan_search(
    model: Any,
    documents: int,
    k: int,
    index: str = "Flat",
    index_parameters: str | None = None,
    batch_size: int = 32,
    similarity: Literal["cos", "dot"] | None = None,
    precision: str = "float32",
) -> dict[str, Any]:
    """What decides the scores of a search of so many documents, as far as a result's record says it before the search.

    Args:
        index, index_parameters: see `build_index`; "Flat" is exact.
        batch_size: texts encoded at once.
        similarity: None is the model's own (`similarity_fn_name`, cosine where it says nothing).
        precision: "float32", or "bfloat16" or "float16" for autocast.

    Raises:
        ConfigError: settings that cannot work, which would otherwise show after hours of encoding.
    """
    from contaccum.retrieval.encode import metric_of, model_fingerprint, tokenisation_fingerprint
    from contaccum.retrieval.index import check_factory

    if batch_size < 1:
        raise ConfigError(f"batch_size must be at least 1, not {batch_size}")
    metric = metric_of(model, similarity)
    dimension = model.get_embedding_dimension()
    _, index_parameters = check_factory(index, dimension, documents, metric, index_parameters)
    return {
        "model": {"fingerprint": model_fingerprint(model), "similarity": metric, "dimension": dimension},
        "tokenisation": tokenisation_fingerprint(model),
        "search": {"index": index, "index_parameters": index_parameters, "k": k},
        "precision": precision,
    }


class EvaluationSet(NamedTuple):
    """One data set to score on: what :func:`load_data` takes, what tables call it, and where its record goes."""

    given: str
    label: str
    output: Path


def evaluation_sets(given: Sequence[str], output: Path) -> list[EvaluationSet]:
    """Spell out ``--data``: `beir`, `cqadupstack` or a folder with its twelve parts, other names, other folders.

    Args:
        output: where the record of a single set goes; of several, their labels, with - for /, are put into its name.

    Raises:
        ConfigError: two sets of one label.
    """
    if "beir" in given and not is_beir_folder("beir"):
        given = [name for item in given for name in (PUBLIC_NAMES if item == "beir" else [item])]
    found: dict[str, str] = {}  # {label: folder or public name}
    for item in given:
        folder = os.path.expanduser(item)
        parts = {f"cqadupstack/{forum}": os.path.join(folder, forum) for forum in CQADUPSTACK_FORUMS}
        sets = {os.path.basename(os.path.abspath(folder)): item}  # "." has a name too
        if all(map(is_beir_folder, parts.values())):
            sets = parts
        elif item == "cqadupstack":
            sets = {label: label for label in parts}
        if again := sets.keys() & found:
            raise ConfigError(f"--data: two sets are called {min(again)}; evaluate them apart")
        found |= sets
    if len(found) == 1:
        return [EvaluationSet(item, label, output) for label, item in found.items()]
    names = {label: f".{label.replace('/', '-')}.json" for label in found}
    return [EvaluationSet(item, label, output.with_suffix(names[label])) for label, item in found.items()]
