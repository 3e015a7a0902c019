"""Open-domain QA as DPR and the ContAccum paper score it: in how many questions the top k passages hold an answer.

`score_open_qa` scores a run, of a model by `beir.search` or of any other system; `answer_finder` is DPR's
match of an answer (Karpukhin et al., arXiv 2004.04906). Relevance judgements play no part (that is `beir`), and no
answer is extracted.
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
from contaccum.evaluation.metrics import check_k_values, trec_order
from contaccum.evaluation.results import EvaluationResult, Run

Match = Literal["string", "regex"]


def score_open_qa(
    questions: Questions,
    run: Run,
    passages: Mapping[str, Passage],
    k_values: Sequence[int] = (1, 5, 20, 100),
    match: Match = "string",
    show_progress: bool = True,
    **about: Any,
) -> EvaluationResult:
    """Top-k retrieval accuracy: `Accuracy@k` is the share of questions with an answer in one of the k best passages.

    Args:
        run: {question id: {passage id: score}}, in trec_eval's order; a question without results counts as a miss.
        passages: those of the run at least. Titles are not searched: DPR seeks answers in the text alone.
        match: see `answer_finder`.
        about: what the result says of model, search, tokenisation, timing and precision.

    Raises:
        ConfigError: k < 1 or an unknown match.
        DataError: the run is of other questions, or has a passage that ``passages`` lacks.
    """
    from tqdm.auto import tqdm

    k_values = check_k_values(k_values)
    check_choice("match", match, ("string", "regex"))
    for name, hits in run.items():
        if name not in questions.texts:
            called = f"they are called question-1 to question-{len(questions.texts)}, in the order of the file"
            raise DataError(f"{name!r:.60} is no question ({called})")
        for passage in hits:
            if passage not in passages:
                raise DataError(
                    f"passage {passage!r:.60} of {name} is not in the corpus (give the one searched)"
                )
    per_query: dict[str, dict[str, float]] = {}
    for name, answers in tqdm(
        questions.answers.items(), unit=" questions", desc="Matching", disable=not show_progress
    ):
        found = answer_finder(answers, match)
        best = enumerate(trec_order(run.get(name, {}))[: max(k_values)], start=1)
        rank = next(
            (place for place, (passage, _) in best if found(passages[passage].text)), float("inf")
        )
        per_query[name] = {f"Accuracy@{k}": float(rank <= k) for k in k_values}
    means = {
        f"Accuracy@{k}": fmean(scores[f"Accuracy@{k}"] for scores in per_query.values())
        for k in k_values
    }
    data = {
        "questions": len(questions.texts),
        "questions_fingerprint": questions.fingerprint,
        "match": match,
    }
    return EvaluationResult(means, per_query, run, data, **about)


def load_passages(
    path: Path, report: RecordReport, wanted: set[str] | None = None
) -> dict[str, Passage]:
    """{id: passage}, of those ``wanted`` alone where it is given.

    Raises:
        DataError: the file cannot be used, nothing is left of it, or an id occurs twice.
    """
    found: dict[str, Passage] = {}
    for passage in read_passages(path, report):
        if passage.id in found:
            raise DataError(
                f"{path}: id {passage.id!r:.60} occurs again (keep one passage for each id)"
            )
        if wanted is None or passage.id in wanted:
            found[passage.id] = passage
    report.refuse_if_nothing_left(
        path, len(found), "passages" if wanted is None else "passages of the run"
    )
    return found


def answer_finder(answers: Sequence[str], match: Match = "string") -> Callable[[str], bool]:
    """A test of passages: whether any of the answers is in the text.

    "string": the answer's tokens occur in a row among the passage's, all of both in NFD and lower case. "regex": an
    answer is a pattern of Python's `re`, sought without case anywhere in the text, both in NFD; one that cannot be
    compiled is never found, as in DPR. An answer without any token is never found either (DPR finds it everywhere).
    """
    if match == "string":
        wanted = [tokens for answer in answers if (tokens := _tokens(answer)).strip()]
        return lambda text: any(tokens in _tokens(text) for tokens in wanted)
    patterns = []
    for answer in answers:
        with suppress(re.error, OverflowError, RecursionError):
            patterns.append(
                re.compile(unicodedata.normalize("NFD", answer), re.IGNORECASE | re.MULTILINE)
            )
    return lambda text: any(
        pattern.search(unicodedata.normalize("NFD", text)) for pattern in patterns
    )


# DrQA's simple tokenizer: words, and other visible characters one by one.
_TOKEN = regex.compile(r"[\p{L}\p{N}\p{M}]+|[^\p{Z}\p{C}]")


# Questions share passages, and each has its answers looked up one after another.
@lru_cache(maxsize=4096)
def _tokens(text: str) -> str:
    # No token holds a space, so a row of tokens is found as a text between spaces.
    return f" {' '.join(token.lower() for token in _TOKEN.findall(unicodedata.normalize('NFD', text)))} "
