"""`contaccum mine MODEL --data DATA --output OUT.jsonl`: refuse early, mine, write the negatives and a report."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from contaccum.cli.options import Parser, autocast_dtype, load_model
from contaccum.errors import ConfigError
from contaccum.files import git_commit, package_versions

# What only one method reads: given with the other it would be passed over without a word.
_OPTIONS_OF = {
    "dense": ("index", "index_parameters", "similarity", "precision", "query_max_length", "passage_max_length"),
    "bm25": ("bm25_k1", "bm25_b"),
}


def run(argv: Sequence[str] | None = None) -> int:
    """`contaccum mine [MODEL] --data DATA --output OUT`; returns 0.

    Raises `UserError` for every mistake in the arguments, the data or the models; nothing is written then.
    """
    parser = _parser()
    args = _checked(parser, parser.parse(argv))
    from contaccum.data.columns import parse_columns
    from contaccum.mining import load_mining_data, mine_hard_negatives, write_mined
    from contaccum.mining.cross_encoder import load_cross_encoder
    from contaccum.retrieval.encode import model_fingerprint, tokenisation_contract

    settings: Any = {name: getattr(args, name) for name in ("data_format", "split", "on_bad_record")}
    data = load_mining_data(args.data, args.corpus, columns=parse_columns(args.data_columns), **settings)
    print(f"{args.data}: {data.record['records']}")
    sizes = ", ".join(f"{data.record[what]} {what}" for what in ("queries", "pairs", "passages"))
    print(f"mining for {sizes}", flush=True)
    model = cross_encoder = None
    record: dict[str, Any] = {"model": None, "versions": package_versions(), "git_commit": git_commit()}
    if args.model is not None:
        model = load_model(args.model, args)
        record["model"] = {"name": args.model, "fingerprint": model_fingerprint(model)}
        record["tokenisation"] = tokenisation_contract(model)
    if args.cross_encoder is not None:
        cross_encoder = load_cross_encoder(args.cross_encoder, args.device, args.trust_remote_code)
        record["cross_encoder"] = {"name": args.cross_encoder, "fingerprint": model_fingerprint(cross_encoder)}
    names = ("method", "similarity", "index", "index_parameters", "batch_size", "bm25_k1", "bm25_b")
    search = {name: getattr(args, name) for name in names} | {"autocast_dtype": autocast_dtype(args)}
    show = not args.no_progress
    mined = mine_hard_negatives(data, model, cross_encoder=cross_encoder, show_progress=show, **search, **_rules(args))
    written = write_mined(mined, args.output, args.output_format, args.on_too_few, record, args.overwrite)
    counts = mined.record(args.on_too_few)
    print("\n".join(mined.statistics))
    print(
        f"{counts['negatives_kept']} negatives for {counts['pairs_kept']} of {counts['pairs']} pairs; "
        f"{counts['queries_with_fewer'] + counts['queries_with_none']} of {counts['queries']} queries have fewer than "
        f"{args.num_negatives} ({'left out' if args.on_too_few == 'drop' else 'written'})"
    )
    print("written:", *written)
    return 0


def _rules(args: argparse.Namespace) -> dict[str, Any]:
    from dataclasses import fields

    from contaccum.mining import SelectionRules

    return {rule.name: getattr(args, rule.name) for rule in fields(SelectionRules)}


def _checked(parser: Parser, args: argparse.Namespace) -> argparse.Namespace:
    from contaccum.mining import SelectionRules
    from contaccum.mining.files import check_output
    from contaccum.mining.miner import check_settings

    if args.cross_encoder is None and args.cross_encoder_margin is not None:
        raise ConfigError("--cross_encoder_margin needs a --cross_encoder")
    if args.cross_encoder is not None and args.cross_encoder_margin is None:
        args.cross_encoder_margin = 3.0
    has_model, has_second = args.model is not None, args.cross_encoder is not None
    rules = SelectionRules(**_rules(args))
    check_settings(rules, args.method, has_model, has_second, args.bm25_k1, args.bm25_b)
    for method, options in _OPTIONS_OF.items():
        for name in options:
            if method != args.method and getattr(args, name) != parser.get_default(name):
                raise ConfigError(f"--{name} has no effect with --method {args.method}: leave it out")
    if args.batch_size < 1:
        raise ConfigError(f"batch_size must be at least 1, not {args.batch_size}")
    check_output(args.output, args.output_format, args.overwrite, (args.data, args.corpus))
    return args


def _parser() -> Parser:
    what = "Find hard negatives for training data: passages that score high and are not known to be relevant."
    parser = Parser("mine", what)
    add = parser.add_argument
    add("model", metavar="MODEL", nargs="?", help="a folder, or a name on the model hub; none for --method bm25")
    add("--data", required=True, metavar="DATA", help="training data, in any format of docs/data.md")
    add("--corpus", metavar="FILE", help="mine in this jsonl (_id, title, text) instead of the data's own passages")
    parser.add_shared("output")
    add("--data_format", help="default: sniffed")
    add("--data_columns", nargs="+", metavar="ROLE=NAME", help="columns with names of their own: query=question ...")
    add("--split", default="train", help="the qrels split of a BEIR folder")
    add("--output_format", choices=("pairs", "dpr", "tevatron", "ntuples"), default="pairs")
    add("--overwrite", action="store_true", help="replace an output that is there")
    add("--on_too_few", choices=("drop", "keep"), default="drop", help="queries with fewer than --num_negatives")
    rules = parser.add_argument_group("rules (docs/mining.md)")
    rules.add_argument("--num_negatives", type=int, default=3, metavar="N", help="negatives per query")
    rules.add_argument("--range_min", type=int, default=0, metavar="RANK", help="skip this many of the closest")
    rules.add_argument("--range_max", type=int, metavar="RANK", help="consider no candidate beyond this rank")
    rules.add_argument("--absolute_margin", type=float, metavar="X", help="at least this far below the positive")
    rules.add_argument("--relative_margin", type=float, metavar="X", help="0.05: at most 95 %% of the positive's score")
    rules.add_argument("--max_score", type=float, metavar="X")
    rules.add_argument("--min_score", type=float, metavar="X")
    rules.add_argument("--sampling", choices=("top", "random"), default="top")
    rules.add_argument("--seed", type=int, default=0, help="of --sampling random")
    rules.add_argument("--cross_encoder", metavar="MODEL", help="rescore candidates with this cross-encoder")
    keep = "keep those this far below the positive; default: 3.0"
    rules.add_argument("--cross_encoder_margin", type=float, metavar="X", help=keep)
    add("--method", choices=("dense", "bm25"), default="dense")
    add("--bm25_k1", type=float, default=0.9, metavar="X")
    add("--bm25_b", type=float, default=0.4, metavar="X")
    parser.add_shared("index", "index_parameters", "similarity", "precision", "batch_size", "query_max_length")
    parser.add_shared("passage_max_length", "on_bad_record", "device", "no_progress", "trust_remote_code")
    return parser
