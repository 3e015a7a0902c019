"""`contaccum open_qa`: score passage retrieval for questions by answer match, as DPR does."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contaccum.cli.options import (
    SEARCH_OPTIONS,
    Parser,
    get_search_settings,
    load_model,
    require_models,
)
from contaccum.cli.scoring import parse_scoring_arguments
from contaccum.files import fingerprint

if TYPE_CHECKING:
    from contaccum.data import Passage
    from contaccum.evaluation.results import Run

_DEFAULT_K_VALUES = (1, 5, 20, 100)


def run(argv: Sequence[str]) -> int:
    """Score a model or a run, write the result, and return exit code 0.

    Raises:
        UserError: if the arguments, the data, the model or the run cannot be used.
    """
    args = _parse_arguments(argv)
    require_models(args.model)
    from contaccum.data import RecordReport, load_questions
    from contaccum.evaluation import results, tables
    from contaccum.evaluation.open_qa import load_passages, score_open_qa

    questions = load_questions(args.questions, args.on_bad_record)
    passage_report = RecordReport(args.on_bad_record)
    data_record: dict[str, Any] = {
        "name": args.questions.name,
        "path": str(args.questions),
        "passages_path": str(args.passages),
    }
    if args.run is None:
        passages = load_passages(args.passages, passage_report)
        data_record["passages_fingerprint"] = fingerprint(*chain.from_iterable(passages.values()))
        hits, search_record = _search(args, passages, questions.texts)
    else:
        hits = _read_run(args)
        search_record = {
            "model": {"name": f"run {args.run.name}"},
            "search": {"run": str(args.run), "k": max(args.k_values)},
        }
        # The corpus may be larger than memory, so only the passages of the run are loaded.
        retrieved_ids = set(chain.from_iterable(hits.values()))
        passages = load_passages(args.passages, passage_report, retrieved_ids)
    print(questions.report.summary())
    print(passage_report.summary())
    result = score_open_qa(
        questions,
        hits,
        passages,
        args.k_values,
        args.match,
        not args.no_progress,
        **search_record,
    )
    result.data |= {**data_record, "passages": passage_report.used}
    header = ["data", *result.metrics]
    row = [data_record["name"], *result.metrics.values()]
    print(tables.markdown_table(header, [row]))
    print("written:", *results.write_result(result, args.output))
    return 0


def _parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = Parser(
        "open_qa",
        "Score passage retrieval for questions by answer match, as DPR does.",
        *SEARCH_OPTIONS,
        usage="contaccum open_qa (MODEL | --run RUN) --questions FILE --passages FILE [OPTIONS]",
    )
    parser.add_argument(
        "--questions",
        type=Path,
        required=True,
        metavar="FILE",
        help="questions with answers: DPR's .qa.csv, jsonl or json",
    )
    parser.add_argument(
        "--passages",
        type=Path,
        required=True,
        metavar="FILE",
        help="passages to search: psgs_w100.tsv, jsonl or a BEIR folder",
    )
    parser.add_argument(
        "--match",
        choices=("string", "regex"),
        default="string",
        help="match answers as strings, or as regular expressions (CuratedTREC); "
        "default: %(default)s",
    )
    return parse_scoring_arguments(parser, argv, Path("open_qa.json"), _DEFAULT_K_VALUES)


def _search(
    args: argparse.Namespace, passages: Mapping[str, Passage], question_texts: Mapping[str, str]
) -> tuple[Run, dict[str, Any]]:
    """Search the passages with the model.

    Returns:
        {question id: {passage id: score}}, and the part of the record that describes the search.
    """
    from contaccum.evaluation import beir_sets

    corpus = {}
    for passage_id, passage in passages.items():
        corpus[passage_id] = {"title": passage.title, "text": passage.text}
    return beir_sets.search(
        load_model(args.model, args),
        corpus,
        question_texts,
        max(args.k_values),
        show_progress=not args.no_progress,
        model_name=args.model,
        **get_search_settings(args),
    )


def _read_run(args: argparse.Namespace) -> Run:
    """Read the run, and return the best passages of each question."""
    from contaccum.evaluation import metrics, results

    max_k = max(args.k_values)
    run_hits = {}
    for question_id, hits in results.read_trec_run(args.run, args.on_bad_record).items():
        run_hits[question_id] = dict(metrics.sort_as_trec_eval(hits)[:max_k])
    return run_hits
