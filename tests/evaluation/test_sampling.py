"""Parts of a data set to evaluate on: fixed, with every relevant document, and hard ones where asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from contaccum.data.beir_folder import BeirDataset
from contaccum.data.records import RecordReport
from contaccum.evaluation.sampling import hard_sample, sample


@pytest.fixture
def whole() -> BeirDataset:
    """12 queries; q's relevant document is d1q, d2q is judged and not relevant; 40 documents in all."""
    corpus = {f"d{n}": {"title": "", "text": f"document number {n}"} for n in range(40)}
    for q in range(12):
        corpus[f"d{3 * q}"]["text"] = f"about topic{q} and topic{q} again"
    qrels = {f"q{q}": {f"d{3 * q + 1}": 1, f"d{3 * q + 2}": 0} for q in range(12)}
    queries = {f"q{q}": f"what is topic{q}" for q in range(12)}
    return BeirDataset("made", corpus, queries, qrels, "dev", "f" * 64, Path("made"), RecordReport("stop"))


def relevant(dataset: BeirDataset) -> set[str]:
    return {document for judged in dataset.qrels.values() for document, grade in judged.items() if grade > 0}


def test_a_sample_is_fixed_and_keeps_every_relevant_document(whole: BeirDataset) -> None:
    some = sample(whole, queries=5, corpus=20)
    assert len(some.queries) == len(some.qrels) == 5 and len(some.corpus) == 20
    assert list(some.queries) == [query for query in whole.queries if query in some.queries]
    for query, judged in some.qrels.items():
        wanted = {document for document, grade in whole.qrels[query].items() if grade > 0}
        assert wanted and wanted <= some.corpus.keys() and wanted <= judged.keys() <= some.corpus.keys()
    again = sample(whole, 5, 20)
    assert again.fingerprint == some.fingerprint != whole.fingerprint and again.corpus == some.corpus
    assert sample(whole, queries=3).queries.keys() < some.queries.keys()
    assert sample(whole, corpus=1).corpus.keys() == relevant(whole)
    assert sample(whole, 12, 40) is whole and sample(whole) is whole


def test_a_hard_sample_holds_judged_documents_and_what_bm25_ranks_first(whole: BeirDataset) -> None:
    some = hard_sample(whole, queries=4, corpus=12)
    chosen = [int(query[1:]) for query in some.queries]
    expected = {f"d{3 * q + part}" for q in chosen for part in (0, 1, 2)}  # BM25's, the relevant and the judged one
    assert some.corpus.keys() == expected
    assert all(len(judged) == 2 for judged in some.qrels.values())
    assert hard_sample(whole, queries=4, corpus=12).fingerprint == some.fingerprint
    assert some.fingerprint != sample(whole, queries=4, corpus=12).fingerprint
    assert hard_sample(whole, 4).corpus.keys() == whole.corpus.keys()


def test_a_hard_sample_is_filled_up_where_bm25_finds_too_little(whole: BeirDataset) -> None:
    some = hard_sample(whole, queries=4, corpus=30)
    assert len(some.corpus) == 30 and relevant(some) <= some.corpus.keys()
