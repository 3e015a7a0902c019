"""Tables and significance tests of the study by time, from its finished runs.

    python eval/study/by_time_report.py

Rewrites the tables of docs/time_study.md, those of benchmarks/by_time/README.md, which has all
runs, and benchmarks/by_time/tests.json. An entry without a run at its chosen rate is shown as "not
yet run"; the mean of an entry is over the seeds that have finished.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import fmean
from typing import Any

from time_study.plan import Plan, read_plan
from time_study.results import Record, Results, average_queries, average_runs

from contaccum.evaluation.metrics import add_holm, sign_flip_test
from contaccum.evaluation.results import fill_page, markdown_table
from contaccum.files import provenance, write_json, write_text

ROOT = Path(__file__).resolve().parents[2]
NOT_RUN = "not yet run"
MAIN_ENTRIES = (
    "accumulation",
    "grad_cache",
    "grad_cache_same_pairs",
    "contaccum",
    "contaccum_cached",
    "query_side_corpus",
    "contaccum_then_query_side",
)
MAIN_COMPARISONS = (
    ("contaccum", "accumulation"),
    ("contaccum", "grad_cache"),
    ("grad_cache_same_pairs", "contaccum"),
    ("contaccum_cached", "grad_cache"),
    ("contaccum_cached", "contaccum"),
    ("query_side_corpus", "contaccum"),
    ("contaccum_then_query_side", "contaccum"),
    ("contaccum_then_query_side", "query_side_corpus"),
    ("contaccum_oracle", "contaccum"),
    ("contaccum_no_age_limit", "contaccum"),
)
"""Rows of the tables of the page. The other entries and tests are in the tables of all runs."""

Test = dict[str, Any]
"""A test: data, entry, compared_with, p_holm, and the result of `sign_flip_test`."""


def make_tests(plan: Plan, results: dict[str, Results]) -> list[Test]:
    """Compare entries as the plan says, with Holm's correction over all finished comparisons."""
    tests: list[Test] = []
    for data, data_results in results.items():
        base = data_results.get_base()
        if base is None:
            continue
        for name, entry in plan.get_entries(data).items():
            for other in entry.compared_with:
                if not (data_results.is_complete(name) and data_results.is_complete(other)):
                    continue
                scores = average_queries(data_results.get_final_runs(name), "test")
                other_scores = average_queries(data_results.get_final_runs(other), "test")
                test = compare(scores, other_scores, base["query_groups"]["test"])
                tests.append({"data": data, "entry": name, "compared_with": other, **test})
    add_holm(tests)
    return tests


def compare(scores: list[float], other_scores: list[float], groups: list[int]) -> Test:
    """Compare scores of the same queries, whose groups are given; see `sign_flip_test`."""
    return sign_flip_test(
        dict(enumerate(scores)), dict(enumerate(other_scores)), dict(enumerate(groups))
    )


def make_test_table(tests: list[Test]) -> str:
    """Return the table of all comparisons."""
    rows = []
    for test in tests:
        p_value = "< 0.001" if test["p_holm"] < 0.001 else f"{test['p_holm']:.2g}"
        rows.append(
            [
                test["data"],
                f"`{test['entry']}` - `{test['compared_with']}`",
                f"{100 * test['difference']:+.1f}",
                f"{100 * test['low']:+.1f} to {100 * test['high']:+.1f}",
                p_value,
            ]
        )
    header = ["data", "entries", "difference", "95 % interval", f"p (Holm of {len(tests)})"]
    return markdown_table(header, rows)


def make_main_table(results: dict[str, Results]) -> str:
    """Return test scores and CPU minutes of the main entries: a column per data set."""
    rows = []
    for name, key in (("base model", "scores"), ("BM25", "bm25")):
        cells = []
        for data_results in results.values():
            base = data_results.get_base()
            cells.append(None if base is None else format_score(base[key]["test"]))
        rows.append([name, *cells])
    for name in MAIN_ENTRIES:
        cells = []
        for data, data_results in results.items():
            cell = None
            if name in data_results.plan.get_entries(data) and data_results.is_complete(name):
                runs = data_results.get_final_runs(name)
                minutes = data_results.get_cost(name, runs[0]["updates"]).minutes
                cell = f"{format_mean(runs, 'test')}, {minutes:.1f} min"
            cells.append(cell)
        rows.append([f"`{name}`", *cells])
    return markdown_table(["", *results], rows)


def make_main_test_table(tests: list[Test], data_names: list[str]) -> str:
    """Return the main comparisons: a column per data set, with a star where p is below 0.05."""
    found = {(test["data"], test["entry"], test["compared_with"]): test for test in tests}
    rows = []
    for entry, other in MAIN_COMPARISONS:
        cells: list[str | None] = []
        for data in data_names:
            test = found.get((data, entry, other))
            if test is None:
                cells.append(None)
            else:
                cells.append(format_difference(test) + ("*" if test["p_holm"] < 0.05 else ""))
        if any(cells):
            rows.append([f"`{entry}` - `{other}`", *cells])
    return markdown_table(["", *data_names], rows)


