"""`contaccum mine MODEL --data DATA --output OUT.jsonl`: refuse early, mine, write the negatives and a report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from contaccum.cli.options import MODEL, Parser, load_model
from contaccum.errors import ConfigError
from contaccum.files import provenance


def run(argv: Sequence[str]) -> int:
    """Returns 0; raises `UserError` for every mistake in the arguments, the data or the models, and writes nothing."""
    from contaccum import mining
    from contaccum.data import parse_training_sets
    from contaccum.retrieval.encode import model_fingerprint, tokenisation_fingerprint

    what = "Find hard negatives for training data: passages that score high and are not known to be relevant."
    parser = Parser("mine", what, "output", "similarity", "passage_max_length", *MODEL)
    add = parser.add_argument
    parser.add_model("a folder, or a name on the model hub; none for --method bm25")
    add(
        "--data",
        required=True,
        metavar="DATA",
        help="training data, as `contaccum train` takes it (docs/data.md)",
    )
    add(
        "--corpus",
        metavar="PATH",
        help="mine in these passages instead of the data's own; see contaccum encode",
    )
    add("--data_format", help="default: sniffed")
    add(
        "--data_columns",
        nargs="+",
        metavar="ROLE=NAME",
        help="columns with names of their own: query=question ...",
    )
    add("--split", default="train", help="the qrels split of a BEIR folder")
    add("--output_format", choices=mining.OUTPUT_FORMATS, default="pairs")
    add(
        "--cross_encoder",
        metavar="MODEL",
        help="rescore candidates with this cross-encoder, and write its scores",
    )
    add("--method", choices=("dense", "bm25"), default="dense")
    for rule in fields(mining.SelectionRules):
        add(f"--{rule.name}", default=rule.default, **rule.metadata)
    args = parser.parse(argv)
    if (args.model is None) != (args.method == "bm25"):
        raise ConfigError("method dense needs a MODEL, and bm25 uses none: leave it out")
    given = {rule.name: getattr(args, rule.name) for rule in fields(mining.SelectionRules)}
    rules: Any = {name: value for name, value in given.items() if value is not None}
    mining.SelectionRules(**rules).check(args.cross_encoder is not None)
    mining.check_output(args.output, args.output_format)

    common = {"data_format": args.data_format, "split": args.split, "columns": args.data_columns}
    [source] = parse_training_sets([args.data], common).values()
    how = {"texts": source.pop("corpus", None), "on_bad_record": args.on_bad_record, **source}
    data = mining.load_mining_data(how.pop("path"), args.corpus, **how)
    print(f"{args.data}: {data.record['records']}", flush=True)
    model = load_model(args.model, args) if args.model else None
    cross_encoder = args.cross_encoder
    if cross_encoder is not None:
        cross_encoder = mining.load_cross_encoder(
            cross_encoder, args.device, args.trust_remote_code
        )
    record = {
        "model": {"name": args.model, "fingerprint": model_fingerprint(model)},
        "tokenisation": tokenisation_fingerprint(model),
        "cross_encoder": {
            "name": args.cross_encoder,
            "fingerprint": model_fingerprint(cross_encoder),
        },
        **provenance(),
    }
    search: Any = {name: getattr(args, name) for name in ("similarity", "batch_size", "precision")}
    search |= {"cross_encoder": cross_encoder, "show_progress": not args.no_progress}
    mined = mining.mine_hard_negatives(data, model, **search, **rules)
    written = mining.write_mined(mined, args.output, args.output_format, record)
    counts = mined.record()
    few = f"{counts['queries_with_too_few']} of {data.record['queries']} queries"
    print(f"{few} have fewer than {args.num_negatives} negatives")
    print("written:", *written)
    return 0
