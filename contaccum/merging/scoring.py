"""Scores of the interpolated models between a base model and a trained model on data sets.

A weight w stands for the model with the tensors (1 - w) * base + w * trained. Scores are saved
after each weight, so that a command that was killed can continue without computing them again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple

import numpy as np
from sentence_transformers import SentenceTransformer

from contaccum.data import BeirDataset
from contaccum.encoders.dual_encoder import DualEncoder
from contaccum.encoders.interpolation import WeightInterpolation
from contaccum.evaluation.beir_sets import describe_data
from contaccum.evaluation.metrics import score_run, warn_of_ignored_judgements
from contaccum.files import fingerprint, read_json, write_json
from contaccum.merging.choice import METRIC, QueryScores, SetScores
from contaccum.retrieval.encode import encode_texts, model_fingerprint, tokenisation_fingerprint
from contaccum.retrieval.searcher import FaissSearcher

_CUT_OFF = 10


class ScoringSettings(NamedTuple):
    """Settings with which texts are encoded and compared.

    Attributes:
        batch_size: texts per forward pass.
        precision: dtype of autocast; see `contaccum.retrieval.encode.encode_texts`.
        similarity: "cos" or "dot"; None: each model's own similarity.
        show_progress: show progress bars.
    """

    batch_size: int = 32
    precision: str = "float32"
    similarity: Literal["cos", "dot"] | None = None
    show_progress: bool = True


class WeightScorer:
    """Evaluation of the interpolated models between a base model and a trained model.

    For weight 0, the base model itself is scored, with its own prompts and maximum lengths. The
    models of all other weights have the prompts and maximum lengths of the trained model.

    Args:
        interpolation: the two models.
        settings: settings with which texts are encoded and compared.
        scores_file: JSON file in which the scores are saved, and from which they are read if
            models, data and settings are the same; None: the scores are not saved.
        print_line: function that is called with a line of text after each weight.
    """

    def __init__(
        self,
        interpolation: WeightInterpolation,
        settings: ScoringSettings,
        scores_file: Path | None = None,
        print_line: Callable[[str], None] = print,
    ) -> None:
        self._interpolation = interpolation
        self._settings = settings
        self._scores_file = scores_file
        self._print_line = print_line
        # The trained model is identified by its weights. `interpolation.model` holds them only at
        # weight 1, and may hold those of another weight now.
        interpolation.set_weight(1.0)
        self._base_identity = _identify(interpolation.base)
        self._trained_identity = _identify(interpolation.model)
        # {key of `_make_key`: {query id: nDCG@10}}
        self._saved_scores: dict[str, dict[str, float]] = {}
        if scores_file is not None and scores_file.is_file():
            self._saved_scores = read_json(scores_file)

    def score(
        self, dataset: BeirDataset, role: Literal["own", "guard"], weights: Sequence[float]
    ) -> SetScores:
        """Score weights on a data set, by nDCG@10.

        If the document tower is the same in both models, the documents are encoded only once.

        Args:
            dataset: the data set.
            role: "own" or "guard".
            weights: weights of the trained model; 0 stands for the base model.
        """
        warn_of_ignored_judgements(dataset.qrels, dataset.name)
        encoder = _DocumentEncoder(self._settings)
        scores: dict[float, QueryScores] = {}
        for weight in weights:
            key = self._make_key(dataset, weight)
            if key not in self._saved_scores:
                model = self._get_model(weight)
                encoder.is_reusable = self._has_trained_documents(weight)
                self._saved_scores[key] = self._score_model(model, dataset, encoder)
                if self._scores_file is not None:
                    write_json(self._scores_file, self._saved_scores)
            scores[weight] = self._saved_scores[key]
            mean = fmean(scores[weight].values())
            self._print_line(f"{role} {dataset.name}, weight {weight:g}: nDCG@10 {mean:.4f}")
        return SetScores(role, describe_data(dataset), scores)

    def _make_key(self, dataset: BeirDataset, weight: float) -> str:
        """Return a hash of everything on which the scores of a weight depend."""
        # The trained model does not change the scores of the base model, which is weight 0.
        trained_identity = None if weight == 0 else self._trained_identity
        encoding = self._settings._replace(show_progress=False)
        return fingerprint(
            weight, self._base_identity, trained_identity, dataset.fingerprint, list(encoding)
        )

    def _get_model(self, weight: float) -> DualEncoder:
        """Return the model of a weight; the interpolated model is changed in place."""
        if weight == 0:
            return self._interpolation.base
        return self._interpolation.set_weight(weight)

    def _has_trained_documents(self, weight: float) -> bool:
        """Return whether a weight gives the same document embeddings as the trained model."""
        if not self._interpolation.is_unchanged("document"):
            return False
        if weight != 0:
            return True
        # The base model has its own prompt and maximum length, which may differ.
        base_settings = tokenisation_fingerprint(self._interpolation.base, "document")
        trained_settings = tokenisation_fingerprint(self._interpolation.model, "document")
        return base_settings == trained_settings

    def _score_model(
        self, model: DualEncoder, dataset: BeirDataset, encoder: _DocumentEncoder
    ) -> dict[str, float]:
        """Search a data set with a model, and return the score of each query."""
        searcher = FaissSearcher(
            model,
            self._settings.batch_size,
            precision=self._settings.precision,
            show_progress_bar=self._settings.show_progress,
            encode_documents=encoder,
        )
        run = searcher.search(dataset.corpus, dataset.queries, _CUT_OFF, self._settings.similarity)
        _, query_scores = score_run(dataset.qrels, run, [_CUT_OFF])
        return {query_id: scores[METRIC] for query_id, scores in query_scores.items()}


class _DocumentEncoder:
    """Encoder of the documents of one data set, which keeps embeddings for the next models.

    Attributes:
        is_reusable: set before each model: whether the model gives the same document embeddings as
            all other models for which this is True. Only the first of these models encodes.
    """

    def __init__(self, settings: ScoringSettings) -> None:
        self._settings = settings
        self._embeddings: np.ndarray | None = None
        self.is_reusable = False

    def __call__(self, model: SentenceTransformer, texts: Sequence[str]) -> np.ndarray:
        """Return the embeddings (N, d) of the N documents, in order."""
        if self.is_reusable and self._embeddings is not None:
            return self._embeddings
        embeddings = encode_texts(
            model,
            texts,
            "document",
            self._settings.batch_size,
            self._settings.precision,
            self._settings.show_progress,
        )
        if self.is_reusable:
            self._embeddings = embeddings
        return embeddings


def _identify(model: DualEncoder) -> dict[str, Any]:
    """Return hashes of the weights and settings on which a model's search results depend."""
    return {
        "weights": model_fingerprint(model),
        "tokenisation": tokenisation_fingerprint(model),
        "similarity": model.similarity_fn_name,
    }
