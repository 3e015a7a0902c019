"""``contaccum train``: arguments, data, model, trainer, and the trained folder."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING
from pathlib import Path
from typing import Any

from contaccum.cli.options import Parser
from contaccum.files import require_writable
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
        parser.epilog = f"And transformers' {', '.join(MOST_USED)} ...: see contaccum train --help all."
    for group, names in groups.items():
        section = parser.add_argument_group(group.__doc__.split(". ")[0].rstrip("."))
        for one in (group.__dataclass_fields__[name] for name in names):
            kind, choices = re.search("bool|int|float|list|dict|str", str(one.type)), one.metadata.get("choices")
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
    from tqdm.contrib.logging import logging_redirect_tqdm
    from transformers import set_seed

    from contaccum.training import checkpoint, config
    from contaccum.training.log import RUN_RECORD
    from contaccum.training.query_side import require_sources
    from contaccum.training.trainer import ContAccumTrainer

    model_args, data_args, args = config.parse(argv)
    output_dir = str(args.output_dir)
    checkpoint.require_free_folder(args)
    require_sources(args)
    if args.process_index == 0:
        require_writable(Path(output_dir) / RUN_RECORD)
    with args.main_process_first(desc="reading the data"):  # on each host; the others find it in the cache
        data = config.load_data(data_args, args)
        mining_data = config.load_mining_data_of(data_args, args)
        evaluator = config.load_evaluator(data_args, args)
    if args.process_index == 0:
        print(data.summary())
    set_seed(args.seed)  # before the model: fresh weights are part of the run
    model = config.load_model(model_args, str(args.device), args.method)
    about: Any = {"data_record": data.record(), "mining_data": mining_data}
    about["guide"] = config.load_guide(model_args, device=str(args.device))
    trainer = ContAccumTrainer(model, args, data.dataset, evaluator=evaluator, **about)
    # Messages stand above the progress bar, not in it.
    loggers = [logging.getLogger(name) for name in (None, "transformers")]
    with logging_redirect_tqdm(loggers):
        trainer.train(args.resume_from_checkpoint)
    trainer.save_model(output_dir)
    if trainer.is_world_process_zero():
        if model_args.merge_adapter:
            config.merge_saved(output_dir, model_args)
        print(f"saved {output_dir}; score it with: contaccum evaluate {output_dir} --data DIR")
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
