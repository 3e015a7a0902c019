"""Score a run of open-domain question answering by answer match, as DPR and the ContAccum paper do.

    contaccum search MODEL --store STORE --queries nq-test.qa.csv --top_k 100 --output nq.trec
    python eval/open_qa/open_qa.py --run nq.trec --questions nq-test.qa.csv \\
        --passages psgs_w100.tsv.gz --output nq.json

The score is top-k accuracy: the share of questions for which one of the k best passages holds an
answer. Answers are compared with texts as in DPR (Karpukhin et al., arXiv 2004.04906). Relevance
judgements are not used, and no answer is extracted.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple

import regex
from tqdm.auto import tqdm

from contaccum.data import Passage, RecordReport, read_passages
from contaccum.data.rows import (
    Fault,
    get_first_value,
    parse_question_line,
    parse_rows,
    parse_text,
    read_head,
    read_json_lines,
    read_lines,
)
from contaccum.errors import DataError, UserError, quoted
from contaccum.evaluation.metrics import sort_as_trec_eval
from contaccum.evaluation.results import Run, markdown_table, read_trec_run
from contaccum.files import fingerprint, provenance, write_json

Match = Literal["string", "regex"]

# DrQA's simple tokenizer: a token is a word, or any other visible character.
_TOKEN = regex.compile(r"[\p{L}\p{N}\p{M}]+|[^\p{Z}\p{C}]")


class Question(NamedTuple):
    """A question with its answers, at least one."""

    text: str
    answers: list[str]


def main() -> None:
    """Score the run and write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--run", type=Path, required=True, metavar="RUN.trec", help="run of any system")
    add(
        "--questions",
        type=Path,
        required=True,
        help="DPR's .qa.csv, or jsonl with question and answer; plain or gzip",
    )
    add("--passages", type=Path, required=True, help="psgs_w100.tsv, jsonl or a BEIR folder")
    add(
        "--match",
        choices=("string", "regex"),
        default="string",
        help="match answers as strings, or as regular expressions (CuratedTREC)",
    )
    add("--k_values", nargs="+", type=int, default=[1, 5, 20, 100])
    add("--output", type=Path, default=Path("open_qa.json"), metavar="OUT.json")
    args = parser.parse_args()

    questions = load_questions(args.questions)
    run = read_trec_run(args.run)
    # Wikipedia may be larger than memory, so only the passages of the run are loaded.
    passages = load_passages(args.passages, set(chain.from_iterable(run.values())))
    per_query = score_questions(questions, run, passages, args.k_values, args.match)
    metrics = {}
    for name in next(iter(per_query.values())):
        metrics[name] = fmean(scores[name] for scores in per_query.values())
    data = {
        "name": args.questions.name,
        "questions": len(questions),
        "questions_fingerprint": fingerprint(questions),
        "passages": str(args.passages),
        "match": args.match,
    }
    record = {"metrics": metrics, "per_query": per_query, "data": data, "run": str(args.run)}
    write_json(args.output, {**record, **provenance()})
    print(markdown_table(["data", *metrics], [[data["name"], *metrics.values()]]))


def load_questions(path: Path) -> dict[str, Question]:
    """Read a file of questions; return {question id: question}.

    The file is a table in DPR's format, such as `nq-test.qa.csv` (question, tab, Python list of
    answers, without a header), or jsonl with `question` (or `query`) and `answers` (or `answer`).
    The ids are those that `contaccum encode` and `contaccum search` give the questions of a table.

    Raises:
        DataError: the file or a record of it cannot be used.
    """
    is_json = read_head(path).startswith(b"{")
    rows = read_json_lines(path) if is_json else read_lines(path)
    questions = parse_rows(path, rows, _parse_question, RecordReport())
    return {f"question-{number}": question for number, question in enumerate(questions, start=1)}


def _parse_question(row: str | Mapping[str, Any]) -> Question:
    if isinstance(row, str):
        text, answers = parse_question_line(row)
        try:
            # literal_eval evaluates literals only, so no code of the file runs.
            answers = ast.literal_eval(answers.strip())
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            raise Fault("answers are not a list", f"found {quoted(answers)}") from None
    else:
        text = get_first_value(row, ("question", "query"))
        answers = get_first_value(row, ("answers", "answer"))
    if isinstance(answers, str):
        answers = [answers]
    if not isinstance(answers, (list, tuple)) or not answers:
        raise Fault("no answers", f"found {quoted(answers)}")
    return Question(parse_text(text, "question"), [parse_text(text, "answer") for text in answers])


