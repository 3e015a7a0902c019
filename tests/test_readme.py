"""README.md: every figure is that of a committed result."""

import json
import re
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SHOWN_SYSTEMS = ("bm25", "base", "base_with_bm25", "trained", "trained_with_bm25")
SETS = ("scifact", "nqg", "medquad")
MODELS = {"minilm": "all-MiniLM-L6-v2", "bert-base": "BERT-base"}


def read(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / name).read_text(encoding="utf-8"))


def make_opening() -> str:
    """Return the gains of the first paragraphs, from the study by time."""
    gains: dict[tuple[str, str], str] = {}
    p_values = set()
    for test in read("by_time/tests.json")["tests"]:
        if test["entry"] == "contaccum":
            gains[test["compared_with"], test["data"]] = f"{100 * test['difference']:+.1f}"
            if test["compared_with"] == "accumulation":
                p_values.add(f"{test['p_holm']:.3f}")
    assert p_values == {"0.004"}
    scifact, nqg, medquad = (gains["accumulation", data] for data in SETS)
    others = (gains["grad_cache", data] for data in SETS)
    return (
        f"the banks bring {scifact} points of nDCG@10 on SciFact, {nqg} on nqg (questions of "
        f"SQuAD) and {medquad} on MedQuAD over gradient accumulation, and "
        "{}, {} and {} over GradCache**".format(*others)
    )


def make_fit_rows() -> list[str]:
    """Return the rows of the table of `contaccum fit`."""
    cells: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for cell in read("fit.json")["cells"]:
        for kind in cell["verdicts"]:
            if not cell["data"].endswith("chunks"):
                cells.setdefault((cell["data"], kind), []).append(cell)
    rows = []
    for (data, kind), fits in cells.items():
        columns = [f"{data}, {kind} documents"]
        for system in SHOWN_SYSTEMS:
            scores = [fit["scores"][system] for fit in fits]
            values = [100 * score.get(kind, score["NDCG@10"]) for score in scores]
            columns.append(f"{fmean(values):.1f} ({stdev(values):.1f})")
        words = [fit["verdicts"][kind]["word"] for fit in fits]
        columns.append(f"{words.count('BETTER')} of {len(words)}")
        rows.append(f"| {' | '.join(columns)} |")
    return rows


def make_memory_rows() -> list[str]:
    """Return the rows of the table of memory."""
    rows = []
    for case in read("gpu/update_time.json")["result"]["cases"]:
        measured = case["methods"]["contaccum"]
        memory = f"{measured['peak_mb'] / 1024:.1f} GB"
        speed = f"{measured['pairs_per_second']:,.0f}"
        rows.append(f"| {MODELS[case['backbone']]} | {case['local']} | {memory} | {speed} |")
    return rows


def make_quickstart_lines() -> list[str]:
    """Return the verdict of `make quickstart`, and the line about BM25."""
    record = read("quickstart.json")
    return [record["verdict"]["line"], record["production"]["line"]]


def test_figures_of_the_first_paragraph_and_of_the_quickstart():
    text = " ".join(README.split())
    assert make_opening() in text
    for line in make_quickstart_lines():
        assert line in README


def test_tables_of_fit_and_memory():
    for row in make_fit_rows():
        assert row in README
    memory_rows = make_memory_rows()
    shown = [line for line in README.splitlines() if " GB | " in line]
    assert shown and set(shown) <= set(memory_rows)


def test_every_other_figure_is_in_the_opening_or_a_version():
    """A figure with a decimal point is in a checked line, or it is one of a few others."""
    text = README
    for line in [*make_quickstart_lines(), *make_fit_rows(), *make_memory_rows()]:
        text = text.replace(line, "")
    text = re.sub(r"^```.*?^```|\(http\S+\)", "", text, flags=re.M | re.S)
    known = set(re.findall(r"\d+\.\d+", make_opening())) | {"0.004", "0.05", "3.11", "0.1", "2.0"}
    assert set(re.findall(r"\d+\.\d+", text)) <= known
