"""The result of one evaluation and its files: a JSON record, and beside it the run in TREC format.

Everything needed to reproduce or to doubt a number is in the record; nothing of the environment is. No metric is
computed here.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote, unquote

from contaccum.data.records import (
    Fault,
    RecordReport,
    parse_number,
    parse_rows,
    quoted,
    read_lines,
    split_cells,
)
from contaccum.errors import DataError
from contaccum.evaluation.metrics import trec_order
from contaccum.files import provenance, read_json, redact, write_text

Run = dict[str, dict[str, float]]
"""{query id: {document id: score}}"""

_ENCODED = "percent-encoded:"  # marks an id that a TREC line could not hold as it is


@dataclass
class EvaluationResult:
    """One model, or one run of another system, on one data set.

    Attributes:
        metrics: {"NDCG@10": ...}, means over the judged queries, unrounded.
        per_query: {query id: {metric: value}}.
        run: what was scored; goes to the TREC file, not into the record.
        data: name, split, path, documents, queries, judgements, fingerprint.
        model: name, fingerprint, similarity, dimension.
        tokenisation: sha256 of how texts become vectors beside the weights; None where nobody knows.
        search: index, index_parameters, k, gpus; of an approximate index also its recall against exact search.
        served: the forms that embeddings were scored in too, and a row for each; see `beir.score_served`.
        timing: seconds of encoding, indexing, searching and measuring recall.
        precision: "float32", the type that the encoder ran in under autocast, or "unknown" of a run.
    """

    metrics: dict[str, float]
    per_query: dict[str, dict[str, float]]
    run: Run
    data: dict[str, Any]
    model: dict[str, Any]
    search: dict[str, Any]
    tokenisation: str | None = None
    served: dict[str, Any] = field(default_factory=dict)
    timing: dict[str, float] = field(default_factory=dict)
    precision: str = "unknown"
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    def record(self) -> dict[str, Any]:
        """What the JSON file holds: every attribute but the run, and what wrote it."""
        return {
            item.name: getattr(self, item.name) for item in fields(self) if item.name != "run"
        } | provenance()


def write_result(result: EvaluationResult, path: str | os.PathLike[str]) -> tuple[Path, Path]:
    """Write the record to ``path`` and the run to ``<stem>.trec`` beside it; returns both paths.

    Each file appears whole or not at all, and the record last: where it is, the run is.
    """
    path = Path(path)
    run_path = path.with_suffix(".trec")
    tag = (
        re.sub(r"\s+", "_", Path(redact(str(result.model.get("name") or "contaccum"))).name)
        or "contaccum"
    )
    write_text(run_path, trec_lines(result.run.items(), tag))
    # Scores by query are as large as the data and hold nothing but ids: they are not searched for credentials.
    record = {
        key: value if key == "per_query" else redact(value)
        for key, value in result.record().items()
    }
    write_text(path, [json.dumps(record, indent=1, allow_nan=False, ensure_ascii=False), "\n"])
    return path, run_path


def read_result(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The record that `write_result` wrote, of this version or of one before.

    Raises:
        DataError: the file is missing, or is something else.
    """
    record = read_json(path)
    if not all(isinstance(record.get(key), dict) for key in ("metrics", "per_query", "data")):
        raise DataError(
            f"{path}: not a results file, which has metrics, per_query and data; evaluate again"
        )
    return record


def result_files(path: Path) -> list[Path]:
    """The record that ``path`` is, or the records that lie beside a table of several and are listed in it.

    Raises:
        DataError: the file cannot be read.
    """
    content = read_json(path)
    if "sets" not in content:
        return [path]
    parts = [part for row in content["sets"] for part in row.get("parts", [row])]
    return [
        path.parent / Path(part["file"]).name for part in parts
    ]  # the name alone: only what lies beside it


