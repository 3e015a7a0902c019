"""`contaccum evaluate`: a model on one or several BEIR sets, their table, and how it compares with others' results.

Everything is read and checked before the first text is encoded, and a set whose result is there already is kept.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contaccum.data.beir_folder import BeirDataset
from contaccum.errors import ConfigError
from contaccum.evaluation import earlier as earlier_results
from contaccum.evaluation import table
from contaccum.evaluation.arguments import Parser, add_search_arguments, load_model, search_settings
from contaccum.evaluation.beir import evaluate_beir, load_data, score_beir_run
from contaccum.evaluation.beir_sets import EvaluationSet, evaluation_sets
from contaccum.evaluation.checks import check_device, check_search
from contaccum.evaluation.earlier import DataIdentity
from contaccum.evaluation.kept import expected_identity, identity_of_model, kept_record
from contaccum.evaluation.metrics import DEFAULT_K_VALUES, check_k_values, check_metrics
from contaccum.evaluation.results import read_result, require_writable, write_atomically, write_result
from contaccum.evaluation.table import MAIN_METRICS, Row
from contaccum.evaluation.trec_run import read_trec_run


@dataclass(frozen=True)
class _Task:
    """A set to score: where its record goes, and what is known of its data from reading it once."""

    set: EvaluationSet
    output: Path
    documents: int
    fingerprint: str
    # Of a single set, which is not read again.
    dataset: BeirDataset | None = None

    @property
    def data(self) -> DataIdentity:
        return DataIdentity(self.set.label, self.set.row, self.set.split, self.fingerprint)


def run(argv: Sequence[str] | None = None) -> int:
    """`contaccum evaluate MODEL --data SET [SET ...] --output out.json`, or `--run R.trec` and one set; returns 0.

    One set: its record and run, out.json and out.trec. Several: out.NAME.json and out.NAME.trec of each, and their
    table as out.json, out.md and out.csv. With `--compare`, also out.compare.json, and out.md in any case.
    Raises `UserError` for every mistake in the arguments, the data or the model.
    """
    args = _parse(argv)
    k_values = check_k_values(args.k_values)
    shown = _shown_metrics(args.metrics, k_values)
    if args.device is not None:
        check_device(args.device)
    sets = evaluation_sets(args.data, args.split)
    if args.run is not None and len(sets) > 1:
        raise ConfigError(f"--run is of one set, and --data names {len(sets)}")
    require_writable(args.output)
    if args.run is not None and args.run.resolve() == args.output.with_suffix(".trec").resolve():
        raise ConfigError(f"--output {args.output}: would replace the run itself; choose another name")
    tasks = _read_once(sets, args)
    before = [earlier_results.read_earlier(path, [t.data for t in tasks], shown[0]) for path in args.compare]

    if args.run is not None:
        records = [_score_file(args, tasks[0], k_values)]
    else:
        model = load_model(args)
        settings = search_settings(args)
        for task in tasks:
            check_search(model, task.documents, **settings)
        records = _evaluate(model, tasks, args, k_values)
    rows = _rows(tasks, records)
    comparisons = _compare(tasks, before)
    print(table.as_text(rows, shown))
    for comparison in comparisons:
        print("\n" + earlier_results.as_text(comparison))
    written = [task.output for task in tasks] + _write_tables(args, rows, shown, records[0], comparisons)
    print("written:", *written)
    return 0


def _read_once(sets: Sequence[EvaluationSet], args: argparse.Namespace) -> list[_Task]:
    """Read every set before the first is encoded, so that a bad record in the last one does not cost a night.

    Only one is held at a time, since BEIR's larger sets together do not fit in memory.
    """
    tasks: list[_Task] = []
    taken = {args.output.with_suffix(".compare.json"): "--compare"} if args.compare else {}
    for one in sets:
        output = args.output
        if len(sets) > 1:
            output = args.output.with_suffix(f".{one.label.replace('/', '-')}.json")
        if output in taken:
            both = f"--data {taken[output]} and {one.given}"
            raise ConfigError(f"{both} would both be written to {output}; run them apart")
        taken[output] = one.given
        dataset = load_data(one.given, one.split, args.on_bad_record)
        require_writable(output)
        held = dataset if len(sets) == 1 else None
        tasks.append(_Task(one, output, len(dataset.corpus), dataset.fingerprint, held))
    return tasks


def _evaluate(
    model: Any, tasks: Sequence[_Task], args: argparse.Namespace, k_values: tuple[int, ...]
) -> list[dict[str, Any]]:
    """The records of all tasks without their scores per query, which for all of BEIR are a gigabyte."""
    settings = search_settings(args)
    of_model = identity_of_model(model) if len(tasks) > 1 else {}
    records = []
    for task in tasks:
        # One set is what was asked for now; of several, those that are done need not be done again.
        record, why = None, ""
        if len(tasks) > 1:
            record, why = kept_record(task.output, _expected(model, of_model, task, settings, k_values))
        if record is not None:
            print(f"kept: {task.output} ({why})")
        else:
            replaced = task.output.exists()
            dataset = task.dataset or load_data(task.set.given, task.set.split, args.on_bad_record)
            result = evaluate_beir(
                model,
                dataset,
                k_values=k_values,
                show_progress=not args.no_progress,
                model_name=args.model,
                **settings,
            )
            write_result(result, task.output)
            record = result.record()
            if replaced:
                print(f"replaced: {task.output}" + (f" ({why})" if why else ""))
        records.append({key: value for key, value in record.items() if key != "per_query"})
    return records


def _score_file(args: argparse.Namespace, task: _Task, k_values: tuple[int, ...]) -> dict[str, Any]:
    """The record of another system's run, without its scores per query."""
    assert task.dataset is not None  # of a single set
    run = read_trec_run(args.run, args.on_bad_record)
    result = score_beir_run(task.dataset, run, k_values, str(args.run))
    write_result(result, task.output)
    without = result.data["queries_without_results"]
    if without:
        print(f"{args.run}: {without} of {result.data['queries']} judged queries have no results, and count as zero")
    return {key: value for key, value in result.record().items() if key != "per_query"}


