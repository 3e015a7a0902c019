"""What a run was: arguments, data, model, versions and commit, so that it can be repeated. It never reads secrets."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from contaccum.evaluation.provenance import git_commit, package_versions
from contaccum.evaluation.retrieval_evaluator import RetrievalEvaluator

if TYPE_CHECKING:
    from contaccum.training.trainer import ContAccumTrainer


def run_record(trainer: ContAccumTrainer) -> dict[str, Any]:
    """The content of ``run.json``. Tokens among the arguments are blanked by transformers' ``to_dict``."""
    args = trainer.args
    dataset: Any = trainer.train_dataset
    evaluator = trainer.evaluator
    return {
        "method": args.method,
        "seed": args.seed,
        "pairs_per_update": args.total_train_batch_size,
        "updates": trainer.state.max_steps,
        "data": {
            "fingerprint": trainer.data_fingerprint or texts_fingerprint(dataset),
            "rows": rows_of(dataset),
            **({"sets": sets_record(trainer)} if trainer.set_shares else {}),
        },
        "model": {
            "base": getattr(trainer.model.model_card_data, "base_model", None),
            "parameters": sum(p.numel() for p in trainer.model.parameters()),
        },
        **({"evaluation": evaluator.describe()} if isinstance(evaluator, RetrievalEvaluator) else {}),
        "arguments": args.to_dict(),
        "versions": package_versions(),
        "git_commit": git_commit(),
    }


def rows_of(dataset: Any) -> int | None:
    """The rows of a data set, or of several together; None for a stream."""
    parts = list(dataset.values()) if isinstance(dataset, dict) else [dataset]
    return sum(map(len, parts)) if all(hasattr(part, "__len__") for part in parts) else None


def sets_record(trainer: ContAccumTrainer) -> list[dict[str, Any]]:
    """Each of several training sets: name, rows, weight, batches of an epoch, and what the trainer was told of it."""
    told = trainer.data_sets
    return [{"name": name, **told.get(name, {}), **about} for name, about in trainer.set_shares.items()]


def texts_fingerprint(dataset: Any) -> str | None:
    """SHA-256 over a data set's rows in order; None for a stream, which has no end to read to."""
    if dataset is None or not hasattr(dataset, "__len__"):
        return None
    digest = hashlib.sha256()
    parts = dataset.values() if isinstance(dataset, dict) else [dataset]
    for part in parts:
        # What is stored, not what an epoch draws from it.
        for batch in part.with_format(None).iter(batch_size=1000):
            for row in zip(*batch.values(), strict=True):
                for value in row:
                    data = str(value).encode()
                    digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()
