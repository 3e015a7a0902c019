"""--help of all programs outside the package."""

import pytest
from programs import ROOT, run_program


def list_scripts() -> list[str]:
    """Return the paths, in the repository, of all programs outside the package."""
    scripts = []
    eval_folders = ("eval", "eval/compare", "eval/open_qa")
    for folder in ("benchmarks", *eval_folders, "examples", "scripts"):
        scripts += [f"{folder}/{path.name}" for path in (ROOT / folder).glob("*.py")]
    return sorted(scripts)


@pytest.mark.parametrize("script", list_scripts())
def test_every_script_prints_its_help(script, capsys):
    with pytest.raises(SystemExit) as stopped:
        run_program(script, "--help")
    assert stopped.value.code == 0
    assert capsys.readouterr().out.startswith("usage: ")
