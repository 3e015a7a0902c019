"""ContAccumTrainer on two gloo processes, with DDP and FSDP, equals one process; in float64, without dropout.

Both processes run all cases, one after the other, because starting them costs seconds.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from accelerate import PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from datasets import Dataset
from dev_sets import dev_set
from safetensors.torch import load_file
from sample_texts import sentences
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainerCallback

import contaccum.losses
from contaccum import ContAccumTrainer, ContAccumTrainingArguments, DualEncoder
from contaccum.errors import ConfigError
from contaccum.evaluation.retrieval_evaluator import RetrievalEvaluator
from contaccum.training.arguments import BANK_METHODS, METHODS
from contaccum.training.callbacks import EVAL_LOG
from contaccum.training.parallel import freeze_unused
from contaccum.training.trainer import BANK_FILE

ROWS, K, UPDATES = 72, 3, 3
ADAMW = {"optim": "adamw_torch", "learning_rate": 1e-3}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 1}
STOPPED = {**EVALUATED, "early_stopping_patience": 1, "early_stopping_threshold": 10.0, "save_strategy": "steps"}
STOPPED |= {"save_steps": 1, "load_best_model_at_end": True}
FSDP = {"fsdp": True, "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["BertLayer"]}}


class Case(NamedTuple):
    method: str
    h: int = 0
    tied: bool = True
    engine: str = "ddp"
    more: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        parts = [
            self.method,
            str(self.h),
            "tied" if self.tied else "untied",
            self.engine,
            *(key for key, _ in self.more),
        ]
        return "-".join(parts)


SHARDED, BALANCED = (("shard_bank", True),), (("balance_grad_norms", "geometric"), ("max_grad_norm", 0.5))
CASES = [
    *(Case(method, h) for method in METHODS for h in (0, 1)),
    Case("contaccum", 1, tied=False, more=BALANCED),
    Case("contaccum", 1, more=SHARDED),
    Case("grad_cache", tied=False),
    Case("contaccum", engine="fsdp", more=BALANCED),
    Case("contaccum", 1, tied=False, engine="fsdp", more=BALANCED),
    Case("grad_accum", engine="fsdp"),
]


class CountReductions(TrainerCallback):
    """Counts how often DDP reduces the gradients of all parameters."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.count = 0

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        if isinstance(self.trainer.model_wrapped, DistributedDataParallel):
            self.trainer.model_wrapped.register_comm_hook(None, self.reduce)

    def reduce(self, state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
        self.count += bucket.is_last()
        return allreduce_hook(dist.group.WORLD, bucket)


def train(case: Case, folder: Path, world: int, **more: Any) -> dict[str, Any]:
    """Weights, log and reductions of one run; the same pairs per micro-step on any number of ranks."""
    columns = ["query", "positive", "negative"][: 2 + case.h]
    dataset = Dataset.from_dict({name: sentences(ROWS, i) for i, name in enumerate(columns)})
    model = DualEncoder.from_pretrained(str(folder / f"tied_{case.tied}"), device="cpu").double()
    out = folder / f"{case.name}_{world}"
    settings: dict[str, Any] = {
        "gather_across_devices": None if case.method in BANK_METHODS else world > 1,
        "gradient_accumulation_steps": 1 if case.method == "in_batch" else K,
        **({"bank_size": 40} if case.method in BANK_METHODS else {}),
        **({"max_steps": UPDATES} if case.method == "in_batch" else {}),
        **(FSDP if case.engine == "fsdp" and world > 1 else {}),
        **{key: value for key, value in case.more if world > 1 or key != "shard_bank"},
        **more,
    }
    args = ContAccumTrainingArguments(
        output_dir=str(out),
        method=case.method,
        per_device_train_batch_size=8 // world,
        num_train_epochs=1,
        learning_rate=settings.pop("learning_rate", 0.5),
        lr_scheduler_type="constant",
        optim=settings.pop("optim", "sgd"),
        save_strategy=settings.pop("save_strategy", "no"),
        disable_tqdm=True,
        report_to=[],
        use_cpu=True,
        ddp_backend="gloo" if world > 1 else None,
        max_grad_norm=settings.pop("max_grad_norm", 0.0),
        **settings,
    )
    if case.engine == "fsdp" and world > 1:
        # accelerate shards on accelerators only; torch does so on a CPU as well.
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    counter = CountReductions()
    evaluator = RetrievalEvaluator(dev_set()) if "eval_strategy" in settings else None
    trainer = ContAccumTrainer(
        model=model, args=args, train_dataset=dataset, evaluator=evaluator, quiet=True, callbacks=[counter]
    )
    counter.trainer = trainer
    trainer.train(resume_from_checkpoint=settings.get("resume_from_checkpoint"))
    trainer.save_model(str(out))
    engine = type(trainer.model_wrapped).__name__
    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ.pop("ACCELERATE_USE_FSDP", None)  # accelerate leaves it there
    if world > 1:
        dist.barrier()  # what rank 0 has written
    log = [json.loads(line) for line in (out / "train_log.jsonl").read_text().splitlines()]
    saved = DualEncoder.from_pretrained(str(out), device="cpu")
    weights = {name: value.double() for name, value in saved.state_dict().items()}
    return {"weights": weights, "log": log, "reductions": counter.count, "engine": engine}


def worker(rank: int, world: int, port: int, folder: Path) -> None:
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in names.items()} | {"MASTER_ADDR": "127.0.0.1"}
    torch.set_num_threads(1)
    contaccum.losses.PAIRS_PER_PROBE = 20
    results: dict[str, Any] = {case.name: train(case, folder, world) for case in CASES}
    for engine in ("ddp", "fsdp"):  # torch 2.13 cannot load a sharded SGD, which has no state
        results[f"saved by {engine}"] = train(
            Case("contaccum", 1, engine=engine, more=(("shard_bank", engine == "ddp"),)),
            folder / engine,
            world,
            save_strategy="steps",
            save_steps=1,
            **ADAMW,
        )
        checkpoint = str(next((folder / engine).glob("contaccum*_2/checkpoint-1")))
        results[f"resumed by {engine}"] = train(
            Case("contaccum", 1, engine=engine), folder / engine, world, resume_from_checkpoint=checkpoint, **ADAMW
        )
    for engine in ("ddp", "fsdp"):
        case = Case("contaccum", engine=engine)
        results[f"evaluated by {engine}"] = train(case, folder / "evaluated", world, **EVALUATED)
        results[f"stopped by {engine}"] = train(case, folder / "stopped", world, **STOPPED)
    own = Case("contaccum", more=(("gather_across_devices", False),))
    results["own banks"] = train(own, folder, world, save_strategy="steps", save_steps=1)
    checkpoint = str(next(folder.glob(f"{own.name}_2/checkpoint-1")))
    results["own banks resumed"] = train(own, folder, world, resume_from_checkpoint=checkpoint)
    with pytest.raises(ConfigError, match="banks of 2 ranks"):
        train(Case("contaccum"), folder, world, resume_from_checkpoint=checkpoint)
    with pytest.raises(ConfigError, match="ddp_find_unused_parameters"):
        train(Case("contaccum", tied=False), folder, world, ddp_find_unused_parameters=True)
    torch.save(results, folder / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_config: Any, tiny_tokenizer: Any) -> Path:
    base = tmp_path_factory.mktemp("parallel")
    config = tiny_config.__class__.from_dict({**tiny_config.to_dict(), "hidden_dropout_prob": 0.0})
    config.attention_probs_dropout_prob = 0.0
    for tied in (True, False):
        torch.manual_seed(0)
        model = DualEncoder.from_backbone(config, tied=tied, pooling="mean", tokenizer=tiny_tokenizer)
        for place in (base / name for name in ("", "ddp", "fsdp", "evaluated", "stopped")):
            model.save_pretrained(str(place / f"tied_{tied}"))
    return base


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    with open(folder / "port", "w") as file:
        port = 20000 + (file.fileno() * 7919 + os.getpid()) % 20000
    mp.spawn(worker, args=(2, port, folder), nprocs=2)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.fixture
