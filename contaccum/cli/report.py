"""`contaccum report`: runs, comparisons and results of evaluations as one HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from contaccum.cli.options import Parser


def run(argv: Sequence[str]) -> int:
    """Write the page; returns 0. Raises `UserError` for a path that is nothing to report of, before it is written."""
    parser = Parser(
        "report", "Draw training runs, comparisons and results of evaluations as one HTML page."
    )
    what = (
        "a folder of contaccum train or compare, or a results file of contaccum evaluate or open_qa"
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help=what)
    parser.add_argument("--output", type=Path, default=Path("report.html"), metavar="REPORT.html")
    parser.add_argument(
        "--metric", metavar="METRIC@K", help="what evaluations are compared by; default: NDCG@10"
    )
    args = parser.parse(argv)

    from contaccum.files import require_writable, write_text
    from contaccum.report import build_page

    require_writable(args.output)
    write_text(args.output, build_page(args.runs, args.metric))
    print(f"written: {args.output}")
    return 0
