"""`contaccum open_qa`: passage retrieval for questions, scored by answer match as DPR does."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from contaccum.cli.evaluate import parse_scoring
from contaccum.cli.options import SEARCH, Parser, load_model, search_settings
from contaccum.files import fingerprint


def run(argv: Sequence[str]) -> int:
    """`contaccum open_qa MODEL --questions Q --passages P --output out.json`, or `--run R.trec`; returns 0.

    Raises `UserError` for every mistake in the arguments, the data or the model.
    """
    parser = Parser(
        "open_qa", "Score passage retrieval for questions by answer match, as DPR does.", *SEARCH
    )
    add = parser.add_argument
    add(
        "--questions",
        type=Path,
        required=True,
        metavar="FILE",
        help="DPR's .qa.csv, jsonl or json with answers",
    )
    add(
        "--passages",
        type=Path,
        required=True,
        metavar="FILE",
        help="psgs_w100.tsv, jsonl or a BEIR folder",
    )
    add("--match", choices=("string", "regex"), default="string", help="regex for CuratedTREC")
    args = parse_scoring(parser, argv, Path("open_qa.json"), [1, 5, 20, 100])
    from contaccum.data import RecordReport, load_questions
    from contaccum.evaluation import beir_sets, metrics, results, tables
    from contaccum.evaluation.open_qa import load_passages, score_open_qa

    questions, report = (
        load_questions(args.questions, args.on_bad_record),
        RecordReport(args.on_bad_record),
    )
    data = {
        "name": args.questions.name,
        "path": str(args.questions),
        "passages_path": str(args.passages),
    }
    deepest = max(args.k_values)
    if args.run is None:
        passages = load_passages(args.passages, report)
        data["passages_fingerprint"] = fingerprint(*chain.from_iterable(passages.values()))
        corpus = {
            name: {"title": passage.title, "text": passage.text}
            for name, passage in passages.items()
        }
        settings = {
            **search_settings(args),
            "show_progress": not args.no_progress,
            "model_name": args.model,
        }
        found, about, _ = beir_sets.search(
            load_model(args.model, args), corpus, questions.texts, deepest, **settings
        )
    else:
        found = results.read_trec_run(args.run, args.on_bad_record)
        found = {
            name: dict(metrics.sort_as_trec_eval(hits)[:deepest]) for name, hits in found.items()
        }
        # One pass through the corpus, whatever its size, for the texts of these alone.
        passages = load_passages(
            args.passages, report, {name for hits in found.values() for name in hits}
        )
        about = {
            "model": {"name": f"run {args.run.name}"},
            "search": {"run": str(args.run), "k": deepest},
        }
    print(questions.report.summary(), report.summary(), sep="\n")
    result = score_open_qa(
        questions, found, passages, args.k_values, args.match, not args.no_progress, **about
    )
    result.data |= {**data, "passages": report.used}
    print(
        tables.markdown_table(["data", *result.metrics], [[data["name"], *result.metrics.values()]])
    )
    print("written:", *results.write_result(result, args.output))
    return 0
