"""Open-domain question answering, scored as in DPR and the ContAccum paper.

The score is the share of questions for which one of the top k passages holds an answer.
`score_open_qa` scores the run of a model or of any other system; `make_answer_matcher` compares
answers with texts as DPR does (Karpukhin et al., arXiv 2004.04906). Relevance judgements are not
used (see `beir_sets`), and no answer is extracted.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import regex

from contaccum.data import Passage, Questions, RecordReport, read_passages
from contaccum.errors import DataError, check_choice
from contaccum.evaluation.metrics import check_k_values, sort_as_trec_eval
from contaccum.evaluation.results import EvaluationResult, Run

Match = Literal["string", "regex"]

# DrQA's simple tokenizer: a token is a word, or any other visible character.
_TOKEN = regex.compile(r"[\p{L}\p{N}\p{M}]+|[^\p{Z}\p{C}]")


def score_open_qa(
    questions: Questions,
    run: Run,
    passages: Mapping[str, Passage],
    k_values: Sequence[int] = (1, 5, 20, 100),
    match: Match = "string",
    show_progress: bool = True,
    **record_fields: Any,
) -> EvaluationResult:
    """Compute top-k retrieval accuracy.

    ``Accuracy@k`` is the share of questions with an answer in one of the k best passages.

    Args:
        questions: questions with their answers.
        run: {question id: {passage id: score}}, ordered as trec_eval does. A question without
            results counts as a miss.
        passages: at least the passages of the run. Titles are not searched, because DPR looks for
            answers in the text alone.
        k_values: cut-offs k.
        match: "string" or "regex"; see `make_answer_matcher`.
        show_progress: show a progress bar.
        record_fields: further fields of `EvaluationResult`. ``model`` and ``search`` are required.

    Raises:
        ConfigError: a cut-off is below 1, or ``match`` is unknown.
        DataError: the run has an unknown question, or a passage that ``passages`` lacks.
    """
    from tqdm.auto import tqdm

    k_values = check_k_values(k_values)
    check_choice("match", match, ("string", "regex"))
    _check_run(questions, run, passages)
    per_query = {}
    progress = tqdm(
        questions.answers.items(), unit=" questions", desc="Matching", disable=not show_progress
    )
    for question_id, answers in progress:
        has_answer = make_answer_matcher(answers, match)
        best_hits = sort_as_trec_eval(run.get(question_id, {}))[: max(k_values)]
        texts = [passages[passage_id].text for passage_id, _ in best_hits]
        rank = _find_first_rank(texts, has_answer)
        per_query[question_id] = {f"Accuracy@{k}": float(rank <= k) for k in k_values}  # 1.0 or 0.0
    means = {}
    for k in k_values:
        name = f"Accuracy@{k}"
        means[name] = fmean(scores[name] for scores in per_query.values())
    data = {
        "questions": len(questions.texts),
        "questions_fingerprint": questions.fingerprint,
        "match": match,
    }
    return EvaluationResult(means, per_query, run, data, **record_fields)


def _check_run(questions: Questions, run: Run, passages: Mapping[str, Passage]) -> None:
    """Raise `DataError` for a question or a passage of the run that does not exist."""
    for question_id, hits in run.items():
        if question_id not in questions.texts:
            raise DataError(
                f"{question_id!r:.60} is not the id of a question: ids are question-1 to "
                f"question-{len(questions.texts)}, in the order of the file "
                "(search with the questions of this file)"
            )
        for passage_id in hits:
            if passage_id not in passages:
                raise DataError(
                    f"passage {passage_id!r:.60} of {question_id} is not in the corpus (pass the "
                    "corpus that was searched)"
                )


def _find_first_rank(texts: Sequence[str], has_answer: Callable[[str], bool]) -> float:
    """Return the rank, from 1 on, of the first text with an answer; infinity if there is none."""
    for rank, text in enumerate(texts, start=1):
        if has_answer(text):
            return rank
    return float("inf")


def load_passages(
    path: Path, report: RecordReport, ids: set[str] | None = None
) -> dict[str, Passage]:
    """Read passages from a file.

    Args:
        path: a file that `read_passages` reads.
        report: counts the records that are read and skipped.
        ids: ids of the passages to return; None: all.

    Returns:
        {id: passage}.

    Raises:
        DataError: the file cannot be used, no passage is left, or an id occurs twice.
    """
    passages: dict[str, Passage] = {}
    # `contaccum encode` encodes passages without text, so that a run may contain them.
    for passage in read_passages(path, report, may_be_blank=True):
        if passage.id in passages:
            raise DataError(
                f"{path}: id {passage.id!r:.60} occurs again (keep one passage for each id)"
            )
        if ids is None or passage.id in ids:
            passages[passage.id] = passage
    description = "passages"
    if ids is not None:
        description = "passages of the run"
    report.refuse_if_nothing_left(path, len(passages), description)
    return passages


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
        return _make_string_matcher(answers)
    return _make_regex_matcher(answers)


def _make_string_matcher(answers: Sequence[str]) -> Callable[[str], bool]:
    answer_tokens = []
    for answer in answers:
        tokens = _join_tokens(answer)
        if tokens.strip():
            answer_tokens.append(tokens)

    def has_answer(text: str) -> bool:
        text_tokens = _join_tokens(text)
        return any(tokens in text_tokens for tokens in answer_tokens)

    return has_answer


def _make_regex_matcher(answers: Sequence[str]) -> Callable[[str], bool]:
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
