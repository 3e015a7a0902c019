"""Fetching a BEIR archive: through BEIR's own downloader, checked against the checksum that BEIR publishes, unpacked.

Which names there are, and where a set belongs, is `beir_names`' business. `beir` is imported only here.
"""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path

from contaccum.data.records import one_line
from contaccum.errors import DataError
from contaccum.untrusted import unpack

URL = "https://public.ukp.informatik.tu-darmstadt.de/thakur/BEIR/datasets/{name}.zip"

# The column "md5" of the table of data sets in the README of github.com/beir-cellar/beir.
ARCHIVE_MD5 = {
    "msmarco": "444067daf65d982533ea17ebd59501e4",
    "trec-covid": "ce62140cb23feb9becf6270d0d1fe6d1",
    "nfcorpus": "a89dba18a62ef92f7d323ec890a0d38d",
    "nq": "d4d3d2e48787a744b6f6e691ff534307",
    "hotpotqa": "f412724f78b0d91183a0e86805e16114",
    "fiqa": "17918ed23cd04fb15047f73e6c3bd9d9",
    "arguana": "8ad3e3c2a5867cdced806d6503f29b99",
    "webis-touche2020": "46f650ba5a527fc69e0a6521c5a23563",
    "cqadupstack": "4e41456d7df8ee7760a7f866133bda78",
    "quora": "18fb154900ba42a600f84b839c173167",
    "dbpedia-entity": "c2a39eb420a3164af735795df012ac2c",
    "scidocs": "38121350fc3a4d2f48850f6aff52e4a9",
    "fever": "5a818580227bfb4b35bb6fa46d9b6c03",
    "climate-fever": "8b66f0a9126c521bae2bde127b4dc99d",
    "scifact": "5f7d1de60b170fc8027bb7898e2efca1",
}


def fetch(name: str, cache: Path, instead: str) -> None:
    """Download and unpack the set `name` to `cache / name`: afterwards all of it is there, or nothing.

    Args:
        instead: what a user can do when it fails; ends the message.

    Raises:
        DataError: it could not be downloaded, has another checksum, or would write outside its folder.
    """
    url = URL.format(name=name)
    try:
        from beir.util import download_url

        cache.mkdir(parents=True, exist_ok=True)
        # BEIR's downloader takes whatever the server sends for the archive. So it works in a folder of its own, which
        # goes with whatever is half-finished or wrong in it, and only a complete set moves to its place.
        with tempfile.TemporaryDirectory(dir=cache, prefix=".fetching-") as workplace:
            archive = Path(workplace) / f"{name}.zip"
            download_url(url, str(archive))
            _check_archive(archive, name, url, instead)
            unpack(archive, workplace)
            unpacked = Path(workplace) / name
            if not unpacked.is_dir():
                raise OSError(f"the archive holds no folder {name}")
            try:
                unpacked.replace(cache / name)
            except OSError:
                # Another process was faster; what it left is as good as ours.
                if not (cache / name).is_dir():
                    raise
    except DataError as error:
        raise DataError(one_line(f"{name}: {error}")) from error
    # Anything may come out of a download (no network, a full disk, beir without its `requests`), and each is the same
    # to the user: the data is not there.
    except Exception as error:
        if isinstance(error, ImportError):
            instead = f"install {error.name or 'what is missing'} with pip, or {instead}"
        # A failed connection names its host and retries at length; that it failed is what matters.
        offline = isinstance(error, ConnectionError) or type(error).__name__ in ("ConnectionError", "ConnectTimeout")
        reason = "no connection" if offline else one_line(f"{type(error).__name__}: {error}")[:200]
        raise DataError(one_line(f"{name}: could not be downloaded from {url}: {reason} ({instead})")) from error


def _check_archive(archive: Path, name: str, url: str, instead: str) -> None:
    """Raise `DataError` for other bytes than BEIR's."""
    found = _md5(archive)
    if found != ARCHIVE_MD5[name]:
        raise DataError(
            one_line(
                f"what came from {url} has the MD5 checksum {found} and not {ARCHIVE_MD5[name]}, so it is not "
                f"BEIR's archive and was removed (try again later, or {instead})"
            )
        )


def _md5(path: Path) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()
