"""``contaccum train``: arguments, data, model, trainer, and the trained folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from contaccum.errors import UserError
from contaccum.files import require_writable


def run(argv: Sequence[str]) -> int:
    """Train as ``[CONFIG.yaml ...] [--key value ...]`` says and save the model into ``output_dir``."""
    from transformers import set_seed

    from contaccum.training.config import (
        load_data,
        load_evaluator,
        load_mining_data_of,
        load_model,
        parse,
        take_prompts,
    )
    from contaccum.training.log import RUN_RECORD
    from contaccum.training.trainer import ContAccumTrainer

    model_args, data_args, args = parse(argv)
    output_dir = str(args.output_dir)
    resume = check_resume(args.resume_from_checkpoint, output_dir)
    if args.process_index == 0:
        require_writable(Path(output_dir) / RUN_RECORD)
    with args.main_process_first(desc="reading the data"):  # on each host; the others find it in the cache
        data = load_data(data_args, args)
        mining_data = load_mining_data_of(data_args, args)
    evaluator = load_evaluator(data_args, args)
    if args.process_index == 0:
        print(data.summary())
    set_seed(args.seed)  # before the model: fresh weights are part of the run
    model = load_model(model_args, device=str(args.device))
    take_prompts(args, data, model)
    trainer = ContAccumTrainer(
        model,
        args,
        data.dataset,
        data_fingerprint=data.fingerprint,
        mining_data=mining_data,
        data_sets=data.records(),
        evaluator=evaluator,
    )
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(output_dir)
    if trainer.is_world_process_zero():
        if data_args.streaming:
            print(data.summary())
        print(f"saved {output_dir}; score it with: contaccum evaluate {output_dir} --data DIR")
    return 0


def check_resume(value: str | bool | None, output_dir: str) -> str | None:
    """What to resume from, before any work: ``last``, ``auto`` or a folder, which the trainer will check; or None.

    Raises:
        UserError: when there is nothing of that name.
    """
    name = str(value or "").lower()
    if name in ("", "false", "none"):
        return None
    if name in ("true", "last") and not any(Path(output_dir).glob("checkpoint-*")):
        raise UserError(f"{output_dir}: no checkpoint to resume from; drop --resume_from_checkpoint to start anew")
    if name not in ("true", "last", "auto") and not (Path(str(value)) / "trainer_state.json").is_file():
        raise UserError(f"{value}: not a checkpoint (no trainer_state.json in it)")
    return str(value)
