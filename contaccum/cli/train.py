"""`contaccum train`: train a retriever from YAML configs and command-line options."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, fields

from contaccum.cli.options import Parser
from contaccum.settings import (
    GROUPS,
    Settings,
    get_choices,
    read,
    replace,
    require_complete,
)

_TYPE_NAMES = re.compile("bool|int|float|list|dict|str")
_DEFAULTS_NOT_SHOWN = (None, False, "", MISSING)


def run(argv: Sequence[str]) -> int:
    """Train by ``[CONFIG.yaml ...] [--key value ...]``, save the model, and return exit code 0.

    Raises:
        UserError: if the options, the data or the model cannot be used.
    """
    if "-h" in argv or "--help" in argv:
        make_help_parser().parse(["--help"])  # this call ends the process
    with _log_to_stderr():
        return _train(argv)


def _train(argv: Sequence[str]) -> int:
    """Train and save the model, and return exit code 0."""
    from contaccum.training.trainer import train_and_save

    settings = replace(Settings(), **read(argv))
    require_complete(settings)
    args = train_and_save(settings)
    if args.process_index == 0:
        folder = args.output_dir
        print(f"saved {folder}; score it with: contaccum evaluate {folder} --data DIR")
    return 0


def make_help_parser() -> Parser:
    """Return a parser that shows the options in `--help`; `contaccum.settings.read` parses them."""
    parser = Parser(
        "train",
        "Train a retriever. YAML configs have the same keys as the command line. A later config "
        "overrides an earlier one, and the command line overrides all configs.",
        usage="contaccum train [CONFIG.yaml ...] [--key value ...]",
    )
    for group in GROUPS:
        section = parser.add_argument_group((group.__doc__ or "").partition(".")[0])
        for option in fields(group):
            choices = get_choices(option.name)
            type_name = _TYPE_NAMES.search(str(option.type))
            metavar = None
            if type_name is not None and not choices:
                metavar = type_name.group().upper()
            text = option.metadata["help"].replace("%", "%%")  # argparse formats it
            # By identity, because 0 equals False.
            is_shown = not any(option.default is value for value in _DEFAULTS_NOT_SHOWN)
            if is_shown and "efault" not in text:
                text += f" Default: {str(option.default).lower()}."
            section.add_argument(f"--{option.name}", metavar=metavar, choices=choices, help=text)
    parser.epilog = (
        "All other arguments of sentence-transformers' and transformers' TrainingArguments can be "
        "used as well."
    )
    return parser


@contextmanager
def _log_to_stderr() -> Iterator[None]:
    """Write the log messages of contaccum and of other libraries to standard error.

    Each message is one line without a prefix. The level of contaccum's logger is INFO in the block.
    """
    root_logger = logging.getLogger()
    logger = logging.getLogger("contaccum")
    previous_level = logger.level
    handler = logging.StreamHandler()
    root_logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        root_logger.removeHandler(handler)
        logger.setLevel(previous_level)
