"""Candidates of `contaccum fit`: ways to search, how dev scores them, and which one is chosen.

A candidate is a complete way to search: a model, BM25, or both with the weight of BM25 that is best
on dev. `contaccum.experiments.ladder` makes them.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file

from contaccum.data.beir import BeirDataset, read_split_queries
from contaccum.data.rows import RecordReport
from contaccum.data.split import TRAIN_FILE
from contaccum.encoders.dual_encoder import DualEncoder
from contaccum.encoders.linear_map import append_linear_map
from contaccum.evaluation.evaluator import RetrievalEvaluator
from contaccum.evaluation.results import Run
from contaccum.experiments.run import TRAINING_FOLDER, Job
from contaccum.merging import merge_models
from contaccum.retrieval.bm25 import FUSION_DEPTH, fuse_runs
from contaccum.retrieval.documents import StoreDocuments
from contaccum.retrieval.encode import CorpusEncoder, model_fingerprint
from contaccum.retrieval.store import EmbeddingStore
from contaccum.training.linear_map import MAP_FILE, get_map_key

MEAN = "mean"  # the key of the mean over the kinds of documents, by which candidates are compared
FREE, LINEAR_MAP, QUERY_TOWER, BOTH_TOWERS, FURTHER = range(5)  # the rungs, the cheapest first
STORE_FOLDER = "store"
CANDIDATES_FOLDER = "candidates"
ANEW_FOLDER = "anew"  # has a new model that encoded all documents

BM25_WEIGHTS = tuple(round(0.1 * step, 1) for step in range(10))
LARGEST_LOSS = 0.01  # of a kind of documents, against the best search without training
SMALL_GAIN = 0.002  # a dearer candidate must be better by more than this: less is noise
_ROWS_PER_SHARD = 2000  # of a store; a killed process loses at most one shard

Scores = dict[str, float]
"""{kind of documents, or `MEAN`: nDCG@10}."""


@dataclass(frozen=True)
class Candidate:
    """A complete way to search.

    Attributes:
        system: "bm25" alone, the "base" model, a "map" of its query vectors, a "trained" model, or
            a new model that encodes all documents "anew".
        bm25_weight: the weight of BM25 beside the vectors.
        scores: scores on dev, of the vectors and BM25 together, see `smooth`. Trained document
            towers search only the documents of dev's pool, if it has one; see `Ladder`.
        vectors: scores on dev without BM25, which are not smoothed.
        seconds: how long the fit had run when the candidate was ready.
        folder: the name of the folder with its map or its model; several candidates may share it.
        settings: {name: value} of the training.
        updates, training_seconds: the number of updates of the training, and their time.
        blend: the share of the map or of the trained weights; the rest is the base model's.
        ridge: see `solve_linear_map`; None for a map by gradients.
        train_file: the name of the file of its training records in the folder of the split.
        number: its number in the terminal and the report; they are counted as they are made.
    """

    name: str
    rung: int
    system: str
    bm25_weight: float = 0.0
    scores: Scores = field(default_factory=dict)
    vectors: Scores = field(default_factory=dict)
    seconds: float = 0.0
    folder: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    updates: int = 0
    training_seconds: float = 0.0
    blend: float = 1.0
    ridge: float | None = None
    train_file: str = TRAIN_FILE
    number: int = 0

    @property
    def score(self) -> float:
        return self.scores[MEAN]

    def describe(self) -> str:
        if self.system == "bm25" or self.bm25_weight == 0:
            return self.name
        return f"{self.name} with BM25"


class GivenVectors(NamedTuple):
    """The user's vectors in place of those of a base model.

    Attributes:
        documents: the vectors of the documents, which are never encoded again.
        new_model: the name of a new model for queries; "" if there is none.
        aligned: see `write_linear_maps`.
    """

    documents: StoreDocuments
    new_model: str = ""
    aligned: tuple[torch.Tensor, torch.Tensor] | None = None


def loses_little(scores: Scores, free: Candidate) -> bool:
    """Return whether no score is more than `LARGEST_LOSS` below that of ``free``."""
    return all(free.scores[kind] - score <= LARGEST_LOSS for kind, score in scores.items())


def choose(candidates: Sequence[Candidate], free: Candidate) -> Candidate:
    """Return the candidate with the best score on dev, or a cheaper one that is hardly worse.

    No training is the cheapest, then what keeps the vectors of the documents. What loses much on a
    kind of documents against ``free``, the best search without training, is left out.
    """
    allowed = [free, *(each for each in candidates if loses_little(each.scores, free))]
    best_score = max(candidate.score for candidate in allowed)
    nearly_best = [each for each in allowed if each.score >= best_score - SMALL_GAIN]
    return min(
        nearly_best, key=lambda each: (each.rung > FREE, each.rung >= BOTH_TOWERS, -each.score)
    )


class DevSet:
    """Dev queries among some documents, with the scores of a search by kind of documents.

    Args:
        kinds: {kind of documents: ids of its queries}.
        documents: vectors of documents by the base model; None: each search encodes them.
        has_bm25: False: nothing is searched with BM25 beside the vectors.
    """

    def __init__(
        self,
        dataset: BeirDataset,
        kinds: Mapping[str, Collection[str]],
        documents: StoreDocuments | None,
        batch_size: int,
        has_bm25: bool,
    ) -> None:
        self.dataset = dataset
        # So many of the best documents are fused with BM25, so all of them are searched for.
        metrics = ["ndcg@10", f"recall@{FUSION_DEPTH}"]
        self.evaluator = RetrievalEvaluator(dataset, metrics, batch_size)
        self.evaluator.documents = documents
        self.bm25_run = self.evaluator.search_bm25()
        self._kinds = kinds
        self._weights = BM25_WEIGHTS if has_bm25 else (0.0,)

    def score(self, run: Run) -> Scores:
        """Return the scores of a run by kind of documents, and their mean."""
        self.evaluator.score_run(run)
        query_scores = self.evaluator.query_scores
        scores = {}
        for kind, queries in self._kinds.items():
            scores[kind] = statistics.fmean(query_scores[query] for query in queries)
        return {**scores, MEAN: statistics.fmean(scores.values())}

    def weigh(
        self, run: Run, free: Candidate | None = None, weight: float | None = None
    ) -> dict[str, Any]:
        """Return the best weight of BM25, or a given one, and the scores with and without BM25.

        Weights with which no kind of documents loses much against ``free``, the best search without
        training, come first; then the best mean, see `smooth`; then the smallest weight.
        """
        raw = [self.score(fuse_runs(run, self.bm25_run, each)) for each in self._weights]
        curves = {kind: smooth([scores[kind] for scores in raw]) for kind in raw[0]}
        scores = {
            each: {kind: curve[index] for kind, curve in curves.items()}
            for index, each in enumerate(self._weights)
        }

        def get_key(each: float) -> tuple[bool, float]:
            return free is None or loses_little(scores[each], free), scores[each][MEAN]

        if weight is None:
            weight = max(scores, key=get_key)
        return {"bm25_weight": weight, "scores": scores[weight], "vectors": raw[0]}


def smooth(scores: Sequence[float]) -> list[float]:
    """Return the heights, cut off at 0 and 1, of the parabola fitted to scores of `BM25_WEIGHTS`.

    With some hundred queries, the best of ten single scores is partly luck. A single score, without
    BM25, is returned as it is.
    """
    if len(scores) == 1:
        return list(scores)
    parabola = np.polynomial.Polynomial.fit(BM25_WEIGHTS, scores, deg=2)
    # Rounded, so that equal heights of a flat curve are exactly equal.
    return np.clip(parabola(np.array(BM25_WEIGHTS)), 0.0, 1.0).round(6).tolist()


def read_kinds(dev: Path) -> dict[str, list[str]]:
    """Return {kind of documents: ids of its dev queries}; a single kind is called "all"."""
    queries = list(read_split_queries(dev, "test", RecordReport()))
    known = read_known_queries(dev)
    new = [query for query in queries if query not in known]
    if not known or not new:
        return {"all": queries}
    return {"new": new, "known": [query for query in queries if query in known]}


def read_known_queries(folder: Path) -> Collection[str]:
    """Return the ids of the queries of dev or test that are about known documents."""
    if not (folder / "qrels" / "known.tsv").is_file():
        return ()
    return read_split_queries(folder, "known", RecordReport())


def load_matrix(candidate: Candidate, folder: Path) -> torch.Tensor:
    """Return the matrix (d, e) of a candidate's map, by which a query vector is multiplied."""
    matrix = load_file(folder / MAP_FILE)[get_map_key(candidate.ridge)]
    if candidate.blend == 1.0:  # otherwise it is square
        return matrix
    identity = torch.eye(len(matrix), dtype=matrix.dtype)
    return candidate.blend * matrix + (1.0 - candidate.blend) * identity


