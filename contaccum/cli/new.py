"""`contaccum new DIR --data DATA`: look at training data, and write a config for it whose lines say why.

Data are read as `contaccum train` reads them, into the same cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from contaccum.cli.options import Parser
from contaccum.errors import ConfigError
from contaccum.files import write_text


def run(argv: Sequence[str]) -> int:
    """Write a config; returns 0. Raises `UserError` for a config that exists, and for data that cannot be used."""
    parser = Parser(
        "new",
        "Look at training data, and write a config for it whose lines say why.",
        "on_bad_record",
    )
    add = parser.add_argument
    add("folder", type=Path, metavar="DIR", help="gets config.yaml")
    add(
        "--data", required=True, metavar="DATA", help="training data, in any format of docs/data.md"
    )
    add(
        "--data_columns",
        nargs="+",
        metavar="ROLE=NAME",
        help="columns with names of their own: query=question ...",
    )
    add(
        "--split",
        default="train",
        help="of a BEIR or MS MARCO folder, or of a Hugging Face data set",
    )
    add(
        "--model",
        default="sentence-transformers/all-MiniLM-L6-v2",
        help="to train; default: %(default)s",
    )
    args = parser.parse(argv)
    config = args.folder / "config.yaml"
    if config.exists():
        raise ConfigError(f"{config}: is there already; name another DIR, or remove it")

    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    from contaccum.data import parse_columns
    from contaccum.training.proposal import propose

    columns = parse_columns(args.data_columns)
    proposal = propose(
        args.data,
        args.model,
        columns=columns,
        split=args.split,
        on_bad_record=args.on_bad_record,
    )
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent), undefined=StrictUndefined, trim_blocks=True
    )
    text = templates.get_template("config.yaml.j2").render(
        proposal=proposal,
        columns=columns,
        split=args.split,
        on_bad_record=args.on_bad_record,
        folder=args.folder,
        config=config,
    )
    write_text(config, text + "\n")
    first_line = text.partition("\n")[0]
    print(first_line.removeprefix("# "))
    print(f"written: {config}")
    print(f"look through it, then: contaccum train {config}")
    return 0
