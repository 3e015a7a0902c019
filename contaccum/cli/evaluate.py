"""`contaccum evaluate`: a model on one or several BEIR sets, their table, and how it compares with others' results."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from contaccum.cli.options import SEARCH, Parser, load_model, positive, search_settings
from contaccum.errors import ConfigError
from contaccum.files import require_writable, write_json, write_text

_NOT_OF_MTEB = (
    "run",
    "split",
    "dims",
    "quantize",
    "index",
    "index_parameters",
    "similarity",
    "precision",
)


def run(argv: Sequence[str]) -> int:
    """`contaccum evaluate MODEL --data SET [SET ...] --output out.json`, or `--run R.trec` and one set; returns 0.

    One set: its record and run, out.json and out.trec. Several: out.NAME.json and out.NAME.trec of each, and their
    table as out.json. The tables to read are out.md, and comparisons out.compare.json. `--mteb TASK ...` in place of
    --data writes the same of MTEB's tasks, and mteb's own files to out.mteb. Raises `UserError` for every mistake in
    the arguments, the data or the model.
    """
    from contaccum.retrieval.store import STORED

    parser = Parser("evaluate", "Score a model on BEIR data with FAISS.", *SEARCH)
    add = parser.add_argument
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--data",
        nargs="+",
        metavar="SET",
        help="BEIR folders, names of public sets, or beir for all",
    )
    what.add_argument(
        "--mteb",
        nargs="+",
        metavar="TASK",
        help="MTEB's retrieval tasks or benchmarks, run by mteb",
    )
    add("--split", help="default: test, and dev for msmarco")
    add("--metrics", nargs="+", metavar="METRIC@K", help="what the tables show; all are recorded")
    add(
        "--compare",
        nargs="+",
        type=Path,
        default=[],
        metavar="EARLIER.json",
        help="by the first of --metrics",
    )
    add(
        "--update_card",
        action="store_true",
        help="put the figures into the card, README.md, of a MODEL's folder",
    )
    add(
        "--dims",
        nargs="+",
        type=positive,
        metavar="D",
        help="score the first so many numbers of embeddings too",
    )
    add(
        "--quantize",
        nargs="+",
        choices=STORED,
        metavar="TYPE",
        help=f"score these types too: {', '.join(STORED)}",
    )
    add(
        "--rescore",
        type=positive,
        default=4,
        metavar="N",
        help="of binary, find N times the results, and score these",
    )
    args = parse_scoring(parser, argv, Path("results.json"), [1, 3, 5, 10, 20, 100, 1000])
    from contaccum.evaluation import metrics, results, tables

    for name in _NOT_OF_MTEB if args.mteb else ():
        if getattr(args, name) != parser.get_default(name):
            raise ConfigError(
                f"--{name} with --mteb: mteb's tasks settle that, or have no such thing; leave it out"
            )
    if args.run is not None and (args.dims or args.quantize):
        raise ConfigError(
            "--dims and --quantize are of a MODEL: a --run has no embeddings for them"
        )
    card = Path(args.model or "").expanduser() / "README.md"
    if args.update_card and not (args.model and card.is_file()):
        raise ConfigError(
            f"--update_card: {args.model or args.run} is no folder with a model card, README.md"
        )
    shown = metrics.check_metrics(args.metrics, args.k_values)
    sets, previous, records = _score_sets(args, shown)
    labelled = [(one.label, record) for one, record in zip(sets, records, strict=True)]
    scores = {
        label: {query: values[shown[0]] for query, values in record.pop("per_query").items()}
        for label, record in labelled
    }
    rows = tables.table_rows(sets, records)
    comparisons = [
        tables.compare(path, shown[0], scores, theirs) for path, theirs in previous.items()
    ]
    parts = [tables.sets_table(rows, shown)]
    parts += [
        tables.served_table(label, record["served"])
        for label, record in labelled
        if record.get("served")
    ]
    parts += map(tables.comparison_table, comparisons)
    text = "\n\n".join(parts)
    if len(sets) > 1:
        about = {
            key: records[0][key]
            for key in ("model", "tokenisation", "precision", "versions", "git_commit")
        }
        about |= {
            "search": {"index": args.index, "k": max(args.k_values)},
            "shown": shown,
            "sets": rows,
        }
        write_json(args.output, {**about, "mean": tables.mean_metrics(rows)})
    if comparisons:
        write_json(args.output.with_suffix(".compare.json"), comparisons)
    write_text(
        args.output.with_suffix(".md"), f"# Evaluation of {args.model or args.run}\n\n{text}\n"
    )
    if args.update_card:  # without what an absolute path says of this machine
        words = [Path(word).name if os.path.isabs(word) else word for word in argv]
        section = f"## Retrieval\n\n{parts[0]}\n\nBy `contaccum evaluate {shlex.join(words)}`."
        results.update_card(card, rows, shown, section)
    print(text)
    print(f"written: {args.output}, with runs and tables beside it")
    return 0


def _score_sets(
    args: argparse.Namespace, shown: Sequence[str]
) -> tuple[list[Any], dict[Path, Any], list[Any]]:
    """The sets of --data or --mteb, what earlier results have of them, and their records, which are written."""
    from contaccum.evaluation import beir_sets, metrics, mteb_tasks, results, tables

    tasks = mteb_tasks.find_tasks(args.mteb) if args.mteb else {}
    sets = beir_sets.evaluation_sets(args.data or [], args.output)
    if not sets:
        sets = beir_sets.assign_outputs(dict.fromkeys(tasks, ""), args.output)
    if args.run is not None and len(sets) > 1:
        raise ConfigError(f"--run is of one set, and --data names {len(sets)}")
    # All are read before the first is encoded, so that a bad record in the last one does not cost a night. Only a
    # single one is held: BEIR's larger sets do not fit in memory together.
    only = (
        beir_sets.load_data(sets[0].source, args.split, args.on_bad_record)
        if len(sets) == 1 and not tasks
        else None
    )
    data = [mteb_tasks.describe_task(task) for task in tasks.values()]
    data = data or [
        beir_sets.describe_data(
            only or beir_sets.load_data(one.source, args.split, args.on_bad_record)
        )
        for one in sets
    ]
    labels = {about["fingerprint"]: one.label for one, about in zip(sets, data, strict=True)}
    previous = {path: tables.read_previous(path, labels, shown[0]) for path in args.compare}
    score: Any
    if tasks:
        model, deepest = load_model(args.model, args), max(args.k_values)
        plan = beir_sets.plan_search(model, deepest, deepest)
        plan["model"]["name"], plan["search"]["index"] = (
            args.model,
            "mteb " + metadata.version("mteb"),
        )
        how = {"batch_size": args.batch_size, "show_progress_bar": not args.no_progress}
        at = {"folder": args.output.with_suffix(".mteb"), "k_values": args.k_values}
        plans, score = (
            [plan] * len(sets),
            partial(mteb_tasks.run_task, model=model, record_fields=plan, encode_kwargs=how, **at),
        )
    elif args.run is None:
        model, settings = load_model(args.model, args), search_settings(args)
        plans = [
            beir_sets.plan_search(model, about["documents"], max(args.k_values), **settings)
            for about in data
        ]
        settings |= {"model_name": args.model, "show_progress": not args.no_progress}
        if args.dims or args.quantize:
            from contaccum.evaluation.served_forms import plan_served

            types = args.quantize or ["float32"]
            served = plan_served(
                model.get_embedding_dimension(), args.dims, types, args.rescore, shown[0]
            )
            settings, plans = (
                settings | {"served": served},
                [{**plan, "served": served} for plan in plans],
            )
        score = partial(beir_sets.evaluate_beir, model, k_values=args.k_values, **settings)
    else:
        plans, found = [{}], results.read_trec_run(args.run, args.on_bad_record)
        score = partial(
            beir_sets.score_beir_run, run=found, k_values=args.k_values, name=str(args.run)
        )

    records = []
    for one, about, plan in zip(sets, data, plans, strict=True):
        # A single set was asked for now; of several, those that are done need not be done again.
        record = results.read_result(one.output) if len(sets) > 1 and one.output.exists() else {}
        names = record.get("metrics", {}).keys()
        if names == set(metrics.metric_names(args.k_values)) and results.agrees(
            record, {**plan, "data": about}
        ):
            print(f"kept: {one.output} (same model, data and settings)")
        else:
            task = tasks.get(one.label)
            result = score(
                task or only or beir_sets.load_data(one.source, args.split, args.on_bad_record)
            )
            results.write_result(result, one.output)
            record = result.record()
        records.append(record)
    return sets, previous, records


def parse_scoring(
    parser: Parser, argv: Sequence[str], output: Path, k_values: list[int]
) -> argparse.Namespace:
    """The parser's arguments, a MODEL or a --run, how to search; raises `ConfigError` for what cannot be."""
    from contaccum.evaluation.metrics import check_k_values

    add = parser.add_argument
    parser.add_model("a folder, or a name on the model hub")
    add(
        "--run",
        type=Path,
        metavar="RUN.trec",
        help="score this run instead of searching with a MODEL",
    )
    add(
        "--output",
        default=output,
        type=Path,
        metavar="OUT.json",
        help="and OUT.NAME.json of several sets",
    )
    add(
        "--k_values",
        nargs="+",
        type=int,
        default=k_values,
        metavar="K",
        help="cut-offs of the metrics",
    )
    args = parser.parse(argv)
    args.k_values = check_k_values(args.k_values)
    if (args.model is None) == (args.run is None):
        raise ConfigError(
            f"name a MODEL to search with, or a --run to score: one of the two ({parser.prog} --help)"
        )
    if args.output.suffix != ".json":
        raise ConfigError(
            f"--output {args.output}: is JSON (with a .trec beside it); end its name in .json"
        )
    if args.run is not None and args.run.resolve() == args.output.with_suffix(".trec").resolve():
        raise ConfigError(
            f"--output {args.output}: would replace the run itself; choose another name"
        )
    require_writable(args.output)
    return args
