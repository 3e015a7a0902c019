"""Tasks of MTEB: run by mteb, with its result files; and scored by query as BEIR sets are."""

import json

import pytest

from contaccum import DualEncoder
from contaccum.cli import main
from contaccum.data import load_beir_folder
from contaccum.data.beir import shipped_scifact
from contaccum.evaluation.beir_sets import evaluate_beir
from contaccum.evaluation.evaluator import sample
from contaccum.evaluation.results import read_result
from contaccum.report import build_page


@pytest.fixture(scope="module")
def scifact():
    return sample(load_beir_folder(shipped_scifact()), queries=60, corpus=100)


@pytest.fixture
def evaluate(scifact, tiny_model_path, tmp_path, monkeypatch):
    """`contaccum evaluate MODEL --mteb`, of an mteb without a hub: SciFact, and a task of two splits."""
    mteb = pytest.importorskip("mteb")
    from datasets import Dataset
    from mteb.abstasks import AbsTaskRetrieval

    class SciFact(AbsTaskRetrieval):
        metadata = mteb.get_task("SciFact").metadata

        def load_data(self, *args, **kwargs) -> None:
            corpus = Dataset.from_list(
                [{"id": name, **document} for name, document in scifact.corpus.items()]
            )
            queries = Dataset.from_list(
                [{"id": name, "text": text} for name, text in scifact.queries.items()]
            )
            data = {"corpus": corpus, "queries": queries, "top_ranked": None}
            self.dataset = {
                "default": {
                    x: {**data, "relevant_docs": dict(scifact.qrels)} for x in ("test", "dev")
                }
            }
            self.data_loaded = True

    class Two(SciFact):
        metadata = SciFact.metadata.model_copy(
            update={"name": "Two", "eval_splits": ["test", "dev"]}
        )

    known, get_task = {"SciFact": SciFact, "Two": Two}, mteb.get_task
    monkeypatch.setattr(mteb, "get_task", lambda name: known.get(name, lambda: get_task(name))())

    def run(*argv: str, output: str = "out.json") -> int:
        where = ["--device", "cpu", "--no_progress", "--output", str(tmp_path / output)]
        return main(["evaluate", tiny_model_path, *where, *argv])

    return run


def test_scores_by_query_are_ours_and_the_result_files_are_mtebs(
    evaluate, scifact, tiny_model_path, tmp_path, capsys
):
    assert evaluate("--mteb", "SciFact") == 0
    record = read_result(tmp_path / "out.json")
    model = DualEncoder.from_pretrained(tiny_model_path, device="cpu")
    ours = evaluate_beir(model, scifact, show_progress=False)
    assert (
        record["metrics"]["NDCG@10"] == pytest.approx(ours.metrics["NDCG@10"], abs=1e-6)
        and ours.metrics["NDCG@10"] > 0
    )
    for query, scores in record["per_query"].items():
        assert scores["NDCG@10"] == pytest.approx(ours.per_query[query]["NDCG@10"], abs=1e-6)
    about = {
        "name": "SciFact",
        "path": "mteb/scifact",
        "revision": "d56462d0e63a25450459c4f213e49ffdb866f7f9",
    }
    assert record["data"].items() >= {**about, "documents": 100, "queries": 60}.items()
    import mteb

    [found] = mteb.ResultCache(tmp_path / "out.mteb").load_results().model_results
    assert found.task_results[0].get_score() == pytest.approx(
        record["metrics"]["NDCG@10"], abs=1e-5
    )
    # Of another model in the same place mteb's own name and revision would be the same, and so its result.
    assert (found.model_name, found.model_revision) == (
        "model0/tiny",
        record["model"]["fingerprint"],
    )

    capsys.readouterr()
    assert (
        evaluate(
            "--mteb",
            "SciFact",
            "Two",
            "--passage_max_length",
            "5",
            "--compare",
            str(tmp_path / "out.json"),
        )
        == 0
    )
    [compared] = json.loads((tmp_path / "out.compare.json").read_text())
    assert [row["data"] for row in compared["rows"]] == ["SciFact"] and compared["rows"][0][
        "p_holm"
    ] <= 1
    single, both = json.loads((tmp_path / "out.json").read_text())["sets"]
    assert (single["queries"], both["queries"]) == (60, 120) and both["metrics"] == pytest.approx(
        single["metrics"]
    )
    assert evaluate("--mteb", "SciFact", "Two", "--passage_max_length", "5") == 0
    assert capsys.readouterr().out.count("kept: ") == 2
    assert "SciFact" in build_page([tmp_path / "out.json"])


def test_what_mteb_cannot_do_is_one_line(evaluate, monkeypatch, capsys):
    for argv, words in (
        (["SciFcat"], "Did you mean: 'SciFact'"),
        (["STS12"], "STS12: is no retrieval task"),
        (["SciFact", "--index", "IVF2,Flat"], "--index cannot be combined with --mteb"),
        (["SciFact", "--data", "scifact"], "not allowed with argument"),
    ):
        assert evaluate("--mteb", *argv) == 2
        assert words in capsys.readouterr().err.splitlines()[-1]
    monkeypatch.setattr("contaccum.evaluation.mteb_tasks.find_spec", lambda name: None)
    assert (
        evaluate("--mteb", "SciFact") == 2
        and "pip install 'contaccum[mteb]'" in capsys.readouterr().err
    )
