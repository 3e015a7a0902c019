"""`contaccum mine MODEL --data DATA --output OUT.jsonl`: mine hard negatives for training data."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from contaccum import mining
from contaccum.cli.options import ENCODING_OPTIONS, MODEL_HELP, Parser, load_model, print_at_once
from contaccum.data.dataset import parse_training_sets
from contaccum.encoders.names import require_model
from contaccum.errors import ConfigError
from contaccum.files import provenance


def run(argv: Sequence[str]) -> int:
    """Mine hard negatives, write them and a report, and return exit code 0."""
    args = _parse_arguments(argv)
    rules = {rule.name: getattr(args, rule.name) for rule in fields(mining.SelectionRules)}
    mining.SelectionRules(**rules)  # refuses wrong rules before anything is loaded
    print_at_once(f"mining hard negatives for {args.data} with {args.model or 'BM25'}")
    mining.check_output(args.output)
    for name in (args.model, args.cross_encoder):
        if name is not None:
            require_model(name)
    defaults = {"split": args.split, "columns": args.data_columns}
    [source] = parse_training_sets([args.data], defaults).values()
    data = mining.load_mining_data(
        source.pop("path"),
        args.corpus,
        on_bad_record=args.on_bad_record,
        corpus_columns=args.corpus_columns,
        **source,
    )
    print_at_once(data.record["records"])
    model = None if args.model is None else load_model(args.model, args)
    cross_encoder = None
    if args.cross_encoder is not None:
        cross_encoder = mining.load_cross_encoder(
            args.cross_encoder, args.device, args.trust_remote_code
        )
    mined = mining.mine_hard_negatives(
        data,
        model,
        cross_encoder=cross_encoder,
        similarity=args.similarity,
        batch_size=args.batch_size,
        precision=args.precision,
        show_progress=not args.no_progress,
        **rules,
    )
    record: dict[str, Any] = {"model": {"name": args.model}, **provenance()}
    for role, loaded in (("model", model), ("cross_encoder", cross_encoder)):
        if loaded is not None:
            from contaccum.retrieval.encode import model_fingerprint

            record[role] = {"name": getattr(args, role), "fingerprint": model_fingerprint(loaded)}
    written_files = mining.write_mined(mined, args.output, record)
    print(
        f"{mined.record()['queries_with_too_few']} of {data.record['queries']} queries have fewer "
        f"than {args.num_negatives} mined negatives"
    )
    print("written:", *written_files)
    return 0


def _parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        "mine",
        "Mine hard negatives for training data: passages that score high for a query and are not "
        "known to be relevant.",
        "corpus_columns",
        "data_columns",
        "similarity",
        "query_max_length",
        *ENCODING_OPTIONS,
        usage="contaccum mine [MODEL] --data DATA --output PATH [OPTIONS]",
    )
    add = parser.add_argument
    add("model", nargs="?", metavar="MODEL", help=f"{MODEL_HELP}; none with --method bm25")
    data = "training data in any format of docs/data.md"
    add("--data", required=True, metavar="DATA", help=data)
    output = "file of the training data with negatives; a report is written beside it"
    add("--output", type=Path, required=True, metavar="PATH", help=output)
    corpus = "mine in these passages (formats: see contaccum encode); default: the data's own"
    add("--corpus", metavar="PATH", help=corpus)
    add("--split", default="train", help="split of a BEIR folder to mine for; default: train")
    cross_encoder = "rescore the candidates with this cross-encoder"
    add("--cross_encoder", metavar="MODEL", help=cross_encoder)
    method = "search with the MODEL or with BM25; default: dense"
    add("--method", choices=("dense", "bm25"), default="dense", help=method)
    for rule in fields(mining.SelectionRules):
        add(f"--{rule.name}", default=rule.default, **rule.metadata)
    args = parser.parse(argv)
    if args.method == "dense" and args.model is None:
        raise ConfigError("--method dense needs a MODEL to encode with: name one")
    if args.method == "bm25" and args.model is not None:
        raise ConfigError("--method bm25 uses no MODEL: leave it out")
    return args
