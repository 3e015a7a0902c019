"""Limits of the code structure: lengths of modules and functions, imports, import time."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

import contaccum
from contaccum.cli import COMMANDS, main

ROOT = Path(__file__).resolve().parents[1]
MODULES = sorted((ROOT / "contaccum").rglob("*.py"))
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in MODULES}


def _lines(paths: list[Path]) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def _name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _is_long(node: ast.AST) -> bool:
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return False
    # The signature is not counted.
    first_line = node.body[0].lineno
    return (node.end_lineno or 0) - first_line >= 60


def test_modules_have_450_lines_and_functions_60_at_most():
    assert [path.name for path in MODULES if _lines([path]) > 450] == []
    functions = [
        f"{path.name}:{node.name}"
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if _is_long(node)
    ]
    assert functions == []


def test_no_trainer_is_passed_around_untyped():
    """`trainer: Any` would hide which attributes are used, and circular imports."""
    untyped = []
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.arg):
                name = node.arg
            elif isinstance(node, ast.AnnAssign):
                name = ast.unparse(node.target).split(".")[-1]
            else:
                continue
            annotation = "Any" if node.annotation is None else ast.unparse(node.annotation)
            if name in ("trainer", "_trainer") and "Any" in annotation:
                untyped.append(f"{path.name}:{node.lineno}")
    assert untyped == []


def test_there_are_no_circular_imports():
    """Imports under TYPE_CHECKING are counted."""
    names = {_name(path) for path in MODULES}
    imports: dict[str, set[str]] = {}
    for path, tree in TREES.items():
        imported: set[str] = set()
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.ImportFrom)
                and node.module
                and node.module.startswith("contaccum")
            ):
                submodules = {f"{node.module}.{alias.name}" for alias in node.names} & names
                imported |= submodules or {node.module} & names
            elif isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names} & names
        # __init__ of the package imports its modules only for type checkers, and no module of the
        # package imports from it.
        imports[_name(path)] = imported - {_name(path)}
    imports["contaccum"] = set()
    done: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, " -> ".join([*above[above.index(name) :], name])
        if name not in done:
            for other in sorted(imports[name]):
                visit(other, (*above, name))
            done.add(name)

    for name in sorted(imports):
        visit(name, ())


def test_every_import_is_declared():
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    declared = {
        re.split(r"[<>=;\[ ]", x)[0].lower().replace("-", "_")
        for x in re.findall(r'"([^"\n]+)"', pyproject)
    }
    called = {"yaml": "pyyaml", "faiss": "faiss_cpu", "pytrec_eval": "pytrec_eval_terrier"}
    imported = set()
    for tree in TREES.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                imported.add(node.module.split(".")[0])
    foreign = imported - set(sys.stdlib_module_names) - {"contaccum"}
    assert {name for name in foreign if called.get(name, name) not in declared} == set()


def test_every_name_that_docs_and_examples_import_is_in_the_reference():
    """That each name there exists is checked by `make docs`."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").iterdir()]
    text = "\n".join(path.read_text(encoding="utf-8") for path in pages)
    imported = {
        x
        for names in re.findall(r"from contaccum[\w.]* import ([\w, ]+)", text)
        for x in names.split(", ")
    }
    listed = set(re.findall(r"^::: contaccum\..*?(\w+)$", text, re.MULTILINE))
    assert (imported | set(contaccum.__all__)) - listed == {"__version__"}


def test_importing_the_package_takes_less_than_a_tenth_of_a_second():
    code = "import time; t = time.perf_counter(); import contaccum; print(time.perf_counter() - t)"
    times = [
        float(subprocess.check_output([sys.executable, "-c", code], cwd=ROOT)) for _ in range(3)
    ]
    assert min(times) < 0.1


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_with_a_wrong_option_ends_with_one_line_and_code_2(command, capsys):
    started = time.process_time()
    assert main([command, "--no_such_option", "1"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("contaccum: error: ") and error.count("\n") == 1
    assert time.process_time() - started < 60
