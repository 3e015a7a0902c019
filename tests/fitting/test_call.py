"""`contaccum.fit`: its keyword arguments as options of `contaccum train`."""

from __future__ import annotations

import contaccum
from contaccum.fitting import call


def test_settings_are_formatted_as_the_command_line_expects_them(tmp_path, monkeypatch):
    calls = []

    class RecordedFit:
        def __init__(self, *arguments: object) -> None:
            calls.append(arguments)

        def run(self) -> None:
            pass

    monkeypatch.setattr(call, "Fit", RecordedFit)
    contaccum.fit(
        tmp_path / "pairs.jsonl",
        output=tmp_path / "out",
        learning_rate=None,
        bf16=True,
        matryoshka_dims=(8, 4),
        lr_scheduler_kwargs={"num_cycles": 2},
    )
    [(_, _, settings, *_)] = calls
    assert settings == {
        "bf16": ["True"],
        "matryoshka_dims": ["8", "4"],
        "lr_scheduler_kwargs": ['{"num_cycles": 2}'],
    }
