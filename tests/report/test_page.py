"""Content of the report page for made-up runs and evaluations; texts cannot inject markup."""

import json
import re
import shutil
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from small_data import write_lines

from contaccum.cli import main
from contaccum.errors import ConfigError, UserError
from contaccum.evaluation.metrics import paired_bootstrap
from contaccum.report import Panel, build_page

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = '<script>document.title="taken"</script>'
IMAGE = '<img src="http://evil.invalid/x.png" onerror="alert(1)">'
HARMFUL_TEXT = SCRIPT + IMAGE


class OutputWriter:
    """Writer of made-up outputs of commands into a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, name: str, content: Any) -> Path:
        records = content if isinstance(content, list) else [content]
        return write_lines(self.root / name, records)

    def write_run(self, name: str, offset: float = 0.0, **arguments: Any) -> Path:
        """Write a run of 12 updates with a bank of 512; update 8 has the best of three scores."""
        record = {
            "method": "contaccum",
            "seed": 7,
            "pairs_per_update": 128,
            "updates": 12,
            "arguments": {"bank_size": 512, "learning_rate": 5e-5, **arguments},
            "data": {"fingerprint": "f" * 64},
            "model": {"base": "MiniLM"},
        }
        self.write(f"{name}/run.json", record)
        train_log = []
        for update in range(1, 13):
            train_log.append(
                {
                    "bank_fill": 512,
                    "drift_cosine_query": 0.1,
                    "seconds": 0.5,
                    "peak_memory_mb": 700.0,
                    "update": update,
                    "loss": 3.0 / update + offset,
                }
            )
        self.write(f"{name}/train_log.jsonl", train_log)
        eval_log = []
        for update, score in ((4, 0.61), (8, 0.7234), (12, 0.70)):
            eval_log.append({"update": update, "eval_ndcg@10": score + offset})
        self.write(f"{name}/eval_log.jsonl", eval_log)
        return self.root / name

    def write_evaluation(self, name: str, gain: float = 0.0, fingerprint: str = "d" * 64) -> Path:
        """Write a result on 20 queries.

        Compared with a score of 0.5, q0 gains ``gain``, q1 loses as much, and thirteen other
        queries gain a fifth of it.
        """
        differences = [gain, -gain, *[gain / 5] * 13, *[0.0] * 5]
        per_query = {}
        for number, difference in enumerate(differences):
            per_query[f"q{number}"] = {"NDCG@10": 0.5 + difference, "Recall@100": 0.9}
        record = {
            "metrics": {"NDCG@10": 0.5 + sum(differences) / 20, "Recall@100": 0.9},
            "per_query": per_query,
            "data": {
                "name": "made",
                "split": "test",
                "queries": 20,
                "documents": 40,
                "fingerprint": fingerprint,
            },
            "model": {"name": f"models/{name}"},
            "search": {"index": "Flat"},
            "versions": {HARMFUL_TEXT: HARMFUL_TEXT},
        }
        return self.write(f"{name[:5].strip('<>')}.json", record)


@pytest.fixture
def writer(tmp_path) -> OutputWriter:
    return OutputWriter(tmp_path)


@pytest.fixture(scope="module")
def everything(tmp_path_factory) -> list[Path]:
    """Two training runs and two evaluations."""
    writer = OutputWriter(tmp_path_factory.mktemp("everything"))
    runs = [writer.write_run("one"), writer.write_run("two", offset=0.05, bank_size=2048)]
    return [*runs, writer.write_evaluation("base"), writer.write_evaluation("tuned", 0.2)]


@pytest.fixture(scope="module")
def page(everything) -> str:
    return build_page(everything)


def get_table_rows(page: str) -> list[list[str]]:
    """Return the rows of all tables of a page, as texts."""
    rows = []
    for row in re.findall(r"<tr>(.*?)</tr>", page):
        cells = re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row)
        rows.append([unescape(cell) for cell in cells])
    return rows


def test_runs_and_evaluations_share_a_page(page):
    for title in ("Training", "Result on made (test)", "eval_ndcg@10", "drift_cosine_query"):
        assert f">{title}</" in page
    assert page.count("<style>") == 1
    assert page.count("<svg ") == 5


def test_a_page_loads_nothing_and_runs_no_script(page):
    assert not re.search(r"<(script|link|img|image|iframe|object|base|a)\b", page)
    assert not re.search(r"<[^>]* (src|href|on\w+)=", page)
    assert set(re.findall(r'xlink:href="(.)', page)) <= {"#"}
    (policy,) = re.findall(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'"
    assert "@import" not in page
    assert set(re.findall(r"url\((.)", page)) == {"#"}  # clip paths


def test_pictures_have_unique_ids_and_the_text_colour_of_the_page(page):
    assert "currentColor" in page
    assert "<metadata" not in page
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert ids
    assert len(ids) == len(set(ids))
    assert "prefers-color-scheme: dark" in page
    assert 'name="color-scheme" content="light dark"' in page


def test_texts_from_files_are_escaped_everywhere(writer):
    harm = "<script>taken()</script>"
    run = writer.write_run("x<b>$\\n$", bank_dtype=harm)
    page = build_page(
        [run, writer.write_evaluation("base"), writer.write_evaluation(f'x">{harm}', 0.2)]
    )
    assert "<script>" not in page
    assert page.count("taken") > 2
    assert "<b>$" not in page
    assert "<img" not in page


def read_ndcg(path: Path) -> list[float]:
    """Return the NDCG@10 of each query in a result."""
    per_query = json.loads(path.read_text())["per_query"]
    return [scores["NDCG@10"] for scores in per_query.values()]


def test_differences_are_those_of_the_paired_bootstrap(everything, page):
    base = read_ndcg(everything[2])
    tuned = read_ndcg(everything[3])
    expected = paired_bootstrap(tuned, base)
    rows = get_table_rows(page)
    (row,) = [row for row in rows if row[0] == "tuned" and row[-3:] == ["14", "5", "1"]]
    assert row[1] == f"{sum(tuned) / 20:.4f}"
    interval = "{low:+.4f} to {high:+.4f}".format(**expected)
    assert row[2:4] == ["{difference:+.4f}".format(**expected), interval]
    listed = [row for row in rows if re.fullmatch(r"q\d+", row[0]) and row[1] == "0.5000"][:15]
    assert (listed[0][0], listed[0][-1]) == ("q0", "+0.2000")
    assert (listed[-1][0], listed[-1][-1]) == ("q1", "-0.2000")


def test_only_results_on_the_same_data_are_compared(writer):
    page = build_page(
        [
            writer.write_evaluation("base"),
            writer.write_evaluation("other", 0.1, fingerprint="e" * 64),
        ]
    )
    assert page.count("<h2>Result on made (test)</h2>") == 2
    assert "against base" not in page


def test_the_table_of_runs_has_differing_settings_and_best_scores(everything, page):
    rows = get_table_rows(page)
    assert ["bank_size", "512", "2048"] in rows
    assert not any(row[0] == "learning_rate" for row in rows if len(row) > 2)
    overview = next(row for row in rows if row[0] == "one")
    assert overview[:6] == ["one", "0.7234", "", "8", "0.2500", "12"]
    assert overview[6:10] == ["contaccum", "7", "128", "512"]


def test_of_equal_best_scores_the_first_update_is_shown(writer):
    run = writer.write_run("run")
    records = [{"update": update, "eval_ndcg@10": 0.5} for update in (4, 8)]
    writer.write("run/eval_log.jsonl", records)
    assert ["0.5000", "", "4"] in [row[1:4] for row in get_table_rows(build_page([run]))]


def test_runs_are_compared_by_best_score_on_the_same_data_only(writer):
    def compute_best_difference(name: str, **evaluation: Any) -> str:
        runs = []
        for number, run_name in enumerate(evaluation):
            runs.append(writer.write_run(run_name, offset=0.05 * number))
        for run, data in zip(runs, evaluation.values(), strict=True):
            record = json.loads((run / "run.json").read_text())
            record["evaluation"] = {"fingerprint": data}
            (run / "run.json").write_text(json.dumps(record))
        return next(row[2] for row in get_table_rows(build_page(runs)) if row[0] == name)

    assert compute_best_difference("two", one="same", two="same") == "+0.0500"
    assert compute_best_difference("two", one="same", two="other") == ""
    # The first run on the same data need not be the first run of the page.
    assert compute_best_difference("three", one="other", two="same", three="same") == "+0.0500"


def test_results_come_first_then_curves_diagnostics_and_details(page):
    order = [
        "<h1>",
        "<h2>Result on made (test)</h2>",
        '<th scope="col">95% interval</th>',
        "<h2>Training</h2>",
        "<figcaption>eval_ndcg@10</figcaption>",
        "<figcaption>loss</figcaption>",
        "<figcaption>bank_fill</figcaption>",
        "<summary>Other diagnostics (2)</summary>",
        "<figcaption>drift_cosine_query</figcaption>",
        "<figcaption>peak_memory_mb</figcaption>",
        "<h2>Details</h2>",
        "greatest gains and losses</summary>",
    ]
    positions = [page.index(text) for text in order]
    assert positions == sorted(positions)


def test_diagnostics_are_in_a_closed_part_without_the_main_curves(writer):
    run = writer.write_run("mine")
    main = ["loss", "learning_rate", "grad_norm_query", "grad_norm_passage", "bank_fill"]
    keys = (*main, "grad_norm_ratio", "masked")
    line = {**dict.fromkeys(keys, 1.0), "seconds": 1.0, "peak_memory_mb": 1.0}
    writer.write("mine/train_log.jsonl", [{"update": update, **line} for update in (1, 2)])
    page = build_page([run])
    assert "<details open" not in page
    (folded,) = re.findall(r'<details class="diagnostics">.*?</details>', page, flags=re.S)
    captions = re.compile("<figcaption>(.*?)</figcaption>")
    assert captions.findall(folded) == ["grad_norm_ratio", "masked", "peak_memory_mb"]
    assert captions.findall(page.replace(folded, "")) == ["eval_ndcg@10", *main]


def test_a_comparison_shows_main_metric_then_curves_then_other_metrics():
    page = build_page([ROOT / "benchmarks" / "quality" / "nqg_k16.json"])
    order = [
        *("nDCG@10 on test</h3>", "<h2>Curves of", "nDCG@10 by update"),
        *("<summary>Recall@100 on test", "Cost</h3>"),
    ]
    positions = [page.index(text) for text in order]
    assert positions == sorted(positions)


def get_title(paths: list[Path]) -> str:
    page = build_page(paths)
    (title,) = re.findall(r"<h1>(.*?)</h1>", page)
    assert f"<title>{title}</title>" in page
    return unescape(title)


def test_the_title_has_the_compared_models_and_the_data(writer):
    contaccum, grad_accum = (writer.write_run(name) for name in ("contaccum", "grad_accum"))
    results = [writer.write_evaluation("contaccum"), writer.write_evaluation("grad_accum")]
    assert get_title([contaccum, grad_accum]) == "contaccum and grad_accum"
    sources = [contaccum, results[0], grad_accum, results[1]]
    assert get_title(sources) == "contaccum and grad_accum on made"
    published, *others = [writer.write_evaluation(name) for name in ("publ", "a", "b", "c", "d")]
    assert get_title([published, *others]) == "publ, a, b and two others on made"
    comparison = ROOT / "benchmarks" / "quality" / "study_scifact.json"
    report = json.loads(comparison.read_text())
    names = [entry["name"] for entry in report["entries"]]
    data = report["data"]["evaluation"][0]["name"]
    assert get_title([comparison]) == f"{', '.join(names[:-1])} and {names[-1]} on {data}"


def test_a_run_without_results_is_titled_by_its_training_data(writer):
    run = writer.write_run("mine")
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**record, "data": {"sets": {"nq": {}, "pairs": {}}}}))
    assert get_title([run]) == "mine trained on nq and pairs"


def test_equal_names_are_counted_in_the_title_and_numbered_in_tables(writer):
    runs = [writer.write_run(name) for name in ("a/mine", "b/mine", "c/mine")]
    result = writer.write_evaluation("mine")
    assert get_title([*runs, result]) == "mine (three runs) on made"
    names = [row[0] for row in get_table_rows(build_page(runs)) if row[-1] == "f" * 12]
    assert names == ["mine", "mine (second)", "mine (third)"]
    again = Path(shutil.copy(result, writer.root / "again.json"))
    assert get_title([result, again]) == "mine (two evaluations) on made"
    assert "<h3>NDCG@10 against mine</h3>" in build_page([result, again])


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("sentence-transformers/all-MiniLM-L6-v2", "all-MiniLM-L6-v2"),
        ("/data/runs/mine/checkpoint-40", "mine/checkpoint-40"),
        ("/data/all_minilm/model", "all_minilm/model"),
        ("model", "model"),
    ],
)
def test_a_model_has_the_name_of_its_folder_and_the_parent_if_common(writer, model, name):
    result = writer.write_evaluation("made")
    record = json.loads(result.read_text())
    result.write_text(json.dumps({**record, "model": {"name": model}}))
    assert get_title([result]) == f"{name} on made"


def test_pictures_with_equal_titles_do_not_share_ids():
    path = ROOT / "benchmarks" / "quality" / "nqg_k16.json"
    ids = re.findall(r'\bid="([^"]+)"', build_page([path, path]))
    assert ids
    assert len(ids) == len(set(ids))


def test_logs_give_warnings_and_a_last_line_cut_by_a_kill_is_ignored(writer):
    line = {
        "loss": 1.0,
        "columns": 100,
        "embedding_spread": 1e-6,
        "seconds": 1.0,
        "peak_memory_mb": 1.0,
    }
    folder = writer.write_run("mine")
    log = writer.write(
        "mine/train_log.jsonl", [{"update": n, **line, "skipped": "gradient"} for n in range(9)]
    )
    log.write_text(log.read_text() + '{"update": 13, "lo')
    page = build_page([folder])
    assert "mine: update 2: collapse: all passages" in page
    assert "mine: update 3: skipped" in page


def test_reports_of_an_earlier_version_can_be_read():
    path = ROOT / "benchmarks" / "quality" / "nqg_k16.json"
    group = json.loads(path.read_text())["groups"]["published"]["metrics"]["test"]["NDCG@10"]
    figures = {f"{group['mean']:.4f}", f"{group['sd']:.4f}"}
    page = build_page([path])
    assert any(row[0] == "published" and figures <= set(row) for row in get_table_rows(page))
    assert "nDCG@10 by seconds of training" in page
    assert "The mean and the standard deviation (sd) are over seeds." in page


@pytest.mark.parametrize("content", [None, "hello", '{"a": 1}', "[1]"])
def test_a_path_without_an_output_is_refused_by_name(tmp_path, content):
    path = tmp_path / "thing.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=re.escape(str(path))):
        build_page([path])


def test_a_metric_that_no_result_has_is_refused(everything):
    assert "Recall@100 against base" in build_page(everything[2:4], "Recall@100")
    with pytest.raises(
        ConfigError, match=r"--metric NDCG@7: .* has no such metric; there are NDCG@10, Recall@100"
    ):
        build_page(everything[2:4], "NDCG@7")


RUNS = [[(0, 0.0), (10, 1.0)], [(0, 1.0), (10, 2.0), (20, 9.0)]]


def test_lines_are_means_over_seeds_up_to_the_end_of_the_shortest_run():
    axes = Figure().subplots()
    Panel("x", {"none": [], "a": RUNS, "b": RUNS[:1]}).draw(axes)
    mean, other = axes.lines
    assert mean.get_xydata().tolist() == [[0, 0.5], [10, 1.5]]
    # The colours of the page's legend.
    assert mean.get_color() == "C1"
    assert other.get_color() == "C2"
    (band,) = axes.collections
    assert {tuple(point) for point in band.get_paths()[0].vertices} == {
        (0, 0),
        (0, 1),
        (10, 1),
        (10, 2),
    }


def test_a_page_has_no_credentials_and_survives_a_failed_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "abcdefgh1234")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text(
        json.dumps({"arguments": {"run_note": "abcdefgh1234"}})
    )
    output = tmp_path / "out" / "report.html"
    assert main(["report", str(tmp_path / "run"), "--output", str(output)]) == 0
    page = output.read_text()
    assert "<h1>run</h1>" in page
    assert "abcdefgh1234" not in page
    assert "&lt;MY_TOKEN&gt;" in page
    capsys.readouterr()
    assert main(["report", str(tmp_path / "none"), "--output", str(output)]) == 2
    error = capsys.readouterr().err.strip()
    assert "none: nothing that can be reported" in error
    assert len(error.splitlines()) == 1
    assert output.read_text() == page
