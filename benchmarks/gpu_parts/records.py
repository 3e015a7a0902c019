"""Records of the parts of benchmarks/gpu.py: their content, and their files."""

from __future__ import annotations

import math
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from contaccum.files import provenance, read_json, write_json
from gpu_parts.settings import METHOD_SECONDS, PARTS_WITH_SIZES, Run, Sizes

Record = dict[str, Any]

# Libraries of some parts, besides those of `contaccum.files.package_versions`.
_LIBRARIES = ("peft", "bitsandbytes", "triton")


def describe_run(run: Run) -> Record:
    """Return the entries that are the same in the records of all parts."""
    entries = {
        "date": datetime.now(UTC).date().isoformat(),
        "command": shlex.join(["python", *sys.argv]),
        "device": describe_device(run.device),
        "sizes": asdict(run.sizes),
        "is_tiny": run.is_tiny,
        **provenance(),
    }
    for name in _LIBRARIES:
        with suppress(metadata.PackageNotFoundError):
            entries["versions"][name] = metadata.version(name)
    return entries


def describe_device(device: torch.device) -> dict[str, Any]:
    """Describe the device for a record."""
    if device.type != "cuda":
        return {"type": device.type, "name": platform.processor(), "cpus": os.cpu_count()}
    properties = torch.cuda.get_device_properties(device)
    return {
        "type": device.type,
        "name": properties.name,
        "memory_mb": properties.total_memory // 2**20,
        "capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
        "cpus": os.cpu_count(),
    }


def write_record(record: Record, folder: Path) -> None:
    """Write the record of a part.

    A complete result replaces PART.json. A partial result is written to PART.partial.json, so that
    an earlier complete result is kept, until the part is complete. A record without a result
    replaces only an earlier one without a result.
    """
    file, partial_file = list_files(folder, record["part"])
    content = replace_non_finite(record)
    if record["is_partial"]:
        write_json(partial_file, content)
    elif record["measured"]:
        write_json(file, content)
        partial_file.unlink(missing_ok=True)
    elif not file.exists() or not read_json(file)["measured"]:
        write_json(file, content)


def list_files(folder: Path, part: str) -> tuple[Path, Path]:
    """Return the files of the complete and of the partial record of a part."""
    return folder / f"{part}.json", folder / f"{part}.partial.json"


def replace_non_finite(content: Any) -> Any:
    """Replace NaN and infinite numbers by their texts, because JSON cannot represent them."""
    if isinstance(content, dict):
        return {key: replace_non_finite(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [replace_non_finite(item) for item in content]
    if isinstance(content, float) and not math.isfinite(content):
        return str(float(content))
    return content


def read_records(folder: Path, parts: Sequence[str]) -> dict[str, Record | None]:
    """Read the record of each part that docs/gpu.md shows; None for a part that has none."""
    records: dict[str, Record | None] = {}
    for part in parts:
        records[part] = None
        for file in list_files(folder, part):
            if not file.exists():
                continue
            record = read_json(file)
            if not is_for_page(record):
                continue
            earlier_record = records[part]
            # A partial result is shown instead of a reason why there is none.
            if earlier_record is None or not earlier_record["measured"]:
                records[part] = record
    return records


def is_for_page(record: Record) -> bool:
    """Return True for a run on a GPU with the settings that docs/gpu.md names.

    The model of study_cell may be any, because its table names it.
    """
    if record["is_tiny"] or record["device"]["type"] != "cuda":
        return False
    if record["part"] == "study_cell" and record["measured"]:
        return record["result"]["budget_seconds"] == METHOD_SECONDS
    if record["part"] not in PARTS_WITH_SIZES:
        return True
    return all(record["sizes"][name] == value for name, value in asdict(Sizes()).items())
