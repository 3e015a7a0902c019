"""Help, refusals, and work without a model need no torch; all else prints a line before it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sample_texts import sentences
from small_data import write_judged_places, write_lines

from contaccum.cli import COMMANDS
from contaccum.retrieval.store import StoreWriter

RUN_COMMANDS = """
import contextlib, io, json, sys
from contaccum.cli import main

commands, without_torch = json.loads(sys.argv[1])
slow = ("torch", "transformers", "sentence_transformers", "datasets")
if without_torch:
    sys.modules["torch"] = None  # importing it raises ImportError
ends = []
for command in commands:
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        try:
            code = main(command)
        except SystemExit as error:  # after --help
            code = error.code
        except ImportError as error:
            code = error.name.partition(".")[0]
    imported = [name for name in slow if sys.modules.get(name)]
    ends.append([code, imported, out.getvalue(), err.getvalue()])
    if imported and not without_torch:
        break
print(json.dumps(ends))
"""


def run_commands(commands: list[str], folder: Path, without_torch: bool = False) -> list[Any]:
    """Run commands one after the other in a new process, until one has imported a slow module.

    Return for each the exit code, or the name of a module that could not be imported; the slow
    modules that were imported; and what was printed to stdout and to stderr.
    """
    argv = [sys.executable, "-c", RUN_COMMANDS]
    argv.append(json.dumps([[command.split() for command in commands], without_torch]))
    done = subprocess.run(argv, check=True, capture_output=True, text=True, cwd=folder)
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with data of all commands, a store, and an empty folder of a model."""
    folder = tmp_path_factory.mktemp("start")
    write_judged_places(folder / "beir", train=True)
    texts = iter(sentences(80, 12, 16))
    pairs = [{"query": query, "positive": next(texts)} for query in texts]
    write_lines(folder / "pairs.jsonl", pairs)
    for name, query in (("run", "q0"), ("other", "unknown")):
        (folder / f"{name}.trec").write_text(f"{query} Q0 cat-tree 1 0.5 x\n")
    (folder / "model").mkdir()
    writer = StoreWriter(folder / "store", {"dtype": "float32", "shard_size": 9})
    writer.fill([("d", "", "text")], lambda texts: np.ones((len(texts), 2), dtype=np.float32))
    return folder


def test_help_and_work_without_a_model_import_nothing_slow(folder):
    commands = ["--help", *(f"{name} --help" for name in COMMANDS)]
    commands += [
        "split pairs.jsonl split --no_progress",
        "mine --method bm25 --data pairs.jsonl --output mined.jsonl --no_progress",
        "evaluate --run run.trec --data beir --output scores.json",
    ]
    for command, end in zip(commands, run_commands(commands, folder), strict=True):
        assert end[:2] == [0, []], (command, end)


