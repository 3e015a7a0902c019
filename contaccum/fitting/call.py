"""`contaccum.fit`: the Python function of `contaccum fit`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from contaccum.data.readers import parse_columns
from contaccum.defaults import DEFAULT_GUARD_LOSS, DEFAULT_MODEL
from contaccum.files import AnyPath
from contaccum.fitting.folder import FitFolder
from contaccum.fitting.pipeline import Fit
from contaccum.fitting.result import FitResult
from contaccum.fitting.source import DataSource
from contaccum.tuning.budget import parse_duration


def fit(
    data: AnyPath,
    model: AnyPath = DEFAULT_MODEL,
    budget: str | float = "30m",
    output: AnyPath = "runs/fit",
    *,
    corpus: AnyPath | None = None,
    data_format: str | None = None,
    data_columns: Mapping[str, str] | Sequence[str] | None = None,
    on_bad_record: Literal["stop", "skip"] = "stop",
    min_score: float | None = None,
    dev: float | None = None,
    test: float | None = None,
    guard: AnyPath | Sequence[AnyPath] | None = None,
    guard_loss: float = DEFAULT_GUARD_LOSS,
    print_line: Callable[[str], None] = print,
    **settings: Any,
) -> FitResult:
    """Train a retriever on question-passage pairs, and compare it with the base model.

    The base model is the model before training. A call with the same arguments continues a call
    that was killed.

    Args:
        data: pairs in any format of docs/data.md, or a folder that `contaccum split` wrote.
        model: the folder or hub name of a SentenceTransformer or a transformers backbone.
        budget: the wall time of the whole call, such as "90s", "30m" or "2h"; or in seconds.
        output: the folder for everything that is written.
        corpus: the documents in which dev and test queries are searched; None: the held-out
            passages and a sample of the others.
        data_format, on_bad_record: how ``data`` are read, as in `contaccum train`.
        data_columns: {role: column name}, such as {"query": "question", "positive": "answer"}, or
            a list of words "role=name".
        min_score: the least score or label of a pair that is a match, for scored pairs.
        dev, test: the sizes of the held-out sets: a number of queries, or a share below 1.
        guard: BEIR folders or public names of other data. The trained model is then merged with the
            base model so that it loses at most ``guard_loss`` nDCG@10 on each of them.
        guard_loss: see ``guard``.
        print_line: is called with each line for the user.
        settings: options of `contaccum train`, such as ``learning_rate=1e-5``. The search does not
            vary them. None stands for an option that is not given.

    Raises:
        UserError: for data, a model, settings or a folder that cannot be used, and for a budget
            that is too short.
    """
    options: dict[str, list[str]] = {}
    for key, value in settings.items():
        values = value if isinstance(value, (list, tuple)) else [value]
        if value is not None:
            options[key] = [_format_value(item) for item in values]
    source = DataSource(
        path=Path(data).expanduser(),
        corpus=None if corpus is None else Path(corpus).expanduser(),
        data_format=data_format,
        columns=parse_columns(data_columns) or None,
        on_bad_record=on_bad_record,
        dev=dev,
        test=test,
        min_score=min_score,
    )
    folder = FitFolder(Path(output).expanduser())
    seconds = parse_duration(budget)
    if isinstance(guard, (str, os.PathLike)):
        guard = [guard]
    guard_sets = [os.fspath(guard_set) for guard_set in guard or ()]
    model_name = os.path.expanduser(os.fspath(model))
    return Fit(
        source, model_name, options, seconds, folder, print_line, guard_sets, guard_loss
    ).run()


def _format_value(value: Any) -> str:
    """Return a value as the command line expects it: a mapping as JSON."""
    return json.dumps(value) if isinstance(value, Mapping) else str(value)
