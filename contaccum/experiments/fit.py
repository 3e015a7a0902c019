"""`contaccum fit`: hold out, climb the ladder of candidates, verdict and report, as in docs/fit.md.

Read `fit` first: it calls the stages in their order. Every stage writes its result below the output
folder. A later start of the same call skips the stages that are finished, so a process that was
killed continues where it stopped. All processes run the same lines. The first one encodes, scores
and writes, and all decide by its clock.

Terms: the base model is the model before training. A candidate is a complete way to search; see
`contaccum.experiments.candidates`. Free is the best search without training. A fold is one of
several splits of a small data set into train, dev and test; the candidates are made on fold 0.
"""

from __future__ import annotations

import itertools
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from contaccum import __version__, work
from contaccum.data.beir import load_beir_folder
from contaccum.data.corpus import get_passage_texts
from contaccum.data.records import Columns, parse_columns, read_records
from contaccum.data.rows import OnBadRecord
from contaccum.data.split import CORPUS_FILE, TRAIN_FILE, Future, read_split
from contaccum.data.vectors import SIDES, find_vectors
from contaccum.distributed import rank, world_size
from contaccum.encoders.dual_encoder import DualEncoder
from contaccum.encoders.names import DEFAULT_MODEL, model_name, require_model
from contaccum.encoders.settings import get_tower
from contaccum.errors import ConfigError, UserError
from contaccum.evaluation.evaluator import sample
from contaccum.evaluation.metrics import BETTER, WORSE
from contaccum.experiments.candidates import (
    BOTH_TOWERS,
    CANDIDATES_FOLDER,
    MEAN,
    Candidate,
    DevSet,
    GivenVectors,
    encode_corpus,
    load_candidate,
    load_matrix,
    read_kinds,
)
from contaccum.experiments.folds import Pairs, score_fold
from contaccum.experiments.ladder import Ladder
from contaccum.experiments.request import format_duration, parse_duration, read_given
from contaccum.experiments.run import TRAINING_FOLDER, Job
from contaccum.experiments.vectors import load_new_model, load_vectors
from contaccum.experiments.verdict import (
    ScoreColumns,
    Verdict,
    collect_scores,
    compare_queries,
    compute_verdicts,
    describe_vectors,
    join_folds,
    search_test_set,
    tabulate,
    write_verdicts_to_card,
)
from contaccum.files import (
    AnyPath,
    atomic_file,
    atomic_folder,
    hash_path,
    provenance,
    require_exists,
    write_text,
)
from contaccum.progress import StatusLine
from contaccum.report.fit_page import build_fit_page
from contaccum.retrieval.bm25 import write_bm25_weight
from contaccum.retrieval.documents import StoreDocuments
from contaccum.retrieval.encode import encode_texts
from contaccum.retrieval.store import EmbeddingStore
from contaccum.settings import Settings, find, replace, to_yaml
from contaccum.training.linear_map import MAP_FILE
from contaccum.training.passage_store import STORE_FOLDER
from contaccum.training.proposal import check_given, make_base_settings, propose_settings
from contaccum.training.setup import load_encoder

CONFIG_FILE = "config.yaml"
REPORT_FILE = "report.html"
LOG_FILE = "log.txt"  # what libraries have printed

_MAX_BASE_DOCUMENTS = 2000  # a sample of dev, by which several base models are compared
_MAX_SHARE_OF_BASE_MODEL = 0.1  # of the time left, for scoring one of several base models
_LADDER_SHARE = 0.5  # of the budget, if other splits follow, in each of which it is repeated
_MEASURED_DOCUMENTS = 64  # by which the time of encoding is measured
_WARM_UP_DOCUMENTS = 4
_MEASURED_TEXTS = 16  # by which the time of float32 and bf16 is compared
_LEAST_ENCODED = 16  # documents whose encoding shows its time
_MIN_SPEED_UP = 1.1  # a smaller one may be noise
_MAX_UNKNOWN_SHARE = 0.5  # of the tokens of queries; a base model with more cannot read them
_MAX_QUERIES = 1000  # whose tokens are counted
_END_SECONDS = 5.0  # for the model and the report


