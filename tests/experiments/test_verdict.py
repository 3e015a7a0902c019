"""Folds of few pairs: queries of several folds are in one group if they are about one passage."""

from pathlib import Path

import numpy as np
import pytest
from sample_texts import sentences
from small_data import make_queries, write_beir

from contaccum.data import load_beir_folder
from contaccum.evaluation.metrics import LEVEL
from contaccum.experiments.verdict import (
    SYSTEMS,
    ScoreColumns,
    SystemResult,
    collect_scores,
    compute_verdict,
    join_folds,
)

NUM_PASSAGES = 12
NUM_FOLDS = 5
NUM_SAMPLES = 200
COMPARED = ("base", "trained")  # columns of scores


@pytest.fixture(scope="module")
def pooled(tmp_path_factory) -> ScoreColumns:
    """Pool folds with a query about each passage, whose ids and spelling are other in each fold.

    One query of the last fold is about the passages 0 and 1, so their queries are one group.
    """
    passages = sentences(NUM_PASSAGES, 1, 12)
    folds = []
    for fold in range(NUM_FOLDS):
        documents = {}
        qrels = []
        for number, text in enumerate(passages):
            document = f"d{(number + fold) % NUM_PASSAGES}"
            documents[document] = ("", text.upper() if fold == 1 else f"{text}{'!' * fold}")
            qrels.append((f"q{number}", document, 1))
        if fold == NUM_FOLDS - 1:
            qrels.append(("q0", f"d{1 + fold}", 1))
        queries = make_queries("q", sentences(NUM_PASSAGES, 10 + fold))
        folder: Path = tmp_path_factory.mktemp("folds") / "test"
        test_set = load_beir_folder(write_beir(folder, documents, queries, qrels, "test"), "test")
        results = dict.fromkeys(SYSTEMS, SystemResult({}, dict.fromkeys(queries, 0.5), {}))
        folds.append(collect_scores(test_set, results, fold))
    return join_folds(folds)


def test_a_passage_is_one_group_over_all_folds(pooled):
    groups = pooled["group"]
    assert len(groups) == NUM_PASSAGES * NUM_FOLDS
    for number in range(NUM_PASSAGES):
        assert len({groups[f"{fold}/q{number}"] for fold in range(NUM_FOLDS)}) == 1
    assert groups["0/q0"] == groups["0/q1"]
    assert len(set(groups.values())) == NUM_PASSAGES - 1
    verdict = compute_verdict(pooled, COMPARED, COMPARED, list(groups), folds=5)
    assert "60 held-out queries of 11 passages in 5 splits" in str(verdict)


def test_models_that_do_not_differ_are_told_apart_in_5_percent_of_all_samples(pooled):
    """The model of each fold gains or loses on the same passages.

    With a group for each passage and fold, some 30 % of these samples had a verdict.
    """
    generator = np.random.default_rng(0)
    groups = pooled["group"]
    num_verdicts = 0
    for _ in range(NUM_SAMPLES):
        gains = {number: 0.1 * generator.standard_normal() for number in range(1, NUM_PASSAGES)}
        trained = {}
        for query in groups:
            number = int(query.rpartition("q")[2])
            gain = gains[max(number, 1)] + 0.1 * generator.standard_normal()
            trained[query] = float(np.clip(0.5 + gain, 0, 1))
        scores = {**pooled, "trained": trained}
        verdict = compute_verdict(scores, COMPARED, COMPARED, list(groups))
        num_verdicts += verdict.word != LEVEL
    assert num_verdicts / NUM_SAMPLES <= 0.09  # the standard deviation of 5 % is 1.5 %
