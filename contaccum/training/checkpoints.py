"""What a trainer's checkpoint holds, and how a run goes on from it.

Weights and the order of data are as transformers keeps them. In place of its pickles stand the states of optimizer,
scheduler, scaler and random number generators in safetensors and JSON; beside them the bank, the update under way, and
what the run was. Folders and checksums are ``checkpoint_folder``'s affair, what may change between runs ``resume``'s.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformerTrainer
from torch import Tensor, nn
from transformers import TrainerState, set_seed
from transformers.trainer_utils import rotate_checkpoints

from contaccum.distributed import world_size
from contaccum.errors import UserError
from contaccum.training.arguments import ContAccumTrainingArguments
from contaccum.training.callbacks import EVAL_LOG, TRAIN_LOG
from contaccum.training.checkpoint_folder import (
    CheckpointWriter,
    fault_of,
    find_checkpoints,
    force_to_disk,
    last_valid,
    one_line_when_full,
    write_json,
)
from contaccum.training.parallel import load_whole_optimizer, whole_optimizer_state
from contaccum.training.resume import FACTS_FILE, read_facts, refuse_or_list_changes, run_facts
from contaccum.training.safe_state import load_state, random_states, save_state, set_random_states
from contaccum.training.sizes import set_micro_batch

logger = logging.getLogger(__name__)

BANK_FILE = "contaccum_bank.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
SCHEDULER_FILE = "scheduler.json"
SCALER_FILE = "scaler.json"
WINDOW_FILE = "update_under_way.safetensors"
STATE_FILE = "trainer_state.json"


class CheckpointedTrainer(SentenceTransformerTrainer):
    """SentenceTransformerTrainer whose checkpoints are whole, checked and without pickles.

    Subclasses say what else belongs into one: :meth:`bank_state`, :meth:`window_state` and their loaders.
    """

    args: ContAccumTrainingArguments
    data_fingerprint: str | None = None
    config_beside: dict[str, Any] | None = None
    """Settings that are no training arguments (model, data), to be compared when a run is resumed."""
    quiet: bool = False
    _writing_into: str | None = None
    _random_states: dict[str, Any] | None = None
    _push_later = False

    def bank_losses(self) -> Iterator[nn.Module]:
        """Every loss with a bank that trains."""
        yield from ()

    def bank_state(self) -> dict[str, Tensor]:
        """Everything that this rank keeps beside model and optimizer."""
        return {}

    def load_bank_state(self, state: dict[str, Tensor], checkpoint: str) -> None:
        """Go on with what :meth:`bank_state` gave."""

    def window_state(self) -> dict[str, Any] | None:
        """The update under way, after some of its micro-steps; None between updates."""
        return None

    def load_window_state(self, state: dict[str, Any], checkpoint: str) -> None:
        """Go on in the middle of an update."""

    # Writing -------------------------------------------------------------------------------------------------------

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        run = self._get_output_dir(trial)
        writer = CheckpointWriter(run, f"checkpoint-{self.state.global_step}")
        kept = "The last good checkpoint is still there: make room, or lower save_total_limit, and resume from `last`"
        with one_line_when_full(writer.name, run, kept):
            if self.args.should_save:
                writer.begin()
            self.accelerator.wait_for_everyone()
            self._writing_into = str(writer.parent)
            # Model cards are drawn from the data; a run that saves must go on as one that does not.
            self._random_states = random_states()
            try:
                super()._save_checkpoint(model, trial)
                self._writing_into = None
                self._save_beside(writer.path)
                self.accelerator.wait_for_everyone()
                self._correct_best(run, writer)  # on every rank: each loads it in the end
                if self.args.should_save:
                    for log in (TRAIN_LOG, EVAL_LOG):
                        force_to_disk(os.path.join(run, log))
                    writer.commit()
            except BaseException:
                writer.discard()
                raise
            finally:
                self._writing_into = None
                set_random_states(self._random_states)
        self.accelerator.wait_for_everyone()
        if self._push_later:
            self._push_later = False
            self._push_from_checkpoint(str(writer.folder / writer.name))
        if self.args.should_save:
            best = self.state.best_model_checkpoint
            rotate_checkpoints(run, self.args.save_total_limit, best_model_checkpoint=best, use_mtime=True)

    def _save_beside(self, folder: Path) -> None:
        if not self.args.save_only_model:
            state = self.bank_state()
            if state and self.args.should_save:
                save_state(folder / BANK_FILE, state)
            window = self.window_state()
            if window is not None:
                save_state(folder / WINDOW_FILE, window)
        if self.args.should_save:
            write_json(folder / FACTS_FILE, run_facts(self))

    def _correct_best(self, run: str, writer: CheckpointWriter) -> None:
        """The best checkpoint by its name to be: transformers looked for it beside this one while it was written."""
        if self.state.best_global_step:
            best = Path(run) / f"checkpoint-{self.state.best_global_step}"
            if best.is_dir() or best.name == writer.name:
                self.state.best_model_checkpoint = str(best)
                if self.args.should_save:
                    self.state.save_to_json(str(writer.path / STATE_FILE))

    def _get_output_dir(self, trial: Any) -> str:
        return self._writing_into or super()._get_output_dir(trial)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self._writing_into is not None:
            self._push_later = True  # from where it will lie
        else:
            super()._push_from_checkpoint(checkpoint_folder)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        assert self.optimizer is not None and self.lr_scheduler is not None
        sharded = self.is_fsdp_enabled
        state = whole_optimizer_state(self.model, self.optimizer) if sharded else self.optimizer.state_dict()
        if self.args.should_save:
            save_state(os.path.join(output_dir, OPTIMIZER_FILE), state)
            save_state(os.path.join(output_dir, SCHEDULER_FILE), self.lr_scheduler.state_dict())

    def _save_scaler(self, output_dir: str) -> None:
        scaler = getattr(self.accelerator, "scaler", None)
        if scaler is not None and self.args.should_save:
            save_state(os.path.join(output_dir, SCALER_FILE), scaler.state_dict())

    def _save_rng_state(self, output_dir: str) -> None:
        os.makedirs(output_dir, exist_ok=True)  # a rank may come here before the one that writes the model
        save_state(_random_file(output_dir, self.args.process_index), self._random_states or random_states())

    # Resuming ------------------------------------------------------------------------------------------------------

    def train(
        self, resume_from_checkpoint: str | bool | None = None, trial: Any = None, ignore_keys_for_eval: Any = None
    ) -> Any:
        """As in transformers; ``True`` and ``"last"`` are the newest checkpoint that can be used.

        ``"auto"`` is that too, or a start where there is none yet: for jobs that are started again and again.

        Raises:
            UserError: for a checkpoint that is not whole or not this run's, or a disk that is full.
        """
        checkpoint = None
        if resume_from_checkpoint not in (None, False, ""):
            checkpoint = self._on_first_rank(lambda: self._choose_checkpoint(str(resume_from_checkpoint)))
            if checkpoint:
                self._take_sizes(read_facts(Path(checkpoint)))
        with one_line_when_full("the run's files", str(self.args.output_dir), "Make room, and resume from `last`"):
            return super().train(checkpoint or None, trial, ignore_keys_for_eval)

    def _take_sizes(self, facts: dict[str, Any]) -> None:
        """A micro-batch that was found is found once a run: what is trained depends on it."""
        if self.args.finds_micro_batch:
            self.take_micro_batch(int(facts["pairs per micro-batch"]))

    def take_micro_batch(self, n: int) -> None:
        """From now on micro-batches of ``n`` pairs, and as many of them as an update's pairs need."""
        set_micro_batch(self.args, n)

    def _choose_checkpoint(self, asked: str) -> str:
        if asked.lower() == "auto" and not any(find_checkpoints(str(self.args.output_dir))):
            return ""
        if asked.lower() in ("true", "last", "auto"):
            path, passed = last_valid(str(self.args.output_dir))
            for one in passed:
                logger.warning(f"passed over {one.path}: {one.fault}")
        else:
            path = Path(asked)
            fault = fault_of(path)
            if fault is not None:
                raise UserError(f"{path}: cannot be resumed from: {fault}")
        facts = read_facts(path)
        self._take_sizes(facts)
        for line in refuse_or_list_changes(self, path, facts):
            logger.warning(line)
        inside = f", and {facts['micro_steps']} micro-steps of the next" if facts["micro_steps"] else ""
        line = f"resuming from        {path} (after {facts['update']:,} updates{inside})"
        logger.info(line) if self.quiet else print(line, flush=True)
        return str(path)

    def _on_first_rank(self, choose: Callable[[], str]) -> str:
        """What the first rank chooses, for all: it alone reads whole checkpoints and renames folders."""
        if world_size() == 1:
            return choose()
        chosen: list[Any] = [None, None]
        if self.args.process_index == 0:
            try:
                chosen = [choose(), None]
            except UserError as error:
                chosen = [None, str(error)]
        torch.distributed.broadcast_object_list(chosen, src=0)
        if chosen[1] is not None:
            raise UserError(chosen[1])
        return chosen[0]

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        try:
            super()._load_from_checkpoint(resume_from_checkpoint)
        except RuntimeError as error:  # of load_state_dict: shapes or names
            first = " ".join(str(error).split())[:300]
            raise UserError(f"{resume_from_checkpoint}: its weights are of another model ({first})") from error

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        files = [os.path.join(checkpoint, name) for name in (OPTIMIZER_FILE, SCHEDULER_FILE)]
        if not all(map(os.path.isfile, files)):
            raise UserError(
                f"{checkpoint}: no {OPTIMIZER_FILE}, so that training cannot go on from it; it was written with "
                "save_only_model. Train from its weights instead, with --model"
            )
        assert self.optimizer is not None and self.lr_scheduler is not None
        # On the CPU: optimizers move what they load to their parameters.
        try:
            state = load_state(files[0])
            if self.is_fsdp_enabled:
                load_whole_optimizer(self.model, self.optimizer, state)
            else:
                self.optimizer.load_state_dict(state)
            self.lr_scheduler.load_state_dict(load_state(files[1]))
        except (ValueError, KeyError) as error:
            raise UserError(f"{checkpoint}: its optimizer is not this run's ({error})") from error
        path = os.path.join(checkpoint, BANK_FILE)
        # On the CPU: the bank goes to the embeddings with the first micro-step.
        self.load_bank_state(load_state(path) if os.path.isfile(path) else {}, checkpoint)
        window = os.path.join(checkpoint, WINDOW_FILE)
        if os.path.isfile(window):
            self.load_window_state(load_state(window, self.args.device), checkpoint)

    def _load_scaler(self, checkpoint: str | None) -> None:
        scaler = getattr(self.accelerator, "scaler", None)
        path = os.path.join(checkpoint or "", SCALER_FILE)
        if checkpoint is not None and scaler is not None and os.path.isfile(path):
            scaler.load_state_dict(load_state(path))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        path = _random_file(checkpoint, self.args.process_index)
        if os.path.isfile(path):
            set_random_states(load_state(path))
        else:  # more ranks than there were
            update = TrainerState.load_from_json(os.path.join(checkpoint, STATE_FILE)).global_step
            set_seed((self.args.seed * 1_000_003 + update) * 1_009 % 2**31 + self.args.process_index)


def _random_file(folder: str, rank: int) -> str:
    return os.path.join(folder, f"random_states_{rank}.safetensors")