@dataclass(frozen=True)
class FitResult:
    """The result of `fit`.

    Attributes:
        verdicts: the comparisons with the best search without training, {"new": on new documents,
            "known": on known ones}; `str` returns the line that was printed. If one of the two
            kinds has fewer than ten test queries, there is one verdict, "all".
        folder: the output folder.
        warnings: warnings about the verdicts, one line each.
        trust_remote_code: True if code that comes with the base model was trusted.
    """

    verdicts: dict[str, Verdict]
    folder: Path
    warnings: list[str]
    trust_remote_code: bool = False

    @property
    def verdict(self) -> Verdict:
        """The verdict on new documents, or the only one."""
        return next(iter(self.verdicts.values()))

    @property
    def report(self) -> Path:
        """The path of the HTML report."""
        return self.folder / REPORT_FILE

    @cached_property
    def model(self) -> DualEncoder:
        """The model that the verdict recommends, loaded at the first access; none with vectors."""
        return DualEncoder.from_pretrained(
            str(self.folder / "model"), trust_remote_code=self.trust_remote_code
        )


def fit(
    data: AnyPath,
    model: AnyPath | Sequence[AnyPath] = DEFAULT_MODEL,
    budget: str | float = "30m",
    output: AnyPath = "runs/fit",
    *,
    corpus: AnyPath | None = None,
    corpus_columns: Columns = None,
    data_columns: Columns = None,
    on_bad_record: OnBadRecord = "stop",
    min_score: float | None = None,
    dev: float | None = None,
    test: float | None = None,
    future: Future | None = None,
    bm25: bool = True,
    vectors: AnyPath | None = None,
    new_queries: AnyPath | None = None,
    generated: AnyPath | None = None,
    print_line: Callable[[str], None] = print,
    **settings: Any,
) -> FitResult:
    """Train a retriever on question-passage pairs, and compare it with the best search without.

    The base model is the model before training. A call with the same arguments continues a call
    that was killed.

    Args:
        data: pairs in any format of docs/data.md, or a folder that `contaccum split` wrote.
        model: the folder or hub name of a SentenceTransformer or a transformers backbone; or
            several, of which the one with the best score on dev is trained.
        budget: the wall time of the whole call, such as "90s", "30m" or "2h"; or in seconds.
        output: the folder for everything that is written.
        corpus: the documents in which dev and test queries are searched; None: the held-out
            passages and a sample of the others.
        corpus_columns: as ``data_columns``, for ``corpus``: {"id": "chunk_id", "text": "content"}.
        on_bad_record: how ``data`` are read, as in `contaccum train`.
        data_columns: {role: column name}, such as {"query": "question", "positive": "answer"}, or
            a list of words "role=name".
        min_score: the least score or label of a pair that is a match, for scored pairs.
        dev, test: the sizes of the held-out sets: a number of queries, or a share below 1.
        future: "known" to hold out queries about passages that training has seen, "new" for
            passages that it has not seen, "both" for half of each; None: "both" if the data have
            enough passages with several queries, else "new".
        bm25: False: search with vectors alone, for engines that have no BM25.
        vectors: a folder with the vectors of queries and documents, in place of a model; see
            docs/vectors.md.
        new_queries: a new model that encodes the queries, while the documents keep their old
            ``vectors``. The verdict says what that costs against encoding all documents anew.
        generated: questions that a model has generated, to train on only. Candidates with and
            without them are compared on dev (with ``towers="one"``, they are used without that).
        print_line: is called with each line for the user.
        settings: options of `contaccum train`, such as ``learning_rate=1e-5``, which `fit` then
            does not choose. None stands for an option that is not given.

    Raises:
        UserError: for data, a model, settings or a folder that cannot be used.
    """
    # What can be refused at once is refused before anything is written.
    given = read_given(settings)  # the user's own settings of trainings
    names = [model] if isinstance(model, (str, os.PathLike)) else model
    models = list(dict.fromkeys(os.path.expanduser(os.fspath(name)) for name in names))
    pairs = Pairs(
        path=Path(data).expanduser(),
        corpus=expand(corpus),
        corpus_columns=parse_columns(corpus_columns, "corpus_columns") or None,
        columns=parse_columns(data_columns) or None,
        on_bad_record=on_bad_record,
        dev=dev,
        test=test,
        future=future,
        min_score=min_score,
        generated=expand(generated),
    )
    folder = Path(output).expanduser().absolute()
    budget_seconds = parse_duration(budget)
    vectors_folder = expand(vectors)
    if vectors_folder is not None:
        models = check_vectors(vectors_folder, models, new_queries, given)
    elif new_queries is not None:
        raise ConfigError("new_queries needs the old vectors of the documents: give vectors")
    args = check_given(models[0] if models else DEFAULT_MODEL, given)
    if len(models) == 1:  # of several, one that cannot be loaded is left out
        require_model(models[0])
    request = {
        "work": "a fit",
        "version": __version__,
        "model": [hash_path(name) for name in models],
        "vectors": vectors_folder and hash_path(str(vectors_folder)),
        "new queries": new_queries is not None,
        "bm25": bm25,
        "device": args.device.type,
        "number of processes": world_size(),
        **given,
        **{name: hash_path(given[name]) for name in find("is_path").keys() & given.keys()},
        **pairs.describe(folder),
    }
    may_restart = work.on_first_rank(require_unused_folder, folder)
    with work.begin(folder, request, "contaccum fit", may_restart), ExitStack() as quiet:
        time_budget = work.Budget(budget_seconds, folder)
        status = StatusLine(
            print_line if rank() == 0 else lambda line: None,
            lambda: f"{time_budget.used_here() / 60:.1f} of {budget_seconds / 60:.3g} minutes",
        )
        job = Job(folder, request, given, args, time_budget, status)
        matched_pairs = pairs  # with given vectors: those that have one
        documents: StoreDocuments | None
        given_vectors = None
        seconds_per_document = 0.0
        if vectors_folder is not None:
            sides = SIDES if new_queries is None else ("documents",)
            base, documents, matched_pairs = load_vectors(job, vectors_folder, pairs, sides)
            given_vectors = GivenVectors(documents)
        num_folds = hold_out(job, matched_pairs)
        # Only now, because a folder in which nothing was done stays empty.
        quiet.enter_context(status.quiet(folder / LOG_FILE if rank() == 0 else Path(os.devnull)))
        if given_vectors is None:
            base_model = choose_base_model(job, models)
            # If a larger budget has found a better base model, all that follows is done again.
            job = job._replace(request={**request, "base model": models.index(base_model)})
            base, proposed = load_base(job, base_model)
            documents, seconds_per_document = encode_documents(job, base, base_model)
        else:
            base_model = str(vectors_folder)  # named in place of a model
            if new_queries is not None:
                base, given_vectors = load_new_model(job, models[0], given_vectors.documents)
            proposed = replace(Settings(), model=base_model)
        ends_at = (_LADDER_SHARE if num_folds > 1 else 1.0) * budget_seconds - _END_SECONDS
        ladder = Ladder(
            job, base, proposed, documents, seconds_per_document, ends_at, given_vectors
        )
        climb(ladder)
        chosen = ladder.get_best()
        job.print_line(f"chosen on dev: {chosen.number}. {chosen.describe()}")
        fold_scores: list[ScoreColumns] = []
        if chosen.system in ("map", "trained"):
            fold_scores = score_other_folds(ladder, chosen, matched_pairs, num_folds)
        verdicts, record = work.on_first_rank(judge, ladder, chosen, pairs, base_model, fold_scores)
    shown = Path(output).expanduser()  # as the user wrote it
    result = f"model: {shown / 'model'}" if vectors is None else f"map: {shown / MAP_FILE}"
    for line in (
        *(f"warning: {warning}" for warning in record["warnings"]),
        *map(str, verdicts.values()),
        *record["lines"],
        f"{result}   report: {shown / REPORT_FILE}",
    ):
        job.print_line(line)
    return FitResult(verdicts, folder, record["warnings"], base.trust_remote_code)


