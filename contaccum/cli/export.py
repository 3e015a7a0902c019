"""`contaccum export MODEL OUT`: write plain SentenceTransformer folders for embedding servers."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from contaccum.cli.options import MODEL_HELP, Parser, load_model, print_at_once
from contaccum.encoders.names import require_model
from contaccum.files import require_new_folder


def run(argv: Sequence[str]) -> int:
    """Export a model and return exit code 0."""
    args = _parse_arguments(argv)
    print_at_once(f"exporting {args.model} to {args.folder}")
    require_model(args.model)
    require_new_folder(args.folder)
    from contaccum.encoders.export import export_model

    model = load_model(args.model, args)
    record = export_model(
        model,
        args.folder,
        args.dtype,
        model_name=args.model,
        trust_remote_code=args.trust_remote_code,
    )
    for check in record["checks"]:
        print(
            f"{check['num_texts']} {check['task']} texts, folder {check['folder']!r}: "
            f"cosine with the model {check['mean']:.6f} on average, {check['least']:.6f} at least"
        )
    print(f"written: {args.folder}")
    return 0


def _parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        "export",
        "Write a model as plain SentenceTransformer folders that embedding servers can load, "
        "and compare their embeddings with the model's.",
        "device",
        "trust_remote_code",
        usage="contaccum export MODEL OUT [OPTIONS]",
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help=MODEL_HELP)
    add("folder", type=Path, metavar="OUT", help="the new folder")
    dtypes = ("float32", "bfloat16", "float16")
    add("--dtype", choices=dtypes, default="float32", help="type of the weights; default: float32")
    return parser.parse(argv)
