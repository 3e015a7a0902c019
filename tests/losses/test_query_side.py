"""The query tower learns against a store whose documents stand still."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from sample_texts import features, sentences
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.losses import MatryoshkaLoss
from small_data import write_lines
from tiny_models import tiny_encoder
from torch.nn.functional import normalize

from contaccum import DualEncoder
from contaccum.encoders.dual_encoder import add_query_adapter, train_query_tower_alone
from contaccum.errors import ConfigError, DataError
from contaccum.losses.query_side import QuerySideCollator, QuerySideLoss
from contaccum.retrieval.documents import StoreDocuments
from contaccum.retrieval.encode import (
    CorpusEncoder,
    check_store_fits,
    encode_texts,
    model_fingerprint,
    tokenisation_fingerprint,
)
from contaccum.retrieval.exact_search import DeviceEmbeddings
from contaccum.retrieval.store import EmbeddingStore

DOCUMENTS = sentences(40, 5, 9)


def write_store(
    folder: Path, model: Any, texts: list[str] = DOCUMENTS, **settings: Any
) -> EmbeddingStore:
    corpus = write_lines(
        folder / "corpus.jsonl",
        [{"_id": f"d{row}", "text": text} for row, text in enumerate(texts)],
    )
    settings = {"shard_size": 16, **settings}
    encoder = CorpusEncoder(model, "tiny", corpus, folder / "store", **settings)
    assert encoder.encode(show_progress=False)
    return EmbeddingStore.open(folder / "store")


def training_pairs(n: int = 24) -> Dataset:
    """Pairs whose positives are documents; the first two queries are one text."""
    queries = sentences(n, 6)
    queries[1] = queries[0]
    return Dataset.from_dict({"query": queries, "positive": DOCUMENTS[:n]})


@pytest.fixture
def loss(tmp_path) -> QuerySideLoss:
    """The loss of a tiny model and a store that it has written."""
    model = tiny_encoder()
    return QuerySideLoss(model, write_store(tmp_path, model))


def collate(loss: QuerySideLoss, positive: str) -> dict[str, Any]:
    """Collate a batch of one pair."""
    data = Dataset.from_dict({"query": ["the cat"], "positive": [positive]})
    return QuerySideCollator.of_dataset(loss.model, loss.documents, data)([data[0]])


@pytest.mark.parametrize("kind", [DualEncoder, SentenceTransformer])
def test_a_model_with_truncate_dim_trains_the_dimensions_of_its_store(kind, tmp_path):
    tiny_encoder().save_pretrained(str(tmp_path / "model"))
    model = kind(str(tmp_path / "model"), device="cpu", truncate_dim=6)
    store = write_store(tmp_path, model)
    loss_fn = QuerySideLoss(model, store)
    data = training_pairs()
    collator = QuerySideCollator.of_dataset(model, loss_fn.documents, data)
    batch = collator([data[index] for index in range(8)])
    features = {
        name.removeprefix("query_"): value for name, value in batch.items() if name != "label"
    }
    queries = torch.tensor(encode_texts(model, data["query"][:8], "query"))
    expected = loss_fn.compute_loss_from_embeddings(queries, batch["label"])
    model.eval()
    assert torch.allclose(loss_fn([features], batch["label"]), expected, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("similarity", ["cos", "dot"])
def test_loss_and_gradient_equal_a_dense_softmax_over_the_stored_embeddings(
    tmp_path, dtype, similarity
):
    model = tiny_encoder(normalize=False, similarity=similarity)
    texts = [*DOCUMENTS, DOCUMENTS[2]]  # one document is there twice
    store = write_store(tmp_path, model, texts, dtype=dtype)
    loss_fn = QuerySideLoss(model, store, scale=5.0)
    data = training_pairs()
    collator = QuerySideCollator.of_dataset(model, loss_fn.documents, data)
    rows = [data[index] for index in range(8)]
    batch = collator(rows)
    assert not any(name.startswith("positive") for name in batch)
    labels = batch["label"]
    assert labels[:, 0].tolist() == list(range(8))
    assert set(labels[0].tolist()) >= {0, 1} and set(labels[2].tolist()) >= {2, 40}

    queries = torch.randn(8, 16, dtype=torch.float64, requires_grad=True)
    loss = loss_fn.compute_loss_from_embeddings(queries, labels)
    loss.backward()

    dense_queries = queries.detach().clone().requires_grad_()
    documents = torch.from_numpy(store[:]).double()
    if similarity == "cos":
        logits = normalize(dense_queries, dim=1) @ normalize(documents, dim=1).T * 5.0
    else:
        logits = dense_queries @ documents.T * 5.0
    excluded = torch.zeros(8, 41, dtype=torch.bool)
    excluded[0, 1] = excluded[1, 0] = excluded[2, 40] = True
    expected = torch.nn.functional.cross_entropy(
        logits.masked_fill(excluded, -torch.inf), torch.arange(8)
    )
    expected.backward()
    # Lengths of documents are float32.
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert torch.allclose(queries.grad, dense_queries.grad, rtol=1e-4, atol=1e-7)
    assert dense_queries.grad.abs().max() > 1e-3


@pytest.mark.parametrize(("tied", "adapter"), [(True, False), (True, True), (False, False)])
def test_trained_by_sentence_transformers_the_query_side_learns_and_the_store_stays_valid(
    tmp_path, tied, adapter
):
    base = tmp_path / "base"
    tiny_encoder(tied).save_pretrained(str(base))
    model = DualEncoder.from_pretrained(base, device="cpu")
    store = write_store(tmp_path, model)
    documents_before = encode_texts(model, DOCUMENTS)
    queries_before = encode_texts(model, DOCUMENTS[:3], "query")
    if adapter:
        add_query_adapter(model, 8)
    loss = QuerySideLoss(model, store)
    data = training_pairs()
    args = SentenceTransformerTrainingArguments(
        str(tmp_path / "run"),
        num_train_epochs=12,
        learning_rate=3e-2,
        per_device_train_batch_size=8,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        logging_strategy="no",
        disable_tqdm=True,
    )
    collator = QuerySideCollator.of_dataset(model, loss.documents, data)
    trainer = SentenceTransformerTrainer(
        model=model, args=args, train_dataset=data, loss=loss, data_collator=collator
    )
    batch = collator([data[index] for index in range(24)])
    labels = batch.pop("label")

    def loss_of_all() -> float:
        features = trainer.collect_features(dict(batch))[0]
        with torch.no_grad():
            return loss.eval()(features, labels).item()

    before = loss_of_all()
    trainer.train()
    assert loss_of_all() < 0.9 * before

    model.save_pretrained(str(tmp_path / "trained"))
    for loaded in (model, DualEncoder.from_pretrained(tmp_path / "trained", device="cpu")):
        assert (encode_texts(loaded, DOCUMENTS) == documents_before).all()
        assert abs(encode_texts(loaded, DOCUMENTS[:3], "query") - queries_before).max() > 1e-3
        check_store_fits(loaded, store)
    if adapter:
        towers = [set(tower.parameters()) for tower in loaded[0].sub_modules.values()]
        assert not towers[0].isdisjoint(towers[1])  # one base in memory for both sides
    plain = SentenceTransformer(str(tmp_path / "trained"), device="cpu")
    assert (plain.encode_query(DOCUMENTS[:2]) == loaded.encode_query(DOCUMENTS[:2])).all()


def test_a_tower_has_the_fingerprints_of_the_tied_model_that_it_was():
    tied = tiny_encoder()
    untied = tiny_encoder()
    train_query_tower_alone(untied)
    for kind in ("query", "document"):
        assert model_fingerprint(untied, kind) == model_fingerprint(tied, kind)
        assert tokenisation_fingerprint(untied, kind) == tokenisation_fingerprint(tied, kind)
    tied.prompts["document"] = "passage: "
    assert tokenisation_fingerprint(untied, "query") == tokenisation_fingerprint(tied, "query")
    assert tokenisation_fingerprint(untied, "document") != tokenisation_fingerprint(
        tied, "document"
    )


def test_a_store_that_another_model_wrote_is_refused(tmp_path):
    model = tiny_encoder()
    store = write_store(tmp_path / "documents", model)
    other_weights = tiny_encoder()
    with torch.no_grad():
        next(other_weights.parameters()).add_(1)
    other_prompt = tiny_encoder(passage_prompt="passage: ")
    other_similarity = tiny_encoder(similarity="dot")
    cases = [
        (other_weights, store, "another model .*use tiny"),
        (other_prompt, store, "another tokenizer, prompt.*--passage_max_length"),
        (other_similarity, store, "another similarity .cos, now dot"),
    ]
    for refused_model, refused_store, message in cases:
        with pytest.raises(ConfigError, match=message):
            QuerySideLoss(refused_model, refused_store)
    (store.folder / "shard-00001" / "embeddings.npy").write_bytes(b"")
    with pytest.raises(DataError, match="missing, cut off"):
        QuerySideLoss(model, store.folder)


def test_a_new_model_of_the_loss_is_checked_and_keeps_its_document_tower(loss):
    """sentence-transformers puts a new model into the loss for each trial of a search."""
    loss.model = tiny_encoder()
    trained = {name for name, weight in loss.model.named_parameters() if weight.requires_grad}
    assert trained and all(".query." in name for name in trained)
    with pytest.raises(ConfigError, match="another similarity"):
        loss.model = tiny_encoder(similarity="dot")


def test_queries_of_another_size_than_the_documents_are_refused(loss):
    matryoshka = MatryoshkaLoss(loss.model, loss, [16, 8])
    with pytest.raises(ConfigError, match="without MatryoshkaLoss"):
        matryoshka(features(loss.model, 4, 1), torch.arange(4)[:, None])


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("stays_on_device", [False, True])
@pytest.mark.parametrize("num_parts", [1, 3])
def test_blocks_are_the_store_and_then_the_added_documents_in_their_number_types(
    tmp_path, monkeypatch, dtype, stays_on_device, num_parts
):
    """All parts together are the store and the added documents, however often they are read."""
    monkeypatch.setattr(DeviceEmbeddings, "_fits", lambda embeddings: stays_on_device)
    model = tiny_encoder()
    documents = StoreDocuments(write_store(tmp_path, model, dtype=dtype))
    text = "a text that no document has"
    assert [rows.tolist() for rows in documents.find_rows([text])] == [[]]
    documents.add([text], encode_texts(model, [text]))
    assert [rows.tolist() for rows in documents.find_rows([text])] == [[40]]
    expected = documents.get_embeddings(torch.arange(len(documents)))
    tolerance = 1e-6 if dtype == "float32" else 1e-3
    encoded = torch.from_numpy(encode_texts(model, [*DOCUMENTS, text]))
    assert torch.allclose(expected, encoded, atol=tolerance)
    for _ in range(2):
        rows = []
        for part in range(num_parts):
            for block in documents.blocks(torch.device("cpu"), part, num_parts):
                assert block.first == len(rows)
                stored_type = getattr(torch, dtype)
                assert block.documents.dtype == (stored_type if len(rows) < 40 else torch.float32)
                rows += list(block.documents.float() * block.scales[:, None])
        assert torch.allclose(torch.stack(rows), expected, atol=1e-6)


def test_white_space_around_a_positive_and_the_default_scale(loss):
    assert loss.scale == {"cos": 20.0, "dot": 1.0}[loss.documents.similarity]
    rows = [collate(loss, text)["label"].tolist() for text in (DOCUMENTS[3], f" {DOCUMENTS[3]}\n")]
    assert rows[0] == rows[1]


def test_a_positive_that_the_store_lacks_is_named(loss):
    with pytest.raises(DataError, match="lacks the positive 'nowhere"):
        collate(loss, "nowhere to be found")


def test_columns_of_hard_negatives_are_named_as_unused(loss, caplog):
    pairs = training_pairs()
    QuerySideCollator.of_dataset(loss.model, loss.documents, pairs)
    assert "not used" not in caplog.text
    triplets = pairs.add_column("negative", DOCUMENTS[-len(pairs) :])
    QuerySideCollator.of_dataset(loss.model, loss.documents, triplets)
    assert "the columns negative are not used" in caplog.text


def test_queries_are_tokenised_with_the_prompt_that_search_uses(tmp_path):
    model = tiny_encoder(query_prompt="bird ")
    loss = QuerySideLoss(model, write_store(tmp_path, model))
    [tokens] = collate(loss, DOCUMENTS[3])["query_input_ids"]
    assert model.tokenizer.decode(tokens, skip_special_tokens=True) == "bird the cat"
