"""Questions for documents, written by a language model on a server with OpenAI's interface.

`make_prompts` decides what is asked, `ask_all` asks and appends each answer to a file at once, and
`select_questions` chooses the answers to train on. A later start asks only for missing answers.

The answers are data: they become the query of a record, and nothing else.

Source: Dai et al., "Promptagator: Few-shot Dense Retrieval From 8 Examples", 2022 (few examples of
the user's own questions; a question is kept if its document is found for it).
"""

from __future__ import annotations

import json
import random
import re
import time
from bisect import bisect
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from tqdm import tqdm

from contaccum.data.near_duplicates import find_near_duplicates, get_words, join_near_duplicates
from contaccum.data.records import GENERATED_BY, Passage
from contaccum.errors import ConfigError, UserError, one_line, quoted
from contaccum.redaction import KEY_VARIABLE, read_endpoint_key, redact
from contaccum.retrieval.bm25 import bm25_run

if TYPE_CHECKING:
    import openai

KINDS = (
    "Write one question that the passage answers.",
    "Write the few keywords that a person types into a search box to find the passage.",
    "Write one sentence in which a person describes a need that the passage helps with.",
    "Write one short claim that the passage supports or refutes.",
)
"""What is asked for in turn, if there are no examples of questions."""
LIKE_EXAMPLES = (
    "Write what a person types to find the last passage, in the manner of the examples before it."
)
ANSWER_ALONE = "Use the language of the passage. Answer with this text alone, in one line."
NUM_EXAMPLES = 4
MAX_CHARACTERS = 600  # of a passage that are shown, some 100 words
REQUEST = {"max_tokens": 100, "temperature": 0.7}
"""Fields of each request, which the user may change."""
MAX_RETRIES = 6
TIMEOUT = 300.0  # seconds

_BLOCK = 64  # documents that are sorted by length, so that neighbours may share their examples
_SHARED = 16  # documents with the same examples: servers keep the start of such prompts in a cache
_NEAREST = 32  # pairs of the nearest lengths, from which examples are drawn
_LEAST_COPY = 40  # characters; a shorter text that the passage has may be a name or a term
_MAX_QUESTION = 300  # characters
# An answer that is not JSON, or has no choices, such as the page of another server
_BROKEN = (ValueError, AttributeError, TypeError, IndexError)
_QUOTES = "\"'`*\u201c\u201d "
_LEADING_WORD = re.compile(r"^(question|query|claim|keywords)\s*:\s*", re.IGNORECASE)
_THOUGHTS = re.compile(r"<think>.*?</think>", re.DOTALL)

Prompt = tuple[int, list[dict[str, str]]]
"""The number of a document, and the chat that is sent."""
Answers = dict[int, dict[str, Any]]
"""{number of a document: answer}; see `ask`."""


def make_prompts(
    documents: Sequence[Passage], pairs: Sequence[tuple[str, str]]
) -> Iterator[Prompt]:
    """Yield a prompt for each document, in a random order that is always the same.

    The examples are drawn from those pairs (query, passage) of the user whose passages are about as
    long as the document.
    """
    random_numbers = random.Random(0)
    order = random_numbers.sample(range(len(documents)), len(documents))
    by_length = sorted(pairs, key=lambda pair: len(pair[1]))
    lengths = [len(passage) for _, passage in by_length]
    for start in range(0, len(order), _BLOCK):
        block = sorted(order[start : start + _BLOCK], key=lambda row: len(documents[row].passage))
        examples: list[tuple[str, str]] = []
        for position, row in enumerate(block):
            passage = documents[row].passage
            if pairs and position % _SHARED == 0:
                first = bisect(lengths, len(passage)) - _NEAREST // 2
                first = max(0, min(first, len(pairs) - _NEAREST))
                nearest = by_length[first : first + _NEAREST]
                examples = random_numbers.sample(nearest, min(NUM_EXAMPLES, len(nearest)))
            task = LIKE_EXAMPLES if pairs else KINDS[position % len(KINDS)]
            start_of_chat = f"{task} {ANSWER_ALONE}\n\n"
            chat = []
            for query, text in [*examples, ("", passage)]:
                if len(text) > MAX_CHARACTERS:
                    words, blank, _ = text[: MAX_CHARACTERS + 1].rpartition(" ")
                    text = words if blank else text[:MAX_CHARACTERS]
                chat.append({"role": "user", "content": f"{start_of_chat}Passage: {text}"})
                chat.append({"role": "assistant", "content": query})
                start_of_chat = ""
            yield row, chat[:-1]


