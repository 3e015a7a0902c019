"""benchmarks/draw_pictures.py: what the pictures of the studies and of GPU memory show."""

import importlib
import json
from types import ModuleType

import pytest
from programs import ROOT


@pytest.fixture
def pictures(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("draw_pictures")


def test_every_method_is_drawn_with_one_encoding_of_the_corpus_and_all_seeds(pictures):
    """Query-side training starts when the corpus is encoded; the failed seed is a dot."""
    minutes = pictures.read_encoding_minutes("medquad")
    lines = pictures.draw_time().axes[2].get_lines()
    spans = {line.get_color(): line.get_xdata() for line in lines if line.get_linestyle() == "--"}
    for entry in ("contaccum", "query_side_corpus"):
        _, color = pictures.METHODS[entry]
        start, end = spans[color]
        assert start == (minutes if entry == "query_side_corpus" else 0)
        assert end == pytest.approx(minutes + pictures.read_minutes("medquad", entry, 32))
    failed = [list(line.get_ydata()) for line in lines if line.get_fillstyle() == "none"]
    assert [pytest.approx(87.0, abs=0.05)] in failed


def test_memory_of_a_micro_batch_is_drawn_below_the_line_of_the_card(pictures):
    """A card with 8 GB has 8,192 MB, so the memory is divided by 1,024."""
    record = json.loads((ROOT / "benchmarks" / "gpu" / "update_time.json").read_text())
    lines = {line.get_label(): line for line in pictures.draw_gpu_memory().axes[0].get_lines()}
    [memory] = [
        case["methods"]["contaccum"]["peak_mb"]
        for case in record["result"]["cases"].values()
        if (case["backbone"], case["local"]) == ("minilm", 128)
    ]
    assert list(lines["contaccum"].get_xdata()) == [1, 8, 32, 128]
    assert lines["contaccum"].get_ydata()[-1] == memory / 1024


def test_pictures_of_readme_and_of_the_bank_can_be_drawn(pictures):
    assert len(pictures.draw_gain().axes) == 1
    assert len(pictures.draw_bank_in_use().axes) == 3
    assert len(pictures.draw_small_encoders().axes) == 5
