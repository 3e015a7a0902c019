"""The config that a search writes."""

from __future__ import annotations

import yaml

from contaccum.tuning.options import all_options, parse
from contaccum.tuning.result import to_yaml_values


def test_switches_without_values_are_read_back(tmp_path):
    arguments = ["--no_tied", "--bf16", "--learning_rate", "1e-4", "--matryoshka_dims", "8", "4"]
    content = to_yaml_values(all_options([], arguments))
    assert content == {
        "tied": False,
        "bf16": True,
        "learning_rate": 1e-4,
        "matryoshka_dims": [8, 4],
    }
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(content))
    run = ["--model", "m", "--train_data", "d", "--output_dir", "o", "--use_cpu", "true"]
    model_args, args = parse([str(file), *run])
    assert (model_args.tied, args.bf16, args.learning_rate) == (False, True, 1e-4)


def test_names_that_python_reads_as_numbers_stay_names():
    content = to_yaml_values({"train_data": ["2024_05"], "seed": ["7"], "eval_split": ["007"]})
    assert content == {"train_data": "2024_05", "seed": 7, "eval_split": "007"}
