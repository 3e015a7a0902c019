"""Tables of docs/gpu.md, from the records that benchmarks/gpu.py has written."""

from __future__ import annotations

from collections.abc import Callable

from measuring import pages
from measuring.pages import format_bytes, format_duration, make_table

from gpu_parts.records import Record

_HASH_LENGTH = 8  # characters of a commit's hash that are shown

Number = float | str
"""A number, or the text "nan", "inf" or "-inf"; see `gpu_parts.records.replace_non_finite`."""


def make_tables(records: dict[str, Record | None]) -> dict[str, str]:
    """Return {name of a table: its Markdown}: one of all parts, and one for each part."""
    tables = {"runs": make_runs_table(records)}
    for part, record in records.items():
        tables[part] = make_part_table(part, record)
    return tables


def make_runs_table(records: dict[str, Record | None]) -> str:
    """Return the main figures of all parts that have run, and the names of the others."""
    rows = []
    not_run = []
    for part, record in records.items():
        if record is None:
            not_run.append(f"`{part}`")
            continue
        commit = record["git_commit"] or "unknown"
        row = [
            f"[`{part}`](#{part})",
            get_outcome(record),
            summarise(part, record["result"]) if record["measured"] else "",
            record["device"]["name"],
            record["date"],
            f"`{commit[:_HASH_LENGTH]}`",
            format_duration(record["seconds"]),
        ]
        rows.append(row)
    table = make_table(["part", "result", "figures", "GPU", "date", "commit", "time"], rows)
    if not_run:
        table += f"\n\nNot yet run: {', '.join(not_run)}."
    return table


def summarise(part: str, result: Record) -> str:
    """Return the main figures of a part in a few words; an empty text for a part without any."""
    figures: list[str] = []
    if part == "update_time":
        for case in _sort_updates(result):
            method = case["methods"]["contaccum"]
            rate = format_number(method["pairs_per_second"])
            figures.append(f"{case['backbone']}, n={case['local']}: {rate} pairs/s")
    elif part == "query_side":
        for dtype, store in result["stores"].items():
            for place, case in store["places"].items():
                if "seconds" in case:
                    seconds = format_number(case["seconds"]["median"])
                    figures.append(f"{dtype}, {place}: {seconds} s")
    elif part in ("search", "encoding"):
        figures += _summarise_rates(part, result)
    elif part == "fit":
        figures.append(result["verdict"]["line"])
    return "; ".join(figures)


def _sort_updates(result: Record) -> list[Record]:
    """Return the cases of `update_time` by encoder and micro-batch."""
    return sorted(result["cases"], key=lambda case: (case["backbone"], case["local"]))


def _summarise_rates(part: str, result: Record) -> list[str]:
    """Return the seconds of each index, or the texts per second of each encoder."""
    if part == "search":
        return [
            f"{name}: {format_number(case['seconds']['median'])} s"
            for name, case in result["cases"].items()
        ]
    return [
        f"{case['backbone']}, {case['precision']}, {case['tokens_per_text']} tokens: "
        f"{format_number(case['encode_texts_per_second'])} texts/s"
        for case in result["cases"]
    ]


def get_outcome(record: Record) -> str:
    """Return "measured", "passed", "failed", "partial" or "not measured"."""
    if record.get("failed"):
        return "failed"
    if not record["measured"]:
        return "not measured"
    passed = record["result"].get("passed")
    if record["is_partial"] and passed is not False:
        return "partial"
    if passed is None:
        return "measured"
    return format_passed(passed)


def make_part_table(part: str, record: Record | None) -> str:
    """Return the table of a part, or a sentence if it has none; an empty text before its run."""
    if record is None:
        return ""
    reason = record.get("reason")
    if not record["measured"]:
        outcome = "Failed" if record.get("failed") else "Not measured"
        return f"*{outcome}: {reason}*"
    content = _TABLES[part](record["result"])
    missing = record["result"].get("not_run")
    if missing:
        content += f"\n\nNot run: {missing}."
    failures = record["result"].get("failures")
    if failures:
        content += f"\n\nFailed: {'; '.join(failures)}."
    if record["is_partial"]:
        content += f"\n\nThe part ended before it was complete: {reason or 'it was killed'}."
    return content


def make_loss_exact_table(result: Record) -> str:
    """Return the errors of the gradients in each precision."""
    rows = []
    for name, case in result["cases"].items():
        errors = [format_relative_error(error) for error in case["relative_errors"].values()]
        rows.append([name, *errors, f"{case['limit']:.0e}", format_passed(case["passed"])])
    header = ["precision, drift compensation", "queries", "passages", "negatives", "limit", ""]
    return make_table(header, rows)


