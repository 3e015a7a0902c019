"""Invariants of tables: csv, parquet and Hugging Face datasets give every row or report it, with its number."""

from __future__ import annotations

import pytest
from data_files import RECORDS, delimited, put, put_parquet, put_saved, read, rows, table

from contaccum.data import Record, RecordReport, load_training_data, read_records, sniff_format
from contaccum.errors import DataError


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.csv.gz", "a.data"])
@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_delimiter_is_told_from_the_header(tmp_path, name, delimiter):
    path = put(tmp_path / name, delimited(delimiter))
    assert sniff_format(path) == "csv" and read(path)[0] == RECORDS


def test_quoted_cells_hold_delimiters_quotes_and_lines_and_the_line_is_that_of_the_start(tmp_path):
    text = 'query,positive\nq1,"a, ""b""\n\nc"\n\nq2,\nq3,"d"\n'
    path = put(tmp_path / "a.csv", text)
    report = RecordReport("skip")
    assert list(read_records(path, report=report)) == [Record("q1", ['a, "b"\n\nc'], []), Record("q3", ["d"], [])]
    assert [(entry.line, entry.reason) for entry in report.entries] == [(6, "empty positive")]


def test_an_open_quote_costs_its_own_record_and_none_after_it(tmp_path):
    path = put(tmp_path / "a.csv", 'query,positive\nq1,"open\nq2,two\nq3,"thr"ee\nq4,four\nq5,"open too\n')
    report = RecordReport("skip")
    assert [r.query for r in read_records(path, report=report)] == ["q2", "q4"]
    assert [entry.line for entry in report.entries] == [2, 4, 6]
    assert report.by_reason == {"broken quoting": 3} and report.seen == 5


def test_an_open_quote_is_looked_for_within_a_bounded_number_of_lines(tmp_path, monkeypatch):
    monkeypatch.setattr("contaccum.data.delimited.LONGEST_RECORD_LINES", 10)
    path = put(tmp_path / "a.csv", 'query,positive\nq0,"open\n' + "".join(f"q{i},p\n" for i in range(1, 30)))
    report = RecordReport("skip")
    assert len(list(read_records(path, report=report))) == 29 and report.reported == 1


def test_parquet_rows_have_numbers_across_row_groups_and_lists_are_all_read(tmp_path):
    records = [{"query": f"q{i}", "pos": ["p", "p2"], "neg": [{"title": "T", "text": "n"}]} for i in range(7)]
    records[5]["pos"] = ["p", None]
    path = put_parquet(tmp_path / "a.parquet", records, row_group_size=2)
    report = RecordReport("skip")
    found = list(read_records(path, report=report))
    assert found[0] == Record("q0", ["p", "p2"], ["T n"]) and len(found) == 6
    assert [(entry.line, entry.reason) for entry in report.entries] == [(6, "missing pos")]


def test_damaged_row_group_is_counted_row_by_row_and_the_next_is_read(tmp_path):
    records = [{"query": f"q{i}" * 50, "positive": f"p{i}" * 50} for i in range(9)]
    path = put_parquet(tmp_path / "a.parquet", records, row_group_size=3, compression="gzip", use_dictionary=False)
    import pyarrow.parquet as pq

    column = pq.ParquetFile(path).metadata.row_group(1).column(0)
    data = bytearray(path.read_bytes())
    data[column.data_page_offset : column.data_page_offset + column.total_compressed_size] = (
        b"\xff" * column.total_compressed_size
    )
    path.write_bytes(data)
    report = RecordReport("skip")
    found = list(read_records(path, report=report))
    assert [r.query[:2] for r in found] == ["q0", "q1", "q2", "q6", "q7", "q8"]
    assert (report.seen, report.used, report.reported) == (9, 6, 3)
    with pytest.raises(DataError, match=r"a\.parquet:4: damaged row group: 3 rows cannot be read"):
        list(read_records(path))


