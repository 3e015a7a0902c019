"""The trainers of the study by time: contaccum's, and that of sentence-transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer.losses import (
    CachedGISTEmbedLoss,
    CachedMultipleNegativesRankingLoss,
)

from contaccum import DualEncoder
from contaccum import settings as contaccum_settings
from contaccum.data import read_records
from contaccum.encoders.settings import configure
from contaccum.training.arguments import ContAccumTrainingArguments
from contaccum.training.setup import load_encoder, load_run_data
from contaccum.training.trainer import make_trainer
from time_study.oracle import BankRefresh
from time_study.plan import Settings


def make_contaccum_trainer(settings: Settings) -> Any:
    """Return the trainer of `contaccum train` with these settings."""
    options = [f"--{key}={value}" for key, value in settings.items()]
    given = contaccum_settings.read(options)
    run_settings = contaccum_settings.replace(contaccum_settings.Settings(), **given)
    args = ContAccumTrainingArguments.from_settings(run_settings)
    data = load_run_data(run_settings, args)
    encoder = load_encoder(run_settings, args)
    return make_trainer(encoder, run_settings, args, data)


def make_oracle_trainer(settings: Settings) -> Any:
    """Return the trainer of `contaccum train`, with banks that are encoded again."""
    trainer = make_contaccum_trainer(settings)
    trainer.add_callback(BankRefresh(trainer.loss, int(settings["bank_size"])))
    return trainer


def make_sentence_transformers_trainer(settings: Settings) -> Any:
    """Return sentence-transformers' own trainer, with a cached loss and mined negatives.

    Args:
        settings: settings as for `contaccum train`, without a method. Those that are named below
            are translated; the others have the same names in sentence-transformers.
            ``train_data`` is a file of queries, positives and mined negatives. With ``guide``, the
            loss is CachedGISTEmbedLoss, otherwise CachedMultipleNegativesRankingLoss.
    """
    own = dict(settings)
    model = DualEncoder.from_pretrained(str(own.pop("model")), device="cpu")
    configure(model, dropout=float(own.pop("dropout")))
    temperature = float(own.pop("temperature"))
    micro_batch_size = int(own.pop("per_device_train_batch_size"))
    rows = []
    for record in read_records(str(own.pop("train_data"))):
        for positive in record.positives:
            rows.append((record.query, positive, record.negatives[0]))
    columns = dict(zip(("anchor", "positive", "negative"), zip(*rows, strict=True), strict=True))
    dataset = Dataset.from_dict({name: list(texts) for name, texts in columns.items()})
    guide = own.pop("guide", None)
    loss: Any
    if guide is None:
        loss = CachedMultipleNegativesRankingLoss(
            model, scale=1 / temperature, mini_batch_size=micro_batch_size
        )
    else:
        loss = CachedGISTEmbedLoss(
            model,
            SentenceTransformer(str(guide), device="cpu"),
            temperature=temperature,
            mini_batch_size=micro_batch_size,
        )
    # The batch is the whole update: the loss itself splits it into micro-batches.
    own["per_device_train_batch_size"] = own.pop("total_train_batch_size")
    own["learning_rate"] = float(own["learning_rate"])
    own["use_cpu"] = True
    args = SentenceTransformerTrainingArguments(**own)  # type: ignore[arg-type]  # values by key
    return SentenceTransformerTrainer(model, args, dataset, loss=loss)


TRAINERS: dict[str, Callable[[Settings], Any]] = {
    "contaccum": make_contaccum_trainer,
    "oracle": make_oracle_trainer,
    "sentence_transformers": make_sentence_transformers_trainer,
}


def get_trained_model(trainer: Any) -> DualEncoder:
    """Return the model of a trainer, without the trainer's autocast around its forward method."""
    return trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)
