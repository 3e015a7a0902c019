"""Errors, help, `contaccum new`."""

import errno
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from small_data import write_lines
from tiny_models import tiny_encoder

from contaccum.cli import main
from contaccum.errors import DataError
from contaccum.settings import Settings, read, replace
from contaccum.training.checkpoint import find_checkpoints
from contaccum.training.setup import list_training_sets


def test_user_error_is_one_line_with_exit_code_2(monkeypatch, capsys):
    """A message of several lines is joined. An interrupt has exit code 130."""

    def run_with_error(error: BaseException) -> int:
        def run(argv: list[str]) -> None:
            raise error

        monkeypatch.setattr("contaccum.cli.split.run", run)
        return main(["split"])

    assert run_with_error(DataError("a.json:3: broken:\n  no route\n")) == 2
    assert capsys.readouterr().err == "contaccum: error: a.json:3: broken: no route\n"
    assert run_with_error(KeyboardInterrupt()) == 130
    assert run_with_error(PermissionError(errno.EACCES, "Permission denied", "a.json")) == 2
    assert "a.json: cannot be read or written (Permission denied)" in capsys.readouterr().err
    with pytest.raises(FileNotFoundError):  # a defect keeps its traceback
        run_with_error(FileNotFoundError(errno.ENOENT, "No such file or directory"))


@contextmanager
def limit_file_size(num_bytes: int) -> Iterator[None]:
    """Let the system refuse larger files, as it does on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(("tied", "num_bytes"), [(True, 100), (False, 12_000)])
def test_an_export_that_does_not_fit_is_one_line_and_leaves_nothing(
    tied, num_bytes, tmp_path, capsys
):
    tiny_encoder(tied).save_pretrained(str(tmp_path / "model"))
    argv = ["export", str(tmp_path / "model"), str(tmp_path / "out")]
    with limit_file_size(num_bytes):
        assert main(argv) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith(f"contaccum: error: {tmp_path}/out: cannot be written (File too large)")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert main(argv) == 0


@pytest.mark.parametrize(
    ("save_strategy", "num_bytes"), [("no", 24_000), ("steps", 100), ("steps", 12_000)]
)
def test_a_training_that_does_not_fit_is_one_line_and_goes_on(
    save_strategy, num_bytes, train, tmp_path, capsys
):
    settings = {"resume_from_checkpoint": "auto", "save_strategy": save_strategy, "save_steps": 1}
    with limit_file_size(num_bytes):
        assert train(tmp_path / "run", **settings) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert re.match(r"contaccum: error: .*(File too large|No space left on device)", line)
    assert not find_checkpoints(tmp_path / "run")
    assert train(tmp_path / "run", **settings) == 0


SHOW_TRAIN_HELP = """
import contextlib, sys, time
from contaccum.cli import main
with contextlib.suppress(SystemExit):
    main(["train", "--help"])
