"""Sections of contaccum at the top of a model card, which is README.md in the model's folder.

A section stands between two HTML comments, so that it can be found and replaced later:

    <!-- NAME -->
    TEXT
    <!-- end of NAME -->
"""

from __future__ import annotations

import re
from pathlib import Path

from contaccum.files import redact, write_text


def insert_card_section(model_folder: Path, name: str, text: str) -> None:
    """Write a section at the top of a model card, below its YAML metadata.

    An earlier section of this name is replaced. A missing card is created.

    Args:
        model_folder: the folder of the model.
        name: the name of the section in the comments around it.
        text: the section, in Markdown.
    """
    card = model_folder / "README.md"
    content = ""
    if card.is_file():
        content = card.read_text(encoding="utf-8")
    start_mark = f"<!-- {name} -->\n"
    end_mark = f"<!-- end of {name} -->\n"
    content = re.sub(f"{start_mark}.*?{end_mark}\n", "", content, flags=re.DOTALL)
    metadata = re.match(r"---\n.*?\n---\n", content, flags=re.DOTALL)
    position = metadata.end() if metadata else 0
    section = redact(f"{start_mark}{text}\n{end_mark}\n")
    write_text(card, content[:position] + section + content[position:])
