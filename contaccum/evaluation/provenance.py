"""Which software produced a result: versions of the packages that decide numbers, and contaccum's own commit.

Deliberately records nothing of the environment: no variables, host names, users or credentials.
"""

from __future__ import annotations

import platform
import subprocess
from importlib import metadata
from pathlib import Path

from contaccum.version import __version__

# Name in a record -> distributions that provide it, first found wins.
_DISTRIBUTIONS = {
    "torch": ("torch",),
    "transformers": ("transformers",),
    "sentence-transformers": ("sentence-transformers",),
    "numpy": ("numpy",),
    "faiss": ("faiss-gpu", "faiss-cpu", "faiss"),
    "pytrec_eval": ("pytrec-eval-terrier", "pytrec-eval"),
    "beir": ("beir",),
}


def package_versions() -> dict[str, str | None]:
    """{package: version} of Python, contaccum and what decides its numbers; None for one that is not installed."""
    versions: dict[str, str | None] = {"python": platform.python_version(), "contaccum": __version__}
    for name, distributions in _DISTRIBUTIONS.items():
        versions[name] = next(filter(None, map(_version, distributions)), None)
    return versions


def git_commit() -> str | None:
    """The commit of the checkout that contaccum runs from; None when it is installed, or git cannot tell."""
    root = Path(__file__).resolve().parents[2]
    # An installed contaccum may lie inside somebody else's checkout, whose commit would say nothing about it.
    if not (root / ".git").exists():
        return None
    try:
        answer = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip() or None


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
