"""`contaccum questions DOCS`: write questions for documents with a language model on a server."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from contaccum import __version__, questions, work
from contaccum.cli.options import Parser, load_model, positive_int, print_at_once
from contaccum.data.corpus import read_texts
from contaccum.data.records import read_records
from contaccum.data.rows import RecordReport
from contaccum.encoders.names import require_model
from contaccum.errors import ConfigError, DataError, quoted
from contaccum.experiments.request import parse_duration
from contaccum.files import fingerprint, require_exists, write_text
from contaccum.redaction import refuse_credentials


def run(argv: Sequence[str]) -> int:
    """Ask for questions, write those to keep, and return exit code 0."""
    args = _parse_arguments(argv)
    max_calls, max_seconds = math.inf, math.inf
    if args.budget is not None and args.budget.isdecimal():
        max_calls = int(args.budget)
    elif args.budget is not None:
        max_seconds = parse_duration(args.budget)
    request = _parse_request(args.request)
    client = questions.make_client(args.endpoint)
    folder = args.output.with_suffix(".answers")
    if args.output.exists() and not folder.exists():
        raise ConfigError(f"{args.output}: exists already; name another file, or remove it")
    if args.model is not None:
        require_model(args.model)
    require_exists(args.documents)
    report = RecordReport(args.on_bad_record)
    passages = read_texts(args.documents, "document", report, args.corpus_columns)
    documents = [passage for passage in passages if passage.passage]
    if report.reported:
        print_at_once(report.summary())
    if len(documents) <= args.top_k:
        raise DataError(
            f"{args.documents}: has {len(documents)} documents with a text, so each one would be "
            f"among the first {args.top_k}: give more documents, or a lower --top_k"
        )
    pairs = []
    if args.like is not None:
        for pair in read_records(args.like, columns=args.data_columns):
            pairs.append((pair.query, pair.positives[0]))
    manner = f"like those of {args.like}" if pairs else f"of {len(questions.KINDS)} kinds"
    print_at_once(f"{len(documents):,} documents: asking {args.llm} for questions {manner}")
    identity = {
        "work": "questions",
        "version": __version__,
        "documents": fingerprint(*documents),
        "like": fingerprint(*pairs),
        "llm": args.llm,
        "request": request,
    }
    with work.begin(folder, identity, "contaccum questions", may_restart=False):
        answers = questions.ask_all(
            questions.make_prompts(documents, pairs),
            len(documents),
            folder / "answers.jsonl",
            client,
            args.llm,
            request,
            args.concurrency,
            max_calls,
            max_seconds,
            not args.no_progress,
        )
        model = None if args.model is None else load_model(args.model, args)
        known_queries = [query for query, _ in pairs]
        records, reasons = questions.select_questions(
            answers, documents, known_queries, args.top_k, args.llm, model, not args.no_progress
        )
        left_out = ", ".join(f"{number:,} {reason}" for reason, number in reasons.most_common())
        num_tokens = sum(answer["tokens"] for answer in answers.values())
        print_at_once(
            f"{len(answers):,} answers with {num_tokens:,} tokens; left out: {left_out or 'none'}"
        )
        if not records:
            raise DataError(f"{args.documents}: no question is left; try another --llm")
        lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
        write_text(args.output, lines)
    for record in records[:3]:
        print(f"{quoted(record['query'], 120)} for {quoted(record['positive'])}")
    print(f"written: {len(records):,} questions in {args.output}")
    return 0


def _parse_request(text: str) -> dict[str, Any]:
    """Return the fields of each request: the usual ones with the changes of the user."""
    try:
        fields = {**questions.REQUEST, **json.loads(text)}
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"--request {quoted(text)}: not a JSON object such as '{{\"temperature\": 1.0}}'"
        ) from error
    refuse_credentials(fields)
    return {name: value for name, value in fields.items() if value is not None}


def _parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        "questions",
        "Write questions for documents with a language model on a server with OpenAI's interface. "
        "A question is kept if a search finds its document.",
        "corpus_columns",
        "data_columns",
        "on_bad_record",
        "device",
        "trust_remote_code",
        "no_progress",
        usage="contaccum questions DOCS --endpoint URL --llm NAME --output PATH [OPTIONS]",
    )
    add = parser.add_argument
    add("documents", type=Path, metavar="DOCS", help="documents, as for contaccum encode")
    server = f"server, such as http://localhost:11434; its key is in {questions.KEY_VARIABLE}"
    add("--endpoint", required=True, metavar="URL", help=server)
    add("--llm", required=True, metavar="NAME", help="model of the server")
    output = "file of the questions; all answers are in a folder beside it"
    add("--output", type=Path, required=True, metavar="PATH", help=output)
    examples = "your pairs, as examples; default: questions of four kinds"
    add("--like", type=Path, metavar="DATA", help=examples)
    budget = "of all starts, such as 30m or 500; default: all documents"
    add("--budget", metavar="TIME|CALLS", help=budget)
    top_k = "a document must be among the first K for its question; default: %(default)s"
    add("--top_k", type=positive_int, default=10, metavar="K", help=top_k)
    model = "encoder that searches for documents that BM25 does not find"
    add("--model", metavar="MODEL", help=model)
    calls = "calls at the same time; default: %(default)s"
    add("--concurrency", type=positive_int, default=4, metavar="N", help=calls)
    request = f"changes to the fields of each request, {json.dumps(questions.REQUEST)}"
    add("--request", default="{}", metavar="JSON", help=request)
    return parser.parse(argv)
