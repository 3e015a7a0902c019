"""Data sets that `contaccum evaluate` scores on, and the three ways to score one of them.

There are three ways to score a data set: search with a model, search with an embedding server, or
read a run from a file.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from contaccum.cli.options import get_search_settings, load_model
from contaccum.encoders.settings import get_prompt
from contaccum.encoders.towers import Kind, is_tied
from contaccum.errors import ConfigError
from contaccum.evaluation import beir_sets, results
from contaccum.evaluation.beir_sets import EvaluationSet
from contaccum.evaluation.endpoint import EmbeddingEndpoint, evaluate_endpoint
from contaccum.evaluation.metrics import metric_names

if TYPE_CHECKING:
    from contaccum.encoders.dual_encoder import DualEncoder


class DataSets(NamedTuple):
    """The data sets to score on.

    Attributes:
        sets: label and output file of each data set.
        descriptions: the part of each set's record that describes its data.
        load: returns the `BeirDataset` of a set.
    """

    sets: Sequence[EvaluationSet]
    descriptions: Sequence[Mapping[str, Any]]
    load: Callable[[EvaluationSet], Any]


class Scorer(NamedTuple):
    """A way to score data sets.

    Attributes:
        plans: the part of each set's record that describes the model and the search. A record of
            an earlier evaluation is used again if it agrees with the plan.
        score: returns the `EvaluationResult` for what `DataSets.load` returns.
        is_repeatable: True if equal plans have equal results, so that an earlier record can be used
            again. It is False for a server, which may change between two evaluations.
    """

    plans: Sequence[Mapping[str, Any]]
    score: Callable[[Any], results.EvaluationResult]
    is_repeatable: bool = True


def open_beir_sets(args: argparse.Namespace) -> DataSets:
    """Read the sets of ``--data``.

    Raises:
        UserError: if a set cannot be read, or ``--run`` is given with several sets.
    """
    sets = beir_sets.evaluation_sets(args.data, args.output)
    if args.run is not None and len(sets) > 1:
        raise ConfigError(
            f"--run has the results of one data set, and --data names {len(sets)}: name one set"
        )

    def load(evaluation_set: EvaluationSet) -> Any:
        return beir_sets.load_data(evaluation_set.source, args.split, args.on_bad_record)

    # All sets are read before the first one is encoded. Otherwise a bad record in the last set
    # would end the command after hours of encoding. Several large sets do not fit into memory at
    # the same time, so only a single set is kept.
    if len(sets) == 1:
        dataset = load(sets[0])
        description = beir_sets.describe_data(dataset)
        return DataSets(sets, [description], lambda evaluation_set: dataset)
    descriptions = [beir_sets.describe_data(load(evaluation_set)) for evaluation_set in sets]
    return DataSets(sets, descriptions, load)


def make_scorer(args: argparse.Namespace, data_sets: DataSets) -> Scorer:
    """Return the way to score that the command line asks for.

    Raises:
        UserError: if the model, the run or the settings cannot be used.
    """
    if args.run is not None:
        return _make_run_scorer(args)
    return _make_model_scorer(args, data_sets.descriptions)


def _make_run_scorer(args: argparse.Namespace) -> Scorer:
    """Return a scorer of the run in a file."""
    run = results.read_trec_run(args.run, args.on_bad_record)
    score = partial(beir_sets.score_beir_run, run=run, k_values=args.k_values, name=str(args.run))
    return Scorer([{}], score)


def _make_model_scorer(
    args: argparse.Namespace, descriptions: Sequence[Mapping[str, Any]]
) -> Scorer:
    """Return a scorer that searches with FAISS; the model or an embedding server encodes."""
    model = load_model(args.model, args)
    search_settings = get_search_settings(args)
    plans = []
    for description in descriptions:
        num_documents = description["documents"]
        plan = beir_sets.plan_search(model, num_documents, max(args.k_values), **search_settings)
        plan["model"]["name"] = args.model  # a copy of the model has the same fingerprint
        plans.append(plan)
    settings = {
        "k_values": args.k_values,
        "model_name": args.model,
        "show_progress": not args.no_progress,
        **search_settings,
    }
    if args.endpoint:
        score = partial(evaluate_endpoint, model, endpoints=_connect(args, model), **settings)
    else:
        score = partial(beir_sets.evaluate_beir, model, **settings)
    return Scorer(plans, score, is_repeatable=not args.endpoint)


def _connect(args: argparse.Namespace, model: DualEncoder) -> dict[Kind, EmbeddingEndpoint]:
    """Return {kind: client of the server of these texts}. Nothing is sent yet."""
    if args.query_endpoint is None and not is_tied(model):
        raise ConfigError(
            "this model has two towers, which need two servers: name the server of the documents "
            "by --endpoint, and the server of the queries by --query_endpoint"
        )
    # By its type in sentence-transformers, the dimension may be None. A DualEncoder always has one.
    dimension = model.get_embedding_dimension()
    assert dimension is not None
    urls: dict[Kind, str] = {
        "query": args.query_endpoint or args.endpoint,
        "document": args.endpoint,
    }
    endpoints = {}
    for kind, url in urls.items():
        endpoints[kind] = EmbeddingEndpoint(
            url,
            args.served_model or args.model,
            get_prompt(model, kind),
            dimension,
            args.batch_size,
            not args.no_progress,
        )
    return endpoints


def score_sets(
    data_sets: DataSets, scorer: Scorer, k_values: Sequence[int]
) -> list[dict[str, Any]]:
    """Score every data set, write its result, and return the records.

    If there are several sets, the record of an earlier evaluation with the same model, data and
    settings is used again. A single set, and the embeddings of a server, are always scored anew.
    """
    records = []
    for evaluation_set, description, plan in zip(
        data_sets.sets, data_sets.descriptions, scorer.plans, strict=True
    ):
        record = None
        if len(data_sets.sets) > 1 and scorer.is_repeatable:
            expected = {**plan, "data": description}
            record = _read_finished_record(evaluation_set.output, expected, k_values)
        if record is None:
            result = scorer.score(data_sets.load(evaluation_set))
            results.write_result(result, evaluation_set.output)
            record = result.record()
        else:
            print(f"kept: {evaluation_set.output} (same model, data and settings)")
        records.append(record)
    return records


def _read_finished_record(
    path: Path, expected: Mapping[str, Any], k_values: Sequence[int]
) -> dict[str, Any] | None:
    """Return the record of an earlier evaluation, or None if it is missing or differs.

    Args:
        expected: values that the record must hold.
        k_values: cut-offs of the metrics that the record must hold.
    """
    if not path.exists():
        return None
    record = results.read_result(path)
    if record.get("endpoint"):
        return None
    has_same_metrics = record["metrics"].keys() == set(metric_names(k_values))
    if has_same_metrics and results.agrees(record, expected):
        return record
    return None
