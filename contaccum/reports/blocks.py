"""What a page is made of: sections of facts, tables and charts. Texts are plain here; the page escapes them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Cell(NamedTuple):
    """A cell of a table: what it shows, and what it is sorted by; numbers stand to the right."""

    text: str
    value: float | str
    is_number: bool


@dataclass
class Table:
    """Rows of cells under a header, as wide as the header.

    Attributes:
        title: above it; "" for none.
        note: below it.
        folded: shown only when it is opened.
        filtered: a box to filter rows by goes above it.
    """

    header: Sequence[str]
    rows: list[list[Cell]]
    title: str = ""
    note: str = ""
    folded: bool = False
    filtered: bool = False
    kind: str = field(default="table", init=False)


@dataclass
class Chart:
    """A picture: finished SVG, made by `svg` of numbers and escaped texts."""

    title: str
    svg: str
    note: str = ""


@dataclass
class Charts:
    """Charts side by side, with one legend for all: `names` in the order of their colours."""

    charts: list[Chart]
    names: Sequence[str] = ()
    note: str = ""
    kind: str = field(default="charts", init=False)


@dataclass
class Facts:
    """Names and values."""

    facts: Mapping[str, str]
    title: str = ""
    folded: bool = False
    kind: str = field(default="facts", init=False)


@dataclass
class Notes:
    """Lines of text; warnings stand out."""

    lines: Sequence[str]
    warning: bool = False
    kind: str = field(default="notes", init=False)


Block = Table | Charts | Facts | Notes


@dataclass
class Section:
    """A part of the page with a heading."""

    title: str
    blocks: list[Block]
    intro: str = ""


def cell(value: Any, form: str = "") -> Cell:
    """A cell of a value: None is blank, floats have four digits unless ``form`` says otherwise."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return Cell("", -math.inf if value is None else str(value), False)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return Cell(str(value), str(value), False)
    form = form or (".4f" if isinstance(value, float) else ",")
    return Cell(format(value, form), value, True)


def p_value(value: float) -> Cell:
    """A p-value as it is read."""
    return Cell("<0.001" if value < 0.001 else f"{value:.3f}", value, True)


def about(record: Mapping[str, Any]) -> dict[str, str]:
    """Versions and commit of a record, for `Facts`."""
    versions = record.get("versions") or {}
    shown = {"git commit": str(record["git_commit"])} if record.get("git_commit") else {}
    return shown | {str(name): str(version) for name, version in versions.items() if version}


def plain(value: Any) -> str:
    """A setting as one writes it: lower-case booleans, lists with commas."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {plain(x)}" for key, x in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(plain, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def is_number(value: Any) -> bool:
    """Whether something can be drawn."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
