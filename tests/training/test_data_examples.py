"""The configs of docs/data.md for several sets and for streaming train."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from sample_texts import sentences
from test_config import backbone  # noqa: F401  # a fixture

from contaccum.cli import main

DOCS = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")


def example(heading: str) -> str:
    """The first YAML block of a section."""
    (section,) = re.findall(rf"^## {heading}\n(.*?)^## ", DOCS, re.MULTILINE | re.DOTALL)
    return re.findall(r"```yaml\n(.*?)```", section, re.DOTALL)[0]


def write(folder: Path) -> None:
    """What the examples name."""
    queries, passages = sentences(20, 1), sentences(60, 2, 9)
    rows = [{"query": q, "positive": passages[i]} for i, q in enumerate(queries)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    mined = [{**row, "negatives": passages[20 + 2 * i : 22 + 2 * i]} for i, row in enumerate(rows)]
    (folder / "hard.jsonl").write_text("".join(json.dumps(row) + "\n" for row in mined))
    (folder / "faq.csv").write_text(
        "frage,antwort\n" + "".join(f"{q},{passages[-1 - i]}\n" for i, q in enumerate(queries))
    )


@pytest.mark.parametrize("heading", ["Several sets", "Streaming"])
def test_the_example_trains(
    backbone: str,  # noqa: F811
    heading: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write(tmp_path)
    monkeypatch.chdir(tmp_path)
    more = {"model": backbone, "output_dir": "out", "max_steps": 2, "pooling": "mean", "save_strategy": "no"}
    more |= {"per_device_train_batch_size": 4, "bank_size": 8, "disable_tqdm": True}
    Path("c.yaml").write_text(yaml.safe_dump(more))
    Path("example.yaml").write_text(example(heading))
    assert main(["train", "c.yaml", "example.yaml"]) == 0, capsys.readouterr().err
    sets = json.loads(Path("out/run.json").read_text())["data"]["sets"]
    expected = {"pairs": 1.0} if heading == "Streaming" else {"pairs": 1 / 3.5, "faq": 2 / 3.5, "mined": 0.5 / 3.5}
    assert {one["name"]: one["weight"] for one in sets} == pytest.approx(expected)


def test_every_key_of_a_set_and_every_sampler_is_told() -> None:
    from contaccum.data.training_sets import _KEYS
    from contaccum.training.set_sampling import SET_SAMPLERS

    (section,) = re.findall(r"^## Several sets\n(.*?)^## ", DOCS, re.MULTILINE | re.DOTALL)
    assert {name for name in (*_KEYS, *SET_SAMPLERS) if f"`{name}`" not in section} == set()
