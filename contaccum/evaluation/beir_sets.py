"""BEIR evaluation: which sets a name stands for, and a model's or a run's score on one of them.

Puts data, search and metrics together. Whatever can be wrong is refused before the first text is encoded. Reranking,
sparse and late-interaction models are out of scope, and tables are made in `tables`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from contaccum.data import CQADUPSTACK_FORUMS, PUBLIC_NAMES, BeirDataset, default_split
from contaccum.data.beir import is_beir_folder, load_beir_folder, resolve_beir_data, set_name
from contaccum.errors import ConfigError, DataError
from contaccum.evaluation.metrics import (
    DEFAULT_K_VALUES,
    check_k_values,
    ignored_judgements,
    paired_bootstrap,
    score_run,
    trec_order,
    warn_of_ignored_judgements,
)
from contaccum.evaluation.results import EvaluationResult, Run


def evaluate_beir(
    model: Any,
    dataset: BeirDataset,
    k_values: Sequence[int] = DEFAULT_K_VALUES,
    served: Mapping[str, Any] | None = None,
    **settings: Any,
) -> EvaluationResult:
    """Encode a corpus and its queries, search, and score.

    Args:
        model: a SentenceTransformer.
        k_values: cut-offs of the metrics; as many documents as the greatest are retrieved.
        served: see `plan_served`; the embeddings are then scored in these forms too.
        settings: those of `search` and `plan_search`.

    Raises:
        ConfigError: settings that are out of range or do not fit the model or the data; before anything is encoded.
    """
    k_values = check_k_values(k_values)
    warn_of_ignored_judgements(dataset.qrels, dataset.name)
    run, about, (asked, documents) = search(
        model, dataset.corpus, dataset.queries, max(k_values), **settings
    )
    if served:
        rows = score_served(dataset, asked, documents, about["model"]["similarity"], **served)
        about["served"] = {**served, "rows": rows}
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
    warn_of_ignored_judgements(dataset.qrels, dataset.name)
    metrics, per_query = score_run(dataset.qrels, top, k_values)
    data = about_data(dataset) | {"queries_without_results": len(dataset.qrels) - len(top)}
    return EvaluationResult(
        metrics, per_query, top, data, model={"name": name}, search={"k": deepest}
    )


def about_data(dataset: BeirDataset) -> dict[str, Any]:
    """What a result or a report says about a data set."""
    about = {
        "name": dataset.name,
        "split": dataset.split,
        "path": str(dataset.path),
        "documents": len(dataset.corpus),
        "queries": len(dataset.queries),
        "judgements": sum(map(len, dataset.qrels.values())),
        "fingerprint": dataset.fingerprint,
    }
    ignored = len(ignored_judgements(dataset.qrels))
    if ignored:
        about["ignored_judgements"] = ignored
    return about


def load_data(
    given: str | os.PathLike[str],
    split: str | None = None,
    on_bad_record: Literal["stop", "skip"] = "stop",
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
) -> tuple[Run, dict[str, Any], Any]:
    """The k best documents of every query; what a result says of model, tokenisation, search, timing and precision; and
    the embeddings of queries and documents.

    Args:
        corpus: {document id: {"title", "text"}}.
        model_name: what the result calls the model.
        similarity, settings: those of `plan_search`, which is called first.
    """
    from contaccum.retrieval.searcher import FaissSearcher

    about = plan_search(model, len(corpus), k, similarity=similarity, **settings)
    searcher = FaissSearcher(model, show_progress_bar=show_progress, **settings)
    run = searcher.search(corpus, queries, k, similarity)
    about["model"]["name"] = model_name
    about["search"] |= searcher.search_details
    return run, {**about, "timing": searcher.timing}, searcher.embeddings


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
    from contaccum.retrieval.encode import get_metric, model_fingerprint, tokenisation_fingerprint
    from contaccum.retrieval.index import check_factory

    if batch_size < 1:
        raise ConfigError(f"batch_size must be at least 1, not {batch_size}")
    metric = get_metric(model, similarity)
    dimension = model.get_embedding_dimension()
    _, index_parameters = check_factory(index, dimension, documents, metric, index_parameters)
    return {
        "model": {
            "fingerprint": model_fingerprint(model),
            "similarity": metric,
            "dimension": dimension,
        },
        "tokenisation": tokenisation_fingerprint(model),
        "search": {"index": index, "index_parameters": index_parameters, "k": k},
        "precision": precision,
    }


def plan_served(
    dimension: int, dims: Sequence[int] | None, types: Sequence[str], rescore: int, metric: str
) -> dict[str, Any]:
    """The ``served`` of `evaluate_beir`: sizes times types, float32 of all dimensions first.

    Args:
        dims: the first so many numbers of an embedding, as a model trained with `matryoshka_dims` has them; None: all.
        types: of "float32", "float16", "int8" and "binary".
        rescore: of binary so many times the results are found by Hamming distance, and scored by float32 queries.
        metric: such as "NDCG@10".

    Raises:
        ConfigError: sizes that the embeddings have not, or that are no whole bytes of bits.
    """
    from contaccum.retrieval.quantization import check_binary_dimension

    sizes = list(dict.fromkeys(dims or [dimension]))
    if not all(1 <= size <= dimension for size in sizes):
        raise ConfigError(
            f"--dims {' '.join(map(str, sizes))}: the model's embeddings have {dimension} dimensions"
        )
    forms = dict.fromkeys(
        [(dimension, "float32"), *((size, name) for name in types for size in sizes)]
    )
    for size, name in forms:
        check_binary_dimension(name, size)
    return {"forms": [list(form) for form in forms], "rescore": rescore, "metric": metric}


def score_served(
    dataset: BeirDataset,
    queries: np.ndarray,
    documents: np.ndarray,
    similarity: Literal["cos", "dot"],
    forms: Sequence[Sequence[Any]],
    rescore: int,
    metric: str,
) -> list[dict[str, Any]]:
    """A row for each form (dimensions, type) of a corpus's embeddings: score, bytes and speed, beside the first form.

    Queries are float32 always. Speed is the best of three searches of all queries at once.
    """
    from sentence_transformers.util.quantization import semantic_search_faiss

    from contaccum.retrieval.exact_search import prepare_vectors
    from contaccum.retrieval.index import build_index, search
    from contaccum.retrieval.quantization import QuantizedEmbeddings

    names, cut = list(dataset.corpus), int(metric.partition("@")[2])
    rows: list[dict[str, Any]] = []
    first: list[float] = []
    k = min(cut + 1, len(names))  # one more: the query's own document may be there
    for size, kind in forms:
        asked = prepare_vectors(queries[:, :size], similarity, "query embedding")
        vectors = prepare_vectors(documents[:, :size], similarity, "document embedding")
        codes = QuantizedEmbeddings.quantize(vectors, kind)
        fastest = float("inf")
        for _ in range(3):
            started = time.perf_counter()
            if kind == "binary":
                how: Any = {
                    "corpus_precision": "ubinary",
                    "rescore_multiplier": min(rescore, len(names) // k),
                }
                lines, *_ = semantic_search_faiss(asked, codes.values, top_k=k, **how)
                found: Any = [[(hit["corpus_id"], hit["score"]) for hit in line] for line in lines]
            else:
                scores, places = search(build_index(codes, metric="dot"), asked, k)
                found = [
                    zip(*line, strict=True)
                    for line in zip(places.tolist(), scores.tolist(), strict=True)
                ]
            fastest = min(fastest, time.perf_counter() - started)
        run = {
            q: {names[row]: hit for row, hit in hits}
            for q, hits in zip(dataset.queries, found, strict=True)
        }
        means, per_query = score_run(dataset.qrels, run, [cut])
        values = [one[metric] for one in per_query.values()]
        first = first or values
        row = {
            "dimensions": size,
            "type": kind,
            metric: means[metric],
            **paired_bootstrap(values, first),
        }
        row |= {
            "bytes_per_document": codes.values.nbytes // len(codes),
            "queries_per_second": len(run) / fastest,
        }
        rows.append(row)
    return rows


class EvaluationSet(NamedTuple):
    """One data set to score on: what `load_data` takes, what tables call it, and where its record goes."""

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
        parts = {
            f"cqadupstack/{forum}": os.path.join(folder, forum) for forum in CQADUPSTACK_FORUMS
        }
        sets = {set_name(folder): item}  # "." has a name too
        if all(map(is_beir_folder, parts.values())):
            sets = parts
        elif item == "cqadupstack":
            sets = {label: label for label in parts}
        if again := sets.keys() & found:
            raise ConfigError(f"--data: two sets are called {min(again)}; evaluate them apart")
        found |= sets
    return place(found, output)


def place(found: Mapping[str, str], output: Path) -> list[EvaluationSet]:
    """Sets, {label: what is given for it}, with the records' places that `evaluation_sets` names."""
    if len(found) == 1:
        return [EvaluationSet(item, label, output) for label, item in found.items()]
    names = {label: f".{label.replace('/', '-')}.json" for label in found}
    return [
        EvaluationSet(item, label, output.with_suffix(names[label]))
        for label, item in found.items()
    ]