def test_bytes_that_are_no_text_in_one_row_of_parquet_cost_that_row(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    texts = pa.array([b"p0", b"\xff\xfe", b"p2"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"query": ["q0", "q1", "q2"], "positive": texts}), tmp_path / "a.parquet")
    report = RecordReport("skip")
    assert [r.query for r in read_records(tmp_path / "a.parquet", report=report)] == ["q0", "q2"]
    assert [(entry.line, entry.reason) for entry in report.entries] == [(2, "not UTF-8 text")]


def test_saved_dataset_dict_gives_the_split_and_names_those_it_has(tmp_path):
    from datasets import Dataset, DatasetDict

    both = DatasetDict({"train": Dataset.from_list(rows()), "dev": Dataset.from_list(rows()[:1])})
    both.save_to_disk(str(tmp_path / "both"))
    assert sniff_format(tmp_path / "both") == "hub"
    assert read(tmp_path / "both")[0] == RECORDS
    assert read(tmp_path / "both", split="dev")[0] == RECORDS[:1]
    with pytest.raises(DataError, match="both: no split 'test'; it has: train, dev"):
        read(tmp_path / "both", split="test")


def test_a_list_that_arrow_keeps_as_an_object_of_lists_is_read_as_a_list(tmp_path):
    record = {"question": "q", "context": "c", "answers": {"text": ["a1", "a2"], "answer_start": [0, 1]}}
    path = put_saved(tmp_path / "squad", [record])
    assert read(path, columns={"positive": "answers"})[0] == [Record("q", ["a1", "a2"], [])]


class Hub:
    """Stands where `datasets.load_dataset` stands; no test reaches the network."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.error: Exception | None = None
        monkeypatch.setattr("datasets.load_dataset", self.load)
        monkeypatch.setattr("contaccum.data.arrow_tables._require_hub", lambda source, name: None)

    def load(self, name, config=None, *, split, **options):
        from datasets import Dataset

        self.calls.append((name, config, split, options))
        if self.error is not None:
            raise self.error
        return Dataset(table())


@pytest.mark.parametrize(
    ("source", "call"),
    [
        ("owner/name", ("owner/name", None, "train", {})),
        ("owner/name:config", ("owner/name", "config", "train", {})),
        ("name", ("name", None, "train", {})),
    ],
)
def test_a_name_that_is_no_path_is_a_dataset_of_the_hub(tmp_path, monkeypatch, source, call):
    hub = Hub(monkeypatch)
    monkeypatch.chdir(tmp_path)
    assert read(source)[0] == RECORDS and hub.calls == [call]
    assert load_training_data(source, num_hard_negatives=1).data_format == "hub"
    put_saved(tmp_path / source)
    assert read(source)[0] == RECORDS and len(hub.calls) == 3


def test_code_that_comes_with_a_dataset_is_refused_where_it_could_run(monkeypatch):
    hub = Hub(monkeypatch)

    def older(name, config=None, *, split, trust_remote_code=None):
        return hub.load(name, config, split=split, trust_remote_code=trust_remote_code)

    monkeypatch.setattr("datasets.load_dataset", older)
    read("owner/name")
    assert hub.calls == [("owner/name", None, "train", {"trust_remote_code": False})]


def test_what_the_hub_refuses_is_one_line(monkeypatch):
    hub = Hub(monkeypatch)
    hub.error = ValueError("Config name is missing.\nPlease pick one among: ['a', 'b']")
    with pytest.raises(DataError) as caught:
        read("owner/name")
    message = str(caught.value)
    assert message.startswith("owner/name: no such file or folder, and it cannot be loaded as a Hugging Face dataset")
    assert "\n" not in message and "pick one among: ['a', 'b']" in message


def test_offline_a_name_is_refused_at_once_and_the_path_is_doubted_too(monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(DataError, match=r"^no/such: no such file or folder, and .* cannot be reached .*HF_HUB_OFFLINE"):
        read("no/such")
