"""`contaccum evaluate MODEL --data SET ...`: score a model or a run on retrieval data sets.

A run is a list of retrieved documents with scores for each query. A record is a JSON file with
metrics, model, data and settings. With ``--output out.json``, these files are written:

- for one data set its record, out.json, and its run, out.trec;
- for several data sets out.NAME.json and out.NAME.trec each, and in out.json a table of all sets;
- the table as Markdown, out.md;
- with ``--compare``, comparisons with earlier results, out.compare.json.

With ``--endpoint``, an embedding server encodes the texts. The record and the tables then also
have the comparison of the server with MODEL.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contaccum.cli.options import ENCODING_OPTIONS, Parser, load_model
from contaccum.defaults import DEFAULT_K_VALUES
from contaccum.errors import ConfigError
from contaccum.files import require_writable, write_json, write_text

if TYPE_CHECKING:
    from contaccum.data import BeirDataset
    from contaccum.encoders.settings import Kind
    from contaccum.evaluation.beir import EvaluationSet


def run(argv: Sequence[str]) -> int:
    """Score a model or a run, write records and tables, and return exit code 0.

    Raises:
        UserError: if the arguments, the data, the model or the run cannot be used.
    """
    args = _parse_arguments(argv)
    from contaccum.data.near_duplicates import group_queries
    from contaccum.encoders.loading import require_model
    from contaccum.evaluation import beir as beir_sets
    from contaccum.evaluation import metrics, results, tables
    from contaccum.evaluation.endpoint import endpoint_tables

    if args.model is not None:
        require_model(os.path.expanduser(args.model))  # before all data are read
    shown_metrics = metrics.check_metrics(args.metrics, args.k_values)
    main_metric = shown_metrics[0]
    sets = beir_sets.evaluation_sets(args.data, args.output)
    if args.run is not None and len(sets) > 1:
        raise ConfigError(
            f"--run has the results of one data set, and --data names {len(sets)}: name one set"
        )

    def load(evaluation_set: EvaluationSet) -> BeirDataset:
        return beir_sets.load_data(evaluation_set.source, args.split, args.on_bad_record)

    if len(sets) == 1:
        load = cache(load)  # several large sets would not fit into memory at the same time
    # All sets are read before the first one is encoded. Otherwise a bad record in the last set
    # would end the command after hours of encoding.
    descriptions = [beir_sets.describe_data(load(evaluation_set)) for evaluation_set in sets]
    # Earlier results are read first, because this evaluation may replace their files. Earlier and
    # new sets are matched by the fingerprints of their data, and not by their names.
    labels = {}
    for evaluation_set, description in zip(sets, descriptions, strict=True):
        labels[description["fingerprint"]] = evaluation_set.label
    earlier_scores = {
        path: tables.read_previous(path, labels, main_metric) for path in args.compare
    }
    if args.run is not None:
        trec_run = results.read_trec_run(args.run, args.on_bad_record)
        result = beir_sets.score_beir_run(load(sets[0]), trec_run, args.k_values, str(args.run))
        results.write_result(result, args.output)
        records = [result.record()]
    else:
        records = _score_model(args, sets, descriptions, load)

    scores = {}  # {label of a set: {query id: score}}
    sections = []
    for evaluation_set, record in zip(sets, records, strict=True):
        per_query = record.pop("per_query")
        scores[evaluation_set.label] = {
            query_id: values[main_metric] for query_id, values in per_query.items()
        }
        if record.get("endpoint"):
            title = f"## {evaluation_set.label}: the embedding server and the model"
            sections.append(f"{title}\n\n{endpoint_tables(record, shown_metrics)}")
    rows = tables.table_rows(sets, records)
    groups = {}  # {label of a set: {query id: its group}}
    compared_labels = {label for earlier in earlier_scores.values() for label in earlier}
    for evaluation_set in sets:
        if evaluation_set.label in compared_labels:
            groups[evaluation_set.label] = group_queries(load(evaluation_set))
    comparisons = []
    for path, earlier in earlier_scores.items():
        comparison = tables.compare(path, main_metric, scores, earlier, groups)
        comparisons.append(comparison)
        sections.append(tables.comparison_table(comparison))
    text = "\n\n".join([tables.sets_table(rows, shown_metrics), *sections])

    if len(sets) > 1:
        first = records[0]  # the values that are read are equal in all records
        summary = {
            "model": first["model"],
            "tokenisation": first["tokenisation"],
            "precision": first["precision"],
            "versions": first["versions"],
            "git_commit": first["git_commit"],
            "search": {"index": first["search"]["index"], "k": max(args.k_values)},
            "shown": shown_metrics,
            "sets": rows,
            "mean": tables.mean_metrics(rows),
        }
        write_json(args.output, summary)
    if comparisons:
        write_json(args.output.with_suffix(".compare.json"), comparisons)
    title = f"# Evaluation of {args.model or args.run}"
    write_text(args.output.with_suffix(".md"), f"{title}\n\n{text}\n")
    print(text)
    print(f"written: {args.output}, with runs and tables beside it")
    return 0


def _parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line, and refuse options that cannot be combined."""
    from contaccum.evaluation.metrics import check_k_values

    parser = Parser(
        "evaluate",
        "Score a model or a run on BEIR data with FAISS.",
        *("index", "index_parameters", "similarity", "passage_max_length"),
        *ENCODING_OPTIONS,
        usage="contaccum evaluate (MODEL | --run RUN) --data SET ... [OPTIONS]",
    )
    parser.add_argument(
        "--data",
        nargs="+",
        required=True,
        metavar="SET",
        help="BEIR folders, names of public BEIR sets, or beir for all public sets",
    )
    parser.add_model("the encoder to search with: a folder, or a name on the model hub")
    parser.add_argument(
        "--run",
        type=Path,
        metavar="RUN.trec",
        help="score this run instead of searching with a MODEL",
    )
    parser.add_argument(
        "--output",
        default=Path("results.json"),
        type=Path,
        metavar="OUT.json",
        help="file of the results; with several data sets, OUT.NAME.json is written for each; "
        "default: %(default)s",
    )
    parser.add_argument(
        "--k_values",
        nargs="+",
        type=int,
        default=DEFAULT_K_VALUES,
        metavar="K",
        help=f"cut-offs of the metrics; default: {' '.join(map(str, DEFAULT_K_VALUES))}",
    )
    parser.add_argument(
        "--metrics",
        nargs="+",
        metavar="METRIC@K",
        help="metrics that the tables show; the records hold all metrics",
    )
    parser.add_argument(
        "--compare",
        nargs="+",
        type=Path,
        default=[],
        metavar="EARLIER.json",
        help="compare with these earlier results by the first of --metrics",
    )
    parser.add_argument(
        "--endpoint",
        metavar="URL",
        help="an OpenAI-compatible embedding server that encodes in place of MODEL, which it is "
        "compared with; its key is read from CONTACCUM_ENDPOINT_KEY",
    )
    parser.add_argument(
        "--query_endpoint",
        metavar="URL",
        help="the server of the queries, if MODEL has two towers",
    )
    parser.add_argument(
        "--served_model",
        metavar="NAME",
        help="name of the model in requests; default: MODEL",
    )
    parser.add_argument("--split", help="split of the judgements; default: test, for msmarco dev")
    args = parser.parse(argv)
    args.k_values = check_k_values(args.k_values)
    if (args.model is None) == (args.run is None):
        raise ConfigError(
            "name either a MODEL to search with, or a --run to score; write MODEL before options "
            f"that take several values (see {parser.prog} --help)"
        )
    if args.output.suffix != ".json":
        raise ConfigError(
            f"--output {args.output}: the output is JSON, with a .trec file beside it; "
            "end its name in .json"
        )
    if args.run is not None and args.run.resolve() == args.output.with_suffix(".trec").resolve():
        raise ConfigError(
            f"--output {args.output}: its .trec file would replace the --run; choose another name"
        )
    require_writable(args.output)
    if args.query_endpoint is not None and args.endpoint is None:
        raise ConfigError("--query_endpoint needs --endpoint, the server of the documents")
    return args


