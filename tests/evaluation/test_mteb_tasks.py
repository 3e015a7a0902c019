"""MTEB tasks: mteb runs them and writes its own result files; scores per query are added."""

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
    """Return a function that runs `contaccum evaluate MODEL` with an mteb that uses no network.

    Its tasks are SciFact, and "Two", which has two splits.
    """
    mteb = pytest.importorskip("mteb")
    from datasets import Dataset
    from mteb.abstasks import AbsTaskRetrieval

    class SciFact(AbsTaskRetrieval):
        metadata = mteb.get_task("SciFact").metadata

        def load_data(self, *args, **kwargs) -> None:
            documents = [{"id": name, **document} for name, document in scifact.corpus.items()]
            queries = [{"id": name, "text": text} for name, text in scifact.queries.items()]
            splits = {}
            for split in ("test", "dev"):
                splits[split] = {
                    "corpus": Dataset.from_list(documents),
                    "queries": Dataset.from_list(queries),
                    "relevant_docs": dict(scifact.qrels),
                    "top_ranked": None,
                }
            self.dataset = {"default": splits}
            self.data_loaded = True

    class Two(SciFact):
        metadata = SciFact.metadata.model_copy(
            update={"name": "Two", "eval_splits": ["test", "dev"]}
        )

    local_tasks = {"SciFact": SciFact, "Two": Two}
    get_mteb_task = mteb.get_task

    def get_task(name: str) -> AbsTaskRetrieval:
        if name in local_tasks:
            return local_tasks[name]()
        return get_mteb_task(name)

    monkeypatch.setattr(mteb, "get_task", get_task)

    def run_command(*argv: str, output: str = "out.json") -> int:
        options = ["--device", "cpu", "--no_progress", "--output", str(tmp_path / output)]
        return main(["evaluate", tiny_model_path, *options, *argv])

    return run_command


@pytest.mark.long
def test_scores_equal_those_of_evaluate_beir_and_of_mtebs_result_files(
    evaluate, scifact, tiny_model_path, tmp_path
):
    assert evaluate("--mteb", "SciFact") == 0
    record = read_result(tmp_path / "out.json")
    model = DualEncoder.from_pretrained(tiny_model_path, device="cpu")
    expected = evaluate_beir(model, scifact, show_progress=False)
    expected_ndcg = expected.metrics["NDCG@10"]
    assert expected_ndcg > 0
    assert record["metrics"]["NDCG@10"] == pytest.approx(expected_ndcg, abs=1e-6)
    for query, scores in record["per_query"].items():
        expected_score = expected.per_query[query]["NDCG@10"]
        assert scores["NDCG@10"] == pytest.approx(expected_score, abs=1e-6)
    expected_data = {
        "name": "SciFact",
        "path": "mteb/scifact",
        "revision": "d56462d0e63a25450459c4f213e49ffdb866f7f9",
        "documents": 100,
        "queries": 60,
    }
    assert record["data"].items() >= expected_data.items()
    import mteb

    (result,) = mteb.ResultCache(tmp_path / "out.mteb").load_results().model_results
    mteb_ndcg = result.task_results[0].get_score()
    assert mteb_ndcg == pytest.approx(record["metrics"]["NDCG@10"], abs=1e-5)
    # With mteb's own name and revision, another model in the same folder would get this result.
    assert result.model_name == "model0/tiny"
    assert result.model_revision == record["model"]["fingerprint"]


@pytest.mark.long
def test_several_tasks_are_compared_and_not_run_twice(evaluate, tmp_path, capsys):
    assert evaluate("--mteb", "SciFact") == 0
    tasks = ["--mteb", "SciFact", "Two", "--passage_max_length", "5"]
    assert evaluate(*tasks, "--compare", str(tmp_path / "out.json")) == 0
    (comparison,) = json.loads((tmp_path / "out.compare.json").read_text())
    (row,) = comparison["rows"]
    assert row["data"] == "SciFact"
    assert row["p_holm"] <= 1
    one_split, two_splits = json.loads((tmp_path / "out.json").read_text())["sets"]
    assert one_split["queries"] == 60
    assert two_splits["queries"] == 120
    assert two_splits["metrics"] == pytest.approx(one_split["metrics"])
    capsys.readouterr()
    assert evaluate(*tasks) == 0
    assert capsys.readouterr().out.count("kept: ") == 2
    assert "SciFact" in build_page([tmp_path / "out.json"])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["SciFcat"], "Did you mean: 'SciFact'"),
        (["STS12"], "STS12: is not a retrieval task"),
        (["SciFact", "--index", "IVF2,Flat"], "--index cannot be combined with --mteb"),
        (["SciFact", "--data", "scifact"], "not allowed with argument"),
    ],
)
def test_impossible_tasks_and_options_are_refused_in_one_line(evaluate, capsys, argv, message):
    assert evaluate("--mteb", *argv) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_a_missing_mteb_is_reported_with_the_command_to_install_it(evaluate, monkeypatch, capsys):
    monkeypatch.setattr("contaccum.evaluation.mteb_tasks.find_spec", lambda name: None)
    assert evaluate("--mteb", "SciFact") == 2
    assert "pip install 'contaccum[mteb]'" in capsys.readouterr().err
