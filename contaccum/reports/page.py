"""Sections to one HTML file that needs nothing else: no network, no fonts, and no script but its own.

Jinja escapes every text. A content security policy allows the one style sheet and the one script, by their hashes, and
nothing more, so that even a text that slipped through could not run or load anything.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

from contaccum.evaluation.provenance import git_commit
from contaccum.reports.blocks import Section
from contaccum.reports.svg import COLOURS
from contaccum.version import __version__

_HERE = Path(__file__).parent


def render(title: str, sections: Sequence[Section]) -> str:
    """The page."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=FileSystemLoader(_HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    style, script = ((_HERE / name).read_text(encoding="utf-8").strip() for name in ("page.css", "page.js"))
    return environment.get_template("page.html.j2").render(
        title=title,
        sections=sections,
        # Ours, and finished: SVG escapes its texts itself.
        svg=Markup,
        style=Markup(style),
        script=Markup(script),
        policy=f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; base-uri 'none'",
        colours=COLOURS,
        made=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        version=__version__,
        commit=git_commit(),
    )


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
