"""`contaccum tune`: from a config to the settings with the best score on dev, within a budget.

`tune` prepares a `Search` and writes its result. The base model is the model before training. Each
trial trains it anew with other settings.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from contaccum.comparison.options import Options, is_used_by, to_command_line
from contaccum.data import TrainingSets
from contaccum.encoders.dual_encoder import DualEncoder
from contaccum.errors import ConfigError
from contaccum.evaluation.evaluator import RetrievalEvaluator
from contaccum.files import AnyPath, read_json, write_json
from contaccum.retrieval.corpus import CorpusEncoder
from contaccum.retrieval.encode import model_fingerprint
from contaccum.retrieval.store import EmbeddingStore
from contaccum.training import config
from contaccum.training.arguments import (
    QUERY_SIDE_SETTINGS,
    ContAccumTrainingArguments,
)
from contaccum.training.options import DataArguments
from contaccum.training.run import load_encoder
from contaccum.training.train_data import count_rows
from contaccum.tuning.baselines import TRIAL_METRIC, Baselines, score_baselines
from contaccum.tuning.budget import TimeForTrials
from contaccum.tuning.choice import Settings
from contaccum.tuning.methods import adapt_options, compute_starts, select_methods
from contaccum.tuning.negatives import MINED_FILE, mine_once
from contaccum.tuning.result import TunedSettings, write_tuned
from contaccum.tuning.search import Search
from contaccum.tuning.space import Setting, make_space

STORE_FOLDER = "passage_store"
SEARCH_FOLDER = "search"
BUDGET_FILE = "used_time.json"

# Settings of a config that decide what a run writes and when, but not how it trains. Each trial
# sets them itself.
_OUTPUT_SETTINGS = (
    "output_dir",
    "overwrite_output_dir",
    "resume_from_checkpoint",
    "eval_strategy",
    "eval_steps",
    "eval_on_start",
    "save_strategy",
    "save_steps",
    "save_total_limit",
    "load_best_model_at_end",
    "early_stopping_patience",
    "disable_tqdm",
    "logging_strategy",
    "logging_steps",
    "push_to_hub",
)

REQUEST_FILE = "request.json"
"""File in the output folder with everything that decides the results of the search."""

_ADAPTER_SETTINGS = (
    "lora_r",
    "lora_alpha",
    "lora_dropout",
    "lora_target_modules",
    "load_in_4bit",
    "merge_adapter",
)


def tune(
    options: Options,
    fixed_keys: Sequence[str],
    time: TimeForTrials,
    output: Path,
    print_line: Callable[[str], None] = print,
    baselines: Baselines | None = None,
) -> TunedSettings:
    """Search settings by their scores on ``eval_data``, and write the best ones to a config.

    A call with the same arguments continues a search that was killed.

    Args:
        options: options of `contaccum train`, with ``model``, ``train_data`` and ``eval_data``. The
            search starts from them.
        fixed_keys: the options that the search does not vary.
        time: the time that the search may take, over all calls.
        output: the folder for the config `TUNED_CONFIG`, the record `TUNED_RECORD` and the journal
            of the trials.
        print_line: is called with each line for the user.
        baselines: the scores on dev before training; None: they are computed and printed.

    Raises:
        UserError: for options, data or a model that cannot be used, or a budget that is too short.
    """
    search_options = _make_search_options(options)
    base_options = _make_base_options(search_options, output)
    model_args, data_args, args = config.parse(to_command_line(base_options))
    evaluator = _load_evaluator(data_args, args)
    encoder = load_encoder(model_args, args)
    training = config.load_data(data_args, args)
    fixed_options = {**search_options, "fixed": sorted(fixed_keys)}
    passage_store = options.get("passage_store", [None])[0]
    request = _make_request(fixed_options, encoder, training, evaluator, passage_store)
    _require_same_search(output / REQUEST_FILE, request, args.process_index == 0)
    store = _prepare_store(options, args, encoder, output)
    if baselines is None:
        baselines = score_baselines(encoder, evaluator, store)
        print_line(baselines.format_line(model_args.model))
    is_base_weak = baselines.is_base_too_weak
    methods = select_methods(search_options, fixed_keys, store is not None, is_base_weak)
    starts = compute_starts(methods, search_options, args, encoder, is_base_weak)
    del encoder  # each trial loads the model again
    if len(methods) == 1:
        search_options["method"] = methods
    space = _make_space(training, args, fixed_keys)
    mined = _mine_negatives(options, space, methods, data_args, args, output)

    search = Search(
        options={**search_options, "eval_strategy": ["epoch"]},  # a trial replaces it by steps
        starts=starts,
        space=space,
        adapt_options=partial(adapt_options, store=store, mined=mined),
        evaluator=evaluator,
        base_scores=baselines.query_scores,
        time=time,
        folder=output / SEARCH_FOLDER,
        seed=args.seed,
        print_line=print_line,
    )
    choice = search.run()
    run_options = _make_run_options(search_options, choice.settings, fixed_keys)
    final_options = adapt_options(run_options, choice.settings["method"], store, mined)
    trials = search.make_records()
    tuned = TunedSettings(choice, final_options, baselines.base, baselines.bm25, trials)
    if args.process_index == 0:
        write_tuned(tuned, output, num_queries=len(baselines.query_scores))
    return tuned


def _make_request(
    options: Options,
    encoder: DualEncoder,
    training: TrainingSets,
    evaluator: RetrievalEvaluator,
    passage_store: str | None,
) -> dict[str, Any]:
    """Return everything that decides the results of a search, except the time.

    Args:
        passage_store: the folder or URL of the store that the user gave.

    Raises:
        UserError: if the store cannot be opened.
    """
    store_fingerprint = None
    if passage_store is not None:
        store_fingerprint = EmbeddingStore.open(passage_store).fingerprint
    return {
        "options": options,
        "model": model_fingerprint(encoder),
        "training data": training.fingerprint,
        "dev data": evaluator.dataset.fingerprint,
        "passage store": store_fingerprint,
    }


def _make_space(
    training: TrainingSets, args: ContAccumTrainingArguments, fixed_keys: Sequence[str]
) -> dict[str, Setting]:
    """Return the settings to search.

    If the config sets ``max_steps``, the number of epochs has no effect and is not searched.
    """
    keys = set(fixed_keys)
    if args.max_steps > 0:
        keys.add("max_steps")
    num_pairs = count_rows(training.dataset) or 0
    pairs_per_step = args.per_device_train_batch_size * args.world_size
    return make_space(num_pairs, pairs_per_step, keys)


def _require_same_search(file: Path, request: dict[str, Any], is_first_process: bool) -> None:
    """Write the request of a search, or check that an earlier start had the same.

    Raises:
        ConfigError: if the file is of another search.
    """
    if file.is_file():
        earlier_request = read_json(file)
        # Through JSON, as the earlier request was.
        request = json.loads(json.dumps(request))
        changed = [name for name, value in request.items() if earlier_request.get(name) != value]
        if changed:
            raise ConfigError(
                f"{file.parent}: contains a search with other {' and '.join(changed)}; name "
                "another --output, or remove this one"
            )
    elif is_first_process:
        write_json(file, request)


def _make_search_options(options: Options) -> dict[str, list[str]]:
    """Return the options without the options that each trial sets itself."""
    dropped_keys = {*_OUTPUT_SETTINGS, *QUERY_SIDE_SETTINGS}
    return {key: list(values) for key, values in options.items() if key not in dropped_keys}


def _make_run_options(
    search_options: Options, settings: Settings, fixed_keys: Sequence[str]
) -> Options:
    """Return the options of a search with the chosen settings.

    If the trials were cut, the settings contain ``max_steps``. The number of epochs is then
    dropped, because it had no effect in the trials. But a length that the user has fixed is kept.
    """
    run_options = {**search_options}
    is_length_fixed = not {"max_steps", "num_train_epochs"}.isdisjoint(fixed_keys)
    for key, value in settings.items():
        if key != "max_steps" or not is_length_fixed:
            run_options[key] = [str(value)]
    if "max_steps" in settings and not is_length_fixed:
        run_options.pop("num_train_epochs", None)
    return run_options


def _make_base_options(options: Options, output: Path) -> Options:
    """Return options for loading the base model without an adapter, and the dev data."""
    base_options: dict[str, Sequence[str]] = {"eval_strategy": ["epoch"]}
    for key, values in options.items():
        if key not in _ADAPTER_SETTINGS and is_used_by("grad_accum", key):
            base_options[key] = values
    # Nothing is trained with these options. This method needs no bank and no store.
    base_options["method"] = ["grad_accum"]
    base_options["output_dir"] = [str(output / SEARCH_FOLDER)]
    return base_options


def _load_evaluator(
    data_args: DataArguments, args: ContAccumTrainingArguments
) -> RetrievalEvaluator:
    """Return the evaluator of the dev data; its primary metric is nDCG@10.

    The option ``metric_for_best_model`` chooses among the checkpoints of one training. Trials and
    baselines have no checkpoints.

    Raises:
        ConfigError: if there are no dev data, or they are not a BEIR folder.
    """
    evaluator = config.load_evaluator(data_args, args)
    if evaluator is None:
        raise ConfigError(
            "eval_data is not set: settings are chosen by scores on dev data (make some with "
            "contaccum split)"
        )
    if not isinstance(evaluator, RetrievalEvaluator):
        raise ConfigError(
            f"eval_data={data_args.eval_data}: tune on a BEIR folder; the search needs the score "
            "of each query"
        )
    evaluator.primary_metric = TRIAL_METRIC
    return evaluator


def _prepare_store(
    options: Options, args: ContAccumTrainingArguments, encoder: DualEncoder, output: Path
) -> AnyPath | None:
    """Return the folder or URL of the document embeddings for query-side training.

    The option ``passage_store`` names it. Without this option, the base model encodes the documents
    of the option ``corpus`` once.

    Returns:
        None if neither option is set.
    """
    if "passage_store" in options:
        return options["passage_store"][0]
    if "corpus" not in options:
        return None
    folder = output / STORE_FOLDER
    with args.main_process_first(desc="encoding the corpus"):
        if args.process_index == 0:
            corpus = Path(options["corpus"][0])
            corpus_encoder = CorpusEncoder(
                encoder, "base", corpus, folder, batch_size=args.per_device_eval_batch_size
            )
            corpus_encoder.encode()
    return folder


def _mine_negatives(
    options: Options,
    space: dict[str, Setting],
    methods: Sequence[str],
    data_args: DataArguments,
    args: ContAccumTrainingArguments,
    output: Path,
) -> Path | None:
    """Mine a hard negative for each query, if the search may use one.

    If no negatives are available to the search, the setting ``num_hard_negatives`` is removed from
    ``space``.

    Returns:
        The file of the training data with mined negatives. None if the data have negatives, their
        number is not searched, no method uses negatives, or `mine_once` finds none.
    """
    if "num_hard_negatives" not in space or data_args.num_hard_negatives > 0:
        return None
    mined = None
    if list(methods) != ["query_side"]:
        mined = _mine_once(options, data_args, args, output)
    if mined is None:
        del space["num_hard_negatives"]
    return mined


def _mine_once(
    options: Options, data_args: DataArguments, args: ContAccumTrainingArguments, output: Path
) -> Path | None:
    """Mine negatives on the first process; see `mine_once`."""
    corpus = options["corpus"][0] if "corpus" in options else None
    with args.main_process_first(local=False, desc="mining hard negatives"):
        return mine_once(
            data_args.train_data,
            corpus,
            output / MINED_FILE,
            data_format=data_args.data_format,
            data_columns=data_args.data_columns,
            split=data_args.split,
            on_bad_record=data_args.on_bad_record,
        )
