"""Trains a tiny model on two ranks under each engine that can run here, for test_engines.py. Prints JSON.

The ranks are forks of one process, as in forked_runs.py. accelerate shards on accelerators only; torch and DeepSpeed do
so on a CPU as well.
"""

import json
import math
import os
from contextlib import suppress
from typing import Any

import torch
from accelerate import PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, is_deepspeed_available
from forked_runs import ROOT, on_ranks
from tiny_models import tiny_encoder
from tiny_runs import SAVES, make_arguments, pairs

import contaccum.losses.contaccum
from contaccum import ContAccumTrainer

os.environ["DS_ACCELERATOR"] = "cpu"
with suppress(ImportError):
    import deepspeed  # before the forks, each of which would take seconds for it

    deepspeed.ops.__compatible_ops__.clear()  # private: else it compiles an all-reduce of its own, for a minute


def zero(stage: int) -> dict[str, Any]:
    """Tiny parameters are sharded as well."""
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    return {"deepspeed": {"zero_optimization": zero}}


ENGINES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp": {
        "fsdp": True,
        "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["BertLayer"]},
    },
    **({"zero2": zero(2), "zero3": zero(3)} if is_deepspeed_available() else {}),
}
CASES: dict[str, dict[str, Any]] = {
    "tied": {},
    "resumed": {"max_steps": 3},  # after the first update; the third is spoiled
    "untied": {"gradient_checkpointing": True, "save_steps": 2},
    "float64": {"save_steps": 2},  # which DeepSpeed has not
}
GIVEN = {
    "max_steps": 2,
    "gradient_accumulation_steps": 2,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.1,
}
GIVEN |= {"optim": "adamw_torch", "use_cpu": True, "ddp_backend": "gloo", **SAVES}


def spoil(trainer: ContAccumTrainer) -> None:
    """Of the second update from here, the second rank's embeddings of one micro-batch are no numbers."""
    calls = 0

    def forward(module: Any, given: Any, output: Any) -> Any:
        nonlocal calls
        calls += torch.is_grad_enabled() and given[0].get("task") == "query"
        if calls == 3 and trainer.args.process_index == 1:
            output["sentence_embedding"] = output["sentence_embedding"] * math.nan
        return output

    trainer.model.register_forward_hook(forward)


def train(engine: str, case: str, model: Any) -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    folder = ROOT / f"{engine}-{case}"
    args = make_arguments(folder, **{**GIVEN, **CASES[case], **ENGINES[engine]})
    if engine == "fsdp":
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    trainer = ContAccumTrainer(model, args, make_pairs(48, negatives=1))
    if case == "resumed":
        spoil(trainer)
    trainer.train(str(ROOT / f"{engine}-tied" / "checkpoint-1") if case == "resumed" else None)
    (loss,) = trainer.bank_losses()
    loss.info_nce.end_pending_update()
    about = {
        "wrapped": type(trainer.model_wrapped).__name__,
        "updates": loss.info_nce.clock.num_updates,
    }
    (folder / f"rank-{args.process_index}.json").write_text(json.dumps(about))
    if case == "tied":
        trainer._load_from_checkpoint(
            str(folder / "checkpoint-1")
        )  # as transformers does with the best
        trainer.save_model(str(folder / "first"))
    trainer.accelerator.wait_for_everyone()


def main() -> None:
    contaccum.losses.contaccum.PAIRS_PER_PROBE = 8
    models = {case: tiny_encoder(case != "untied", normalize=False) for case in CASES}
    models["float64"].double()
    for p in models["resumed"].parameters():
        p.data.zero_()  # its checkpoint has others

    def work(engine: str) -> None:
        left_out = {"ddp": "resumed", "fsdp": None}.get(engine, "float64")
        for case in CASES:
            if case != left_out:
                train(engine, case, models[case])

    codes = {engine: on_ranks(2, lambda _, engine=engine: work(engine)) for engine in ENGINES}  # type: ignore[misc]
    print(json.dumps(codes))


if __name__ == "__main__":
    main()
