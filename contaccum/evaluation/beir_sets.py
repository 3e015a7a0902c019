"""Which data sets an evaluation is made of: names and folders spelled out, each with its split and its row.

`beir` stands for all public sets, and CQADupStack for its twelve parts, which make one row. Reads no data.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from contaccum.data.beir_folder import is_beir_folder
from contaccum.data.beir_names import CQADUPSTACK_FORUMS, PUBLIC_NAMES, default_split
from contaccum.data.records import one_line
from contaccum.errors import DataError


@dataclass(frozen=True)
class EvaluationSet:
    """One data set to score on.

    Attributes:
        given: what `resolve_beir_data` takes.
        split: the split to score on.
        label: what tables call it, and files, with - for /.
        row: the row of the table that it belongs to; its own label, or "cqadupstack".
    """

    given: str
    split: str
    label: str
    row: str


def evaluation_sets(given: Sequence[str], split: str | None = None) -> list[EvaluationSet]:
    """Spell out `--data`: `beir`, `cqadupstack` or a folder with its twelve parts, other names, other folders.

    Args:
        split: of all of them; None: `default_split` of each.

    Raises:
        DataError: a folder that holds some parts of CQADupStack and not all.
    """
    return [one for item in given for one in _spelled_out(item, split)]


def _spelled_out(given: str, split: str | None) -> Iterator[EvaluationSet]:
    # os.path, where pathlib raises for a path that is too long: `resolve_beir_data` says what is wrong with it.
    folder = os.path.expanduser(given)
    if given == "beir" and not is_beir_folder(folder):
        for name in PUBLIC_NAMES:
            yield from _spelled_out(name, split)
    elif (given == "cqadupstack" and not os.path.exists(folder)) or _has_parts(folder):
        for forum in CQADUPSTACK_FORUMS:
            part = f"cqadupstack/{forum}"
            where = os.path.join(folder, forum) if os.path.exists(folder) else part
            yield EvaluationSet(where, split or "test", part, "cqadupstack")
    else:
        label = _label(folder)
        yield EvaluationSet(given, split or default_split(given), label, label)


def _has_parts(folder: str) -> bool:
    if not os.path.isdir(folder) or is_beir_folder(folder):
        return False
    missing = [forum for forum in CQADUPSTACK_FORUMS if not is_beir_folder(os.path.join(folder, forum))]
    if missing and len(missing) < len(CQADUPSTACK_FORUMS):
        raise DataError(
            one_line(
                f"{folder}: CQADupStack is the mean over twelve parts, and {', '.join(missing)} is not there (add what "
                f"is missing, or name parts one by one, such as {os.path.join(folder, 'android')})"
            )
        )
    return not missing


def _label(folder: str) -> str:
    path = os.path.realpath(folder) if os.path.exists(folder) else os.path.abspath(folder)
    above, name = os.path.split(path)
    # Its parts are called alike in every copy, and "android" alone says little.
    return f"cqadupstack/{name}" if os.path.basename(above) == "cqadupstack" and name in CQADUPSTACK_FORUMS else name