assert not {"torch", "transformers", "datasets"} & set(sys.modules)
assert time.process_time() < 1
"""


def test_train_help_is_fast_and_lists_every_option():
    command = [sys.executable, "-c", SHOW_TRAIN_HELP]
    help_text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    own_names = Settings.__dataclass_fields__.keys() - {"transformers"}
    for name in own_names:
        assert f"\n  --{name} " in help_text
    assert "--weight_decay" not in help_text


def test_new_writes_a_config_that_trains(places, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    pairs = str(places / "pairs.jsonl")
    overrides = ["--max_steps", "2", "--save_strategy", "no", "--use_cpu", "true"]
    assert main(["new", "a", "--data", pairs, "--model", str(places / "backbone")]) == 0
    assert f"{pairs}: 24 pairs (pairs), 24 queries, 24 passages" in capsys.readouterr().out
    text = Path("a/config.yaml").read_text()
    for line in (
        "tied: true ",
        "query_max_length: 16\n",
        "by the tokenizer",
        "bank_size: 8 ",
        "total_train_batch_size: 8 ",
    ):
        assert line in text
    assert main(["train", "a/config.yaml", *overrides]) == 0
    assert Path("a/model/modules.json").is_file()
    assert main(["new", "a", "--data", pairs]) == 2
    assert "is there already" in capsys.readouterr().err


def test_new_adapts_the_config_to_data_and_model(tmp_path, monkeypatch):
    """The data have long passages, other column names and hard negatives, the model has prompts."""
    monkeypatch.chdir(tmp_path)
    rows = []
    for n in range(100):
        passage = "because " * 300 + str(n)
        rows.append({"frage": f"why {n}", "positive": passage, "negative": f"no {n}"})
    write_lines(tmp_path / "long.jsonl", rows)
    argv = ["new", "b", "--data", "long.jsonl", "--data_columns", "query=frage"]
    argv += ["--model", "./e5-base"]
    assert main(argv) == 0
    assert "queries and passages differ" in Path("b/config.yaml").read_text()
    settings = replace(Settings(), **read(["b/config.yaml"]))
    assert settings.query_prompt == "query: "
    assert settings.passage_prompt == "passage: "
    assert settings.num_hard_negatives == 1
    assert settings.query_max_length == 8
    assert settings.passage_max_length == 512
    assert settings.bank_size == 32
    assert list_training_sets(settings)["long"]["columns"] == {"query": "frage"}


def test_new_counts_the_rows_of_an_epoch(tmp_path, monkeypatch):
    """A record with several positives makes one row. An update may have an eighth of the rows."""
    monkeypatch.chdir(tmp_path)
    records = []
    for number in range(100):
        positives = [f"passage {number} {part}" for part in range(20)]
        records.append({"query": f"question {number}", "positive": positives})
    write_lines(tmp_path / "pairs.jsonl", records)
    assert main(["new", "a", "--data", "pairs.jsonl", "--model", "./missing"]) == 0
    text = Path("a/config.yaml").read_text()
    assert "2,000 pairs (pairs), 100 queries, 2,000 passages; 100 rows per epoch" in text
    assert "total_train_batch_size: 8         # pairs per update; 12 updates per epoch" in text


def test_new_uses_the_memory_and_the_number_type_of_a_gpu(places, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    assert main(["new", "a", "--data", str(places / "pairs.jsonl"), "--model", "./missing"]) == 0
    settings = replace(Settings(), **read(["a/config.yaml"]))
    assert settings.has_auto_micro_batch and settings.bf16
    assert settings.dataloader_num_workers == 2
    assert settings.total_train_batch_size == 8


def test_new_accepts_a_set_with_settings(tmp_path, monkeypatch):
    """The set is in the config as it was given."""
    monkeypatch.chdir(tmp_path)
    records = []
    for number in range(12):
        passages = [{"docid": str(number), "text": f"passage {number}"}]
        records.append(
            {"query": f"question {number}", "positive_passages": passages, "score": number}
        )
    write_lines(tmp_path / "scored.jsonl", records)
    data = '{"path": "scored.jsonl", "min_score": 1}'
    argv = ["new", "a", "--data", data, "--data_format", "tevatron", "--model", "./missing"]
    assert main(argv) == 0
    sets = list_training_sets(replace(Settings(), **read(["a/config.yaml"])))
    assert sets["scored"]["min_score"] == 1
    assert sets["scored"]["data_format"] == "tevatron"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["evaluate", "--data", "scifact", "model"], "MODEL"),
        (["tune", "c.yaml", "--hub_token", "secret"], "credential"),
        (["fit", "pairs.csv", "--hub_token", "secret"], "credential"),
        (["fit", "--learning_rate", "1e-4", "pairs.csv"], "learning_rate"),
        (["split", "pairs.csv", "out", "--seeds", "1"], "'seed'"),
        (["fit", "pairs.csv", "--budegt", "5m"], "did you mean 'budget'"),
        (["tune", "c.yaml", "--budegt", "5m"], "did you mean 'budget'"),
        (["train", "c.yaml", "--batch_sampelr", "x"], "did you mean 'batch_sampler'"),
        (["new", "out", "--dta", "pairs.csv"], "did you mean 'data'"),
        (["encode", "m", "--corpsu=c", "--output", "o"], "did you mean 'corpus'"),
        (["search", "m", "--store", "s", "--querys", "q"], "did you mean 'queries'"),
        (["mine", "pairs.csv", "--modle", "m"], "did you mean 'model'"),
        (["evaluate", "m", "--dat", "d"], "did you mean 'data'"),
        (["merge", "a", "b", "out", "--gaurd", "d"], "did you mean 'guard'"),
        (["export", "m", "out", "--dtpye", "float16"], "did you mean 'dtype'"),
        (["split", "pairs.csv", "out", "--data_columns", "query=qurey"], "no column 'qurey'"),
        (["fit", "pairs.csv", "--device", "gpu"], "device=gpu"),
    ],
)
def test_arguments_that_cannot_work_are_named(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text("model: m\n")
    (tmp_path / "pairs.csv").write_text("query,positive\na,b\n")
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert "secret" not in error
