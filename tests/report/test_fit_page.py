"""Content and order of the page of a fit; texts of users cannot inject markup."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from contaccum.experiments.tune import Choice

from contaccum.experiments.verdict import compute_verdict, warn_of_disagreement, warn_of_test
from contaccum.report.fit_page import build_fit_page, join_title_and_text, make_trials_panel

SCRIPT = "<script>alert(1)</script>"


def make_record(base: float, trained: float) -> dict[str, Any]:
    """Make the record of `contaccum fit` for ten queries that all have the same score."""
    queries = [f"q{number}" for number in range(10)]
    verdict = compute_verdict(
        trained=dict.fromkeys(queries, trained),
        base=dict.fromkeys(queries, base),
        bm25=dict.fromkeys(queries, 0.5),
        groups={query: query for query in queries},
    )
    scores = []
    for name, score in (("BM25", 0.5), ("a model (as it is)", base), ("trained", trained)):
        scores.append(
            {"name": name, "dev": score, "NDCG@10": score, "MRR@10": score, "Recall@100": 1.0}
        )
    document = {"title": f"A title {SCRIPT}", "text": "word " * 200}
    change = {
        "query": f"a question {SCRIPT}",
        "before": base,
        "after": trained,
        "gold": [document],
        "top_before": [{"title": "", "text": "another", "is_gold": False}],
        "top_after": [{**document, "is_gold": True}],
    }
    settings = {"method": "query_side", "learning_rate": 0.01}
    trials = []
    for number, (rate, score) in enumerate([(0.01, 0.7), (0.03, 0.6), (0.1, None)]):
        trial_settings = {"method": "query_side", "learning_rate": rate}
        trials.append(
            {
                "trial": number,
                "settings": trial_settings,
                "score": score,
                "seconds": 1.0,
                "updates": 9,
                "note": "",
            }
        )
    against_base = {"difference": 0.1, "low": 0.05, "high": 0.15, "changed_groups": 9}
    return {
        "verdict": verdict.record(),
        "verdicts": {"new": verdict.record()},
        "production": {"line": "with BM25 beside the vectors: 0.5 -> 0.7"},
        "warnings": ["take this with care"],
        "model": "a model",
        "data": {"path": "https://user:hunter2secret@host/pairs.csv", "corpus": None},
        "split": {
            "train": 70,
            "dev": 10,
            "test": 10,
            "known": {"dev": 0, "test": 0},
            "documents": {"train": 80, "dev": 90, "test": 90},
        },
        "scores": scores,
        "curve": [],
        "choice": {
            "settings": settings,
            "trial": 0,
            "score": 0.7,
            "against_base": against_base,
            "warnings": [],
        },
        "trials": trials,
        "changes": {"gained": [change], "lost": [], "num_gained": 10, "num_lost": 0, "num_same": 0},
        "settings": {"model": "a model", "learning_rate": 0.01},
        "seconds": {"search": 10.0, "total": 20.0},
        "budget_seconds": 60.0,
        "made_with": {
            "versions": {"python": "3.11"},
            "git_commit": None,
            "time": "2026-01-01T00:00:00+00:00",
        },
    }


def build_page_of_record(folder: Path, record: dict[str, Any]) -> str:
    (folder / "fit.json").write_text(json.dumps(record))
    return build_fit_page(folder)


def test_the_verdict_comes_first_and_the_other_parts_follow(tmp_path):
    page = build_page_of_record(tmp_path, make_record(0.4, 0.6))
    body = page[page.index("<body>") :]
    order = [
        "BETTER",
        "take this with care",
        "<h2>Scores",
        "gained most",
        "lost most",
        "Trials",
        "Load and serve",
    ]
    positions = [body.index(text) for text in order]
    assert positions == sorted(positions)
    assert "0.600" in body
    assert "(chosen)" in body
    assert "an index that was built with that model stays valid" in " ".join(body.split())
    assert "<h2>Training" not in body  # there are no logs


def test_texts_are_escaped_and_credentials_are_not_shown(tmp_path):
    page = build_page_of_record(tmp_path, make_record(0.4, 0.6))
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "hunter2secret" not in page
    assert "default-src 'none'" in page
    assert not re.search(r"(?:src|href)=[\"']?http", page)


@pytest.mark.parametrize(("trained", "word"), [(0.4, "LEVEL"), (0.2, "WORSE")])
def test_the_page_advises_to_keep_the_base_model_unless_the_trained_is_better(
    tmp_path, trained, word
):
    page = build_page_of_record(tmp_path, make_record(0.4, trained))
    assert f"<strong>{word}</strong>" in page
    assert "keep the base model." in page


def test_the_page_has_the_curves_of_the_training_logs(tmp_path):
    (tmp_path / "model").mkdir()
    lines = [{"update": update, "loss": 1.0 / update, "learning_rate": 0.1} for update in (1, 2, 3)]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    cut_line = '{"update": 4, "lo'  # a killed process leaves an incomplete line
    (tmp_path / "model" / "train_log.jsonl").write_text(text + cut_line)
    record = {**make_record(0.4, 0.6), "curve": [[0.5, 0.6], [1.0, 0.7]]}
    page = build_page_of_record(tmp_path, record)
    assert "<h2>Training" in page
    captions = re.findall("<figcaption>(.*?)</figcaption>", page)
    assert captions == [
        "nDCG@10 on dev by learning rate",
        "loss",
        "learning_rate",
        "nDCG@10 on test",
    ]
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert ids
    assert len(ids) == len(set(ids))
    assert "currentColor" in page
    assert "<metadata" not in page


def test_the_plot_of_trials_has_each_method_the_base_model_and_the_choice():
    panel = make_trials_panel(make_record(0.4, 0.6))
    assert panel is not None
    assert panel.lines == {
        "query_side": [(0.01, 0.7), (0.03, 0.6)],
        "the model as it is": [(0.01, 0.4), (0.03, 0.4)],
        "chosen": [(0.01, 0.7)],
    }
    without_rates = make_record(0.4, 0.6)
    for trial in without_rates["trials"]:
        del trial["settings"]["learning_rate"]
    assert make_trials_panel(without_rates) is None


def test_a_title_is_a_sentence_before_the_text():
    assert join_title_and_text({"title": "Rain", "text": "falls"}) == "Rain. falls"
    assert join_title_and_text({"title": "Rain?", "text": "falls"}) == "Rain? falls"
    assert join_title_and_text({"title": "", "text": "falls"}) == "falls"


def test_the_interval_decides_the_verdict_and_disagreements_are_warned_of():
    queries = [f"q{number}" for number in range(40)]
    base = dict.fromkeys(queries, 0.5)
    noisy = {query: 0.5 + (0.3 if number % 2 else -0.3) for number, query in enumerate(queries)}
    groups = {query: query for query in queries}
    verdict = compute_verdict(noisy, base, dict.fromkeys(queries, 0.9), groups)
    assert verdict.word == "LEVEL"
    assert verdict.low < 0.0 < verdict.high
    choice = Choice(
        {}, 0, 0.6, {"difference": 0.1, "low": 0.05, "high": 0.15, "changed_groups": 9}, []
    )
    [disagreement] = warn_of_disagreement(verdict, choice)
    assert disagreement.startswith("dev and test disagree: +0.100 on dev")
    [warning] = warn_of_test(verdict)
    assert warning.startswith("BM25 scores 0.900, more than the trained model")
    trained = {query: score + 0.2 for query, score in base.items()}
    better = compute_verdict(trained, base, base, groups)
    assert better.word == "BETTER"
    assert warn_of_disagreement(better, choice) + warn_of_test(better) == []


def test_queries_about_few_passages_are_counted_and_warned_of():
    queries = [f"q{number}" for number in range(40)]
    base = dict.fromkeys(queries, 0.5)
    trained = dict.fromkeys(queries, 0.7)
    groups = {query: number // 5 for number, query in enumerate(queries)}
    verdict = compute_verdict(trained, base, base, groups)
    assert "on 40 held-out queries of 8 passages (" in str(verdict)
    [warning] = warn_of_test(verdict)
    assert "only 8 different passages" in warning
