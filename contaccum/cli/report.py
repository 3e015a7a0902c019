"""`contaccum report`: draw training runs, comparisons and evaluations as one HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from contaccum.cli.options import Parser


def run(argv: Sequence[str]) -> int:
    """Write the page and return exit code 0.

    Raises:
        UserError: if a path has nothing that can be drawn. No page is written then.
    """
    parser = Parser(
        "report",
        "Draw training runs, comparisons and evaluation results as one HTML page.",
        usage="contaccum report RUN ... [OPTIONS]",
    )
    parser.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="output folder of contaccum train or compare, or results file of contaccum evaluate "
        "or open_qa",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("report.html"),
        metavar="REPORT.html",
        help="file of the page; default: %(default)s",
    )
    parser.add_argument(
        "--metric",
        metavar="METRIC@K",
        help="metric by which evaluations are compared; default: NDCG@10",
    )
    args = parser.parse(argv)

    from contaccum.files import require_writable, write_text
    from contaccum.report import build_page

    require_writable(args.output)
    write_text(args.output, build_page(args.runs, args.metric))
    print(f"written: {args.output}")
    return 0
