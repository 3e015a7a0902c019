"""The ladder of candidates: their order and lengths, the choice, and what ends it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from small_data import write_lines
from tiny_models import tiny_encoder
from translations import make_questions, make_translations

import contaccum
from contaccum import work
from contaccum.data.beir import BeirDataset, load_beir_folder
from contaccum.data.split import write_part
from contaccum.encoders.linear_map import solve_linear_map
from contaccum.encoders.settings import is_tied
from contaccum.evaluation.evaluator import RetrievalEvaluator
from contaccum.experiments import fit as fit_module
from contaccum.experiments import ladder as ladder_module
from contaccum.experiments.candidates import (
    BM25_WEIGHTS,
    LARGEST_LOSS,
    Candidate,
    DevSet,
    choose,
    load_candidate,
    read_kinds,
    smooth,
)
from contaccum.experiments.folds import Pairs
from contaccum.experiments.ladder import Ladder, pool_documents
from contaccum.experiments.run import Job, Trained
from contaccum.progress import StatusLine
from contaccum.retrieval.bm25 import fuse_runs
from contaccum.retrieval.encode import check_store_fits, encode_texts, model_fingerprint
from contaccum.retrieval.store import EmbeddingStore
from contaccum.settings import Settings, replace
from contaccum.training import linear_map, update
from contaccum.training.proposal import check_given
from contaccum.training.trainer import train_and_save
from contaccum.work import Budget

SETTINGS: dict[str, Any] = {
    "temperature": 0.05,
    "total_train_batch_size": 8,
    "bank_size": 16,
    "use_cpu": True,
    "bf16": False,
    "disable_tqdm": True,
}
NUM_EPOCH_UPDATES = 10  # of the 79 training pairs


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained model, and pairs to train on."""
    root = tmp_path_factory.mktemp("candidates")
    tiny_encoder().save_pretrained(str(root / "fresh"))
    write_lines(root / "questions.jsonl", make_questions(200, 0))
    pairs = []
    for pair in make_translations(200, 0):
        pairs.append({"query": pair["query"], "positive": f"{pair['positive']} {pair['query']}"})
    write_lines(root / "same_words.jsonl", pairs)
    return root


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The clock of the budget, which only the test moves."""
    clock = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(work, "time", SimpleNamespace(monotonic=lambda: clock.seconds))
    return clock


def make_ladder(
    root: Path, folder: Path, ends_at: float = 1e6, has_bm25: bool = True, **given: Any
) -> Ladder:
    """Hold out the data, encode the documents, and return a ladder that has no candidates yet."""
    given = {**SETTINGS, **given}
    model = str(root / "fresh")
    args = check_given(model, given)
    budget = Budget(1e6, folder)
    request = {"bm25": has_bm25}
    job = Job(folder, request, given, args, budget, StatusLine(lambda line: None, str))
    Pairs(root / "questions.jsonl", test=100).hold_out(job.data)
    base, settings = fit_module.load_base(job, model)
    documents, _ = fit_module.encode_documents(job, base, model)
    return Ladder(job, base, settings, documents, 0.0, ends_at)


# The choice ---------------------------------------------------------------------------------------


def make_candidate(rung: int, new: float, known: float) -> Candidate:
    scores = {"new": new, "known": known, "mean": (new + known) / 2}
    return Candidate(f"{rung}: {new}, {known}", rung, "trained", scores=scores)


FREE = make_candidate(0, 0.7, 0.7)


@pytest.mark.parametrize(
    ("candidates", "expected"),
    [
        ([], 0),
        ([(1, 0.71, 0.71), (2, 0.8, 0.8), (3, 0.75, 0.75)], 2),  # the best one
        ([(1, 0.71, 0.71), (2, 0.799, 0.8), (3, 0.8, 0.8)], 2),  # a cheaper one is hardly worse
        ([(1, 0.71, 0.71), (2, 0.797, 0.798), (3, 0.8, 0.8)], 3),
        ([(1, 0.701, 0.701)], 0),
        ([(1, 0.799, 0.799), (2, 0.8, 0.8)], 2),  # both keep the index
        ([(3, 0.799, 0.799), (4, 0.8, 0.8)], 2),  # both need a new one
        ([(1, 0.69, 0.75), (3, 0.68, 0.95)], 0),  # too much is lost on new documents
        ([(1, 0.695, 0.75), (3, 0.68, 0.95)], 1),
    ],
)
def test_the_best_is_chosen_or_a_cheaper_one_that_loses_on_no_kind(candidates, expected):
    all_candidates = [FREE, *(make_candidate(*values) for values in candidates)]
    assert all_candidates.index(choose(all_candidates, FREE)) == expected


def test_a_weight_of_bm25_is_chosen_by_a_parabola_through_the_scores(root, tmp_path):
    pairs = Pairs(root / "questions.jsonl", test=100)
    pairs.hold_out(tmp_path / "data")
    dataset = load_beir_folder(tmp_path / "data" / "dev", "test")
    kinds = read_kinds(tmp_path / "data" / "dev")
    assert list(kinds) == ["new", "known"]
    dev = DevSet(dataset, kinds, None, 8, has_bm25=True)
    relevant = {query: dict.fromkeys(grades, 1.0) for query, grades in dataset.qrels.items()}
    assert dev.weigh(relevant)["vectors"] == {"new": 1.0, "known": 1.0, "mean": 1.0}
    run = dev.evaluator.search(tiny_encoder())
    raw = [dev.score(fuse_runs(run, dev.bm25_run, weight)) for weight in BM25_WEIGHTS]
    # A parabola by the normal equations, because single scores are partly luck
    powers = np.vander(BM25_WEIGHTS, 3)
    hat = powers @ np.linalg.inv(powers.T @ powers) @ powers.T
    expected = {kind: hat @ [scores[kind] for scores in raw] for kind in raw[0]}
    best = int(expected["mean"].argmax())
    assert best != int(np.argmax([scores["mean"] for scores in raw]))
    weighed = dev.weigh(run)
    assert weighed["bm25_weight"] == BM25_WEIGHTS[best] > 0.0
    for kind, heights in expected.items():
        assert weighed["scores"][kind] == pytest.approx(heights[best], abs=1e-6)
        given = dev.weigh(run, weight=0.3)["scores"][kind]
        assert given == pytest.approx(heights[3], abs=1e-6)
    assert weighed["vectors"] == raw[0]
    # A search without training that is better on new documents, where BM25 is best alone
    highest = expected["new"].max()
    free = make_candidate(0, highest + LARGEST_LOSS - 1e-6, 0.0)
    assert dev.weigh(run, free)["scores"]["new"] == pytest.approx(highest, abs=1e-6)
    free = make_candidate(0, 1.0, 0.0)  # nothing is good enough
    assert dev.weigh(run, free) == weighed
    assert smooth([0.8] * 10) == [0.8] * 10
    assert max(smooth([1.0] * 8 + [0.7, 0.6])) == 1.0
    without = DevSet(dataset, kinds, None, 8, has_bm25=False)
    assert without.weigh(run)["scores"] == weighed["vectors"]


# Candidates of a real ladder ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def climbed(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Ladder:
    """A ladder with trainings of three updates, and a pool in place of the 50 dev documents."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ladder_module, "MAX_POOL", 30)
        patch.setattr(ladder_module, "_POOL_DEPTH", 2)
        folder = tmp_path_factory.mktemp("climbed")
        ladder = make_ladder(root, folder, has_bm25=False, learning_rate=0.01, max_steps=3)
        ladder.climb()
    return ladder


