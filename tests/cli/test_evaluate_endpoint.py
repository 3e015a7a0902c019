"""`contaccum evaluate --endpoint`: the comparison of a server with its model, and its refusals."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from embedding_server import EmbeddingServer, embed_with, run_server
from small_data import write_judged_places
from tiny_models import tiny_encoder

from contaccum import DualEncoder
from contaccum.cli import main
from contaccum.encoders.settings import get_tower
from contaccum.evaluation import endpoint
from contaccum.evaluation.endpoint import KEY_VARIABLE
from contaccum.evaluation.results import read_result, read_trec_run

KEY = "a-secret-key-of-tests"
SETTINGS = ("--device", "cpu", "--no_progress", "--k_values", "10", "100")


@pytest.fixture(autouse=True)
def _environment(monkeypatch) -> None:
    monkeypatch.setattr(endpoint, "RETRIES", endpoint.RETRIES.new(backoff_factor=0.0))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv(KEY_VARIABLE, KEY)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> str:
    path = str(tmp_path_factory.mktemp("endpoint") / "model")
    model = tiny_encoder(
        query_prompt="where is: ", passage_prompt="the river: ", query_max_length=64
    )
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def model(model_path) -> DualEncoder:
    return DualEncoder.from_pretrained(model_path, device="cpu")


@pytest.fixture
def server(model) -> Iterator[EmbeddingServer]:
    with run_server(embed_with(model)) as running_server:
        yield running_server


@pytest.fixture
def data(tmp_path) -> str:
    return str(write_judged_places(tmp_path / "places"))


@pytest.fixture
def evaluate(model_path, data, tmp_path):
    def run(*argv: str) -> int:
        output = ["--output", str(tmp_path / "out.json")]
        return main(["evaluate", model_path, "--data", data, *output, *SETTINGS, *argv])

    return run


def test_a_right_server_has_the_embeddings_and_the_scores_of_the_model(
    evaluate, server, tmp_path, capsys
):
    assert evaluate() == 0
    expected = read_result(tmp_path / "out.json")
    expected_run = read_trec_run(tmp_path / "out.trec")
    assert evaluate("--endpoint", server.url, "--served_model", "mine") == 0
    record = read_result(tmp_path / "out.json")
    assert record["metrics"] == pytest.approx(expected["metrics"])
    assert record["model"] == expected["model"]
    run = read_trec_run(tmp_path / "out.trec")
    assert run.keys() == expected_run.keys()
    for query_id, expected_scores in expected_run.items():
        assert run[query_id] == pytest.approx(expected_scores, abs=1e-5)
    assert record["endpoint"]["model_metrics"] == expected["metrics"]
    queries, documents = record["endpoint"]["samples"]
    assert [queries["texts"], documents["texts"]] == ["query", "document"]
    assert [queries["number"], documents["number"]] == [6, 24]
    for sample in (queries, documents):
        assert sample["url"] == server.url
        assert sample["least_cosine"] == pytest.approx(1)
        assert sample["endpoint_norms"] == pytest.approx(sample["model_norms"])
    assert {request["model"] for request in server.requests} == {"mine"}
    text = capsys.readouterr().out
    assert "| 1.000000" in text
    assert "1.000000" in (tmp_path / "out.md").read_text()


def test_a_server_without_prompts_has_other_cosines_and_scores(
    evaluate, server, model, model_path, tmp_path, capsys
):
    """Every text is sent with its prompt, but this server encodes it without the prompt."""
    embed = embed_with(model)

    def embed_without_prompts(texts):
        return 2 * embed([text.partition(": ")[2] for text in texts])

    server.embed = embed_without_prompts
    assert evaluate("--endpoint", f"{server.url}/v1", "--metrics", "MRR@10", "NDCG@10") == 0
    record = read_result(tmp_path / "out.json")
    for request in server.requests:
        assert request["model"] == model_path
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


def test_the_key_is_in_no_output(evaluate, server, tmp_path, capsys, caplog):
    caplog.set_level("DEBUG")
    assert evaluate("--endpoint", server.url) == 0
    server.statuses = [401]
    assert evaluate("--endpoint", server.url) == 2
    assert set(server.authorizations) == {f"Bearer {KEY}"}  # also in the refused request
    captured = capsys.readouterr()
    assert KEY not in captured.out
    assert KEY not in captured.err
    assert KEY not in caplog.text
    paths = list(tmp_path.glob("out*"))
    assert len(paths) == 3
    for path in paths:
        assert KEY not in path.read_text(), path


def test_two_towers_are_compared_with_two_servers(tmp_path, data, capsys):
    model = tiny_encoder(tied=False)
    with torch.no_grad():
        for parameter in get_tower(model, "query").parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model_path = str(tmp_path / "towers")
    model.save_pretrained(model_path)
    output = tmp_path / "out.json"
    argv = ["evaluate", model_path, "--data", data, "--output", str(output), *SETTINGS]
    assert main([*argv, "--endpoint", "http://127.0.0.1:1"]) == 2
    assert "--query_endpoint" in capsys.readouterr().err.splitlines()[-1]
    assert not output.exists()

    def embed_queries(texts):
        return np.asarray(model.encode_query(list(texts)))

    with run_server(embed_queries) as query_server, run_server(embed_with(model)) as server:
        urls = ["--endpoint", server.url, "--query_endpoint", query_server.url]
        assert main([*argv, *urls]) == 0
    queries, documents = read_result(output)["endpoint"]["samples"]
    assert queries["url"] == query_server.url
    assert documents["url"] == server.url
    assert queries["least_cosine"] == pytest.approx(1)
    assert documents["least_cosine"] == pytest.approx(1)


def test_results_of_servers_are_never_used_again(evaluate, server, tmp_path, capsys):
    """A server may have changed, and the model has other scores."""
    other_set = str(write_judged_places(tmp_path / "other"))
    sets = ["--data", str(tmp_path / "places"), other_set]
    with_endpoint = [*sets, "--endpoint", server.url]
    assert evaluate(*with_endpoint) == 0
    num_requests = len(server.requests)
    assert evaluate(*with_endpoint) == 0
    assert len(server.requests) == 2 * num_requests
    assert evaluate(*sets) == 0
    assert "kept: " not in capsys.readouterr().out
    assert evaluate(*sets) == 0
    assert capsys.readouterr().out.count("kept: ") == 2


def test_wrong_arguments_and_servers_are_refused_in_one_line(
    evaluate, server, model, tmp_path, capsys
):
    """Nothing is written."""
    embed = embed_with(model)
    server.embed = lambda texts: embed(texts)[:, :8]
    for argv, message in (
        (["--query_endpoint", server.url], "--query_endpoint needs --endpoint"),
        (["--endpoint", server.url], "embeddings of shape"),
    ):
        assert evaluate(*argv) == 2
        *progress, error = capsys.readouterr().err.splitlines()
        assert message in error
        assert "error" not in "".join(progress)
    assert not list(tmp_path.glob("out*"))
