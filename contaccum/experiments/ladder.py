"""The ladder of `contaccum fit`: ways to search, in the order of their cost, and the best of them.

A candidate is a complete way to search (`contaccum.experiments.candidates`). `Ladder.climb` makes
them rung by rung, until the time ends:

    0  no training: BM25 alone, and the base model
    1  linear maps of the query vectors, in closed form and by gradients
    2  the query tower, trained against the vectors of all documents
    3  both towers, in trainings of growing length, until dev shows no gain
    4  a second stage, both towers at other learning rates, a gradient cache

Averages of a map or a trained model with the base model are candidates too. Each candidate is
scored on dev as soon as it is there, and its map or model stays in a folder. So the best one stands
at every moment, and a later start of the same fit goes on from there.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

from contaccum import work
from contaccum.data.beir import BeirDataset, load_beir_folder
from contaccum.data.split import (
    CORPUS_FILE,
    TRAIN_FILE,
    WITH_GENERATED_FILE,
    read_split,
    write_part,
)
from contaccum.distributed import world_size
from contaccum.encoders.dual_encoder import DualEncoder
from contaccum.encoders.names import model_name
from contaccum.evaluation.results import Run
from contaccum.experiments.candidates import (
    ANEW_FOLDER,
    BOTH_TOWERS,
    CANDIDATES_FOLDER,
    FREE,
    FURTHER,
    LINEAR_MAP,
    MEAN,
    QUERY_TOWER,
    STORE_FOLDER,
    Candidate,
    DevSet,
    GivenVectors,
    choose,
    encode_corpus,
    load_candidate,
    loses_little,
    read_kinds,
    search_with,
)
from contaccum.experiments.run import TRAINING_FOLDER, Job, Trained, train
from contaccum.files import atomic_folder
from contaccum.retrieval.bm25 import fuse_runs
from contaccum.retrieval.documents import StoreDocuments
from contaccum.settings import Settings, replace, to_dict
from contaccum.training.arguments import ContAccumTrainingArguments
from contaccum.training.linear_map import RIDGES, write_linear_maps
from contaccum.training.losses import count_rows
from contaccum.training.passage_store import USELESS_SHARE_OF_BM25
from contaccum.training.proposal import (
    compute_start_rate,
    explain_no_query_side,
    make_settings,
    read_width,
)
from contaccum.training.setup import load_data, make_second_stage

BLENDS = (0.5, 0.75)  # shares of a map or a trained model in its averages with the base model
MAX_POOL = 2000  # a larger dev corpus is reduced for models that must encode it anew

RATE_FACTOR = 3.0  # between the learning rates that are tried
MAX_RATES = 4  # of the query tower
QUERY_TOWER_EPOCHS = 3
FIRST_LENGTH = 16  # updates of the first training of both towers
MAX_EPOCHS = 20  # of a training whose length dev decides
MAX_TRIALS_WITHOUT_GAIN = 2  # in a row; then rung 3 ends, and rung 4

_POOL_DEPTH = 10  # top documents of each query; nDCG@10 depends on no others
_LEAST_SECONDS = 5.0  # for the updates of a training
# Of the time that is left: the map by gradients may take so much; so may the last training of the
# query tower, if another rate is to be tried before both towers are trained.
_CHEAP_SHARE = 0.1
_ENCODINGS_PER_PAIR = 4  # a pair's share of an update takes as long as encoding so many documents
_LEAST_SHARE_OF_LENGTH = 0.75  # a shorter training than this share of the next length is not made
_RESERVE_FACTOR = 1.2  # times computed from earlier ones are multiplied by it; machines are noisy


class Ladder:
    """The candidates of a fit. All processes call its methods together; the first one scores.

    Args:
        base_settings: settings of both towers' training, from which those of other methods follow.
        documents: vectors of all documents by the base model; on the first process.
        seconds_per_document: the time in which the base model encodes one.
        ends_at: the seconds of the budget after which the ladder ends.
        given_vectors: in place of a base model; then nothing but their map can be trained.
    """

    def __init__(
        self,
        job: Job,
        base: DualEncoder,
        base_settings: Settings,
        documents: StoreDocuments | None,
        seconds_per_document: float,
        ends_at: float,
        given_vectors: GivenVectors | None = None,
    ) -> None:
        self.job = job
        self.base = base
        self.settings = base_settings
        self.documents = documents
        self.given_vectors = given_vectors
        self.has_texts = given_vectors is None or given_vectors.documents.has_texts
        self.candidates: list[Candidate] = []
        self.seconds_per_document = seconds_per_document
        self._ends_at = ends_at
        self._split = read_split(job.data)
        self._kinds = read_kinds(job.data / "dev")
        self._folder = job.folder / CANDIDATES_FOLDER
        self._has_bm25 = job.request["bm25"] and self.has_texts
        self._has_one_tower = job.given.get("towers") == "one"
        self._has_fixed_length = bool({"max_steps", "num_train_epochs"} & job.given.keys())
        self._train_file = TRAIN_FILE
        self._has_pool = False  # this, the number and the candidate are set by `_make_pool`
        self._num_pool_documents = 0
        self._free_on_pool: Candidate
        self._dev: DevSet
        if documents is not None:
            self._dev = self._load_dev(job.data / "dev")

    @cached_property
    def _pool(self) -> DevSet:
        """The dev set of models that encode its documents anew, on the first process."""
        return self._load_dev(self._folder / "pool_data") if self._has_pool else self._dev

    def _load_dev(self, folder: Path) -> DevSet:
        dataset = load_beir_folder(folder, "test")
        return DevSet(dataset, self._kinds, self.documents, self.job.batch_size, self._has_bm25)

    # Time, choice and scores ----------------------------------------------------------------------

    def left(self) -> float:
        """Return the seconds that are left for the ladder; the same on all processes.

        Two searches with the queries of test follow it.
        """
        seconds = self._ends_at - self.job.budget.used()
        return seconds - 2 * self._seconds_per_score * self._split.test / self._split.dev

    @property
    def _seconds_per_score(self) -> float:
        """The seconds in which the last search with the queries of dev was scored; 0 before one.

        Candidates of a folder, such as blends, are scored one after the other, without other work
        between them.
        """
        for last, candidate in itertools.pairwise(reversed(self.candidates)):
            if last.folder == candidate.folder:
                return last.seconds - candidate.seconds
        return 0.0

    @property
    def _least_seconds(self) -> float:
        """The least seconds for a training of both towers: as many as the encoding that follows."""
        return max(_LEAST_SECONDS, self._num_pool_documents * self.seconds_per_document)

    @property
    def base_candidate(self) -> Candidate:
        """The base model with its best weight of BM25; `_search_without_training` adds it."""
        return self.candidates[1]

    @property
    def free(self) -> Candidate:
        """The best search without training; of a new model's queries, encoding all anew."""
        if self.base_candidate.system == "anew":
            return self.base_candidate
        free = [each for each in self.candidates if each.rung == FREE]
        if not self._has_bm25:
            free = [each for each in free if each.system != "bm25"]
        return max(free, key=lambda each: each.score)

    def get_best(self) -> Candidate:
        """Return the chosen candidate so far; see `choose`. All processes call it together.

        If dev has a pool, candidates of the lower rungs are compared among all documents, and the
        best of them with those of the upper rungs among the documents of the pool.
        """
        free = self.free
        if free.system == "anew":  # the question is what the best map costs
            maps = [each for each in self.candidates if each.system == "map"]
            return max(maps, key=lambda each: each.score, default=free)
        lower = [each for each in self.candidates if FREE < each.rung <= QUERY_TOWER]
        upper = [each for each in self.candidates if each.rung > QUERY_TOWER]
        if not upper or not self._has_pool:
            return choose([*lower, *upper], free)
        best = self._score_on_pool(choose(lower, free))
        chosen = choose([best, *upper], self._free_on_pool)
        return self.candidates[chosen.number]  # with its scores among all documents

    def get_folder(self, candidate: Candidate) -> Path:
        """Return the folder with the map or the model of a candidate."""
        return self._folder / candidate.folder

    def _score_on_pool(self, candidate: Candidate) -> Candidate:
        """Return a candidate with its scores among the documents of the pool."""

        def score() -> dict[str, Any]:
            return {"scores": self._score(candidate, self._pool, candidate.bm25_weight).scores}

        if not self._has_pool:
            return candidate
        folder = self._folder / "pool" / candidate.name.replace("/", "-")
        scores = work.once(folder, self.job.request, score)["scores"]
        return dataclasses.replace(candidate, scores={**candidate.scores, **scores})

    def _add(
        self,
        folder_name: str,
        make: Callable[[Trained], list[Candidate]],
        settings: Settings | None = None,
        seconds: float | None = None,
    ) -> list[Candidate]:
        """Make the candidates of a folder once, and add them; print the best one of them.

        The first process makes them, after the training of all processes if there are settings for
        it; see `train`.
        """
        folder = self._folder / folder_name
        self.job.status.start(f"candidate {len(self.candidates)}: {folder_name.replace('_', ' ')}")

        def train_and_make() -> dict[str, Any]:
            trained = Trained(0, 0.0, [])
            if settings is not None:
                trained = train(settings, folder, self.job.status, seconds)
            return {"candidates": work.on_first_rank(lambda: list(map(asdict, make(trained))))}

        found = work.once(folder, self.job.request, train_and_make, all_ranks=True)
        added = []
        for row in found["candidates"]:
            added.append(Candidate(**{**row, "number": len(self.candidates)}))
            self.candidates.append(added[-1])
        best_added = max(added, key=lambda each: each.score)
        best = self.get_best()
        self.job.status.best = f"best {best.number}: {best.score:.3f}"
        is_best = best.number == best_added.number
        standing = "the best so far" if is_best else f"best: {best.number}. {best.describe()}"
        self.job.print_line(
            f"{best_added.number}. {best_added.describe()}: {best_added.score:.3f} on dev "
            f"({standing}), {best_added.seconds / 60:.1f} minutes used"
        )
        return added

    def _is_done(self, folder_name: str) -> bool:
        folder = self._folder / folder_name
        return work.on_first_rank(work.find_result, folder, self.job.request) is not None

    def _search(self, dev: DevSet, candidate: Candidate) -> Run:
        return search_with(candidate, self.base, self.get_folder(candidate), dev.evaluator)

    def _score(self, candidate: Candidate, dev: DevSet, weight: float | None = None) -> Candidate:
        """Return a candidate with its scores on dev; on the first process.

        ``weight`` is that of BM25; None: the best one.
        """
        free = None
        if candidate.rung > FREE:
            free = self.free if dev is self._dev else self._free_on_pool
        if candidate.system == "bm25":
            scored: dict[str, Any] = {"bm25_weight": 1.0, "scores": dev.score(dev.bm25_run)}
        else:
            scored = dev.weigh(self._search(dev, candidate), free, weight)
        seconds = round(self.job.budget.used_here(), 1)  # of this process, which is the first
        return dataclasses.replace(candidate, **scored, seconds=seconds)

    # The rungs ------------------------------------------------------------------------------------

    def climb(self) -> None:
        """Make the candidates of all rungs for which there is time."""
        self._search_without_training()
        if self.given_vectors is not None:
            self._fit_linear_maps()
            return
        has_query_tower = False
        if not self._has_one_tower:
            reason = explain_no_query_side(self.settings, self.job.given)
            has_query_tower = not reason
            if reason:
                self.job.print_line(f"the query tower is not trained alone: {reason}")
            self._fit_linear_maps()
        if work.on_first_rank((self.job.data / WITH_GENERATED_FILE).is_file):
            self._train_file = WITH_GENERATED_FILE
            if not self._has_one_tower:
                self._fit_linear_maps()
                maps = [each for each in self.candidates if each.rung == LINEAR_MAP]
                if maps:  # all further trainings have the questions of the best one
                    self._train_file = max(maps, key=lambda each: each.score).train_file
        if has_query_tower:
            self._train_query_tower(_CHEAP_SHARE)
        self._train_both_towers()
        self._train_further()
        if has_query_tower:
            # The rates that were left out above for lack of time, now with all that is left: what
            # is too short for both towers, whose models encode the documents, may do for a query
            # tower. Finished ones are not trained again.
            self._train_query_tower(1.0)

    @property
    def _shown_questions(self) -> str:
        return ", with generated questions" if self._train_file == WITH_GENERATED_FILE else ""

    def _search_without_training(self) -> None:
        bm25 = Candidate("BM25" if self.has_texts else "BM25, without texts", FREE, "bm25")
        base = Candidate(model_name(self.settings.model), FREE, "base")
        if self.given_vectors is not None and self.given_vectors.new_model:
            name = f"{self.given_vectors.new_model}, all encoded anew"
            base = Candidate(name, FREE, "anew", folder=ANEW_FOLDER)
        self._add("no_training", lambda _: [self._score(each, self._dev) for each in (bm25, base)])

    def _fit_linear_maps(self) -> None:
        folder_name = "linear_map" if self._train_file == TRAIN_FILE else "linear_map-generated"
        if not self._is_done(folder_name) and self.left() <= 0:
            return
        # Nothing else can be trained with given vectors.
        share = _CHEAP_SHARE if self.given_vectors is None else 1.0
        num_scored = len(RIDGES) + 1 + len(BLENDS)
        seconds = share * (self.left() - num_scored * self._seconds_per_score)

        def fit_and_score(_: Trained) -> list[Candidate]:
            assert self.documents is not None
            train_file = self.job.data / self._train_file
            folder = self._folder / folder_name
            batch_size = self.job.batch_size
            aligned = self.given_vectors and self.given_vectors.aligned
            started = time.monotonic()
            write_linear_maps(
                self.base, train_file, self.documents, batch_size, folder, RIDGES, seconds, aligned
            )
            candidate = Candidate(
                f"linear map by gradients{self._shown_questions}",
                LINEAR_MAP,
                "map",
                folder=folder_name,
                training_seconds=time.monotonic() - started,
                train_file=self._train_file,
            )
            maps = []
            for ridge in RIDGES:
                shown = f"linear map, ridge {ridge:g}{self._shown_questions}"
                maps.append(dataclasses.replace(candidate, name=shown, ridge=ridge))
            if seconds > 0:
                maps.append(candidate)
            scored = [self._score(each, self._dev) for each in maps]
            if aligned is None:  # a new model's vectors as they are mean nothing here
                best = max(scored, key=lambda each: each.score)
                scored += [self._score(_blend(best, blend), self._dev) for blend in BLENDS]
            return scored

        self._add(folder_name, fit_and_score)

    def _train_query_tower(self, largest_share: float) -> None:
        """Train the query tower at the first rate, and at others.

        Another rate is tried if the last training has taken at most the largest share of the time
        that is left.
        """
        rate = first_rate = self._choose_rate("query_side")
        trained: list[Candidate] = []  # the best of each rate
        for _ in range(1 if "learning_rate" in self.job.given else MAX_RATES):
            folder_name = f"query_tower-{rate:g}"
            seconds = self.left() - (1 + len(BLENDS)) * self._seconds_per_score
            if not self._is_done(folder_name):
                if seconds < _LEAST_SECONDS:
                    return
                if trained and trained[-1].training_seconds > largest_share * seconds:
                    return
            settings = self._make_settings("query_side", learning_rate=rate)
            num_updates = self._count_updates(settings, QUERY_TOWER_EPOCHS)
            shown = f"query tower at {rate:g}"
            added = [each for each in self.candidates if each.folder == folder_name] or self._train(
                folder_name, shown, QUERY_TOWER, settings, num_updates, seconds
            )
            trained.append(max(added, key=lambda each: each.score))
            scores = [each.score for each in trained]
            # Up while that is better; if not even once, down once.
            if all(higher > lower for lower, higher in itertools.pairwise(scores)):
                rate = _round(RATE_FACTOR * rate)
            elif len(scores) == 2:  # the first rate is better than the higher one
                rate = _round(first_rate / RATE_FACTOR)
            else:
                return

    def _train_both_towers(self) -> None:
        """Train both towers anew, each time about twice as long, until dev shows no gain."""
        method = self.job.given.get("method", "contaccum")
        if method == "query_side":
            return
        self._make_pool()  # these models encode the documents of dev anew
        settings = self._make_settings(method, learning_rate=self._choose_rate(method))
        longest = self._count_updates(settings, MAX_EPOCHS)
        length = longest if self._has_fixed_length else min(FIRST_LENGTH, longest)
        trained: list[Candidate] = []
        for number in itertools.count(1):
            folder_name = f"both_towers-{number}"
            seconds = self._get_training_seconds()
            num_updates = length
            if not self._is_done(folder_name):
                if seconds < self._least_seconds:
                    break
                training = self._folder / folder_name / TRAINING_FOLDER
                begun = work.on_first_rank(work.read_identity, training)
                if "updates" in begun:  # by an earlier start
                    num_updates = begun["updates"]
                else:
                    per_update = self._estimate_seconds_per_update(settings, trained)
                    if trained and _LEAST_SHARE_OF_LENGTH * length * per_update > seconds:
                        break
                    if 3 * length * per_update > seconds:
                        # The training after this one, twice as long, would not fit. So this one
                        # takes all the time: half as many updates again as are estimated, so that
                        # the time ends it and not their number.
                        num_updates = max(length, math.ceil(1.5 * seconds / per_update))
                    num_updates = min(num_updates, longest)
            shown = f"both towers, {method}"
            trained += self._train(folder_name, shown, BOTH_TOWERS, settings, num_updates, seconds)
            scores = [candidate.score for candidate in trained]
            if has_stalled(scores) or num_updates == longest:
                break
            # The time may have made a training longer or shorter than was meant.
            length = min(2 * max(candidate.updates for candidate in trained), longest)
        if trained:
            self._blend_both_towers(max(trained, key=lambda each: each.score))

    def _estimate_seconds_per_update(
        self, settings: Settings, trained: Sequence[Candidate]
    ) -> float:
        """Return the time of an update of both towers, by the last training if there is one."""
        if trained:
            return trained[-1].training_seconds / trained[-1].updates
        args = ContAccumTrainingArguments.from_settings(settings)
        assert args.total_train_batch_size is not None  # computed when the arguments are created
        num_encodings = _ENCODINGS_PER_PAIR * args.total_train_batch_size
        return num_encodings * self.seconds_per_document / world_size()

    def _blend_both_towers(self, best: Candidate) -> None:
        """Average the best model with the base model, if a kind of documents has lost too much."""
        folder_name = f"{best.folder}-blends"
        needs_blends = not loses_little(best.scores, self._free_on_pool)
        has_time = self._get_training_seconds() > len(BLENDS) * self._least_seconds
        if self._is_done(folder_name) or (needs_blends and has_time):
            blends = [_blend(best, blend) for blend in BLENDS]
            self._add(folder_name, lambda _: [self._score(each, self._pool) for each in blends])

    def _train_further(self) -> None:
        """Go on from the best training of both towers, with one change at a time.

        Two trials in a row without a gain end it.
        """
        upper = [each for each in self.candidates if each.rung == BOTH_TOWERS and each.blend == 1.0]
        if not upper:
            return
        first = max(upper, key=lambda each: each.score)
        trials = [first]
        if "method" not in self.job.given and not self._has_one_tower:
            trials += self._train_second_stage(first)
        first_method = replace(Settings(), **first.settings).method
        first_rate = best_rate = first.settings["learning_rate"]
        tries = []
        if "learning_rate" not in self.job.given:
            tries += [(first_method, RATE_FACTOR), (first_method, 1 / RATE_FACTOR)]
        if "method" not in self.job.given:
            tries.append(("grad_cache", 1.0))
        for method, factor in tries:
            scores = [candidate.score for candidate in trials]
            if has_stalled(scores):
                return
            if factor < 1.0 and best_rate > first_rate:
                continue  # a higher rate is better, so a lower one would be worse
            rate = best_rate if factor == 1.0 else _round(factor * first_rate)
            folder_name = f"{method}-{rate:g}"
            seconds = self._get_training_seconds()
            is_done = self._is_done(folder_name)
            if not is_done and seconds < max(self._least_seconds, 0.5 * first.training_seconds):
                return
            settings = self._make_settings(method, learning_rate=rate)
            shown = f"both towers, {method} at {rate:g}"
            [added] = self._train(folder_name, shown, FURTHER, settings, first.updates, seconds)
            if method == first_method and added.score > first.score:
                best_rate = rate
            trials.append(added)

    def _train_second_stage(self, first: Candidate) -> list[Candidate]:
        """Train the query tower of a trained model against the documents that it encodes.

        There is no candidate if there is no time, or if the time cannot be known.
        """
        folder_name = f"{first.folder}-second_stage"
        query_towers = [each for each in self.candidates if each.rung == QUERY_TOWER]
        if not query_towers:
            return []
        seconds = self._get_training_seconds()
        needed = first.updates * query_towers[0].training_seconds / query_towers[0].updates
        needed += self._split.documents["train"] * self.seconds_per_document
        if not self._is_done(folder_name) and seconds < _RESERVE_FACTOR * needed:
            return []
        corpus = str(self.job.data / CORPUS_FILE)
        options = {**first.settings, "trust_remote_code": self.base.trust_remote_code}
        two_stages = replace(Settings(), **options, second_stage=corpus)
        first_folder = self.get_folder(first)

        def score(trained: Trained) -> list[Candidate]:
            # The documents' vectors are those of the first stage.
            with atomic_folder(self._folder / folder_name / STORE_FOLDER) as store:
                shutil.copytree(first_folder / STORE_FOLDER, store, dirs_exist_ok=True)
            candidate = Candidate(
                f"{first.name}, second stage",
                FURTHER,
                "trained",
                folder=folder_name,
                settings=to_dict(two_stages),
                updates=first.updates + trained.updates,
                training_seconds=first.training_seconds + trained.seconds,
                train_file=first.train_file,
            )
            return [self._score(candidate, self._pool)]

        settings = make_second_stage(two_stages, str(first_folder / TRAINING_FOLDER))
        return self._add(folder_name, score, settings)

    # Parts of the rungs ---------------------------------------------------------------------------

    def _train(
        self,
        folder_name: str,
        shown: str,
        rung: int,
        settings: Settings,
        num_updates: int,
        seconds: float,
    ) -> list[Candidate]:
        """Train in a folder, once, and score the model on dev; the query tower also in its blends.

        ``shown`` are the first words of the candidate's name. The training ends after so many
        updates or seconds, unless the user has given its length.
        """

        def score(trained: Trained) -> list[Candidate]:
            written = settings
            if not self._has_fixed_length:
                written = replace(settings, learning_rates=trained.rates)
            candidate = Candidate(
                f"{shown}, {trained.updates} updates{self._shown_questions}",
                rung,
                "trained",
                folder=folder_name,
                settings=to_dict(written),
                updates=trained.updates,
                training_seconds=trained.seconds,
                train_file=self._train_file,
            )
            if rung == QUERY_TOWER:
                blends = [_blend(candidate, blend) for blend in (1.0, *BLENDS)]
                return [self._score(each, self._dev) for each in blends]
            folder = self.get_folder(candidate)
            encoder = load_candidate(candidate, self.base, folder)
            corpus = self._pool.dataset.path / CORPUS_FILE
            precision = "bfloat16" if settings.bf16 else "float32"
            encode_corpus(self.job, encoder, shown, corpus, folder / STORE_FOLDER, precision)
            return [self._score(candidate, self._pool)]

        if self._has_fixed_length:
            return self._add(folder_name, score, settings)
        return self._add(folder_name, score, replace(settings, max_steps=num_updates), seconds)

    def _choose_rate(self, method: str) -> float:
        if "learning_rate" in self.job.given:
            return float(self.job.given["learning_rate"])
        bm25, base = self.candidates[:2]
        is_base_weak = base.vectors[MEAN] < USELESS_SHARE_OF_BM25 * bm25.score
        has_adapter = self.settings.lora_r is not None
        width = read_width(self.settings.model)
        return compute_start_rate(method, width, has_adapter, is_base_weak)

    def _make_settings(self, method: str, learning_rate: float) -> Settings:
        return make_settings(
            self.settings,
            method,
            self.job.given,
            str(self.job.store),
            learning_rate=learning_rate,
            train_data=[str(self.job.data / self._train_file)],
        )

    def _count_updates(self, settings: Settings, num_epochs: float) -> int:
        """Return the number of updates of so many epochs, or the number that the user has given."""
        if not self._has_fixed_length:
            settings = replace(settings, num_train_epochs=num_epochs)
        args = ContAccumTrainingArguments.from_settings(settings)
        if args.max_steps > 0:
            return args.max_steps
        num_rows = count_rows(load_data(settings).dataset)
        assert args.total_train_batch_size is not None  # computed when the arguments are created
        updates_per_epoch = math.ceil(num_rows / args.total_train_batch_size)
        return max(1, math.ceil(updates_per_epoch * args.num_train_epochs))

    def _get_training_seconds(self) -> float:
        """Return the seconds that a training of both towers may take.

        The trained model then encodes the documents of dev, which are most of those of test.
        """
        num_documents = max(self._num_pool_documents, self._split.documents["test"])
        seconds = _RESERVE_FACTOR * num_documents * self.seconds_per_document
        return self.left() - seconds - self._seconds_per_score

    def _make_pool(self) -> None:
        """Reduce the documents of dev, if it has many, to those that the best searches so far find.

        A model whose document tower is trained must encode them all. It has a small advantage among
        them: what it alone would find, and is wrong, is left out.
        """
        folder = self._folder / "pool_data"
        best = self.get_best()

        def write() -> dict[str, Any]:
            dev = self._dev
            is_reduced = len(dev.dataset.corpus) > MAX_POOL
            if is_reduced:
                runs = [dev.bm25_run]
                for candidate in (self.base_candidate, best):
                    run = self._search(dev, candidate)
                    runs += [run, fuse_runs(run, dev.bm25_run, candidate.bm25_weight)]
                write_part(dev.dataset, pool_documents(dev.dataset, runs), folder)
            return {"is_reduced": is_reduced}

        self._has_pool = work.once(folder, self.job.request, write)["is_reduced"]
        self._num_pool_documents = work.on_first_rank(lambda: len(self._pool.dataset.corpus))
        self._free_on_pool = self._score_on_pool(self.free)


