"""Open-domain QA as DPR and the ContAccum paper score it: in how many questions the top k passages hold an answer.

`evaluate_open_qa` encodes and searches, `score_open_qa` scores a run of any system, `run` is `contaccum open_qa`.
Relevance judgements play no part (that is `beir`), and no answer is extracted.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from contaccum.data.passages import Passage, read_passages
from contaccum.data.questions import Questions, load_questions
from contaccum.data.records import RecordReport, add_to_fingerprint, one_line, quoted
from contaccum.errors import ConfigError, DataError
from contaccum.evaluation.answers import MATCHES, Match, answer_finder, compiled, has_tokens
from contaccum.evaluation.arguments import Parser, add_search_arguments, load_model, search_settings
from contaccum.evaluation.checks import check_device, check_search
from contaccum.evaluation.metrics import check_k_values, trec_order
from contaccum.evaluation.results import EvaluationResult, require_writable, write_result
from contaccum.evaluation.search_record import search_record
from contaccum.evaluation.table import format_table
from contaccum.evaluation.trec_run import read_trec_run

DEFAULT_K_VALUES = (1, 5, 20, 100)


def score_open_qa(
    questions: Questions,
    run: Mapping[str, Mapping[str, float]],
    texts: Mapping[str, str],
    k_values: Sequence[int] = DEFAULT_K_VALUES,
    match: Match = "string",
    show_progress: bool = True,
) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Top-k retrieval accuracy: `Accuracy@k` is the share of questions with an answer in one of the k best passages.

    Args:
        run: {question id: {passage id: score}}, in trec_eval's order; a question without results counts as a miss.
        texts: {passage id: text}, without titles: DPR seeks answers in the text alone.
        match: see `answer_finder`.

    Returns:
        means over all questions, and {question id: {"Accuracy@k": 0.0 or 1.0}}.

    Raises:
        ConfigError: k < 1 or an unknown match.
        DataError: a passage of the run that `texts` lacks.
    """
    from tqdm.auto import tqdm

    k_values = check_k_values(k_values)
    answer_finder([], match)  # refuses an unknown match
    per_query: dict[str, dict[str, float]] = {}
    for name, answers in tqdm(questions.answers.items(), unit=" questions", desc="Matching", disable=not show_progress):
        found = answer_finder(answers, match)
        rank = None
        for place, (passage, _) in enumerate(trec_order(run.get(name, {}))[: max(k_values)], start=1):
            if passage not in texts:
                raise DataError(
                    one_line(f"passage {quoted(passage)} of {name} is not in the corpus (give the one searched)")
                )
            if found(texts[passage]):
                rank = place
                break
        per_query[name] = {f"Accuracy@{k}": float(rank is not None and rank <= k) for k in k_values}
    means = {
        f"Accuracy@{k}": float(np.mean([scores[f"Accuracy@{k}"] for scores in per_query.values()])) for k in k_values
    }
    return means, per_query


def evaluate_open_qa(
    model: Any,
    questions: Questions,
    passages: Mapping[str, Passage],
    k_values: Sequence[int] = DEFAULT_K_VALUES,
    match: Match = "string",
    index: str = "Flat",
    index_parameters: str | None = None,
    similarity: Literal["cos", "dot"] | None = None,
    batch_size: int = 32,
    autocast_dtype: str | None = None,
    use_gpu: bool | Literal["auto"] = "auto",
    show_progress: bool = True,
    model_name: str | None = None,
) -> EvaluationResult:
    """Encode passages (title, space, text) and questions, search, and score; all passages are in memory.

    Args:
        passages: {id: passage}.
        match: see `answer_finder`.
        Others: as in `evaluate_beir`.

    Raises:
        ConfigError: settings that are out of range or do not fit the model or the data; before anything is encoded.
        DataError: data that cannot be used.
    """
    from contaccum.retrieval.searcher import FaissSearcher

    k_values = check_k_values(k_values)
    answer_finder([], match)
    metric = check_search(model, len(passages), index, index_parameters, batch_size, autocast_dtype, similarity)
    searcher = FaissSearcher(model, batch_size, index, index_parameters, use_gpu, autocast_dtype, show_progress)
    corpus = {name: {"title": passage.title, "text": passage.text} for name, passage in passages.items()}
    run = searcher.search(corpus, questions.texts, max(k_values), metric)
    texts = {name: passage.text for name, passage in passages.items()}
    metrics, per_query = score_open_qa(questions, run, texts, k_values, match, show_progress)
    return EvaluationResult(
        metrics=metrics,
        per_query=per_query,
        run=run,
        data=_about(questions, len(passages), match) | {"passages_fingerprint": _fingerprint(passages.values())},
        **search_record(searcher, model_name, metric, max(k_values)),
    )


