"""Comparison of an embedding server with the model that it should serve.

The server has OpenAI's interface, ``POST /v1/embeddings``, and gets the texts with the model's
prompts before them. docs/serving.md lists the commonest causes of differences.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from sentence_transformers import SentenceTransformer
from tqdm import trange

from contaccum.data import BeirDataset
from contaccum.data.corpus import get_passage_texts
from contaccum.encoders.export import compute_cosines
from contaccum.encoders.settings import Kind, get_prompt, is_tied
from contaccum.errors import ConfigError, UserError, quoted
from contaccum.evaluation.beir import evaluate_beir
from contaccum.evaluation.results import EvaluationResult, markdown_table
from contaccum.questions import make_client
from contaccum.redaction import KEY_VARIABLE, redact
from contaccum.retrieval.encode import encode_texts

_MAX_COMPARED = 1000  # texts of each kind, evenly spread


def embed(
    url: str, texts: Sequence[str], served_model: str, batch_size: int, show_progress: bool = False
) -> np.ndarray:
    """Return a server's embeddings of k texts with their prompts, float32 (k, d), or `UserError`.

    ``url`` is the base URL, or has /v1 or /v1/embeddings at its end.
    """
    client = make_client(url.rstrip("/").removesuffix("/embeddings"))
    import openai

    embeddings = []
    for start in trange(
        0, len(texts), batch_size, desc="Server", leave=False, disable=not show_progress
    ):
        batch = list(texts[start : start + batch_size])
        try:
            answer = client.embeddings.create(
                model=served_model, input=batch, encoding_format="float"
            )
            rows = sorted(answer.data, key=lambda row: row.index)
            embeddings.append(np.array([row.embedding for row in rows], dtype=np.float32))
        except (openai.APIError, AttributeError, TypeError, ValueError) as error:
            reason = quoted(redact(str(error.__cause__ or error)), 200)  # it may repeat the key
            raise UserError(
                f"{url}: no answer with embeddings: {reason}: correct the URL, --served_model or "
                f"the key in {KEY_VARIABLE}, lower --batch_size, or let the server truncate long "
                "texts"
            ) from error
        if len(embeddings[-1]) != len(batch) or not np.isfinite(embeddings[-1]).all():
            raise UserError(f"{url}: not {len(batch)} finite embeddings (correct the server)")
    return np.concatenate(embeddings)


def evaluate_endpoint(
    model: SentenceTransformer,
    dataset: BeirDataset,
    url: str,
    query_url: str | None = None,
    served_model: str | None = None,
    *,
    model_name: str,
    batch_size: int = 32,
    precision: str = "float32",
    show_progress: bool = True,
    **settings: Any,
) -> EvaluationResult:
    """Evaluate the servers of a model's queries and documents, and compare them with the model.

    The result is that of the servers; its ``endpoint`` is the comparison. A server that is missing,
    or gives no embeddings of the model, raises `UserError`.

    Args:
        url, query_url: the server of the documents, and that of the queries if the model has two
            towers; see `embed`.
        served_model: name of the model in requests; None: ``model_name``.
        batch_size: texts per request, and per forward pass of the model.
        model_name, precision, show_progress, settings: further arguments of `evaluate_beir`.
    """
    if query_url is None and not is_tied(model):
        raise ConfigError(
            "this model has two towers, which need two servers: name the server of the "
            "documents by --endpoint, and the server of the queries by --query_endpoint"
        )
    by_server: dict[Kind, np.ndarray] = {}
    by_model: dict[Kind, np.ndarray] = {}
    samples = []
    served_model = served_model or model_name
    texts_of_kind: dict[Kind, list[str]] = {
        "query": list(dataset.queries.values()),
        "document": get_passage_texts(dataset.corpus),
    }
    for kind, texts in texts_of_kind.items():
        server = query_url if kind == "query" and query_url else url
        with_prompt = [get_prompt(model, kind) + text for text in texts]
        served = embed(server, with_prompt, served_model, batch_size, show_progress)
        expected = encode_texts(model, texts, kind, batch_size, precision, show_progress)
        if served.shape != expected.shape:
            raise UserError(
                f"{server}: embeddings of shape {served.shape} instead of {expected.shape}: serve "
                "MODEL, or name the served model as MODEL"
            )
        rows = slice(None, None, math.ceil(len(served) / _MAX_COMPARED))
        cosines = compute_cosines(served[rows], expected[rows])
        sample: dict[str, Any] = {
            "texts": kind,
            "number": len(cosines),
            "url": redact(server),
            "served_model": served_model,
            "median_cosine": float(np.median(cosines)),
            "least_cosine": float(cosines.min()),
        }
        for name, embeddings in (("endpoint", served), ("model", expected)):
            norms = np.linalg.norm(embeddings, axis=1)
            sample[f"{name}_norms"] = [float(norms.min()), float(norms.max())]
        samples.append(sample)
        by_server[kind] = served
        by_model[kind] = expected

    settings = {"model_name": model_name, "precision": precision, **settings}
    result, expected_result = (
        evaluate_beir(model, dataset, embeddings=embeddings, **settings)
        for embeddings in (by_server, by_model)
    )
    result.identity = None  # whatever the server may answer the next time
    result.endpoint = {"samples": samples, "model_metrics": expected_result.metrics}
    return result


def endpoint_tables(record: Mapping[str, Any], metrics: Sequence[str]) -> str:
    """Return the Markdown tables of the ``endpoint`` of a record: scores and samples."""
    scores = []
    for metric in metrics:
        served = record["metrics"][metric]
        expected = record["endpoint"]["model_metrics"][metric]
        scores.append([metric, served, expected, f"{served - expected:+.4f}"])
    cells = []
    for row in record["endpoint"]["samples"]:
        cosines = [f"{row[name]:.6f}" for name in ("median_cosine", "least_cosine")]
        norms = ["{:.4f} to {:.4f}".format(*row[f"{name}_norms"]) for name in ("endpoint", "model")]
        cells.append([row["texts"], row["url"], row["number"], *cosines, *norms])
    header = ["texts", "server", "number", "median cosine", "least cosine"]
    header += ["norms (endpoint)", "norms (model)"]
    scores_table = markdown_table(["metric", "endpoint", "model", "difference"], scores)
    return f"{scores_table}\n\n{markdown_table(header, cells)}"
