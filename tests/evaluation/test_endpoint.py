"""The client of an embedding server: requests, answers, retries, the key, one-line errors."""

from collections.abc import Iterator

import numpy as np
import pytest
from embedding_server import EmbeddingServer, make_answer, run_server

from contaccum.errors import ConfigError, UserError
from contaccum.evaluation import endpoint
from contaccum.evaluation.endpoint import KEY_VARIABLE, embed

TEXTS = ["a", "bb", "ccc", "dddd", "eeeee"]
KEY = "a-secret-key-of-tests"


def embed_lengths(texts: list[str]) -> np.ndarray:
    """Return (n, 2): the length of each text, and 0.5."""
    return np.array([[len(text), 0.5] for text in texts], dtype=np.float32)


EXPECTED = embed_lengths(TEXTS)


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch) -> None:
    monkeypatch.setattr(endpoint, "RETRIES", endpoint.RETRIES.new(backoff_factor=0.0))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv(KEY_VARIABLE, raising=False)


@pytest.fixture
def server() -> Iterator[EmbeddingServer]:
    with run_server(embed_lengths) as running_server:
        yield running_server


def embed_texts(url: str) -> np.ndarray:
    return embed(url, TEXTS, "served", batch_size=2)


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/", "/v1/embeddings"])
def test_texts_are_sent_in_batches_with_the_name_of_the_model(server, end):
    embeddings = embed_texts(server.url + end)
    assert embeddings.dtype == np.float32
    np.testing.assert_array_equal(embeddings, EXPECTED)
    batches = [request["input"] for request in server.requests]
    assert batches == [["a", "bb"], ["ccc", "dddd"], ["eeeee"]]
    assert server.requests[0]["model"] == "served"
    assert server.authorizations[0] is None


def test_answers_in_another_order_are_sorted_by_index(server):
    def answer(texts, embeddings):
        content = make_answer(texts, embeddings)
        content["data"].reverse()
        return content

    server.answer = answer
    np.testing.assert_array_equal(embed_texts(server.url), EXPECTED)


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_passing_failure_is_retried(server, status):
    server.statuses = [status, status]
    np.testing.assert_array_equal(embed_texts(server.url), EXPECTED)
    assert [request["input"] for request in server.requests[:3]] == [["a", "bb"]] * 3


def test_a_lasting_failure_ends_after_five_retries(server):
    server.statuses = [500] * 20
    with pytest.raises(UserError, match="no answer"):
        embed_texts(server.url)
    assert len(server.requests) == 6


def test_the_key_is_sent_even_if_netrc_names_the_server(server, monkeypatch, tmp_path):
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login someone password something\n")
    monkeypatch.setenv("NETRC", str(netrc))
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    embed_texts(server.url)
    assert set(server.authorizations) == {f"Bearer {KEY}"}


@pytest.mark.parametrize("status", [401, 500])
def test_no_error_contains_the_key(server, monkeypatch, status):
    """The server repeats the key in its answers."""
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    server.statuses = [status] * 6
    with pytest.raises(UserError, match=str(status)) as caught:
        embed_texts(server.url)
    assert KEY not in str(caught.value)


def test_a_redirect_does_not_get_the_key(server, monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    with run_server(embed_lengths) as other_server:
        server.statuses = [307]
        server.location = f"{other_server.url}/v1/embeddings"
        with pytest.raises(UserError, match="status 307"):
            embed_texts(server.url)
        assert other_server.requests == []


def _drop_one(texts, embeddings):
    content = make_answer(texts, embeddings)
    content["data"].pop()
    return content


@pytest.mark.parametrize(
    "answer",
    [
        lambda texts, embeddings: "<html>",
        lambda texts, embeddings: {"embeddings": [[1.0]]},
        lambda texts, embeddings: make_answer(texts, embeddings * np.nan),
        _drop_one,
    ],
)
def test_answers_that_are_not_embeddings_of_the_model_are_one_line(server, answer):
    server.answer = answer
    with pytest.raises(UserError, match="embeddings") as caught:
        embed_texts(server.url)
    assert "\n" not in str(caught.value)


def test_another_url_is_refused():
    with pytest.raises(ConfigError, match="not the URL of a server"):
        embed_texts("localhost:8080")


def test_a_key_that_no_header_can_have_is_refused(monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, "first\nsecond")
    with pytest.raises(UserError, match=KEY_VARIABLE) as caught:
        embed_texts("http://127.0.0.1:1")
    assert "second" not in str(caught.value)
