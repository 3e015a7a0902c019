"""`contaccum mine MODEL --data DATA --output OUT.jsonl`: refuse early, mine, write the negatives and a report."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from contaccum.data.fields import parse_columns
from contaccum.data.formats import DATA_FORMATS
from contaccum.errors import ConfigError
from contaccum.evaluation.arguments import Parser
from contaccum.mining.filters import SelectionRules
from contaccum.mining.miner import MinedNegatives, check_settings, mine_hard_negatives
from contaccum.mining.sources import load_mining_data
from contaccum.mining.writer import OUTPUT_FORMATS, check_output, write_mined

# What a rule's count is called for people.
_REASONS = {
    "known_positive": "known positives and their duplicates",
    "same_as_query": "equal to the query",
    "not_needed": "fit, but not needed",
}


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
    args = parser.parse(argv)
    margin = args.cross_encoder_margin
    if args.cross_encoder is None and margin is not None:
        raise ConfigError("--cross_encoder_margin needs a --cross_encoder")
    if args.cross_encoder is not None and margin is None:
        args.cross_encoder_margin = 3.0
    rules = SelectionRules(**{rule.name: getattr(args, rule.name) for rule in fields(SelectionRules)})
    check_settings(
        rules, args.method, args.model is not None, args.cross_encoder is not None, args.bm25_k1, args.bm25_b
    )
    for method, options in _OPTIONS_OF.items():
        for name in options:
            if method != args.method and getattr(args, name) != parser.get_default(name):
                raise ConfigError(f"--{name} has no effect with --method {args.method}: leave it out")
    if args.batch_size < 1:
        raise ConfigError(f"batch_size must be at least 1, not {args.batch_size}")
    check_output(args.output, args.output_format, args.overwrite, (args.data, args.corpus))

    if args.device is not None:
        from contaccum.evaluation.checks import check_device

        check_device(args.device)
    if args.model is not None or args.cross_encoder is not None:
        from contaccum.encoders import require_model

        for name in filter(None, (args.model, args.cross_encoder)):
            require_model(os.path.expanduser(name))

    print(f"reading {args.data}", flush=True)
    columns = parse_columns(args.data_columns)
    data = load_mining_data(args.data, args.corpus, args.data_format, args.split, args.on_bad_record, columns)
    print(f"{args.data}: {data.record['records']}")
    sizes = ", ".join(f"{data.record[what]} {what}" for what in ("queries", "pairs", "passages"))
    print(f"mining for {sizes}", flush=True)
    model, cross_encoder, models = _load_models(args)
    mined = mine_hard_negatives(
        model,
        data,
        rules=rules,
        method=args.method,
        cross_encoder=cross_encoder,
        similarity=args.similarity,
        index=args.index,
        index_parameters=args.index_parameters,
        batch_size=args.batch_size,
        autocast_dtype=None if args.precision == "float32" else args.precision,
        bm25_k1=args.bm25_k1,
        bm25_b=args.bm25_b,
        show_progress=not args.no_progress,
    )
    from contaccum.evaluation.provenance import git_commit, package_versions

    record = {**models, "versions": package_versions() | _bm25s_version(args.method), "git_commit": git_commit()}
    written = write_mined(mined, args.output, args.output_format, args.on_too_few, record, args.overwrite)
    print(summary(mined, args.on_too_few))
    print("written:", *written)
    return 0


def summary(mined: MinedNegatives, on_too_few: Any) -> str:
    """What was dropped and what is left, in a few lines."""
    counts = mined.counts(on_too_few)
    lines = [f"{mined.candidates} candidates; dropped:"]
    lines += [f"  {_REASONS.get(name, name):<36} {count:>10}" for name, count in mined.dropped.most_common()]
    short = counts["queries_with_fewer"] + counts["queries_with_none"]
    lines.append(
        f"{counts['negatives_kept']} negatives for {counts['pairs_kept']} of {counts['pairs']} pairs; "
        f"{short} of {counts['queries']} queries have fewer than {mined.rules.num_negatives}"
        + (f" ({'left out' if on_too_few == 'drop' else 'kept'})" if short else "")
    )
    return "\n".join(lines)


def _load_models(args: argparse.Namespace) -> tuple[Any, Any, dict[str, Any]]:
    """The encoder, the cross-encoder (None for what was not asked for), and what the report says about them."""
    model, cross_encoder = None, None
    record: dict[str, Any] = {}
    if args.model is None and args.cross_encoder is None:
        return None, None, {"model": None}
    from contaccum.encoders import DualEncoder, set_max_lengths
    from contaccum.evaluation.model_record import model_fingerprint, tokenisation_contract

    if args.model is not None:
        model = DualEncoder.from_pretrained(args.model, device=args.device, trust_remote_code=args.trust_remote_code)
        set_max_lengths(model, args.query_max_length, args.passage_max_length)
        record["model"] = {"name": args.model, "fingerprint": model_fingerprint(model)}
        record["tokenisation"] = tokenisation_contract(model)
    if args.cross_encoder is not None:
        from contaccum.mining.rescoring import load_cross_encoder

        cross_encoder = load_cross_encoder(args.cross_encoder, args.device, args.trust_remote_code)
        record["cross_encoder"] = {"name": args.cross_encoder, "fingerprint": model_fingerprint(cross_encoder)}
    return model, cross_encoder, record


def _bm25s_version(method: str) -> dict[str, str | None]:
    if method != "bm25":
        return {}
    import bm25s

    return {"bm25s": bm25s.__version__}


def _parser() -> Parser:
    parser = Parser(
        prog="contaccum mine",
        description="Find hard negatives for training data: passages that score high and are not known to be relevant.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("model", metavar="MODEL", nargs="?", help="a folder, or a name on the model hub; none for --method bm25")
    add("--data", required=True, metavar="DATA", help="training data: a BEIR folder, DPR json, pair or triplet jsonl")
    add("--output", required=True, type=Path, metavar="OUT", help="a new .jsonl (.json for dpr)")
    add("--corpus", metavar="FILE", help="mine in this jsonl (_id, title, text) instead of the data's own passages")
    add("--data_format", choices=DATA_FORMATS, help="default: sniffed")
    add("--data_columns", nargs="+", metavar="ROLE=NAME", help="columns with names of their own: query=question ...")
    add("--split", default="train", help="the qrels split of a BEIR folder")
    add("--on_bad_record", choices=("stop", "skip"), default="stop")
    add("--output_format", choices=OUTPUT_FORMATS, default="pairs")
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
    rules.add_argument(
        "--cross_encoder_margin", type=float, metavar="X", help="keep those this far below the positive; default: 3.0"
    )

    search = parser.add_argument_group("search")
    search.add_argument("--method", choices=("dense", "bm25"), default="dense")
    search.add_argument("--index", default="Flat", help="FAISS factory string; Flat is exact")
    search.add_argument("--index_parameters", help="FAISS search parameters, such as nprobe=32")
    search.add_argument("--similarity", choices=("cos", "dot"), help="default: the model's own")
    search.add_argument("--batch_size", type=int, default=32)
    search.add_argument("--precision", choices=("float32", "bfloat16", "float16"), default="float32")
    search.add_argument("--query_max_length", type=int, metavar="TOKENS")
    search.add_argument("--passage_max_length", type=int, metavar="TOKENS")
    search.add_argument("--bm25_k1", type=float, default=0.9, metavar="X")
    search.add_argument("--bm25_b", type=float, default=0.4, metavar="X")
    search.add_argument("--device", help="of the models, such as cpu or cuda:1")
    search.add_argument("--no_progress", action="store_true")
    search.add_argument("--trust_remote_code", action="store_true", help="run code that comes with a model")
    return parser