def load_passages(path: Path, ids: set[str]) -> dict[str, Passage]:
    """Read the passages with some ids; return {id: passage}.

    Raises:
        DataError: the file cannot be used, or an id occurs twice.
    """
    passages: dict[str, Passage] = {}
    # `contaccum encode` encodes passages without text, so that a run may contain them.
    for passage in read_passages(path, RecordReport(), may_be_blank=True):
        if passage.id in passages:
            raise DataError(f"{path}: id {passage.id!r:.60} occurs again")
        if passage.id in ids:
            passages[passage.id] = passage
    return passages


def score_questions(
    questions: Mapping[str, Question],
    run: Run,
    passages: Mapping[str, Passage],
    k_values: Sequence[int],
    match: Match = "string",
) -> dict[str, dict[str, float]]:
    """Compute the accuracy of each question: ``Accuracy@k`` is 1.0 for an answer in the top k.

    Args:
        questions: {question id: question}.
        run: {question id: {passage id: score}}, ordered as trec_eval does. A question without
            results counts as a miss.
        passages: at least the passages of the run. Titles are not searched, because DPR looks for
            answers in the text alone.
        k_values: cut-offs k.
        match: "string" or "regex"; see `make_answer_matcher`.

    Raises:
        DataError: the run has an unknown question, or a passage that ``passages`` lacks.
    """
    for question_id, hits in run.items():
        if question_id not in questions:
            raise DataError(
                f"{question_id!r:.60} is not the id of a question: ids are question-1 to "
                f"question-{len(questions)}, in the order of the file"
            )
        for passage_id in hits:
            if passage_id not in passages:
                raise DataError(f"passage {passage_id!r:.60} of {question_id} is not in the corpus")
    per_query = {}
    for question_id, question in tqdm(questions.items(), unit=" questions"):
        has_answer = make_answer_matcher(question.answers, match)
        best_hits = sort_as_trec_eval(run.get(question_id, {}))[: max(k_values)]
        first_rank = float("inf")
        for rank, (passage_id, _) in enumerate(best_hits, start=1):
            if has_answer(passages[passage_id].text):
                first_rank = rank
                break
        per_query[question_id] = {f"Accuracy@{k}": float(first_rank <= k) for k in k_values}
    return per_query


def make_answer_matcher(answers: Sequence[str], match: Match = "string") -> Callable[[str], bool]:
    """Return a function that returns True for a text that holds any of the answers.

    Args:
        answers: answers to one question.
        match: "string": the answer's tokens occur one after the other among the text's tokens,
            both in NFD and lower case. "regex": the answer is a pattern of Python's `re`, searched
            for anywhere in the text, ignoring case, both in NFD.

    A pattern that cannot be compiled is never found, as in DPR. An answer without any token is
    never found either (DPR finds it in every text).
    """
    if match == "string":
        answer_tokens = [tokens for tokens in map(_join_tokens, answers) if tokens.strip()]
        return lambda text: any(tokens in _join_tokens(text) for tokens in answer_tokens)
    patterns = []
    for answer in answers:
        with suppress(re.error, OverflowError, RecursionError):
            pattern = unicodedata.normalize("NFD", answer)
            patterns.append(re.compile(pattern, re.IGNORECASE | re.MULTILINE))

    def has_answer(text: str) -> bool:
        normalized_text = unicodedata.normalize("NFD", text)
        return any(pattern.search(normalized_text) for pattern in patterns)

    return has_answer


# Cached, because questions share passages.
@lru_cache(maxsize=4096)
def _join_tokens(text: str) -> str:
    """Return the tokens of a text, each between spaces.

    A sequence of tokens can then be searched for as a substring: " new york " is in
    " the new york times ", and " york tim" is no sequence of tokens.
    """
    tokens = _TOKEN.findall(unicodedata.normalize("NFD", text))
    joined = " ".join(token.lower() for token in tokens)
    return f" {joined} "


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(f"open_qa: error: {error}", file=sys.stderr)
        sys.exit(2)
