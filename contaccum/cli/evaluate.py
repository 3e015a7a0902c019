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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contaccum.cli.options import SEARCH_OPTIONS, Parser, require_models
from contaccum.cli.scoring import parse_scoring_arguments
from contaccum.defaults import DEFAULT_K_VALUES
from contaccum.errors import ConfigError
from contaccum.files import write_json, write_text

if TYPE_CHECKING:
    from contaccum.cli.evaluation_sets import DataSets


def run(argv: Sequence[str]) -> int:
    """Score a model or a run, write records and tables, and return exit code 0.

    Raises:
        UserError: if the arguments, the data, the model or the run cannot be used.
    """
    args = _parse_arguments(argv)
    require_models(args.model)
    from contaccum.cli.evaluation_sets import (
        make_scorer,
        open_beir_sets,
        score_sets,
    )
    from contaccum.evaluation import metrics, tables
    from contaccum.evaluation.endpoint import endpoint_tables

    shown_metrics = metrics.check_metrics(args.metrics, args.k_values)
    main_metric = shown_metrics[0]
    data_sets = open_beir_sets(args)
    # Earlier results are read first, because this evaluation may replace their files.
    earlier_scores = _read_earlier_scores(args.compare, data_sets, main_metric)
    scorer = make_scorer(args, data_sets)
    records = score_sets(data_sets, scorer, args.k_values)

    labels = [evaluation_set.label for evaluation_set in data_sets.sets]
    scores = _pop_query_scores(labels, records, main_metric)
    comparisons = []
    for path, earlier in earlier_scores.items():
        comparisons.append(tables.compare(path, main_metric, scores, earlier))
    rows = tables.table_rows(data_sets.sets, records)
    sections = [tables.sets_table(rows, shown_metrics)]
    for label, record in zip(labels, records, strict=True):
        if record.get("endpoint"):
            title = f"## {label}: the embedding server and the model"
            sections.append(f"{title}\n\n{endpoint_tables(record, shown_metrics)}")
    for comparison in comparisons:
        sections.append(tables.comparison_table(comparison))
    text = "\n\n".join(sections)

    if len(data_sets.sets) > 1:
        write_json(args.output, _summarize(args, records[0], rows, shown_metrics))
    if comparisons:
        write_json(args.output.with_suffix(".compare.json"), comparisons)
    title = f"# Evaluation of {args.model or args.run}"
    write_text(args.output.with_suffix(".md"), f"{title}\n\n{text}\n")
    print(text)
    print(f"written: {args.output}, with runs and tables beside it")
    return 0


def _parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line, and refuse options that cannot be combined."""
    parser = _make_parser()
    args = parse_scoring_arguments(parser, argv, Path("results.json"), DEFAULT_K_VALUES)
    if args.endpoint is None:
        parser.refuse_given(args, ["query_endpoint", "served_model"], "needs --endpoint")
    elif args.run is not None:
        raise ConfigError("--endpoint needs a MODEL, which it is compared with, and no --run")
    return args


def _make_parser() -> Parser:
    """Return the parser, without the options that `parse_scoring_arguments` adds."""
    parser = Parser(
        "evaluate",
        "Score a model or a run on BEIR data with FAISS.",
        *SEARCH_OPTIONS,
        usage="contaccum evaluate (MODEL | --run RUN) --data SET ... [OPTIONS]",
    )
    parser.add_argument(
        "--data",
        nargs="+",
        required=True,
        metavar="SET",
        help="BEIR folders, names of public BEIR sets, or beir for all public sets",
    )
    _add_table_options(parser)
    _add_endpoint_options(parser)
    parser.add_argument("--split", help="split of the judgements; default: test, for msmarco dev")
    return parser


def _add_table_options(parser: Parser) -> None:
    """Add the options of the tables and of comparisons."""
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


def _add_endpoint_options(parser: Parser) -> None:
    """Add the options of embedding servers."""
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


def _read_earlier_scores(
    paths: Sequence[Path], data_sets: DataSets, metric: str
) -> dict[Path, dict[str, Any]]:
    """Return {path of an earlier result: {label of a set: {query id: score}}}.

    Earlier and new sets are matched by the fingerprints of their data, and not by their names.
    """
    from contaccum.evaluation import tables

    labels = {}
    for evaluation_set, description in zip(data_sets.sets, data_sets.descriptions, strict=True):
        labels[description["fingerprint"]] = evaluation_set.label
    return {path: tables.read_previous(path, labels, metric) for path in paths}


def _pop_query_scores(
    labels: Sequence[str], records: Sequence[dict[str, Any]], metric: str
) -> dict[str, dict[str, float]]:
    """Return {label of a set: {query id: score}}, and remove these scores from the records."""
    scores = {}
    for label, record in zip(labels, records, strict=True):
        per_query = record.pop("per_query")
        scores[label] = {query_id: values[metric] for query_id, values in per_query.items()}
    return scores


def _summarize(
    args: argparse.Namespace,
    record: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    shown_metrics: Sequence[str],
) -> dict[str, Any]:
    """Return the JSON content of the table of several sets.

    Args:
        record: the record of any of the sets; the values that are read are equal in all of them.
    """
    from contaccum.evaluation import tables

    return {
        "model": record["model"],
        "tokenisation": record["tokenisation"],
        "precision": record["precision"],
        "versions": record["versions"],
        "git_commit": record["git_commit"],
        "search": {"index": record["search"]["index"], "k": max(args.k_values)},
        "shown": shown_metrics,
        "sets": rows,
        "mean": tables.mean_metrics(rows),
    }
