"""Comparison of an embedding server with the model that it should serve.

The server has OpenAI's interface, ``POST /v1/embeddings``, and gets the texts with the model's
prompts before them. The comparison shows differences and does not explain them: docs/serving.md
lists their commonest causes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import requests
from requests.adapters import HTTPAdapter
from sentence_transformers import SentenceTransformer
from tqdm import trange
from urllib3.util import Retry

from contaccum.data import BeirDataset
from contaccum.data.records import quoted
from contaccum.encoders.export import compute_cosines
from contaccum.encoders.settings import Kind
from contaccum.errors import ConfigError, UserError
from contaccum.evaluation.beir import evaluate_beir
from contaccum.evaluation.results import EvaluationResult, JsonObject
from contaccum.evaluation.tables import markdown_table
from contaccum.files import redact
from contaccum.retrieval.encode import encode_texts, get_passage_texts

KEY_VARIABLE = "CONTACCUM_ENDPOINT_KEY"
"""Environment variable with the server's key, which is sent as a bearer token."""
RETRIES = Retry(
    total=5,
    backoff_factor=0.5,  # pauses of 0, 1, 2, 4 and 8 seconds
    status_forcelist=(429, 500, 502, 503, 504),
    allowed_methods=["POST"],
)
_TIMEOUTS = (10, 300)  # seconds of connecting to the server, and of waiting for its answer
_SAMPLE_SIZE = 32  # texts of each kind


@dataclass
class EmbeddingEndpoint:
    """Client of the server that encodes the queries or the documents of a model.

    Raises:
        ConfigError: the URL is invalid, or the key cannot be sent in a header.
    """

    url: str  # base URL, or the URL with /v1 or /v1/embeddings at its end
    served_model: str  # name of the model in requests
    prompt: str  # sent before each text
    dimension: int  # of the model's embeddings
    batch_size: int = 32  # texts per request
    show_progress: bool = True

    def __post_init__(self) -> None:
        base_url, *query = re.split("[?#]", self.url)
        if query or not base_url.startswith(("http://", "https://")):
            # A key in the query of the URL would be written to records. A password may hold the
            # mark of a query, so the whole URL is redacted before it is cut.
            shown_url = re.split("[?#]", redact(self.url))[0]
            raise ConfigError(
                f"{shown_url}: not the URL of a server: write it as http://localhost:8080, and put "
                f"a key into the environment variable {KEY_VARIABLE}"
            )
        base_url = base_url.rstrip("/").removesuffix("/embeddings").removesuffix("/v1")
        self.url = f"{base_url}/v1/embeddings"
        self._key = os.environ.get(KEY_VARIABLE, "").strip()
        if not (self._key.isascii() and self._key.isprintable()):
            # The error of the HTTP library would show the key.
            raise ConfigError(f"{KEY_VARIABLE} has characters that no key has: copy the key again")
        self._session = requests.Session()
        self._session.mount(base_url, HTTPAdapter(max_retries=RETRIES))
        # With a key in the headers instead, a password in ~/.netrc would replace it.
        self._session.auth = self._add_key

    def _add_key(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        if self._key:
            request.headers["Authorization"] = f"Bearer {self._key}"
        return request

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """Return the server's embeddings of k texts without prompts, float32 (k, d).

        Raises:
            UserError: the server does not answer, or not with k embeddings of d numbers.
        """
        embeddings = []
        title = redact(self.url)
        is_hidden = not self.show_progress
        for start in trange(0, len(texts), self.batch_size, desc=title, disable=is_hidden):
            batch = [self.prompt + text for text in texts[start : start + self.batch_size]]
            embeddings.append(self._embed_batch(batch))
        return np.concatenate(embeddings)

    def _embed_batch(self, texts: Sequence[str]) -> np.ndarray:
        content = {"model": self.served_model, "input": texts, "encoding_format": "float"}
        try:
            # No redirect is followed, so the key reaches no other server.
            response = self._session.post(
                self.url, json=content, timeout=_TIMEOUTS, allow_redirects=False
            )
        except requests.RequestException as error:
            raise UserError(f"{self.url}: no answer: {error}") from error
        if response.status_code != 200:
            raise UserError(
                f"{self._describe(response)}: correct the URL, --served_model or the key in "
                f"{KEY_VARIABLE}, lower --batch_size, or let the server truncate long texts"
            )
        expected = f"{len(texts)} embeddings of {self.dimension} finite numbers"
        try:
            rows = sorted(response.json()["data"], key=lambda row: row["index"])
            embeddings = np.array([row["embedding"] for row in rows], dtype=np.float32)
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{self._describe(response)}: not {expected}") from error
        is_expected = embeddings.shape == (len(texts), self.dimension)
        if not is_expected or not np.isfinite(embeddings).all():
            raise UserError(
                f"{self._describe(response)}: shape {embeddings.shape}, not {expected}: serve "
                "MODEL, or name the served model as MODEL"
            )
        return embeddings

    def _describe(self, response: requests.Response) -> str:
        """Return URL, status and start of an answer, without the key, which it may repeat."""
        answer = response.content.decode(errors="replace")
        if self._key:
            answer = answer.replace(self._key, f"<{KEY_VARIABLE}>")
        return f"{self.url}: status {response.status_code}, answer {quoted(answer, 200)}"


def evaluate_endpoint(
    model: SentenceTransformer,
    dataset: BeirDataset,
    k_values: Sequence[int],
    endpoints: Mapping[Kind, EmbeddingEndpoint],
    **settings: Any,
) -> EvaluationResult:
    """Evaluate the servers of a model's queries and documents, and compare them with the model.

    Args:
        settings: further arguments of `evaluate_beir`, for both evaluations.

    Returns:
        The result of the servers. Its ``endpoint`` is the comparison with the model.

    Raises:
        UserError: a server gives no embeddings of the model.
    """
    texts = {"query": list(dataset.queries.values()), "document": get_passage_texts(dataset.corpus)}
    samples = []
    for kind, endpoint in endpoints.items():
        # Texts of all lengths, because servers truncate long texts in other ways than the model.
        by_length = sorted(texts[kind], key=len)
        positions = np.linspace(0, len(by_length) - 1, min(_SAMPLE_SIZE, len(by_length)))
        sample = [by_length[int(position)] for position in positions]
        # The server comes first, so that its errors show before the model encodes the corpus.
        served = endpoint.embed(sample)
        expected = encode_texts(model, sample, kind, precision=settings.get("precision", "float32"))
        cosines = compute_cosines(served, expected)
        row: JsonObject = {"texts": kind, "number": len(sample), "url": redact(endpoint.url)}
        row["served_model"] = endpoint.served_model
        row["median_cosine"] = float(np.median(cosines))
        row["least_cosine"] = float(cosines.min())
        for name, embeddings in (("endpoint", served), ("model", expected)):
            norms = np.linalg.norm(embeddings, axis=1)
            row[f"{name}_norms"] = [float(norms.min()), float(norms.max())]
        samples.append(row)
    result = evaluate_beir(
        model,
        dataset,
        k_values,
        encode_queries=lambda _, queries: endpoints["query"].embed(queries),
        encode_documents=lambda _, documents: endpoints["document"].embed(documents),
        **settings,
    )
    model_metrics = evaluate_beir(model, dataset, k_values, **settings).metrics
    result.endpoint = {"samples": samples, "model_metrics": model_metrics}
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
