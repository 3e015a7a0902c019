"""BEIR evaluation of a model on one data set.

Puts data, retrieval and metrics together. Whatever can be wrong is refused before the first text is encoded. Several
sets, tables and comparisons are `command`'s; reranking, sparse and late-interaction models are out of scope.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from contaccum.data.beir_folder import BeirDataset, load_beir_folder
from contaccum.data.beir_names import default_split, resolve_beir_data
from contaccum.data.records import quoted
from contaccum.errors import DataError
from contaccum.evaluation.checks import check_search
from contaccum.evaluation.metrics import DEFAULT_K_VALUES, check_k_values, score_run, trec_order
from contaccum.evaluation.results import EvaluationResult
from contaccum.evaluation.search_record import search_record


def evaluate_beir(
    model: Any,
    dataset: BeirDataset | str | os.PathLike[str],
    index: str = "Flat",
    k_values: Sequence[int] = DEFAULT_K_VALUES,
    batch_size: int = 32,
    similarity: Literal["cos", "dot"] | None = None,
    autocast_dtype: str | None = None,
    show_progress: bool = True,
    split: str | None = None,
    on_bad_record: Literal["stop", "skip"] = "stop",
    index_parameters: str | None = None,
    use_gpu: bool | Literal["auto"] = "auto",
    model_name: str | None = None,
) -> EvaluationResult:
    """Encode a corpus and its queries, search, and score.

    Args:
        model: a SentenceTransformer, or an object with `encode_queries` and `encode_corpus` as BEIR calls them.
        dataset: loaded data, or what `resolve_beir_data` takes: a BEIR folder or the name of a public set (then
            `split`, by default `default_split`'s, and `on_bad_record` count).
        index, index_parameters, use_gpu: see `build_index`; "Flat" is exact.
        k_values: cut-offs of the metrics; as many documents as the greatest are retrieved.
        similarity: None is the model's own (`similarity_fn_name`, cosine where it says nothing).
        autocast_dtype: None for float32, "bfloat16" or "float16".
        model_name: what the result calls the model.

    Raises:
        ConfigError: settings that are out of range or do not fit the model or the data; before anything is encoded.
        DataError: data that cannot be used.
    """
    from contaccum.retrieval.searcher import FaissSearcher

    k_values = check_k_values(k_values)
    if not isinstance(dataset, BeirDataset):
        dataset = load_data(dataset, split, on_bad_record)
    searcher = FaissSearcher(
        model,
        batch_size=batch_size,
        index=index,
        index_parameters=index_parameters,
        use_gpu=use_gpu,
        autocast_dtype=autocast_dtype,
        show_progress_bar=show_progress,
    )
    metric = check_search(model, len(dataset.corpus), index, index_parameters, batch_size, autocast_dtype, similarity)
    run = searcher.search(dataset.corpus, dataset.queries, max(k_values), metric)
    metrics, per_query = score_run(dataset.qrels, run, k_values)
    seconds = max(searcher.timing["encode_corpus_seconds"], 1e-9)
    searcher.timing["documents_per_second"] = len(dataset.corpus) / seconds
    return EvaluationResult(
        metrics=metrics,
        per_query=per_query,
        run=run,
        data=about_data(dataset),
        **search_record(searcher, model_name, metric, max(k_values)),
    )


def score_beir_run(
    dataset: BeirDataset,
    run: Mapping[str, Mapping[str, float]],
    k_values: Sequence[int] = DEFAULT_K_VALUES,
    name: str = "run",
) -> EvaluationResult:
    """Score a run of any system: {query id: {document id: score}}, in trec_eval's order.

    Judged queries without results count as zero; results of other queries, and beyond the greatest of `k_values`, are
    left out.

    Raises:
        ConfigError: k < 1.
        DataError: the run has results for none of the judged queries.
    """
    k_values = check_k_values(k_values)
    deepest = max(k_values)
    top = {query: dict(trec_order(run[query])[:deepest]) for query in dataset.qrels if query in run}
    if not top:
        first = next(iter(run), "nothing")
        raise DataError(f"{name}: has results for {quoted(first)}, and for none of {dataset.name}'s judged queries")
    metrics, per_query = score_run(dataset.qrels, top, k_values)
    return EvaluationResult(
        metrics=metrics,
        per_query=per_query,
        run=top,
        data=about_data(dataset) | {"queries_without_results": len(dataset.qrels) - len(top)},
        model={"name": name},
        tokenisation=None,
        search={"k": deepest},
        timing={},
        precision="unknown",
    )


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
    """What `resolve_beir_data` finds, read; raises `DataError` also when there is nothing to evaluate on."""
    split = split or default_split(given)
    dataset = load_beir_folder(resolve_beir_data(os.fspath(given), split), split, on_bad_record)
    for what, records in (("documents", dataset.corpus), ("judged queries", dataset.queries)):
        if not records:
            raise DataError(f"{dataset.path}: there are no {what} to evaluate on")
    return dataset
