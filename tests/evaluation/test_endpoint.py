"""`evaluate --endpoint`: the client, its key, and the comparison of a server with its model."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from embedding_server import EmbeddingServer, embed_with, make_answer, run_server
from small_data import write_judged_places
from tiny_models import tiny_encoder

from contaccum import DualEncoder, questions
from contaccum.cli import main
from contaccum.encoders.settings import get_tower
from contaccum.errors import UserError
from contaccum.evaluation.endpoint import KEY_VARIABLE, embed
from contaccum.evaluation.results import read_result, read_trec_run

TEXTS = ["a", "bb", "ccc", "dddd", "eeeee"]
KEY = "a-secret-key-of-tests"


def embed_lengths(texts: list[str]) -> np.ndarray:
    """Return (n, 2): the length of each text, and 0.5."""
    return np.array([[len(text), 0.5] for text in texts], dtype=np.float32)


EXPECTED = embed_lengths(TEXTS)


@pytest.fixture(autouse=True)
def _environment(monkeypatch) -> None:
    monkeypatch.setattr(questions, "MAX_RETRIES", 1)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv(KEY_VARIABLE, KEY)


@pytest.fixture
def server() -> Iterator[EmbeddingServer]:
    with run_server(embed_lengths) as running_server:
        yield running_server


def embed_texts(url: str) -> np.ndarray:
    return embed(url, TEXTS, "served", batch_size=2)


# The client


@pytest.mark.parametrize("end", ["", "/v1/", "/v1/embeddings"])
def test_texts_are_sent_in_batches_and_answers_are_sorted_by_index(server, end):
    def answer(texts, embeddings):
        content = make_answer(texts, embeddings)
        content["data"].reverse()
        return content

    server.answer = answer
    server.statuses = [503]
    embeddings = embed_texts(server.url + end)
    assert embeddings.dtype == np.float32
    np.testing.assert_array_equal(embeddings, EXPECTED)
    batches = [request["input"] for request in server.requests]
    assert batches == [["a", "bb"], ["a", "bb"], ["ccc", "dddd"], ["eeeee"]]
    assert {request["model"] for request in server.requests} == {"served"}
    assert set(server.authorizations) == {f"Bearer {KEY}"}


def test_a_redirect_to_another_server_does_not_pass_on_the_key(server):
    with run_server(embed_lengths) as other_server:
        server.statuses = [307]
        server.location = f"{other_server.url}/v1/embeddings"
        embed_texts(server.url)
        assert set(other_server.authorizations) == {None}


@pytest.mark.parametrize(
    "answer",
    [
        lambda texts, embeddings: "<html>",
        lambda texts, embeddings: {"embeddings": [[1.0]]},
        lambda texts, embeddings: make_answer(texts, embeddings * np.nan),
        lambda texts, embeddings: make_answer(texts[1:], embeddings[1:]),
    ],
)
def test_answers_that_are_not_embeddings_of_the_model_are_one_line(server, answer):
    server.answer = answer
    with pytest.raises(UserError, match="embeddings") as caught:
        embed_texts(server.url)
    assert "\n" not in str(caught.value)


def test_a_key_that_cannot_be_used_is_refused(monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, "first\nsecond")
    with pytest.raises(UserError, match=KEY_VARIABLE) as caught:
        embed_texts("http://127.0.0.1:1")
    assert "second" not in str(caught.value)


# The command


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> DualEncoder:
    """Return a saved model with prompts; its folder is `model.path`."""
    model = tiny_encoder(
        query_prompt="where is: ", passage_prompt="the river: ", query_max_length=64
    )
    model.path = str(tmp_path_factory.mktemp("endpoint") / "model")
    model.save_pretrained(model.path)
    return model


@pytest.fixture
def model_server(model) -> Iterator[EmbeddingServer]:
    with run_server(embed_with(model)) as running_server:
        yield running_server


@pytest.fixture
def evaluate(model, tmp_path):
    """Return a function that evaluates on "places", and returns the exit code."""
    write_judged_places(tmp_path / "places")

    def run(*argv: str, model_path: str = model.path) -> int:
        options = ["--data", str(tmp_path / "places"), "--output", str(tmp_path / "out.json")]
        return main(["evaluate", model_path, *options, "--device", "cpu", "--no_progress", *argv])

    return run


@pytest.fixture
def read(tmp_path):
    """Return a function that reads the record and the run."""
    return lambda: (read_result(tmp_path / "out.json"), read_trec_run(tmp_path / "out.trec"))


def test_a_right_server_has_the_embeddings_and_the_scores_of_the_model(
    evaluate, read, model_server, tmp_path, capsys
):
    assert evaluate() == 0
    expected, expected_run = read()
    assert evaluate("--endpoint", model_server.url, "--served_model", "mine") == 0
    record, run = read()
    assert record["metrics"] == pytest.approx(expected["metrics"])
    assert record["model"] == expected["model"]
    assert run.keys() == expected_run.keys()
    for query_id, expected_scores in expected_run.items():
        assert run[query_id] == pytest.approx(expected_scores, abs=1e-5)
    assert record["endpoint"]["model_metrics"] == expected["metrics"]
    queries, documents = record["endpoint"]["samples"]
    assert [queries["texts"], documents["texts"]] == ["query", "document"]
    assert [queries["number"], documents["number"]] == [6, 24]
    for sample in (queries, documents):
        assert sample["url"] == model_server.url
        assert sample["least_cosine"] == pytest.approx(1)
        assert sample["endpoint_norms"] == pytest.approx(sample["model_norms"])
    assert {request["model"] for request in model_server.requests} == {"mine"}
    assert "| 1.000000" in capsys.readouterr().out
    assert "1.000000" in (tmp_path / "out.md").read_text()


def test_a_server_without_prompts_has_other_cosines_and_scores(
    evaluate, read, model_server, model, capsys
):
    """Every text is sent with its prompt, but this server encodes it without the prompt."""
    embed = embed_with(model)
    model_server.embed = lambda texts: 2 * embed([text.partition(": ")[2] for text in texts])
    assert evaluate("--endpoint", f"{model_server.url}/v1", "--metrics", "MRR@10", "NDCG@10") == 0
    record, _ = read()
    for request in model_server.requests:
        assert request["model"] == model.path
        for text in request["input"]:
            assert text.startswith(("where is: ", "the river: ")), text
    for sample in record["endpoint"]["samples"]:
        assert sample["least_cosine"] <= sample["median_cosine"] < 0.9999
        np.testing.assert_allclose(sample["model_norms"], 1, rtol=1e-5)
        np.testing.assert_allclose(sample["endpoint_norms"], 2, rtol=1e-5)
    served = record["metrics"]["MRR@10"]
    expected = record["endpoint"]["model_metrics"]["MRR@10"]
    lines = [line for line in capsys.readouterr().out.splitlines() if "| MRR@10  |" in line]
    cells = [cell.strip() for cell in lines[0].strip("|").split("|")]
    assert cells[1:] == [f"{served:.4f}", f"{expected:.4f}", f"{served - expected:+.4f}"]


def test_the_key_is_in_no_output(evaluate, model_server, tmp_path, capsys, caplog):
    """With a fault, the server repeats the key in its answer."""
    caplog.set_level("DEBUG")
    assert evaluate("--endpoint", model_server.url) == 0
    for statuses in ([401], [500, 500]):
        model_server.statuses = statuses
        assert evaluate("--endpoint", model_server.url) == 2
    assert set(model_server.authorizations) == {f"Bearer {KEY}"}  # also in the refused requests
    captured = capsys.readouterr()
    assert "401" in captured.err and "500" in captured.err
    files = [path.read_text() for path in tmp_path.glob("out*")]
    assert len(files) == 3
    for text in (captured.out, captured.err, caplog.text, *files):
        assert KEY not in text


def test_two_towers_are_compared_with_two_servers(evaluate, read, tmp_path, capsys):
    towers = tiny_encoder(tied=False)
    with torch.no_grad():
        for parameter in get_tower(towers, "query").parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model: dict[str, Any] = {"model_path": str(tmp_path / "towers")}
    towers.save_pretrained(model["model_path"])
    assert evaluate("--endpoint", "http://127.0.0.1:1", **model) == 2
    assert "--query_endpoint" in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "out.json").exists()
    with (
        run_server(lambda texts: np.asarray(towers.encode_query(list(texts)))) as query_server,
        run_server(embed_with(towers)) as server,
    ):
        urls = ["--endpoint", server.url, "--query_endpoint", query_server.url]
        assert evaluate(*urls, **model) == 0
    samples = read()[0]["endpoint"]["samples"]
    assert [sample["url"] for sample in samples] == [query_server.url, server.url]
    assert [sample["least_cosine"] for sample in samples] == pytest.approx([1, 1])


def test_results_of_servers_are_never_used_again(evaluate, model_server, capsys):
    """A server may have changed, and the model has other scores."""
    with_endpoint = ["--endpoint", model_server.url]
    assert evaluate(*with_endpoint) == 0
    num_requests = len(model_server.requests)
    assert evaluate(*with_endpoint) == 0
    assert len(model_server.requests) == 2 * num_requests
    assert evaluate() == 0
    assert "kept: " not in capsys.readouterr().out
    assert evaluate() == 0
    assert capsys.readouterr().out.count("kept: ") == 1


def test_a_server_of_another_dimension_is_refused_and_nothing_is_written(
    evaluate, model_server, model, tmp_path, capsys
):
    embed = embed_with(model)
    model_server.embed = lambda texts: embed(texts)[:, :8]
    assert evaluate("--endpoint", model_server.url) == 2
    *progress, error = capsys.readouterr().err.splitlines()
    assert "embeddings of shape" in error
    assert "error" not in "".join(progress)
    assert not list(tmp_path.glob("out*"))