def _expected(
    model: Any, of_model: Mapping[str, Any], task: _Task, settings: Mapping[str, Any], k_values: Sequence[int]
) -> dict[str, Any]:
    from contaccum.retrieval.index import check_factory, default_parameters

    similarity = check_search(model, task.documents, **settings)
    parameters = settings["index_parameters"]
    if parameters is None:
        dimension = model.truncate_dim or model.get_embedding_dimension()
        parameters = default_parameters(check_factory(settings["index"], dimension, task.documents, similarity))
    data = {"fingerprint": task.fingerprint, "split": task.set.split}
    return expected_identity(
        of_model, data, similarity, settings["index"], parameters, k_values, settings["autocast_dtype"]
    )


def _rows(tasks: Sequence[_Task], records: Sequence[Mapping[str, Any]]) -> list[Row]:
    members: dict[str, list[Row]] = {}
    for task, record in zip(tasks, records, strict=True):
        data = record["data"]
        source = {"fingerprint": task.fingerprint, "file": task.output.name}
        row = Row(task.set.label, task.set.split, data["queries"], data["documents"], record["metrics"], source=source)
        members.setdefault(task.set.row, []).append(row)
    return [
        parts[0] if len(parts) == 1 and parts[0].name == name else table.mean_row(name, parts)
        for name, parts in members.items()
    ]


def _compare(tasks: Sequence[_Task], before: Sequence[earlier_results.Earlier]) -> list[dict[str, Any]]:
    if not before:
        return []
    metric = before[0].metric
    ours = {}
    for task in tasks:
        per_query = read_result(task.output)["per_query"]
        ours[task.set.label] = {query: values[metric] for query, values in per_query.items()}
    return [earlier_results.compare(ours, one, [task.data for task in tasks]) for one in before]


def _write_tables(
    args: argparse.Namespace,
    rows: Sequence[Row],
    shown: Sequence[str],
    record: Mapping[str, Any],
    comparisons: Sequence[Mapping[str, Any]],
) -> list[Path]:
    """What there is beside the records of single sets; returns the files."""
    several = len(rows) > 1 or bool(rows[0].parts)
    files: dict[Path, str] = {}
    if several:
        about = {key: record[key] for key in ("model", "tokenisation", "precision", "versions", "git_commit")}
        summary = {**about, "search": {"index": args.index, "k": record["search"]["k"]}, **table.as_json(rows, shown)}
        files[args.output] = _json(summary)
        files[args.output.with_suffix(".csv")] = table.as_csv(rows, shown)
    if several or comparisons:
        page = [table.as_markdown(rows, shown, f"Evaluation of {args.model or args.run}")]
        page += ["\n".join([*earlier_results.as_markdown(comparison), ""]) for comparison in comparisons]
        files[args.output.with_suffix(".md")] = "\n".join(page)
    if comparisons:
        files[args.output.with_suffix(".compare.json")] = _json(list(comparisons))
    for path, text in files.items():
        if path.exists():
            print(f"replaced: {path}")
        write_atomically(path, [text])
    return list(files)


def _json(content: Any) -> str:
    return json.dumps(content, indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def _shown_metrics(chosen: Sequence[str] | None, k_values: tuple[int, ...]) -> tuple[str, ...]:
    if chosen is not None:
        return check_metrics(chosen, k_values)
    fitting = [name for name in MAIN_METRICS if int(name.partition("@")[2]) in k_values]
    return tuple(fitting) or tuple(f"{name}@{k_values[-1]}" for name in ("NDCG", "MRR", "MAP", "Recall", "Accuracy"))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="contaccum evaluate", description="Score a model on BEIR data with FAISS.", allow_abbrev=False)
    parser.add_argument("model", nargs="?", metavar="MODEL", help="a folder, or a name on the model hub")
    parser.add_argument("--run", type=Path, metavar="RUN.trec", help="score this run of one set instead of a MODEL")
    parser.add_argument(
        "--data", nargs="+", required=True, metavar="SET", help="BEIR folders, names of public sets, or beir for all"
    )
    parser.add_argument("--split", help="default: test, and dev for msmarco")
    parser.add_argument(
        "--output", default=Path("results.json"), type=Path, metavar="OUT.json", help="and OUT.NAME.json when several"
    )
    parser.add_argument("--k_values", nargs="+", type=int, default=list(DEFAULT_K_VALUES), metavar="K")
    parser.add_argument("--metrics", nargs="+", metavar="METRIC@K", help="what the tables show; all are recorded")
    parser.add_argument(
        "--compare",
        nargs="+",
        type=Path,
        default=[],
        metavar="EARLIER.json",
        help="earlier results on the same data, compared query by query by the first of --metrics",
    )
    add_search_arguments(parser)
    args = parser.parse(argv)
    if (args.model is None) == (args.run is None):
        raise ConfigError(
            "name a MODEL to search with, or a --run to score: one of the two (see contaccum evaluate --help)"
        )
    return args
