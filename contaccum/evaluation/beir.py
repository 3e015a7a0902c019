"""BEIR evaluation of a model, as a function (`evaluate_beir`) and as the `contaccum evaluate` command (`run`).

Puts data, retrieval and metrics together. Whatever can be wrong is refused before the first text is encoded.
Reranking, sparse and late-interaction models are out of scope.
"""

from __future__ import annotations

import argparse
import difflib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

from contaccum.data.beir_folder import BeirDataset, load_beir_folder
from contaccum.data.beir_names import resolve_beir_data
from contaccum.errors import ConfigError, DataError
from contaccum.evaluation.metrics import DEFAULT_K_VALUES, check_k_values, score_run
from contaccum.evaluation.model_record import model_fingerprint, tokenisation_contract
from contaccum.evaluation.results import EvaluationResult, format_table, require_writable, write_result
from contaccum.retrieval.encoding import AUTOCAST_DTYPES, check_autocast_dtype


def evaluate_beir(
    model: Any,
    dataset: BeirDataset | str | os.PathLike[str],
    index: str = "Flat",
    k_values: Sequence[int] = DEFAULT_K_VALUES,
    batch_size: int = 32,
    similarity: Literal["cos", "dot"] | None = None,
    autocast_dtype: str | None = None,
    show_progress: bool = True,
    split: str = "test",
    on_bad_record: Literal["stop", "skip"] = "stop",
    index_parameters: str | None = None,
    use_gpu: bool | Literal["auto"] = "auto",
    model_name: str | None = None,
) -> EvaluationResult:
    """Encode a corpus and its queries, search, and score.

    Args:
        model: a SentenceTransformer, or an object with `encode_queries` and `encode_corpus` as BEIR calls them.
        dataset: loaded data, or what `resolve_beir_data` takes: a BEIR folder or the name of a public set (then
            `split` and `on_bad_record` count).
        index, index_parameters, use_gpu: see `build_index`; "Flat" is exact.
        k_values: cut-offs of the metrics; as many documents as the greatest are retrieved.
        similarity: None is the model's own (`similarity_fn_name`, cosine where it says nothing).
        autocast_dtype: None for float32, "bfloat16" or "float16".
        model_name: what the result calls the model.

    Raises:
        ConfigError: settings that are out of range or do not fit the model or the data; before anything is encoded.
        DataError: data that cannot be used.
    """
    from contaccum.retrieval.searcher import FaissSearcher

    k_values = check_k_values(k_values)
    if not isinstance(dataset, BeirDataset):
        dataset = _load_data(dataset, split, on_bad_record)
    searcher = FaissSearcher(
        model,
        batch_size=batch_size,
        index=index,
        index_parameters=index_parameters,
        use_gpu=use_gpu,
        autocast_dtype=autocast_dtype,
        show_progress_bar=show_progress,
    )
    metric = _check_search(model, len(dataset.corpus), index, index_parameters, batch_size, autocast_dtype, similarity)
    run = searcher.search(dataset.corpus, dataset.queries, max(k_values), metric)
    metrics, per_query = score_run(dataset.qrels, run, k_values)
    timing = dict(searcher.timing)
    timing["documents_per_second"] = len(dataset.corpus) / max(timing["encode_corpus_seconds"], 1e-9)
    return EvaluationResult(
        metrics=metrics,
        per_query=per_query,
        run=run,
        data={
            "name": dataset.name,
            "split": dataset.split,
            "path": str(dataset.path),
            "documents": len(dataset.corpus),
            "queries": len(dataset.queries),
            "judgements": sum(map(len, dataset.qrels.values())),
            "fingerprint": dataset.fingerprint,
        },
        model={
            "name": model_name,
            "fingerprint": model_fingerprint(model),
            "similarity": metric,
            "dimension": searcher.last_index.dimension,
        },
        tokenisation=tokenisation_contract(model),
        search={
            "index": index,
            "index_parameters": searcher.last_index.parameters,
            "k": max(k_values),
            "gpus": searcher.last_index.gpus,
        },
        timing=timing,
        precision=autocast_dtype or "float32",
    )


