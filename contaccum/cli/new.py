"""`contaccum new DIR --data DATA`: inspect training data, and write a training config for it.

Each line of the config has a comment that gives its reason. The data are read as `contaccum train`
reads them, into the same cache.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from contaccum.cli.options import Parser
from contaccum.defaults import DEFAULT_MODEL
from contaccum.errors import ConfigError
from contaccum.files import write_text


def run(argv: Sequence[str]) -> int:
    """Write a config and return exit code 0.

    Raises:
        UserError: if there is a config already, or the data cannot be used.
    """
    args = _parse_arguments(argv)
    config_file = args.folder / "config.yaml"
    if config_file.exists():
        raise ConfigError(f"{config_file}: is there already; name another DIR, or remove it")

    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    from contaccum.data import parse_columns, parse_training_sets
    from contaccum.training.proposal import propose

    columns = parse_columns(args.data_columns)
    defaults = {"data_format": args.data_format, "split": args.split, "columns": columns}
    # A list with one set, because --data names a single set.
    [source] = parse_training_sets([args.data], defaults).values()
    proposal = propose(source.pop("path"), args.model, on_bad_record=args.on_bad_record, **source)
    is_json = args.data.lstrip().startswith("{")
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent), undefined=StrictUndefined, trim_blocks=True
    )
    text = templates.get_template("config.yaml.j2").render(
        proposal=proposal,
        train_data=[json.loads(args.data)] if is_json else args.data,
        data_format=args.data_format,
        columns=columns,
        split=args.split,
        on_bad_record=args.on_bad_record,
        folder=args.folder,
        config=config_file,
    )
    write_text(config_file, text + "\n")
    first_line = text.partition("\n")[0]
    print(first_line.removeprefix("# "))
    print(f"written: {config_file}")
    print(f"check its settings, then train: contaccum train {config_file}")
    return 0


def _parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = Parser(
        "new",
        "Inspect training data, and write a training config for it with a reason for each line.",
        "on_bad_record",
        usage="contaccum new DIR --data DATA [OPTIONS]",
    )
    parser.add_argument(
        "folder", type=Path, metavar="DIR", help="folder in which config.yaml is written"
    )
    parser.add_argument(
        "--data", required=True, metavar="DATA", help="training data in any format of docs/data.md"
    )
    parser.add_data_options()
    parser.add_argument(
        "--split",
        default="train",
        help="split of a BEIR folder or of a Hugging Face data set; default: %(default)s",
    )
    parser.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        help="model to train; default: %(default)s",
    )
    return parser.parse(argv)
