"""The tables and the plot of `contaccum bench search`."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def format_indexes(records: list[dict[str, Any]]) -> str:
    """One line per index and search parameters."""
    lines = [f"{'index':<24} {'parameters':<14} {'build s':>8} {'bytes/vector':>13} {'queries/s':>10} {'recall':>7}"]
    for r in records:
        lines.append(
            f"{r['index']:<24} {r['parameters'] or '':<14} {r['build_seconds']:>8.1f} {r['bytes_per_vector']:>13,.0f} "
            f"{r['queries_per_second']:>10,.0f} {r['recall']:>7.4f}"
        )
    return "\n".join([*lines, f"recall at {records[0]['k']} against exact search"])


def format_beir(records: list[dict[str, Any]]) -> str:
    """Ours, theirs, and whether both find the same."""
    (r,) = records
    return "\n".join(
        [
            f"{'':<6} {'seconds':>9} {'of CPU':>9}",
            f"{'ours':<6} {r['seconds']:>9.2f} {r['cpu_seconds']:>9.2f}",
            f"{'beir':<6} {r['seconds_beir']:>9.2f} {r['cpu_seconds_beir']:>9.2f}",
            f"{r['speedup']:.1f} times as fast ({r['speedup_low']:.1f} to {r['speedup_high']:.1f}), by CPU time "
            f"{r['cpu_seconds_beir'] / r['cpu_seconds']:.1f}",
            f"the same documents for {r['same_documents']:.2%} of queries; {r['other_documents']} documents differ by "
            f"more than rounding; greatest difference of scores {r['score_difference']:.1e}",
        ]
    )


def draw(records: list[dict[str, Any]], path: Path) -> None:
    """Queries per second against recall, a line per index."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5))
    for factory in dict.fromkeys(record["index"] for record in records):
        rows = sorted((r for r in records if r["index"] == factory), key=lambda r: r["recall"])
        axes.plot([r["recall"] for r in rows], [r["queries_per_second"] for r in rows], marker="o", label=factory)
    axes.set(
        xlabel=f"recall@{records[0]['k']} against exact search",
        ylabel="queries per second",
        yscale="log",
        title=f"{records[0]['rows']:,} x {records[0]['dimension']}",
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
