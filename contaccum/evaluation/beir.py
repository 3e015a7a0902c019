"""BEIR evaluation: which sets a name stands for, and a model's or a run's score on one of them.

Puts data, search and metrics together. Whatever can be wrong is refused before the first text is encoded. Reranking,
sparse and late-interaction models are out of scope, and tables are made in `tables`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from contaccum.data import (
    CQADUPSTACK_FORUMS,
    PUBLIC_NAMES,
    BeirDataset,
    default_split,
    load_beir_folder,
    resolve_beir_data,
)
from contaccum.data.beir import is_beir_folder
from contaccum.errors import ConfigError, DataError
from contaccum.evaluation.metrics import DEFAULT_K_VALUES, check_k_values, score_run, trec_order
from contaccum.evaluation.results import EvaluationResult, Run

# One set -------------------------------------------------------------------------------------------------------------


def evaluate_beir(
    model: Any,
    dataset: BeirDataset | str | os.PathLike[str],
    k_values: Sequence[int] = DEFAULT_K_VALUES,
    **settings: Any,
) -> EvaluationResult:
    """Encode a corpus and its queries, search, and score.

    Args:
        model: a SentenceTransformer, or an object with `encode_queries` and `encode_corpus` as BEIR calls them.
        dataset: loaded data, or what :func:`load_data` takes: a BEIR folder or the name of a public set.
        k_values: cut-offs of the metrics; as many documents as the greatest are retrieved.
        settings: those of :func:`search` and :func:`plan_search`.

    Raises:
        ConfigError: settings that are out of range or do not fit the model or the data; before anything is encoded.
        DataError: data that cannot be used.
    """
    k_values = check_k_values(k_values)
    if not isinstance(dataset, BeirDataset):
        dataset = load_data(dataset)
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
        first = next(iter(run), "nothing")
        raise DataError(f"{name}: has results for {first!r:.60}, and for none of {dataset.name}'s judged queries")
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


# Searching with a model ----------------------------------------------------------------------------------------------


def search(
    model: Any,
    corpus: Mapping[str, Mapping[str, str]],
    queries: Mapping[str, str],
    k: int,
    show_progress: bool = True,
    model_name: str | None = None,
    **settings: Any,
) -> tuple[Run, dict[str, Any]]:
    """The k best documents of every query, and what a result says of model, tokenisation, search, timing and precision.

    Args:
        corpus: {document id: {"title", "text"}}.
        model_name: what the result calls the model.
        settings: those of :func:`plan_search`, which is called first.
    """
    from contaccum.retrieval.searcher import FaissSearcher

    about = plan_search(model, len(corpus), k, **settings)
    names = ("batch_size", "index", "index_parameters", "autocast_dtype")
    chosen = {name: settings[name] for name in names if name in settings}
    searcher = FaissSearcher(model, show_progress_bar=show_progress, **chosen)
    run = searcher.search(corpus, queries, k, about["model"]["similarity"])
    found = searcher.last_index
    assert found is not None  # there is one after a search
    about["model"] |= {"name": model_name, "dimension": found.corpus.shape[1]}
    about["search"]["gpus"] = found.gpus
    if searcher.recall:
        about["search"]["recall"] = searcher.recall
    rate = len(corpus) / max(searcher.timing["encode_corpus_seconds"], 1e-9)
    return run, {**about, "timing": {**searcher.timing, "documents_per_second": rate}}


def plan_search(
    model: Any,
    documents: int,
    k: int,
    index: str = "Flat",
    index_parameters: str | None = None,
    batch_size: int = 32,
    similarity: Literal["cos", "dot"] | None = None,
    autocast_dtype: str | None = None,
) -> dict[str, Any]:
    """What decides the scores of a search of so many documents, as far as a result's record says it before the search.

    Args:
        index, index_parameters: see `build_index`; "Flat" is exact.
        batch_size: texts encoded at once.
        similarity: None is the model's own (`similarity_fn_name`, cosine where it says nothing).
        autocast_dtype: None for float32, "bfloat16" or "float16".

    Raises:
        ConfigError: settings that cannot work, which would otherwise show after hours of encoding.
    """
    from contaccum.retrieval.encode import model_fingerprint, tokenisation_contract
    from contaccum.retrieval.index import check_factory, default_parameters
    from contaccum.retrieval.searcher import FaissSearcher

    if batch_size < 1:
        raise ConfigError(f"batch_size must be at least 1, not {batch_size}")
    metric = FaissSearcher(model, autocast_dtype=autocast_dtype).metric(similarity)
    dimension = getattr(model, "truncate_dim", None)
    if dimension is None and hasattr(model, "get_embedding_dimension"):
        dimension = model.get_embedding_dimension()
    if dimension is not None:  # a model of BEIR's kind says nothing before it has encoded
        empty = check_factory(index, dimension, documents, metric, index_parameters)
        index_parameters = index_parameters or default_parameters(empty)
    return {
        "model": {"fingerprint": model_fingerprint(model), "similarity": metric},
        "tokenisation": tokenisation_contract(model),
        "search": {"index": index, "index_parameters": index_parameters, "k": k},
        "precision": autocast_dtype or "float32",
    }


# Several sets --------------------------------------------------------------------------------------------------------


@dataclass
class EvaluationSet:
    """One data set to score on.

    Attributes:
        given, split: what `resolve_beir_data` takes.
        label: what tables call it, and files, with - for /.
        row: the row of the table that it belongs to; its own label, or "cqadupstack".
        output: where its record goes.
        documents, fingerprint: of its data, once :meth:`read` was called.
    """

    given: str
    split: str
    label: str
    row: str
    output: Path = Path()
    documents: int = 0
    fingerprint: str = ""

    def read(self, on_bad_record: Literal["stop", "skip"]) -> BeirDataset:
        """Its data; raises `DataError` when they cannot be used."""
        dataset = load_data(self.given, self.split, on_bad_record)
        self.documents, self.fingerprint = len(dataset.corpus), dataset.fingerprint
        return dataset


def evaluation_sets(given: Sequence[str], split: str | None, output: Path) -> list[EvaluationSet]:
    """Spell out ``--data``: `beir`, `cqadupstack` or a folder with its twelve parts, other names, other folders.

    Args:
        split: of all of them; None: `default_split` of each.
        output: where the record of a single set goes; of several, their names are made from it.

    Raises:
        ConfigError: two sets whose records would have one name.
    """
    sets = [one for item in given for one in _spelled_out(item, split)]
    if len(sets) == 1:
        return [replace(sets[0], output=output)]
    found: dict[Path, EvaluationSet] = {}
    for one in sets:
        path = output.with_suffix(f".{one.label.replace('/', '-')}.json")
        if path in found:
            both = f"--data {found[path].given} and {one.given}"
            raise ConfigError(f"{both} would both be written to {path}; run them apart")
        found[path] = replace(one, output=path)
    return list(found.values())


def _spelled_out(given: str, split: str | None) -> Iterator[EvaluationSet]:
    folder = os.path.expanduser(given)
    parts = [os.path.join(folder, forum) for forum in CQADUPSTACK_FORUMS]
    if given == "beir" and not is_beir_folder(folder):
        for name in PUBLIC_NAMES:
            yield from _spelled_out(name, split)
    elif (given == "cqadupstack" and not os.path.exists(folder)) or all(map(is_beir_folder, parts)):
        for forum, part in zip(CQADUPSTACK_FORUMS, parts, strict=True):
            label = f"cqadupstack/{forum}"
            yield EvaluationSet(part if os.path.exists(part) else label, split or "test", label, "cqadupstack")
    else:
        above, label = os.path.split(os.path.abspath(folder))
        # Its parts have the same names in every copy, and "android" alone says little.
        label = f"cqadupstack/{label}" if label in CQADUPSTACK_FORUMS and above.endswith("cqadupstack") else label
        yield EvaluationSet(given, split or default_split(given), label, label)
