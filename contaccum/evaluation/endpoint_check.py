"""Evaluation of embedding servers, and comparison with the model that they should serve.

Texts are sent to the servers with the model's prompts, and the embeddings that come back are
compared by the model's similarity.

First, a sample of queries and documents is encoded by the servers and by the model. Two embeddings
of a text agree if their cosine is nearly 1 and their norms are nearly equal. If they do not agree,
the likely cause is chosen among the hypotheses of `endpoint_causes`, which are copies of the model
with one typical fault of a server each.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
from sentence_transformers import SentenceTransformer

from contaccum.data import BeirDataset
from contaccum.encoders.agreement import LEAST_COSINE, compute_cosines
from contaccum.encoders.settings import get_prompt
from contaccum.encoders.towers import Kind, is_tied
from contaccum.errors import ConfigError, UserError
from contaccum.evaluation.beir_sets import evaluate_beir
from contaccum.evaluation.endpoint import EmbeddingEndpoint
from contaccum.evaluation.endpoint_causes import KINDS, Hypothesis, list_hypotheses
from contaccum.evaluation.metrics import paired_bootstrap
from contaccum.evaluation.results import EvaluationResult, JsonObject
from contaccum.files import redact
from contaccum.retrieval.encode import encode_texts
from contaccum.retrieval.searcher import get_passage_texts

logger = logging.getLogger(__name__)

_SAMPLE_SIZE = 32  # texts of each kind
_NUM_LONGEST = 8  # of these, to show where servers truncate
_NORM_TOLERANCE = 0.01
"""Relative difference up to which norms are equal. Norms in bfloat16 differ by up to 0.4%."""
_MIN_MEAN_COSINE = 0.999
"""A hypothesis is named as the cause only if its mean cosine with the server is at least this."""
_MAX_REMAINING_SHARE = 0.5
"""A hypothesis is named as the cause only if it explains enough of the distance to the server.

