"""What a result says of the search that it scored: the model, how it turns text into tokens, the index, the seconds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from contaccum.evaluation.model_record import model_fingerprint, tokenisation_contract

if TYPE_CHECKING:
    from contaccum.retrieval.searcher import FaissSearcher


def search_record(searcher: FaissSearcher, name: str | None, metric: str, k: int) -> dict[str, Any]:
    """Fields of an `EvaluationResult`, after `searcher` has searched.

    Args:
        name: what the result calls the model.
        metric: "cos" or "dot".
        k: documents asked for per query.
    """
    index = searcher.last_index
    return {
        "model": {
            "name": name,
            "fingerprint": model_fingerprint(searcher.model),
            "similarity": metric,
            "dimension": index.dimension,
        },
        "tokenisation": tokenisation_contract(searcher.model),
        "search": {
            "index": searcher.index,
            "index_parameters": index.parameters,
            "k": k,
            "gpus": index.gpus,
            **({"recall": searcher.recall} if searcher.recall else {}),
        },
        "timing": dict(searcher.timing),
        "precision": searcher.autocast_dtype or "float32",
    }