def make_client(url: str) -> openai.OpenAI:
    """Return a client of a server, with the key of the environment.

    Raises `ConfigError` if it is not installed, or the URL or the key cannot be used.
    """
    try:
        import openai
    except ModuleNotFoundError as error:
        raise ConfigError(
            "the client of the server is not installed: pip install 'contaccum[openai]'"
        ) from error
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{url}: not the URL of a server: write it as http://localhost:8080/v1")
    return openai.OpenAI(
        base_url=url if urlsplit(url).path.strip("/") else f"{url.rstrip('/')}/v1",
        # Without a key here, the client would send OPENAI_API_KEY to any server.
        api_key=read_endpoint_key() or "no-key",
        timeout=openai.Timeout(TIMEOUT, connect=10.0),
        max_retries=MAX_RETRIES,
    )


def ask(
    client: openai.OpenAI, llm: str, request: Mapping[str, Any], chat: list[Any]
) -> dict[str, Any]:
    """Return the answer to a prompt: its text, why it ended, and the number of tokens.

    It has a ``fault`` if the server refuses this prompt, or if its answer is broken. A server that
    cannot be used raises `UserError`, after all retries.
    """
    import openai

    try:
        completion = client.chat.completions.create(
            model=llm, messages=chat, extra_body=dict(request)
        )
        choice = completion.choices[0]
        return {
            "answer": redact(choice.message.content or ""),
            "end": choice.finish_reason,
            "tokens": completion.usage.total_tokens if completion.usage else 0,
        }
    except (openai.BadRequestError, openai.UnprocessableEntityError, *_BROKEN) as error:
        return {"answer": "", "tokens": 0, "fault": quoted(redact(str(error)), 200)}
    except openai.APIError as error:
        raise UserError(
            f"{client.base_url}: no answer: {quoted(redact(str(error.__cause__ or error)), 200)}: "
            f"start the server, or correct --endpoint, --llm or the key in {KEY_VARIABLE}; the "
            "same command goes on after the last answer"
        ) from error


def ask_all(
    prompts: Iterator[Prompt],
    num_prompts: int,
    file: Path,
    client: openai.OpenAI,
    llm: str,
    request: Mapping[str, Any],
    concurrency: int,
    max_calls: float,
    max_seconds: float,
    show_progress: bool = False,
) -> Answers:
    """Append the missing answers to a file, until all are there or the budget is used; return all.

    Answers and budget are those of all starts. The first call is alone, so that a wrong name of a
    model costs one call. After an error, or Ctrl-C, the answers to the calls that are under way are
    still written. A server that cannot be used raises `UserError`.
    """
    answers: Answers = {}
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else []:
        if line.endswith("}"):  # else a kill has cut it
            answers[json.loads(line)["document"]] = json.loads(line)
    seconds_before = max((answer["seconds"] for answer in answers.values()), default=0.0)
    started = time.monotonic() - seconds_before
    num_missing = int(max(0, min(num_prompts, max_calls) - len(answers)))
    missing = islice((prompt for prompt in prompts if prompt[0] not in answers), num_missing)
    progress = tqdm(total=num_missing, desc="questions", disable=not show_progress)
    running: dict[Future[dict[str, Any]], int] = {}
    num_tokens = sum(answer["tokens"] for answer in answers.values())

    def write(row: int, answer: dict[str, Any]) -> None:
        nonlocal num_tokens
        seconds = round(time.monotonic() - started, 3)
        answers[row] = {"document": row, "seconds": seconds, **answer}
        with file.open("a", encoding="utf-8") as lines:
            lines.write(f"\n{json.dumps(answers[row])}\n")  # the line before may have been cut
        num_tokens += answer["tokens"]
        progress.set_postfix_str(f"{num_tokens:,} tokens", refresh=False)
        progress.update()

    with progress, ThreadPoolExecutor(concurrency) as pool:
        num_running = 1
        try:
            while True:
                has_time = time.monotonic() - started < max_seconds
                for row, chat in islice(missing, num_running - len(running) if has_time else 0):
                    running[pool.submit(ask, client, llm, request, chat)] = row
                if not running:
                    break
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    row = running.pop(future)
                    answer = future.result()
                    if "fault" in answer and not answers:
                        raise UserError(
                            f"{client.base_url}: {answer['fault']}: correct --endpoint, --llm or "
                            "--request"
                        )
                    write(row, answer)
                    num_running = concurrency
        finally:
            for future, row in running.items():
                if future.exception() is None:
                    write(row, future.result())
    return answers