def make_host_syncs_table(result: Record) -> str:
    """Return the places where the host waits for the device."""
    rows = []
    for name, case in result["cases"].items():
        outcome = "the host never waits"
        if case["waits"]:
            outcome = "waits at " + ", ".join(f"`{place}`" for place in case["waits"])
        rows.append([f"`{name}`", str(case["micro_steps"]), outcome])
    return make_table(["drift compensation", "micro-steps", "result"], rows)


def make_update_table(result: Record) -> str:
    """Return speed and memory of an update by encoder, micro-batch and method."""
    rows = []
    for case in _sort_updates(result):
        for method, figures in case["methods"].items():
            launches = figures.get("launches_per_micro_step")
            busy_share = figures.get("busy_share")
            row = [
                case["backbone"],
                str(case["local"]),
                f"`{method}`",
                format_number(figures["pairs_per_second"]),
                format_ratio(figures["ratio"]["median"]),
                format_mb(figures["peak_mb"]),
                "" if launches is None else f"{launches:,.0f}",
                "" if busy_share is None else f"{busy_share:.0%}",
            ]
            rows.append(row)
    header = [
        "encoder",
        "n",
        "method",
        "pairs/s",
        "time relative to `mnrl`",
        "peak memory",
        "launches per micro-step",
        "GPU busy",
    ]
    return make_table(header, rows)


def make_decoder_table(result: Record) -> str:
    """Return time and memory of an update by adapter, micro-batch and method."""
    rows = []
    for adapter, figures in result["adapters"].items():
        for local, case in figures["micro_batches"].items():
            for method, method_figures in case.get("methods", {}).items():
                row = [
                    adapter,
                    local,
                    f"`{method}`",
                    format_number(method_figures["seconds"]["median"]),
                    format_ratio(method_figures["ratio"]["median"]),
                    format_mb(method_figures["peak_mb"]),
                ]
                rows.append(row)
    header = [
        "weights",
        "n",
        "method",
        "seconds per update",
        "relative to `grad_accum`",
        "peak memory",
    ]
    return make_table(header, rows)


def make_out_of_memory_table(result: Record) -> str:
    """Return what the runs did that ran out of memory."""
    rows = []
    for name, case in result["cases"].items():
        pairs = ", ".join(map(str, case["pairs_per_update"]))
        difference = case["relative_difference"]
        shown_difference = "-" if difference is None else format_relative_error(difference)
        sizes = [str(case["too_large"]), str(case["micro_batch"])]
        rows.append([name, *sizes, pairs, shown_difference, format_passed(case["passed"])])
    header = [
        "case",
        "micro-batch that does not fit",
        "micro-batch at the end",
        "pairs of each update",
        "difference of the weights",
        "",
    ]
    return make_table(header, rows)


def make_compile_table(result: Record) -> str:
    """Return times and graphs of the encoders by length."""
    rows = []
    for case in result["lengths"]:
        for encoder, seconds in case["seconds"].items():
            ratio = case["ratio"].get(encoder)
            row = [
                f"{case['query_length']}, {case['passage_length']}",
                encoder,
                format_number(seconds["median"]),
                "" if ratio is None else format_ratio(ratio["median"]),
                format_number(case["first_seconds"][encoder]),
                str(case["new_graphs"].get(encoder, "")),
            ]
            rows.append(row)
    header = [
        "tokens of queries, passages",
        "encoder",
        "seconds",
        "relative",
        "first update",
        "graphs compiled",
    ]
    return make_table(header, rows)


def make_encoding_table(result: Record) -> str:
    """Return rates of encoding by encoder, precision and length."""
    rows = []
    for case in result["cases"]:
        row = [
            case["backbone"],
            case["precision"],
            str(case["tokens_per_text"]),
            format_number(case["encode_texts_per_second"]),
            format_number(case["encode_tokens_per_second"]),
            format_number(case["forward_texts_per_second"]),
            f"{case['share_of_forward']:.0%}",
        ]
        rows.append(row)
    header = [
        "encoder",
        "precision",
        "tokens",
        "texts/s, encode",
        "tokens/s, encode",
        "texts/s, forward alone",
        "encode / forward",
    ]
    return make_table(header, rows)


def make_query_side_table(result: Record) -> str:
    """Return times and memory of a micro-step by type of the store and place of the documents."""
    rows = []
    for dtype, store in result["stores"].items():
        for place, figures in store["places"].items():
            if "seconds" not in figures:
                continue
            num_documents = store.get("documents", result["sizes"]["documents"])
            row = [
                format_number(num_documents),
                f"{dtype}, {format_bytes(store['store_bytes'])}",
                format_place(place, figures["is_in_gpu_memory"]),
                format_number(figures["seconds"]["median"]),
                format_number(figures["warm_up_seconds"][0]),
                format_mb(figures["peak_mb"]),
            ]
            rows.append(row)
    header = [
        "documents",
        "store",
        "documents in the memory of",
        "seconds per micro-step",
        "first micro-step",
        "peak memory",
    ]
    errors = []
    for dtype, error in result["gradient_errors"].items():
        limit = f"{result['limits'][dtype]:.0e}"
        errors.append(f"{format_relative_error(error)} ({dtype}; the limit is {limit})")
    return f"{make_table(header, rows)}\n\nError of the gradient: {', '.join(errors)}."


