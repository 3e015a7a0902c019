"""Whether a result that lies there already is the one that an evaluation would give, so that it need not run again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from contaccum.errors import DataError
from contaccum.evaluation.metrics import metric_names
from contaccum.evaluation.model_record import model_fingerprint, tokenisation_contract
from contaccum.evaluation.results import read_result


def identity_of_model(model: Any) -> dict[str, Any]:
    """The part of `expected_identity` that costs a pass over the weights."""
    return {"model": model_fingerprint(model), "tokenisation": tokenisation_contract(model)}


def expected_identity(
    of_model: Mapping[str, Any],
    data: Mapping[str, Any],
    similarity: str,
    index: str,
    index_parameters: str | None,
    k_values: Sequence[int],
    autocast_dtype: str | None,
) -> dict[str, Any]:
    """What decides the scores of an evaluation, as `identity` finds it in the record that it leaves.

    Args:
        of_model: `identity_of_model`.
        data: fingerprint and split.
        index_parameters: those in force, FAISS's or ours where none were asked for.
    """
    return {
        **of_model,
        "similarity": similarity,
        "data": data["fingerprint"],
        "split": data["split"],
        "index": index,
        "index parameters": index_parameters,
        "depth": max(k_values),
        "precision": autocast_dtype or "float32",
        "metrics": sorted(metric_names(k_values)),
    }


def identity(record: Mapping[str, Any]) -> dict[str, Any]:
    """What decided the scores of a record; None for what it does not tell."""
    model, data, search = (record.get(key) or {} for key in ("model", "data", "search"))
    return {
        "model": model.get("fingerprint"),
        "tokenisation": record.get("tokenisation"),
        "similarity": model.get("similarity"),
        "data": data.get("fingerprint"),
        "split": data.get("split"),
        "index": search.get("index"),
        "index parameters": search.get("index_parameters"),
        "depth": search.get("k"),
        "precision": record.get("precision"),
        "metrics": sorted(record["metrics"]),
    }


def kept_record(path: Path, expected: Mapping[str, Any]) -> tuple[dict[str, Any] | None, str]:
    """The record at `path` if it is the expected one and its run lies beside it, else None; and a word on which.

    The word is empty where nothing lies at `path`.
    """
    if not path.exists():
        return None, ""
    try:
        record = read_result(path)
        found = identity(record)
    except (DataError, AttributeError, TypeError):
        return None, "it was no result"
    # As JSON has it: a list for a tuple.
    wanted = json.loads(json.dumps(expected))
    other = [what for what, value in wanted.items() if found.get(what) != value]
    if other:
        return None, f"it had other {', '.join(other)}"
    if not path.with_suffix(".trec").exists():
        return None, "its run was gone"
    return record, f"same model, data and settings, of {record.get('created', 'unknown date')}"
