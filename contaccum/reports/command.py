"""`contaccum report`: runs, comparisons and results of evaluations as one HTML page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from contaccum.data.records import one_line
from contaccum.errors import DataError, UserError
from contaccum.evaluation.arguments import Parser
from contaccum.evaluation.results import write_atomically
from contaccum.redaction import redact
from contaccum.reports.blocks import Section
from contaccum.reports.comparisons import comparison_section
from contaccum.reports.evaluations import evaluation_sections
from contaccum.reports.page import render
from contaccum.reports.runs import runs_section
from contaccum.reports.sources import ComparedRuns, Evaluation, TrainingRun, read_sources


def run(argv: Sequence[str] | None = None) -> int:
    """`contaccum report RUN [RUN ...] --output report.html`; returns 0.

    Raises `UserError` for a path that is nothing to report of, or is damaged, before anything is written.
    """
    args = _parse(argv)
    sections = build_sections(args.runs, args.metric)
    page = render(args.title or ", ".join(_name(path) for path in args.runs)[:120], sections)
    try:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(args.output, [redact(page)])
    except OSError as error:
        raise UserError(f"{args.output}: cannot be written ({error.strerror or error})") from error
    print(f"written: {args.output}")
    return 0


def build_sections(paths: Sequence[Path], metric: str | None = None) -> list[Section]:
    """The page's parts: training runs together, results by data set, and every comparison."""
    sources = read_sources(list(paths))
    runs = [one for one in sources if isinstance(one, TrainingRun)]
    evaluations = [one for one in sources if isinstance(one, Evaluation)]
    compared = [one for one in sources if isinstance(one, ComparedRuns)]
    sections: list[Section] = []
    for one in runs:  # each alone first, so that a damaged one is named
        _checked(one.path, runs_section, [one])
    if runs:
        sections.append(runs_section(runs))
    for result in evaluations:
        _checked(result.path, evaluation_sections, [result])
    if evaluations:
        sections += evaluation_sections(evaluations, metric)
    return sections + [_checked(one.path, comparison_section, one) for one in compared]


def _name(path: Path) -> str:
    return path.stem if path.suffix == ".json" else path.resolve().name


def _checked(path: Path, build: Callable[[Any], Any], source: Any) -> Any:
    try:
        return build(source)
    except UserError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise DataError(one_line(f"{path}: damaged: it does not hold what contaccum writes ({error!r})")) from error


def _parse(argv: Sequence[str] | None) -> Any:
    parser = Parser(
        prog="contaccum report",
        description="Draw training runs, comparisons and results of evaluations as one HTML page.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="a folder of contaccum train or compare, or a results file of contaccum evaluate or open_qa",
    )
    parser.add_argument("--output", type=Path, default=Path("report.html"), metavar="REPORT.html")
    parser.add_argument("--title", help="default: the names of what is reported")
    parser.add_argument("--metric", metavar="METRIC@K", help="what evaluations are compared by; default: NDCG@10")
    return parser.parse(argv)