def parse_question(answer: Mapping[str, Any], passage: str) -> tuple[str, str]:
    """Return the question of an answer, and why it cannot be used; "" if it can.

    The question is the first line that is not blank, without thoughts, quotes and a leading word.
    """
    if "fault" in answer:
        return "", "refused or broken"
    lines = _THOUGHTS.sub("", answer["answer"]).strip().split("\n")
    question = _LEADING_WORD.sub("", one_line(lines[0]).strip(_QUOTES)).strip(_QUOTES)
    words = get_words(question)
    if not words:
        return "", "empty"
    if len(words) >= _LEAST_COPY and words in get_words(passage):
        return "", "copied from the passage"
    is_cut = answer["end"] == "length" and len(lines) == 1
    if is_cut or len(question) > _MAX_QUESTION:
        return "", "cut off or too long"
    return question, ""


def select_questions(
    answers: Answers,
    documents: Sequence[Passage],
    known_queries: Iterable[str],
    top_k: int,
    llm: str,
    model: Any = None,
    show_progress: bool = False,
) -> tuple[list[dict[str, str]], Counter[str]]:
    """Return the records of the questions to keep, and the numbers of the others by reason.

    A question is kept if BM25 or the model finds its document among the first ``top_k``, and if it
    is no near-duplicate of a passage, of a query of the user, which may be held out, or of another
    question. The model, a `DualEncoder`, searches for documents that BM25 has not found.
    """
    reasons: Counter[str] = Counter()
    questions: dict[int, str] = {}
    for row in sorted(answers):
        question, reason = parse_question(answers[row], documents[row].passage)
        if reason:
            reasons[reason] += 1
        else:
            questions[row] = question

    def leave_out(rows: list[int], reason: str) -> None:
        for row in rows:
            del questions[row]
            reasons[reason] += 1

    references = [*known_queries, *(documents[row].passage for row in questions)]
    copies = find_near_duplicates(questions.values(), references)
    rows = [row for row, question in questions.items() if question in copies]
    leave_out(rows, "near-copies of a passage or a known query")

    corpus = {each.id: {"title": each.title, "text": each.text} for each in documents}
    to_find = {f"question {row}": question for row, question in questions.items()}
    searches: list[Any] = [bm25_run]
    if model is not None:
        from contaccum.retrieval.search import FaissSearcher

        searches.append(FaissSearcher(model, show_progress_bar=show_progress).search)
    for search in searches:
        for name, hits in (search(corpus, to_find, top_k) if to_find else {}).items():
            if documents[int(name.split()[1])].id in hits:
                del to_find[name]
    rows = [int(name.split()[1]) for name in to_find]
    leave_out(rows, f"with a document that is not among the first {top_k}")

    from scipy.cluster.hierarchy import DisjointSet  # slow

    groups = DisjointSet(range(len(questions)))
    join_near_duplicates(list(questions.values()), groups)
    firsts = {min(group) for group in groups.subsets()}
    rows = [row for number, row in enumerate(questions) if number not in firsts]
    leave_out(rows, "near-copies of another question")

    records = []
    for row, question in questions.items():
        document = documents[row]
        record = {"query": question, "positive": document.passage, "document_id": document.id}
        records.append({**record, GENERATED_BY: llm})
    return records, reasons