The distance is 1 - mean cosine. That of the hypothesis may be at most this share of that of the
unchanged model.
"""

# {cause of different norms: advice}
_NORM_CAUSES = {
    "not normalised": (
        "let the server normalise, as the model's Normalize module does (llama.cpp: embd_normalize "
        "2 in the request), or compare by cosine instead of the inner product"
    ),
    "normalised, though the model is not": (
        "let the server return embeddings as they are (llama.cpp: embd_normalize -1 in the "
        "request), because lengths change the inner product; the /v1/embeddings of TEI and of "
        "Infinity always normalise"
    ),
    "lengths of the embeddings differ": (
        "check scaling and normalisation of the server, because lengths change the inner product"
    ),
}


class ServedModel:
    """A model whose queries and documents are encoded by embedding servers.

    Args:
        model: the model that the servers should serve. Its prompts are sent with the texts.
        url: URL of the server that encodes documents, and also queries if ``query_url`` is None.
        query_url: URL of the server that encodes queries.
        served_model: name of the model in requests.
        batch_size: texts per request.
        show_progress: show progress bars.
        request_fields: further fields of each request.

    Raises:
        ConfigError: the model has two towers and ``query_url`` is None, or a URL or the key is
            invalid; see `EmbeddingEndpoint`.
    """

    def __init__(
        self,
        model: SentenceTransformer,
        url: str,
        query_url: str | None,
        served_model: str,
        batch_size: int = 32,
        show_progress: bool = True,
        request_fields: Mapping[str, Any] | None = None,
    ) -> None:
        if query_url is None and not is_tied(model):
            raise ConfigError(
                "this model has two towers, which need two servers: name the server of the "
                "documents by --endpoint, and the server of the queries by --query_endpoint"
            )
        # The dimension is never None here, but its type in sentence-transformers is `int | None`.
        dimension = model.get_embedding_dimension()
        assert dimension is not None
        self.model = model
        make_endpoint = partial(
            EmbeddingEndpoint,
            model_name=served_model,
            dimension=dimension,
            batch_size=batch_size,
            show_progress=show_progress,
            request_fields=request_fields,
        )
        self._endpoints = {
            "query": make_endpoint(query_url or url),
            "document": make_endpoint(url),
        }
        self._served_model = served_model
        self._request_fields = dict(request_fields or {})

    def encode(self, texts: Sequence[str], kind: Kind) -> np.ndarray:
        """Return the server's embeddings of k texts, float32 (k, d).

        Args:
            texts: k texts without prompts.
            kind: "query" or "document".

        Raises:
            UserError: the server gives no embeddings that can be used.
        """
        prompt = get_prompt(self.model, kind)
        prompted_texts = [prompt + text for text in texts]
        return self._endpoints[kind].embed(prompted_texts, f"Endpoint ({kind})")

    def describe(self) -> dict[str, Any]:
        """Return the URLs and settings of the servers, for the record of an evaluation."""
        return {
            "url": redact(self._endpoints["document"].url),
            "query_url": redact(self._endpoints["query"].url),
            "served_model": self._served_model,
            "request_fields": self._request_fields,
        }


def evaluate_endpoint(
    served_model: ServedModel,
    dataset: BeirDataset,
    k_values: Sequence[int],
    compared_metrics: Sequence[str],
    **settings: Any,
) -> EvaluationResult:
    """Evaluate servers on a data set, and compare them with the model.

    A sample of the texts is compared first, so that errors of the servers and large differences are
    reported before the whole corpus is encoded.

    Args:
        served_model: the servers and the model.
        dataset: the data set.
        k_values: cut-offs of the metrics.
        compared_metrics: metrics, such as "NDCG@10", by which servers and model are compared.
        settings: settings of `search` and `plan_search` for both evaluations.

    Returns:
        The result of the servers. Its attribute ``endpoint`` is a dict with the comparison:
        "sample" (see `compare_sample`), "model_metrics", and "comparison" with a row for each
        compared metric. A positive difference is in favour of the servers.

    Raises:
        UserError: a server gives no embeddings that can be used.
    """
    model = served_model.model
    encode_settings = {
        "batch_size": settings.get("batch_size", 32),
        "precision": settings.get("precision", "float32"),
    }
    queries = choose_sample(list(dataset.queries.values()))
    documents = choose_sample(get_passage_texts(dataset.corpus))
    sample = compare_sample(served_model, queries, documents, **encode_settings)
    _log_sample(dataset.name, sample)
    result = evaluate_beir(
        model,
        dataset,
        k_values,
        encode_queries=lambda _, texts: served_model.encode(texts, "query"),
        encode_documents=lambda _, texts: served_model.encode(texts, "document"),
        **settings,
    )
    model_result = evaluate_beir(model, dataset, k_values, **settings)
    rows = []
    for metric in compared_metrics:
        rows.append(_compare_metric(metric, result, model_result))
    result.endpoint = {
        **served_model.describe(),
        "sample": sample,
        "model_metrics": model_result.metrics,
        "comparison": rows,
    }
    return result


def _compare_metric(
    metric: str, result: EvaluationResult, model_result: EvaluationResult
) -> JsonObject:
    """Return both scores of a metric, with the paired bootstrap of their difference."""
    scores = []
    model_scores = []
    for query_id, query_scores in result.per_query.items():
        scores.append(query_scores[metric])
        model_scores.append(model_result.per_query[query_id][metric])
    return {
        "metric": metric,
        "endpoint": result.metrics[metric],
        "model": model_result.metrics[metric],
        **paired_bootstrap(scores, model_scores),
    }


def choose_sample(texts: Sequence[str]) -> list[str]:
    """Return 32 different texts, or all if there are fewer.

    The sample holds the 8 longest texts, the shortest one, and 23 of the others, at equal steps of
    their order by length. Many servers refuse an empty text, which would be the shortest one.
    """
    longest_first = sorted(dict.fromkeys(texts), key=len, reverse=True)
    if len(longest_first) <= _SAMPLE_SIZE:
        return longest_first
    others = longest_first[_NUM_LONGEST:-1]
    num_others = _SAMPLE_SIZE - _NUM_LONGEST - 1
    sample = longest_first[:_NUM_LONGEST]
    for number in range(num_others):
        sample.append(others[number * len(others) // num_others])
    sample.append(longest_first[-1])
    return sample


def compare_sample(
    served_model: ServedModel,
    queries: Sequence[str],
    documents: Sequence[str],
    batch_size: int = 32,
    precision: str = "float32",
) -> dict[str, Any]:
    """Compare the servers' embeddings of some texts with the model's.

    Args:
        served_model: the servers and the model.
        queries, documents: texts without prompts.
        batch_size, precision: settings of the model; see `encode_texts`.

    Returns:
        A dict with these keys. A kind is "query" or "document". Its cosines are low if the smallest
        one is below `LEAST_COSINE`.

        - "query", "document": the comparison of the two embeddings of each text of this kind; see
          `_compare_embeddings`.
        - "causes": likely causes, each with the kinds that it concerns, its name and its advice.
        - "unexplained": kinds with low cosines for which no hypothesis fits.
        - "hypotheses": rows with a name and, for each kind with low cosines, the mean cosine with
          the servers. The first row is the model as it was trained, and then follows one row for
          each hypothesis. Empty if no kind has low cosines.

    Raises:
        UserError: a server gives no embeddings that can be used.
    """
    texts: dict[Kind, Sequence[str]] = {"query": queries, "document": documents}
    # The servers encode before the model, so that their errors are reported at once.
    served = {kind: served_model.encode(texts[kind], kind) for kind in KINDS}
    sample: dict[str, Any] = {}
    causes: list[tuple[Kind, str, str]] = []
    low_texts: dict[Kind, Sequence[str]] = {}  # the texts of the kinds with low cosines
    trained_row: JsonObject = {"name": "as trained"}
    for kind in KINDS:
        trained = encode_texts(served_model.model, texts[kind], kind, batch_size, precision)
        sample[kind] = _compare_embeddings(trained, served[kind])
        norm_cause = _find_norm_cause(sample[kind])
        if norm_cause is not None:
            causes.append((kind, norm_cause, _NORM_CAUSES[norm_cause]))
        if sample[kind]["least_cosine"] < LEAST_COSINE:
            low_texts[kind] = texts[kind]
            trained_row[kind] = sample[kind]["mean_cosine"]
    rows: list[JsonObject] = []
    advice_of_name: dict[str, str] = {}
    if low_texts:
        hypotheses = list(list_hypotheses(served_model.model, low_texts))
        advice_of_name = {hypothesis.name: hypothesis.advice for hypothesis in hypotheses}
        rows.append(trained_row)
        for hypothesis in hypotheses:
            # In float16 some models overflow to NaN or infinity, which `encode_texts` refuses. Such
            # a hypothesis has no cosine and is left out.
            with suppress(UserError):
                rows.append(_score_hypothesis(hypothesis, low_texts, served, batch_size, precision))
    unexplained: list[Kind] = []
    for kind in low_texts:
        name = _find_best_hypothesis(rows, kind)
        if name is None:
            unexplained.append(kind)
        else:
            causes.append((kind, name, advice_of_name[name]))
    sample["causes"] = _group_causes(causes)
    sample["unexplained"] = unexplained
    sample["hypotheses"] = rows
    return sample


def _score_hypothesis(
    hypothesis: Hypothesis,
    texts: Mapping[Kind, Sequence[str]],
    served: Mapping[Kind, np.ndarray],
    batch_size: int,
    precision: str,
) -> JsonObject:
    """Return a row: the name of a hypothesis, and its mean cosine with the servers for each kind.

    Raises:
        UserError: the model of the hypothesis gives NaN or infinity.
    """
    variant = hypothesis.make_model()
    row: JsonObject = {"name": hypothesis.name}
    for kind, kind_texts in texts.items():
        embeddings = encode_texts(variant, kind_texts, kind, batch_size, precision)
        row[kind] = float(compute_cosines(embeddings, served[kind]).mean())
    return row


def _compare_embeddings(trained: np.ndarray, served: np.ndarray) -> JsonObject:
    """Return the cosines, the norms and the agreement of two embeddings of each of n texts.

    Args:
        trained: the model's embeddings, (n, d).
        served: the servers' embeddings, (n, d).
    """
    cosines = compute_cosines(trained, served)
    trained_norms = np.linalg.norm(trained.astype(np.float64), axis=1)
    served_norms = np.linalg.norm(served.astype(np.float64), axis=1)
    ratios = served_norms / np.maximum(trained_norms, 1e-12)
    has_equal_norms = bool(np.abs(ratios - 1).max() <= _NORM_TOLERANCE)
    least_cosine = float(cosines.min())
    return {
        "texts": len(cosines),
        "least_cosine": least_cosine,
        "mean_cosine": float(cosines.mean()),
        "model_norms": [float(trained_norms.min()), float(trained_norms.max())],
        "endpoint_norms": [float(served_norms.min()), float(served_norms.max())],
        "has_equal_norms": has_equal_norms,
        "agrees": has_equal_norms and least_cosine >= LEAST_COSINE,
    }


def _find_norm_cause(comparison: JsonObject) -> str | None:
    """Return the name of the cause of different norms, or None.

    Args:
        comparison: the return value of `_compare_embeddings`.
    """
    if comparison["has_equal_norms"]:
        return None
    is_model_unit = _is_unit(comparison["model_norms"])
    is_endpoint_unit = _is_unit(comparison["endpoint_norms"])
    if is_model_unit and not is_endpoint_unit:
        return "not normalised"
    if is_endpoint_unit and not is_model_unit:
        return "normalised, though the model is not"
    # If the directions differ as well, another fault explains both, and the hypotheses are tested.
    if comparison["least_cosine"] < LEAST_COSINE:
        return None
    return "lengths of the embeddings differ"


def _is_unit(norms: Sequence[float]) -> bool:
    """Return whether all norms are 1, within the tolerance."""
    return all(abs(norm - 1) <= _NORM_TOLERANCE for norm in norms)


def _find_best_hypothesis(rows: Sequence[JsonObject], kind: Kind) -> str | None:
    """Return the name of the hypothesis that explains the servers' embeddings, or None.

    Args:
        rows: names and mean cosines with the servers; the first row is the model as it was trained.
        kind: "query" or "document".
    """
    trained, *hypotheses = rows
    if not hypotheses:
        return None
    best = max(hypotheses, key=lambda row: row[kind])
    is_close = best[kind] >= _MIN_MEAN_COSINE
    best_distance = 1 - best[kind]
    trained_distance = 1 - trained[kind]
    is_clearly_better = best_distance <= _MAX_REMAINING_SHARE * trained_distance
    if is_close and is_clearly_better:
        return best["name"]
    return None


def _group_causes(causes: Sequence[tuple[Kind, str, str]]) -> list[JsonObject]:
    """Return each cause once, with the kinds of texts that it concerns.

    Args:
        causes: (kind, name, advice) of each likely cause.
    """
    grouped: dict[str, JsonObject] = {}
    for kind, name, advice in causes:
        cause = grouped.setdefault(name, {"kinds": [], "name": name, "advice": advice})
        cause["kinds"].append(kind)
    return list(grouped.values())


def _log_sample(name: str, sample: Mapping[str, Any]) -> None:
    """Log a warning if the embeddings of the sample do not agree.

    Args:
        name: name of the data set.
        sample: the return value of `compare_sample`.
    """
    if all(sample[kind]["agrees"] for kind in KINDS):
        return
    causes = "; ".join(cause["name"] for cause in sample["causes"]) or "unknown"
    least_cosine = min(sample[kind]["least_cosine"] for kind in KINDS)
    logger.warning(
        f"{name}: the endpoint does not give the model's embeddings (least cosine "
        f"{least_cosine:.4f}, likely cause: {causes}). Its scores are computed now, and what to do "
        "is printed after them"
    )