def has_stalled(scores: Sequence[float]) -> bool:
    """Return whether the last `MAX_TRIALS_WITHOUT_GAIN` trials are no better than those before."""
    return len(scores) - 1 - scores.index(max(scores)) >= MAX_TRIALS_WITHOUT_GAIN


def pool_documents(dataset: BeirDataset, runs: Sequence[Run]) -> set[str]:
    """Return the ids of the judged documents and of the top documents of each run and query.

    The system that made a run has the same nDCG@10 on this pool as on the whole corpus.
    """
    pool: set[str] = set()
    for judgements in dataset.qrels.values():
        pool.update(judgements)
    for run in runs:
        for scores in run.values():
            ranking = sorted(scores, key=lambda document_id: -scores[document_id])
            pool.update(ranking[:_POOL_DEPTH])
    return pool


def _blend(candidate: Candidate, share: float) -> Candidate:
    """Return a candidate with a share of its map or weights; the rest is the base model's."""
    if share == 1.0:
        return candidate
    name = f"{candidate.name}, {share:.0%} of it"
    settings = {**candidate.settings, "blend": share} if candidate.settings else {}
    return dataclasses.replace(candidate, name=name, blend=share, settings=settings)


def _round(rate: float) -> float:
    return float(f"{rate:.1e}")