# The stages, in their order -----------------------------------------------------------------------


def expand(path: AnyPath | None) -> Path | None:
    return None if path is None else Path(path).expanduser()


def check_vectors(
    vectors: Path, models: Sequence[str], new_queries: AnyPath | None, given: Mapping[str, Any]
) -> list[str]:
    """Refuse what vectors in place of a model do not allow; return the new model, if any."""
    require_exists(vectors)
    for side in SIDES if new_queries is None else ("documents",):
        find_vectors(vectors, side)
    used = {"use_cpu", "disable_tqdm"}
    if new_queries is not None:
        used |= {"query_max_length", "passage_max_length", "query_prompt", "passage_prompt"}
        used |= {"trust_remote_code"}
    unused = sorted(given.keys() - used)
    if models != [DEFAULT_MODEL]:
        unused.insert(0, "model")
    if unused:
        raise ConfigError(
            f"{unused[0]} is set, but with vectors only a map of the query vectors is made: drop it"
        )
    if world_size() > 1:
        raise ConfigError("vectors need a single process: start without torchrun")
    return [] if new_queries is None else [os.path.expanduser(os.fspath(new_queries))]


def hold_out(job: Job, pairs: Pairs) -> int:
    """Split the pairs into train, dev and test; print what was held out; return `count_folds`."""
    show_progress = not job.args.disable_tqdm and sys.stderr.isatty()
    for line in work.on_first_rank(pairs.hold_out, job.data, show_progress=show_progress):
        job.print_line(line)
    split = read_split(job.data)
    num_folds = pairs.count_folds(split)
    job.print_line(split.summary())
    if num_folds > 1:
        job.print_line(
            f"{split.test} test queries are few: the verdict is over up to {num_folds} splits, and "
            "a model is trained on each"
        )
    else:
        for warning in split.warnings():
            job.print_line(f"note: {warning}")
    return num_folds


