"""Tables of docs/gpu.md, from the records that benchmarks/gpu.py has written."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from contaccum.evaluation.results import markdown_table

_HASH_LENGTH = 8  # characters of a commit's hash that are shown

Record = dict[str, Any]
Rows = Iterator[tuple[str | None, ...]]
"""The rows of a table; the first one is the header."""
Number = float | str
"""A number, or the text "NaN" or "Infinity", which JSON cannot represent as numbers."""


def make_tables(records: dict[str, Record | None]) -> dict[str, str]:
    """Return {name of a table: its Markdown}: one of all parts, and one for each part."""
    tables = {"runs": make_runs_table(records)}
    for part, record in records.items():
        tables[part] = "" if record is None else make_part_table(part, record)
    return tables


def make_runs_table(records: dict[str, Record | None]) -> str:
    """Return the outcome of all parts that have run, and the names of the others."""
    rows = []
    for part, record in records.items():
        if record is not None:
            seconds, commit = format_number(record["seconds"]), record["git_commit"] or "unknown"
            row = [f"[`{part}`](#{part})", get_outcome(record), record["device"]["name"]]
            rows.append([*row, record["date"], f"`{commit[:_HASH_LENGTH]}`", f"{seconds} s"])
    table = markdown_table(["part", "result", "GPU", "date", "commit", "time"], rows)
    not_run = [f"`{part}`" for part, record in records.items() if record is None]
    return f"{table}\n\nNot yet run: {', '.join(not_run)}." if not_run else table


def get_outcome(record: Record) -> str:
    """Return "measured", "not measured", "passed" or "failed"."""
    result = record["result"]
    if "passed" in result:
        return format_passed(result["passed"])
    return "measured" if result["cases"] else "not measured"


def make_part_table(part: str, record: Record) -> str:
    """Return the table of a part, with what was not run and what has failed."""
    result = record["result"]
    content = ""
    if result["cases"]:
        header, *rows = _TABLES[part](result)
        content = markdown_table(header, rows)
    for name, case in result["cases"].items():
        if "verdict" in case:
            content += f"\n\n{case['verdict']['line']}. It took {format_number(case['seconds'])} s."
        if "error" in case:
            error, limit = map(format_error, (case["error"], case["limit"]))
            content += f"\n\nError of the {name}: {error}; the limit is {limit}."
    if result.get("not_run"):
        content += f"\n\nNot run: {result['not_run']}."
    if result.get("failures"):
        content += f"\n\nFailed: {'; '.join(result['failures'])}."
    return content.strip()


def list_loss_exact(result: Record) -> Rows:
    """Yield the errors of the gradients in each precision."""
    yield "precision, drift compensation", "queries", "passages", "negatives", "limit", ""
    for name, case in result["cases"].items():
        errors = map(format_error, case["relative_errors"].values())
        yield name, *errors, format_error(case["limit"]), format_passed(case["passed"])


def list_host_syncs(result: Record) -> Rows:
    """Yield the places where the host waits for the device."""
    yield "drift compensation", "micro-steps", "result"
    for name, case in result["cases"].items():
        places = ", ".join(f"`{place}`" for place in case["waits"])
        outcome = f"waits at {places}" if places else "the host never waits"
        yield f"`{name}`", str(case["micro_steps"]), outcome


def list_updates(result: Record) -> Rows:
    """Yield speed and memory of an update by encoder, micro-batch and method."""
    profiled = ("launches per micro-step", "GPU busy")
    yield "encoder", "n", "method", "pairs/s", "relative time", "peak memory", *profiled
    cases = sorted(result["cases"].values(), key=lambda case: (case["backbone"], case["local"]))
    for case in cases:
        for method, figures in case["methods"].items():
            launches = figures.get("launches_per_micro_step")
            busy_share = figures.get("busy_share")
            yield (
                case["backbone"],
                str(case["local"]),
                f"`{method}`",
                format_number(figures["pairs_per_second"]),
                f"{figures['ratio']['median']:.2f}",
                format_mb(figures["peak_mb"]),
                None if launches is None else f"{launches:,.0f}",
                None if busy_share is None else f"{busy_share:.0%}",
            )


def list_out_of_memory(result: Record) -> Rows:
    """Yield what the runs did that ran out of memory."""
    sizes = ("micro-batch that does not fit", "micro-batch at the end")
    yield "case", *sizes, "pairs of each update", "difference of the weights", ""
    for name, case in result["cases"].items():
        difference = case["relative_difference"]
        yield (
            name,
            str(case["too_large"]),
            str(case["micro_batch"]),
            ", ".join(map(str, case["pairs_per_update"])),
            None if difference is None else format_error(difference),
            format_passed(case["passed"]),
        )


def list_compile(result: Record) -> Rows:
    """Yield times and graphs of the encoders by length."""
    figures = ("seconds", "relative", "first update", "graphs compiled")
    yield "tokens of queries, passages", "encoder", *figures
    for name, case in result["cases"].items():
        for encoder, seconds in case["seconds"].items():
            ratio = case["ratio"].get(encoder)
            yield (
                name,
                encoder,
                format_number(seconds["median"]),
                None if ratio is None else f"{ratio['median']:.2f}",
                format_number(case["first_seconds"][encoder]),
                str(case["new_graphs"].get(encoder, "")),
            )


def list_encoding(result: Record) -> Rows:
    """Yield rates of encoding by encoder, precision and length."""
    rates = ("texts/s, encode", "tokens/s, encode", "texts/s, forward alone")
    yield "encoder", "precision", "tokens", *rates, "encode / forward"
    for case in result["cases"].values():
        yield (
            case["backbone"],
            case["precision"],
            str(case["tokens_per_text"]),
            format_number(case["encode_texts_per_second"]),
            format_number(case["encode_tokens_per_second"]),
            format_number(case["forward_texts_per_second"]),
            f"{case['share_of_forward']:.0%}",
        )


def list_query_side(result: Record) -> Rows:
    """Yield times and memory of a micro-step by store and place."""
    figures = ("seconds per micro-step", "first micro-step", "peak memory")
    yield "documents", "store", "documents in the memory of", *figures
    for case in result["cases"].values():
        if "error" in case:
            continue
        yield (
            format_number(case["documents"]),
            f"{case['dtype']}, {format_number(case['store_bytes'] / 1e9)} GB",
            "GPU" if case["is_in_gpu_memory"] else "host",
            format_number(case["seconds"]["median"]),
            format_number(case["warm_up_seconds"][0]),
            format_mb(case["peak_mb"]),
        )


def list_search(result: Record) -> Rows:
    """Yield times and recall of each index."""
    sizes = result["sizes"]
    times = ("building", "first search", f"seconds for {sizes['queries']:,} queries")
    yield f"index of {sizes['documents']:,} documents", *times, "queries/s", f"recall@{sizes['k']}"
    for name, case in result["cases"].items():
        building = None if name.startswith("Flat") else format_number(case["build_seconds"])
        yield (
            name,
            building,
            format_number(case["first_seconds"]),
            format_number(case["seconds"]["median"]),
            format_number(case["queries_per_second"]),
            None if case["recall"] is None else f"{case['recall']:.3f}",
        )


def list_fit(result: Record) -> Rows:
    """Yield the scores of a fit."""
    for case in result["cases"].values():
        metrics = [name for name in case["scores"][0] if "@" in name]
        yield f"{case['model']}, {case['budget']}", "dev", *metrics
        for system in case["scores"]:
            scores = [system[name] for name in ("dev", *metrics)]
            yield system["name"], *(None if x is None else f"{100 * x:.1f}" for x in scores)


def format_passed(passed: bool) -> str:
    """Return "passed" or "failed"."""
    return "passed" if passed else "failed"


def format_error(error: Number) -> str:
    """Return a relative error with one digit and a power of ten."""
    return error if isinstance(error, str) else f"{error:.0e}"


def format_number(value: float) -> str:
    """Return a number with two significant digits, such as "0.21", "3.4" or "13,000"."""
    if value == 0:
        return "0"
    value = float(f"{value:.1e}")
    num_decimals = 1 - math.floor(math.log10(abs(value)))
    return f"{value:,.{max(0, num_decimals)}f}"


def format_mb(num_mb: float | None) -> str | None:
    """Return a number of MB; None if the memory was not measured."""
    return None if num_mb is None else f"{num_mb:,.0f} MB"


_TABLES: dict[str, Callable[[Record], Rows]] = {
    "update_time": list_updates,
    "query_side": list_query_side,
    "search": list_search,
    "fit": list_fit,
    "encoding": list_encoding,
    "decoder": list_updates,
    "loss_exact": list_loss_exact,
    "host_syncs": list_host_syncs,
    "out_of_memory": list_out_of_memory,
    "compile": list_compile,
}
