"""``contaccum train``: arguments, data, model, trainer, and the trained folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from contaccum.files import require_writable


def run(argv: Sequence[str]) -> int:
    """Train as ``[CONFIG.yaml ...] [--key value ...]`` says and save the model into ``output_dir``."""
    from transformers import set_seed

    from contaccum.training import config
    from contaccum.training.log import RUN_RECORD
    from contaccum.training.trainer import ContAccumTrainer

    model_args, data_args, args = config.parse(argv)
    output_dir = str(args.output_dir)
    if args.process_index == 0:
        require_writable(Path(output_dir) / RUN_RECORD)
    with args.main_process_first(desc="reading the data"):  # on each host; the others find it in the cache
        data = config.load_data(data_args, args)
        mining_data = config.load_mining_data_of(data_args, args)
    evaluator = config.load_evaluator(data_args, args)
    if args.process_index == 0:
        print(data.summary())
    set_seed(args.seed)  # before the model: fresh weights are part of the run
    model = config.load_model(model_args, device=str(args.device))
    about: Any = {"data_record": data.record(), "mining_data": mining_data}
    about["guide"] = config.load_guide(model_args, device=str(args.device))
    trainer = ContAccumTrainer(model, args, data.dataset, evaluator=evaluator, **about)
    resume = str(args.resume_from_checkpoint or "")
    trainer.train(None if resume.lower() in ("", "false", "none") else resume)
    trainer.save_model(output_dir)
    if trainer.is_world_process_zero():
        if model_args.merge_adapter:
            config.merge_saved(output_dir, model_args)
        print(f"saved {output_dir}; score it with: contaccum evaluate {output_dir} --data DIR")
    return 0