def choose_base_model(job: Job, models: Sequence[str]) -> str:
    """Return the base model with the best score on dev, with BM25 beside it.

    A large dev corpus is reduced to a sample. Each model has its own prompts, lengths and
    similarity. A model that cannot be loaded is left out; so is one whose encoding would take too
    long, unless all would. A later start with a larger budget compares them again.

    Raises:
        ConfigError: if none can be loaded.
    """
    if len(models) == 1:
        return models[0]

    def compare() -> dict[str, Any]:
        left = job.budget.seconds - job.budget.used_here()
        dataset = sample(load_beir_folder(job.data / "dev", "test"), corpus=_MAX_BASE_DOCUMENTS)
        texts = get_passage_texts(dataset.corpus)
        kinds = read_kinds(job.data / "dev")
        dev = DevSet(dataset, kinds, None, job.batch_size, job.request["bm25"])
        document_seconds: dict[str, float] = {}  # by model
        scores: dict[str, float] = {}
        for model in models:
            name = model_name(model)
            try:
                require_model(model)
                settings = propose_settings(job.data / TRAIN_FILE, model, job.given)
                encoder = load_encoder(make_base_settings(settings), job.args)
            except UserError as error:
                job.print_line(f"{name} is left out: {error}")
                continue
            document_seconds[model] = measure_seconds_per_document(encoder, texts, job.batch_size)
            needed = document_seconds[model] * len(texts)
            if needed > _MAX_SHARE_OF_BASE_MODEL * left:
                job.print_line(
                    f"{name} is left out: encoding {len(texts):,} documents would take "
                    f"{format_duration(needed)}"
                )
                continue
            weighed = dev.weigh(dev.evaluator.search(encoder))
            scores[model] = weighed["scores"][MEAN]
            job.print_line(
                f"{name}: {weighed['vectors'][MEAN]:.3f}, with BM25 {scores[model]:.3f} on dev, "
                f"{1000 * document_seconds[model]:.0f} ms per document on this machine"
            )
        if not document_seconds:
            raise ConfigError("no base model can be loaded: give another --model")
        if scores:
            best = max(scores, key=lambda model: scores[model])
            job.print_line(f"base model: {model_name(best)}")
        else:
            best = min(document_seconds, key=lambda model: document_seconds[model])
            job.print_line(f"base model: {model_name(best)}, the fastest one")
        is_complete = len(scores) == len(models)
        number = models.index(best)
        return {"number": number, "is_complete": is_complete, "budget": job.budget.seconds}

    folder = job.folder / "base_models"
    job.status.start("comparing base models")
    with job.budget.measure("base models"):
        found = work.once(folder, job.request, compare)
        if not found["is_complete"] and job.budget.seconds > found["budget"]:
            work.on_first_rank(shutil.rmtree, folder)
            found = work.once(folder, job.request, compare)
    return models[found["number"]]