def run(argv: Sequence[str] | None = None) -> int:
    """`contaccum open_qa MODEL --questions Q --passages P --output out.json`, or `--run R.trec`; returns 0."""
    args = _parse(argv)
    k_values = check_k_values(args.k_values)
    require_writable(args.output)
    if args.device is not None:
        check_device(args.device)
    questions = load_questions(args.questions, args.on_bad_record)
    print(questions.report.summary())
    _say_what_never_matches(questions, args.match)
    report = RecordReport(args.on_bad_record)
    if args.run is None:
        passages = load_passages(args.passages, report)
        print(report.summary())
        result = evaluate_open_qa(
            load_model(args),
            questions,
            passages,
            k_values,
            args.match,
            show_progress=not args.no_progress,
            model_name=args.model,
            **search_settings(args),
        )
    else:
        result = _score_file(args, questions, k_values, report)
    result.data |= {"name": args.questions.name, "path": str(args.questions), "passages_path": str(args.passages)}
    print(format_table({args.questions.name: result.metrics}))
    print("written:", *write_result(result, args.output))
    return 0


def load_passages(path: str | Path, report: RecordReport, wanted: set[str] | None = None) -> dict[str, Passage]:
    """{id: passage}, of those `wanted` alone where it is given; an id that occurs again is a `DataError`."""
    found: dict[str, Passage] = {}
    for passage in read_passages(path, report):
        if wanted is not None and passage.id not in wanted:
            continue
        if passage.id in found:
            raise DataError(one_line(f"{path}: id {quoted(passage.id)} occurs again (keep one passage for each id)"))
        found[passage.id] = passage
    report.refuse_if_nothing_left(path, len(found), "passages" if wanted is None else "passages of the run")
    return found


def _score_file(
    args: argparse.Namespace, questions: Questions, k_values: tuple[int, ...], report: RecordReport
) -> EvaluationResult:
    found = read_trec_run(args.run, args.on_bad_record)
    unknown = next((name for name in found if name not in questions.texts), None)
    if unknown is not None:
        raise DataError(
            one_line(
                f"{args.run}: {quoted(unknown)} is no question of {args.questions} (they are called question-1 to "
                f"question-{len(questions.texts)}, in the order of the file)"
            )
        )
    deepest = max(k_values)
    top = {name: dict(trec_order(hits)[:deepest]) for name, hits in found.items()}
    # One pass through the corpus, whatever its size, for the texts of these alone.
    passages = load_passages(args.passages, report, {passage for hits in top.values() for passage in hits})
    print(report.summary())
    texts = {name: passage.text for name, passage in passages.items()}
    metrics, per_query = score_open_qa(questions, top, texts, k_values, args.match, not args.no_progress)
    return EvaluationResult(
        metrics=metrics,
        per_query=per_query,
        run=top,
        data=_about(questions, report.used, args.match),
        model={"name": f"run {args.run.name}"},
        tokenisation=None,
        search={"run": str(args.run), "k": deepest},
        timing={},
        precision="unknown",
    )


def _about(questions: Questions, passages: int, match: Match) -> dict[str, Any]:
    return {
        "questions": len(questions.texts),
        "questions_fingerprint": questions.fingerprint,
        "passages": passages,
        "match": match,
    }


def _say_what_never_matches(questions: Questions, match: Match) -> None:
    """Answers that cannot be found lower the score in silence otherwise."""
    usable = has_tokens if match == "string" else lambda answer: compiled(answer) is not None
    what = "has no letter, digit or sign" if match == "string" else "is no regular expression"
    lost = [answer for answers in questions.answers.values() for answer in answers if not usable(answer)]
    if lost:
        print(f"never found, because it {what}: {quoted(lost[0])} ({len(lost)} such answers)")


def _fingerprint(passages: Iterable[Passage]) -> str:
    import hashlib

    digest = hashlib.sha256()
    for passage in passages:
        add_to_fingerprint(digest, *passage)
    return digest.hexdigest()


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="contaccum open_qa",
        description="Score passage retrieval for questions by answer match, as DPR does.",
        allow_abbrev=False,
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help="a folder, or a name on the model hub")
    parser.add_argument("--run", type=Path, metavar="RUN.trec", help="score this run instead of searching with a MODEL")
    parser.add_argument(
        "--questions", type=Path, required=True, metavar="FILE", help="DPR's .qa.csv, jsonl or json with answers"
    )
    parser.add_argument(
        "--passages", type=Path, required=True, metavar="FILE", help="psgs_w100.tsv, jsonl, parquet or a BEIR folder"
    )
    parser.add_argument("--match", choices=MATCHES, default="string", help="regex for CuratedTREC")
    parser.add_argument("--k_values", nargs="+", type=int, default=list(DEFAULT_K_VALUES), metavar="K")
    parser.add_argument("--output", default=Path("open_qa.json"), type=Path, metavar="OUT.json")
    add_search_arguments(parser)
    args = parser.parse(argv)
    if (args.model is None) == (args.run is None):
        raise ConfigError(
            "name a MODEL to search with, or a --run to score: one of the two (see contaccum open_qa --help)"
        )
    return args