def _score_model(
    args: argparse.Namespace,
    sets: Sequence[EvaluationSet],
    descriptions: Sequence[Mapping[str, Any]],
    load: Callable[[EvaluationSet], BeirDataset],
) -> list[dict[str, Any]]:
    """Search every data set with the model or its server, write the results, return the records.

    If there are several sets, the record of an earlier evaluation with the same model, data and
    settings is used again. A single set is always scored anew, and so is a server, which may have
    changed.
    """
    from contaccum.encoders.settings import get_prompt, is_tied
    from contaccum.evaluation import beir as beir_sets
    from contaccum.evaluation import results
    from contaccum.evaluation.endpoint import EmbeddingEndpoint, evaluate_endpoint

    model = load_model(args.model, args)
    search_settings = {
        "index": args.index,
        "index_parameters": args.index_parameters,
        "batch_size": args.batch_size,
        "similarity": args.similarity,
        "precision": args.precision,
    }
    plans = []
    for description in descriptions:
        num_documents = description["documents"]
        plan = beir_sets.plan_search(model, num_documents, max(args.k_values), **search_settings)
        plan["model"]["name"] = args.model  # a copy of the model has the same fingerprint
        plans.append({**plan, "data": description})
    evaluate = partial(beir_sets.evaluate_beir, model)
    if args.endpoint:
        if args.query_endpoint is None and not is_tied(model):
            raise ConfigError(
                "this model has two towers, which need two servers: name the server of the "
                "documents by --endpoint, and the server of the queries by --query_endpoint"
            )
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
                plans[0]["model"]["dimension"],
                args.batch_size,
                not args.no_progress,
            )
        evaluate = partial(evaluate_endpoint, model, endpoints=endpoints)
    records = []
    for evaluation_set, plan in zip(sets, plans, strict=True):
        record = None
        if len(sets) > 1 and not args.endpoint:
            record = results.read_finished(evaluation_set.output, plan, args.k_values)
        if record is None:
            result = evaluate(
                load(evaluation_set),
                k_values=args.k_values,
                model_name=args.model,
                show_progress=not args.no_progress,
                **search_settings,
            )
            results.write_result(result, evaluation_set.output)
            record = result.record()
        else:
            print(f"kept: {evaluation_set.output} (same model, data and settings)")
        records.append(record)
    return records
