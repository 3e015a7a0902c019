"""The client of an embedding server: requests, answers, retries and one-line errors."""

import base64
from collections.abc import Iterator

import numpy as np
import pytest
from embedding_server import EmbeddingServer, make_answer, run_server

from contaccum.errors import ConfigError, UserError
from contaccum.evaluation import endpoint
from contaccum.evaluation.endpoint import KEY_VARIABLE, EmbeddingEndpoint, complete_url

TEXTS = ["a", "bb", "ccc", "dddd", "eeeee"]
KEY = "a-secret-key-of-tests"


def embed_lengths(texts: list[str]) -> np.ndarray:
    """Return (n, 2): the length of each text, and 0.5."""
    return np.array([[len(text), 0.5] for text in texts], dtype=np.float32)


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch) -> None:
    monkeypatch.setattr(endpoint, "BACKOFF_SECONDS", 0.0)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv(KEY_VARIABLE, raising=False)


@pytest.fixture
def server() -> Iterator[EmbeddingServer]:
    with run_server(embed_lengths) as running_server:
        yield running_server


def make_client(server: EmbeddingServer, **settings) -> EmbeddingEndpoint:
    return EmbeddingEndpoint(
        server.url, "served", dimension=2, batch_size=2, show_progress=False, **settings
    )


def test_texts_are_sent_in_batches_with_the_name_of_the_model(server):
    client = make_client(server, request_fields={"truncate_prompt_tokens": 7})
    embeddings = client.embed(TEXTS)
    assert embeddings.dtype == np.float32
    np.testing.assert_array_equal(embeddings, embed_lengths(TEXTS))
    assert [request["input"] for request in server.requests] == [TEXTS[:2], TEXTS[2:4], TEXTS[4:]]
    assert server.requests[0]["model"] == "served"
    assert server.requests[0]["encoding_format"] == "float"
    assert server.requests[0]["truncate_prompt_tokens"] == 7


def test_no_texts_need_no_request(server):
    assert make_client(server).embed([]).shape == (0, 2)
    assert server.requests == []


def test_answers_in_another_order_are_sorted_by_index(server):
    def answer(texts, embeddings):
        content = make_answer(texts, embeddings)
        content["data"].reverse()
        return content

    server.answer = answer
    np.testing.assert_array_equal(make_client(server).embed(TEXTS), embed_lengths(TEXTS))


def test_base64_is_decoded(server):
    def answer(texts, embeddings):
        content = make_answer(texts, embeddings)
        for item, embedding in zip(content["data"], embeddings, strict=True):
            item["embedding"] = base64.b64encode(embedding.astype("<f4").tobytes()).decode()
        return content

    server.answer = answer
    np.testing.assert_array_equal(make_client(server).embed(TEXTS), embed_lengths(TEXTS))


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_passing_failure_is_retried(server, status):
    server.statuses = [status, status]
    np.testing.assert_array_equal(make_client(server).embed(TEXTS), embed_lengths(TEXTS))
    assert [request["input"] for request in server.requests[:3]] == [TEXTS[:2]] * 3


def test_a_lasting_failure_ends_after_five_retries(server):
    server.statuses = [500] * 20
    with pytest.raises(UserError, match="still answers with status 500 after 5 retries"):
        make_client(server).embed(TEXTS)
    assert len(server.requests) == 6


def test_nothing_that_listens_is_an_error(server):
    client = EmbeddingEndpoint("http://127.0.0.1:1", "served", 2, show_progress=False)
    with pytest.raises(UserError, match=r"127.0.0.1:1/.*Connection refused.*start the server"):
        client.embed(TEXTS)


def test_the_key_of_the_environment_is_sent(server, monkeypatch):
    server.key = KEY
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    make_client(server).embed(TEXTS)
    assert set(server.authorizations) == {f"Bearer {KEY}"}


def test_the_key_is_sent_even_if_netrc_names_the_server(server, monkeypatch, tmp_path):
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login someone password something\n")
    monkeypatch.setenv("NETRC", str(netrc))
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    make_client(server).embed(TEXTS)
    assert set(server.authorizations) == {f"Bearer {KEY}"}


