"""--help of all programs outside the package, and the programs of eval/study/."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from programs import ROOT, run_program
from sample_texts import sentences
from small_data import write_judged_places, write_lines
from transformers import AutoModel, PreTrainedModel

from contaccum.data import load_beir_folder, load_training_data
from contaccum.data.beir import shipped_scifact
from contaccum.evaluation.metrics import sign_flip_test


def list_scripts() -> list[str]:
    """Return the paths, in the repository, of all programs outside the package."""
    scripts = []
    eval_folders = ("eval", "eval/compare", "eval/open_qa", "eval/study")
    for folder in ("benchmarks", *eval_folders, "examples", "scripts"):
        scripts += [f"{folder}/{path.name}" for path in (ROOT / folder).glob("*.py")]
    return sorted(scripts)


@pytest.mark.parametrize("script", list_scripts())
def test_every_script_prints_its_help(script, capsys):
    with pytest.raises(SystemExit) as stopped:
        run_program(script, "--help")
    assert stopped.value.code == 0
    assert capsys.readouterr().out.startswith("usage: ")


def test_split_pairs_holds_out_passages_and_loses_none(tmp_path, capsys):
    queries = sentences(60, 1)
    passages = sentences(30, 2, 9)
    pairs = []
    for number, query in enumerate(queries):
        pairs.append({"query": query, "positive": passages[number % 30]})
    source = write_lines(tmp_path / "pairs.jsonl", pairs)
    output = tmp_path / "out"
    whole_corpus = tmp_path / "whole"
    shares = ["--dev", "0.2", "--test", "0.2"]
    run_program(
        "eval/study/split_pairs.py", source, output, *shares, "--whole_corpus", whole_corpus
    )

    train_passages = load_training_data(output / "train.jsonl").dataset["positive"]
    held_out_sets = {part: load_beir_folder(output / part) for part in ("dev", "test")}
    held_out_passages = []
    for dataset in held_out_sets.values():
        held_out_passages += [document["text"] for document in dataset.corpus.values()]
    assert held_out_passages
    assert len(set(train_passages)) + len(held_out_passages) == 30
    assert not set(train_passages) & set(held_out_passages)
    assert set(train_passages) | set(held_out_passages) == set(passages)

    for part, dataset in held_out_sets.items():
        whole_dataset = load_beir_folder(whole_corpus, part)
        whole_texts = {document["text"] for document in whole_dataset.corpus.values()}
        assert whole_texts == set(passages)
        assert set(whole_dataset.queries.values()) == set(dataset.queries.values())
    whole_train_passages = load_training_data(whole_corpus).dataset["positive"]
    assert sorted(whole_train_passages) == sorted(train_passages)

    with pytest.raises(SystemExit) as stopped:
        run_program("eval/study/split_pairs.py", tmp_path / "none.jsonl", tmp_path / "other")
    assert stopped.value.code == 2
    assert capsys.readouterr().err.startswith("split_pairs: error:")
    assert not (tmp_path / "other").exists()


def test_split_pairs_splits_the_judgements_of_a_beir_folder(tmp_path):
    run_program("eval/study/split_pairs.py", shipped_scifact(), tmp_path / "out", "--dev", "0.2")
    train = load_beir_folder(tmp_path / "out", "train").qrels
    dev = load_beir_folder(tmp_path / "out", "dev").qrels
    test = load_beir_folder(tmp_path / "out", "test").qrels
    train_documents = set().union(*train.values())
    dev_documents = set().union(*dev.values())
    assert not train_documents & dev_documents
    assert not train.keys() & dev.keys()
    original = load_beir_folder(shipped_scifact(), "train").qrels
    for query, grades in dev.items():
        assert original[query] == grades
    assert test == load_beir_folder(shipped_scifact()).qrels
    # A training query is left out if all its documents are in dev.
    num_split = len(train) + len(dev)
    assert num_split < len(original)
    assert num_split > 0.9 * len(original)


QUERY_GROUPS = {f"q{query}": query // 2 for query in range(20)}
"""{query id: its group} of the made-up studies."""


def make_score(entry: str, data: str, seed: int, query: int) -> float:
    """Return the score of a query in a made-up study, with a different gain for each entry."""
    gain = {"grad_accum": 0.0, "grad_cache": 0.02, "contaccum": 0.1}[entry]
    offset = 1.9 if data == "nqg" else 1
    gain_of_query = gain * (query * 7 % 5 - offset)
    noise_of_seed = seed * (query % 3) / 50
    return 0.4 + gain_of_query + noise_of_seed


def write_study(folder: Path, data: str) -> Path:
    """Write results of two seeds and 20 queries for each entry, and the report; return its path."""
    groups = {
        "grad_accum_learning_rate-0e-4": {"entry": "grad_accum", "seeds": [0, 1]},
        "grad_cache_learning_rate-1e-4": {"entry": "grad_cache", "seeds": [0, 1]},
        "contaccum_learning_rate-2e-4": {"entry": "contaccum", "seeds": [0, 1]},
    }
    for name, group in groups.items():
        for seed in group["seeds"]:
            per_query = {}
            for query in range(20):
                per_query[f"q{query}"] = {"NDCG@10": make_score(group["entry"], data, seed, query)}
            result = {"evaluations": {"test": {"per_query": per_query}}}
            result_file = folder / "runs" / f"{name}_seed-{seed}" / "result.json"
            result_file.parent.mkdir(parents=True)
            result_file.write_text(json.dumps(result))
    sets = [{"name": "test", "query_groups": QUERY_GROUPS}, {"name": "dev"}]
    report = {"groups": groups, "data": {"evaluation": sets}}
    report_file = folder / "report.json"
    report_file.write_text(json.dumps(report))
    return report_file


def compute_mean_scores(entry: str, data: str) -> dict[str, float]:
    """Return the score of each query, as the mean over the two seeds."""
    scores = {}
    for query in range(20):
        score_sum = make_score(entry, data, 0, query) + make_score(entry, data, 1, query)
        scores[f"q{query}"] = score_sum / 2
    return scores


def test_holm_corrects_over_all_pairs_of_all_reports(tmp_path, capsys):
    reports = [write_study(tmp_path / data, data) for data in ("nqg", "arxiv")]
    pairs = ["contaccum:grad_accum", "contaccum:grad_cache_learning_rate-1e-4"]
    run_program("eval/compare/holm.py", *reports, "--pairs", *pairs, "--output", tmp_path / "all")
    rows = json.loads((tmp_path / "all.json").read_text())["rows"]
    assert [row["training"] for row in rows] == ["nqg", "nqg", "arxiv", "arxiv"]
    assert [row["pair"] for row in rows] == [*pairs, *pairs]
    for row in rows:
        first_group, second_group = row["compared"]
        first_entry, _, _ = first_group.rpartition("_learning")
        second_entry, _, _ = second_group.rpartition("_learning")
        expected = sign_flip_test(
            compute_mean_scores(first_entry, row["training"]),
            compute_mean_scores(second_entry, row["training"]),
            QUERY_GROUPS,
        )
        for key in ("difference", "low", "p_value", "groups"):
            assert row[key] == pytest.approx(expected[key])
    # Holm multiplies the smallest p by the number of all comparisons.
    smallest_p_value = min(row["p_value"] for row in rows)
    smallest_p_holm = min(row["p_holm"] for row in rows)
    assert smallest_p_value * 4 == pytest.approx(smallest_p_holm)
    assert f"{rows[0]['difference']:+.4f}" in (tmp_path / "all.md").read_text()


def test_holm_refuses_an_unknown_entry(tmp_path, capsys):
    report = write_study(tmp_path / "nqg", "nqg")
    argv = ["--pairs", "contaccum:other", "--output", tmp_path / "none"]
    with pytest.raises(SystemExit) as stopped:
        run_program("eval/compare/holm.py", report, *argv)
    assert stopped.value.code == 2
    assert "other is no group; name one of" in capsys.readouterr().err


def make_small_backbone(model_path: str, output: Path, *options: object) -> PreTrainedModel:
    run_program("eval/study/small_backbone.py", model_path, output, *options)
    return AutoModel.from_pretrained(output)


def test_small_backbone_copies_the_first_layers(tiny_model_path, tmp_path):
    original = AutoModel.from_pretrained(tiny_model_path)
    small = make_small_backbone(tiny_model_path, tmp_path / "small", "--layers", 1)
    assert len(original.encoder.layer) > 1
    assert len(small.encoder.layer) == 1
    small_weights = small.encoder.layer[0].state_dict()
    original_weights = original.encoder.layer[0].state_dict()
    for name, weight in original_weights.items():
        assert small_weights[name].equal(weight)
    with pytest.raises(SystemExit, match="no bert of 99 layers"):
        make_small_backbone(tiny_model_path, tmp_path / "deep", "--layers", 99)


def test_small_backbone_has_random_weights_by_seed(tiny_model_path, tmp_path):
    options = ["--layers", 1, "--hidden_size", 64]

    def make_weight(name: str, seed: int) -> torch.Tensor:
        output = tmp_path / name
        model = make_small_backbone(tiny_model_path, output, *options, "--seed", seed)
        return model.encoder.layer[0].attention.self.query.weight

    weight = make_weight("first", seed=0)
    assert weight.shape == (64, 64)
    assert weight.equal(make_weight("repeated", seed=0))
    assert not weight.equal(make_weight("other", seed=1))


@pytest.mark.long
def test_query_side_experiment_skips_finished_runs(tmp_path, tiny_model_path, capsys):
    data = write_judged_places(tmp_path / "data", train=True)
    shutil.copy(data / "qrels" / "test.tsv", data / "qrels" / "dev.tsv")
    results = tmp_path / "results"
    options = ["--name", "places", "--model", tiny_model_path]
    options += ["--work", tmp_path / "work", "--output", results]
    options += ["--arms", "query_full_corpus", "--rates", "1e-2", "--updates", "2", "--seeds", "0"]
    run_program("eval/study/query_side.py", data, *options)
    result_file = results / "places-query_full_corpus-1e-2-0.json"
    text = result_file.read_text()
    record = json.loads(text)
    assert record["updates"] == 2
    assert record["pairs"] == 36
    assert record["scores"]["test"] > 0
    assert record["scores"]["test"] <= 1
    assert record["git_commit"]
    assert str(tmp_path) not in text
    time_written = result_file.stat().st_mtime_ns
    run_program("eval/study/query_side.py", data, *options)
    assert result_file.stat().st_mtime_ns == time_written
    assert "places-query_full_corpus-1e-2-0" in capsys.readouterr().out