def probes_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contaccum.losses, "PAIRS_PER_PROBE", 20)


def furthest(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max((ours[name] - theirs[name]).abs().max().item() for name in ours)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_two_ranks_end_with_the_weights_of_one_process(
    case: Case, ranks: list[dict[str, Any]], folder: Path, probes_often: None
) -> None:
    alone = train(case, folder, 1)
    engines = {"ddp": "DistributedDataParallel", "fsdp": "FSDPDualEncoder"}
    for rank in ranks:
        ours = rank[case.name]
        assert ours["engine"] == engines[case.engine]
        assert furthest(ours["weights"], alone["weights"]) < 1e-10
        assert len(ours["log"]) == len(alone["log"]) == UPDATES
        for line, expected in zip(ours["log"], alone["log"], strict=True):
            for key, value in expected.items():
                if key not in ("seconds", "pairs_per_second", "peak_memory_mb"):
                    assert line[key] == pytest.approx(value, rel=1e-6, abs=1e-9), key


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case.engine == "ddp"], ids=lambda case: case.name)
def test_gradients_are_reduced_once_per_update(case: Case, ranks: list[dict[str, Any]]) -> None:
    assert [rank[case.name]["reductions"] for rank in ranks] == [UPDATES] * 2


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_a_checkpoint_of_two_ranks_is_resumed_on_two_and_on_one(
    engine: str, ranks: list[dict[str, Any]], folder: Path, probes_often: None
) -> None:
    whole = ranks[0][f"saved by {engine}"]["weights"]
    for rank in ranks:
        assert furthest(rank[f"resumed by {engine}"]["weights"], whole) < 1e-10
    checkpoint = next((folder / engine).glob("contaccum*_2/checkpoint-1"))
    assert load_file(checkpoint / BANK_FILE)["0.32.bank.passages"].shape == (40, 32)
    if engine == "ddp":  # FSDP's optimizer states are for FSDP
        alone = train(Case("contaccum", 1), folder / engine, 1, resume_from_checkpoint=str(checkpoint), **ADAMW)
        assert furthest(alone["weights"], whole) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_ranks_evaluate_together_train_on_as_before_and_stop_together(
    engine: str, ranks: list[dict[str, Any]], folder: Path, probes_often: None
) -> None:
    case = Case("contaccum", engine=engine)
    plain = train(case, folder, 1)
    train(case, folder / "evaluated", 1, **EVALUATED)
    figures = [
        [json.loads(line) for line in (folder / "evaluated" / f"{case.name}_{n}" / EVAL_LOG).read_text().splitlines()]
        for n in (1, 2)
    ]
    assert len(figures[0]) == len(figures[1]) == UPDATES
    for one, two in zip(*figures, strict=True):
        names = [key for key in one if "@" in key]
        assert len(names) == 7 and [one[key] for key in names] == pytest.approx([two[key] for key in names])
    for rank in ranks:
        assert furthest(rank[f"evaluated by {engine}"]["weights"], plain["weights"]) < 1e-10
        assert len(rank[f"stopped by {engine}"]["log"]) == 2  # patience of one, and nothing is better by ten
        assert furthest(rank[f"stopped by {engine}"]["weights"], plain["weights"]) > 1e-6
    kept = [path.name for path in (folder / "stopped" / f"{case.name}_2").glob("checkpoint-*")]
    assert "checkpoint-1" in kept


