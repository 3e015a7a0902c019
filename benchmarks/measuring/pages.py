"""Tables in pages of the documentation, and numbers with units for them."""

from __future__ import annotations

import math
from collections.abc import Sequence


def make_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def format_number(value: float) -> str:
    """Return a number with two significant digits, such as "0.21", "3.4" or "13,000"."""
    if value == 0:
        return "0"
    num_decimals = 1 - math.floor(math.log10(abs(value)))
    rounded = round(value, num_decimals)
    # Rounding may add a digit: 9.96 becomes 10, which needs no decimals.
    num_decimals = 1 - math.floor(math.log10(abs(rounded)))
    return f"{rounded:,.{max(0, num_decimals)}f}"


def format_duration(seconds: float) -> str:
    """Return a duration with two significant digits, such as "3.2 min"."""
    for limit, divisor, unit in ((90, 1, "s"), (5400, 60, "min"), (48 * 3600, 3600, "h")):
        if seconds < limit:
            return f"{format_number(seconds / divisor)} {unit}"
    return f"{format_number(seconds / 86400)} days"


def format_bytes(num_bytes: float) -> str:
    """Return a number of bytes with two significant digits, such as "1.6 GB"."""
    for limit, divisor, unit in ((1e9, 1e6, "MB"), (1e12, 1e9, "GB")):
        if num_bytes < limit:
            return f"{format_number(num_bytes / divisor)} {unit}"
    return f"{format_number(num_bytes / 1e12)} TB"
