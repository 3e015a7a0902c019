"""Evaluation during training: fixed samples, and the scores of `contaccum evaluate`."""

from pathlib import Path
from typing import Any

import pytest
import torch
from small_data import write_judged_places
from tiny_models import tiny_encoder

from contaccum import DualEncoder
from contaccum.data import BeirDataset, RecordReport, load_beir_folder
from contaccum.errors import ConfigError
from contaccum.evaluation.beir import evaluate_beir
from contaccum.evaluation.evaluator import RetrievalEvaluator, sample
from contaccum.evaluation.metrics import score_run
from contaccum.retrieval.documents import StoreDocuments
from contaccum.retrieval.encode import CorpusEncoder
from contaccum.retrieval.store import EmbeddingStore

NUM_DOCUMENTS = 40
NUM_QUERIES = 12


@pytest.fixture
def dataset() -> BeirDataset:
    """Return 40 documents and 12 queries.

    Document 3 * i + 1 is relevant to query i. Document 3 * i + 2 is judged and not relevant.
    """
    corpus = {f"d{i}": {"title": "", "text": f"document number {i}"} for i in range(NUM_DOCUMENTS)}
    queries = {f"q{i}": f"what is topic{i}" for i in range(NUM_QUERIES)}
    qrels = {f"q{i}": {f"d{3 * i + 1}": 1, f"d{3 * i + 2}": 0} for i in range(NUM_QUERIES)}
    return BeirDataset(
        "made", corpus, queries, qrels, "dev", "f" * 64, Path("made"), RecordReport("stop")
    )


def test_a_sample_keeps_every_relevant_document(dataset):
    part = sample(dataset, queries=5, corpus=20)
    assert (len(part.queries), len(part.qrels), len(part.corpus)) == (5, 5, 20)
    for query, judged in part.qrels.items():
        grades = dataset.qrels[query]
        relevant = {document for document, grade in grades.items() if grade > 0}
        assert relevant
        assert relevant <= judged.keys()
        assert judged.keys() <= part.corpus.keys()
    # All relevant documents are kept, even if they are more than the wanted number.
    relevant_documents = {f"d{3 * i + 1}" for i in range(NUM_QUERIES)}
    assert sample(dataset, corpus=1).corpus.keys() == relevant_documents


def test_a_query_without_relevant_documents_counts_in_a_sample_too(dataset):
    for document in dataset.qrels["q0"]:
        dataset.qrels["q0"][document] = 0
    part = sample(dataset, corpus=20)
    assert len(part.corpus) == 20
    run = {f"q{i}": {f"d{3 * i + 1}": 1.0} for i in range(NUM_QUERIES)}
    assert score_run(part.qrels, run, [10])[0]["NDCG@10"] == pytest.approx(11 / 12)


def test_a_sample_is_the_same_every_time(dataset):
    part = sample(dataset, queries=5, corpus=20)
    repeated = sample(dataset, 5, 20)
    assert repeated.corpus == part.corpus
    assert repeated.fingerprint == part.fingerprint
    assert part.fingerprint != dataset.fingerprint
    # This value must not change between versions: scores are compared only on the same sample.
    assert part.fingerprint == "5455437334086a1cc13d78650e7d69c764163014d87f740bf9cd410d1885425f"
    assert sample(dataset, queries=3).queries.keys() < part.queries.keys()
    assert sample(dataset, NUM_QUERIES, NUM_DOCUMENTS) is dataset


def test_the_evaluator_gives_the_scores_of_evaluate_beir(tiny_model_path, tmp_path):
    data = load_beir_folder(write_judged_places(tmp_path / "places"))
    model: Any = DualEncoder.from_pretrained(tiny_model_path, device="cpu")
    model.train()
    evaluator = RetrievalEvaluator(
        data, ["eval_NDCG@10", "mrr@3", "ndcg@10"], notes={"of_documents": 99}
    )
    scores = evaluator(model, epoch=0.5, steps=3)
    expected = evaluate_beir(model, data, (3, 10), show_progress=False).metrics
    assert scores == {"ndcg@10": expected["NDCG@10"], "mrr@3": expected["MRR@3"]}
    assert evaluator.primary_metric == "ndcg@10"
    assert evaluator.description == "Retrieval"
    notes = {"name": "places", "fingerprint": data.fingerprint, "of_documents": 99}
    assert {**notes, "queries": 6, "documents": 24}.items() <= evaluator.describe().items()
    assert "path" not in evaluator.get_config_dict()


def encode(model: Any, folder: Path, store: Path) -> StoreDocuments:
    CorpusEncoder(model, "tiny", folder, store).encode(show_progress=False)
    return StoreDocuments(EmbeddingStore.open(store))


def test_new_documents_replace_the_embeddings_of_the_earlier_ones(tmp_path):
    folder = write_judged_places(tmp_path / "places")
    evaluator = RetrievalEvaluator(load_beir_folder(folder))
    lines = (folder / "corpus.jsonl").read_text().splitlines(keepends=True)
    corpus = tmp_path / "corpus.jsonl"
    # The second model has other weights than the first, and its store lacks five documents.
    for noise, num_missing in ((0.0, 0), (0.1, 5)):
        corpus.write_text("".join(lines[num_missing:]))
        model = tiny_encoder()
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(noise * torch.randn_like(weight))
        # Without stored embeddings, the evaluator encodes the documents itself.
        evaluator.documents = None
        expected = evaluator.search(model)
        evaluator.documents = encode(model, corpus, tmp_path / f"store-{noise}")
        run = evaluator.search(model)
        assert run.keys() == expected.keys()
        for query_id, hits in run.items():
            assert hits == pytest.approx(expected[query_id], abs=1e-5)


def test_a_store_of_another_model_is_refused(tmp_path):
    """Also if the model has changed since an earlier search with the same evaluator."""
    folder = write_judged_places(tmp_path / "places")
    evaluator = RetrievalEvaluator(load_beir_folder(folder))
    model = tiny_encoder()
    evaluator.documents = encode(model, folder, tmp_path / "store")
    evaluator.search(model)
    with pytest.raises(ConfigError, match="another tokenizer, prompt"):
        evaluator.search(tiny_encoder(passage_prompt="passage: "))
    with torch.no_grad():
        next(model.parameters()).add_(1.0)
    with pytest.raises(ConfigError, match=r"another model .*use tiny"):
        evaluator.search(model)


def test_the_primary_metric_is_checked_and_scored(dataset):
    evaluator = RetrievalEvaluator(dataset, metrics=["recall@5"], primary_metric="NDCG@3")
    assert evaluator.primary_metric == "ndcg@3"
    assert evaluator.score_run(evaluator.search_bm25()).keys() == {"recall@5", "ndcg@3"}
    with pytest.raises(ConfigError, match="ndgc@3"):
        RetrievalEvaluator(dataset, primary_metric="ndgc@3")


def test_a_bm25_that_finds_no_relevant_document_is_no_baseline(dataset, caplog):
    RetrievalEvaluator(dataset).search_bm25()
    [message] = caplog.messages
    assert message.startswith("made: BM25 finds no relevant document for any query")
    dataset.queries["q0"] = "number 1"
    RetrievalEvaluator(dataset).search_bm25()
    assert len(caplog.messages) == 1