def encode_corpus(
    job: Job, encoder: DualEncoder, name: str, corpus: Path, store: Path, precision: str = "float32"
) -> CorpusEncoder:
    """Write the vectors of a corpus to a store; return the encoder, with counts of documents."""
    corpus_encoder = CorpusEncoder(
        encoder,
        name,
        corpus,
        store,
        batch_size=job.batch_size,
        precision=precision,
        shard_size=_ROWS_PER_SHARD,
    )
    corpus_encoder.encode(show_progress=not job.args.disable_tqdm)
    return corpus_encoder


def load_candidate(candidate: Candidate, base: DualEncoder, folder: Path) -> DualEncoder:
    """Return the model of a candidate, from the folder with its map or its model.

    For BM25, this is the base model. Code that comes with a model is trusted as the base model's.
    """
    if candidate.system in ("bm25", "base"):
        return base
    if candidate.system == "map":
        model = copy.deepcopy(base)
        append_linear_map(model, load_matrix(candidate, folder))
        return model
    model = DualEncoder.from_pretrained(
        str(folder / TRAINING_FOLDER),
        device=str(base.device),
        trust_remote_code=base.trust_remote_code,
    )
    return model if candidate.system == "anew" else merge_models(base, model, candidate.blend)


def search_with(
    candidate: Candidate, base: DualEncoder, folder: Path, evaluator: RetrievalEvaluator
) -> Run:
    """Search with the vectors of a candidate, whose map or model is in ``folder``, or with BM25.

    Documents are encoded only if there are no vectors of them: those by the base model are the
    evaluator's ``documents``, those by a trained document tower in the folder.
    """
    if candidate.system == "bm25":
        return evaluator.search_bm25()
    model = load_candidate(candidate, base, folder)
    base_documents = evaluator.documents
    if model_fingerprint(model, "document") != model_fingerprint(base, "document"):
        evaluator.documents = None  # the search then encodes the documents with its model
        store = folder / STORE_FOLDER
        if candidate.blend == 1.0 and store.is_dir():
            evaluator.documents = StoreDocuments(EmbeddingStore.open(store))
    try:
        return evaluator.search(model)
    finally:
        evaluator.documents = base_documents
