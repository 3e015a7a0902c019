"""`contaccum evaluate --endpoint`: records, tables, settings and refused arguments."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from embedding_server import EmbeddingServer, embed_with, run_server
from small_data import write_judged_places
from tiny_models import tiny_encoder

from contaccum import DualEncoder
from contaccum.cli import main
from contaccum.evaluation import endpoint
from contaccum.evaluation.endpoint import KEY_VARIABLE
from contaccum.evaluation.results import read_result

KEY = "a-secret-key-of-tests"
SETTINGS = ("--device", "cpu", "--no_progress", "--k_values", "10", "100")


@pytest.fixture(autouse=True)
def _environment(monkeypatch) -> None:
    monkeypatch.setattr(endpoint, "BACKOFF_SECONDS", 0.0)
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
        running_server.key = KEY
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


def test_a_right_server_has_the_scores_of_the_model(
    evaluate, server, model_path, tmp_path, capsys, caplog
):
    assert evaluate() == 0
    expected = read_result(tmp_path / "out.json")
    expected_run = (tmp_path / "out.trec").read_text()
    assert evaluate("--endpoint", server.url, "--served-model", "mine") == 0
    record = read_result(tmp_path / "out.json")
    assert record["metrics"] == pytest.approx(expected["metrics"])
    assert record["model"] == expected["model"]
    assert len(expected_run.splitlines()) == len((tmp_path / "out.trec").read_text().splitlines())
    comparison = record["endpoint"]
    assert comparison["url"] == comparison["query_url"] == f"{server.url}/v1/embeddings"
    assert comparison["served_model"] == "mine"
    assert comparison["model_metrics"] == expected["metrics"]
    assert comparison["sample"]["document"]["least_cosine"] >= 0.9999
    first, *others = comparison["comparison"]
    assert first["metric"] == "NDCG@10"
    assert first["endpoint"] == pytest.approx(first["model"])
    assert first["difference"] == pytest.approx(0)
    assert first["p_value"] == 1
    assert [row["metric"] for row in others] == ["MRR@10", "MAP@100", "Recall@100"]
    assert {request["model"] for request in server.requests} == {"mine"}
    printed = capsys.readouterr().out
    assert "No difference: the endpoint gives the model's embeddings" in printed
    assert "No difference" in (tmp_path / "out.md").read_text()
    assert "does not give the model's embeddings" not in caplog.text


def test_a_wrong_server_is_compared_and_its_fault_is_named(
    evaluate, server, model, tmp_path, capsys, caplog
):
    """The name of the model in requests is MODEL, and every text is sent with its prompt."""
    embed = embed_with(model)

    def embed_without_prompts(texts):
        return embed([text.partition(": ")[2] for text in texts])

    server.embed = embed_without_prompts
    assert evaluate("--endpoint", f"{server.url}/v1", "--metrics", "MRR@10", "NDCG@10") == 0
    record = read_result(tmp_path / "out.json")
    texts = [text for request in server.requests for text in request["input"]]
    assert all(text.startswith(("where is: ", "the river: ")) for text in texts)
    first = record["endpoint"]["comparison"][0]
    assert first["metric"] == "MRR@10"
    assert first["endpoint"] == pytest.approx(record["metrics"]["MRR@10"])
    assert first["model"] == record["endpoint"]["model_metrics"]["MRR@10"]
    assert first["low"] <= first["difference"] <= first["high"]
    assert first["difference"] == pytest.approx(first["endpoint"] - first["model"])
    causes = record["endpoint"]["sample"]["causes"]
    assert [cause["name"] for cause in causes] == ["prompt missing"]
    assert "likely cause: prompt missing" in caplog.text
    printed = capsys.readouterr().out
    assert "Likely cause for queries and documents: **prompt missing**" in printed
    lines = [line for line in printed.splitlines() if line.startswith("| prompt missing")]
    assert lines[0].split()[4::2] == ["1.000000", "1.000000"]


def test_the_key_is_in_no_output(evaluate, server, tmp_path, capsys, caplog):
    caplog.set_level("DEBUG")
    assert evaluate("--endpoint", server.url) == 0
    server.key = "another"
    assert evaluate("--endpoint", server.url) == 2
    assert set(server.authorizations) == {f"Bearer {KEY}"}
    captured = capsys.readouterr()
    outputs = [captured.out, captured.err, caplog.text]
    outputs += [path.read_text() for path in tmp_path.glob("out*")]
    assert len(outputs) == 6
    assert not any(KEY in output for output in outputs)


def test_two_towers_are_compared_with_two_servers(tmp_path, data, capsys):
    model = tiny_encoder(tied=False)
    with torch.no_grad():
        for parameter in model.query_encoder.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    path = str(tmp_path / "towers")
    model.save_pretrained(path)
    output = tmp_path / "out.json"
    argv = ["evaluate", path, "--data", data, "--output", str(output), *SETTINGS]
    assert main([*argv, "--endpoint", "http://127.0.0.1:1"]) == 2
    assert "--query_endpoint" in capsys.readouterr().err.splitlines()[-1]
    assert not output.exists()

    def embed_queries(texts):
        return np.asarray(model.encode_query(list(texts)))

    with run_server(embed_queries) as query_server, run_server(embed_with(model)) as server:
        urls = ["--endpoint", server.url, "--query_endpoint", query_server.url]
        assert main([*argv, *urls]) == 0
    printed = capsys.readouterr().out
    assert f"Queries are encoded by {query_server.url}/v1/embeddings." in printed
    assert "No difference" in printed


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
    summary = json.loads((tmp_path / "out.json").read_text())
    assert [row["name"] for row in summary["sets"]] == ["places", "other"]


def test_smaller_embeddings_of_a_server_are_scored(evaluate, server, tmp_path):
    assert evaluate("--endpoint", server.url, "--dims", "8") == 0
    record = read_result(tmp_path / "out.json")
    assert [row["dimensions"] for row in record["served"]["rows"]] == [16, 8]
    assert record["served"]["rows"][0]["NDCG@10"] == pytest.approx(record["metrics"]["NDCG@10"])


def test_wrong_arguments_and_servers_are_refused_in_one_line(
    evaluate, server, model, data, tmp_path, capsys
):
    """Nothing is written."""
    url = ["--endpoint", server.url]
    embed = embed_with(model)
    run = tmp_path / "run.trec"
    run.write_text("q0 Q0 cat-tree 1 1.0 x\n")

    def expect_error(argv: list[str], message: str) -> None:
        assert main(argv) == 2
        *progress, error = capsys.readouterr().err.splitlines()
        assert message in error
        assert "error" not in "".join(progress)

    def expect_refusal(argv: list[str], message: str) -> None:
        assert evaluate(*argv) == 2
        *progress, error = capsys.readouterr().err.splitlines()
        assert message in error
        assert "error" not in "".join(progress)

    expect_refusal(["--endpoint", "localhost:8080"], "not the URL of a server")
    expect_refusal(["--query_endpoint", server.url], "--query_endpoint needs --endpoint")
    expect_refusal(["--served_model", "x"], "--served_model needs --endpoint")
    expect_refusal([*url, "--request_fields", "[1]"], "is not a JSON object")
    expect_refusal([*url, "--request_fields", "{"], "is not JSON")
    expect_refusal([*url, "--update_card"], "--update_card")
    output = ["--output", str(tmp_path / "out.json")]
    with_run = ["evaluate", "--run", str(run), "--data", data, *output]
    expect_error([*with_run, *url], "--endpoint needs a MODEL")
    mteb = ["evaluate", "model", "--mteb", "SciFact", *output]
    expect_error([*mteb, *url], "--endpoint cannot be combined with --mteb")

    assert server.requests == []
    server.embed = lambda texts: embed(texts)[:, :8]
    expect_refusal(url, "answers with 8 dimensions, but the model has 16")
    server.statuses = [500] * 6
    expect_refusal(url, "still answers with status 500 after 5 retries")
    server.model_name = "another"
    expect_refusal(url, "--served_model")
    server.key = "another key"
    expect_refusal(url, "refuses the key (status 401): correct the environment variable")
    expect_refusal(["--endpoint", "http://127.0.0.1:1"], "no answer after 5 retries")
    assert not list(tmp_path.glob("out*"))


def test_request_fields_are_sent_and_recorded(evaluate, server, tmp_path):
    fields = {"truncate_prompt_tokens": 40}
    assert evaluate("--endpoint", server.url, "--request_fields", json.dumps(fields)) == 0
    assert all(request["truncate_prompt_tokens"] == 40 for request in server.requests)
    record = json.loads(Path(tmp_path / "out.json").read_text())
    assert record["endpoint"]["request_fields"] == fields
