"""Whether a passage holds an answer to a question, as DPR's evaluation decides it.

The two matches of Karpukhin et al. (arXiv 2004.04906): of tokens, after Unicode normalisation and without case; and of
a regular expression, for CuratedTREC, whose answers are patterns. Nothing is searched or averaged here.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Literal

import regex

from contaccum.errors import ConfigError, DataError

Match = Literal["string", "regex"]
MATCHES: tuple[Match, ...] = ("string", "regex")

# DrQA's simple tokenizer: runs of letters, digits and marks, and every other visible character by itself.
_TOKEN = regex.compile(r"[\p{L}\p{N}\p{M}]+|[^\p{Z}\p{C}]")
_FLAGS = regex.IGNORECASE | regex.UNICODE | regex.MULTILINE

_SECONDS = 10.0
"""A pattern that takes longer on one passage never ends."""


def answer_finder(answers: Sequence[str], match: Match = "string") -> Callable[[str], bool]:
    """A test of passages: whether any of the answers is in the text.

    "string": the answer's tokens occur in a row among the passage's, all of both in NFD and lower case. "regex": an
    answer is a pattern, sought without case anywhere in the text, both in NFD; one that cannot be compiled is never
    found, as in DPR. An answer without any token is never found either (DPR finds it everywhere).

    Raises:
        ConfigError: an unknown match.
        DataError: when the text is tested: a pattern that takes too long.
    """
    if match not in MATCHES:
        raise ConfigError(f"match must be {' or '.join(MATCHES)}, got {match!r}")
    if match == "string":
        wanted = [tokens for answer in answers if (tokens := _tokens(answer)) != "  "]
        return lambda text: any(answer in _tokens(text) for answer in wanted)
    patterns = [pattern for answer in answers if (pattern := compiled(answer)) is not None]
    return lambda text: any(_search(pattern, unicodedata.normalize("NFD", text)) for pattern in patterns)


def compiled(answer: str) -> regex.Pattern[str] | None:
    """The pattern that an answer is, None if it is not one."""
    try:
        return regex.compile(unicodedata.normalize("NFD", answer), _FLAGS)
    except regex.error:
        return None


def has_tokens(answer: str) -> bool:
    """Whether there is anything in the answer that a string match can find."""
    return _tokens(answer) != "  "


# Questions share passages, and each has its answers looked up one after another.
@lru_cache(maxsize=4096)
def _tokens(text: str) -> str:
    # No token holds a space, so a row of tokens is found as a text between spaces.
    return f" {' '.join(token.lower() for token in _TOKEN.findall(unicodedata.normalize('NFD', text)))} "


def _search(pattern: regex.Pattern[str], text: str) -> bool:
    try:
        return pattern.search(text, timeout=_SECONDS) is not None
    except TimeoutError:
        raise DataError(
            f"the answer {pattern.pattern[:60]!r} takes more than {_SECONDS:g} s to be sought in one passage (write "
            "it without nested repetitions)"
        ) from None
