"""Evaluation while training: fixed parts with every relevant document, and the figures of `contaccum evaluate`."""

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from small_data import read_lines, write_judged_places

from contaccum import DualEncoder
from contaccum.data import BeirDataset, RecordReport, load_beir_folder
from contaccum.errors import ConfigError
from contaccum.evaluation.beir_sets import evaluate_beir
from contaccum.evaluation.evaluator import RetrievalEvaluator, sample


@pytest.fixture
def whole():
    """12 queries; q's relevant document is 3q + 1, 3q + 2 is judged and not relevant; 40 documents."""
    corpus = {f"d{n}": {"title": "", "text": f"document number {n}"} for n in range(40)}
    qrels = {f"q{q}": {f"d{3 * q + 1}": 1, f"d{3 * q + 2}": 0} for q in range(12)}
    queries = {f"q{q}": f"what is topic{q}" for q in range(12)}
    return BeirDataset(
        "made", corpus, queries, qrels, "dev", "f" * 64, Path("made"), RecordReport("stop")
    )


def test_a_sample_is_fixed_and_keeps_every_relevant_document(whole):
    some = sample(whole, queries=5, corpus=20)
    assert len(some.queries) == len(some.qrels) == 5 and len(some.corpus) == 20
    for query, judged in some.qrels.items():
        wanted = {document for document, grade in whole.qrels[query].items() if grade > 0}
        assert (
            wanted
            and wanted <= some.corpus.keys()
            and wanted <= judged.keys() <= some.corpus.keys()
        )
    again = sample(whole, 5, 20)
    assert (
        again.fingerprint == some.fingerprint != whole.fingerprint and again.corpus == some.corpus
    )
    # As the version before had it: figures while training compare.
    assert some.fingerprint == "5455437334086a1cc13d78650e7d69c764163014d87f740bf9cd410d1885425f"
    assert sample(whole, queries=3).queries.keys() < some.queries.keys()
    assert sample(whole, corpus=1).corpus.keys() == {f"d{3 * q + 1}" for q in range(12)}
    assert sample(whole, 12, 40) is whole and sample(whole) is whole


def test_the_evaluator_gives_the_figures_of_evaluate(tiny_model_path, tmp_path):
    data = load_beir_folder(write_judged_places(tmp_path / "places"))
    model: Any = DualEncoder.from_pretrained(tiny_model_path, device="cpu")
    model.train()
    evaluator = RetrievalEvaluator(
        data, ["eval_NDCG@10", "mrr@3", "ndcg@10"], notes={"of_documents": 99}
    )
    scores = evaluator(model, epoch=0.5, steps=3)
    expected = evaluate_beir(model, data, (3, 10), show_progress=False).metrics
    assert scores == {"ndcg@10": expected["NDCG@10"], "mrr@3": expected["MRR@3"]}
    assert evaluator.primary_metric == "ndcg@10" and evaluator.description == "Retrieval"
    about = {
        "name": "places",
        "queries": 6,
        "documents": 24,
        "fingerprint": data.fingerprint,
        "of_documents": 99,
    }
    assert (
        about.items() <= evaluator.describe().items() and "path" not in evaluator.get_config_dict()
    )
    with pytest.raises(ConfigError, match=r"ndgc@10.*did you mean 'ndcg@10'"):
        RetrievalEvaluator(data, ["ndgc@10"])


def test_nanobeir_is_the_librarys_own_with_means_of_the_usual_names(
    places, train, tmp_path, monkeypatch, capsys
):
    data, calls = load_beir_folder(places / "beir"), set()

    def load(repository: str, part: str, split: str) -> Dataset:
        calls.add(split)
        texts = (
            {name: document["text"] for name, document in data.corpus.items()}
            if part == "corpus"
            else data.queries
        )
        judged = [
            {"query-id": query, "corpus-id": name}
            for query, names in data.qrels.items()
            for name in names
        ]
        return Dataset.from_list(
            [{"_id": n, "text": x} for n, x in texts.items()] if part != "qrels" else judged
        )

    monkeypatch.setattr("datasets.load_dataset", load)
    keys = {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": "true"}
    keys["eval_data"] = "nanobeir/scifact,nq"
    assert train(tmp_path / "run", **keys) == 0 and calls == {"NanoSciFact", "NanoNQ"}
    last = read_lines(tmp_path / "run" / "eval_log.jsonl")[-1]
    expected = RetrievalEvaluator(data)(DualEncoder.from_pretrained(tmp_path / "run", device="cpu"))
    assert {name: last[f"eval_{name}"] for name in expected} == pytest.approx(expected, abs=1e-6)
    assert (
        last["eval_NanoNQ_dot_ndcg@10"]
        == last["eval_NanoBEIR_mean_dot_ndcg@10"]
        == last["eval_ndcg@10"]
    )
    assert json.loads((tmp_path / "run" / "run.json").read_text())["evaluation"][
        "dataset_names"
    ] == ["scifact", "nq"]
    for wrong, words in (
        ({"eval_data": "nanobeir/scifcat"}, "nanobeir: Dataset"),
        ({"eval_queries": 2}, "drop them"),
    ):
        assert (
            train(tmp_path / "no", **{**keys, **wrong}) == 2
            and words in capsys.readouterr().err.splitlines()[-1]
        )
