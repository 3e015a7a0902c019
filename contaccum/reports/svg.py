"""Charts as inline SVG without a script: lines, stacked areas, and differences by query. Colours are the page's."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

COLOURS = 12
"""Colours of series that the page has; later ones begin again."""

_WIDTH, _HEIGHT = 420, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 12, 12, 34
_POINTS = 400  # more would not be seen
_MARKED = 40  # points of a line that are few enough to be marked

Point = tuple[float, float]


@dataclass
class Line:
    """Points to be joined; ``series`` chooses colour and legend, ``dashed`` tells the second of two of a series."""

    name: str
    points: Sequence[Point]
    series: int = 0
    dashed: bool = False


def line_chart(lines: Sequence[Line], label: str, reference: float | None = None, unit: str = "update") -> str:
    """Lines over updates, say; of more than 400 points, means of as many spans.

    Args:
        label: what is drawn, for those who cannot see it.
        reference: a level to compare with, drawn where it lies within reach.
    """
    drawn = [(line, _thinned(line.points)) for line in lines if line.points]
    xs = [x for _, points in drawn for x, _ in points]
    ys = [y for _, points in drawn for _, y in points]
    low, high = min(ys), max(ys)
    if reference is not None and low - (high - low) <= reference <= high + (high - low):
        low, high = min(low, reference), max(high, reference)
    frame = _Frame((min(xs), max(xs)), (low, high))
    parts = [frame.axes(unit)]
    if reference is not None and frame.has(reference):
        y = frame.y(reference)
        parts.append(f'<line class="reference" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
    for line, points in drawn:
        path = "M" + "L".join(f"{frame.x(x):.1f} {frame.y(y):.1f}" for x, y in points)
        style = f"line s{line.series % COLOURS}" + (" dashed" if line.dashed else "")
        dots = "".join(
            f'<circle cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="2.6"><title>{escape(line.name)}: {_short(y)} at '
            f"{escape(unit)} {_short(x)}</title></circle>"
            for x, y in (points if len(points) <= _MARKED else ())
        )
        parts.append(
            f'<g class="{style}" data-series="{line.series}"><title>{escape(line.name)}</title>'
            f'<path d="{path}"/>{dots}</g>'
        )
    return _svg(label, parts)


def stacked_chart(xs: Sequence[float], layers: Sequence[tuple[str, Sequence[float]]], label: str) -> str:
    """Shares from 0 to 1 on top of each other, the first below; layers grow darker."""
    rows = [_thinned(list(zip(xs, values, strict=True))) for _, values in layers]
    frame = _Frame((xs[0], xs[-1]), (0.0, 1.0), padded=False)
    parts = []
    below = [0.0] * len(rows[0])
    for number, ((name, _), row) in enumerate(zip(layers, rows, strict=True)):
        above = [low + y for low, (_, y) in zip(below, row, strict=True)]
        upper = [f"{frame.x(x):.1f} {frame.y(min(y, 1.0)):.1f}" for (x, _), y in zip(row, above, strict=True)]
        lower = [f"{frame.x(x):.1f} {frame.y(min(y, 1.0)):.1f}" for (x, _), y in zip(row, below, strict=True)]
        shade = "batch" if number == 0 else f"age{min(number - 1, 7)}"
        path = "M" + "L".join([*upper, *reversed(lower)]) + "Z"
        parts.append(f'<path class="layer {shade}" d="{path}"><title>{escape(name)}</title></path>')
        below = above
    return _svg(label, [*parts, frame.axes("update")])


def difference_chart(differences: Iterable[float], label: str) -> str:
    """A bar per query, from the greatest gain to the greatest loss."""
    ordered = sorted(differences, reverse=True)
    frame = _Frame((0, len(ordered)), (min(0.0, ordered[-1]), max(0.0, ordered[0])))
    paths: dict[str, list[str]] = {"gain": [], "loss": []}
    width = (_WIDTH - _LEFT - _RIGHT) / len(ordered)
    for place, value in enumerate(ordered):
        if value:
            top, bottom = sorted((frame.y(value), frame.y(0.0)))
            # A bar thinner than a pixel would be drawn too pale to be seen.
            path = f"M{frame.x(place):.1f} {top:.1f}h{max(width, 0.8):.2f}V{bottom:.1f}h-{max(width, 0.8):.2f}Z"
            paths["gain" if value > 0 else "loss"].append(path)
    parts = [frame.axes("queries, by difference")]
    parts += [f'<path class="bar {kind}" d="{"".join(found)}"/>' for kind, found in paths.items() if found]
    return _svg(label, parts)


class _Frame:
    """Where numbers lie in the picture, with axes at round ones."""

    def __init__(self, xs: tuple[float, float], ys: tuple[float, float], padded: bool = True) -> None:
        self.x_range = xs if xs[1] > xs[0] else (xs[0] - 0.5, xs[0] + 0.5)
        low, high = ys
        pad = ((high - low) * 0.05 or abs(high) * 0.05 or 0.5) if padded else 0.0
        self.y_range = (low - pad if low else low, high + pad if high else high)
        if self.y_range[0] == self.y_range[1]:
            self.y_range = (low - pad, high + pad)

    def x(self, value: float) -> float:
        low, high = self.x_range
        return _LEFT + (value - low) / (high - low) * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        low, high = self.y_range
        return _HEIGHT - _BOTTOM - (value - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    def has(self, value: float) -> bool:
        return self.y_range[0] <= value <= self.y_range[1]

    def axes(self, unit: str) -> str:
        parts = []
        for tick in _ticks(*self.y_range):
            y = self.y(tick)
            parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_short(tick)}</text>')
        for tick in _ticks(*self.x_range, whole=True):
            parts.append(f'<text x="{self.x(tick):.1f}" y="{_HEIGHT - 18}" text-anchor="middle">{_short(tick)}</text>')
        middle = (_LEFT + _WIDTH - _RIGHT) / 2
        parts.append(
            f'<text class="unit" x="{middle:.1f}" y="{_HEIGHT - 3}" text-anchor="middle">{escape(unit)}</text>'
        )
        return "".join(parts)


def _svg(label: str, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'


def _ticks(low: float, high: float, whole: bool = False) -> list[float]:
    """Round numbers within, some five of them."""
    from matplotlib.ticker import MaxNLocator

    found = MaxNLocator(nbins=5, integer=whole, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high)
    slack = 1e-9 * (high - low)
    return [float(tick) for tick in found if low - slack <= tick <= high + slack]


def _short(value: float) -> str:
    """A number in few digits."""
    if value == 0 or abs(value) < 1e-12:
        return "0"
    if abs(value) >= 1e5 or abs(value) < 1e-3:
        return f"{value:.2g}".replace("e-0", "e-").replace("e+0", "e")
    return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def _thinned(points: Sequence[Point]) -> list[Point]:
    if len(points) <= _POINTS:
        return list(points)
    size = math.ceil(len(points) / _POINTS)
    spans = (points[start : start + size] for start in range(0, len(points), size))
    return [(sum(x for x, _ in span) / len(span), sum(y for _, y in span) / len(span)) for span in spans]
