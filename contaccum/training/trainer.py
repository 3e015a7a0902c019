"""ContAccumTrainer: SentenceTransformerTrainer with the method, the bank and its checkpoints.

The training loop, the optimizer, mixed precision, distribution, early stopping and checkpoints are transformers'. What
is added: the loss that ``args.method`` names, prompts by tower, gradient norms per tower, the bank beside every
checkpoint, an order of data that resumes, updates that are skipped whole or split when memory runs out.
"""

from __future__ import annotations

import copy
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate.data_loader import prepare_data_loader
from datasets import IterableDataset
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
from sentence_transformers.base.training_args import MultiDatasetBatchSamplers
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader
from transformers.trainer_utils import TrainOutput, rotate_checkpoints

from contaccum.data.samplers import make_batch_sampler, make_set_sampler, set_shares
from contaccum.data.sampling import first_texts, samplings_of
from contaccum.distributed import world_size
from contaccum.encoders import loading
from contaccum.errors import ConfigError, NotFiniteError, UserError
from contaccum.files import Fingerprint, redact, write_text
from contaccum.grad_norms import GradNormBalancer
from contaccum.losses import ContAccumLoss
from contaccum.training.arguments import ContAccumTrainingArguments
from contaccum.training.callbacks import EvaluationCallback, SignalCallback, UpdateCallback
from contaccum.training.checkpoint import (
    BANK_FILE,
    BY_FLAG,
    NEVER,
    choose_checkpoint,
    ended_with,
    facts_of,
    is_no_room,
    seal,
    state_of,
)
from contaccum.training.log import rows_of
from contaccum.training.memory import (
    WHAT_ELSE,
    is_out_of_memory,
    kept_random_states,
)
from contaccum.training.methods import (
    check_columns,
    columns_by_set,
    load_whole,
    make_loss,
    settle_parameters,
    take_roles,
    whole_parameters,
)
from contaccum.training.refresh import with_refresh
from contaccum.training.rules import name_of
from contaccum.training.updates import Update, Updates

if TYPE_CHECKING:
    from contaccum.mining import MiningData


