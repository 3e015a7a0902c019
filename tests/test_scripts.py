"""The scripts for studies: what they write is what training and evaluation read."""

import json
import shutil
from typing import Any

import pytest
from programs import ROOT, run_program
from sample_texts import sentences
from small_data import write_judged_places, write_lines
from transformers import AutoModel

from contaccum.data import load_beir_folder, load_training_data
from contaccum.data.beir import shipped_scifact
from contaccum.evaluation.metrics import paired_bootstrap

SCRIPT_FOLDERS = ("benchmarks", "eval", "eval/study", "examples", "scripts")
SCRIPTS = sorted(
    f"{folder}/{path.name}" for folder in SCRIPT_FOLDERS for path in (ROOT / folder).glob("*.py")
)


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_shows_its_options(script, capsys):
    with pytest.raises(SystemExit) as stopped:
        run_program(script, "--help")
    assert stopped.value.code == 0 and capsys.readouterr().out.startswith("usage: ")


def test_split_pairs_holds_out_passages_and_loses_none(tmp_path, capsys):
    queries, passages = sentences(60, 1), sentences(30, 2, 9)
    pairs = [{"query": query, "positive": passages[i % 30]} for i, query in enumerate(queries)]
    source = write_lines(tmp_path / "pairs.jsonl", pairs)
    whole = tmp_path / "whole"
    shares = ["--dev", "0.2", "--test", "0.2", "--whole_corpus", whole]
    run_program("eval/study/split_pairs.py", source, tmp_path / "out", *shares)
    trained = load_training_data(tmp_path / "out" / "train.jsonl").dataset["positive"]
    parts = [load_beir_folder(tmp_path / "out" / part) for part in ("dev", "test")]
    held_out = [document["text"] for part in parts for document in part.corpus.values()]
    assert len(set(trained)) + len(held_out) == 30 and not set(trained) & set(held_out)
    assert held_out and set(trained) | set(held_out) == set(passages)
    for part, of_part in zip(("dev", "test"), parts, strict=True):
        same = load_beir_folder(whole, part)
        assert {document["text"] for document in same.corpus.values()} == set(passages)
        assert set(same.queries.values()) == set(of_part.queries.values())
    assert sorted(load_training_data(whole).dataset["positive"]) == sorted(trained)
    with pytest.raises(SystemExit) as stopped:
        run_program("eval/study/split_pairs.py", tmp_path / "none.jsonl", tmp_path / "other")
    assert stopped.value.code == 2
    assert (
        capsys.readouterr().err.startswith("split_pairs: error:")
        and not (tmp_path / "other").exists()
    )


def test_split_pairs_parts_what_a_beir_folder_judges(tmp_path):
    run_program("eval/study/split_pairs.py", shipped_scifact(), tmp_path / "out", "--dev", "0.2")
    qrels = {
        part: load_beir_folder(tmp_path / "out", part).qrels for part in ("train", "dev", "test")
    }
    train, dev = (
        {document for judged in qrels[part].values() for document in judged}
        for part in ("train", "dev")
    )
    assert not train & dev and not qrels["train"].keys() & qrels["dev"].keys()
    judged = load_beir_folder(shipped_scifact(), "train").qrels
    assert all(judged[query] == documents for query, documents in qrels["dev"].items())
    assert qrels["test"] == load_beir_folder(shipped_scifact()).qrels
    assert len(judged) > len(qrels["train"]) + len(qrels["dev"]) > 0.9 * len(judged)