@pytest.mark.parametrize("key", [KEY, "short"])
@pytest.mark.parametrize("status", [401, 403, 400, 422, 500])
def test_no_error_contains_the_key(server, monkeypatch, status, key):
    """The server repeats the key in its answers."""
    monkeypatch.setenv(KEY_VARIABLE, key)
    server.statuses = [status] * 6
    with pytest.raises(UserError) as caught:
        make_client(server).embed(TEXTS)
    assert key not in str(caught.value)
    assert KEY_VARIABLE in str(caught.value)


def test_a_missing_key_names_the_variable(server):
    server.key = KEY
    with pytest.raises(UserError, match=f"asks for a key .* {KEY_VARIABLE}"):
        make_client(server).embed(TEXTS)


def test_a_key_that_no_header_can_have_is_refused(server, monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, "first\nsecond")
    with pytest.raises(ConfigError, match=KEY_VARIABLE) as caught:
        make_client(server)
    assert "second" not in str(caught.value)


def test_an_unknown_model_names_the_option(server):
    server.model_name = "another"
    with pytest.raises(UserError, match=r"has no model 'served'.*--served_model"):
        make_client(server).embed(TEXTS)


def test_a_redirect_is_refused(server):
    server.statuses = [301]
    with pytest.raises(UserError, match=r"redirects to http://127\.0\.0\.1/elsewhere"):
        make_client(server).embed(TEXTS)


def _drop_one(texts, embeddings):
    content = make_answer(texts, embeddings)
    content["data"].pop()
    return content


def _repeat_index(texts, embeddings):
    content = make_answer(texts, embeddings)
    content["data"][1]["index"] = 0
    return content


def _count_from_one(texts, embeddings):
    content = make_answer(texts, embeddings)
    for item in content["data"]:
        item["index"] += 1
    return content


@pytest.mark.parametrize(
    "answer, message",
    [
        (lambda texts, embeddings: b"<html>", "not answer in the form of OpenAI's embeddings"),
        (lambda texts, embeddings: b"", "an empty answer"),
        (lambda texts, embeddings: {"embeddings": [[1.0]]}, "not answer in the form of OpenAI"),
        (lambda texts, embeddings: [[1.0, 2.0]], "not answer in the form of OpenAI"),
        (lambda texts, embeddings: make_answer(texts, embeddings[:, None]), "pooled embeddings"),
        (_drop_one, "answers with 1 embeddings for 2 texts"),
        (_repeat_index, "answers with 1 embeddings for 2 texts"),
        (_count_from_one, "does not number its embeddings from 0 to 1"),
        (lambda texts, embeddings: make_answer(texts, embeddings[:, :1]), "with 1 dimensions"),
        (lambda texts, embeddings: make_answer(texts, embeddings * np.nan), "NaN or infinity"),
    ],
)
def test_answers_that_cannot_be_used_are_one_line(server, answer, message):
    server.answer = answer
    with pytest.raises(UserError, match=message) as caught:
        make_client(server).embed(TEXTS)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"{server.url}/v1/embeddings: ")


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/", "/v1/embeddings"])
def test_the_url_may_be_the_base_or_the_full_path(end):
    assert complete_url(f"http://host:8080{end}") == "http://host:8080/v1/embeddings"
    assert complete_url(f"https://host/a{end}") == "https://host/a/v1/embeddings"


@pytest.mark.parametrize(
    "url, message",
    [
        ("localhost:8080", "not the URL of a server"),
        ("ftp://host", "not the URL of a server"),
        ("http://[::1", "not the URL of a server"),
        ("http://", "not the URL of a server"),
        ("http://host/v1?key=secret", KEY_VARIABLE),
    ],
)
def test_other_urls_are_refused(url, message):
    with pytest.raises(ConfigError, match=message) as caught:
        complete_url(url)
    assert "secret" not in str(caught.value)
