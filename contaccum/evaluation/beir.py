"""BEIR evaluation: the data sets that a name stands for, and the scores of a model or a run on one.

A run is the result of a search, {query id: {document id: score}}, of a model or of any other
system. A record is the content of the JSON file of an evaluation (see `results`). Wrong settings
are refused before the first text is encoded.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from contaccum.data import CQADUPSTACK_FORUMS, PUBLIC_NAMES, BeirDataset, get_default_split
from contaccum.data.beir import get_set_name, is_beir_folder, load_beir_folder, resolve_beir_data
from contaccum.defaults import DEFAULT_K_VALUES
from contaccum.errors import ConfigError, DataError
from contaccum.evaluation.metrics import (
    check_k_values,
    ignored_judgements,
    score_run,
    sort_as_trec_eval,
    warn_of_ignored_judgements,
)
from contaccum.evaluation.results import EvaluationResult, Run

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

    from contaccum.retrieval.search import Encode


logger = logging.getLogger(__name__)


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
    num_ignored = len(ignored_judgements(dataset.qrels))
    if num_ignored > 0:
        description["ignored_judgements"] = num_ignored
    num_missing = len(dataset.list_missing_documents())
    if num_missing > 0:
        description["judgements_outside_corpus"] = num_missing
    return description


def load_data(
    source: str | os.PathLike[str],
    split: str | None = None,
    on_bad_record: Literal["stop", "skip"] = "stop",
) -> BeirDataset:
    """Load a BEIR data set.

    Args:
        source: a BEIR folder or a public name; see `resolve_beir_data`.
        split: split of the judgements; None: the default split of the data set.
        on_bad_record: "stop" or "skip" at a record that cannot be used.

    Raises:
        DataError: the data cannot be read or are empty.
    """
    split = split or get_default_split(source)
    folder = resolve_beir_data(os.fspath(source), split)
    return load_beir_folder(folder, split, on_bad_record)


def evaluate_beir(
    model: SentenceTransformer,
    dataset: BeirDataset,
    k_values: Sequence[int] = DEFAULT_K_VALUES,
    show_progress: bool = True,
    model_name: str | None = None,
    similarity: Literal["cos", "dot"] | None = None,
    encode_queries: Encode | None = None,
    encode_documents: Encode | None = None,
    **settings: Any,
) -> EvaluationResult:
    """Encode the corpus and the queries of a data set, search, and score.

    Args:
        model: a SentenceTransformer.
        dataset: the data set.
        k_values: cut-offs of the metrics. As many documents as the largest are retrieved.
        show_progress: show progress bars.
        model_name: name of the model in the record.
        similarity: see `plan_search`.
        encode_queries, encode_documents: functions that encode in place of the model; see
            `FaissSearcher`.
        settings: further settings of `plan_search`.

    Raises:
        ConfigError: a setting is out of range, or does not fit the model or the data. It is raised
            before anything is encoded.
    """
    from contaccum.retrieval.search import FaissSearcher

    k_values = check_k_values(k_values)
    warn_of_ignored_judgements(dataset.qrels, dataset.name)
    max_k = max(k_values)
    num_documents = len(dataset.corpus)
    plan = plan_search(model, num_documents, max_k, similarity=similarity, **settings)
    searcher = FaissSearcher(
        model,
        show_progress_bar=show_progress,
        encode_queries=encode_queries,
        encode_documents=encode_documents,
        **settings,
    )
    run = searcher.search(dataset.corpus, dataset.queries, max_k, similarity)
    plan["model"]["name"] = model_name
    plan["search"].update(searcher.search_details)
    metrics, per_query = score_run(dataset.qrels, run, k_values)
    data = describe_data(dataset)
    return EvaluationResult(metrics, per_query, run, data, timing=searcher.timing, **plan)


def plan_search(
    model: SentenceTransformer,
    documents: int,
    k: int,
    index: str = "Flat",
    index_parameters: str | None = None,
    batch_size: int = 32,
    similarity: Literal["cos", "dot"] | None = None,
    precision: str = "float32",
) -> dict[str, Any]:
    """Check the settings of a search, and return the fields of its record that it will have.

    The fields do not depend on the results, so that an earlier record can be compared with a
    planned search.

    Args:
        model: a SentenceTransformer.
        documents: number of documents in the corpus.
        k: number of documents per query.
        index: FAISS factory string; see `build_index`. "Flat" is exact.
        index_parameters: FAISS search parameters; see `build_index`.
        batch_size: texts per forward pass.
        similarity: "cos" or "dot"; None: the model's own (`similarity_fn_name`), cosine if the
            model has none.
        precision: "float32", or "bfloat16" or "float16" for autocast.

    Raises:
        ConfigError: settings cannot work, which would otherwise show only after hours of encoding.
    """
    from contaccum.retrieval.encode import (
        get_similarity,
        model_fingerprint,
        tokenisation_fingerprint,
    )
    from contaccum.retrieval.search import check_factory

    if batch_size < 1:
        raise ConfigError(f"batch_size must be at least 1, not {batch_size}")
    similarity = get_similarity(model, similarity)
    dimension = model.get_embedding_dimension()
    assert dimension is not None, "the model gives no embeddings of a fixed dimension"
    _, index_parameters = check_factory(index, dimension, documents, similarity, index_parameters)
    return {
        "model": {
            "fingerprint": model_fingerprint(model),
            "similarity": similarity,
            "dimension": dimension,
        },
        "tokenisation": tokenisation_fingerprint(model),
        "search": {"index": index, "index_parameters": index_parameters, "k": k},
        "precision": precision,
    }


def score_beir_run(
    dataset: BeirDataset, run: Mapping[str, Mapping[str, float]], k_values: Sequence[int], name: str
) -> EvaluationResult:
    """Score the run of any system.

    Judged queries without results count as zero. Results of other queries, documents with the id of
    their query, and results below the largest cut-off are ignored.

    Args:
        dataset: the data set.
        run: {query id: {document id: score}}.
        k_values: cut-offs of the metrics.
        name: name of the system in the result.

    Raises:
        DataError: the run has results for none of the judged queries.
    """
    max_k = max(check_k_values(k_values))
    best_hits: Run = {}
    for query_id in dataset.qrels:
        if query_id in run:
            hits = {
                document_id: score
                for document_id, score in run[query_id].items()
                if document_id != query_id
            }
            best_hits[query_id] = dict(sort_as_trec_eval(hits)[:max_k])
    if not best_hits:
        raise DataError(
            f"{name}: has results for none of {dataset.name}'s judged queries (check that the run "
            "and the data have the same query ids)"
        )
    warn_of_ignored_judgements(dataset.qrels, dataset.name)
    most_hits = max(len(hits) for hits in best_hits.values())
    if most_hits < min(max_k, len(dataset.corpus)):
        logger.warning(
            f"{name}: has at most {most_hits} results for a query of {dataset.name}: metrics at "
            "larger cut-offs count all other documents as not found"
        )
    metrics, per_query = score_run(dataset.qrels, best_hits, k_values)
    data = describe_data(dataset)
    data["queries_without_results"] = len(dataset.qrels) - len(best_hits)
    return EvaluationResult(
        metrics, per_query, best_hits, data, model={"name": name}, search={"k": max_k}
    )


class EvaluationSet(NamedTuple):
    """Data set to score on."""

    source: str  # folder or public name, for `load_data`
    label: str  # name in tables
    output: Path  # file of its record


def evaluation_sets(data: Sequence[str], output: Path) -> list[EvaluationSet]:
    """Return the data sets that the values of ``--data`` stand for.

    Args:
        data: folders and public names. "beir" stands for all public sets; "cqadupstack", or a
            folder with its twelve parts, stands for these parts. A label is the name of the set or
            of its folder; if several sets have the same name, the labels of folders begin with the
            name of the folder around them, such as "scifact/dev".
        output: file of the record of a single set. For several sets, their labels, with "-" for
            "/", are inserted before its suffix: out.json becomes out.cqadupstack-android.json.

    Raises:
        ConfigError: a set is named twice, or two files would have the same name.
    """
    named_sources: list[tuple[str, str]] = []  # (label, folder or public name)
    for item in data:
        # "beir" may also be a BEIR folder.
        is_all_of_beir = item == "beir" and not is_beir_folder(item)
        for name in PUBLIC_NAMES if is_all_of_beir else [item]:
            folder = os.path.expanduser(name)
            parts = {f"cqadupstack/{forum}": forum for forum in CQADUPSTACK_FORUMS}
            part_folders = {label: os.path.join(folder, forum) for label, forum in parts.items()}
            if all(map(is_beir_folder, part_folders.values())):
                named_sources.extend(part_folders.items())
            elif name == "cqadupstack":
                named_sources.extend((label, label) for label in parts)
            else:
                named_sources.append((get_set_name(folder), name))
    counts = Counter(label for label, _ in named_sources)
    sources: dict[str, str] = {}  # {label: folder or public name}
    for label, source in named_sources:
        is_public_name = source == label and not os.path.isdir(source)
        if counts[label] > 1 and not is_public_name:
            parent = os.path.dirname(os.path.abspath(os.path.expanduser(source)))
            label = f"{os.path.basename(parent)}/{label}"
        if label in sources:
            raise ConfigError(f"--data: two sets are called {label}; name each set once")
        sources[label] = source
    if len(sources) == 1:
        return [EvaluationSet(source, label, output) for label, source in sources.items()]
    sets = []
    names_in_use = {output.with_suffix(".compare.json")}  # the file of --compare
    for label, source in sources.items():
        suffix = f".{label.replace('/', '-')}.json"
        file = output.with_suffix(suffix)
        if file in names_in_use:
            raise ConfigError(f"{source}: another result has the name {file}; rename the folder")
        names_in_use.add(file)
        sets.append(EvaluationSet(source, label, file))
    return sets
