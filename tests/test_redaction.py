"""Credentials of the environment and of URLs reach no log, no record, no report and no recorded command line."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from sample_texts import write_training_and_beir_data
from transformers import AutoModel

from contaccum.cli import main
from contaccum.errors import UserError
from contaccum.redaction import redact, redact_record, redacted_output

SECRETS = {
    "HF_TOKEN": "hf_QwErTyUiOpAsDfGhJk",
    "HUGGING_FACE_HUB_TOKEN": "hf_ZxCvBnMaSdFgHjKl",
    "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567",
    "AWS_ACCESS_KEY_ID": "AKIAPLANTEDPLANTED12",
    "AWS_SECRET_ACCESS_KEY": "pLaNtEd/SeCrEt+KeY/0123456789abcdefgh",
    "AWS_SESSION_TOKEN": "FwoGZXIvYXdzPLANTED",
    "GITHUB_TOKEN": "ghp_PlantedPlantedPlanted",
    "DB_PASSWORD": "correct-horse-battery",
    "PGPASSWORD": "staple-horse-battery",
    "SOME_CLIENT_SECRET": "planted-client-secret",
}
URL_PASSWORD = "planted-url-password"
URL = f"https://someone:{URL_PASSWORD}@example.org/data"


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="module")
def places(tiny_config: Any, tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("places")
    torch.manual_seed(0)
    AutoModel.from_config(tiny_config).save_pretrained(root / "backbone")
    tiny_tokenizer.save_pretrained(root / "backbone")
    write_training_and_beir_data(root, 24)
    return root


def leaks(where: Path, *texts: str) -> list[str]:
    """Which credentials are in the files under ``where``, whatever their kind, or in the texts."""
    found = []
    contents = {str(path): path.read_bytes() for path in where.rglob("*") if path.is_file()}
    contents |= {f"output {i}": text.encode() for i, text in enumerate(texts)}
    for place, content in contents.items():
        for name, value in {**SECRETS, "URL": URL_PASSWORD}.items():
            if value.encode() in content or json.dumps(value)[1:-1].encode() in content:
                found.append(f"{name} in {place}")
    return found


def options(places: Path, output: Path) -> list[str]:
    given = {"model": places / "backbone", "train_data": places / "pairs.jsonl", "output_dir": output}
    given |= {"pooling": "mean", "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 2}
    given |= {"use_cpu": "true", "disable_tqdm": "true", "report_to": "none"}
    return [f"--{key}={value}" for key, value in given.items()]


def test_no_command_tells_a_credential(
    places: Path, planted: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    given = [f"--hub_token={SECRETS['HF_TOKEN']}", f"--hub_model_id={URL}", f"--run_name={SECRETS['WANDB_API_KEY']}"]
    saving = ["--save_strategy=steps", "--save_steps=1", "--bank_size=8"]
    evaluation = ["--data", str(places / "beir"), "--output", str(tmp_path / "out.json")]
    comparison = ["--eval_data", str(places / "beir"), "--seeds", "1", "--bank_size=8", "--methods", "contaccum"]
    for command in (
        ["train", *options(places, tmp_path / "run"), *saving, *given],
        ["evaluate", str(tmp_path / "run"), *evaluation],
        ["compare", *options(places, tmp_path / "compare"), *comparison],
    ):
        assert main(command) == 0
    for name in ("run/run.json", "run/training_args.json", "run/README.md", "out.json", "compare/report.json"):
        assert (tmp_path / name).is_file()
    assert "<WANDB_API_KEY>" in (tmp_path / "run" / "run.json").read_text()
    assert leaks(tmp_path, *capfd.readouterr()) == []


def test_comparison_refuses_to_write_a_credential_down(
    places: Path, planted: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for extra in (f"--hub_token={SECRETS['HF_TOKEN']}", "--hub_token=another", f"--hub_model_id={URL}"):
        code = main(["compare", *options(places, tmp_path / "out"), "--eval_data", str(places / "beir"), extra])
        (line,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("contaccum: error")]
        assert code == 2 and "holds a credential" in line and leaks(tmp_path, line) == []
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("given", [URL, f"s3://{SECRETS['AWS_ACCESS_KEY_ID']}/data", SECRETS["HF_TOKEN"]])
def test_error_that_quotes_what_was_given_is_redacted(
    given: str, places: Path, planted: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = (
        ["evaluate", given, "--data", str(places / "beir")],
        ["evaluate", str(places / "backbone"), "--data", given],
        ["train", *options(places, tmp_path / "out"), f"--train_data={given}"],
        ["train", given],
    )
    for command in commands:
        assert main(command) == 2
        out, err = capsys.readouterr()
        assert "contaccum: error" in err and leaks(tmp_path, out, err) == []


def test_log_of_a_library_is_redacted(planted: None, capsys: pytest.CaptureFixture[str]) -> None:
    with redacted_output():
        handler = logging.StreamHandler()
        logger = logging.Logger("a library")
        logger.addHandler(handler)
        logger.warning("GET %s with %s", URL, SECRETS["HF_TOKEN"])
        print(f"token {SECRETS['GITHUB_TOKEN']}")
        sys.stdout.writelines([SECRETS["DB_PASSWORD"], "\n"])
    out, err = capsys.readouterr()
    assert "https://***@example.org/data with <HF_TOKEN>" in err
    assert out == "token <GITHUB_TOKEN>\n<DB_PASSWORD>\n"


def test_traceback_of_a_defect_is_redacted(planted: None) -> None:
    code = (
        "import os; from contaccum import cli\n"
        "def defect(_): raise RuntimeError(os.environ['HF_TOKEN'])\n"
        "cli._dispatch = defect; cli.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.splitlines()[-1] == "RuntimeError: <HF_TOKEN>"


def test_records_are_redacted_to_their_depths(planted: None) -> None:
    token = SECRETS["HF_TOKEN"]
    record = {"a": [token, {"b": (URL, 3, None)}], token: 1.5}
    assert redact_record(record) == {
        "a": ["<HF_TOKEN>", {"b": ("https://***@example.org/data", 3, None)}],
        "<HF_TOKEN>": 1.5,
    }


def test_what_is_no_credential_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SHORT_KEY", "cat")  # too short: it would blank half of what is said
    monkeypatch.setenv("SSH_KEY", str(tmp_path))  # where a key lies, not a key
    monkeypatch.setenv("KEYBOARD_LAYOUT", "layout-of-keys")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "parallelism")
    text = f"the cat sat on {tmp_path}, layout-of-keys, parallelism, https://example.org/a@b, mail me@example.org"
    assert redact(text) == text


def test_what_is_printed_after_a_command_is_left_alone(planted: None, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError), redacted_output():
        raise UserError("over")
    print(SECRETS["HF_TOKEN"])
    assert capsys.readouterr().out.strip() == SECRETS["HF_TOKEN"]