def update_card(
    path: Path, rows: Iterable[Mapping[str, Any]], names: Iterable[str], section: str
) -> None:
    """Put the metrics ``names`` of a table's rows into a model card's metadata, in place of those of the same data and
    metrics, and a section about them at its end, in place of the one of before."""
    from huggingface_hub import EvalResult, ModelCard

    card, found = ModelCard.load(path), []
    for row, name in ((row, name) for row in rows for name in names):
        about = {
            "dataset_type": row["name"],
            "dataset_name": row["name"],
            "dataset_split": row["split"],
        }
        about |= {"task_type": "information-retrieval", "task_name": "Information Retrieval"}
        metric = {
            "metric_type": name.lower(),
            "metric_name": name,
            "metric_value": row["metrics"][name],
        }
        found.append(EvalResult(**about, **metric))
    old = [
        one
        for one in card.data.eval_results or []
        if not any(map(one.is_equal_except_value, found))
    ]
    card.data.eval_results, card.data.model_name = (
        old + found,
        card.data.model_name or path.resolve().parent.name,
    )
    rest = re.sub(
        r"\n*<!-- contaccum evaluate -->.*?<!-- until here -->\n", "\n", card.text, flags=re.DOTALL
    )
    card.text = f"{rest.rstrip()}\n\n<!-- contaccum evaluate -->\n{section}\n<!-- until here -->\n"
    write_text(path, redact(str(card)))


def agrees(record: Mapping[str, Any], plan: Mapping[str, Any]) -> bool:
    """Whether a record says all that a plan says, in nested dicts too; it may say more."""
    return all(
        agrees(record.get(key) or {}, value)
        if isinstance(value, dict)
        else record.get(key) == value
        for key, value in plan.items()
    )


def trec_lines(run: Iterable[tuple[str, Mapping[str, float]]], tag: str) -> Iterator[str]:
    """Yield lines ``qid Q0 docid rank score tag`` of (qid, {docid: score}).

    The order is trec_eval's (ties by id, descending). Scores have nine digits, which is all of a
    float32. Ids are written by `_encode_id`.
    """
    for qid, hits in run:
        query = _encode_id(qid)
        for rank, (docid, score) in enumerate(trec_order(hits), start=1):
            yield f"{query} Q0 {_encode_id(docid)} {rank} {score:.9g} {tag}\n"


def _encode_id(identifier: str) -> str:
    """Return the id as it is or, where a TREC line cannot hold it, percent-encoded after a marker.

    A TREC line is split at white space, so an id that is empty or holds white space must be
    encoded. The marker is needed because ids of other systems may hold ``%20`` literally, as URLs
    do: such ids must not be decoded.
    """
    # isprintable() is False for all white space but the blank, and for a byte-order mark, which
    # readers drop.
    fits = identifier.isprintable() and " " not in identifier and identifier != ""
    if fits and not identifier.startswith(_ENCODED):
        return identifier
    return _ENCODED + quote(identifier)


def _decode_id(cell: str) -> str:
    """Return the id that `_encode_id` wrote as this cell."""
    if cell.startswith(_ENCODED):
        return unquote(cell.removeprefix(_ENCODED))
    return cell


def read_trec_run(
    path: str | os.PathLike[str], on_bad_record: Literal["stop", "skip"] = "stop"
) -> Run:
    """Read a run of any system, plain or gzip.

    Ids that `trec_lines` has encoded are decoded; all others stay as they are.
    Ranks are not believed: as in trec_eval, the order is that of the scores.

    Raises:
        DataError: the file cannot be used, or a bad line under "stop": not six columns, a score that is no finite
            number, or a document twice for one query.
    """
    report = RecordReport(on_bad_record)
    run: Run = {}

    def hit(line: str) -> tuple[str, str, float]:
        cells = split_cells(line, 6, None)
        query = _decode_id(cells[0])
        document = _decode_id(cells[2])
        if document in run.get(query, {}):
            raise Fault("duplicate document", f"{quoted(document)} of query {quoted(query)}")
        return query, document, parse_number(cells[4])

    for query, document, score in parse_rows(path, read_lines(path), hit, report):
        run.setdefault(query, {})[document] = score
    return run
