"""What changed between a checkpoint's run and this one, and which changes a resumed run cannot bear.

A bank holds scores that its settings made, and a position in the data means something for one order of one data set
only. Everything that changed is listed; what makes no sense is refused. Nothing is loaded here but JSON.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contaccum.errors import UserError
from contaccum.evaluation.provenance import package_versions
from contaccum.training.run_record import texts_fingerprint

if TYPE_CHECKING:
    from contaccum.training.checkpoints import CheckpointedTrainer

FACTS_FILE = "checkpoint.json"
ARGUMENTS_FILE = "training_args.json"

# What the state of a bank or an optimizer was made with: there is no going on with another value.
NEVER = (
    "method",
    "bank_size",
    "query_bank_size",
    "similarity",
    "temperature",
    "drift_compensation",
    "mask_duplicates",
    "bank_hard_negatives",
    "optim",
)
# What the position in the data is counted in: another value leaves out or repeats some of it.
BY_FLAG = (
    "pairs per update",
    "data fingerprint",
    "rows",
    "seed",
    "data_seed",
    "batch_sampler",
    "multi_dataset_batch_sampler",
    "train_sampling_strategy",
    "length_column_name",
    "length_window",
    "topic_column",
    "dataloader_drop_last",
)
# What optimizer, schedule and bank keep in their own state.
STAYS = (
    "learning_rate",
    "learning_rate_scaling",
    "learning_rate_base_batch_size",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "bank_dtype",
)
# Where things lie and what is shown: no part of what a run computes.
_UNTOLD = (
    "output_dir",
    "logging_dir",
    "run_name",
    "resume_from_checkpoint",
    "resume_with_changes",
    "disable_tqdm",
    "total_train_batch_size",  # "pairs per update"
)
FLAG = "--resume_with_changes true"


def run_facts(trainer: CheckpointedTrainer) -> dict[str, Any]:
    """What a checkpoint says of the run that wrote it, beside its arguments."""
    window = trainer.window_state()
    return {
        "update": trainer.state.global_step,
        "micro_steps": 0 if window is None else window["micro_steps"],
        "pairs per update": trainer.args.total_train_batch_size,
        "pairs per micro-batch": trainer.args.pairs_per_micro_batch,
        "ranks": trainer.args.world_size,
        "data fingerprint": _fingerprint(trainer),
        "rows": _rows(trainer.train_dataset),
        "config": trainer.config_beside or {},
        "versions": package_versions(),
    }


def read_facts(checkpoint: Path) -> dict[str, Any]:
    """The ``checkpoint.json`` of a checkpoint whose checksums are right."""
    return json.loads((checkpoint / FACTS_FILE).read_text(encoding="utf-8"))


def refuse_or_list_changes(trainer: CheckpointedTrainer, checkpoint: Path, facts: dict[str, Any]) -> list[str]:
    """A line for every setting that is not what it was: ``key: old -> new``, and what that means.

    Raises:
        UserError: when the run cannot go on with them, listing those that are in the way.
    """
    with open(checkpoint / ARGUMENTS_FILE, encoding="utf-8") as file:
        old = json.load(file)
    new = json.loads(json.dumps(trainer.args.to_dict(), default=str))
    now = run_facts(trainer)
    for name in ("pairs per update", "data fingerprint", "rows"):
        old[name], new[name] = facts[name], now[name]
    old |= facts["config"]
    new |= now["config"] or facts["config"]
    if facts["data fingerprint"] is None or now["data fingerprint"] is None:  # a stream, of which nothing is known
        old.pop("data fingerprint"), new.pop("data fingerprint")
    changed = {
        key: f"{key}: {_shown(old.get(key))} -> {_shown(new.get(key))}"
        for key in {**old, **new}
        if key not in _UNTOLD and old.get(key) != new.get(key)
    }
    _refuse(
        [text for key, text in changed.items() if key in NEVER],
        f"{checkpoint}: cannot go on with other settings than its bank and optimizer were made with",
        f"set them back, or train from its weights with --model {checkpoint}",
    )
    if not trainer.args.resume_with_changes:
        args = trainer.args
        planned = args.avoids_duplicates or args.groups_by_length or args.topic_column or args.own_batch_sampler
        ordering: tuple[str, ...] = (
            (*BY_FLAG, "per_device_train_batch_size") if planned else BY_FLAG
        )  # plain shuffling knows no batches
        if facts["ranks"] != args.world_size:
            # sentence-transformers sets it by the number of ranks; it tells at the end of an epoch alone.
            ordering = tuple(key for key in ordering if key != "dataloader_drop_last")
        _refuse(
            [text for key, text in changed.items() if key in ordering],
            f"{checkpoint}: its place in the data means nothing with",
            f"set them back, or go on all the same with {FLAG}",
        )
    lines = []
    for key, text in changed.items():
        stays = " (the checkpoint's stays in force)" if key in STAYS else ""
        lines.append(f"changed since {checkpoint.name}: {text}{stays}")
    if facts["ranks"] != trainer.args.world_size:
        lines.append(
            f"changed since {checkpoint.name}: ranks: {facts['ranks']} -> {trainer.args.world_size} (new ranks draw "
            "random numbers from the seed)"
        )
    return lines


def _refuse(changes: list[str], reason: str, mend: str) -> None:
    if changes:
        raise UserError(f"{reason}: {'; '.join(changes)}. So {mend}")


def _shown(value: Any) -> str:
    text = json.dumps(value) if not isinstance(value, str) else value
    return text if len(text) <= 64 else f"{text[:12]}..."


def _fingerprint(trainer: CheckpointedTrainer) -> str | None:
    if trainer.data_fingerprint is None:
        # Once a run: every row is read for it.
        trainer.data_fingerprint = texts_fingerprint(trainer.train_dataset)
    return trainer.data_fingerprint


def _rows(dataset: Any) -> int | None:
    parts = list(dataset.values()) if isinstance(dataset, dict) else [dataset]
    return sum(map(len, parts)) if all(hasattr(part, "__len__") for part in parts) else None
