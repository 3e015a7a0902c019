"""What a user meets first: help, a config for their data, the quickstart, and names as other tools have them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from small_data import write_judged_sentences, write_lines

from contaccum.cli import main, quickstart
from contaccum.errors import DataError
from contaccum.training.arguments import ContAccumTrainingArguments
from contaccum.training.config import parse
from contaccum.training.options import GROUPS, MOST_USED


def test_a_mistake_is_one_line_and_code_2_whatever_a_library_said_and_an_interrupt_is_130(
    monkeypatch, capsys
):
    def ended(error: BaseException) -> int:
        def run(argv: list[str]) -> None:
            raise error

        monkeypatch.setattr("contaccum.cli.report.run", run)
        return main(["report"])

    assert ended(DataError("a.json:3: broken:\n  no route\n")) == 2
    assert capsys.readouterr().err == "contaccum: error: a.json:3: broken: no route\n"
    assert ended(KeyboardInterrupt()) == 130


def test_help_of_train_needs_no_torch_and_has_every_option_of_ours_and_all_of_transformers_when_asked(
    capsys,
):
    code = "import contextlib, sys, time; from contaccum.cli import main\n"
    code += "with contextlib.suppress(SystemExit): main(['train', '--help'])\n"
    code += "assert not {'torch', 'transformers', 'datasets'} & {*sys.modules} and time.process_time() < 1"
    page = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout
    ours = [name for group in GROUPS for name in group.__dataclass_fields__]
    assert [
        name for name in ours if f"\n  --{name} " not in page
    ] == [] and "--weight_decay" not in page
    with pytest.raises(SystemExit, match="0"):
        main(["train", "--help", "all"])
    whole = capsys.readouterr().out
    assert [
        name
        for name in ContAccumTrainingArguments.__dataclass_fields__
        if f"\n  --{name} " not in whole
    ] == []
    assert {*MOST_USED} < {*ContAccumTrainingArguments.__dataclass_fields__}


def test_quickstart_scores_trains_and_scores_again_anywhere(
    tiny_model_path, tmp_path, monkeypatch, capsys
):
    """With a tiny model and data; what `contaccum train` would refuse is refused before anything runs."""
    scifact = write_judged_sentences(tmp_path / "scifact")
    monkeypatch.setattr("contaccum.data.beir.shipped_scifact", lambda: scifact)
    monkeypatch.setattr(quickstart, "_find_demo_model", lambda: tiny_model_path)
    monkeypatch.chdir(tmp_path)
    assert main(["quickstart", "--bank_sise", "3"]) == 2 and not Path("runs").exists()
    assert "did you mean 'bank_size'" in capsys.readouterr().err
    few = ["--max_steps", "1", "--passage_max_length", "40", "--gradient_accumulation_steps", "1"]
    for more in ([], ["--compare"]):  # the second takes the place of the first
        assert main(["quickstart", *more, *few]) == 0
    shown = capsys.readouterr().out
    names = r"BM25|.* \(as it is\)|query_side, by fit|contaccum|grad_accum"
    rows = re.findall(rf"^({names}) +\d\.\d{{4}} +\d\.\d{{4}} +\d\.\d{{4}}$", shown, re.MULTILINE)
    assert len(rows) == 4 + 5
    left = {path.name for path in Path("runs/quickstart").iterdir()}
    assert {"fit", "contaccum", "contaccum.json", "grad_accum", "grad_accum.json"} <= left
    assert Path("runs/quickstart/fit/report.html").is_file()


def test_new_writes_a_config_that_says_why_and_trains_as_it_is(
    places, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    pairs, few = (
        str(places / "pairs.jsonl"),
        ["--max_steps", "1", "--save_strategy", "no", "--use_cpu", "true"],
    )
    assert main(["new", "a", "--data", pairs, "--model", str(places / "backbone")]) == 0
    assert f"{pairs}: 24 pairs (pairs), 24 queries, 24 passages" in capsys.readouterr().out
    text = Path("a/config.yaml").read_text()
    for line in (
        "tied: true ",
        "query_max_length: 16\n",
        "by the tokenizer",
        "bank_size: 8 ",
        "_steps: 1 ",
    ):
        assert line in text
    assert main(["train", "a/config.yaml", *few]) == 0 and Path("a/model/modules.json").is_file()
    assert (
        main(["new", "a", "--data", pairs]) == 2 and "is there already" in capsys.readouterr().err
    )
    # Long passages that are nobody's queries, fields with names of their own, hard negatives, a model with prompts.
    rows = [
        {"frage": f"why {n}", "positive": "because " * 300 + str(n), "negative": f"no {n}"}
        for n in range(100)
    ]
    write_lines(tmp_path / "long.jsonl", rows)
    argv = [
        "--data",
        "long.jsonl",
        "--data_columns",
        "query=frage",
        "--model_name_or_path",
        "./e5-base",
    ]
    assert (
        main(["new", "b", *argv]) == 0
        and "queries and passages differ" in Path("b/config.yaml").read_text()
    )
    model, data, args = parse(["b/config.yaml"])
    assert (model.query_prompt, model.passage_prompt, data.num_hard_negatives) == (
        "query: ",
        "passage: ",
        1,
    )
    assert (model.query_max_length, model.passage_max_length, args.bank_size) == (8, 512, 32)
    assert data.sets["long"]["columns"] == {"query": "frage"}


def test_other_tools_names_are_taken_where_they_mean_one_option_and_hinted_where_several(
    tmp_path, capsys
):
    (tmp_path / "c.yaml").write_text(
        "model_name_or_path: m\noutput: o\ndata: d\nnum-hard-negatives: 4\nepochs: 2\n"
    )
    model, data, args = parse([str(tmp_path / "c.yaml"), "--lr", "3e-4", "--bank-size=64"])
    assert (model.model, data.num_hard_negatives, data.train_data, args.output_dir) == (
        "m",
        4,
        ["d"],
        "o",
    )
    assert (args.num_train_epochs, args.learning_rate, args.bank_size) == (2, 3e-4, 64)
    for argv, hint in (
        (
            ["train", "--batch_size", "8"],
            "'per_device_train_batch_size' or 'total_train_batch_size'",
        ),
        (["train", "--max-seq-length=64"], "'query_max_length' or 'passage_max_length'"),
        (["train", "--precision", "bfloat16"], "'bf16' or 'fp16'"),
        (
            ["encode", "--model", "m", "--corpus", "none.tsv", "--output-dir", "o"],
            "none.tsv: no such file",
        ),
        (["encode", "--corpus", "c", "--output", "o"], "name a MODEL"),
    ):
        assert main(argv) == 2
        assert hint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "offered"),
    [("contaccum q", "quickstart"), ("contaccum train --lora_a", "--lora_alpha")],
)
def test_the_shell_completes_commands_and_options(line, offered, tmp_path):
    pytest.importorskip("argcomplete")
    asked = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "offered")}
    asked |= {"COMP_LINE": line, "COMP_POINT": str(len(line))}
    subprocess.run([sys.executable, "-m", "contaccum.cli"], env={**os.environ, **asked}, check=True)
    assert (tmp_path / "offered").read_text().strip() == offered