def measure_seconds_per_document(
    encoder: DualEncoder, documents: Sequence[str], batch_size: int, precision: str = "float32"
) -> float:
    """Return the seconds to encode one document, as a mean over a sample.

    The sample is evenly spread, because training passages come first, and may be shorter than the
    others.
    """
    step = max(1, len(documents) // _MEASURED_DOCUMENTS)
    measured = documents[: step * _MEASURED_DOCUMENTS : step]
    # The first batch is slower than all others, because it allocates memory.
    encode_texts(encoder, measured[:_WARM_UP_DOCUMENTS], "document", batch_size, precision)
    started = time.perf_counter()
    encode_texts(encoder, measured, "document", batch_size, precision)
    return (time.perf_counter() - started) / len(measured)


def load_base(job: Job, model: str) -> tuple[DualEncoder, Settings]:
    """Load the base model, and propose settings for training it; in bf16 if that is faster.

    Raises:
        ConfigError: if the model cannot be loaded.
    """
    job.status.start(f"loading {model_name(model)}")
    train_file = job.data / TRAIN_FILE
    settings = propose_settings(train_file, model, job.given)
    base = load_encoder(make_base_settings(settings), job.args)
    unknown = compute_unknown_share(base, train_file)
    if unknown > _MAX_UNKNOWN_SHARE:
        job.print_line(
            f"warning: {model_name(model)} does not know {unknown:.0%} of the tokens of the "
            "queries, so it was not trained on this language; give a --model that was"
        )

    def compare_precisions() -> dict[str, Any]:
        corpus = load_beir_folder(job.data / "dev", "test").corpus
        texts = get_passage_texts(corpus)[:_MEASURED_TEXTS]
        return {
            precision: measure_seconds_per_document(base, texts, job.batch_size, precision)
            for precision in ("float32", "bfloat16")
        }

    if not {"bf16", "fp16"} & job.given.keys():
        seconds = work.once(job.folder / "precision", job.request, compare_precisions)
        speed_up = seconds["float32"] / seconds["bfloat16"]
        if speed_up > _MIN_SPEED_UP:
            job.print_line(f"training in bf16, which is {speed_up:.1f} times as fast as float32")
            settings = replace(settings, bf16=True)
    return base, settings


def compute_unknown_share(model: DualEncoder, train_file: Path) -> float:
    """Return the share of unknown tokens in a sample of the training queries; 0 if none can be."""
    tokenizer: Any = get_tower(model, "query").tokenizer
    queries = [record.query for record in itertools.islice(read_records(train_file), _MAX_QUERIES)]
    tokens = [
        token
        for text in queries
        for token in tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    ]
    return tokens.count(tokenizer.unk_token_id) / max(1, len(tokens))


def encode_documents(
    job: Job, base: DualEncoder, model: str
) -> tuple[StoreDocuments | None, float]:
    """Encode the documents of training, dev and test with the base model.

    Those of training are in a store, against which the query tower is trained. The others are added
    in memory.

    Returns:
        The documents, on the first process; and the seconds to encode one.
    """
    file = job.folder / "documents" / "held_out.npy"

    def list_held_out(documents: StoreDocuments) -> list[str]:
        texts: dict[str, None] = {}  # used as a set that keeps the order
        for part in ("dev", "test"):
            corpus = load_beir_folder(job.data / part, "test").corpus
            texts.update(dict.fromkeys(get_passage_texts(corpus)))
        stored = set(documents.find_embeddings(list(texts))[0].tolist())  # indices of texts
        return [text for index, text in enumerate(texts) if index not in stored]

    def encode() -> dict[str, Any]:
        started = time.perf_counter()
        corpus = job.data / CORPUS_FILE
        corpus_encoder = encode_corpus(job, base, model_name(model), corpus, job.store)
        held_out = list_held_out(StoreDocuments(EmbeddingStore.open(job.store)))
        np.save(file, encode_texts(base, held_out, "document", job.batch_size))
        seconds = time.perf_counter() - started
        num_encoded = corpus_encoder.num_encoded + len(held_out)
        seconds_per_document = seconds / max(1, num_encoded)
        if num_encoded < _LEAST_ENCODED:  # an earlier start has encoded nearly all
            texts = get_passage_texts(load_beir_folder(job.data / "dev", "test").corpus)
            seconds_per_document = measure_seconds_per_document(base, texts, job.batch_size)
        return {"seconds_per_document": seconds_per_document, "cut": corpus_encoder.describe_cut()}

    job.status.start("encoding documents")
    with job.budget.measure("documents"):
        found = work.once(file.parent, job.request, encode)
    if found["cut"]:
        job.print_line(found["cut"])

    if rank() > 0:
        return None, found["seconds_per_document"]
    documents = StoreDocuments(EmbeddingStore.open(job.store))
    documents.add(list_held_out(documents), np.load(file, allow_pickle=False))
    return documents, found["seconds_per_document"]


def climb(ladder: Ladder) -> None:
    """Make the candidates; Ctrl-C, or an error in a training, ends this at the best so far."""
    print_line = ladder.job.print_line
    try:
        with ladder.job.budget.measure("candidates"):
            ladder.climb()
    except UserError as error:
        if not ladder.candidates:
            raise
        print_line(f"warning: the ladder ends here: {error}")
    except (KeyboardInterrupt, SystemExit) as stop:
        was_interrupted = isinstance(stop, KeyboardInterrupt) or stop.code == 130
        if not ladder.candidates or not was_interrupted or world_size() > 1:
            raise
        print_line("stopped: the verdict is about the candidates so far")


def score_other_folds(
    ladder: Ladder, chosen: Candidate, pairs: Pairs, num_folds: int
) -> list[ScoreColumns]:
    """Train and test the chosen candidate on the other splits for which there is time."""
    job = ladder.job
    split = read_split(job.data)
    # The base model encodes the passages of held-out queries too, about one for each.
    num_documents = split.documents["train"] + split.dev + split.test
    if chosen.rung >= BOTH_TOWERS:  # its model encodes the documents of test
        num_documents += split.documents["test"]
    needed = chosen.training_seconds + num_documents * ladder.seconds_per_document + _END_SECONDS
    scores = []
    with job.budget.measure("other splits"):
        for number in range(1, num_folds):
            fold = job.folder / "folds" / str(number)
            is_done = work.on_first_rank(work.read_result, fold) is not None
            if not is_done and job.budget.left() < needed:
                job.print_line(
                    f"the verdict is over {number} of {num_folds} splits, because the budget is "
                    "not enough for more"
                )
                break
            job.print_line(f"split {number + 1} of {num_folds}: training and testing again")
            job.status.start(f"split {number + 1}")
            scores.append(score_fold(number, ladder, chosen, pairs))
    return scores


def judge(
    ladder: Ladder,
    chosen: Candidate,
    pairs: Pairs,
    base_model: str,
    fold_scores: Sequence[ScoreColumns],
) -> tuple[dict[str, Verdict], dict[str, Any]]:
    """Search the test set; write the recommended model, the report and the record; return both."""
    job, free, split = ladder.job, ladder.free, read_split(ladder.job.data)
    job.status.start("test")
    with job.budget.measure("test"):
        folder = ladder.get_folder(chosen)
        test_set, results = search_test_set(job.data, ladder.documents, ladder, chosen, folder)
    first_scores = collect_scores(test_set, results)
    scores = join_folds([first_scores, *fold_scores])
    verdicts = compute_verdicts(scores, free, chosen, 1 + len(fold_scores), split.questions)
    words = {verdict.word for verdict in verdicts.values()}
    is_recommended = BETTER in words and WORSE not in words
    # With new queries, `free` encodes all documents anew: the verdict is the price of the map.
    recommended = chosen if is_recommended or free.system == "anew" else free
    if ladder.given_vectors is None:
        write_model(job, ladder, recommended)
        write_verdicts_to_card(job.folder / "model", verdicts.values(), model_name(base_model))
    else:
        write_map(job, ladder, recommended)
    write_config(job, chosen)
    records = {kind: verdict.record() for kind, verdict in verdicts.items()}
    files = {"path": pairs.path, "corpus": pairs.corpus, "generated": pairs.generated}
    paths = {name: path and str(path) for name, path in files.items()}
    free_system = "bm25" if free.system == "bm25" else "base_with_bm25"
    if not ladder.has_texts:
        free_system = "base"
    record = {
        "request": {**job.request, "settings": dict(job.given), **asdict(pairs), **paths},
        "verdict": next(iter(records.values())),
        "verdicts": records,
        "lines": [describe_vectors(scores)] if chosen.system != "bm25" else [],
        "warnings": [line for verdict in verdicts.values() for line in verdict.warnings()],
        "model": model_name(base_model),
        "has_model": ladder.given_vectors is None,
        "data": paths,
        "split": asdict(split),
        "scores": tabulate(
            results, first_scores, verdicts, ladder, chosen, free_system, scores["group"]
        ),
        "candidates": [asdict(candidate) for candidate in ladder.candidates],
        "free": free.number,
        "chosen": chosen.number,
        "recommended": recommended.number,
        "bm25_weight": recommended.bm25_weight,
        "changes": compare_queries(test_set, results[free_system], results["trained_with_bm25"]),
        "seconds": {**job.budget.stage_seconds, "total": job.budget.used_here()},
        "budget_seconds": job.budget.seconds,
        "made_with": {**provenance(), "time": datetime.now(UTC).isoformat(timespec="seconds")},
    }
    write_text(job.folder / REPORT_FILE, build_fit_page(record, job.folder))
    return verdicts, work.finish(job.folder, record)


# Files --------------------------------------------------------------------------------------------


def write_model(job: Job, ladder: Ladder, candidate: Candidate) -> None:
    """Write the model of a candidate into the folder ``model``; of BM25, the base model."""
    training = ladder.get_folder(candidate) / TRAINING_FOLDER
    with atomic_folder(job.folder / "model") as folder:
        if candidate.system == "trained" and candidate.blend == 1.0:
            # With its logs, but without the documents' vectors.
            left_out = shutil.ignore_patterns(STORE_FOLDER)
            shutil.copytree(training, folder, dirs_exist_ok=True, ignore=left_out)
        else:
            model = load_candidate(candidate, ladder.base, training.parent)
            model.save_pretrained(str(folder))
        write_bm25_weight(folder, candidate.bm25_weight)


def write_map(job: Job, ladder: Ladder, candidate: Candidate) -> None:
    """Write the matrix (d, e) by which query vectors are multiplied; the identity without a map."""
    assert ladder.documents is not None
    matrix = torch.eye(ladder.documents.dimension, dtype=torch.float64)
    if candidate.system == "map":
        matrix = load_matrix(candidate, ladder.get_folder(candidate))
    with atomic_file(job.folder / MAP_FILE) as temporary_file:
        save_file({"matrix": matrix}, temporary_file)


def write_config(job: Job, chosen: Candidate) -> None:
    """Write the settings of the chosen candidate's training, from which it can be repeated."""
    text = f"# Chosen by contaccum fit on dev data: {chosen.describe()}; see {REPORT_FILE}.\n"
    if chosen.settings:
        text += to_yaml({**chosen.settings, "output_dir": str(job.folder / "again")})
    else:
        text += "# It has no training that `contaccum train` could repeat.\n"
    write_text(job.folder / CONFIG_FILE, text)


def require_unused_folder(folder: Path) -> bool:
    """Return True if a call may replace the work that an earlier call has begun in the folder.

    It may as long as nothing is encoded: data, model and settings that were refused can be
    corrected. A folder with a finished fit, or other files, raises `ConfigError`.
    """
    record = work.read_result(folder)
    if record is not None:
        raise ConfigError(
            f"{folder}: this folder has a finished fit ({record['verdict']['line']}); name another "
            "output folder, or remove this one"
        )
    work.require_own_folder(folder, "a fit")
    # With vectors in place of a model, there are no documents to encode.
    return not any((folder / name).exists() for name in ("documents", CANDIDATES_FOLDER))