TRAIN = "train --model model --output_dir out --train_data pairs.jsonl"
REFUSED = {
    **{f"{command} --no_such_option 1": "no_such_option" for command in COMMANDS},
    "split nothing.jsonl out": "nothing.jsonl",
    "split pairs.jsonl out --dev 1.5": "dev=1.5",
    "split pairs.jsonl out --data_columns query=qurey": "no column 'qurey'",
    "fit nothing.jsonl --model model": "nothing.jsonl",
    "fit pairs.jsonl --model ./nothing": "./nothing",
    "fit pairs.jsonl --model model --corpus nothing.jsonl": "nothing.jsonl",
    "fit pairs.jsonl --model model --budget soon": "budget=soon",
    "fit pairs.jsonl --model model --budegt 5m": "did you mean 'budget'",
    "fit pairs.jsonl --model model --hub_token secret": "credential",
    "fit pairs.jsonl --model model --learning_rate fast": "learning_rate",
    "fit pairs.jsonl --model model --similarity dot": "similarity",
    "fit --learning_rate 1e-4 pairs.jsonl": "learning_rate",
    "train nothing.yaml": "nothing.yaml",
    "train --bank_sise 3": "bank_size",
    "train --weight_decay much": "weight_decay",
    "train --weight_deca 0.1": "weight_decay",
    "train --method grad_accum --bank_size 8": "bank_size=8",
    "train --model model --output_dir out": "train_data",
    "train --model ./nothing --output_dir out --train_data pairs.jsonl": "./nothing",
    "train --model model --output_dir out --train_data nothing.jsonl": "nothing.jsonl",
    f"{TRAIN} --eval_data nothing --eval_strategy epoch": "nothing",
    f"{TRAIN} --second_stage nothing.jsonl": "nothing.jsonl",
    f"{TRAIN} --method query_side --passage_store beir": "beir",
    "mine model --data nothing.jsonl --output out": "nothing.jsonl",
    "mine model --data pairs.jsonl --output out --corpus nothing.jsonl": "nothing.jsonl",
    "mine model --data pairs.jsonl --output pairs.jsonl": "pairs.jsonl",
    "mine ./nothing --data pairs.jsonl --output out": "./nothing",
    "mine model --data pairs.jsonl --output out --relative_margin 2": "relative_margin",
    "mine model --data pairs.jsonl --output out --method bm25": "uses no MODEL",
    "mine --data pairs.jsonl --output out": "needs a MODEL",
    "encode model --corpus nothing.jsonl --output out": "nothing.jsonl",
    "encode ./nothing --corpus pairs.jsonl --output out": "./nothing",
    "encode model --corpus beir --output beir": "beir",
    "encode model --corpsu=c --output out": "did you mean 'corpus'",
    "encode model --corpus beir --output out --no_texts --bm25": "--no_texts",
    "search model --store beir --queries beir": "beir",
    "search model --store store --queries nothing.jsonl": "nothing.jsonl",
    "search ./nothing --store store --queries beir": "./nothing",
    "search model --store store --queries beir --bm25_weight 2": "bm25_weight",
    "search model --store store --queries beir --bm25_weight 0.3": "--bm25)",
    "search model --store store --queries beir --index_file x.faiss": "--index_file",
    "search model --store store --queries beir --index SQ8 --index_file run.trec/x": "run.trec/x",
    "search --store store --queries beir": "MODEL",
    "search model question --store store --queries beir": "--queries with a QUESTION",
    "evaluate ./nothing --data beir": "./nothing",
    "evaluate model --data nothing": "nothing",
    "evaluate model --data beir --metrics NDGC@10": "ndcg@10",
    "evaluate model --data beir --baseline nothing.json": "nothing.json",
    "evaluate --run nothing.trec --data beir": "nothing.trec",
    "evaluate --data beir model": "MODEL",
    "evaluate model --run run.trec --data beir": "MODEL",
    "evaluate --run run.trec --data beir beir": "two sets are called",
    "evaluate --run run.trec --data beir model": "one data set",
    "evaluate --run other.trec --data beir": "judged queries",
    "evaluate --run run.trec --data beir --output out.txt": ".json",
    "evaluate --run run.trec --data beir --output run.json": "replace the --run",
    "evaluate --run run.trec --data beir --require better": "--baseline",
    "evaluate --run run.trec --data beir --require better --baseline results.json": "replace the "
    "--baseline",
    "evaluate model --data beir --query_endpoint http://127.0.0.1:1": "needs --endpoint",
    "export ./nothing out": "./nothing",
    "export model beir": "beir",
    "export model out --dtype int4": "int4",
}
"""{command: word in the error}"""


def test_files_and_options_are_refused_before_anything_slow_is_imported(folder):
    files = sorted(folder.rglob("*"))
    ends = run_commands(list(REFUSED), folder)
    for (command, word), (*end, _, error) in zip(REFUSED.items(), ends, strict=True):
        assert end == [2, []], (command, error)
        assert word in error and error.count("\n") == 1, (command, error)
        assert "secret" not in error
    assert sorted(folder.rglob("*")) == files  # nothing is written


FIRST_LINES = {
    "fit pairs.jsonl --model model --output out/fit": "fitting model to pairs.jsonl in 30m",
    "train --model model --output_dir out/train --train_data pairs.jsonl --weight_decay 0.1": (
        "training model by contaccum"
    ),
    "mine model --data pairs.jsonl --output out/mined.jsonl": (
        "mining hard negatives for pairs.jsonl with model"
    ),
    "encode model --corpus beir --output out/store": "encoding beir with model",
    "search model --store store --queries beir --output out/run.trec": (
        "searching store with model for beir"
    ),
    "evaluate model --data beir --output out/scores.json": "evaluating model on beir",
    "export model out/export": "exporting model to out/export",
}
"""{command: its first line}"""


def test_the_first_line_is_printed_before_anything_slow_is_imported(folder):
    ends = run_commands(list(FIRST_LINES), folder, without_torch=True)
    for (command, line), (code, _, out, error) in zip(FIRST_LINES.items(), ends, strict=True):
        assert code == "torch", (command, error)
        assert out.splitlines()[0] == line, command