class ContAccumTrainer(SentenceTransformerTrainer):
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

    Writes into ``args.output_dir``: ``train_log.jsonl``, a line per update; ``run.json``, what the run is; and
    checkpoints, with the bank in ``contaccum_bank.safetensors``.

    Raises:
        ConfigError: for a data set or model that cannot work with the arguments.

    Example::

        args = ContAccumTrainingArguments(
            output_dir="runs/example", per_device_train_batch_size=8, gradient_accumulation_steps=16, bank_size=512
        )
        trainer = ContAccumTrainer(model=model, args=args, train_dataset=train_dataset)
        trainer.train()
    """

    training_args_class: Any = ContAccumTrainingArguments
    args: ContAccumTrainingArguments

    def __init__(
        self,
        model: SentenceTransformer,
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
        args = ContAccumTrainingArguments(output_dir="runs/contaccum") if args is None else args
        if not isinstance(args, ContAccumTrainingArguments):
            raise ConfigError(f"args must be ContAccumTrainingArguments, got {type(args).__name__}")
        self.given_arguments = args.to_dict()
        args = copy.copy(args)  # what follows belongs to this model and data set
        args.learning_rate, args.learning_rate_scaling = args.scaled_learning_rate, "none"
        if args.set_sampler in ("temperature", "weights"):  # for data to evaluate on, which has neither
            args.multi_dataset_batch_sampler = MultiDatasetBatchSamplers.PROPORTIONAL
        if args.memory_limit_gb is not None:
            total = torch.cuda.get_device_properties(args.device).total_memory
            torch.cuda.set_per_process_memory_fraction(args.memory_limit_gb * 2**30 / total, args.device)
        train_dataset, self.refresh = with_refresh(args, train_dataset, mining_data)
        self.samplings = samplings_of(train_dataset)
        texts = train_dataset if train_dataset is not None else eval_dataset
        take_roles(args, model, texts, eval_dataset)
        loss = make_loss(model, args) if loss is None else loss
        check_columns(args, loss, texts)
        settle_parameters(args, model, loss)
        self.hard_negatives = max((len(columns) - 2 for columns in columns_by_set(texts).values()), default=0)
        self.data_fingerprint, self.data_sets, self.quiet = data_fingerprint, data_sets or {}, quiet
        self.balancer = None if args.balance_grad_norms == "none" else GradNormBalancer()
        self.batch_sampler: Any = None
        self.set_shares: dict[str, dict[str, Any]] = {}
        self._checkpoint: str | None = None
        super().__init__(
            model=model, args=args, train_dataset=train_dataset, eval_dataset=eval_dataset, loss=loss, **kwargs
        )
        known = [x.known_positives for x in (*self.samplings, *samplings_of(eval_dataset))]
        pairs = [x for x in known if x is not None]
        for bank_loss in self.bank_losses():
            if pairs:
                bank_loss.know_positives(*torch.from_numpy(np.concatenate(pairs)).T.contiguous())
        self.updates = Updates(self)
        # Before the others, so that those who log get what it adds.
        self.callback_handler.callbacks.insert(0, UpdateCallback(self))
        if args.eval_strategy != "no":
            self.add_callback(EvaluationCallback(self, self._settle_metric()))
        self.signals = SignalCallback()
        self.add_callback(self.signals)

    def bank_losses(self) -> Iterator[ContAccumLoss]:
        """Every ContAccumLoss that trains, wrapped ones (MatryoshkaLoss) and one per data set included."""
        for loss in self.loss.values() if isinstance(self.loss, dict) else [self.loss]:
            yield from (module for module in loss.modules() if isinstance(module, ContAccumLoss))

    def fingerprint(self) -> str | None:
        """Of the training data: as given, or else computed once from its texts; None for a stream."""
        if self.data_fingerprint is None and rows_of(self.train_dataset) is not None:
            parts = self.train_dataset.values() if isinstance(self.train_dataset, dict) else [self.train_dataset]
            found = Fingerprint()
            for batch in (batch for part in parts for batch in first_texts(part)):
                found.add(*(text for row in zip(*batch.values(), strict=True) for text in row))
            self.data_fingerprint = found.hex()
        return self.data_fingerprint

    def _settle_metric(self) -> str:
        """What is best is measured by the evaluator, where there is one; returns what figures must have in common."""
        args = self.args
        evaluator: Any = self.evaluator
        names = getattr(evaluator, "metrics", ())
        metric = str(args.metric_for_best_model).removeprefix("eval_")
        if args.keeps_best and names:
            if metric == "None" or (metric == "loss" and self.eval_dataset is None):
                metric = str(evaluator.primary_metric)
                args.metric_for_best_model, args.greater_is_better = f"eval_{metric}", True
            elif "@" in metric and metric not in names:
                raise ConfigError(
                    f"metric_for_best_model={metric}: the evaluator measures {', '.join(names)}. Use one of them, or "
                    "give it among the evaluator's metrics"
                )
        data = getattr(getattr(evaluator, "dataset", None), "fingerprint", type(evaluator).__name__)
        return f"{metric} on {data}"

    # The loop --------------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: Any = None, trial: Any = None, ignore_keys_for_eval: Any = None) -> Any:
        """As in transformers; ``True`` and ``"last"`` are the newest checkpoint that is whole.

        ``"auto"`` is that too, or a start where there is none yet: for jobs that are started again and again.

        Raises:
            SystemExit: with code 143 after SIGTERM, 130 after SIGINT, when a checkpoint is saved.
            UserError: for a checkpoint that is not whole or not this run's, a disk that is full, too little memory.
        """
        self._checkpoint = None
        if resume_from_checkpoint not in (None, False, ""):
            self._checkpoint = self._choose_checkpoint(str(resume_from_checkpoint))
        ended = None if self._checkpoint is None else ended_with(self._checkpoint, self.args)
        if ended is not None:
            self.state = state_of(str(self._checkpoint))
            self._load_from_checkpoint(ended)
            return TrainOutput(self.state.global_step, 0.0, {})
        output_dir = str(self.args.output_dir)
        try:
            with self.signals:
                return super().train(self._checkpoint, trial, ignore_keys_for_eval)
        except Exception as error:
            if isinstance(error, UserError):
                raise
            if is_no_room(error):
                free = shutil.disk_usage(output_dir).free / 2**20 if os.path.isdir(output_dir) else 0
                raise UserError(
                    f"{output_dir}: no room on the disk ({free:,.0f} MB free). The last good checkpoint is still "
                    "there: make room, or lower save_total_limit, and resume from `last`"
                ) from error
            if is_out_of_memory(error):
                raise UserError(
                    f"out of memory outside of a micro-step: {WHAT_ELSE}; and resume from `last`"
                ) from error
            raise

    def get_train_dataloader(self) -> DataLoader:
        """Batches in an order that depends on seed and epoch alone, so that a resumed run goes on with it."""
        if self.args.finds_micro_batch:  # gradient checkpointing is on by now, and nobody has asked for sizes yet
            self.updates.find_micro_batch()
        args, data, collate = self.args, self.train_dataset, self.data_collator
        if data is None:
            return super().get_train_dataloader()
        names = ("num_workers", "pin_memory", "persistent_workers", "prefetch_factor")
        common: dict[str, Any] = {name: getattr(args, f"dataloader_{name}") for name in names}
        if isinstance(data, IterableDataset):
            done = state_of(self._checkpoint).global_step * args.gradient_accumulation_steps if self._checkpoint else 0
            loader = DataLoader(data, args.train_batch_size, collate_fn=_AfterSkipped(collate, done), **common)
            # Each rank reads all rows and takes its own; accelerate would have one rank tokenize for all.
            ranks: Any = {"num_processes": args.world_size, "process_index": args.process_index}
            ranks |= {"dispatch_batches": False, "put_on_device": True}
            self._train_dataloader = prepare_data_loader(loader, args.device, **ranks)
            return self._train_dataloader
        parts: dict[Any, Any] = dict(data) if isinstance(data, dict) else {None: data}
        given: Any = {"batch_size": args.train_batch_size, "drop_last": args.dataloader_drop_last}
        given |= {"valid_label_columns": collate.valid_label_columns, "seed": args.order_seed}
        given["generator"] = torch.Generator().manual_seed(args.order_seed)
        samplers: list[Any] = [
            make_batch_sampler(args, part, **given) or self.get_batch_sampler(part, **given) for part in parts.values()
        ]
        self.batch_sampler, rows = samplers[0], data
        if isinstance(data, dict):
            rows = ConcatDataset(list(parts.values()))
            own = make_set_sampler(args, parts, samplers, args.order_seed)
            self.batch_sampler = own or self.get_multi_dataset_batch_sampler(rows, samplers, seed=args.order_seed)
            self.set_shares = set_shares(args, parts, samplers, self.batch_sampler)
        self.accelerator.even_batches = False  # the last batch must not be padded with rows of others
        loader = DataLoader(rows, batch_sampler=self.batch_sampler, collate_fn=collate, **common)
        self._train_dataloader = self.accelerator.prepare(loader)
        return self._train_dataloader

    def begin(self) -> None:
        """What transformers does not load of a checkpoint; called when everything else is ready."""
        self.updates.begin()
        if self._checkpoint is None:
            return
        path = Path(self._checkpoint) / BANK_FILE
        state = load_file(path) if path.is_file() else {}
        self.updates.rows_fit = facts_of(self._checkpoint)["rows_fit"]
        for index, loss in enumerate(self.bank_losses()):
            loss.load_bank_state_dict(_part(state, f"{index}."))
        for name, one in (("balancer", self.balancer), ("refresh", self.refresh)):
            if one is not None:
                one.load_state_dict(_part(state, f"{name}."))

    @property
    def update(self) -> Update:
        """The update under way."""
        return self.updates.present

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Forward and backward of a micro-batch."""
        if self.refresh is not None:
            inputs = self.refresh.renew(inputs, self.data_collator)
        return self.updates.step(model, inputs)

    def micro_step(self, model: nn.Module, inputs: dict[str, Any], share: float, last: bool) -> Tensor:
        """Forward and backward of a share of a micro-batch. Returns the loss to log."""
        steps = self.current_gradient_accumulation_steps
        self.current_gradient_accumulation_steps = steps / share  # type: ignore[assignment]  # the loss is divided by it
        try:
            with nullcontext() if last else self.accelerator.no_sync(model):
                loss = super().training_step(model, inputs)
        except NotFiniteError:  # a loss of its own accord; the gradient must be as bad on every rank
            loss = torch.full((), math.nan, device=self.args.device)
            self.accelerator.backward(sum(p.sum() for p in model.parameters() if p.requires_grad) * loss)
        finally:
            self.current_gradient_accumulation_steps = steps
        if isinstance(self.loss, ContAccumLoss) and self.loss.last:
            # That of the local rows: the loss of stale rows says nothing about the encoder of today.
            local = self.loss.last["local_loss"].to(loss) * share / steps
            loss = torch.where(torch.isfinite(loss), local, loss)
        return loss

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        # Private: nothing public knows the norm over all ranks before the optimizer steps.
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        self.updates.judge(model, norm)
        return norm

    # Checkpoints -----------------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As in transformers, without credentials in the model card and without a pickle of the arguments."""
        folder = Path(str(output_dir or self.args.output_dir))
        with kept_random_states():  # model cards are drawn from the data; a run that saves goes on as one that does not
            if self.is_fsdp_enabled:
                with whole_parameters(self.model, self.accelerator.get_state_dict(self.model)):
                    if self.args.should_save:  # a model card would need a forward pass, and so all ranks
                        self.model.save_pretrained(str(folder), create_model_card=False)
            else:
                super().save_model(str(folder), _internal_call)
        if self.args.should_save:
            (folder / "training_args.bin").unlink(missing_ok=True)
            card = folder / "README.md"
            if card.is_file():
                write_text(card, redact(card.read_text(encoding="utf-8")))

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        # Private: the only place between writing a checkpoint and throwing older ones away.
        args, run = self.args, self._get_output_dir(trial)
        folder = Path(run) / f"checkpoint-{self.state.global_step}"
        limit, model_only = args.save_total_limit, args.save_only_model
        args.save_total_limit = None
        args.save_only_model = model_only and not self.signals.received
        try:
            if args.should_save:
                shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed while it wrote
            self.accelerator.wait_for_everyone()
            super()._save_checkpoint(model, trial)
            if not args.save_only_model:
                state = self._bank_state()
                if state and args.should_save:
                    save_file(state, folder / BANK_FILE)
            self.accelerator.wait_for_everyone()
            if args.should_save:
                facts: dict[str, Any] = {"update": self.state.global_step, "resumable": not args.save_only_model}
                facts |= {"micro_batch": args.pairs_per_micro_batch, "rows_fit": self.updates.rows_fit}
                seal(folder, facts | {"settings": self.settings()})
                rotate_checkpoints(run, limit, best_model_checkpoint=self.state.best_model_checkpoint, use_mtime=True)
        except BaseException:
            if args.should_save:
                shutil.rmtree(folder, ignore_errors=True)
            raise
        finally:
            args.save_total_limit, args.save_only_model = limit, model_only
        self.accelerator.wait_for_everyone()

    def _bank_state(self) -> dict[str, Tensor]:
        """What this run keeps beside model and optimizer; every rank takes part, and the first gets it."""
        keep = self.args.should_save
        state: dict[str, Tensor] = {}
        for index, loss in enumerate(self.bank_losses()):
            state |= {f"{index}.{key}": value for key, value in loss.bank_state_dict(keep=keep).items()}
        for name, one in (("balancer", self.balancer), ("refresh", self.refresh)):
            if one is not None:
                state |= {f"{name}.{key}": value for key, value in one.state_dict().items()}
        return {key: value.detach().cpu().clone().contiguous() for key, value in state.items()} if keep else {}

    def settings(self) -> dict[str, Any]:
        """What a run that goes on from a checkpoint must have in common with it."""
        args = self.args
        counts = {
            "pairs per update": args.total_train_batch_size,
            "data fingerprint": self.fingerprint(),
            "rows": rows_of(self.train_dataset),
            "trained parameters": sum(p.numel() for p in self.model.parameters() if p.requires_grad),
        }
        if args.avoids_duplicates or args.own_batch_sampler or isinstance(self.train_dataset, dict):
            counts["batch_sampler"] = f"{name_of(args.batch_sampler)} of {args.train_batch_size}"
        names = [name for name in (*NEVER, *BY_FLAG) if name != "gather_across_devices"]  # ranks may be other ones
        return {name: self.given_arguments.get(name) for name in names} | counts

    def _choose_checkpoint(self, asked: str) -> str | None:
        """The first rank's choice on all of them: it alone reads whole checkpoints."""
        chosen: list[Any] = [None, None]
        args = self.args
        if args.process_index == 0:
            try:
                chosen[0] = choose_checkpoint(asked, args, self.settings(), self.quiet)
            except UserError as error:
                chosen[1] = str(error)
        if world_size() > 1:
            dist.broadcast_object_list(chosen, src=0)
        if chosen[1] is not None:
            raise UserError(chosen[1])
        if chosen[0] is not None and args.finds_micro_batch:  # once a run: what is trained depends on it
            self.updates.take_micro_batch(facts_of(chosen[0])["micro_batch"])
        return chosen[0]

    def _load_from_checkpoint(self, checkpoint_path: str, model: nn.Module | None = None) -> None:
        # Private: that of sentence-transformers knows no shards, nor the model that FSDP's caller passes.
        trusted = bool(getattr(self.model, "trust_remote_code", False))
        with loading(checkpoint_path, trusted):
            try:
                if not self.is_fsdp_enabled:
                    return super()._load_from_checkpoint(checkpoint_path)
                whole = SentenceTransformer(checkpoint_path, device="cpu", trust_remote_code=trusted).state_dict()
            except RuntimeError as error:  # of load_state_dict: shapes or names
                raise UserError(f"{checkpoint_path}: its weights are of another model ({str(error)[:200]})") from error
        load_whole(self.model, dict(whole))


class _AfterSkipped:
    """A collator that leaves batches empty which a resumed run skips: they need not be tokenized."""

    def __init__(self, collate: Callable[[list[Any]], dict[str, Any]], skipped: int) -> None:
        self.collate, self.left = collate, skipped

    def __call__(self, rows: list[Any]) -> dict[str, Any]:
        self.left -= 1
        return self.collate(rows) if self.left < 0 else {}


def _part(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
