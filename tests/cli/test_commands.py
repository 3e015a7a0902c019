"""What a user meets first: help, a config for their data, the quickstart, and names as other tools have them."""

import re
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

from small_data import write_judged_places

from contaccum.cli import main, quickstart
from contaccum.training.arguments import ContAccumTrainingArguments
from contaccum.training.options import GROUPS, MostUsed


def test_help_of_train_needs_no_torch_and_has_every_option_of_ours_and_all_of_transformers_when_asked(capsys):
    code = "import sys, time; from contaccum.cli import main; main(['train', '--help'])\n"
    code += "assert not {'torch', 'transformers', 'datasets'} & {*sys.modules} and time.process_time() < 1"
    page = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    ours = [name for group in (*GROUPS, MostUsed) for name in group.__annotations__]
    assert [name for name in ours if f"\n  --{name} " not in page] == [] and "--weight_decay" not in page
    assert main(["train", "--help", "all"]) == 0
    whole = capsys.readouterr().out
    assert [name for name in ContAccumTrainingArguments.__dataclass_fields__ if f"\n  --{name} " not in whole] == []
    theirs = ContAccumTrainingArguments.__dataclass_fields__
    assert [one.name for one in fields(MostUsed) if (theirs[one.name].default or "") != (one.default or "")] == []


def test_quickstart_scores_trains_and_scores_again_anywhere(tiny_model_path, tmp_path, monkeypatch, capsys):
    """With a tiny model and data; what `contaccum train` would refuse is refused before anything runs."""
    scifact = write_judged_places(tmp_path / "scifact")
    shutil.copy(scifact / "qrels" / "test.tsv", scifact / "qrels" / "train.tsv")
    monkeypatch.setattr("contaccum.data.beir.shipped_scifact", lambda: scifact)
    monkeypatch.setattr(quickstart, "_demo_model", lambda: tiny_model_path)
    monkeypatch.chdir(tmp_path)
    assert main(["quickstart", "--bank_sise", "3"]) == 2 and not Path("runs").exists()
    assert "did you mean 'bank_size'" in capsys.readouterr().err
    few = ["--max_steps", "1", "--passage_max_length", "40", "--gradient_accumulation_steps", "1"]
    for more in ([], ["--compare"]):  # the second takes the place of the first
        assert main(["quickstart", *more, *few]) == 0
    shown = capsys.readouterr().out
    assert len(re.findall(r"^(?:before|after \w+) +\d\.\d{4}", shown, re.MULTILINE)) == 5
    left = {path.name for path in Path("runs/quickstart").iterdir()}
    assert {"report.html", "before.json", "after_contaccum.json", "contaccum", "grad_accum"} <= left
