"""Exports are checked with few texts of SciFact, which is read once."""

from collections.abc import Iterator
from functools import cache

import pytest

from contaccum.data.beir import load_beir_folder
from contaccum.encoders import export

load_once = cache(load_beir_folder)


@pytest.fixture(autouse=True, scope="module")
def _check_exports_quickly() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export, "load_beir_folder", load_once)
        patch.setattr(export, "_NUM_CHECK_TEXTS", 8)
        yield
