"""ContAccumTrainer: SentenceTransformerTrainer with the method, the bank and its checkpoints.

The training loop, the optimizer, mixed precision and distribution are transformers'. What is added: the loss that
``args.method`` names, prompts and lengths by tower, gradient norms per tower, the bank in every checkpoint, an order
of data that resumes, and a log line per update.
"""

from __future__ import annotations

import copy
import json
import logging
import math
import os
import time
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn

from contaccum.data.draws import draws_of
from contaccum.data.stream_batches import StreamedSets
from contaccum.distributed import sum_over_ranks
from contaccum.errors import ConfigError, UserError
from contaccum.grad_norms import GradNormBalancer, TowerGradNorms
from contaccum.losses import ContAccumLoss
from contaccum.mining.pool import MiningData
from contaccum.redaction import redact_file, redact_record
from contaccum.training.arguments import ContAccumTrainingArguments
from contaccum.training.batches import (
    RowFacts,
    known_positives,
    make_batch_sampler,
    take_row_facts,
    warn_about_means,
    without_facts,
)
from contaccum.training.callbacks import EpochOrderCallback, TrainLogCallback
from contaccum.training.checkpoints import BANK_FILE
from contaccum.training.collapse import CollapseWatch
from contaccum.training.columns import check_columns, fill_roles
from contaccum.training.description import warn_about_batch_norm
from contaccum.training.in_training import EvaluatedTrainer, figures_to_track
from contaccum.training.loaders import SetLoadingTrainer
from contaccum.training.memory import peak_memory_mb
from contaccum.training.methods import make_loss
from contaccum.training.numerics import SkippedUpdates
from contaccum.training.parallel import (
    freeze_unused,
    load_whole,
    reads_embeddings,
    settle_unused_parameters,
    whole_parameters,
)
from contaccum.training.refresh import make_refresh, with_row_numbers
from contaccum.training.refusal import RefusesCode
from contaccum.training.resume import ARGUMENTS_FILE
from contaccum.training.sizes import keep_memory_limit
from contaccum.training.streaming import check_stream
from contaccum.training.window import WindowCallback, WindowedTrainer, finite_or_zero

logger = logging.getLogger(__name__)


