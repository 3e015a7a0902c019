"""Limits of the code structure: imports, types, import time, errors of one line."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import contaccum

ROOT = Path(__file__).resolve().parents[1]
MODULES = sorted((ROOT / "contaccum").rglob("*.py"))
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in MODULES}


def get_module_name(path: Path) -> str:
    """Return the dotted name of a module; a package has the name of its folder."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts[-1] == "__init__":
        parts = parts[:-1]
    return ".".join(parts)


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


def find_imported_modules(tree: ast.Module, module_names: set[str]) -> set[str]:
    """Return the modules of this package that a module imports, also under TYPE_CHECKING."""
    imported_modules: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported_names = {alias.name for alias in node.names}
            imported_modules |= imported_names & module_names
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported_names = {f"{node.module}.{alias.name}" for alias in node.names}
            submodules = imported_names & module_names
            if submodules:
                imported_modules |= submodules
            else:
                imported_modules |= {node.module} & module_names
    return imported_modules


def test_there_are_no_circular_imports():
    """Imports under TYPE_CHECKING are counted."""
    module_names = {get_module_name(path) for path in MODULES}
    imports: dict[str, set[str]] = {}
    for path, tree in TREES.items():
        name = get_module_name(path)
        imports[name] = find_imported_modules(tree, module_names) - {name}
    # __init__ of the package imports its modules only for type checkers, and no module of the
    # package imports from it.
    imports["contaccum"] = set()
    finished: set[str] = set()

    def visit(name: str, importers: tuple[str, ...]) -> None:
        """Follow the imports of a module; fail if it is one of its own importers."""
        assert name not in importers, " -> ".join([*importers[importers.index(name) :], name])
        if name in finished:
            return
        for imported_name in sorted(imports[name]):
            visit(imported_name, (*importers, name))
        finished.add(name)

    for name in sorted(imports):
        visit(name, ())


def test_every_import_is_declared():
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    declared_packages = set()
    for quoted_text in re.findall(r'"([^"\n]+)"', pyproject):
        # A requirement is a name, which a version, an extra or a marker may follow.
        package = re.split(r"[<>=;\[ ]", quoted_text)[0]
        declared_packages.add(package.lower().replace("-", "_"))
    packages_of_other_names = {
        "yaml": "pyyaml",
        "faiss": "faiss_cpu",
        "pytrec_eval": "pytrec_eval_terrier",
    }
    imported_modules = set()
    for tree in TREES.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                imported_modules.update(alias.name.split(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                imported_modules.add(node.module.split(".")[0])
    foreign_modules = imported_modules - set(sys.stdlib_module_names) - {"contaccum"}
    undeclared_modules = set()
    for module in foreign_modules:
        package = packages_of_other_names.get(module, module)
        if package not in declared_packages:
            undeclared_modules.add(module)
    assert undeclared_modules == set()


def test_every_name_that_docs_and_examples_import_is_in_the_reference():
    """`make docs` checks that each name in the reference exists."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").iterdir()]
    text = "\n".join(path.read_text(encoding="utf-8") for path in pages)
    public_names = set(contaccum.__all__)
    for imported_names in re.findall(r"from contaccum[\w.]* import ([\w, ]+)", text):
        for imported_name in imported_names.split(", "):
            public_names.add(imported_name.split(" as ")[0])
    names_in_reference = set(re.findall(r"^::: contaccum\..*?(\w+)$", text, re.MULTILINE))
    assert public_names - names_in_reference == {"__version__"}


def find_anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in headings}


def test_every_link_into_the_repository_has_a_target():
    """`make docs` checks links between pages of docs/ only, not those out of it and into it."""
    own_page = re.compile(r"https://github.com/contaccum/contaccum/(?:blob|tree)/main/")
    folders = ("docs", "eval", "benchmarks", "skills", "examples")
    pages = [
        *ROOT.glob("*.md"),
        *(page for name in folders for page in (ROOT / name).rglob("*.md")),
    ]
    broken = []
    for page in pages:
        text = page.read_text(encoding="utf-8")
        for link in re.findall(r"\]\(([^)\s]+)\)|^\[.*\]: (\S+)$", text, re.MULTILINE):
            address = "".join(link)
            path, _, anchor = own_page.sub("", address).partition("#")
            if re.match(r"\w+:", path):
                continue
            target = (ROOT if own_page.match(address) else page.parent) / path if path else page
            if target.is_dir() and anchor:
                target /= "README.md"
            if not target.exists() or (anchor and anchor not in find_anchors(target)):
                broken.append(f"{page.relative_to(ROOT)}: {address}")
    assert broken == []


def test_importing_the_package_takes_less_than_a_tenth_of_a_second():
    code = """
import time
start = time.perf_counter()
import contaccum
print(time.perf_counter() - start)
"""
    # The fastest of three imports counts, because other processes may slow down one of them.
    seconds = []
    for _ in range(3):
        output = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT)
        seconds.append(float(output))
    assert min(seconds) < 0.1
