"""`contaccum export MODEL OUT`: plain SentenceTransformer folders for embedding servers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from contaccum.cli.options import Parser, load_model


def run(argv: Sequence[str]) -> int:
    """Export a model; return 0.

    Raises:
        UserError: for a model that cannot be loaded or exported, and for a folder that exists.
    """
    parser = Parser(
        "export",
        "Write a model as plain SentenceTransformer folders that embedding servers load, compare "
        "their embeddings with the model's, and write the commands that serve them.",
        "device",
        "trust_remote_code",
        usage="contaccum export MODEL OUT [OPTIONS]",
    )
    parser.add_argument("model", metavar="MODEL", help="a folder, or a name on the model hub")
    parser.add_argument("folder", type=Path, metavar="OUT", help="the new folder")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        default="float32",
        help="dtype of the weights; default: %(default)s",
    )
    parser.add_argument(
        "--onnx", action="store_true", help="also write onnx/model.onnx for servers that run ONNX"
    )
    # The lengths are those that the model was trained with.
    parser.set_defaults(query_max_length=None, passage_max_length=None)
    args = parser.parse(argv)

    from contaccum.encoders.export import SERVING_GUIDE, check_new_folder, export_model

    check_new_folder(args.folder, args.dtype, args.onnx)
    model = load_model(args.model, args)
    result = export_model(model, args.folder, args.dtype, args.onnx, model_name=args.model)
    for check in result.checks:
        print(
            f"{check.folder} ({check.weights}), {check.num_texts} {check.task} texts: cosine with "
            f"the model {check.mean:.6f} on average, {check.least:.6f} at least"
        )
    print(f"written: {result.folder}")
    print(f"how to serve it: {result.folder / SERVING_GUIDE}")
    return 0
