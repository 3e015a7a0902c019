"""The table of several sets: means of means, and published figures only where they are of the same data."""

from __future__ import annotations

import csv
import io

import pytest

from contaccum.data.beir_names import PUBLIC_NAMES
from contaccum.errors import ConfigError
from contaccum.evaluation import table
from contaccum.evaluation.metrics import check_metrics, metric_names, score_run
from contaccum.evaluation.published import published
from contaccum.evaluation.table import OURS, Row


def row(name: str, value: float, queries: int | None = None, split: str | None = None) -> Row:
    split = split or ("dev" if name == "msmarco" else "test")
    judged = published().judged_queries.get(name, 1) if queries is None else queries
    return Row(name, split, judged, 9, {"NDCG@10": value, "MRR@10": value / 2})


def test_a_row_of_parts_is_their_mean_and_counts_once():
    parts = [Row(f"p{i}", "test", 10 * i, 5, {"NDCG@10": i / 10}) for i in (1, 2, 3)]
    whole = table.mean_row("whole", parts)
    assert whole.metrics == {"NDCG@10": pytest.approx(0.2)} and (whole.queries, whole.documents) == (60, 15)
    content = table.as_json([whole, Row("other", "test", 1, 1, {"NDCG@10": 0.6})], ["NDCG@10"])
    assert content["mean"]["NDCG@10"] == pytest.approx(0.4)
    assert [part["name"] for part in content["sets"][0]["parts"]] == ["p1", "p2", "p3"]


def test_published_figures_are_complete_and_are_those_of_their_sources():
    known = published()
    assert set(known.judged_queries) == set(PUBLIC_NAMES)
    assert all(set(scores) == set(PUBLIC_NAMES) for name, scores in known.models.items() if name != "BM25")
    assert set(known.models["BM25"]) == set(PUBLIC_NAMES) - {"msmarco"}
    assert all(0.1 < value < 0.9 for scores in known.models.values() for value in scores.values())
    assert known.models["all-MiniLM-L6-v2"]["scifact"] == 0.64508
    assert known.models["all-MiniLM-L6-v2"]["nfcorpus"] == 0.31594
    # The averages over all fifteen in the table of bge's model card, a source that gives nothing else here.
    for name, average in {"all-mpnet-base-v2": 43.81, "bge-small-en-v1.5": 51.68, "e5-base-v2": 50.29}.items():
        assert round(100 * sum(known.models[name].values()) / 15, 2) == average
    assert all(model["how"] and model["sources"] for model in known.document["models"])


def test_the_mean_beside_published_figures_is_over_the_sets_that_all_have():
    # MS MARCO has no figure of BM25, "mine" none at all, and scidocs here is other data.
    rows = [row("scifact", 0.7), row("nfcorpus", 0.3), row("msmarco", 0.4), row("mine", 0.9), row("scidocs", 0.1, 6)]
    comparison = table.beside_published(rows)
    assert comparison is not None and list(comparison.common) == ["scifact", "nfcorpus"]
    assert comparison.mean[OURS] == pytest.approx(0.5)
    assert comparison.mean["BM25"] == pytest.approx((0.6789 + 0.3218) / 2)
    assert comparison.rows["mine"] == {OURS: 0.9}
    assert list(comparison.other) == ["scidocs"] and "6 judged queries, BEIR has 1,000" in comparison.other["scidocs"]
    text = table.as_text(rows, ["NDCG@10"])
    lines = {line.split()[0]: line.split() for line in text.splitlines() if line}
    assert lines["scidocs*"][1:3] == ["0.1000", "0.1490"] and lines["mine"] == ["mine", "0.9000"]
    assert "mean of 2" in text and "*scidocs: 6 judged queries" in text


@pytest.mark.parametrize("rows", [[row("mine", 0.5)], [row("scifact", 0.5, split="train")]])
def test_nothing_is_shown_beside_what_nobody_published(rows):
    assert table.beside_published(rows) is None
    assert "published" not in table.as_text(rows, ["NDCG@10"])


def test_nothing_is_shown_beside_another_metric():
    assert table.beside_published([Row("scifact", "test", 300, 9, {"NDCG@5": 0.5})]) is None


def test_all_forms_hold_the_same_numbers():
    rows = [row("scifact", 0.7), row("a|b", 0.3)]
    names = ["MRR@10", "NDCG@10"]
    lines = list(csv.DictReader(io.StringIO(table.as_csv(rows, names))))
    assert [line["data"] for line in lines] == ["scifact", "a|b", "mean", "mean of 1 that all have"]
    assert float(lines[0]["MRR@10"]) == 0.35 and lines[0]["e5-base-v2 NDCG@10"] == "0.71944"
    assert lines[1]["BM25 NDCG@10"] == "" and float(lines[2]["NDCG@10"]) == pytest.approx(0.5)
    page = table.as_markdown(rows, names, "title")
    assert "| scifact | test | 300 | 0.3500 | 0.7000 |" in page and r"| a\|b | test | 1 | 0.1500 | 0.3000 |" in page
    assert "| scifact | 0.7000 | 0.6789 |" in page and "castorini/pyserini" in page
    content = table.as_json(rows, names)
    assert content["published"]["scores"]["scifact"]["BM25"] == 0.6789 and content["shown"] == names


def test_metric_names_are_those_that_scoring_gives():
    metrics, _ = score_run({"q": {"d": 1}}, {"q": {"d": 1.0}}, (1, 7))
    assert list(metrics) and set(metric_names((1, 7))) == set(metrics)
    assert check_metrics(["MRR@7", "P@1", "MRR@7"], (1, 7)) == ("MRR@7", "P@1")
    with pytest.raises(ConfigError, match=r"no metric 'MRR@10'.*k_values \(1, 7\)"):
        check_metrics(["MRR@10"], (1, 7))