def test_holm_corrects_over_all_pairs_of_all_reports(tmp_path, capsys):
    gains = {"grad_accum": 0.0, "grad_cache": 0.02, "contaccum": 0.1}

    def score(entry: str, data: str, seed: int, query: int) -> float:
        return (
            0.4
            + gains[entry] * (query * 7 % 5 - (1.9 if data == "nqg" else 1))
            + seed * (query % 3) / 50
        )

    for data in ("nqg", "arxiv"):
        groups = {
            f"{entry}_learning_rate-{n}e-4": {"entry": entry, "seeds": [0, 1]}
            for n, entry in enumerate(gains)
        }
        for name, group in groups.items():
            for seed in group["seeds"]:
                per_query = {
                    f"q{n}": {"NDCG@10": score(group["entry"], data, seed, n)} for n in range(20)
                }
                file = tmp_path / data / "runs" / f"{name}_seed-{seed}" / "result.json"
                file.parent.mkdir(parents=True)
                file.write_text(json.dumps({"evaluations": {"test": {"per_query": per_query}}}))
        report = {"groups": groups, "data": {"evaluation": [{"name": "test"}, {"name": "dev"}]}}
        (tmp_path / data / "report.json").write_text(json.dumps(report))
    reports = [tmp_path / "nqg" / "report.json", tmp_path / "arxiv" / "report.json"]
    pairs = ["contaccum:grad_accum", "contaccum:grad_cache_learning_rate-1e-4"]
    run_program("eval/study/holm.py", *reports, "--pairs", *pairs, "--output", tmp_path / "all")
    rows = json.loads((tmp_path / "all.json").read_text())["rows"]
    assert [(row["training"], row["pair"]) for row in rows] == [
        (d, p) for d in ("nqg", "arxiv") for p in pairs
    ]
    for row in rows:
        entries = [name.rpartition("_learning")[0] for name in row["groups"]]
        means = [
            [sum(score(x, row["training"], s, n) for s in (0, 1)) / 2 for n in range(20)]
            for x in entries
        ]
        expected = paired_bootstrap(*means)
        for key in ("difference", "low", "p_value"):
            assert row[key] == pytest.approx(expected[key])
    assert min(row["p_value"] for row in rows) * 4 == pytest.approx(
        min(row["p_holm"] for row in rows)
    )
    assert f"{rows[0]['difference']:+.4f}" in (tmp_path / "all.md").read_text()
    with pytest.raises(SystemExit) as stopped:
        run_program(
            "eval/study/holm.py",
            reports[0],
            "--pairs",
            "contaccum:other",
            "--output",
            tmp_path / "none",
        )
    assert stopped.value.code == 2 and "other is no group; name one of" in capsys.readouterr().err


def test_small_backbone_cuts_the_first_layers_or_draws_fresh_weights(tiny_model_path, tmp_path):
    def made(name: str, *argv: Any) -> Any:
        run_program("eval/study/small_backbone.py", tiny_model_path, tmp_path / name, *argv)
        return AutoModel.from_pretrained(tmp_path / name)

    whole, cut = AutoModel.from_pretrained(tiny_model_path), made("slice", "--layers", 1)
    assert len(cut.encoder.layer) == 1 < len(whole.encoder.layer)
    mine, theirs = (model.encoder.layer[0].state_dict() for model in (cut, whole))
    assert all(mine[key].equal(theirs[key]) for key in theirs)

    fresh = [
        made(f"fresh-{n}", "--layers", 1, "--hidden_size", 64, "--seed", seed)
        for n, seed in enumerate((0, 0, 1))
    ]
    a, b, c = (model.encoder.layer[0].attention.self.query.weight for model in fresh)
    assert a.shape == (64, 64) and a.equal(b) and not a.equal(c)
    with pytest.raises(SystemExit, match="no bert of 99 layers"):
        made("deep", "--layers", 99)


@pytest.mark.long
def test_the_check_of_the_query_side_skips_cells_that_are_done(tmp_path, tiny_model_path, capsys):
    data = write_judged_places(tmp_path / "data", train=True)
    shutil.copy(data / "qrels" / "test.tsv", data / "qrels" / "dev.tsv")
    results = tmp_path / "results"
    options = [
        "--name",
        "places",
        "--model",
        tiny_model_path,
        "--work",
        tmp_path / "work",
        "--output",
        results,
    ]
    options += ["--arms", "query_full_corpus", "--rates", "1e-2", "--updates", "2", "--seeds", "0"]
    run_program("eval/study/query_side.py", data, *options)
    cell = results / "places-query_full_corpus-1e-2-0.json"
    record = json.loads(cell.read_text())
    assert record["updates"] == 2 and record["pairs"] == 36 and 0 < record["scores"]["test"] <= 1
    assert record["git_commit"] and str(tmp_path) not in cell.read_text()
    before = cell.stat().st_mtime_ns
    run_program("eval/study/query_side.py", data, *options)
    assert cell.stat().st_mtime_ns == before
    assert "places-query_full_corpus-1e-2-0" in capsys.readouterr().out
