"""Questions for documents, written by a language model on a server with OpenAI's interface.

The steps, in their order: `plan_prompts` decides what is asked, `ask_all` asks and writes each
answer to an `AnswerFile` at once, and `select_questions` keeps the answers that can be trained on.
A process that was killed reads its file of answers, and asks only for those that are missing.

The answers are data. They become a query of a record, and nothing else.

Source: Dai et al., "Promptagator: Few-shot Dense Retrieval From 8 Examples", 2022 (few examples of
the user's own questions, and the round trip: a question is kept if its document is found for it).
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import re
import time
from bisect import bisect
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from tqdm import tqdm

from contaccum import __version__
from contaccum.data.beir import read_split_queries
from contaccum.data.near_duplicates import find_near_duplicates, get_words, join_near_duplicates
from contaccum.data.records import SPLIT_RECORD, Passage, RecordSource
from contaccum.data.rows import RecordReport
from contaccum.data.split import TRAIN_FILE
from contaccum.errors import ConfigError, DataError, UserError, one_line, quoted
from contaccum.files import AnyPath, fingerprint, list_changes, require_writable
from contaccum.redaction import KEY_VARIABLE, read_endpoint_key, redact
from contaccum.retrieval.bm25 import bm25_run

if TYPE_CHECKING:
    import openai

    from contaccum.encoders.dual_encoder import DualEncoder

KINDS = {
    "question": "Write one question that the passage answers.",
    "keywords": "Write the few keywords that a person types into a search box to find the passage.",
    "need": "Write one sentence in which a person describes a need that the passage helps with.",
    "claim": "Write one short claim that the passage supports or refutes.",
}
"""{kind of question without examples: what the language model is asked to do}."""
LIKE_EXAMPLES = (
    "Write what a person types to find the last passage, in the manner of the examples before it."
)
ANSWER_ALONE = "Use the language of the passage. Answer with this text alone, in one line."
NUM_EXAMPLES = 4
REQUEST = {"max_tokens": 100, "temperature": 0.7}
"""Fields of each request, which the user may change."""
MAX_RETRIES = 6
"""Retries of a call after a lost connection, a time-out, or a status of 408, 409, 429 or 5xx."""

_BLOCK = 64  # documents that are sorted by length, so that neighbours may share their examples
_SHARED = 16  # documents with the same examples; servers keep the start of such prompts in a cache
_NEAREST = 32  # pairs with the nearest lengths, from which examples are drawn
_LEAST_COPY = 40  # characters; a shorter text of the passage may be a name or a term
_MAX_CHARACTERS = 300  # of a question
_LEADING_WORD = re.compile(r"^(question|query|claim|keywords)\s*:\s*", re.IGNORECASE)
_QUOTES = "\"'`*\u201c\u201d "
_THOUGHTS = re.compile(r"<think>.*?</think>", re.DOTALL)


class Prompt(NamedTuple):
    """A call that is to be made.

    Attributes:
        document: number of the document.
        round: number of the earlier calls for the same document.
        kind: a key of `KINDS`, or "like" with examples.
        messages: the chat.
    """

    document: int
    round: int
    kind: str
    messages: list[dict[str, str]]


def read_examples(
    path: AnyPath, data_format: str | None = None, columns: Any = None
) -> tuple[list[tuple[str, str]], list[str]]:
    """Return the pairs (query, passage) of training data, and all queries that must not be copied.

    Args:
        path: pairs in any format of docs/data.md; or a folder that `contaccum split` wrote, of
            which the training queries are examples, and no query of any part must be copied.
        data_format, columns: how the pairs are read; see `read_records`.
    """
    path = Path(path).expanduser()
    held_out: list[str] = []
    if (path / SPLIT_RECORD).is_file():
        for part in ("dev", "test"):
            held_out += read_split_queries(path / part, "test", RecordReport()).values()
        path /= TRAIN_FILE
    source = RecordSource(path, data_format, columns=columns)
    pairs = [(record.query, record.positives[0]) for record in source.records(RecordReport())]
    if not pairs:
        raise DataError(f"{path}: has no pairs, so there are no examples (leave out --like)")
    return pairs, [*(query for query, _ in pairs), *held_out]


def plan_prompts(
    documents: Sequence[Passage],
    pairs: Sequence[tuple[str, str]],
    per_document: int,
    max_characters: int,
    seed: int,
) -> Iterator[Prompt]:
    """Yield the calls in their order: all documents in a random order, and then again.

    Args:
        documents: the documents.
        pairs: (query, passage) of the user's data, the examples; without them, the questions are of
            the four `KINDS` in turn.
        per_document: number of calls for each document.
        max_characters: number of characters that are shown of each passage.
        seed: seed of the order and of the examples.
    """
    by_length = sorted(pairs, key=lambda pair: len(pair[1]))
    lengths = [len(passage) for _, passage in by_length]
    random_numbers = random.Random(seed)
    for number in range(per_document):
        order = list(range(len(documents)))
        random_numbers.shuffle(order)
        for start in range(0, len(order), _BLOCK):
            block = order[start : start + _BLOCK]
            block.sort(key=lambda row: len(documents[row].passage))
            examples: list[tuple[str, str]] = []
            for position, row in enumerate(block):
                if pairs and position % _SHARED == 0:
                    middle = bisect(lengths, len(documents[row].passage))
                    first = max(0, min(middle - _NEAREST // 2, len(pairs) - _NEAREST))
                    nearest = by_length[first : first + _NEAREST]
                    examples = random_numbers.sample(nearest, min(NUM_EXAMPLES, len(nearest)))
                kind = "like" if pairs else list(KINDS)[(start + position + number) % len(KINDS)]
                instruction = LIKE_EXAMPLES if pairs else KINDS[kind]
                messages = []
                for query, passage in examples:
                    messages.append({"role": "user", "content": _cut(passage, max_characters)})
                    messages.append({"role": "assistant", "content": query})
                passage = _cut(documents[row].passage, max_characters)
                messages.append({"role": "user", "content": passage})
                start_of_chat = f"{instruction} {ANSWER_ALONE}\n\n"
                messages[0]["content"] = start_of_chat + messages[0]["content"]
                yield Prompt(row, number, kind, messages)


def _cut(passage: str, max_characters: int) -> str:
    """Return the start of a passage, if possible up to the end of a word."""
    if len(passage) > max_characters:
        start, blank, _ = passage[: max_characters + 1].rpartition(" ")
        passage = start if blank else passage[:max_characters]
    return f"Passage: {passage}"


# Calls --------------------------------------------------------------------------------------------


def make_client(url: str, timeout: float) -> openai.OpenAI:
    """Return a client of a server. The key is read from the environment.

    Raises:
        ConfigError: the client is not installed, or the URL or the key cannot be used.
    """
    try:
        import openai
    except ModuleNotFoundError as error:
        raise ConfigError(
            "questions: the openai client is not installed: pip install 'contaccum[openai]'"
        ) from error
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{url}: not the URL of a server: write it as http://localhost:8080/v1")
    url = url.rstrip("/").removesuffix("/chat/completions")
    if not urlsplit(url).path:
        url += "/v1"
    # The client must have some key. Without one, it would send OPENAI_API_KEY to any server.
    return openai.OpenAI(
        base_url=url,
        api_key=read_endpoint_key() or "no-key",
        timeout=openai.Timeout(timeout, connect=min(timeout, 10.0)),
        max_retries=MAX_RETRIES,
    )


def ask(
    client: openai.OpenAI, llm: str, request: Mapping[str, Any], prompt: Prompt
) -> dict[str, Any]:
    """Return the answer to a prompt: its text, why it ended, and the number of tokens.

    An answer that is none has a ``fault``: the server refuses this prompt, or its answer is broken.

    Raises:
        UserError: the server cannot be used, after all retries.
    """
    import openai

    answer = {"answer": "", "end": "", "tokens": 0}
    messages: Any = prompt.messages
    try:
        completion = client.chat.completions.create(
            model=llm, messages=messages, extra_body=dict(request)
        )
    except (openai.BadRequestError, openai.UnprocessableEntityError) as error:
        return {**answer, "fault": quoted(redact(error.message), 200)}
    except openai.APIStatusError as error:
        raise UserError(
            f"{client.base_url}: status {error.status_code}, answer "
            f"{quoted(redact(error.message), 200)}: correct --endpoint, --llm or the key in "
            f"{KEY_VARIABLE}; the same command goes on after the last answer"
        ) from error
    except openai.APIConnectionError as error:
        reason = quoted(redact(str(error.__cause__ or error)), 200)
        raise UserError(
            f"{client.base_url}: no answer ({reason}): start the server, correct --endpoint, or "
            "raise --timeout; the same command goes on after the last answer"
        ) from error
    except (openai.OpenAIError, ValueError) as error:
        return {**answer, "fault": quoted(redact(str(error)), 200)}
    choices = getattr(completion, "choices", None)  # a page of another server is a text
    if not choices or choices[0].message is None:
        return {**answer, "fault": f"no chat completion: {quoted(redact(str(completion)), 200)}"}
    answer["answer"] = redact(choices[0].message.content or "")
    answer["end"] = choices[0].finish_reason
    answer["tokens"] = completion.usage.total_tokens if completion.usage else 0
    return answer


class AnswerFile:
    """The answers of all starts in a file, to which each one is appended when it comes.

    The first line is the identity of the work. A line that a kill has cut is dropped.

    Args:
        path: the file, which is locked until `close`.
        identity: {name: JSON value} of everything that decides the prompts.

    Attributes:
        answers: {(document, round): answer}.
        seconds: time of all starts, up to the last answer.

    Raises:
        ConfigError: the file has answers to other prompts, or another process has it.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any]) -> None:
        require_writable(path)
        self.path = path
        self.answers: dict[tuple[int, int], dict[str, Any]] = {}
        self.seconds = 0.0
        self._identity = identity
        self._file = path.open("a+b")
        try:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ConfigError(
                    f"{path}: another contaccum questions writes it; wait for it, or name another "
                    "--output"
                ) from error
            self._read()
        except BaseException:
            self.close()
            raise

    def _read(self) -> None:
        self._file.seek(0)
        lines = self._file.read().splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n"):
            self._file.truncate(sum(map(len, lines[:-1])))
            lines.pop()
        if not lines:
            return
        try:
            earlier, *rows = map(json.loads, lines)
            changes = list_changes(earlier, self._identity)
            for row in rows:
                self.answers[row["document"], row["round"]] = row
                self.seconds = row["seconds"]
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise DataError(f"{self.path}: not a file of answers: remove or rename it") from error
        if changes:
            raise ConfigError(
                f"{self.path}: has answers with another {', '.join(changes)}; name another "
                "--output, or remove this file"
            )

    def add(self, prompt: Prompt, answer: Mapping[str, Any], seconds: float) -> None:
        """Append an answer, with the time of all starts."""
        if self._file.tell() == 0:
            self._file.write(json.dumps(redact(self._identity)).encode() + b"\n")
        place = {"document": prompt.document, "round": prompt.round, "seconds": round(seconds, 3)}
        row = {**place, **answer}
        self._file.write(json.dumps(row).encode() + b"\n")
        self._file.flush()
        self.answers[prompt.document, prompt.round] = row
        self.seconds = seconds

    def close(self) -> None:
        """Close the file, and remove it if it is empty."""
        is_empty = os.fstat(self._file.fileno()).st_size == 0
        self._file.close()
        if is_empty:
            self.path.unlink(missing_ok=True)

    def __enter__(self) -> AnswerFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def make_identity(
    documents: Iterable[Passage],
    pairs: Sequence[tuple[str, str]],
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """Return everything that decides the prompts, for an `AnswerFile`."""
    return {
        "version": __version__,
        "documents": fingerprint(*(tuple(document) for document in documents)),
        "pairs of --like": fingerprint(*pairs),
        **settings,
    }


def ask_all(
    prompts: Sequence[Prompt],
    answers: AnswerFile,
    client: openai.OpenAI,
    llm: str,
    request: Mapping[str, Any],
    concurrency: int,
    max_calls: int | None = None,
    max_seconds: float | None = None,
    show_progress: bool = False,
) -> None:
    """Ask for the answers that are missing, until all are there or the budget is used.

    The first call is alone, so that a wrong name of a model costs one call. After an error, or
    Ctrl-C, the answers to the calls that are under way are still written.

    Args:
        max_calls, max_seconds: the budget of all starts; None: no limit.

    Raises:
        UserError: the server cannot be used.
    """
    missing = [each for each in prompts if (each.document, each.round) not in answers.answers]
    if max_calls is not None:
        missing = missing[: max(0, max_calls - len(answers.answers))]
    missing.reverse()  # the next one is the last
    started = time.monotonic() - answers.seconds
    num_tokens = sum(answer["tokens"] for answer in answers.answers.values())
    running: dict[Future[dict[str, Any]], Prompt] = {}
    num_running = 1
    with (
        ThreadPoolExecutor(concurrency) as pool,
        tqdm(total=len(missing), desc="questions", disable=not show_progress) as progress,
    ):
        try:
            while True:
                has_time = max_seconds is None or time.monotonic() - started < max_seconds
                while missing and has_time and len(running) < num_running:
                    prompt = missing.pop()
                    running[pool.submit(ask, client, llm, request, prompt)] = prompt
                if not running:
                    break
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    prompt = running.pop(future)
                    answer = future.result()
                    if "fault" in answer and num_running == 1 and not answers.answers:
                        raise UserError(
                            f"{client.base_url}: {answer['fault']}: correct --endpoint, --llm or "
                            "--request"
                        )
                    answers.add(prompt, answer, time.monotonic() - started)
                    num_tokens += answer["tokens"]
                    num_running = concurrency
                    progress.set_postfix_str(f"{num_tokens:,} tokens", refresh=False)
                    progress.update()
        finally:
            for future, prompt in running.items():
                if future.exception() is None:
                    answers.add(prompt, future.result(), time.monotonic() - started)


# Choice -------------------------------------------------------------------------------------------


def parse_question(answer: Mapping[str, Any]) -> tuple[str, str]:
    """Return the question of an answer, and why it cannot be used ("" if it can).

    The question is the first line that is not blank, without thoughts, quotes and a leading word.
    """
    if "fault" in answer:
        return "", "refused or broken"
    lines = _THOUGHTS.sub("", answer["answer"]).strip().split("\n")
    question = _LEADING_WORD.sub("", one_line(lines[0]).strip(_QUOTES)).strip(_QUOTES)
    if not get_words(question):
        return "", "empty"
    if answer["end"] == "length" and len(lines) == 1:
        return question, "cut off"
    if len(question) > _MAX_CHARACTERS:
        return question, "too long"
    return question, ""


def select_questions(
    prompts: Sequence[Prompt],
    answers: Mapping[tuple[int, int], Mapping[str, Any]],
    documents: Sequence[Passage],
    known_queries: Iterable[str],
    top_k: int,
    llm: str,
    model: DualEncoder | None = None,
) -> tuple[list[dict[str, Any]], Counter[str]]:
    """Return the records of the questions to keep, and the numbers of the others by reason.

    A question is kept if BM25 or the model finds its document among the first ``top_k``, and if it
    is no copy or near-duplicate of its passage, of a known query, or of an earlier question.

    Args:
        prompts: in the order of the records.
        answers: {(document, round): answer}.
        documents: all documents, in which the questions are searched.
        known_queries: the user's own queries, of which some may be held out.
        model: searches for the questions whose document BM25 has not found.
    """
    reasons: Counter[str] = Counter()
    questions: dict[str, tuple[Prompt, str]] = {}
    for prompt in prompts:
        answer = answers.get((prompt.document, prompt.round))
        if answer is None:
            continue
        question, reason = parse_question(answer)
        words = get_words(question)
        if not reason and len(words) >= _LEAST_COPY:
            if words in get_words(documents[prompt.document].passage):
                reason = "copied from the passage"
        if reason:
            reasons[reason] += 1
        else:
            questions[f"#{len(questions)}"] = prompt, question

    texts = [question for _, question in questions.values()]
    of_known = find_near_duplicates(texts, known_queries)
    passages = {documents[prompt.document].passage for prompt, _ in questions.values()}
    of_passages = find_near_duplicates(texts, passages)
    for name, (_, question) in list(questions.items()):
        if question in of_known or question in of_passages:
            is_known = question in of_known
            reasons["near-copy of a known query" if is_known else "copied from the passage"] += 1
            del questions[name]

    corpus = {each.id: {"title": each.title, "text": each.text} for each in documents}
    to_find = {name: question for name, (_, question) in questions.items()}
    searches: list[Any] = [bm25_run]
    if model is not None:
        from contaccum.retrieval.search import FaissSearcher

        searches.append(FaissSearcher(model).search)
    for search in searches:
        run = search(corpus, to_find, top_k) if to_find else {}
        for name in list(to_find):
            if documents[questions[name][0].document].id in run.get(name, {}):
                del to_find[name]
    for name in to_find:
        reasons[f"document not among the first {top_k}"] += 1
        del questions[name]

    from scipy.cluster.hierarchy import DisjointSet  # slow

    texts = [question for _, question in questions.values()]
    groups = DisjointSet(range(len(texts)))
    join_near_duplicates(texts, groups)
    groups_so_far = set()
    records = []
    for number, (prompt, question) in enumerate(questions.values()):
        if groups[number] in groups_so_far:
            reasons["near-copy of another question"] += 1
            continue
        groups_so_far.add(groups[number])
        document = documents[prompt.document]
        records.append(
            {
                "query": question,
                "positive": document.passage,
                "document_id": document.id,
                "kind": prompt.kind,
                "generated_by": llm,
            }
        )
    return records, reasons
