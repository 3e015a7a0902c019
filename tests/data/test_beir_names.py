"""Invariants of looking up BEIR data: paths stay as they are, and a failed download leaves one line and no file."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import types
import zipfile
from pathlib import Path

import pytest

from contaccum.data import BEIR_NAMES, load_beir_folder, resolve_beir_data, shipped_scifact
from contaccum.data.beir_download import ARCHIVE_MD5
from contaccum.data.beir_names import NOT_PUBLIC, PUBLIC_NAMES, cache_folder, default_split
from contaccum.errors import DataError


def fill(folder: Path) -> Path:
    (folder / "qrels").mkdir(parents=True)
    (folder / "corpus.jsonl").write_text('{"_id": "d", "title": "", "text": "t"}\n')
    (folder / "queries.jsonl").write_text('{"_id": "q", "text": "t"}\n')
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq\td\t1\n")
    return folder


class Downloader:
    """Stands where `beir.util` stands; no test reaches the network."""

    def __init__(self) -> None:
        self.urls: list[str] = []
        self.parts: tuple[str, ...] = ("",)
        self.members: tuple[str, ...] = ()
        self.error: Exception | None = None
        self.checksums: dict[str, str] = {}

    def download_url(self, url: str, save_path: str) -> None:
        self.urls.append(url)
        archive = Path(save_path)
        archive.write_bytes(b"half a zip")
        if self.error is not None:
            raise self.error
        with tempfile.TemporaryDirectory() as made, zipfile.ZipFile(archive, "w") as content:
            for part in self.parts:
                fill(Path(made) / archive.stem / part)
            for file in filter(Path.is_file, Path(made).rglob("*")):
                content.write(file, file.relative_to(made))
            for member in self.members:
                content.writestr(member, "x")
        self.checksums.setdefault(archive.stem, hashlib.md5(archive.read_bytes()).hexdigest())


@pytest.fixture
def downloader(monkeypatch, tmp_path):
    fake = Downloader()
    module = types.ModuleType("beir.util")
    module.download_url = fake.download_url  # type: ignore[attr-defined]  # a module made by hand
    # What is downloaded has the right checksum, unless a test says otherwise first.
    monkeypatch.setattr("contaccum.data.beir_download.ARCHIVE_MD5", fake.checksums)
    monkeypatch.setitem(sys.modules, "beir", types.ModuleType("beir"))
    monkeypatch.setitem(sys.modules, "beir.util", module)
    monkeypatch.setenv("CONTACCUM_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return fake


def test_a_folder_is_used_as_it_is_even_when_it_is_called_like_a_public_set(tmp_path, downloader):
    folder = fill(tmp_path / "nfcorpus")
    assert resolve_beir_data(folder) == folder
    assert resolve_beir_data("nfcorpus") == Path("nfcorpus")
    assert resolve_beir_data(shipped_scifact(), "train") == shipped_scifact()
    assert downloader.urls == []


def test_a_name_is_fetched_once_and_then_taken_from_the_cache(tmp_path, downloader):
    folder = resolve_beir_data("nfcorpus")
    assert folder == tmp_path / "cache" / "nfcorpus"
    assert load_beir_folder(folder).qrels == {"q": {"d": 1}}
    assert [p.name for p in (tmp_path / "cache").iterdir()] == ["nfcorpus"]
    assert resolve_beir_data("nfcorpus") == folder
    expected = "https://public.ukp.informatik.tu-darmstadt.de/thakur/BEIR/datasets/nfcorpus.zip"
    assert downloader.urls == [expected]


@pytest.mark.parametrize("error", [OSError("no\nroute"), zipfile.BadZipFile("no zip"), ImportError("requests")])
def test_failed_download_is_one_line_and_leaves_nothing_behind(tmp_path, downloader, error):
    downloader.error = error
    with pytest.raises(DataError) as caught:
        resolve_beir_data("fiqa")
    message = str(caught.value)
    assert message.startswith("fiqa: could not be downloaded from https://")
    assert "--data PATH" in message and "\n" not in message and type(error).__name__ in message
    assert str(shipped_scifact()) not in message
    assert list((tmp_path / "cache").iterdir()) == []
    downloader.error = None
    assert resolve_beir_data("fiqa").is_dir()


def test_an_archive_with_another_checksum_is_refused_and_removed(tmp_path, downloader):
    downloader.checksums["fiqa"] = "0" * 32
    with pytest.raises(DataError, match=r"fiqa: what came from https://.* MD5 checksum [0-9a-f]{32} and not 0{32}"):
        resolve_beir_data("fiqa")
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize(
    "member", ["../outside", "fiqa/../../outside", "/outside", "C:\\outside", "a\\..\\..\\outside"]
)
def test_an_archive_that_would_write_outside_its_folder_is_refused_before_it_is_unpacked(tmp_path, downloader, member):
    downloader.members = (member,)
    with pytest.raises(DataError, match="leads out of"):
        resolve_beir_data("fiqa")
    assert list((tmp_path / "cache").iterdir()) == [] and not list(tmp_path.rglob("outside"))


def test_every_public_set_has_a_checksum():
    assert set(ARCHIVE_MD5) == set(PUBLIC_NAMES) == set(BEIR_NAMES) - set(NOT_PUBLIC)
    assert all(len(md5) == 32 and int(md5, 16) for md5 in ARCHIVE_MD5.values())


@pytest.mark.parametrize(("given", "split"), [("msmarco", "dev"), ("/data/msmarco/", "dev"), ("nq", "test")])
def test_ms_marco_is_scored_on_dev_and_the_others_on_test(given, split):
    assert default_split(given) == split


def test_downloader_without_its_own_dependency_names_what_to_install(downloader):
    downloader.error = ModuleNotFoundError("No module named 'requests'", name="requests")
    with pytest.raises(DataError, match=r"\(install requests with pip, or unzip it"):
        resolve_beir_data("fiqa")


def test_failed_download_of_scifact_names_the_shipped_copy(downloader):
    downloader.error = OSError("offline")
    with pytest.raises(DataError) as caught:
        resolve_beir_data("scifact")
    assert f"--data {shipped_scifact()}" in str(caught.value)
    assert load_beir_folder(shipped_scifact()).name == "scifact"


@pytest.mark.parametrize("name", NOT_PUBLIC)
def test_a_set_that_is_not_public_is_refused_before_any_download(downloader, name):
    with pytest.raises(DataError, match=f"{name}: not public"):
        resolve_beir_data(name)
    assert downloader.urls == []


@pytest.mark.parametrize(
    ("wrong", "right"), [("scifct", "scifact"), ("Trec-Covid", "trec-covid"), ("data/nfcorpsu", "nfcorpus")]
)
def test_unknown_name_names_the_closest(downloader, wrong, right):
    with pytest.raises(DataError, match=f"'{wrong}': neither a folder nor .* such as {right}"):
        resolve_beir_data(wrong)
    assert downloader.urls == []


@pytest.mark.parametrize("wrong", ["", "zzzz", "x" * 5000, "a\0b", "../msmarco/"])
def test_nonsense_is_a_data_error(downloader, wrong):
    with pytest.raises(DataError):
        resolve_beir_data(wrong)
    assert downloader.urls == []


def test_cqadupstack_is_twelve_sets_and_each_can_be_named(tmp_path, downloader):
    with pytest.raises(DataError, match=r"twelve data sets .*cqadupstack/android, .*cqadupstack/wordpress"):
        resolve_beir_data("cqadupstack")
    assert downloader.urls == []
    downloader.parts = ("android", "gis")
    assert resolve_beir_data("cqadupstack/gis") == tmp_path / "cache" / "cqadupstack" / "gis"
    with pytest.raises(DataError, match="holds several data sets"):
        resolve_beir_data(tmp_path / "cache" / "cqadupstack")
    assert len(downloader.urls) == 1


def test_missing_split_is_refused_before_anything_is_loaded(tmp_path, downloader):
    with pytest.raises(DataError, match="no split 'dev'; it has: test"):
        resolve_beir_data(fill(tmp_path / "set"), "dev")


def test_cache_is_in_the_home_unless_the_environment_says_otherwise(monkeypatch, tmp_path):
    monkeypatch.setenv("CONTACCUM_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("CONTACCUM_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "contaccum" / "beir"


def test_the_nineteen_names_of_the_beir_benchmark_are_known():
    assert len(set(BEIR_NAMES)) == len(BEIR_NAMES) == 19
    assert set(NOT_PUBLIC) < set(BEIR_NAMES)


def test_importing_the_readers_imports_neither_beir_nor_datasets():
    code = (
        "import sys, contaccum.data; "
        "print(sorted({'beir', 'datasets', 'torch', 'requests', 'faiss'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
