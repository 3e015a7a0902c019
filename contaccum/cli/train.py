"""``contaccum train``: arguments, data, model, trainer, and the trained folder."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING
from typing import Any

from contaccum.cli.options import Parser
from contaccum.training.options import GROUPS, MOST_USED


def options_parser(everything: bool = False) -> Parser:
    """What `--help` shows: our options in groups; ``everything``: those of transformers too, which takes long."""
    about = "Train a retriever. A YAML config has the same keys; later files and the command line override."
    parser = Parser("train", about, usage="contaccum train [CONFIG.yaml ...] [--key value ...]")
    groups: dict[Any, list[str]] = {group: list(group.__dataclass_fields__) for group in GROUPS}
    if everything:
        from contaccum.training.arguments import ContAccumTrainingArguments as Whole

        groups[Whole] = sorted({*Whole.__dataclass_fields__}.difference(*groups.values()))
    else:
        parser.epilog = (
            f"And transformers' {', '.join(MOST_USED)} ...: see contaccum train --help all."
        )
    for group, names in groups.items():
        section = parser.add_argument_group(group.__doc__.split(". ")[0].rstrip("."))
        for one in (group.__dataclass_fields__[name] for name in names):
            kind, choices = (
                re.search("bool|int|float|list|dict|str", str(one.type)),
                one.metadata.get("choices"),
            )
            text = one.metadata.get("help", "").replace("%%", "%").replace("%", "%%")
            default = getattr(one.default, "value", one.default)  # of an enumeration
            if default not in (None, False, "", MISSING) and "efault" not in text:
                text += f" Default: {str(default).lower()}."
            shown = None if choices or kind is None else kind[0].upper()
            section.add_argument(f"--{one.name}", metavar=shown, choices=choices, help=text)
    return parser


def run(argv: Sequence[str]) -> int:
    """Train as ``[CONFIG.yaml ...] [--key value ...]`` says and save the model into ``output_dir``."""
    if {"-h", "--help"} & {*argv} or "_ARGCOMPLETE" in os.environ:
        options_parser("all" in argv).parse(["--help"])
    with _shown_messages():
        return _train(argv)


def _train(argv: Sequence[str]) -> int:
    from contaccum.training import config
    from contaccum.training.run import train_and_save

    model_args, data_args, args = config.parse(argv)
    train_and_save(model_args, data_args, args)
    if args.process_index == 0:
        print(
            f"saved {args.output_dir}; score it with: contaccum evaluate {args.output_dir} --data DIR"
        )
    return 0


@contextmanager
def _shown_messages() -> Iterator[None]:
    """Show what the library reports of a run on the standard error, a plain line each."""
    root = logging.getLogger()
    logger = logging.getLogger("contaccum")
    level = logger.level
    handler = logging.StreamHandler()
    root.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        root.removeHandler(handler)
        logger.setLevel(level)
