"""YAML and command line to arguments, and `contaccum train` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from sample_texts import sentences

from contaccum.cli import main
from contaccum.data.fields import parse_columns
from contaccum.errors import ConfigError
from contaccum.training.config import parse

BASE = {"model": "m", "train_data": "d", "output_dir": "o"}


def config(folder: Path, text: str | None = None, **keys: Any) -> str:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump({**BASE, **keys}) if text is None else text)
    return str(path)


def test_command_line_overrides_the_file(tmp_path: Path) -> None:
    path = config(tmp_path, bank_size=64, learning_rate=1e-4, tied=False, mask_duplicates=False, save_strategy="no")
    model, data, args = parse([path, "--bank_size", "128", "--temperature=0.1"])
    assert (args.bank_size, args.temperature, args.learning_rate) == (128, 0.1, 1e-4)
    assert (args.mask_duplicates, args.save_strategy) == (False, "no")
    assert (model.model, model.tied, data.train_data, data.on_bad_record) == ("m", False, ["d"], "stop")


def test_later_files_override_earlier_ones(tmp_path: Path) -> None:
    first = config(tmp_path, bank_size=64, seed=1)
    second = tmp_path / "second.yaml"
    second.write_text("bank_size: 32\n")
    assert parse([first, str(second)])[2].bank_size == 32


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        ("bank_sise: 3", [], r"unknown key 'bank_sise' in .*config.yaml; did you mean 'bank_size'"),
        (None, ["--bank_sise", "3"], "unknown key 'bank_sise' on the command line; did you mean 'bank_size'"),
        (None, ["--bank_size", "many"], "invalid int value"),
        (None, ["--method", "gradcache"], "method"),
        ("a: [1\nb: 2", [], r"config.yaml:2: not valid YAML"),
        ("- a\n- b", [], "`key: value` lines"),
        ("train_data: d\noutput_dir: o", [], "model is not set"),
        ("model: m\noutput_dir: o", [], "train_data is not set"),
        ("model: m\ntrain_data: d", [], "output_dir is not set"),
    ],
)
def test_mistakes_are_named(text: str | None, arguments: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        parse([config(tmp_path, text), *arguments])


@pytest.mark.parametrize(
    ("keys", "arguments", "expected"),
    [
        ({"data_columns": {"query": "question", "negatives": "hard"}}, [], {"query": "question", "negatives": "hard"}),
        ({"data_columns": ["query=question", "title=h=1"]}, [], {"query": "question", "title": "h=1"}),
        (
            {"data_columns": {"query": "a"}},
            ["--data_columns", "query=b", "title=c d"],
            {"query": "b", "title": "c d"},
        ),
        ({}, ["--data_columns=positive=x"], {"positive": "x"}),
        ({}, [], {}),
    ],
)
def test_data_columns_are_a_mapping_in_yaml_and_words_on_the_command_line(
    keys: dict[str, Any], arguments: list[str], expected: dict[str, str], tmp_path: Path
) -> None:
    _, data, _ = parse([config(tmp_path, **keys), *arguments])
    assert parse_columns(data.data_columns) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data_columns: {qurey: a}", r"data_columns: 'qurey' is unknown .*did you mean 'query'"),
        ("data_columns: {query: [a]}", r"data_columns: query must name a column, got \['a'\]"),
        ("data_columns: query", r"data_columns: 'query' is not ROLE=NAME"),
        ("data_format: tevatro", r"data_format='tevatro' is unknown .*did you mean 'tevatron'"),
    ],
)
def test_data_settings_that_cannot_work_are_refused_with_the_arguments(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        parse([config(tmp_path, text)])


def test_missing_config_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing.yaml: no such config file"):
        parse([str(tmp_path / "nothing.yaml")])


CONFIGS = Path(__file__).parents[2] / "configs"


# Those of the paper have a test of their own.
@pytest.mark.parametrize(
    "name", sorted(str(p.relative_to(CONFIGS)) for p in CONFIGS.rglob("*.yaml") if "paper" not in p.parts)
)
def test_shipped_configs_parse(name: str) -> None:
    _, _, args = parse([str(CONFIGS / name)])
    assert args.total_train_batch_size == 128


@pytest.fixture
def backbone(tiny_config: Any, tiny_tokenizer: Any, tmp_path: Path) -> str:
    from transformers import AutoModel

    folder = tmp_path / "backbone"
    AutoModel.from_config(tiny_config).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return str(folder)


def write_pairs(path: Path, n: int) -> str:
    rows = zip(sentences(n, 1), sentences(n, 2), strict=True)
    path.write_text("".join(json.dumps({"query": q, "positive": p}) + "\n" for q, p in rows))
    return str(path)


def train(backbone: str, data: str, output: Path, *more: str, file: str | None = None) -> int:
    settings = ["--max_steps=2", "--per_device_train_batch_size=4", "--bank_size=8", "--disable_tqdm=true"]
    places = [f"--model={backbone}", f"--train_data={data}", f"--output_dir={output}", "--save_strategy=no"]
    return main(["train", *([] if file is None else [file]), *places, *settings, *more])


def test_train_command_leaves_a_model_and_its_record(backbone: str, tmp_path: Path) -> None:
    data, output = write_pairs(tmp_path / "pairs.jsonl", 12), tmp_path / "out"
    assert train(backbone, data, output, "--tied=false", "--pooling=mean") == 0
    assert {"modules.json", "run.json", "train_log.jsonl", "training_args.json"} <= {p.name for p in output.iterdir()}
    # What it trained, it trains again: now the folder is a SentenceTransformer.
    assert train(str(output), data, tmp_path / "again") == 0


def test_train_command_reads_a_table_by_its_columns_whatever_its_name(backbone: str, tmp_path: Path) -> None:
    rows = zip(sentences(12, 1), sentences(12, 2), sentences(12, 3), strict=True)
    data = tmp_path / "table.txt"
    data.write_text("frage\tantwort\tfalsch\n" + "".join("\t".join(row) + "\n" for row in rows))
    columns = {"query": "frage", "positive": "antwort", "negatives": "falsch"}
    file = config(tmp_path, data_columns=columns, num_hard_negatives=1)
    assert train(backbone, str(data), tmp_path / "out", file=file) == 0
    assert (tmp_path / "out" / "modules.json").is_file()
    # Under another mapping, and under another format, the same file is refused.
    assert train(backbone, str(data), tmp_path / "no", "--data_columns", "query=falsch", file=file) == 2
    assert train(backbone, str(data), tmp_path / "no", "--data_format=pairs", file=file) == 2
    assert not (tmp_path / "no").exists()


def test_bad_record_stops_before_anything_is_written(
    backbone: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, output = tmp_path / "pairs.jsonl", tmp_path / "out"
    write_pairs(data, 12)
    data.write_text(data.read_text() + '{"query": "no positive"}\n')
    assert train(backbone, str(data), output) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("contaccum: error: ") and "\n" not in error
    assert "pairs.jsonl:13" in error and "--on_bad_record skip" in error
    assert not output.exists()
    assert train(backbone, str(data), output, "--on_bad_record=skip") == 0
    assert "1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "did you mean 'train'"),
        (["train", "--bank_sise=3"], "did you mean 'bank_size'"),
        (["train", "--model=nowhere/at/all", "--train_data={data}", "--output_dir={out}"], "nowhere/at/all"),
        (["train", "--model={backbone}", "--train_data={out}/none.jsonl", "--output_dir={out}"], "none.jsonl"),
        (["train", "--model={backbone}", "--train_data={data}", "--output_dir={data}"], "cannot be made"),
        (
            [
                "train",
                "--model={backbone}",
                "--train_data={data}",
                "--output_dir={out}",
                "--resume_from_checkpoint=last",
            ],
            "no checkpoint to resume from",
        ),
    ],
)
def test_mistakes_give_one_line_and_exit_code_2(
    arguments: list[str], message: str, backbone: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_pairs(tmp_path / "pairs.jsonl", 12)
    places = {"backbone": backbone, "data": data, "out": str(tmp_path / "out")}
    assert main([argument.format(**places) for argument in arguments]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("contaccum: error")]
    assert len(lines) == 1 and message in lines[0]
