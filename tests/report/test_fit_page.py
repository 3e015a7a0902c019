"""Content and order of the page of a fit; texts of users cannot inject markup."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from contaccum.experiments.candidates import Candidate
from contaccum.experiments.verdict import Verdict, compute_verdict
from contaccum.report.fit_page import build_fit_page

SCRIPT = "<script>alert(1)</script>"


def compute_verdict_of(free: dict[str, float], chosen: dict[str, float], **columns: Any) -> Verdict:
    """Compute the verdict of two searches; each query is a group unless ``group`` is given."""
    scores = {"free": free, "chosen": chosen, "bm25": dict.fromkeys(free, 0.5)}
    scores |= {"group": {query: query for query in free}, **columns}
    names = ("a model with BM25", "query tower at 0.01, 9 updates")
    return compute_verdict(scores, ("free", "chosen"), names, list(free))


def make_record(free: float, chosen: float) -> dict[str, Any]:
    """Make the record of `contaccum fit` for ten queries that all have the same score."""
    queries = [f"q{number}" for number in range(10)]
    verdict = compute_verdict_of(dict.fromkeys(queries, free), dict.fromkeys(queries, chosen))
    scores = []
    for name, score in (("BM25", 0.5), ("a model with BM25", free), ("query tower", chosen)):
        metrics = {"NDCG@10": score, "MRR@10": score, "Recall@100": 1.0}
        row = {"name": name, "is_free": name == "a model with BM25", "dev": score, **metrics}
        scores.append({**row, "low": None if row["is_free"] else score, "high": score})
    document = {"title": f"A title {SCRIPT}", "text": "word " * 200}
    change = {
        "query": f"a question {SCRIPT}",
        "before": free,
        "after": chosen,
        "gold": [document],
        "top_before": [{"title": "", "text": "another", "is_gold": False}],
        "top_after": [{**document, "is_gold": True}],
    }
    candidates = [
        Candidate("BM25", 0, "bm25", 1.0, make_scores(0.5), {}, 6.0),
        Candidate("a model", 0, "base", 0.3, make_scores(0.6), make_scores(0.55), 12.0),
        Candidate("linear map, ridge 1", 1, "map", 0.2, make_scores(0.65), make_scores(0.6), 18.0),
        Candidate(f"tower {SCRIPT}", 2, "trained", 0.1, make_scores(0.7), make_scores(0.68), 60.0),
    ]
    rows = [{**dataclasses.asdict(row), "number": n} for n, row in enumerate(candidates)]
    rows[3]["settings"] = {"method": "query_side", "learning_rate": 0.01}
    return {
        "verdict": verdict.record(),
        "verdicts": {"new": verdict.record()},
        "lines": ["the vectors alone: 0.5 -> 0.7"],
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
        "candidates": rows,
        "free": 1,
        "chosen": 3,
        "recommended": 3,
        "bm25_weight": 0.1,
        "changes": {
            "gained": [change] * 5,
            "lost": [],
            "failing": [change],
            "num_gained": 7,
            "num_lost": 0,
            "num_failing": 3,
            "num_same": 3,
            "first": {"before": 4, "after": 6},
        },
        "seconds": {"candidates": 10.0, "total": 20.0},
        "budget_seconds": 60.0,
        "made_with": {
            "versions": {"python": "3.11"},
            "git_commit": None,
            "time": "2026-01-01T00:00:00+00:00",
        },
    }


def make_scores(score: float) -> dict[str, float]:
    return {"all": score, "mean": score}


def build_page_of_record(folder: Path, record: dict[str, Any]) -> str:
    return build_fit_page(json.loads(json.dumps(record)), folder)


def test_the_verdict_comes_first_and_the_other_parts_follow(tmp_path):
    page = build_page_of_record(tmp_path, make_record(0.4, 0.6))
    body = page[page.index("<body>") :]
    order = [
        "The right passage is among the first five for 6 of 10 questions; with the best search "
        "that needs no training, for 4.",
        "BETTER",
        "The vectors alone",
        "nDCG@10 on test, with the 95% interval",
        "take this with care",
        "<h2>What to do next",
        "Questions that gained most",
        "Questions that lost most",
        "Questions that still fail",
        "Scores on test",
        "The candidates",
        "<h2>Load and serve",
    ]
    positions = [body.index(text) for text in order]
    assert positions == sorted(positions)
    assert body.count("BETTER") == 2  # the word, and its class
    assert "0.600" in body
    assert re.search(r"<td>3\. tower .* \(chosen\)</td>", body)
    assert "has the weight 0.1 (" in body
    assert "contaccum train" in body
    assert "Keep your index" in body
    assert "NDCG" not in body
    assert body.count('<details class="query" open>') == 3 + 1  # of five, and of one
    assert body.count('<details class="query">') == 2


def test_the_page_shows_no_absolute_path(tmp_path):
    record = make_record(0.4, 0.6)
    record["data"]["path"] = str(tmp_path / "pairs.csv")
    record["candidates"][3]["settings"]["train_data"] = str(tmp_path / "out" / "train.jsonl")
    page = build_page_of_record(tmp_path, record)
    assert str(tmp_path) not in page
    assert "pairs.csv" in page
    assert "train_data: train.jsonl" in page


def test_the_page_serves_what_is_recommended(tmp_path):
    """The base model after LEVEL; and BM25 alone, whose vectors have no score."""
    record = make_record(0.4, 0.4)
    record |= {"recommended": 1, "chosen": 0, "bm25_weight": 0.3}
    body = build_page_of_record(tmp_path, record)
    assert "has the weight 0.3 (" in body
    assert "Keep a model with BM25: no training is needed" in body
    assert "<td>0. BM25 (chosen)</td>" in body
    assert "contaccum train" not in body  # BM25 has no training


def test_texts_are_escaped_and_credentials_are_not_shown(tmp_path):
    page = build_page_of_record(tmp_path, make_record(0.4, 0.6))
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "hunter2secret" not in page
    assert "default-src 'none'" in page
    assert not re.search(r"(?:src|href)=[\"']?http", page)


@pytest.mark.parametrize(
    ("chosen", "word", "advice"),
    [(0.4, "LEVEL", "add pairs of the questions"), (0.2, "WORSE", "differs between training and")],
)
def test_the_next_steps_suit_the_verdict(tmp_path, chosen, word, advice):
    record = make_record(0.4, chosen) | {"recommended": 1}
    page = build_page_of_record(tmp_path, record)
    assert f"<strong>{word}</strong>" in page
    assert "Keep a model with BM25: no training is needed" in page
    assert advice in page
    record["changes"]["num_failing"] = 0
    assert "collect harder questions" in build_page_of_record(tmp_path, record)


def test_the_charts_are_the_ladder_and_the_test_with_its_intervals(tmp_path):
    page = build_page_of_record(tmp_path, make_record(0.4, 0.6))
    ladder, on_test = re.findall(r"<svg.*?</svg>", page, flags=re.S)
    for text in ("no training", "linear map", "query tower", "minutes"):
        assert text in ladder
    for text in ("BM25: 0.500", "a model with BM25: 0.400", "query tower: 0.600"):
        assert text in on_test
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert ids
    assert len(ids) == len(set(ids))
    assert "currentColor" in page
    assert "<metadata" not in page


def test_the_interval_decides_the_verdict_and_a_better_bm25_is_warned_of():
    queries = [f"q{number}" for number in range(40)]
    free = dict.fromkeys(queries, 0.5)
    noisy = {query: 0.5 + (0.3 if number % 2 else -0.3) for number, query in enumerate(queries)}
    verdict = compute_verdict_of(free, noisy, bm25=dict.fromkeys(queries, 0.9))
    assert verdict.word == "LEVEL"
    assert verdict.low < 0.0 < verdict.high
    [warning] = verdict.warnings()
    assert warning.startswith("BM25 alone scores 0.900 on test")
    better = compute_verdict_of(free, {query: score + 0.2 for query, score in free.items()})
    assert better.word == "BETTER"
    assert better.warnings() == []


def test_queries_about_few_passages_are_counted_and_warned_of():
    queries = [f"q{number}" for number in range(40)]
    groups = {query: number // 5 for number, query in enumerate(queries)}
    verdict = compute_verdict_of(
        dict.fromkeys(queries, 0.5), dict.fromkeys(queries, 0.7), group=groups
    )
    assert "on 40 held-out queries of 8 passages (" in str(verdict)
    [warning] = verdict.warnings()
    assert "only 8 different passages" in warning


def test_the_verdict_names_both_searches_and_what_to_keep():
    queries = [f"q{number}" for number in range(40)]
    worse = compute_verdict_of(dict.fromkeys(queries, 0.7), dict.fromkeys(queries, 0.5))
    assert str(worse).startswith("WORSE: nDCG@10 0.700 -> 0.500 on 40 held-out queries")
    assert str(worse).endswith(
        "; from a model with BM25 to query tower at 0.01, 9 updates; keep a model with BM25"
    )
    same = dataclasses.replace(worse, word="LEVEL", chosen_name=worse.free_name)
    assert str(same) == (
        "LEVEL: nothing that was trained is clearly better on dev than a model with BM25, which "
        "has 0.700 on 40 held-out queries: keep it"
    )