def run(argv: Sequence[str] | None = None) -> int:
    """`contaccum evaluate MODEL --data DIR [DIR ...] --output out.json`; returns 0.

    With several data sets, each gets its own record and run: out.NAME.json and out.NAME.trec.
    Raises `UserError` for every mistake in the arguments, the data or the model.
    """
    args = _parse(argv)
    k_values = check_k_values(args.k_values)
    several = len(args.data) > 1
    if args.device is not None:
        check_device(args.device)
    if not several:
        require_writable(args.output)

    # Every set is read before the first is encoded, so that a bad record in the last one does not cost a night;
    # only one is held at a time, since BEIR's larger sets together do not fit in memory.
    outputs: dict[Path, str] = {}
    sizes: list[int] = []
    for given in args.data:
        dataset = _load_data(given, args.split, args.on_bad_record)
        output = args.output.with_suffix(f".{dataset.name}.json") if several else args.output
        if output in outputs:
            raise ConfigError(f"--data {outputs[output]} and {given} would both be written to {output}; run them apart")
        require_writable(output)
        outputs[output] = given
        sizes.append(len(dataset.corpus))

    autocast_dtype = None if args.precision == "float32" else args.precision
    from contaccum.encoders import set_max_lengths

    model = _load_model(args.model, args.device, args.trust_remote_code)
    set_max_lengths(model, args.query_max_length, args.passage_max_length)
    for size in sizes:
        _check_search(model, size, args.index, args.index_parameters, args.batch_size, autocast_dtype, args.similarity)

    metrics: dict[str, dict[str, float]] = {}
    for output, given in outputs.items():
        if several:
            dataset = _load_data(given, args.split, args.on_bad_record)
        result = evaluate_beir(
            model,
            dataset,
            index=args.index,
            k_values=k_values,
            batch_size=args.batch_size,
            similarity=args.similarity,
            autocast_dtype=autocast_dtype,
            show_progress=not args.no_progress,
            index_parameters=args.index_parameters,
            model_name=args.model,
        )
        write_result(result, output)
        metrics[dataset.name] = result.metrics
    print(format_table(metrics))
    print("written:", *outputs)
    return 0


class _Parser(argparse.ArgumentParser):
    """Refuses as the rest of contaccum does: one line, raised, not printed with the usage."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _Parser(
        prog="contaccum evaluate", description="Score a model on BEIR data with FAISS.", allow_abbrev=False
    )
    parser.add_argument("model", metavar="MODEL", help="a folder, or a name on the model hub")
    parser.add_argument("--data", nargs="+", required=True, metavar="DIR", help="BEIR folders, or names of public sets")
    parser.add_argument("--split", default="test")
    parser.add_argument(
        "--output", default=Path("results.json"), type=Path, metavar="OUT.json", help="OUT.NAME.json when several"
    )
    parser.add_argument("--index", default="Flat", help="FAISS factory string; Flat is exact")
    parser.add_argument("--index_parameters", help="FAISS search parameters, such as nprobe=32")
    parser.add_argument("--k_values", nargs="+", type=int, default=list(DEFAULT_K_VALUES), metavar="K")
    parser.add_argument("--similarity", choices=("cos", "dot"), help="default: the model's own")
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--precision", choices=("float32", *AUTOCAST_DTYPES), default="float32")
    parser.add_argument("--query_max_length", type=int, metavar="TOKENS")
    parser.add_argument("--passage_max_length", type=int, metavar="TOKENS")
    parser.add_argument("--on_bad_record", choices=("stop", "skip"), default="stop")
    parser.add_argument("--device", help="of the model, such as cpu or cuda:1")
    parser.add_argument("--no_progress", action="store_true")
    parser.add_argument("--trust_remote_code", action="store_true", help="run code that comes with the model")
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        options = [option for action in parser._actions for option in action.option_strings]
        name = unknown[0].split("=")[0]
        close = difflib.get_close_matches(name.replace("-", "_"), [o.replace("-", "_") for o in options], n=1)
        hint = f"; did you mean --{close[0].lstrip('_')}?" if close else ""
        raise ConfigError(f"unknown argument {unknown[0]!r}{hint} (see {parser.prog} --help)")
    return args


def _load_data(given: str | os.PathLike[str], split: str, on_bad_record: Any) -> BeirDataset:
    dataset = load_beir_folder(resolve_beir_data(os.fspath(given), split), split, on_bad_record)
    for what, records in (("documents", dataset.corpus), ("judged queries", dataset.queries)):
        if not records:
            raise DataError(f"{dataset.path}: there are no {what} to evaluate on")
    return dataset


def _check_search(
    model: Any,
    documents: int,
    index: str,
    index_parameters: str | None,
    batch_size: int,
    autocast_dtype: str | None,
    similarity: str | None,
) -> Literal["cos", "dot"]:
    """The metric to search with; raises `ConfigError` for what would otherwise fail after the corpus is encoded."""
    from contaccum.retrieval.index import check_factory
    from contaccum.retrieval.searcher import FaissSearcher

    if batch_size < 1:
        raise ConfigError(f"batch_size must be at least 1, not {batch_size}")
    check_autocast_dtype(autocast_dtype)
    metric = FaissSearcher(model).metric(similarity)
    dimension = getattr(model, "truncate_dim", None)
    if dimension is None and hasattr(model, "get_embedding_dimension"):
        dimension = model.get_embedding_dimension()
    if dimension is not None:
        check_factory(index, dimension, documents, metric, index_parameters)
    return metric


def check_device(device: str) -> None:
    """Raise `ConfigError` for a device that torch cannot use here."""
    import torch

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device {device!r} cannot be used here: {str(error).splitlines()[0]}") from error


def _load_model(name: str, device: str | None, trust_remote_code: bool) -> Any:
    from contaccum.encoders import DualEncoder

    return DualEncoder.from_pretrained(name, device=device, trust_remote_code=trust_remote_code)
