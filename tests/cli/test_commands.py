"""Exit codes and lines of errors, a full disk, and help."""

import errno
import re
import sys
from types import SimpleNamespace

import pytest
from tiny_models import tiny_encoder

from contaccum.cli import main
from contaccum.errors import DataError
from contaccum.settings import Settings
from contaccum.training.checkpoint import find_checkpoints


def test_user_error_is_one_line_with_exit_code_2(monkeypatch, capsys):
    """A message of several lines is joined. An interrupt has exit code 130."""

    def run_with_error(error: BaseException) -> int:
        def run(argv: list[str]) -> None:
            raise error

        monkeypatch.setitem(sys.modules, "contaccum.cli.split", SimpleNamespace(run=run))
        return main(["split"])

    assert run_with_error(DataError("a.json:3: broken:\n  no route\n")) == 2
    assert capsys.readouterr().err == "contaccum: error: a.json:3: broken: no route\n"
    assert run_with_error(KeyboardInterrupt()) == 130
    assert run_with_error(PermissionError(errno.EACCES, "Permission denied", "a.json")) == 2
    assert "a.json: cannot be read or written (Permission denied)" in capsys.readouterr().err
    with pytest.raises(FileNotFoundError):  # a defect keeps its traceback
        run_with_error(FileNotFoundError(errno.ENOENT, "No such file or directory"))


@pytest.mark.parametrize(("tied", "num_bytes"), [(True, 100), (False, 12_000)])
def test_an_export_that_does_not_fit_is_one_line_and_leaves_nothing(
    tied, num_bytes, tmp_path, limit_file_size, capsys
):
    tiny_encoder(tied).save_pretrained(str(tmp_path / "model"))
    argv = ["export", str(tmp_path / "model"), str(tmp_path / "out")]
    with limit_file_size(num_bytes):
        assert main(argv) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith(f"contaccum: error: {tmp_path}/out: cannot be written (File too large)")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert main(argv) == 0


@pytest.mark.parametrize(
    ("save_strategy", "num_bytes"), [("no", 24_000), ("steps", 100), ("steps", 12_000)]
)
def test_a_training_that_does_not_fit_is_one_line_and_goes_on(
    save_strategy, num_bytes, train, tmp_path, limit_file_size, capsys
):
    settings = {"resume_from_checkpoint": "auto", "save_strategy": save_strategy, "save_steps": 1}
    with limit_file_size(num_bytes):
        assert train(tmp_path / "run", **settings) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert re.match(r"contaccum: error: .*(File too large|No space left on device)", line)
    assert not find_checkpoints(tmp_path / "run")
    assert train(tmp_path / "run", **settings) == 0


def test_train_help_lists_every_option(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    help_text = capsys.readouterr().out
    own_names = Settings.__dataclass_fields__.keys() - {"transformers"}
    for name in own_names:
        assert f"\n  --{name} " in help_text
    assert "--weight_decay" not in help_text


def test_the_demo_without_its_model_names_the_extra(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("contaccum.cli.fit.find_demo_model", lambda: str(tmp_path / "missing"))
    assert main(["fit", "--demo"]) == 2
    error = capsys.readouterr().err
    assert "contaccum[demo]" in error
    assert "--model FOLDER" in error
    assert main(["fit"]) == 2
    assert "--demo" in capsys.readouterr().err
