"""Content and order of the page of a fit; texts of users cannot inject markup."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from contaccum.experiments.candidates import Candidate
from contaccum.experiments.verdict import Verdict, compute_verdict, warn_of_test
from contaccum.report.fit_page import build_fit_page, join_title_and_text, make_ladder_panel

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
        scores.append(
            {"name": name, "dev": score, "NDCG@10": score, "MRR@10": score, "Recall@100": 1.0}
        )
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
        "changes": {"gained": [change], "lost": [], "num_gained": 10, "num_lost": 0, "num_same": 0},
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
        "BETTER",
        "the vectors alone",
        "take this with care",
        "<h2>Scores",
        "gained most",
        "lost most",
        "The candidates",
        "Load and serve",
    ]
    positions = [body.index(text) for text in order]
    assert positions == sorted(positions)
    assert "0.600" in body
    assert re.search(r"<td>3\. tower .* \(chosen\)</td>", body)
    assert "--bm25_weight 0.1" in body
    assert "contaccum train" in body
    assert "an index that was built with that model stays valid" in " ".join(body.split())


def test_the_page_serves_what_is_recommended(tmp_path):
    """The base model after LEVEL; and BM25 alone, whose vectors have no score."""
    record = make_record(0.4, 0.4)
    record |= {"recommended": 1, "chosen": 0, "bm25_weight": 0.3}
    body = build_page_of_record(tmp_path, record)
    assert "--bm25_weight 0.3" in body
    assert "<td>0. BM25 (chosen)</td>" in body
    assert "contaccum train" not in body  # BM25 has no training


def test_texts_are_escaped_and_credentials_are_not_shown(tmp_path):
    page = build_page_of_record(tmp_path, make_record(0.4, 0.6))
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "hunter2secret" not in page
    assert "default-src 'none'" in page
    assert not re.search(r"(?:src|href)=[\"']?http", page)


@pytest.mark.parametrize(("chosen", "word"), [(0.4, "LEVEL"), (0.2, "WORSE")])
def test_the_page_advises_to_keep_the_best_free_search_unless_training_has_paid(
    tmp_path, chosen, word
):
    page = build_page_of_record(tmp_path, make_record(0.4, chosen))
    assert f"<strong>{word}</strong>" in page
    assert "keep a model with BM25." in page


def test_the_chart_is_the_ladder(tmp_path):
    """Scores on dev by minutes, with a colour for each rung."""
    panel = make_ladder_panel(make_record(0.4, 0.6))
    assert panel.lines == {
        "no training": [(0.1, 0.5), (0.2, 0.6)],
        "linear map": [(0.3, 0.65)],
        "query tower": [(1.0, 0.7)],
        "chosen": [(1.0, 0.7)],
    }
    page = build_page_of_record(tmp_path, make_record(0.4, 0.6))
    assert re.findall("<figcaption>(.*?)</figcaption>", page) == ["nDCG@10 on dev by minutes"]
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert ids
    assert len(ids) == len(set(ids))
    assert "currentColor" in page
    assert "<metadata" not in page


def test_a_title_is_a_sentence_before_the_text():
    assert join_title_and_text({"title": "Rain", "text": "falls"}) == "Rain. falls"
    assert join_title_and_text({"title": "Rain?", "text": "falls"}) == "Rain? falls"
    assert join_title_and_text({"title": "", "text": "falls"}) == "falls"


def test_the_interval_decides_the_verdict_and_a_better_bm25_is_warned_of():
    queries = [f"q{number}" for number in range(40)]
    free = dict.fromkeys(queries, 0.5)
    noisy = {query: 0.5 + (0.3 if number % 2 else -0.3) for number, query in enumerate(queries)}
    verdict = compute_verdict_of(free, noisy, bm25=dict.fromkeys(queries, 0.9))
    assert verdict.word == "LEVEL"
    assert verdict.low < 0.0 < verdict.high
    [warning] = warn_of_test(verdict)
    assert warning.startswith("BM25 alone scores 0.900 on test")
    better = compute_verdict_of(free, {query: score + 0.2 for query, score in free.items()})
    assert better.word == "BETTER"
    assert warn_of_test(better) == []


def test_queries_about_few_passages_are_counted_and_warned_of():
    queries = [f"q{number}" for number in range(40)]
    groups = {query: number // 5 for number, query in enumerate(queries)}
    verdict = compute_verdict_of(
        dict.fromkeys(queries, 0.5), dict.fromkeys(queries, 0.7), group=groups
    )
    assert "on 40 held-out queries of 8 passages (" in str(verdict)
    [warning] = warn_of_test(verdict)
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
        "LEVEL: nothing that was trained is better on dev than a model with BM25, which has 0.700 "
        "on 40 held-out queries: keep it"
    )
