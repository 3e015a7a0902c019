"""What stands on the page, of made-up runs and evaluations, and that texts which mean harm can do none."""

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
HARM = '<script>document.title="taken"</script><img src="http://evil.invalid/x.png" onerror="alert(1)">'


class Made:
    """Writes files into a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, name: str, content: Any) -> Path:
        path = self.root / name
        return write_lines(path, content if isinstance(content, list) else [content])

    def training_run(self, name: str, offset: float = 0.0, **arguments: Any) -> Path:
        """Twelve updates of a bank of 512, evaluated three times, best at the eighth."""
        settings = {"bank_size": 512, "learning_rate": 5e-5, **arguments}
        record = {
            "method": "contaccum",
            "seed": 7,
            "pairs_per_update": 128,
            "updates": 12,
            "arguments": settings,
        }
        self.write(
            f"{name}/run.json",
            {**record, "data": {"fingerprint": "f" * 64}, "model": {"base": "MiniLM"}},
        )
        line = {
            "bank_fill": 512,
            "drift_cosine_query": 0.1,
            "seconds": 0.5,
            "peak_memory_mb": 700.0,
        }
        self.write(
            f"{name}/train_log.jsonl",
            [{**line, "update": u, "loss": 3.0 / u + offset} for u in range(1, 13)],
        )
        scores = ((4, 0.61), (8, 0.7234), (12, 0.70))
        self.write(
            f"{name}/eval_log.jsonl", [{"update": u, "eval_ndcg@10": x + offset} for u, x in scores]
        )
        return self.root / name

    def evaluation(self, name: str, gain: float = 0.0, fingerprint: str = "d" * 64) -> Path:
        """20 queries: q0 gains by ``gain``, q1 loses as much, thirteen others gain a fifth of it."""
        changes = {0: gain, 1: -gain}
        scores = {f"q{n}": 0.5 + changes.get(n, gain / 5 if n < 15 else 0.0) for n in range(20)}
        record = {
            "metrics": {"NDCG@10": sum(scores.values()) / 20, "Recall@100": 0.9},
            "per_query": {
                query: {"NDCG@10": score, "Recall@100": 0.9} for query, score in scores.items()
            },
            "data": {
                "name": "made",
                "split": "test",
                "queries": 20,
                "documents": 40,
                "fingerprint": fingerprint,
            },
            "model": {"name": f"models/{name}"},
            "search": {"index": "Flat"},
            "versions": {HARM: HARM},
        }
        return self.write(f"{name[:5].strip('<>')}.json", record)


@pytest.fixture
def made(tmp_path) -> Made:
    return Made(tmp_path)


@pytest.fixture(scope="module")
def everything(tmp_path_factory) -> list[Path]:
    """Two training runs and two evaluations."""
    made = Made(tmp_path_factory.mktemp("everything"))
    runs = [made.training_run("one"), made.training_run("two", offset=0.05, bank_size=2048)]
    return [*runs, made.evaluation("base"), made.evaluation("tuned", 0.2)]


@pytest.fixture(scope="module")
def page(everything) -> str:
    return build_page(everything)


def rows_of(page: str) -> list[list[str]]:
    """The rows of all tables of a page, as texts."""
    rows = [
        re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row) for row in re.findall(r"<tr>(.*?)</tr>", page)
    ]
    return [[unescape(cell) for cell in row] for row in rows]


def test_everything_mixes_on_one_page_that_needs_nothing_else(page):
    for title in ("Training", "Result on made (test)", "eval_ndcg@10", "drift_cosine_query"):
        assert f">{title}</" in page
    assert page.count("<style>") == 1 and page.count("<svg ") == 5
    assert not re.search(r"<(script|link|img|image|iframe|object|base|a)\b", page)
    assert not re.search(r"<[^>]* (src|href|on\w+)=", page) and set(
        re.findall(r'xlink:href="(.)', page)
    ) <= {"#"}
    (policy,) = re.findall(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'"
    assert "@import" not in page and set(re.findall(r"url\((.)", page)) == {"#"}  # clip paths
    assert "currentColor" in page and "<metadata" not in page
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert ids and len(ids) == len(set(ids))  # though each picture names its own
    assert (
        "prefers-color-scheme: dark" in page and 'name="color-scheme" content="light dark"' in page
    )


def test_texts_from_files_are_escaped_wherever_they_stand(made):
    harm = "<script>taken()</script>"
    run = made.training_run("x<b>$\\n$", bank_dtype=harm)
    page = build_page([run, made.evaluation("base"), made.evaluation(f'x">{harm}', 0.2)])
    assert (
        "<script>" not in page
        and page.count("taken") > 2
        and "<b>$" not in page
        and "<img" not in page
    )


def test_differences_are_those_of_the_paired_bootstrap(everything, page):
    base, tuned = (json.loads(path.read_text())["per_query"] for path in everything[2:4])
    expected = paired_bootstrap(
        [v["NDCG@10"] for v in tuned.values()], [v["NDCG@10"] for v in base.values()]
    )
    rows = rows_of(page)
    (row,) = [row for row in rows if row[0] == "tuned" and row[-3:] == ["14", "5", "1"]]
    assert row[1] == f"{sum(v['NDCG@10'] for v in tuned.values()) / 20:.4f}"
    interval = "{low:+.4f} to {high:+.4f}".format(**expected)
    assert row[2:4] == ["{difference:+.4f}".format(**expected), interval]
    listed = [row for row in rows if re.fullmatch(r"q\d+", row[0]) and row[1] == "0.5000"][:15]
    assert (listed[0][0], listed[0][-1]) == ("q0", "+0.2000")
    assert (listed[-1][0], listed[-1][-1]) == ("q1", "-0.2000")


def test_only_results_on_the_same_data_are_compared(made):
    page = build_page(
        [made.evaluation("base"), made.evaluation("other", 0.1, fingerprint="e" * 64)]
    )
    assert page.count("<h2>Result on made (test)</h2>") == 2 and "against base" not in page


def test_runs_differ_by_their_settings_and_their_best_figure_is_named(everything, page):
    rows = rows_of(page)
    assert ["bank_size", "512", "2048"] in rows
    assert not any(row[0] == "learning_rate" for row in rows if len(row) > 2)
    overview = next(row for row in rows if row[0] == "one")
    assert overview[:6] == ["one", "0.7234", "", "8", "0.2500", "12"]
    assert overview[6:10] == ["contaccum", "7", "128", "512"]


def test_a_difference_of_runs_is_of_their_best_scores_on_the_same_data(made):
    def best_difference(**evaluation: Any) -> str:
        runs = [made.training_run("one"), made.training_run("two", offset=0.05)]
        for run, data in zip(runs, evaluation.values(), strict=True):
            record = json.loads((run / "run.json").read_text())
            record["evaluation"] = {"fingerprint": data}
            (run / "run.json").write_text(json.dumps(record))
        return next(row[2] for row in rows_of(build_page(runs)) if row[0] == "two")

    assert best_difference(one="same", two="same") == "+0.0500"
    assert best_difference(one="same", two="other") == ""


def test_the_result_comes_first_then_main_curves_then_folded_diagnostics_and_details(page):
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


def test_diagnostics_are_closed_and_main_curves_are_not_among_them(made):
    run = made.training_run("mine")
    main = ["loss", "learning_rate", "grad_norm_query", "grad_norm_passage", "bank_fill"]
    keys = (*main, "grad_norm_ratio", "masked")
    line = {**dict.fromkeys(keys, 1.0), "seconds": 1.0, "peak_memory_mb": 1.0}
    made.write("mine/train_log.jsonl", [{"update": update, **line} for update in (1, 2)])
    page = build_page([run])
    assert "<details open" not in page
    (folded,) = re.findall(r'<details class="diagnostics">.*?</details>', page, flags=re.S)
    captions = re.compile("<figcaption>(.*?)</figcaption>")
    assert captions.findall(folded) == ["grad_norm_ratio", "masked", "peak_memory_mb"]
    assert captions.findall(page.replace(folded, "")) == ["eval_ndcg@10", *main]


def test_a_comparison_shows_its_main_metric_before_its_curves_and_folds_other_metrics():
    page = build_page([ROOT / "benchmarks" / "quality" / "nqg_k16.json"])
    order = [
        *("nDCG@10 on test</h3>", "<h2>Curves of", "nDCG@10 by update"),
        *("<summary>Recall@100 on test", "Cost</h3>"),
    ]
    positions = [page.index(text) for text in order]
    assert positions == sorted(positions)


def title_of(paths: list[Path]) -> str:
    page = build_page(paths)
    (title,) = re.findall(r"<h1>(.*?)</h1>", page)
    assert f"<title>{title}</title>" in page
    return unescape(title)


def test_the_title_says_what_was_compared_on_which_data(made):
    contaccum, grad_accum = (made.training_run(name) for name in ("contaccum", "grad_accum"))
    results = [made.evaluation("contaccum"), made.evaluation("grad_accum")]
    assert title_of([contaccum, grad_accum]) == "contaccum and grad_accum"
    sources = [contaccum, results[0], grad_accum, results[1]]
    assert title_of(sources) == "contaccum and grad_accum on made"
    published, *others = [made.evaluation(name) for name in ("publ", "a", "b", "c", "d")]
    assert title_of([published, *others]) == "publ, a, b and two others on made"
    comparison = ROOT / "benchmarks" / "quality" / "study_scifact.json"
    report = json.loads(comparison.read_text())
    names = [entry["name"] for entry in report["entries"]]
    data = report["data"]["evaluation"][0]["name"]
    assert title_of([comparison]) == f"{', '.join(names[:-1])} and {names[-1]} on {data}"


def test_a_run_without_results_is_titled_by_its_training_data(made):
    run = made.training_run("mine")
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**record, "data": {"sets": {"nq": {}, "pairs": {}}}}))
    assert title_of([run]) == "mine trained on nq and pairs"


def test_equal_names_are_counted_in_words_and_told_apart_in_tables(made):
    runs = [made.training_run(name) for name in ("a/mine", "b/mine", "c/mine")]
    result = made.evaluation("mine")
    assert title_of([*runs, result]) == "mine (three runs) on made"
    names = [row[0] for row in rows_of(build_page(runs)) if row[-1] == "f" * 12]
    assert names == ["mine", "mine (second)", "mine (third)"]
    again = Path(shutil.copy(result, made.root / "again.json"))
    assert title_of([result, again]) == "mine (two evaluations) on made"
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
def test_a_model_is_named_by_its_folder_or_the_last_two_of_a_common_name(made, model, name):
    result = made.evaluation("made")
    record = json.loads(result.read_text())
    result.write_text(json.dumps({**record, "model": {"name": model}}))
    assert title_of([result]) == f"{name} on made"


def test_pictures_with_equal_titles_do_not_share_ids():
    path = ROOT / "benchmarks" / "quality" / "nqg_k16.json"
    ids = re.findall(r'\bid="([^"]+)"', build_page([path, path]))
    assert ids and len(ids) == len(set(ids))


def test_a_log_warns_as_its_run_did_and_is_drawn_up_to_where_a_kill_cut_it(made):
    line = {
        "loss": 1.0,
        "columns": 100,
        "embedding_spread": 1e-6,
        "seconds": 1.0,
        "peak_memory_mb": 1.0,
    }
    folder = made.training_run("mine")
    log = made.write(
        "mine/train_log.jsonl", [{"update": n, **line, "skipped": "gradient"} for n in range(9)]
    )
    log.write_text(log.read_text() + '{"update": 13, "lo')
    page = build_page([folder])
    assert "mine: update 2: collapse: all passages" in page and "mine: update 3: skipped" in page


def test_reports_of_the_version_before_are_still_read():
    path = ROOT / "benchmarks" / "quality" / "nqg_k16.json"
    group = json.loads(path.read_text())["groups"]["published"]["metrics"]["test"]["NDCG@10"]
    figures = {f"{group['mean']:.4f}", f"{group['sd']:.4f}"}
    page = build_page([path])
    assert any(row[0] == "published" and figures <= set(row) for row in rows_of(page))
    assert (
        "nDCG@10 by seconds of training" in page
        and "Mean and standard deviation (sd) are over seeds." in page
    )


@pytest.mark.parametrize("content", [None, "hello", '{"a": 1}', "[1]"])
def test_what_is_nothing_to_report_is_named(tmp_path, content):
    path = tmp_path / "thing.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=re.escape(str(path))):
        build_page([path])


def test_a_metric_that_no_result_has_is_refused(everything):
    assert "Recall@100 against base" in build_page(everything[2:4], "Recall@100")
    with pytest.raises(
        ConfigError, match="--metric NDCG@7: no result has it; there are NDCG@10, Recall@100"
    ):
        build_page(everything[2:4], "NDCG@7")


RUNS = [[(0, 0.0), (10, 1.0)], [(0, 1.0), (10, 2.0), (20, 9.0)]]


def test_lines_are_means_over_seeds_with_a_band_as_far_as_all_runs_last():
    axes = Figure().subplots()
    Panel("x", {"none": [], "a": RUNS, "b": RUNS[:1]}).draw(axes)
    mean, other = axes.lines
    assert mean.get_xydata().tolist() == [[0, 0.5], [10, 1.5]]
    assert (mean.get_color(), other.get_color()) == ("C1", "C2")  # as the page's legend has them
    (band,) = axes.collections
    assert {tuple(point) for point in band.get_paths()[0].vertices} == {
        (0, 0),
        (0, 1),
        (10, 1),
        (10, 2),
    }


def test_a_page_is_written_without_credentials_and_a_bad_path_leaves_what_was_there(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("MY_TOKEN", "abcdefgh1234")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text(
        json.dumps({"arguments": {"run_note": "abcdefgh1234"}})
    )
    output = tmp_path / "out" / "report.html"
    assert main(["report", str(tmp_path / "run"), "--output", str(output)]) == 0
    page = output.read_text()
    assert "<h1>run</h1>" in page and "abcdefgh1234" not in page and "&lt;MY_TOKEN&gt;" in page
    capsys.readouterr()
    assert main(["report", str(tmp_path / "none"), "--output", str(output)]) == 2
    error = capsys.readouterr().err.strip()
    assert "none: nothing that can be reported" in error and len(error.splitlines()) == 1
    assert output.read_text() == page
