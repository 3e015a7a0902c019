"""The table of several sets: means of means, and published figures only where they are of the same data."""

from __future__ import annotations

import csv
import io
from typing import Any

import pytest

from contaccum.data import PUBLIC_NAMES
from contaccum.evaluation import tables
from contaccum.evaluation.tables import OURS, published


def row(name: str, value: float, queries: int | None = None, split: str | None = None) -> dict[str, Any]:
    judged = published()["judged_queries"].get(name, 1) if queries is None else queries
    about = {"name": name, "split": split or ("dev" if name == "msmarco" else "test"), "queries": judged}
    return {**about, "documents": 9, "metrics": {"NDCG@10": value, "MRR@10": value / 2}}


def test_published_figures_are_complete_and_are_those_of_their_sources():
    models = {model["name"]: model["scores"] for model in published()["models"]}
    assert set(published()["judged_queries"]) == set(PUBLIC_NAMES)
    for name, scores in models.items():
        assert set(scores) == set(PUBLIC_NAMES) - ({"msmarco"} if name == "BM25" else set())
        assert all(0.1 < value < 0.9 for value in scores.values())
    assert models["all-MiniLM-L6-v2"]["scifact"] == 0.64508 and models["all-MiniLM-L6-v2"]["nfcorpus"] == 0.31594
    # The averages over all fifteen in the table of bge's model card, a source that gives nothing else here.
    for name, average in {"all-mpnet-base-v2": 43.81, "bge-small-en-v1.5": 51.68, "e5-base-v2": 50.29}.items():
        assert round(100 * sum(models[name].values()) / 15, 2) == average
    assert all(model["how"] and model["sources"] for model in published()["models"])


def test_the_mean_beside_published_figures_is_over_the_sets_that_all_have():
    # MS MARCO has no figure of BM25, "mine" none at all, and scidocs here is other data.
    rows = [row("scifact", 0.7), row("nfcorpus", 0.3), row("msmarco", 0.4), row("mine", 0.9), row("scidocs", 0.1, 6)]
    beside = tables.beside_published(rows)
    assert beside is not None and beside["common"] == ["scifact", "nfcorpus"]
    assert beside["mean"][OURS] == pytest.approx(0.5)
    assert beside["mean"]["BM25"] == pytest.approx((0.6789 + 0.3218) / 2)
    assert beside["scores"]["mine"] == {OURS: 0.9}
    assert list(beside["other_data"]) == ["scidocs"]
    assert "6 judged queries, BEIR has 1,000" in beside["other_data"]["scidocs"]
    text = tables.as_text(tables.sections(rows, ["NDCG@10"]))
    lines = {line.split()[0]: line.split() for line in text.splitlines() if line}
    assert lines["scidocs*"][1:3] == ["0.1000", "0.1490"] and lines["mine"] == ["mine", "0.9000"]
    assert "mean of 2" in text and "*scidocs: 6 judged queries" in text


@pytest.mark.parametrize("rows", [[row("mine", 0.5)], [row("scifact", 0.5, split="train")]])
def test_nothing_is_shown_beside_what_nobody_published(rows):
    assert tables.beside_published(rows) is None
    assert "published" not in tables.as_text(tables.sections(rows, ["NDCG@10"]))
    assert tables.beside_published([row("scifact", 0.5) | {"metrics": {"NDCG@5": 0.5}}]) is None


def test_all_forms_hold_the_same_numbers():
    rows, names = [row("scifact", 0.7), row("a|b", 0.3)], ["MRR@10", "NDCG@10"]
    lines = list(csv.DictReader(io.StringIO(tables.as_csv(rows, names))))
    assert [line["data"] for line in lines] == ["scifact", "a|b", "mean", "mean of 1 that all have"]
    assert float(lines[0]["MRR@10"]) == 0.35 and lines[0]["e5-base-v2 NDCG@10"] == "0.71944"
    assert lines[1]["BM25 NDCG@10"] == "" and float(lines[2]["NDCG@10"]) == pytest.approx(0.5)
    page = tables.as_markdown("title", tables.sections(rows, names))
    assert "| scifact | test | 300 | 0.3500 | 0.7000 |" in page and r"| a\|b | test | 1 | 0.1500 | 0.3000 |" in page
    assert "| scifact | 0.7000 | 0.6789 |" in page and "castorini/pyserini" in page
    content = tables.as_json(rows, names)
    assert content["published"]["scores"]["scifact"]["BM25"] == 0.6789 and content["shown"] == names
    header, first = tables.as_text(tables.sections(rows, names)).splitlines()[:2]
    assert (header.split(), first.split()) == (
        ["data", "split", "queries", *names],
        ["scifact", "test", "300", "0.3500", "0.7000"],
    )