class ContAccumTrainer(RefusesCode, EvaluatedTrainer, SetLoadingTrainer, WindowedTrainer):
    """Train a dense retriever by ``args.method``.

    Args:
        model: a SentenceTransformer, a :class:`DualEncoder` for instance.
        args: :class:`ContAccumTrainingArguments`.
        train_dataset: columns in order query, positive, then any number of negatives.
        loss: overrides what ``args.method`` would make; the bank of a ContAccumLoss in it is checkpointed all the same.
        data_fingerprint: written into ``run.json``; None: computed from the texts.
        mining_data: what ``args.refresh_negatives_every`` mines in; None: the queries and positives of the data set.
        data_sets: what to write there about each of several training sets, by name, beside rows and shares.
        quiet: do not print what the run will do.
        Others: as in SentenceTransformerTrainer; an ``evaluator`` may be a :class:`RetrievalEvaluator`.

    Prompts and routes: unless ``args.prompts`` or ``args.router_mapping`` say otherwise, the first column is encoded
    as a query and the others as documents, with the prompts and lengths that ``encode_query`` and
    ``encode_document`` would use.

    Writes into ``args.output_dir``: ``train_log.jsonl``, a line per update; ``run.json``, what the run was; and
    checkpoints, whose ``contaccum_bank.safetensors`` holds the bank.

    Raises:
        ConfigError: for a data set or model that cannot work with the arguments.

    Example::

        args = ContAccumTrainingArguments(
            output_dir="runs/example", per_device_train_batch_size=8, gradient_accumulation_steps=16, bank_size=512
        )
        trainer = ContAccumTrainer(model=model, args=args, train_dataset=train_dataset)
        trainer.train()
    """

    args: ContAccumTrainingArguments

    def __init__(
        self,
        model: SentenceTransformer | None = None,
        args: ContAccumTrainingArguments | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        loss: Any = None,
        *,
        data_fingerprint: str | None = None,
        mining_data: MiningData | None = None,
        data_sets: Mapping[str, Mapping[str, Any]] | None = None,
        quiet: bool = False,
        **kwargs: Any,
    ) -> None:
        if args is None:
            args = ContAccumTrainingArguments(output_dir="runs/contaccum")
        if not isinstance(args, ContAccumTrainingArguments):
            raise ConfigError(f"args must be ContAccumTrainingArguments, got {type(args).__name__}")
        keep_memory_limit(args)
        args = copy.copy(args)  # routes and prompts below belong to this model and data set
        if args.refresh_negatives_every is not None:
            train_dataset = with_row_numbers(train_dataset)
        check_stream(args, train_dataset)
        self._draws = draws_of(train_dataset)
        self._known_positives = known_positives(args, self._draws + draws_of(eval_dataset))
        train_dataset, self._row_facts = take_row_facts(args, train_dataset)
        eval_dataset = without_facts(args, eval_dataset)
        if model is not None:
            texts = train_dataset if train_dataset is not None else eval_dataset
            fill_roles(args, model, texts, eval_dataset)
            if loss is None:
                loss = make_loss(model, args)
            check_columns(args, loss, texts)
            warn_about_batch_norm(model)
            warn_about_means(args, loss)
            settle_unused_parameters(args, model, loss)
        elif loss is None:
            loss = lambda built: make_loss(built, args)  # noqa: E731  # with model_init the model comes later
        self.refresh = make_refresh(args, train_dataset, mining_data)
        self.data_fingerprint, self.data_sets = data_fingerprint, data_sets or {}
        self.quiet = quiet
        self.tower_grad_norms: TowerGradNorms | None = None
        self.balancer = None if args.balance_grad_norms == "none" else GradNormBalancer()
        self._batch_samplers: weakref.WeakSet[Any] = weakref.WeakSet()  # a sampler lives as long as its loader
        self.update: dict[str, Any] = {}
        self.mined: dict[str, float] = {}
        self._update_started = 0.0
        self._collapse = CollapseWatch()
        self.skips = SkippedUpdates(args.max_skipped_updates)
        super().__init__(
            model=model, args=args, train_dataset=train_dataset, eval_dataset=eval_dataset, loss=loss, **kwargs
        )
        if args.fsdp and not self.is_fsdp_enabled:
            logger.warning("fsdp on a CPU: accelerate shards on accelerators only, and runs DDP instead")
        self.add_callback(EpochOrderCallback(self._batch_samplers, self._draws, self._order_seed(args.seed)))
        self.add_callback(TrainLogCallback(self))
        self.add_callback(WindowCallback(self))  # after the log: an update that is saved has its line

    # The bank ------------------------------------------------------------------------------------------------------

    def bank_losses(self) -> Iterator[ContAccumLoss]:
        """Every ContAccumLoss that trains, wrapped ones (MatryoshkaLoss) and one per data set included."""
        losses = self.loss.values() if isinstance(self.loss, dict) else [self.loss]
        for loss in losses:
            yield from _bank_losses(loss)

    def prepare_loss(self, loss: Any, model: Any) -> nn.Module:
        loss = super().prepare_loss(loss, model)
        if self._known_positives is not None:
            for bank_loss in _bank_losses(loss):
                bank_loss.know_positives(*self._known_positives)
        return loss

    def bank_state(self) -> dict[str, Tensor]:
        keep = self.args.should_save
        state = {
            f"{index}.{key}": value
            for index, loss in enumerate(self.bank_losses())
            for key, value in loss.bank_state_dict(keep=keep).items()  # all ranks take part
        }
        if self.balancer is not None and keep:
            state |= {f"balancer.{key}": value for key, value in self.balancer.state_dict().items()}
        return state

    def _save_beside(self, folder: Path) -> None:
        super()._save_beside(folder)
        if self.args.should_save:
            for part in (self.refresh, self.train_dataset if isinstance(self.train_dataset, StreamedSets) else None):
                if part is not None:
                    part.save(folder)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and self.refresh is not None:
            self.refresh.load(checkpoint)

    def load_bank_state(self, state: dict[str, Tensor], checkpoint: str) -> None:
        losses = list(self.bank_losses())
        if losses and not state:
            raise UserError(
                f"{checkpoint}: no {BANK_FILE}, so the bank cannot be resumed. Was it written by another method? Start "
                "from its weights instead, without --resume_from_checkpoint"
            )
        for index, loss in enumerate(losses):
            prefix = f"{index}."
            loss.load_bank_state_dict({k[len(prefix) :]: v for k, v in state.items() if k.startswith(prefix)})
        if self.balancer is not None:
            balance = {k.removeprefix("balancer."): v.cpu() for k, v in state.items() if k.startswith("balancer.")}
            if not balance:
                raise UserError(f"{checkpoint}: written without balance_grad_norms; resume it without, or start anew")
            self.balancer.load_state_dict(balance)

    # The loop ------------------------------------------------------------------------------------------------------

    def get_batch_sampler(
        self,
        dataset: Any,
        batch_size: int,
        drop_last: bool,
        valid_label_columns: list[str] | None = None,
        generator: torch.Generator | None = None,
        seed: int = 0,
    ) -> Any:
        seed = self._order_seed(seed)
        parts = self.train_dataset if isinstance(self.train_dataset, dict) else {None: self.train_dataset}
        facts = next((self._row_facts.get(name, RowFacts()) for name, part in parts.items() if part is dataset), None)
        given = (batch_size, drop_last, valid_label_columns, generator, seed)
        sampler = make_batch_sampler(self.args, dataset, facts, *given)
        return self._tell_epochs(super().get_batch_sampler(dataset, *given) if sampler is None else sampler)

    def get_multi_dataset_batch_sampler(
        self, dataset: Any, batch_samplers: list[Any], generator: Any = None, seed: int | None = 0
    ) -> Any:
        given = (dataset, batch_samplers, generator, self._order_seed(seed or 0))
        if not self.trains_on(dataset):
            return super().get_multi_dataset_batch_sampler(*given)
        sampler, self.set_shares = self.sample_sets(*given)
        return self._tell_epochs(sampler)

    def _order_seed(self, seed: int) -> int:
        return seed if self.args.data_seed is None else self.args.data_seed

    def _tell_epochs(self, sampler: Any) -> Any:
        if hasattr(sampler, "set_epoch"):
            self._batch_samplers.add(sampler)
        return sampler

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        if self.is_fsdp_enabled and reads_embeddings(self.loss):  # torch loads no optimizer that misses a state
            freeze_unused(self.model)
        given = self.args.learning_rate
        self.args.learning_rate = self.args.scaled_learning_rate
        try:
            optimizer = super().create_optimizer(*args, **kwargs)
        finally:
            self.args.learning_rate = given
        # DDP's after it: the optimizer's groups are then the same on any number of ranks.
        if self.args.world_size > 1 and self.args.ddp_find_unused_parameters is False and not self.is_fsdp_enabled:
            freeze_unused(self.model)
        return optimizer

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list[Any], Any]:
        batches, items = super().get_batch_samples(*args, **kwargs)
        if self.refresh is not None and batches:
            if self.refresh.due(self.state.global_step):
                model = self.accelerator.unwrap_model(self.model_wrapped)
                self.mined = self.refresh.mine(model, self.state.global_step, self.is_world_process_zero())
            batches = [self.refresh.renew(batch, self.data_collator) for batch in batches]
        return batches, items

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        if self.tower_grad_norms is None:
            self.tower_grad_norms = TowerGradNorms(self.accelerator.unwrap_model(model), self.balancer)
        if not self.update:
            self.update = {"loss": torch.zeros((), device=self.args.device), "pairs": 0}
            self._update_started = self._update_started or time.perf_counter()
        self.update["pairs"] += _batch_size(inputs)
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.update["loss"] += loss
        return finite_or_zero(loss)

    def micro_step(self, model: nn.Module, inputs: dict[str, Any], share: float) -> Tensor:
        loss = super().micro_step(model, inputs, share)
        if isinstance(self.loss, ContAccumLoss) and self.loss.last:
            # Log the loss of the local rows: that of stale rows says nothing about the encoder of today.
            local = self.loss.last["local_loss"].to(loss) * share / self.current_gradient_accumulation_steps
            loss = torch.where(torch.isfinite(loss), local, loss)
        return loss

    def losses_replaced(self, losses: list[Tensor]) -> None:
        self.update["loss"].zero_()
        for loss in losses:
            self.update["loss"] += loss

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        self._read_tower_grad_norms()
        return super()._clip_grad_norm(model)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        self._read_tower_grad_norms()
        return super()._get_grad_norm(model, grad_norm=grad_norm)

    def _read_tower_grad_norms(self) -> None:
        """Once per update, before clipping and before a gradient scaler takes its scale out."""
        if self.tower_grad_norms is None or "grad_norms" in self.update:
            return
        scaler = getattr(self.accelerator, "scaler", None)
        self.update["grad_norms"] = self.tower_grad_norms.read(1.0 if scaler is None else scaler.get_scale())
        self.update["learning_rate"] = self._get_learning_rate()

    def take_update_record(self) -> dict[str, Any]:
        """What the update that just ended did, for the log; then starts the next."""
        now = time.perf_counter()
        seconds = now - self._update_started
        loss = sum_over_ranks(self.update["loss"]) / self.args.world_size
        record = {
            "update": self.state.global_step,
            "epoch": round(float(self.state.epoch or 0), 6),
            "loss": float(loss),
            "learning_rate": self.update.get("learning_rate"),
            **self.update.get("grad_norms", {}),
            "bank_fill": sum(loss.last.get("bank_fill", 0) for loss in self.bank_losses()),
            "pairs": self.update["pairs"] * self.args.world_size,
            "seconds": seconds,
            "pairs_per_second": self.update["pairs"] * self.args.world_size / seconds,
            "peak_memory_mb": peak_memory_mb(self.args.device),
        }
        for loss_fn in [x.info_nce for x in self.bank_losses() if x.info_nce is not None and x.last][:1]:
            record |= {"columns": loss_fn.last["columns"], "embedding_spread": float(loss_fn.last["embedding_spread"])}
            record |= loss_fn.drift_record()
            for warning in self._collapse.observe(record):
                logger.warning(warning)
        self.skips.observe(record["loss"])
        record |= self.skips.present | self.mined
        record = {key: None if isinstance(x, float) and not math.isfinite(x) else x for key, x in record.items()}
        self.update, self.mined, self._update_started = {}, {}, now
        self._last_record = record
        return record

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        logs = self.skips.correct(logs)
        record = getattr(self, "_last_record", None)
        if "loss" in logs and record is not None:
            logs = {**logs, **figures_to_track(record, all_of_them=bool(self.args.report_to))}
        super().log(logs, start_time)

    def _load_from_checkpoint(self, checkpoint_path: str, model: nn.Module | None = None) -> None:
        if not self.is_fsdp_enabled:
            return super()._load_from_checkpoint(checkpoint_path)
        # As in the base class, which knows no shards.
        trusted = self.model.trust_remote_code
        whole = SentenceTransformer(checkpoint_path, device="cpu", trust_remote_code=trusted)
        load_whole(self.model, dict(whole.state_dict()))

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        # As in the base class, but the arguments go into JSON: the base class pickles them.
        folder = str(output_dir if output_dir is not None else self.args.output_dir)
        os.makedirs(folder, exist_ok=True)
        with whole_parameters(self.model, state_dict):
            self.model.save_pretrained(folder)
        redact_file(os.path.join(folder, "README.md"))  # the model card lists the arguments
        if self.processing_class is not None:
            self.processing_class.save_pretrained(folder)
        with open(os.path.join(folder, ARGUMENTS_FILE), "w", encoding="utf-8") as file:
            json.dump(redact_record(self.args.to_dict()), file, indent=2, default=str)


def _bank_losses(loss: Any) -> Iterator[ContAccumLoss]:
    if isinstance(loss, nn.Module):
        yield from (module for module in loss.modules() if isinstance(module, ContAccumLoss))


def _batch_size(inputs: dict[str, Any]) -> int:
    return next((len(value) for value in inputs.values() if isinstance(value, Tensor) and value.ndim), 0)
