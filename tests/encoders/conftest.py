"""SciFact, with whose texts every export is checked, is read once."""

from collections.abc import Iterator
from functools import cache

import pytest

from contaccum.data.beir import load_beir_folder

load_once = cache(load_beir_folder)


@pytest.fixture(autouse=True, scope="module")
def _read_scifact_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("contaccum.encoders.export.load_beir_folder", load_once)
        yield
