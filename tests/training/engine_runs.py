"""Training of a tiny model on two ranks under each engine, for test_engines.py; prints JSON.

The ranks are forks of one process, as in forked_runs.py. accelerate shards models on accelerators
only, but torch and DeepSpeed can do so on a CPU as well.
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
from forked_runs import ROOT, run_on_ranks
from tiny_models import tiny_encoder
from tiny_runs import SAVE_EVERY_UPDATE, make_arguments, make_pairs

import contaccum.losses.probe
from contaccum import ContAccumTrainer

os.environ["DS_ACCELERATOR"] = "cpu"
with suppress(ImportError):
    # The import takes seconds, so it precedes the forks.
    import deepspeed

    # Private. Otherwise DeepSpeed compiles an all-reduce, which takes a minute.
    deepspeed.ops.__compatible_ops__.clear()


def make_zero_settings(stage: int) -> dict[str, Any]:
    """Return the arguments for a stage of ZeRO that shards even tiny parameters."""
    config = {"stage": stage, "stage3_param_persistence_threshold": 0}
    return {"deepspeed": {"zero_optimization": config}}


ENGINES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp": {
        "fsdp": True,
        "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["BertLayer"]},
    },
}
if is_deepspeed_available():
    ENGINES["zero2"] = make_zero_settings(2)
    ENGINES["zero3"] = make_zero_settings(3)

CASES: dict[str, dict[str, Any]] = {
    "tied": {},
    # Resumed after the first update of "tied"; the third update is not finite.
    "resumed": {"max_steps": 3},
    "untied": {"gradient_checkpointing": True, "save_steps": 2},
    "float64": {"save_steps": 2},
}
SKIPPED_CASES = {"ddp": ["resumed"], "fsdp": [], "zero2": ["float64"], "zero3": ["float64"]}
"""Cases that are not run: DeepSpeed has no float64."""

SETTINGS = {
    "max_steps": 2,
    "gradient_accumulation_steps": 2,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.1,
    "optim": "adamw_torch",
    "use_cpu": True,
    "ddp_backend": "gloo",
    **SAVE_EVERY_UPDATE,
}


def make_second_update_nonfinite(trainer: ContAccumTrainer) -> None:
    """Make the query embeddings of the third micro-batch NaN on the second rank."""
    num_calls = 0

    def forward(module: Any, arguments: Any, output: Any) -> Any:
        nonlocal num_calls
        if torch.is_grad_enabled() and arguments[0].get("task") == "query":
            num_calls += 1
        if num_calls == 3 and trainer.args.process_index == 1:
            output["sentence_embedding"] = output["sentence_embedding"] * math.nan
        return output

    trainer.model.register_forward_hook(forward)


def train(engine: str, case: str, model: Any) -> None:
    """Train one case under an engine, and write what the tests compare into its folder."""
    AcceleratorState._reset_state(reset_partial_state=True)
    folder = ROOT / f"{engine}-{case}"
    args = make_arguments(folder, **{**SETTINGS, **CASES[case], **ENGINES[engine]})
    if engine == "fsdp":
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    trainer = ContAccumTrainer(model, args, make_pairs(48, negatives=1))
    resume_from = None
    if case == "resumed":
        make_second_update_nonfinite(trainer)
        resume_from = str(ROOT / f"{engine}-tied" / "checkpoint-1")
    trainer.train(resume_from)
    (loss,) = trainer.bank_losses()
    record = {
        "wrapped": type(trainer.model_wrapped).__name__,
        "updates": loss.info_nce.clock.num_updates,
    }
    (folder / f"rank-{args.process_index}.json").write_text(json.dumps(record))
    if case == "tied":
        # transformers loads the best checkpoint in this way.
        trainer._load_from_checkpoint(str(folder / "checkpoint-1"))
        trainer.save_model(str(folder / "first"))
    trainer.accelerator.wait_for_everyone()


def main() -> None:
    """Train all cases under all engines; print the exit codes of the ranks."""
    contaccum.losses.probe.MIN_PAIRS_BETWEEN_PROBES = 8
    models = {case: tiny_encoder(case != "untied", normalize=False) for case in CASES}
    models["float64"].double()
    # Other weights than those of the checkpoint, which must replace them.
    for parameter in models["resumed"].parameters():
        parameter.data.zero_()
    exit_codes = {}
    for engine in ENGINES:

        def train_cases(rank: int, engine: str = engine) -> None:
            for case in CASES:
                if case not in SKIPPED_CASES[engine]:
                    train(engine, case, models[case])

        exit_codes[engine] = run_on_ranks(ROOT, 2, train_cases)
    print(json.dumps(exit_codes))


if __name__ == "__main__":
    main()
