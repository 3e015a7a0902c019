"""`contaccum questions DOCS`: write questions for documents with a language model on a server."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from contaccum import questions
from contaccum.cli.options import Parser, load_model, parse_positive_int, print_at_once
from contaccum.data.corpus import read_texts
from contaccum.data.rows import RecordReport
from contaccum.encoders.names import require_model
from contaccum.errors import ConfigError, DataError, quoted
from contaccum.experiments.request import parse_duration
from contaccum.files import require_exists, write_text
from contaccum.redaction import refuse_credentials

_NUM_SHOWN = 3  # questions


def run(argv: Sequence[str]) -> int:
    """Ask for questions, write those to keep, and return exit code 0.

    Raises:
        UserError: if the arguments, the files or the server cannot be used, or no question is left.
    """
    args = _parse_arguments(argv)
    max_calls, max_seconds = _parse_budget(args.budget)
    request = _parse_request(args.request)
    client = questions.make_client(args.endpoint, args.timeout)
    answer_file = args.output.with_suffix(".answers.jsonl")
    if args.output.exists() and not answer_file.exists():
        raise ConfigError(f"{args.output}: exists already; name another file, or remove it")
    if args.model is not None:
        require_model(args.model)
    require_exists(args.documents)
    report = RecordReport(args.on_bad_record)
    passages = read_texts(args.documents, "document", report, args.corpus_columns)
    documents = [passage for passage in passages if passage.passage]
    if len(documents) <= args.top_k:
        raise DataError(
            f"{args.documents}: has {len(documents)} documents with a text, so each one would be "
            f"among the first {args.top_k}: give more documents, or a lower --top_k"
        )
    pairs: list[tuple[str, str]] = []
    known_queries: list[str] = []
    if args.like is not None:
        pairs, known_queries = questions.read_examples(
            args.like, args.data_format, args.data_columns
        )
    print_at_once(
        f"asking {args.llm} for questions about {len(documents):,} documents, "
        + (f"like those of {args.like}" if pairs else f"of {len(questions.KINDS)} kinds")
    )
    prompts = list(
        questions.plan_prompts(documents, pairs, args.per_document, args.characters, args.seed)
    )
    settings = {"llm": args.llm, "request": request}
    settings |= {name: vars(args)[name] for name in ("per_document", "characters", "seed")}
    identity = questions.make_identity(documents, pairs, settings)
    with questions.AnswerFile(answer_file, identity) as answers:
        questions.ask_all(
            prompts,
            answers,
            client,
            args.llm,
            request,
            args.concurrency,
            max_calls,
            max_seconds,
            not args.no_progress,
        )
        num_tokens = sum(answer["tokens"] for answer in answers.answers.values())
        print_at_once(
            f"{len(answers.answers):,} of {len(prompts):,} answers with {num_tokens:,} tokens in "
            f"{answers.seconds / 60:.1f} minutes"
        )
        model = None if args.model is None else load_model(args.model, args)
        records, reasons = questions.select_questions(
            prompts, answers.answers, documents, known_queries, args.top_k, args.llm, model
        )
        left_out = ", ".join(f"{number:,} {reason}" for reason, number in reasons.most_common())
        if not records:
            raise DataError(
                f"{args.documents}: no question is left ({left_out or 'no answers'}): try another "
                "--llm, or a larger --budget"
            )
        lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
        write_text(args.output, lines)
    print(f"left out: {left_out or 'none'}")
    for record in records[:_NUM_SHOWN]:
        print(f"{quoted(record['query'], 120)} for {quoted(record['positive'])}")
    print(f"written: {len(records):,} questions in {args.output}")
    return 0


def _parse_budget(text: str | None) -> tuple[int | None, float | None]:
    """Return the largest number of calls and of seconds; None: no limit."""
    if text is None:
        return None, None
    if text.isdecimal() and int(text) > 0:
        return int(text), None
    return None, parse_duration(text)


def _parse_request(text: str | None) -> dict[str, Any]:
    """Return the fields of each request: the usual ones with the changes of the user."""
    try:
        fields = {**questions.REQUEST, **json.loads(text or "{}")}
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"--request {quoted(text)}: not a JSON object such as '{{\"temperature\": 1.0}}'"
        ) from error
    refuse_credentials(fields)
    return {name: value for name, value in fields.items() if value is not None}


def _parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = Parser(
        "questions",
        "Write questions for documents with a language model on a server with OpenAI's interface. "
        "Kept are those for which a search finds the document.",
        "corpus_columns",
        "on_bad_record",
        "device",
        "trust_remote_code",
        "no_progress",
        usage="contaccum questions DOCS --endpoint URL --llm NAME --output PATH [OPTIONS]",
    )
    parser.add_argument(
        "documents", type=Path, metavar="DOCS", help="documents (formats: see contaccum encode)"
    )
    parser.add_argument(
        "--endpoint",
        required=True,
        metavar="URL",
        help="server, such as http://localhost:11434/v1; its key is read from "
        f"{questions.KEY_VARIABLE}",
    )
    parser.add_argument("--llm", required=True, metavar="NAME", help="model of the server")
    parser.add_argument(
        "--output",
        type=Path,
        required=True,
        metavar="PATH",
        help="file of the questions; all answers are in a file beside it, for the next start",
    )
    parser.add_argument(
        "--like",
        type=Path,
        metavar="DATA",
        help="your own pairs, in any format of docs/data.md, as examples of the questions; "
        f"default: questions of the kinds {', '.join(questions.KINDS)}",
    )
    parser.add_data_options()
    parser.add_argument(
        "--budget",
        metavar="TIME|CALLS",
        help="time, such as 30m or 2h, or number of calls, such as 500, of all starts; default: "
        "all documents",
    )
    parser.add_argument(
        "--per_document",
        type=parse_positive_int,
        default=1,
        metavar="N",
        help="number of questions for each document; default: %(default)s",
    )
    parser.add_argument(
        "--top_k",
        type=parse_positive_int,
        default=10,
        metavar="K",
        help="keep a question if its document is found among the first K; default: %(default)s",
    )
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="search with this encoder for documents that BM25 does not find",
    )
    parser.add_argument(
        "--characters",
        type=parse_positive_int,
        default=1000,
        metavar="N",
        help="length of the start of a document that is shown; default: %(default)s",
    )
    parser.add_argument(
        "--concurrency",
        type=parse_positive_int,
        default=4,
        metavar="N",
        help="number of calls at the same time; default: %(default)s",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="time to wait for an answer, before it is asked for again; default: %(default)s",
    )
    parser.add_argument(
        "--request",
        metavar="JSON",
        help="fields of each request, which null removes; default: "
        f"{json.dumps(questions.REQUEST)}",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="seed of the order of the documents and of the examples; default: %(default)s",
    )
    return parser.parse(argv)