@pytest.mark.slow
def test_banks_of_their_own_are_all_in_the_checkpoint(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["own banks"]["log"][-1]["bank_fill"] < ranks[0]["contaccum-0-tied-ddp"]["log"][-1]["bank_fill"]
    for rank in ranks:
        assert furthest(rank["own banks resumed"]["weights"], rank["own banks"]["weights"]) < 1e-12


def test_parameters_that_no_embedding_depends_on_are_found(tiny_config: Any, tiny_tokenizer: Any) -> None:
    for tied in (True, False):
        model = DualEncoder.from_backbone(tiny_config, tied=tied, pooling="mean", tokenizer=tiny_tokenizer).train()
        frozen = freeze_unused(model)
        assert len(frozen) == (2 if tied else 4) and all("pooler" in name for name in frozen)
        assert model.training and [n for n, p in model.named_parameters() if not p.requires_grad] == frozen


@pytest.mark.parametrize(
    ("environment", "settings", "message"),
    [
        ({}, {"deepspeed": {"zero_optimization": {"stage": 2}}}, "deepspeed is not supported: .* set fsdp=true"),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, {}, "deepspeed is not supported"),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"}, {}, "FSDP version 1 is not supported"),
        ({}, {"method": "grad_accum", "shard_bank": True}, "method=grad_accum with shard_bank=True"),
        ({}, {"shard_bank": True, "gather_across_devices": False}, "shard_bank=True with gather_across_devices=False"),
    ],
)
def test_what_cannot_work_is_refused_before_a_model_is_loaded(
    environment: dict[str, str], settings: dict[str, Any], message: str, tmp_path: Path, monkeypatch: Any
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        ContAccumTrainingArguments(output_dir=str(tmp_path), **settings)
