"""What a user meets first: help, a config for their data, the quickstart, and names as other tools have them."""

import subprocess
import sys
from dataclasses import fields

from contaccum.cli import main
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
