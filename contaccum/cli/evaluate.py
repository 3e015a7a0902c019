"""`contaccum evaluate MODEL --data SET ...`: score a model or a run on retrieval data sets.

docs/evaluation.md describes the files: out.json, the record of a set or the table of several, which
have records of their own; runs; tables; and the comparison with a baseline.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from contaccum.cli.options import ENCODING_OPTIONS, MODEL_HELP, Parser, load_model, print_at_once
from contaccum.data.near_duplicates import group_queries
from contaccum.encoders.names import require_model
from contaccum.errors import ConfigError, DataError
from contaccum.evaluation import beir, metrics, results
from contaccum.files import require_writable, write_json, write_text


def run(argv: Sequence[str]) -> int:
    """Score a model or a run; return exit code 0, or 1 if it does not meet ``--require``."""
    args = _parse_arguments(argv)
    shown_metrics = metrics.check_metrics(args.metrics)
    k_values = metrics.get_k_values(shown_metrics)
    main_metric = shown_metrics[0]
    sources = beir.evaluation_sets(args.data)
    if args.run is not None and len(sources) > 1:
        raise ConfigError(
            f"--run has the results of one data set, and --data names {len(sources)}: name one set"
        )
    print_at_once(f"evaluating {args.model or args.run} on {', '.join(sources)}")
    if args.model is not None:
        require_model(args.model)
    files = dict.fromkeys(sources, args.output)
    if len(sources) > 1:
        for label in sources:
            files[label] = args.output.with_suffix(f".{label.replace('/', '-')}.json")
    earlier = {}
    if args.baseline is not None:  # read first, because this evaluation may replace its file
        earlier = results.read_previous(args.baseline, main_metric)
    model: Any = None
    settings = {
        "k_values": k_values,
        "model_name": args.model,
        "show_progress": not args.no_progress,
        "index": args.index,
        "index_parameters": args.index_parameters,
        "batch_size": args.batch_size,
        "similarity": args.similarity,
        "precision": args.precision,
    }
    records = {}  # {label of a set: its record, without the scores of each query}
    comparisons = []  # with the baseline, one of each set
    for label, source in sources.items():
        dataset = beir.load_data(source, args.split, args.on_bad_record)
        # Sets are matched by the fingerprints of their data, and not by their names.
        theirs = earlier.get(dataset.fingerprint, {})
        if args.baseline is not None and theirs.keys() != dataset.qrels.keys():
            raise DataError(
                f"--baseline {args.baseline}: is on other data or queries than {label} (name a "
                "result on the same data, or evaluate again)"
            )
        if args.model is not None:
            model = model or load_model(args.model, args)
        if args.run is not None:
            trec_run = results.read_trec_run(args.run, args.on_bad_record)
            result = beir.score_beir_run(dataset, trec_run, k_values, str(args.run))
            record = results.write_result(result, files[label])
        elif args.endpoint is None:
            record = beir.evaluate_once(model, dataset, files[label], **settings)
        else:
            from contaccum.evaluation.endpoint import evaluate_endpoint

            servers = (args.endpoint, args.query_endpoint, args.served_model)
            result = evaluate_endpoint(model, dataset, *servers, **settings)
            record = results.write_result(result, files[label])
        per_query = record.pop("per_query")
        if args.baseline is not None:
            ours = {query: values[main_metric] for query, values in per_query.items()}
            comparisons.append(results.compare(label, ours, theirs, group_queries(dataset)))
        records[label] = record

    table = results.make_table(files, records, shown_metrics)
    if len(sources) > 1:
        write_json(args.output, table)
    sections = [results.sets_table(table)]
    for label, record in records.items():
        if record.get("endpoint"):
            from contaccum.evaluation.endpoint import endpoint_tables

            title = f"## {label}: the embedding server and the model"
            sections.append(f"{title}\n\n{endpoint_tables(record, shown_metrics)}")
    if args.baseline is not None:
        metrics.add_holm(comparisons)
        content = {"earlier": str(args.baseline), "metric": main_metric, "rows": comparisons}
        write_json(args.output.with_suffix(".compare.json"), content)
        title = f"## {main_metric} against {args.baseline}"
        sections.append(f"{title}\n\n{results.comparison_table(comparisons)}")
    text = "\n\n".join(sections)
    title = f"# Evaluation of {args.model or args.run}"
    write_text(args.output.with_suffix(".md"), f"{title}\n\n{text}\n")
    print(text)
    print(f"written: {args.output}, with runs and tables beside it")
    exit_code = 0
    for row in comparisons if args.require is not None else ():
        is_met, line = results.check_requirement(args.require, main_metric, row)
        print(f"{line}; baseline {args.baseline}")
        exit_code = exit_code if is_met else 1
    return exit_code


def _parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        "evaluate",
        "Score a model or a run on BEIR data.",
        *("index", "index_parameters", "similarity", "query_max_length"),
        *ENCODING_OPTIONS,
        usage="contaccum evaluate (MODEL | --run RUN) --data SET ... [OPTIONS]",
    )
    add = parser.add_argument
    sets = "BEIR folders, names of public BEIR sets, or beir for all public sets"
    add("--data", nargs="+", required=True, metavar="SET", help=sets)
    add("model", nargs="?", metavar="MODEL", help=MODEL_HELP)
    run_help = "score this run instead of searching with a MODEL"
    add("--run", type=Path, metavar="RUN.trec", help=run_help)
    output = "results; of several data sets, OUT.NAME.json for each; default: %(default)s"
    add("--output", type=Path, default=Path("results.json"), metavar="OUT.json", help=output)
    shown = "metrics that the tables show; the records hold more"
    add("--metrics", nargs="+", metavar="METRIC@K", help=shown)
    baseline = "compare with this earlier result by the first of --metrics"
    add("--baseline", type=Path, metavar="EARLIER.json", help=baseline)
    add(
        "--require",
        choices=("not-worse", "better"),
        help="exit code 1 if a set is significantly worse than in the --baseline, or if it is not "
        "significantly better; in both cases, if too few scores have changed to tell",
    )
    add(
        "--endpoint",
        metavar="URL",
        help="an OpenAI-compatible embedding server that encodes in place of MODEL, which it is "
        "compared with; its key is read from CONTACCUM_ENDPOINT_KEY",
    )
    query_endpoint = "the server of the queries, if MODEL has two towers"
    add("--query_endpoint", metavar="URL", help=query_endpoint)
    served_model = "name of the model in requests; default: MODEL"
    add("--served_model", metavar="NAME", help=served_model)
    add("--split", help="split of the judgements; default: test, for msmarco dev")
    args = parser.parse(argv)
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
    if args.require is not None:
        if args.baseline is None:
            raise ConfigError("--require needs --baseline, the earlier result to compare with")
        if args.output.resolve() == args.baseline.resolve():
            raise ConfigError(
                f"--output {args.output}: would replace the --baseline; choose another name"
            )
    require_writable(args.output)
    if args.query_endpoint is not None and args.endpoint is None:
        raise ConfigError("--query_endpoint needs --endpoint, the server of the documents")
    return args
