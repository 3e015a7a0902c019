"""Plans of batches: every row once, no text twice in a batch, and otherwise as random as can be."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contaccum.data.batch_plan import BatchPlan, plan_batches
from contaccum.data.padding import padding_of
from contaccum.data.repeats import SharedTexts, count_repeats
from contaccum.data.text_columns import NO_TEXT


def texts_of(*columns: np.ndarray) -> SharedTexts:
    """Columns of numbers that stand for texts."""
    return SharedTexts.from_hashes(np.stack(columns, axis=1).astype(np.int64))


def repeats_by_brute_force(plan: BatchPlan, hashes: np.ndarray) -> int:
    count = 0
    for batch in plan:
        seen: set[int] = set()
        for row in batch:
            own = set(hashes[row].tolist()) - {int(NO_TEXT)}
            count += len(own & seen)
            seen |= own
    return count


def rows_of(plan: BatchPlan) -> list[int]:
    return [row for batch in plan for row in batch]


def skewed_lengths(rows: int, seed: int = 0) -> np.ndarray:
    """Queries of some ten tokens, passages of 10 to 256, most of them short."""
    rng = np.random.default_rng(seed)
    queries = np.clip(rng.lognormal(2.3, 0.4, rows), 4, 32).astype(np.int64)
    return np.stack([queries, np.clip(rng.lognormal(4.3, 0.7, rows), 10, 256).astype(np.int64)], axis=1)


@settings(max_examples=150, deadline=None)
@given(
    rows=st.integers(0, 300),
    batch_size=st.integers(1, 20),
    different=st.integers(1, 300),
    topics=st.integers(0, 12),
    with_lengths=st.booleans(),
    drop_last=st.booleans(),
    seed=st.integers(0, 2**40),
)
def test_every_row_is_in_one_batch_and_repeats_are_counted(
    rows: int, batch_size: int, different: int, topics: int, with_lengths: bool, drop_last: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    hashes = rng.integers(0, different, (rows, 3))
    hashes[rng.random(hashes.shape) < 0.1] = NO_TEXT
    plan = plan_batches(
        rows,
        batch_size,
        seed,
        1,
        texts=SharedTexts.from_hashes(hashes),
        lengths=rng.integers(1, 50, rows) if with_lengths else None,
        topics=rng.integers(0, topics, rows) if topics else None,
        length_window=4,
        drop_last=drop_last,
    )
    batches = list(plan)
    assert len(batches) == len(plan) == (rows // batch_size if drop_last else -(-rows // batch_size))
    assert all(len(batch) == batch_size for batch in batches[:-1])
    seen = rows_of(plan)
    assert len(seen) == len(set(seen)) == (rows // batch_size * batch_size if drop_last else rows)
    assert plan.repeats == repeats_by_brute_force(plan, hashes)


@settings(max_examples=60, deadline=None)
@given(batch_size=st.integers(1, 8), batches=st.integers(2, 24), rest=st.integers(0, 7), seed=st.integers(0, 2**40))
def test_no_text_is_twice_in_a_batch_where_the_promise_holds(
    batch_size: int, batches: int, rest: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    rows = batch_size * batches + min(rest, batch_size - 1)
    hashes = np.arange(2 * rows).reshape(2, rows).T.copy()
    # Add repeats until a row has texts in common with as many others as the promise allows.
    allowed = (-(-rows // batch_size) - 1) / 2
    for _ in range(2 * rows):
        before = hashes.copy()
        hashes[rng.integers(rows), rng.integers(2)] = hashes[rng.integers(rows), rng.integers(2)]
        shared = (hashes[:, None, :, None] == hashes[None, :, None, :]).any(axis=(2, 3))
        if shared.sum(axis=1).max() - 1 >= allowed:
            hashes = before
    plan = plan_batches(rows, batch_size, seed, 0, texts=SharedTexts.from_hashes(hashes))
    assert plan.repeats == repeats_by_brute_force(plan, hashes) == 0


@pytest.mark.parametrize("size", [2, 5, 8])
def test_full_grid_of_queries_and_passages_gives_a_latin_square(size: int) -> None:
    """Each query with each passage, in batches of as many: every batch must have every query and every passage."""
    rows = np.arange(size * size)
    plan = plan_batches(len(rows), size, 0, 0, texts=texts_of(rows // size, 1000 + rows % size))
    assert plan.repeats == 0


def test_text_of_as_many_rows_as_batches_is_in_every_batch() -> None:
    rows = np.arange(800)
    assert plan_batches(800, 8, 0, 0, texts=texts_of(rows // 100, 1000 + rows)).repeats == 0


def test_text_of_more_rows_than_batches_repeats_as_little_as_can_be() -> None:
    rng = np.random.default_rng(0)
    answers = rng.integers(0, 3, 1000)  # each in some 333 rows, and there are 125 batches
    plan = plan_batches(1000, 8, 0, 0, texts=texts_of(10 + np.arange(1000), answers))
    assert plan.repeats == 1000 - 3 * 125
    held = np.stack([(answers[plan.slots] == answer).sum(axis=1) for answer in range(3)])
    assert np.ptp(held, axis=1).max() <= 1


def test_own_positive_is_no_repeat_and_missing_texts_equal_nothing() -> None:
    hashes = np.arange(40).repeat(2).reshape(40, 2)  # each row's query is its positive
    hashes = np.concatenate([hashes, np.full((40, 2), NO_TEXT)])
    texts = SharedTexts.from_hashes(hashes)
    assert len(texts.counts) == 0 and plan_batches(80, 8, 0, 0, texts=texts).repeats == 0


def test_plan_is_a_function_of_seed_and_epoch() -> None:
    hashes = np.random.default_rng(0).integers(0, 300, (500, 2))
    settings = {
        "texts": SharedTexts.from_hashes(hashes),
        "lengths": hashes[:, 0] % 40,
        "topics": hashes[:, 1] % 7,
    }
    names = [(), ("texts",), ("lengths",), ("topics",), tuple(settings)]
    for chosen in names:
        some = {name: settings[name] for name in chosen}
        plans = {key: plan_batches(500, 8, *key, **some).slots for key in [(0, 0), (0, 1), (1, 0), (-1, 0)]}
        assert (plans[0, 0] == plan_batches(500, 8, 0, 0, **some).slots).all()
        shown = [tuple(slots.ravel()) for slots in plans.values()]
        assert len(set(shown)) == len(shown)


@pytest.mark.slow
@pytest.mark.parametrize("many", [False, True], ids=["texts in 2 or 3 rows", "a text in half of the batches"])
def test_rows_meet_as_in_uniform_plans_without_repeats(many: bool) -> None:
    """Against random plans of which those with a repeat are thrown away: same places, same company."""
    rows, n, plans = 64, 4, 6000
    b = rows // n
    hashes = np.stack([np.arange(rows), 1000 + np.arange(rows)], axis=1)
    if many:
        hashes[:8, 0] = 0
    else:
        hashes[:18, 0] //= 3
        hashes[20:30, 1] = 2000 + hashes[20:30, 1] // 2
    texts = SharedTexts.from_hashes(hashes)
    share = (hashes[:, None, :, None] == hashes[None, :, None, :]).any(axis=(2, 3))
    first, second = np.nonzero(np.triu(share, 1))
    rng = np.random.default_rng(0)
    ours, uniform, places = np.zeros((rows, rows)), np.zeros((rows, rows)), np.zeros((rows, b))
    kept = 0
    while kept < plans:
        batch = rng.permutation(rows) // n
        if not (batch[first] == batch[second]).any():
            uniform += batch[:, None] == batch
            kept += 1
    for epoch in range(plans):
        plan = plan_batches(rows, n, 1, epoch, texts=texts)
        batch[plan.slots.ravel()] = np.arange(b).repeat(n)
        ours += batch[:, None] == batch
        places[np.arange(rows), batch] += 1
    met = np.triu(~share, 1)
    z = (ours[met] - uniform[met]) / np.sqrt(ours[met] + uniform[met])
    assert abs(z.mean()) < 0.1 and 0.85 < z.var() < 1.15 and abs(z).max() < 5
    expected, degrees = plans / b, (rows - 1) * (b - 1)
    chi_square = ((places - expected) ** 2 / expected).sum()
    assert abs(chi_square - degrees) < 4 * np.sqrt(2 * degrees)


def test_grouping_by_length_saves_padding_and_leaves_updates_random() -> None:
    lengths = skewed_lengths(16_000)
    at_random = padding_of(plan_batches(16_000, 8, 0, 0), lengths)
    assert at_random.padded > 2 * at_random.real
    assert at_random.batch_spread == pytest.approx(1, abs=0.05)
    assert at_random.update_spread == pytest.approx(1, abs=0.4)
    saved = {}
    for window in (2, 8, 16):
        plan = plan_batches(16_000, 8, 0, 0, lengths=lengths.sum(axis=1), length_window=window)
        padding = padding_of(plan, lengths)
        assert padding.real == at_random.real
        saved[window] = padding.saved_against(at_random)
        # Windows of a whole number to an update: its 16 micro-batches hold a random sample of lengths.
        assert padding.update_spread == pytest.approx(1, abs=0.4)
    assert 0.15 < saved[2] < 0.3 and 0.38 < saved[8] < saved[16] < 0.5  # at most 0.52 could be saved


def test_windows_are_random_samples_of_rows_sorted_inside() -> None:
    lengths = skewed_lengths(4096).sum(axis=1)
    plan = plan_batches(4096, 8, 0, 0, lengths=lengths, length_window=16)
    fair = 8  # one in 64
    windows = [plan.slots[16 * i : 16 * (i + 1)] for i in range(32)]
    assert padding_of(BatchPlan(plan.slots[:fair], plan.sizes[:fair]), lengths[:, None]).batch_spread > 0.5
    for number, window in enumerate(windows):
        batches = window[fair:] if number == 0 else window
        spans = sorted((lengths[batch].min(), lengths[batch].max()) for batch in batches)
        assert all(earlier[1] <= later[0] for earlier, later in pairwise(spans))
        assert [lengths[batch].min() for batch in batches] != [span[0] for span in spans]  # batches are shuffled
    means = np.array([lengths[window].mean() for window in windows])
    assert means.std() < 1.5 * lengths.std() / np.sqrt(128)


def test_small_data_has_other_company_in_every_epoch() -> None:
    lengths = np.arange(96)
    met = np.zeros((96, 96), dtype=bool)
    for epoch in range(40):
        slots = plan_batches(96, 8, 0, epoch, lengths=lengths, length_window=16).slots
        for batch in slots:
            met[np.ix_(batch, batch)] = True
    assert met.sum(axis=1).min() > 40


def test_lengths_group_without_repeats() -> None:
    rows = 8000
    lengths = skewed_lengths(rows)
    # Rows of a query are of one length, so that sorting brings them together.
    queries = np.argsort(np.argsort(lengths.sum(axis=1))) // 4
    texts = texts_of(queries, 10_000 + np.arange(rows))
    grouped = plan_batches(rows, 8, 0, 0, lengths=lengths.sum(axis=1))
    both = plan_batches(rows, 8, 0, 0, lengths=lengths.sum(axis=1), texts=texts)
    assert count_repeats(grouped.slots, texts) > 20 and both.repeats == count_repeats(both.slots, texts) == 0
    at_random = padding_of(plan_batches(rows, 8, 0, 0), lengths)
    saved = [padding_of(plan, lengths).saved_against(at_random) for plan in (grouped, both)]
    assert saved[1] > 0.95 * saved[0] > 0.3


def test_batches_are_of_one_topic_and_mixed_ones_hold_the_rest() -> None:
    rng = np.random.default_rng(0)
    topics = rng.choice(30, 5000, p=np.arange(1, 31) / 465)
    plan = plan_batches(5000, 8, 0, 0, topics=topics)
    assert sorted(rows_of(plan)) == list(range(5000))
    kinds = [len(set(topics[batch])) for batch in plan]
    fair, mixed = 8, 30 * 7 // 8
    assert sum(kind > 1 for kind in kinds) <= fair + mixed
    assert min(kinds[:fair]) > 2 and np.mean(kinds[fair:]) < 1.1
    # Topics take turns at random.
    order = [topics[batch[0]] for batch in list(plan)[fair:]]
    assert sum(a == b for a, b in pairwise(order)) < 0.1 * len(order)


def test_topics_too_small_for_a_batch_still_train() -> None:
    plan = plan_batches(100, 8, 0, 0, topics=np.arange(100) // 5)
    assert sorted(rows_of(plan)) == list(range(100))
    assert max(len(set(np.array(batch) // 5)) for batch in list(plan)[1:-1]) <= 3


def test_repeats_leave_their_topic_where_they_must() -> None:
    rows = np.arange(2400)
    topics = rows // 24  # three batches each
    few = texts_of(rows // 2, 10_000 + rows)  # pairs of one topic
    plans = [plan_batches(2400, 8, 0, 0, topics=topics, texts=texts) for texts in (None, few)]
    mixed = [sum(len(set(topics[batch])) > 1 for batch in plan) for plan in plans]
    assert plans[1].repeats == 0 and mixed[1] <= mixed[0] + 2 < 50
    whole = texts_of(topics, 10_000 + rows)  # a topic is a query with 24 positives
    assert plan_batches(2400, 8, 0, 0, topics=topics, texts=whole).repeats == 0