def format_place(place: str, is_in_gpu_memory: bool) -> str:
    """Return where the documents of a store were."""
    if is_in_gpu_memory:
        return "GPU"
    if place == "device":
        return "host, because they did not fit into the GPU's"
    return "host"


def make_study_cell_table(result: Record) -> str:
    """Return updates and scores of each method."""
    rows = [["before training", "", "", format_score(result["base_score"]), ""]]
    for method, figures in result["methods"].items():
        row = [
            f"`{method}`",
            f"{figures['updates']:,}",
            format_number(figures["seconds_per_update"]),
            format_score(figures["ndcg@10"]),
            format_mb(figures["peak_mb"]),
        ]
        rows.append(row)
    budget = format_number(result["budget_seconds"])
    header = [
        f"{result['model']}, {budget} s",
        "updates",
        "seconds per update",
        "nDCG@10",
        "peak memory",
    ]
    table = make_table(header, rows)
    if not result["has_trained_weights"]:
        table += "\n\nThe weights were random before training, so the scores mean nothing."
    return table


def make_search_table(result: Record) -> str:
    """Return times and recall of each index."""
    rows = []
    for name, case in result["cases"].items():
        seconds = format_number(case["seconds"]["median"])
        rate = format_number(case["queries_per_second"])
        recall = case["recall"]
        shown_recall = "-" if recall is None else f"{recall:.3f}"
        first_seconds = case.get("first_seconds")
        shown_first = "-" if first_seconds is None else format_number(first_seconds)
        rows.append([name, shown_first, seconds, rate, shown_recall])
    sizes = result["sizes"]
    header = [
        f"index of {format_number(sizes['documents'])} documents",
        "seconds, first search",
        f"seconds for {sizes['queries']:,} queries",
        "queries/s",
        f"recall@{sizes['k']}",
    ]
    table = make_table(header, rows)
    for factory, seconds in result.get("build_seconds", {}).items():
        table += f"\n\nBuilding `{factory}` took {format_number(seconds)} s."
    return table


def make_fit_table(result: Record) -> str:
    """Return the scores of a fit, and its verdict."""
    rows = []
    for system in result["scores"]:
        scores = [format_score(value) for name, value in system.items() if name != "name"]
        rows.append([system["name"], *scores])
    names = [name for name in result["scores"][0] if name not in ("name", "dev")]
    table = make_table([f"{result['model']}, {result['budget']}", "dev", *names], rows)
    trials = [f"{trial['updates']:,} updates" for trial in result["trials"] if trial["updates"]]
    seconds = format_number(result["seconds"])
    return (
        f"{table}\n\n{result['verdict']['line']}. It took {seconds} s, with trials of "
        f"{', '.join(trials)}; peak memory {format_mb(result['peak_mb'])}."
    )


def format_passed(passed: bool) -> str:
    """Return "passed" or "failed"."""
    return "passed" if passed else "failed"


def format_number(value: Number) -> str:
    """Return a number with two significant digits."""
    return value if isinstance(value, str) else pages.format_number(value)


def format_relative_error(error: Number) -> str:
    """Return a relative error with one digit and a power of ten."""
    return error if isinstance(error, str) else f"{error:.0e}"


def format_ratio(ratio: Number) -> str:
    """Return a ratio with two decimals."""
    return ratio if isinstance(ratio, str) else f"{ratio:.2f}"


def format_score(score: Number) -> str:
    """Return a score as a percentage with one decimal."""
    return score if isinstance(score, str) else f"{100 * score:.1f}"


def format_mb(num_mb: float | str | None) -> str:
    """Return a number of MB; "-" if the memory was not measured."""
    if num_mb is None or isinstance(num_mb, str):
        return "-"
    return f"{num_mb:,.0f} MB"


_TABLES: dict[str, Callable[[Record], str]] = {
    "loss_exact": make_loss_exact_table,
    "host_syncs": make_host_syncs_table,
    "update_time": make_update_table,
    "decoder": make_decoder_table,
    "out_of_memory": make_out_of_memory_table,
    "compile": make_compile_table,
    "encoding": make_encoding_table,
    "query_side": make_query_side_table,
    "study_cell": make_study_cell_table,
    "fit": make_fit_table,
    "search": make_search_table,
}
