"""`contaccum evaluate --endpoint`: records, tables, settings and refused arguments."""

import json
from collections.abc import Iterator

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
from contaccum.evaluation.results import read_result, read_trec_run

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
    expected_run = read_trec_run(tmp_path / "out.trec")
    assert evaluate("--endpoint", server.url, "--served-model", "mine") == 0
    record = read_result(tmp_path / "out.json")
    assert record["metrics"] == pytest.approx(expected["metrics"])
    assert record["model"] == expected["model"]
    run = read_trec_run(tmp_path / "out.trec")
    assert run.keys() == expected_run.keys()
    for query_id, expected_scores in expected_run.items():
        assert run[query_id] == pytest.approx(expected_scores, abs=1e-5)
    comparison = record["endpoint"]
    assert comparison["url"] == f"{server.url}/v1/embeddings"
    assert comparison["query_url"] == f"{server.url}/v1/embeddings"
    assert comparison["served_model"] == "mine"
    assert comparison["model_metrics"] == expected["metrics"]
    assert comparison["sample"]["document"]["least_cosine"] >= 0.9999
    first, *others = comparison["comparison"]
    assert first["metric"] == "NDCG@10"
    assert first["endpoint"] == pytest.approx(first["model"])
    assert first["difference"] == pytest.approx(0)
    assert first["p_value"] == 1
    assert [row["metric"] for row in others] == ["MRR@10", "MAP@100", "Recall@100"]
    assert server.requests
    for request in server.requests:
        assert request["model"] == "mine"
    printed = capsys.readouterr().out
    assert "No difference: the endpoint gives the model's embeddings" in printed
    assert "No difference" in (tmp_path / "out.md").read_text()
    assert "does not give the model's embeddings" not in caplog.text


def test_a_wrong_server_is_compared_and_its_fault_is_named(
    evaluate, server, model, model_path, tmp_path, capsys, caplog
):
    """Every text is sent with its prompt, but this server encodes it without the prompt.

    Without --served_model, the name of the model in requests is MODEL.
    """
    embed = embed_with(model)

    def embed_without_prompts(texts):
        texts_without_prompts = [text.partition(": ")[2] for text in texts]
        return embed(texts_without_prompts)

    server.embed = embed_without_prompts
    assert evaluate("--endpoint", f"{server.url}/v1", "--metrics", "MRR@10", "NDCG@10") == 0
    record = read_result(tmp_path / "out.json")
    assert server.requests
    for request in server.requests:
        assert request["model"] == model_path
        for text in request["input"]:
            assert text.startswith(("where is: ", "the river: ")), text
    first = record["endpoint"]["comparison"][0]
    assert first["metric"] == "MRR@10"
    assert first["endpoint"] == pytest.approx(record["metrics"]["MRR@10"])
    assert first["model"] == record["endpoint"]["model_metrics"]["MRR@10"]
    assert first["low"] <= first["difference"]
    assert first["difference"] <= first["high"]
    assert first["difference"] == pytest.approx(first["endpoint"] - first["model"])
    causes = record["endpoint"]["sample"]["causes"]
    assert [cause["name"] for cause in causes] == ["prompt missing"]
    assert "likely cause: prompt missing" in caplog.text
    printed = capsys.readouterr().out
    assert "Likely cause for queries and documents: **prompt missing**" in printed
    lines = [line for line in printed.splitlines() if line.startswith("| prompt missing")]
    # The row of a table: the cause, and the cosine similarity of queries and of documents.
    cells = [cell.strip() for cell in lines[0].strip("|").split("|")]
    assert cells == ["prompt missing", "1.000000", "1.000000"]


def test_the_key_is_in_no_output(evaluate, server, tmp_path, capsys, caplog):
    caplog.set_level("DEBUG")
    assert evaluate("--endpoint", server.url) == 0
    server.key = "another"
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
        for parameter in model.query_encoder.parameters():
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


def test_wrong_arguments_and_servers_are_refused_in_one_line(
    evaluate, server, model, data, tmp_path, capsys
):
    """Nothing is written."""
    url = ["--endpoint", server.url]

    def expect_error(exit_code: int, message: str) -> None:
        """Check the exit code, and that the last line is the only one with an error."""
        assert exit_code == 2
        *progress, error = capsys.readouterr().err.splitlines()
        assert message in error
        assert "error" not in "".join(progress)

    def expect_refusal(options: list[str], message: str) -> None:
        """Check the error of `contaccum evaluate` with these options."""
        expect_error(evaluate(*options), message)

    expect_refusal(["--endpoint", "localhost:8080"], "not the URL of a server")
    expect_refusal(["--query_endpoint", server.url], "--query_endpoint needs --endpoint")
    expect_refusal(["--served_model", "x"], "--served_model needs --endpoint")
    expect_refusal([*url, "--request_fields", "[1]"], "is not a JSON object")
    expect_refusal([*url, "--request_fields", "{"], "is not JSON")
    run = tmp_path / "run.trec"
    run.write_text("q0 Q0 cat-tree 1 1.0 x\n")
    output = ["--output", str(tmp_path / "out.json")]
    with_run = ["evaluate", "--run", str(run), "--data", data, *output, *url]
    expect_error(main(with_run), "--endpoint needs a MODEL")
    assert server.requests == []

    # Errors of the server. Each one hides the earlier ones, which stay switched on.
    embed = embed_with(model)
    server.embed = lambda texts: embed(texts)[:, :8]
    expect_refusal(url, "answers with 8 dimensions, but the model has 16")
    server.statuses = [500] * 6  # the first try and five retries
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
    assert server.requests
    for request in server.requests:
        assert request["truncate_prompt_tokens"] == 40
    record = json.loads((tmp_path / "out.json").read_text())
    assert record["endpoint"]["request_fields"] == fields