def test_all_rungs_are_tried_and_numbered(climbed):
    assert [candidate.number for candidate in climbed.candidates] == list(range(14))
    rungs = [0] * 2 + [1] * 6 + [2] * 3 + [3, 4, 4]
    assert [candidate.rung for candidate in climbed.candidates] == rungs
    assert [row.updates for row in climbed.candidates] == [0] * 8 + [3] * 3 + [3, 6, 3]
    blends = [1.0] * 6 + [0.5, 0.75] + [1.0, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert [row.blend for row in climbed.candidates] == blends


def test_every_candidate_is_saved_as_it_was_scored(climbed, tmp_path):
    """Documents of the rungs below both towers stay those of the store."""
    store = EmbeddingStore.open(climbed.job.store)
    job = climbed.job._replace(folder=tmp_path)
    fingerprints = set()
    for candidate in climbed.candidates:
        fit_module.write_model(job, climbed, candidate)
        saved = contaccum.DualEncoder.from_pretrained(str(tmp_path / "model"), device="cpu")
        model = load_candidate(candidate, climbed.base, climbed.get_folder(candidate))
        for task in ("query", "document"):
            assert model_fingerprint(saved, task) == model_fingerprint(model, task)
        if candidate.rung < 3:
            check_store_fits(saved, store)
        assert is_tied(saved) == (candidate.rung == 0 or candidate.number in (11, 13))
        assert not (tmp_path / "model" / "store").exists()
        fingerprints.add(model_fingerprint(saved))
    assert len(fingerprints) == len(climbed.candidates) - 1  # BM25 has the base model


@pytest.mark.parametrize("number", range(8, 14))
def test_settings_of_every_training_repeat_it(climbed, tmp_path, number):
    """Blends and the second stage too; `fit` writes those of the chosen one into config.yaml."""
    candidate = climbed.candidates[number]
    settings = replace(Settings(), **candidate.settings)
    train_and_save(replace(settings, output_dir=str(tmp_path)), print_line=lambda line: None)
    again = contaccum.DualEncoder.from_pretrained(str(tmp_path), device="cpu")
    model = load_candidate(candidate, climbed.base, climbed.get_folder(candidate))
    assert model_fingerprint(again) == model_fingerprint(model)


def test_models_that_encode_documents_anew_are_compared_on_a_pool(climbed):
    """The lower rungs have the same score there as among all documents."""
    pool = load_beir_folder(climbed.job.folder / "candidates" / "pool_data", "test")
    dev = load_beir_folder(climbed.job.data / "dev", "test")
    assert len(pool.corpus) < len(dev.corpus) == 50
    assert pool.queries == dev.queries
    for candidate in climbed.candidates:
        store = climbed.get_folder(candidate) / "store"
        assert store.is_dir() == (candidate.rung >= 3)
        if store.is_dir():
            assert len(EmbeddingStore.open(store)) == len(pool.corpus)
    compared = sorted((climbed.job.folder / "candidates" / "pool").iterdir())
    assert climbed.free.name in [folder.name for folder in compared]


def test_documents_of_dev_are_encoded_in_the_precision_of_the_training(root, tmp_path):
    ladder = make_ladder(root, tmp_path, method="contaccum", max_steps=1, bf16=True)
    ladder.climb()
    trained = ladder.candidates[-1]
    store = EmbeddingStore.open(ladder.get_folder(trained) / "store")
    assert (trained.system, store.metadata["precision"]) == ("trained", "bfloat16")


def test_a_second_climb_reads_all_candidates(climbed, monkeypatch):
    monkeypatch.setattr(ladder_module, "MAX_POOL", 30)
    monkeypatch.setattr(ladder_module, "train", lambda *_: pytest.fail("trained again"))
    monkeypatch.setattr(ladder_module, "write_linear_maps", lambda *_: pytest.fail("again"))
    again = Ladder(climbed.job, climbed.base, climbed.settings, climbed.documents, 0.0, 0.0)
    again.climb()
    assert again.candidates == climbed.candidates
    assert again.get_best() == climbed.get_best()


def test_maps_are_the_ridge_solutions_of_the_first_training_pairs(climbed, tmp_path, monkeypatch):
    monkeypatch.setattr(linear_map, "MAX_MAP_PAIRS", 12)
    train_file = climbed.job.data / "train.jsonl"
    linear_map.write_linear_maps(climbed.base, train_file, climbed.documents, 8, tmp_path, [3.0])
    candidate = Candidate("map", 1, "map", ridge=3.0)
    rows = [json.loads(line) for line in train_file.read_text().splitlines()[:12]]
    queries = encode_texts(climbed.base, [row["query"] for row in rows], "query")
    passages = encode_texts(climbed.base, [row["positive"] for row in rows])
    targets = torch.tensor(passages - queries)
    weights = solve_linear_map(torch.tensor(queries), targets, 3.0).numpy()
    expected = queries @ (np.eye(16) + weights)
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    model = load_candidate(candidate, climbed.base, tmp_path)
    vectors = encode_texts(model, [row["query"] for row in rows], "query")
    np.testing.assert_allclose(vectors, expected, atol=1e-5)


def test_score_on_pooled_documents_equals_the_score_on_all_documents(climbed, tmp_path):
    dataset = load_beir_folder(climbed.job.data / "test", "test")
    queries = {name: dataset.queries[name] for name in ("q0", "q1")}
    qrels = {name: dataset.qrels[name] for name in queries}
    dataset = BeirDataset(**{**vars(dataset), "queries": queries, "qrels": qrels})
    evaluator = RetrievalEvaluator(dataset)
    run = evaluator.search(climbed.base)
    pool = pool_documents(dataset, [run])
    assert len(pool) < len(dataset.corpus)
    write_part(dataset, pool, tmp_path / "pool")
    pooled = load_beir_folder(tmp_path / "pool", "test")
    score = evaluator.score_run(run)["ndcg@10"]
    assert RetrievalEvaluator(pooled).score(climbed.base)["ndcg@10"] == pytest.approx(score)


# Lengths and rates of trainings -------------------------------------------------------------------


@pytest.fixture
def fake_train(monkeypatch, clock, root) -> Iterator[Callable[[dict[str, list[float]]], Any]]:
    """Return a function that fakes trainings with given scores on dev.

    An update takes one second. The function takes {method: scores of its trainings}, and returns
    the list of (method, rate, updates, seconds left), to which each training adds a line. Scores of
    all that is not trained are 0.1.
    """
    base = contaccum.DualEncoder.from_pretrained(str(root / "fresh"), device="cpu")
    current = SimpleNamespace(score=0.1)

    def weigh(dev: DevSet, run: Any, *_: Any) -> dict[str, Any]:
        scores = {"new": current.score, "known": current.score, "mean": current.score}
        return {"bm25_weight": 0.0, "scores": scores, "vectors": scores}

    def start(scores: dict[str, list[float]]) -> list[tuple[Any, ...]]:
        calls: list[tuple[Any, ...]] = []

        def train(
            settings: Settings, folder: Path, status: StatusLine, seconds: float | None = None
        ) -> Trained:
            planned = settings.max_steps if settings.max_steps > 0 else NUM_EPOCH_UPDATES
            num_updates = planned if seconds is None else min(planned, int(seconds))
            calls.append((settings.method, settings.learning_rate, planned, seconds))
            clock.seconds += num_updates
            current.score = scores[settings.method].pop(0)
            base.save_pretrained(str(folder / "training"))
            return Trained(num_updates, float(num_updates), [0.1] * num_updates)

        monkeypatch.setattr(ladder_module, "train", train)
        monkeypatch.setattr(DevSet, "weigh", weigh)
        monkeypatch.setattr(DevSet, "score", lambda dev, run: weigh(dev, run)["scores"])
        return calls

    yield start


@pytest.mark.parametrize(
    ("scores", "seconds", "lengths"),
    [
        ([0.5, 0.6, 0.7, 0.8, 0.9], 1e6, [16, 32, 64, 128, 200]),  # at most 20 epochs
        ([0.5, 0.6, 0.55, 0.59], 1e6, [16, 32, 64, 128]),  # two without a gain
        ([0.5, 0.5, 0.5], 1e6, [16, 32, 64]),
        ([0.5, 0.4, 0.6, 0.5, 0.5], 1e6, [16, 32, 64, 128, 200]),
        # The next training but one would not fit, so the next one takes all the time.
        ([0.5, 0.6], 16 + 95, [16, math.ceil(1.5 * 95)]),
        ([0.5, 0.6, 0.7], 16 + 96, [16, 32, math.ceil(1.5 * 64)]),
        ([0.5, 0.6, 0.7], 16 + 32 + 70, [16, 32, math.ceil(1.5 * 70)]),
        ([0.5, 0.6], 16 + 24, [16, math.ceil(1.5 * 24)]),
        ([0.5], 16 + 23, [16]),  # not enough for half as many again
        ([0.5], 10, [16]),  # cut by the time
        ([], 4, []),
    ],
)
def test_each_training_of_both_towers_has_twice_the_length_until_time_or_gain_end(
    root, tmp_path, fake_train, clock, scores, seconds, lengths
):
    calls = fake_train({"contaccum": scores})
    options = {"method": "contaccum", "learning_rate": 0.01, "towers": "one"}
    ladder = make_ladder(root, tmp_path, seconds, **options)
    ladder.climb()
    assert [num_updates for _, _, num_updates, _ in calls] == lengths
    used = 0.0
    for (_, _, _, left), candidate in zip(calls, ladder.candidates[2:], strict=True):
        assert left == pytest.approx(seconds - used)
        used += candidate.updates
        assert len(candidate.settings["learning_rates"]) == candidate.updates
    assert used <= seconds


@pytest.mark.parametrize(
    ("second_stage", "higher_rate", "further"),
    [
        (0.55, 0.65, ["contaccum x3", "grad_cache x3"]),  # a lower rate would be worse
        (0.65, 0.55, ["contaccum x3", "contaccum /3"]),
        (0.55, 0.55, ["contaccum x3"]),
    ],
)
def test_a_second_stage_other_rates_and_a_gradient_cache_follow_until_two_have_no_gain(
    root, tmp_path, fake_train, second_stage, higher_rate, further
):
    calls = fake_train(
        {
            "query_side": [0.3, 0.2, 0.4, second_stage],
            "contaccum": [0.5, 0.6, 0.55, 0.55, higher_rate, 0.5],
            "grad_cache": [0.7],
        }
    )
    ladder = make_ladder(root, tmp_path)
    ladder.climb()
    assert [(method, num_updates) for method, _, num_updates, _ in calls] == [
        *[("query_side", 3 * NUM_EPOCH_UPDATES)] * 3,
        *[("contaccum", length) for length in (16, 32, 64, 128)],
        ("query_side", 32),  # as long as the best one
        *[(words.split()[0], 32) for words in further],
    ]
    rates = [rate for _, rate, _, _ in calls]
    assert rates[1:3] == pytest.approx([3 * rates[0], rates[0] / 3], rel=0.05)
    assert len(set(rates[3:7])) == 1
    factors = {"x3": 3.0, "/3": 1 / 3}
    expected = [factors[words.split()[1]] * rates[3] for words in further]
    assert rates[8:] == pytest.approx(expected, rel=0.05)
    [second] = [row for row in ladder.candidates if row.name.endswith(", second stage")]
    assert second.updates == 64
    scores = {0.7: "both towers, grad_cache", 0.65: second.name, 0.6: "both towers, contaccum"}
    best = max(0.7 if "grad_cache x3" in further else 0.0, second_stage, 0.6)
    assert ladder.get_best().name.startswith(scores[best])


@pytest.mark.parametrize(
    ("scores", "factors"),
    [
        ([0.2, 0.3, 0.25], [1, 3, 9]),
        ([0.2, 0.3, 0.4, 0.5], [1, 3, 9, 27]),
        ([0.3, 0.2, 0.4], [1, 3, 1 / 3]),
        ([0.3, 0.3, 0.2], [1, 3, 1 / 3]),
    ],
)
def test_the_rate_of_the_query_tower_rises_while_that_is_better(
    root, tmp_path, fake_train, scores, factors
):
    calls = fake_train({"query_side": scores})
    make_ladder(root, tmp_path, method="query_side").climb()
    first = calls[0][1]
    expected = [factor * first for factor in factors]
    assert [rate for _, rate, _, _ in calls] == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize(
    ("seconds_per_document", "methods"),
    [
        (0.0, ["query_side", "contaccum", "contaccum"]),  # which takes all the time
        (10.0, ["query_side"] * 3),  # both towers would have to encode the documents
    ],
)
def test_other_rates_of_the_query_tower_that_are_not_cheap_take_what_both_towers_leave(
    root, tmp_path, fake_train, seconds_per_document, methods
):
    """Three epochs are more than a tenth of the time."""
    calls = fake_train({"query_side": [0.3, 0.4, 0.2], "contaccum": [0.2, 0.2]})
    ladder = make_ladder(root, tmp_path, ends_at=120.0)
    ladder.seconds_per_document = seconds_per_document
    ladder.climb()
    assert [method for method, *_ in calls] == methods
    rates = [rate for method, rate, _, _ in calls if method == "query_side"]
    assert rates == pytest.approx([rates[0] * 3**n for n in range(len(rates))], rel=0.05)
    num_query_towers = len([each for each in ladder.candidates if each.rung == 2])
    assert num_query_towers == 3 * len(rates)  # with two blends each, and none of them twice


def test_both_towers_are_blended_if_a_kind_of_documents_has_lost(
    root, tmp_path, fake_train, monkeypatch
):
    calls = fake_train({"contaccum": [0.5]})
    weigh = DevSet.weigh

    def lose_on_new(dev: DevSet, run: Any, *_: Any) -> dict[str, Any]:
        weighed = weigh(dev, run)
        scores = weighed["scores"]
        if calls:
            scores = {"new": 0.05, "known": 0.95, "mean": 0.5}
        return {**weighed, "scores": scores}

    monkeypatch.setattr(DevSet, "weigh", lose_on_new)
    options = {"method": "contaccum", "learning_rate": 0.01, "towers": "one", "max_steps": 3}
    ladder = make_ladder(root, tmp_path, **options)
    ladder.climb()
    assert [candidate.blend for candidate in ladder.candidates[2:]] == [1.0, 0.5, 0.75]
    assert [row.settings.get("blend") for row in ladder.candidates[2:]] == [None, 0.5, 0.75]
    assert ladder.get_best() == ladder.free


# Whole fits ---------------------------------------------------------------------------------------


def fit(root: Path, folder: Path, data: str = "questions.jsonl", **options: Any) -> dict[str, Any]:
    """Return the record of a fit, with the printed lines."""
    lines: list[str] = []
    contaccum.fit(
        root / data,
        root / "fresh",
        output=folder / "out",
        test=100,
        print_line=lines.append,
        **{**SETTINGS, **options},
    )
    record = json.loads((folder / "out" / "result.json").read_text())
    assert (folder / "out" / "report.html").is_file()
    return {**record, "printed": "\n".join(lines)}


def assert_model_is_the_base(root: Path, folder: Path) -> None:
    """One tower, with the weights of the base model."""
    kept = contaccum.DualEncoder.from_pretrained(str(folder / "out" / "model"), device="cpu")
    base = contaccum.DualEncoder.from_pretrained(str(root / "fresh"), device="cpu")
    assert is_tied(kept)
    assert model_fingerprint(kept) == model_fingerprint(base)


@pytest.mark.parametrize(
    ("budget", "used", "rungs"),
    [(4.0, 0.0, [0] * 2), (7.0, 0.0, [0] * 2 + [1] * 6), (60.0, 100.0, [0] * 2)],
)
def test_a_budget_of_seconds_gives_the_first_rungs_and_a_report(
    root, tmp_path, clock, monkeypatch, budget, used, rungs
):
    """Five seconds are for the report, and a training needs five. Holding out counts too."""
    hold_out = Pairs.hold_out

    def hold_out_slowly(pairs: Pairs, folder: Path, **options: Any) -> list[str]:
        clock.seconds += used
        return hold_out(pairs, folder, **options)

    monkeypatch.setattr(Pairs, "hold_out", hold_out_slowly)
    record = fit(root, tmp_path, budget=budget)
    assert [candidate["rung"] for candidate in record["candidates"]] == rungs
    assert record["verdict"]["line"] in record["printed"]
    assert record["seconds"]["total"] == used


@pytest.mark.parametrize(("bm25", "free", "weight"), [(True, "BM25", 1.0), (False, "fresh", 0.0)])
def test_bm25_alone_may_be_the_best_unless_it_is_left_out(
    root, tmp_path, clock, bm25, free, weight
):
    """Queries and passages have the same words, and the base model has never been trained."""
    record = fit(root, tmp_path, "same_words.jsonl", budget=4.0, bm25=bm25)
    assert record["candidates"][record["free"]]["name"] == free
    assert record["chosen"] == record["recommended"] == record["free"]
    assert record["bm25_weight"] == weight
    line = f"LEVEL: nothing that was trained is clearly better on dev than {free}, which has"
    assert record["verdict"]["line"].startswith(line)
    row = record["scores"][0 if bm25 else 1]
    assert record["verdict"]["free"] == pytest.approx(row["NDCG@10"])
    if not bm25:
        weights = [candidate["bm25_weight"] for candidate in record["candidates"][1:]]
        assert set(weights) == {0.0}
        assert record["scores"][1]["NDCG@10"] == record["scores"][2]["NDCG@10"]
    assert_model_is_the_base(root, tmp_path)


def test_a_loser_on_test_is_not_the_model(root, tmp_path, monkeypatch):
    """Dev preferred it. The base model is saved instead, and not as two towers of itself."""
    monkeypatch.setattr(ladder_module, "choose", lambda candidates, free: [free, *candidates][-1])
    options = {"method": "query_side", "learning_rate": 1e-12, "max_steps": 2}
    record = fit(root, tmp_path, bm25=False, **options)
    assert record["candidates"][record["chosen"]]["system"] == "trained"
    assert record["recommended"] == record["free"] == 1
    assert {verdict["word"] for verdict in record["verdicts"].values()} == {"LEVEL"}
    assert "; keep fresh" in record["verdict"]["line"]
    assert_model_is_the_base(root, tmp_path)


@pytest.mark.parametrize(
    ("stop", "is_caught"),
    [(KeyboardInterrupt(), True), (SystemExit(130), True), (SystemExit(143), False)],
)
def test_ctrl_c_gives_a_verdict_on_the_candidates_so_far(
    root, tmp_path, monkeypatch, stop, is_caught
):
    """A training that receives SIGINT ends with exit code 130. SIGTERM ends the fit."""

    def train(*_: Any) -> Trained:
        raise stop

    monkeypatch.setattr(ladder_module, "train", train)
    if is_caught:
        record = fit(root, tmp_path)
        assert "stopped: the verdict is about the candidates so far" in record["printed"]
        assert [row["rung"] for row in record["candidates"]] == [0] * 2 + [1] * 6
    else:
        with pytest.raises(SystemExit):
            fit(root, tmp_path)
        assert not (tmp_path / "out" / "result.json").exists()


def test_ctrl_c_before_the_first_candidate_ends_the_fit(root, tmp_path, monkeypatch):
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(DevSet, "weigh", interrupt)
    with pytest.raises(KeyboardInterrupt):
        fit(root, tmp_path)


def test_a_training_without_enough_memory_ends_the_ladder_and_not_the_fit(
    root, tmp_path, monkeypatch
):
    def run_out_of_memory(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(update.Updates, "_run_micro_steps", run_out_of_memory)
    record = fit(root, tmp_path)
    [line] = [line for line in record["printed"].splitlines() if "the ladder ends here" in line]
    assert line.startswith("warning: the ladder ends here: ")
    assert "memory" in line
    assert [row["rung"] for row in record["candidates"]] == [0] * 2 + [1] * 6
