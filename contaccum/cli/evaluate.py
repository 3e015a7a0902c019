"""`contaccum evaluate`: a model on one or several BEIR sets, their table, and how it compares with others' results.

Everything is read and checked before the first text is encoded, and of several sets those whose result is there already
are not done again.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from contaccum.cli.options import SEARCH, Parser, load_model, search_settings
from contaccum.errors import ConfigError
from contaccum.files import require_writable, write_json, write_text

Records = list[dict[str, Any]]


def run(argv: Sequence[str] | None = None) -> int:
    """`contaccum evaluate MODEL --data SET [SET ...] --output out.json`, or `--run R.trec` and one set; returns 0.

    One set: its record and run, out.json and out.trec. Several: out.NAME.json and out.NAME.trec of each, and their
    table as out.json, out.md and out.csv. With `--compare`, also out.compare.json, and out.md in any case.

    Raises:
        UserError: for every mistake in the arguments, the data or the model.
    """
    args = _parse(argv)
    from contaccum.evaluation import tables
    from contaccum.evaluation.beir import evaluation_sets
    from contaccum.evaluation.metrics import check_k_values, check_metrics
    from contaccum.evaluation.results import read_result

    k_values = check_k_values(args.k_values)
    shown = check_metrics(args.metrics, k_values)
    sets = evaluation_sets(args.data, args.split, args.output)
    require_writable(args.output)
    comparison_path = args.output.with_suffix(".compare.json")
    if args.run is not None and len(sets) > 1:
        raise ConfigError(f"--run is of one set, and --data names {len(sets)}")
    if args.compare and comparison_path in [one.output for one in sets]:
        raise ConfigError(f"--compare and a set would both be written to {comparison_path}; choose another --output")
    # All are read before the first is encoded, so that a bad record in the last one does not cost a night.
    for one in sets:
        dataset = one.read(args.on_bad_record)
    only = dataset if len(sets) == 1 else None
    del dataset  # BEIR's larger sets do not fit in memory together
    previous = [tables.read_previous(path, sets, shown[0]) for path in args.compare]

    records = _evaluate(args, sets, only, k_values) if args.run is None else [_score_run(args, only, k_values)]
    rows = tables.table_rows(sets, records)
    comparisons = []
    if previous:
        ours = {one.label: tables.scores_of(read_result(one.output), shown[0], one.output) for one in sets}
        comparisons = [tables.compare(ours, one) for one in previous]
    found = [tables.table_section(rows, shown), tables.published_section(rows)]
    sections = [one for one in (*found, *map(tables.comparison_section, comparisons)) if one is not None]
    print(tables.as_text(sections))

    paths = [one.output for one in sets]
    if len(sets) > 1:
        about = {key: records[0][key] for key in ("model", "tokenisation", "precision", "versions", "git_commit")}
        about |= {"search": {"index": args.index, "k": max(k_values)}, "shown": shown, "sets": rows}
        write_json(args.output, {**about, "mean": tables.mean_metrics(rows)})
        write_text(args.output.with_suffix(".csv"), tables.as_csv(rows, shown))
        paths += [args.output, args.output.with_suffix(".csv")]
    if comparisons:
        write_json(comparison_path, comparisons)
    if len(sets) > 1 or comparisons:
        title = f"Evaluation of {args.model or args.run}"
        write_text(args.output.with_suffix(".md"), tables.as_markdown(title, sections))
        paths += [comparison_path] * bool(comparisons) + [args.output.with_suffix(".md")]
    print("written:", *paths)
    return 0


def _evaluate(args: argparse.Namespace, sets: Sequence[Any], only: Any, k_values: tuple[int, ...]) -> Records:
    """The records of all sets; ``only`` is the data of a single one, which need not be read again."""
    from contaccum.evaluation.beir import evaluate_beir, plan_search
    from contaccum.evaluation.metrics import metric_names
    from contaccum.evaluation.results import finished_result, write_result

    model, settings = load_model(args.model, args), search_settings(args)
    plans = [plan_search(model, one.documents, max(k_values), **settings) for one in sets]
    records = []
    for one, plan in zip(sets, plans, strict=True):
        plan |= {"metrics": metric_names(k_values), "data": {"fingerprint": one.fingerprint, "split": one.split}}
        # A single set was asked for now; of several, those that are done need not be done again.
        record, why = finished_result(one.output, plan) if only is None else (None, "")
        if why:
            print(f"{'kept' if record else 'done again'}: {one.output} ({why})")
        if record is None:
            about = {"show_progress": not args.no_progress, "model_name": args.model}
            result = evaluate_beir(model, only or one.read(args.on_bad_record), k_values, **settings, **about)
            write_result(result, one.output)
            record = result.record()
        # Scores per query are a gigabyte for all of BEIR.
        records.append({key: value for key, value in record.items() if key != "per_query"})
    return records


def _score_run(args: argparse.Namespace, dataset: Any, k_values: tuple[int, ...]) -> dict[str, Any]:
    from contaccum.evaluation.beir import score_beir_run
    from contaccum.evaluation.results import read_trec_run, write_result

    if args.run.resolve() == args.output.with_suffix(".trec").resolve():
        raise ConfigError(f"--output {args.output}: would replace the run itself; choose another name")
    result = score_beir_run(dataset, read_trec_run(args.run, args.on_bad_record), k_values, str(args.run))
    write_result(result, args.output)
    lost = result.data["queries_without_results"]
    if lost:
        print(f"{args.run}: {lost} of {len(dataset.queries)} judged queries have no results, and count as zero")
    return result.record()


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("evaluate", "Score a model on BEIR data with FAISS.")
    add = parser.add_argument
    add("model", nargs="?", metavar="MODEL", help="a folder, or a name on the model hub")
    add("--run", type=Path, metavar="RUN.trec", help="score this run of one set instead of a MODEL")
    add("--data", nargs="+", required=True, metavar="SET", help="BEIR folders, names of public sets, or beir for all")
    add("--split", help="default: test, and dev for msmarco")
    add("--output", default=Path("results.json"), type=Path, metavar="OUT.json", help="and OUT.NAME.json when several")
    add("--k_values", nargs="+", type=int, default=[1, 3, 5, 10, 20, 100, 1000], metavar="K")
    add("--metrics", nargs="+", metavar="METRIC@K", help="what the tables show; all are recorded")
    what = "earlier results on the same data, compared query by query by the first of --metrics"
    add("--compare", nargs="+", type=Path, default=[], metavar="EARLIER.json", help=what)
    parser.add_shared(*SEARCH)
    return check_model_or_run(parser.parse(argv), "evaluate")


def check_model_or_run(args: argparse.Namespace, command: str) -> argparse.Namespace:
    """Refuse a command line without, or with both of, MODEL and --run, or whose output is not JSON."""
    if (args.model is None) == (args.run is None):
        raise ConfigError(
            f"name a MODEL to search with, or a --run to score: one of the two (see contaccum {command} --help)"
        )
    if args.output.suffix != ".json":
        raise ConfigError(f"--output {args.output}: is JSON (with a .trec beside it); end its name in .json")
    return args
