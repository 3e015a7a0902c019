"""The wheel holds only the package and its data, and runs the examples (README: `make readme`)."""

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


def test_what_is_installed_runs_the_examples(wheel, tmp_path):
    site = str(tmp_path / "site")
    subprocess.run([*PIP, "install", "--no-deps", "--target", site, wheel], check=True)
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    shutil.copytree(ROOT / "tests", tmp_path / "tests")
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "tests/test_examples.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": site},
        check=True,
    )
