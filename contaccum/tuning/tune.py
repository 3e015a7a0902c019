"""`contaccum tune`: from a config to the settings with the best score on dev, within a budget.

`tune` prepares a `Search` and writes its result. The base model is the model before training. Each
trial trains it anew with other settings.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from contaccum import __version__
from contaccum.data import TrainingSets
from contaccum.data.beir import find_beir_file
from contaccum.encoders.dual_encoder import DualEncoder
from contaccum.errors import ConfigError
from contaccum.evaluation.evaluator import RetrievalEvaluator
from contaccum.files import AnyPath, hash_file, read_json, write_json
from contaccum.retrieval.encode import CorpusEncoder, model_fingerprint, tokenisation_fingerprint
from contaccum.retrieval.store import EmbeddingStore
from contaccum.settings import Settings as TrainSettings
from contaccum.training.arguments import ContAccumTrainingArguments
from contaccum.training.checkpoint import count_rows
from contaccum.training.run import load_data, load_encoder, load_evaluator, load_guide
from contaccum.tuning.baselines import TRIAL_METRIC, Baselines, score_baselines
from contaccum.tuning.budget import TimeForTrials
from contaccum.tuning.choice import Settings
from contaccum.tuning.methods import (
    QUERY_SIDE_SETTINGS,
    adapt_options,
    compute_starts,
    make_base_options,
    select_methods,
)
from contaccum.tuning.negatives import MINED_FILE, mine_once
from contaccum.tuning.options import OUTPUT_SETTINGS, Options, parse, to_command_line
from contaccum.tuning.result import TunedSettings, write_tuned
from contaccum.tuning.search import Search
from contaccum.tuning.space import Setting, make_space

STORE_FOLDER = "passage_store"
SEARCH_FOLDER = "search"
BUDGET_FILE = "used_time.json"

_RUN_SETTINGS = ("output_dir", "overwrite_output_dir", "resume_from_checkpoint")
"""Settings of a config that name the files of its own run. Trials have other files."""

REQUEST_FILE = "request.json"
"""File in the output folder with everything that decides the results of the search."""


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
    folder = output / SEARCH_FOLDER
    run_options = _make_run_options(options, folder)
    search_options = _make_search_options(options)
    settings, args = parse(to_command_line(make_base_options(run_options)))
    methods = select_methods(run_options, fixed_keys, args.world_size, print_line)
    evaluator = _load_evaluator(settings)
    encoder = load_encoder(settings, args)
    training = load_data(settings)
    fingerprints = fingerprint_models(encoder, settings, args)
    request = _make_request(search_options, fixed_keys, options, training, evaluator)
    request.update(fingerprints)
    _require_same_search(output / REQUEST_FILE, request, args.process_index == 0)
    store = _prepare_store(options, args, encoder, output)
    if baselines is None:
        baselines = score_baselines(encoder, evaluator, store)
        print_line(baselines.format_line(settings.model))
    starts = compute_starts(methods, search_options, args, encoder, baselines.is_base_too_weak)
    del encoder  # each trial loads the model again
    space = _make_space(training, args, fixed_keys, list(starts))
    mined = _mine_negatives(options, space, list(starts), settings, args, output)
    adapt = partial(adapt_options, store=store, mined=mined, fixed_keys=fixed_keys)
    adapt = partial(adapt, num_processes=args.world_size)
    search = Search(
        options={**search_options, "eval_strategy": ["epoch"]},  # eval_data need a strategy
        starts=starts,
        space=space,
        adapt_options=adapt,
        evaluator=evaluator,
        base_scores=baselines.query_scores,
        time=time,
        folder=folder,
        seed=args.seed,
        print_line=print_line,
    )
    choice = search.run()
    chosen_options = _make_chosen_options(search_options, choice.settings, fixed_keys)
    final_options = dict(adapt(chosen_options, choice.settings["method"]))
    final_options.update(_select_options(run_options, OUTPUT_SETTINGS))
    trials = search.make_records()
    tuned = TunedSettings(choice, final_options, baselines.base, baselines.bm25, trials)
    if args.process_index == 0:
        write_tuned(tuned, output, num_queries=len(baselines.query_scores))
    return tuned


def _make_request(
    search_options: Options,
    fixed_keys: Sequence[str],
    options: Options,
    training: TrainingSets,
    evaluator: RetrievalEvaluator,
) -> dict[str, Any]:
    """Return everything that decides the results of a search, except the models and the time.

    Args:
        search_options: the options that all trials have.
        fixed_keys: the options that are not searched.
        options: the user's options, which may name a store or a corpus.

    Raises:
        UserError: if the store cannot be opened.
    """
    store_fingerprint = None
    if "passage_store" in options:
        store_fingerprint = EmbeddingStore.open(options["passage_store"][0]).fingerprint
    return {
        "options": {**search_options, "fixed": sorted(fixed_keys)},
        "version of contaccum": __version__,
        "training data": training.fingerprint,
        "dev data": evaluator.dataset.fingerprint,
        "passage store": store_fingerprint,
        "corpus": options.get("corpus"),
        "content of the corpus": _hash_corpus(options),
    }


def fingerprint_models(
    encoder: DualEncoder, settings: TrainSettings, args: ContAccumTrainingArguments
) -> dict[str, str | None]:
    """Return {name: fingerprint} of everything in the models that decides the results of runs.

    An error message shows the names.

    Args:
        encoder: the base model.
        settings: the settings that name the guide.
        args: the arguments of a run, for the device.
    """
    return {
        "model": model_fingerprint(encoder),
        "tokenisation (tokenizer, prompts, lengths or pooling)": tokenisation_fingerprint(encoder),
        "guide": model_fingerprint(load_guide(settings, args)),
    }


def _hash_corpus(options: Options) -> str | None:
    """Return a hash of the corpus, in which negatives are mined; None without one."""
    if "corpus" not in options:
        return None
    path = Path(options["corpus"][0]).expanduser()
    if path.is_dir():
        path = find_beir_file(path, "corpus.jsonl")
    return hash_file(path)


def _make_space(
    training: TrainingSets,
    args: ContAccumTrainingArguments,
    fixed_keys: Sequence[str],
    methods: Sequence[str],
) -> dict[str, Setting]:
    """Return the settings to search.

    If the config sets ``max_steps``, the number of epochs has no effect and is not searched.
    """
    keys = set(fixed_keys)
    if args.max_steps > 0:
        keys.add("max_steps")
    if methods == ["in_batch"] and "per_device_train_batch_size" in keys:
        keys.add("total_train_batch_size")  # the whole update is one micro-batch
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
        changed = _list_changes(earlier_request, request)
        if changed:
            raise ConfigError(
                f"{file.parent}: this folder has a search with another {', '.join(changed)}; name "
                "another --output, or remove this folder"
            )
    elif is_first_process:
        write_json(file, request)


def _list_changes(earlier_request: dict[str, Any], request: dict[str, Any]) -> list[str]:
    """Return the names of what differs between two requests; options by their keys."""
    changed = []
    for name, value in request.items():
        if name != "options" and earlier_request.get(name) != value:
            changed.append(name)
    options = dict(request["options"])
    earlier_options = dict(earlier_request["options"])
    # An option may have the same value in both, and be fixed in only one of them.
    differing_keys = set(options.pop("fixed")) ^ set(earlier_options.pop("fixed"))
    for key in {*options, *earlier_options}:
        if options.get(key) != earlier_options.get(key):
            differing_keys.add(key)
    return sorted(differing_keys) + changed


def _make_run_options(options: Options, folder: Path) -> dict[str, list[str]]:
    """Return the options of a run in another folder, which is evaluated on ``eval_data``."""
    run_options = _drop_options(options, _RUN_SETTINGS)
    if run_options.get("eval_strategy", ["no"]) == ["no"]:
        run_options["eval_strategy"] = ["epoch"]
    run_options["output_dir"] = [str(folder)]
    return run_options


def _make_search_options(options: Options) -> dict[str, list[str]]:
    """Return the options without the options that each trial sets itself."""
    return _drop_options(options, (*_RUN_SETTINGS, *OUTPUT_SETTINGS, *QUERY_SIDE_SETTINGS))


def _drop_options(options: Options, keys: Collection[str]) -> dict[str, list[str]]:
    """Return a copy of the options without some keys."""
    return {key: list(values) for key, values in options.items() if key not in keys}


def _select_options(options: Options, keys: Collection[str]) -> dict[str, list[str]]:
    """Return a copy of the options that has only some keys."""
    return {key: list(values) for key, values in options.items() if key in keys}


def _make_chosen_options(
    search_options: Options, settings: Settings, fixed_keys: Sequence[str]
) -> Options:
    """Return the options of a search with the chosen settings.

    If the trials were cut, the settings contain ``max_steps``. The number of epochs is then
    dropped, because it had no effect in the trials. But a length that the user has fixed is kept.
    """
    has_fixed_length = "max_steps" in fixed_keys or "num_train_epochs" in fixed_keys
    chosen_options = {**search_options}
    for key, value in settings.items():
        if key != "max_steps" or not has_fixed_length:
            chosen_options[key] = [str(value)]
    if "max_steps" in settings and not has_fixed_length:
        chosen_options.pop("num_train_epochs", None)
    return chosen_options


def _load_evaluator(settings: TrainSettings) -> RetrievalEvaluator:
    """Return the evaluator of the dev data; its primary metric is nDCG@10.

    The option ``metric_for_best_model`` chooses among the checkpoints of one training. Trials and
    baselines have no checkpoints.

    Raises:
        ConfigError: if there are no dev data, or they are not a BEIR folder.
    """
    evaluator = load_evaluator(settings)
    if evaluator is None:
        raise ConfigError(
            "eval_data is not set: settings are chosen by scores on dev data (make some with "
            "contaccum split)"
        )
    if not isinstance(evaluator, RetrievalEvaluator):
        raise ConfigError(
            f"eval_data={settings.eval_data}: tune on a BEIR folder; the search needs the score "
            "of each query"
        )
    evaluator.primary_metric = TRIAL_METRIC
    return evaluator


def _prepare_store(
    options: Options, args: ContAccumTrainingArguments, encoder: DualEncoder, output: Path
) -> AnyPath | None:
    """Return the folder of the document embeddings for query-side training.

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
    settings: TrainSettings,
    args: ContAccumTrainingArguments,
    output: Path,
) -> Path | None:
    """Mine a hard negative for each query, if the search may use one.

    If no negatives are available to the search, the setting ``num_hard_negatives`` is removed from
    ``space``.

    Returns:
        The file of the training data with mined negatives. None if the options already set
        ``num_hard_negatives``, its number is not searched, no method uses negatives, or `mine_once`
        finds none.
    """
    if "num_hard_negatives" not in space or settings.num_hard_negatives > 0:
        return None
    mined = None
    if list(methods) != ["query_side"]:
        corpus = options["corpus"][0] if "corpus" in options else None
        with args.main_process_first(local=False, desc="mining hard negatives"):
            mined = mine_once(
                settings.train_data,
                corpus,
                output / MINED_FILE,
                data_format=settings.data_format,
                data_columns=settings.data_columns,
                split=settings.split,
                on_bad_record=settings.on_bad_record,
            )
    if mined is None:
        del space["num_hard_negatives"]
    return mined