def make_result_table(plan: Plan, data: str, results: Results) -> str:
    """Return the table of a data set: one row per entry."""
    header = ["", "learning rate", "updates", "CPU min", "encoded texts", "seeds", "dev", "test"]
    rows: list[list[Any]] = []
    base = results.get_base()
    for name, key in (("base model", "scores"), ("BM25", "bm25")):
        scores = ["", ""] if base is None else [format_score(base[key][s]) for s in ("dev", "test")]
        rows.append([name, "", "", "", "", "", *scores])
    for name in plan.get_entries(data):
        runs = results.get_final_runs(name)
        second_stage = plan.entries[name].second_stage
        if not runs or (second_stage is not None and not results.get_final_runs(second_stage)):
            rows.append([f"`{name}`", NOT_RUN, "", "", "", "", "", ""])
            continue
        updates = runs[0]["updates"]
        cost = results.get_cost(name, updates)
        minutes = f"{cost.minutes:.1f}"
        texts = f"{results.count_texts(name):,.0f}"
        if plan.entries[name].trainer == "oracle":
            minutes = texts = "not counted"
        second_updates = results.count_second_updates(name)
        shown_updates = f"{updates} + {second_updates}" if second_updates else str(updates)
        rows.append(
            [
                f"`{name}`",
                results.choose_rate(name),
                shown_updates,
                minutes,
                texts,
                len(runs),
                format_mean(runs, "dev"),
                format_mean(runs, "test"),
            ]
        )
    return markdown_table(header, rows)


def make_known_table(plan: Plan, data: str, results: Results) -> str | None:
    """Return the test scores of queries with known documents and of the other queries.

    A document is known if it belongs to a training pair. None if all queries are of one kind.
    """
    base = results.get_base()
    if base is None:
        return None
    is_known = base["has_known_document"]["test"]
    num_known = sum(is_known)
    if num_known in (0, len(is_known)):
        return None
    query_scores = {"base model": base["query_scores"]["test"]}
    for name in plan.get_entries(data):
        runs = results.get_final_runs(name)
        if runs:
            query_scores[f"`{name}`"] = average_queries(runs, "test")
    base_scores = query_scores["base model"]
    base_new = [score for score, flag in zip(base_scores, is_known, strict=True) if not flag]
    groups = base["query_groups"]["test"]
    new_groups = [group for group, flag in zip(groups, is_known, strict=True) if not flag]
    rows = []
    for name, scores in query_scores.items():
        known = [score for score, flag in zip(scores, is_known, strict=True) if flag]
        new = [score for score, flag in zip(scores, is_known, strict=True) if not flag]
        change = ""
        if name != "base model":
            change = format_difference(compare(new, base_new, new_groups))
        rows.append([name, format_score(fmean(known)), format_score(fmean(new)), change])
    num_new = len(is_known) - num_known
    header = [
        "",
        f"{num_known} queries with known documents",
        f"{num_new} other queries",
        "other queries, minus base model",
    ]
    return markdown_table(header, rows)


def make_rate_table(plan: Plan, data: str, results: Results) -> str:
    """Return the table of all learning rates that were tried: dev and test of the first seed."""
    rows = []
    for name, entry in plan.get_entries(data).items():
        if entry.rate_of is not None:
            continue
        cells = []
        for rate, record in results.get_ladder(name).items():
            scores = record["scores"]
            cells.append(f"{rate}: {format_score(scores['dev'])} / {format_score(scores['test'])}")
        rows.append([f"`{name}`", "; ".join(cells) or NOT_RUN])
    return markdown_table(["", "learning rate: dev / test"], rows)


def format_mean(runs: list[Record], split: str) -> str:
    """Return the mean score of runs; with several runs, with the standard deviation in brackets."""
    score = average_runs(runs, split)
    if len(runs) == 1:
        return format_score(score.mean)
    return f"{format_score(score.mean)} ({format_score(score.deviation)})"


def format_difference(test: Test) -> str:
    """Return a difference x 100 with its 95 % interval in brackets."""
    low, high = 100 * test["low"], 100 * test["high"]
    return f"{100 * test['difference']:+.1f} ({low:+.1f} to {high:+.1f})"


def format_score(score: float) -> str:
    """Return a score x 100, with one decimal."""
    return f"{100 * score:.1f}"


def main() -> None:
    """Write tables and tests."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plan", type=Path, default=ROOT / "eval" / "study" / "by_time.yaml")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "by_time")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "time_study.md")
    args = parser.parse_args()
    plan = read_plan(args.plan)
    results = {data: Results(plan, args.results / data) for data in plan.data}
    tests = make_tests(plan, results)
    # A table of variants of another data set is only among the tables of all runs.
    main_results = {data: results[data] for data in results if plan.data[data].folder is None}
    main_tables = {
        "scores": make_main_table(main_results),
        "differences": make_main_test_table(tests, list(main_results)),
    }
    tables = {"comparisons": make_test_table(tests)}
    for data, data_results in results.items():
        tables[data] = make_result_table(plan, data, data_results)
        tables[f"{data}, learning rates"] = make_rate_table(plan, data, data_results)
        known_table = make_known_table(plan, data, data_results)
        if known_table is not None:
            tables[f"{data}, known documents"] = known_table
    for page, contents in ((args.page, main_tables), (args.results / "README.md", tables)):
        write_text(page, fill_page(page.read_text(encoding="utf-8"), contents))
    write_json(args.results / "tests.json", {"metric": "nDCG@10", "tests": tests, **provenance()})


if __name__ == "__main__":
    main()
