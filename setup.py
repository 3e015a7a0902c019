"""The page on PyPI: README.md, with absolute addresses for links into the repository."""

import re
from pathlib import Path

from setuptools import setup

REPOSITORY = "https://github.com/contaccum/contaccum"
readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
setup(
    long_description=re.sub(
        r"(!?)(\[[^]]*\]\()(?!https?:|#)",
        lambda link: f"{link[1]}{link[2]}{REPOSITORY}/{'raw' if link[1] else 'blob'}/main/",
        readme,
    ),
    long_description_content_type="text/markdown",
)
