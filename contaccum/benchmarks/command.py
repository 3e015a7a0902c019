"""`contaccum bench WHAT`: measure, print a table, write JSON (and a picture)."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from contaccum.errors import ConfigError
from contaccum.redaction import redact

# Kim, Lee and Kang (arXiv 2406.12356): update time over gradient accumulation's, BERT-base, N_total 512.
PAPER = {"contaccum, bank 8192": 1.26, "grad_cache": 1.93}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")


def run(argv: Sequence[str]) -> int:
    """``contaccum bench update|trainer|loss|sampler|readers|load|mine|encode|search [OPTIONS]``.

    Returns:
        the exit code: 1 when a bound of ``load`` is broken, or ``search --beir`` finds other documents.
    """
    if argv and argv[0] == "mine":
        from contaccum.benchmarks.mining import run as run_mining

        return run_mining(argv[1:])
    if argv and argv[0] == "encode":
        from contaccum.benchmarks.encode import run as run_encode

        return run_encode(argv[1:])
    if argv and argv[0] == "search":
        from contaccum.benchmarks.search import run as run_search

        return run_search(argv[1:])
    if not argv or argv[0] not in ("update", "trainer", "loss", "sampler", "readers", "load"):
        given = f"no benchmark {argv[0]!r}; " if argv and not argv[0].startswith("-") else ""
        raise ConfigError(
            f"{given}say which: contaccum bench update, trainer, loss, sampler, readers, load, mine, encode or search"
        )
    options = _parse(argv[0], argv[1:])
    from contaccum.benchmarks.load import LoadSettings, measure_load
    from contaccum.benchmarks.loss import measure_loss
    from contaccum.benchmarks.readers import ReaderSettings, measure_readers
    from contaccum.benchmarks.sampler import SamplerSettings, measure_samplers
    from contaccum.benchmarks.trainers import measure_trainers
    from contaccum.benchmarks.update import UpdateSettings, measure_updates
    from contaccum.evaluation.provenance import git_commit, package_versions
    from contaccum.evaluation.results import require_writable

    output: Path = options.pop("output")
    require_writable(output)
    kinds: dict[str, tuple[Any, Any, Any]] = {
        "update": (UpdateSettings, measure_updates, format_records),
        "trainer": (UpdateSettings, measure_trainers, format_trainers),
        "loss": (UpdateSettings, measure_loss, format_loss),
        "sampler": (SamplerSettings, measure_samplers, format_samplers),
        "readers": (ReaderSettings, measure_readers, format_readers),
        "load": (LoadSettings, measure_load, format_load),
    }
    kind, measure, show = kinds[argv[0]]
    settings = kind(**options)
    settings.check()
    records = measure(settings, progress=lambda line: print(line, flush=True))
    print(show(records))
    result = {
        "command": redact(" ".join(["contaccum", "bench", *argv])),
        "settings": asdict(settings),
        "records": records,
        # The paper's figures are of updates.
        **({"paper": PAPER} if kind is UpdateSettings else {}),
        "machine": machine(getattr(settings, "device", "cpu")),
        "versions": package_versions(),
        "git_commit": git_commit(),
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=1), encoding="utf-8")
    print(f"written: {output}")
    if argv[0] == "update":
        draw(records, output.with_suffix(".png"))
        print(f"written: {output.with_suffix('.png')}")
    broken = [bound for record in records for bound in record.get("broken", [])]
    for bound in broken:
        print(f"contaccum bench {argv[0]}: {bound}", file=sys.stderr)
    return 1 if broken else 0


def _parse(what: str, argv: Sequence[str]) -> dict[str, Any]:
    parser = _Parser(prog=f"contaccum bench {what}", description=__doc__, allow_abbrev=False)
    parser.add_argument("--output", type=Path, default=Path(f"bench_{what}.json"))
    if what == "sampler":
        _add_sampler_options(parser)
        return vars(parser.parse_args(list(argv)))
    if what == "readers":
        parser.add_argument("--rows", type=int, default=20_000, help="records of each file")
        parser.add_argument("--formats", nargs="+", default=argparse.SUPPRESS, help="some of them; default: all")
        parser.add_argument("--repeats", type=int, default=7)
        parser.add_argument("--no_memory", dest="memory", action="store_false", help="time only")
        return vars(parser.parse_args(list(argv)))
    if what == "load":
        _add_load_options(parser)
        return vars(parser.parse_args(list(argv)))
    parser.add_argument("--backbone", default="minilm", help="bert-base, minilm or tiny (fresh weights), or a model")
    parser.add_argument("--untied", dest="tied", action="store_false", help="two towers")
    parser.add_argument("--local", type=int, default=8, help="pairs per micro-batch")
    parser.add_argument("--total", type=int, nargs="+", default=[128], help="pairs per update")
    parser.add_argument("--bank", type=int, nargs="+", default=[1024], help="bank sizes")
    parser.add_argument("--methods", nargs="+", default=["grad_accum", "grad_cache", "contaccum", "pre_batch"])
    parser.add_argument("--query_length", type=int, default=32)
    parser.add_argument("--passage_length", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--bank_dtype", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--no_memory", dest="memory", action="store_false", help="time only")
    return vars(parser.parse_args(list(argv)))


def _add_sampler_options(parser: argparse.ArgumentParser) -> None:
    from contaccum.benchmarks.sampler import SAMPLERS, SamplerSettings

    defaults = SamplerSettings()
    parser.add_argument("--rows", type=int, default=defaults.rows)
    parser.add_argument("--batch_size", type=int, default=defaults.batch_size)
    parser.add_argument(
        "--duplicates", type=float, default=defaults.duplicates, help="share of each column's texts that are another's"
    )
    parser.add_argument("--samplers", nargs="+", default=defaults.samplers, help=", ".join(SAMPLERS))
    parser.add_argument("--windows", type=int, nargs="+", default=defaults.windows, help="batches sorted together")
    parser.add_argument("--update", type=int, default=defaults.update, help="micro-batches per update")
    parser.add_argument("--repeats", type=int, default=defaults.repeats)


def _add_load_options(parser: argparse.ArgumentParser) -> None:
    from contaccum.benchmarks.load import LoadSettings

    helps = {
        "micro_steps": "length of the run",
        "local": "pairs per micro-batch",
        "accumulation": "micro-batches per update",
        "bank": "rows of the bank",
        "rows": "training pairs; the run goes through them again and again",
        "max_memory_growth": "bound: resident memory of the last tenth over the first, less 1",
        "max_slowdown": "bound: time per micro-step of the last tenth over the first, less 1",
        "threads": "of torch",
    }
    for name, value in asdict(LoadSettings()).items():
        parser.add_argument(f"--{name}", type=type(value), default=value, help=helps[name])


def format_records(records: list[dict[str, Any]]) -> str:
    """One line a cell."""
    lines = [
        f"{'total':>6} {'method':<11} {'bank':>7} {'s/update':>9} {'ratio':>6} {'pairs/s':>8} {'MB':>7} {'extra':>7}"
    ]
    for record in records:
        numbers = [record.get(key) for key in ("ratio", "pairs_per_second", "memory_mb", "extra_memory_mb")]
        shown = ["-" if x is None else f"{x:.{digits}f}" for x, digits in zip(numbers, (3, 1, 0, 0), strict=True)]
        lines.append(
            f"{record['total']:>6} {record['method']:<11} {record['bank']:>7} {record['seconds']:>9.3f} "
            f"{shown[0]:>6} {shown[1]:>8} {shown[2]:>7} {shown[3]:>7}"
        )
    return "\n".join(lines)


def format_trainers(records: list[dict[str, Any]]) -> str:
    """One line a method."""
    lines = [f"{'total':>6} {'method':<11} {'ours':>8} {'theirs':>8}  pairs/s, and ours over theirs"]
    for r in records:
        lines.append(
            f"{r['total']:>6} {r['method']:<11} {r['pairs_per_second']:>8.1f} "
            f"{r['pairs_per_second_sentence_transformers']:>8.1f}  {r['speedup']:.3f} "
            f"({r['speedup_low']:.3f} to {r['speedup_high']:.3f})"
        )
    return "\n".join(lines)


def format_loss(records: list[dict[str, Any]]) -> str:
    """One line a bank size."""
    lines = [f"{'bank':>7} {'ms':>9} {'dense ms':>10} {'speedup':>8} {'grad error':>11} {'MB':>7} {'stored MB':>10}"]
    for r in records:
        cells = [
            "-" if r.get(key) is None else format(r[key], spec)
            for key, spec in (
                ("dense_milliseconds", ".1f"),
                ("speedup", ".1f"),
                ("gradient_error", ".1e"),
                ("memory_mb", ".0f"),
            )
        ]
        lines.append(
            f"{r['bank']:>7} {r['milliseconds']:>9.2f} {cells[0]:>10} {cells[1]:>8} {cells[2]:>11} {cells[3]:>7} "
            f"{r['stored_mb']:>10.0f}"
        )
    return "\n".join(lines)


def format_readers(records: list[dict[str, Any]]) -> str:
    """One line a format."""
    lines = [
        f"{'format':<12} {'MB':>6} {'MB/s':>6} {'records/s':>10} {'ratio':>6} {'low':>6} {'high':>6} {'peak MB':>8} "
        f"{'theirs':>7}  against"
    ]
    for r in records:
        memory = ["-" if r[key] is None else f"{r[key]:.0f}" for key in ("memory_mb", "rival_memory_mb")]
        lines.append(
            f"{r['format']:<12} {r['file_mb']:>6.0f} {r['mb_per_second']:>6.0f} {r['records_per_second']:>10.0f} "
            f"{r['ratio']:>6.2f} {r['ratio_low']:>6.2f} {r['ratio_high']:>6.2f} {memory[0]:>8} {memory[1]:>7}  "
            f"{r['rival']}"
        )
    return "\n".join(lines)


def format_load(records: list[dict[str, Any]]) -> str:
    """First tenth, last tenth and their change, one line a quantity."""
    (r,) = records
    lines = [f"{'':<28} {'first':>9} {'last':>9} {'change':>8}"]
    for name, key, change in (
        ("resident memory, MB", "resident_mb", r["memory_growth"]),
        ("CPU ms per micro-step", "cpu_milliseconds", r["slowdown_cpu"]),
        ("wall ms per micro-step", "wall_milliseconds", r["slowdown_wall"]),
    ):
        lines.append(f"{name:<28} {r[key][0]:>9.2f} {r[key][1]:>9.2f} {change:>+8.2%}")
    lines += [
        f"{name:<28} {r[key][0]:>9} {r[key][1]:>9}" for name, key in (("open files", "open_files"), ("threads",) * 2)
    ]
    lines.append(f"{'fixed work beside it':<28} {'':>19} {r['slowdown_machine']:>+8.2%}")
    lines.append(f"{'a micro-step over it':<28} {'':>19} {r['slowdown']:>+8.2%}")
    return "\n".join([*lines, f"the bank was filled {r['turns']:.0f} times over"])


def format_samplers(records: list[dict[str, Any]]) -> str:
    """One line a sampler, then one line a way of grouping by length."""
    lines = [f"{'sampler':<21} {'pairs/s':>11} {'ratio':>8} {'first epoch':>12} {'batches':>8} {'repeats':>8}"]
    for r in (record for record in records if "sampler" in record):
        ratio = "-" if r["ratio"] is None else f"{r['ratio']:.2f}"
        lines.append(
            f"{r['sampler']:<21} {r['pairs_per_second']:>11,.0f} {ratio:>8} {r['first_epoch_seconds']:>10.2f} s "
            f"{r['batches']:>8} {r['repeats']:>8}"
        )
    lines.append(
        f"{'window':>6} {'padding':>8} {'saved':>7} {'batch spread':>13} {'update spread':>14} {'pairs/s':>11}"
    )
    for r in (record for record in records if "window" in record):
        lines.append(
            f"{r['window'] or 'theirs':>6} {r['padding']:>8.3f} {r['saved']:>7.1%} {r['batch_spread']:>13.3f} "
            f"{r['update_spread']:>14.2f} {r['pairs_per_second']:>11,.0f}"
        )
    return "\n".join(lines)


def draw(records: list[dict[str, Any]], path: Path) -> None:
    """Update time over grad_accum's against the bank, or against pairs per update where the bank does not vary."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    banks = {record["bank"] for record in records if record["bank"]}
    key = "bank" if len(banks) > 1 else "total"
    figure, axes = plt.subplots(figsize=(7, 4.5))
    for method in dict.fromkeys(record["method"] for record in records):
        rows = [r for r in records if r["method"] == method and r["ratio"] is not None]
        if not rows:
            continue
        if key == "bank" and not any(r["bank"] for r in rows):
            axes.axhline(rows[-1]["ratio"], linestyle=":", color="grey", linewidth=1)
            axes.annotate(method, (max(banks), rows[-1]["ratio"]), fontsize=8, ha="right", va="bottom")
            continue
        rows.sort(key=lambda r: r[key])
        axes.plot([r[key] for r in rows], [r["ratio"] for r in rows], marker="o", label=method)
    if 8192 in banks:
        axes.plot([8192], [PAPER["contaccum, bank 8192"]], "x", color="black", label="contaccum, as the paper reports")
    axes.set(
        xlabel="bank rows" if key == "bank" else "pairs per update", ylabel="update time / grad_accum", xscale="log"
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def machine(device: str) -> dict[str, Any]:
    """What the figures were measured on."""
    import torch

    cpu = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            cpu = next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    gpu = torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else None
    return {"cpu": cpu, "threads": torch.get_num_threads(), "gpu": gpu}
