"""From the name of a public BEIR data set, or a path, to a folder that `load_beir_folder` can read.

A path is used as it is. A name is fetched once, through BEIR's own downloader, and unpacked into a cache. Nothing is
fetched unless a name asks for it, and `beir` is imported only then.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from contaccum.data.beir_download import fetch
from contaccum.data.beir_folder import beir_file, is_beir_folder, split_file
from contaccum.data.records import one_line, quoted
from contaccum.errors import DataError

BEIR_NAMES = (
    "msmarco",
    "trec-covid",
    "nfcorpus",
    "bioasq",
    "nq",
    "hotpotqa",
    "fiqa",
    "signal1m",
    "trec-news",
    "robust04",
    "arguana",
    "webis-touche2020",
    "cqadupstack",
    "quora",
    "dbpedia-entity",
    "scidocs",
    "fever",
    "climate-fever",
    "scifact",
)

# Their owners ask for a registration or a licence, so BEIR publishes no archive of them.
NOT_PUBLIC = ("bioasq", "signal1m", "trec-news", "robust04")

# CQADupStack is the mean over twelve sets, each a BEIR folder of its own in one archive.
CQADUPSTACK_FORUMS = (
    "android",
    "english",
    "gaming",
    "gis",
    "mathematica",
    "physics",
    "programmers",
    "stats",
    "tex",
    "unix",
    "webmasters",
    "wordpress",
)


PUBLIC_NAMES = tuple(name for name in BEIR_NAMES if name not in NOT_PUBLIC)


def default_split(name_or_path: str | os.PathLike[str]) -> str:
    """The split that published scores are of: "dev" of MS MARCO, whose test split has 43 queries, "test" elsewhere."""
    return "dev" if os.path.basename(os.path.abspath(name_or_path)) == "msmarco" else "test"


def shipped_scifact() -> Path:
    """The folder of the SciFact copy that comes with this package."""
    return Path(__file__).parent / "scifact"


def cache_folder() -> Path:
    """Where fetched data sets are kept: $CONTACCUM_CACHE, or ~/.cache/contaccum/beir."""
    chosen = os.environ.get("CONTACCUM_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "contaccum" / "beir"


def resolve_beir_data(name_or_path: str | Path, split: str = "test", cache_dir: str | Path | None = None) -> Path:
    """The BEIR folder that `name_or_path` stands for.

    A folder that exists is used as it is, even when it is called like a public set. Otherwise the name of a
    public set is looked up in the cache, and fetched if it is not there; `cqadupstack/FORUM` names one of the
    twelve parts of CQADupStack.

    Args:
        name_or_path: a folder, or one of `BEIR_NAMES`.
        split: the split that is wanted; that the folder has it is checked here, before anything is loaded.
        cache_dir: where fetched sets are kept; None: `cache_folder()`.

    Raises:
        DataError: neither a folder nor a known name, a set that is not public, a set that could not be
            fetched, or a folder without corpus, queries or that split.
    """
    given = Path(name_or_path).expanduser()
    if os.path.exists(given):
        folder = given
    else:
        name, _, forum = str(name_or_path).partition("/")
        _refuse_unfetchable(name_or_path, name, forum)
        cache = Path(cache_dir).expanduser() if cache_dir is not None else cache_folder()
        folder = cache / name
        if not os.path.isdir(folder):
            fetch(name, cache, _instead(name))
        folder = folder / forum
    if not is_beir_folder(folder) and any(is_beir_folder(folder / f) for f in CQADUPSTACK_FORUMS):
        raise DataError(
            one_line(f"{folder}: holds several data sets (pass one sub-folder, such as {folder / 'android'})")
        )
    beir_file(folder, "corpus.jsonl")
    beir_file(folder, "queries.jsonl")
    split_file(folder, split)
    return folder


def _instead(name: str) -> str:
    """What to do where a set cannot be fetched."""
    mend = "unzip it somewhere yourself and pass --data PATH"
    if name == "scifact":
        mend += f", or use the copy that comes with this package: --data {shipped_scifact()}"
    return mend


def _refuse_unfetchable(given: str | Path, name: str, forum: str) -> None:
    if name == "cqadupstack" and forum in CQADUPSTACK_FORUMS:
        return
    if name == "cqadupstack":
        choices = ", ".join(f"cqadupstack/{f}" for f in CQADUPSTACK_FORUMS)
        raise DataError(one_line(f"{given}: CQADupStack is twelve data sets (name one: {choices})"))
    if name in NOT_PUBLIC and not forum:
        raise DataError(
            f"{name}: not public, so it cannot be downloaded (get it from its owner as BEIR's documentation "
            "tells, bring it into BEIR's layout, and pass --data PATH)"
        )
    if name not in BEIR_NAMES or forum:
        # The last part of a mistyped path is what a name would have been.
        wanted = Path(str(given).lower()).name
        close = difflib.get_close_matches(wanted, BEIR_NAMES, n=3) or list(BEIR_NAMES)
        raise DataError(
            one_line(
                f"{quoted(str(given), 200)}: neither a folder nor the name of a BEIR data set "
                f"(check the path, or use a name such as {', '.join(close)})"
            )
        )
