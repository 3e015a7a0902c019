"""`contaccum open_qa`: passage retrieval for questions, scored by answer match as DPR does."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from contaccum.cli.evaluate import check_model_or_run
from contaccum.cli.options import SEARCH, Parser, load_model, search_settings
from contaccum.files import require_writable


def run(argv: Sequence[str] | None = None) -> int:
    """`contaccum open_qa MODEL --questions Q --passages P --output out.json`, or `--run R.trec`; returns 0.

    Raises:
        UserError: for every mistake in the arguments, the data or the model.
    """
    args = _parse(argv)
    from contaccum.data import RecordReport, load_questions
    from contaccum.evaluation.beir import search
    from contaccum.evaluation.metrics import check_k_values, trec_order
    from contaccum.evaluation.open_qa import load_passages, matches_anything, passages_fingerprint, score_open_qa
    from contaccum.evaluation.results import read_trec_run, write_result
    from contaccum.evaluation.tables import Section, as_text

    k_values = check_k_values(args.k_values)
    require_writable(args.output)
    questions = load_questions(args.questions, args.on_bad_record)
    print(questions.report.summary())
    lost = [a for answers in questions.answers.values() for a in answers if not matches_anything(a, args.match)]
    if lost:  # they would lower the score in silence
        why = "is no regular expression" if args.match == "regex" else "has no letter, digit or sign"
        print(f"never found, because it {why}: {lost[0]!r:.60} ({len(lost)} such answers)")

    report, deepest = RecordReport(args.on_bad_record), max(k_values)
    data = {"name": args.questions.name, "path": str(args.questions), "passages_path": str(args.passages)}
    if args.run is None:
        passages = load_passages(args.passages, report)
        settings = {**search_settings(args), "show_progress": not args.no_progress, "model_name": args.model}
        corpus = {name: {"title": passage.title, "text": passage.text} for name, passage in passages.items()}
        found, about = search(load_model(args.model, args), corpus, questions.texts, deepest, **settings)
        data["passages_fingerprint"] = passages_fingerprint(passages)
    else:
        found = read_trec_run(args.run, args.on_bad_record)
        found = {name: dict(trec_order(hits)[:deepest]) for name, hits in found.items()}
        # One pass through the corpus, whatever its size, for the texts of these alone.
        passages = load_passages(args.passages, report, {name for hits in found.values() for name in hits})
        about = {"model": {"name": f"run {args.run.name}"}, "search": {"run": str(args.run), "k": deepest}}
    print(report.summary())
    result = score_open_qa(questions, found, passages, k_values, args.match, not args.no_progress, **about)
    result.data |= {**data, "passages": report.used}
    print(as_text([Section("", ["data", *result.metrics], [[data["name"], *result.metrics.values()]])]))
    print("written:", *write_result(result, args.output))
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("open_qa", "Score passage retrieval for questions by answer match, as DPR does.")
    add = parser.add_argument
    add("model", nargs="?", metavar="MODEL", help="a folder, or a name on the model hub")
    add("--run", type=Path, metavar="RUN.trec", help="score this run instead of searching with a MODEL")
    add("--questions", type=Path, required=True, metavar="FILE", help="DPR's .qa.csv, jsonl or json with answers")
    what = "psgs_w100.tsv, jsonl or a BEIR folder"
    add("--passages", type=Path, required=True, metavar="FILE", help=what)
    add("--match", choices=("string", "regex"), default="string", help="regex for CuratedTREC")
    add("--k_values", nargs="+", type=int, default=[1, 5, 20, 100], metavar="K")
    add("--output", default=Path("open_qa.json"), type=Path, metavar="OUT.json")
    parser.add_shared(*SEARCH)
    return check_model_or_run(parser.parse(argv), "open_qa")
