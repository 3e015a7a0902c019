"""`contaccum train`: train a retriever from YAML configs and command-line options."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from contaccum.cli.options import Parser, is_first_process, print_at_once
from contaccum.data.beir import resolve_beir_data
from contaccum.data.corpus import require_texts
from contaccum.data.dataset import parse_training_sets
from contaccum.data.records import RecordSource, parse_columns
from contaccum.encoders.names import require_model
from contaccum.retrieval.store import EmbeddingStore
from contaccum.settings import Settings, add_options, read, replace, require_complete


def run(argv: Sequence[str]) -> int:
    """Train by ``[CONFIG.yaml ...] [--key value ...]``, save the model, and return exit code 0."""
    if "-h" in argv or "--help" in argv:
        parser = Parser(
            "train",
            "Train a retriever. YAML configs have the same keys as the command line. A later "
            "config overrides an earlier one, and the command line overrides all configs. All "
            "other arguments of sentence-transformers' and transformers' TrainingArguments can be "
            "used as well.",
            usage="contaccum train [CONFIG.yaml ...] [--key value ...]",
        )
        add_options(parser)
        parser.parse(["--help"])  # this call ends the process
    # Messages of contaccum (from INFO on) and of libraries go to standard error.
    logging.basicConfig(format="%(message)s")
    logging.getLogger("contaccum").setLevel(logging.INFO)
    settings = replace(Settings(), **read(argv))
    require_complete(settings)
    print_at_once(f"training {settings.model} by {settings.method}")
    if is_first_process():
        _require_files(settings)
    from contaccum.training.trainer import train_and_save

    args = train_and_save(settings)
    if args.process_index == 0:
        folder = args.output_dir
        print(f"saved {folder}; score it with: contaccum evaluate {folder} --data DIR")
    return 0


def _require_files(settings: Settings) -> None:
    """Refuse models and data that the training would refuse, before torch is imported."""
    require_model(settings.model)
    common = {"split": settings.split, "columns": parse_columns(settings.data_columns)}
    for source in parse_training_sets(settings.train_data, common).values():
        RecordSource(**source)
    if settings.eval_data is not None:
        resolve_beir_data(settings.eval_data)
    if settings.passage_store is not None:
        EmbeddingStore.open(settings.passage_store)
    for corpus in (settings.corpus, settings.second_stage):
        if corpus is not None:
            require_texts(Path(corpus))
