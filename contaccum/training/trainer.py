"""ContAccumTrainer: SentenceTransformerTrainer for ContAccum and the methods it is compared with.

`train_and_save`, at the end, is a whole training by settings.

An update is one optimizer step, on ``gradient_accumulation_steps`` micro-batches. A micro-step is
one forward and backward pass. The bank is a ring buffer in the loss: detached embeddings of past
micro-batches, which serve as further negatives and queries.

transformers owns the training loop, the optimizer, mixed precision, distribution and checkpoints.
This class adds the loss of ``args.method``, prompts and gradient norms for each tower (query and
passage encoder), the bank in every checkpoint, and an order of the data in which a resumed run goes
on where it stopped. It skips updates whose loss or gradient is infinite or NaN. If memory runs out,
it repeats the update in smaller micro-steps. A comment "Private:" says why a private method of
transformers is overridden.
"""

from __future__ import annotations

import copy
import logging
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import torch
from datasets import IterableDataset
from safetensors.torch import save_file
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
from sentence_transformers.base.sampler import BatchSamplers
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tqdm.contrib.logging import logging_redirect_tqdm
from transformers import PrinterCallback, ProgressCallback, TrainerCallback
from transformers.integrations.deepspeed import deepspeed_load_checkpoint, unset_hf_deepspeed_config
from transformers.trainer_utils import HubStrategy, TrainOutput

from contaccum import progress, work
from contaccum.data import TrainingSets
from contaccum.data.samplers import RESUMABLE_SAMPLERS, get_batch_sampler
from contaccum.data.sampling import first_texts, get_samplings
from contaccum.distributed import broadcast
from contaccum.encoders.adapters import describe_adapters, has_adapter
from contaccum.encoders.dual_encoder import DualEncoder
from contaccum.encoders.loading import copy_module_code, loading, require_model
from contaccum.encoders.settings import is_tied
from contaccum.errors import ConfigError, DataError, UserError, is_out_of_memory
from contaccum.evaluation.evaluator import RetrievalEvaluator
from contaccum.files import Fingerprint, provenance, require_writable, write_text
from contaccum.losses.contaccum import ContAccumLoss
from contaccum.losses.query_side import QuerySideLoss
from contaccum.merging import merge_models
from contaccum.redaction import redact
from contaccum.retrieval.encode import hash_tensors, tokenisation_fingerprint
from contaccum.settings import Settings, find, replace
from contaccum.training import checkpoint, engines, log, losses, micro_batch, passage_store
from contaccum.training.arguments import ContAccumTrainingArguments, get_name
from contaccum.training.checkpoint import TRAINING
from contaccum.training.columns import check_columns, get_text_columns, set_column_roles
from contaccum.training.losses import Batch
from contaccum.training.micro_batch import MEMORY_REMEDIES
from contaccum.training.rates import ListedRates, RatesByClock
from contaccum.training.setup import load_encoder, load_model, load_run_data, make_second_stage
from contaccum.training.unused_parameters import (
    disable_unused_parameter_search,
    freeze_unused_parameters,
    reads_only_embeddings,
)
from contaccum.training.update import NO_BATCH, Update, Updates

logger = logging.getLogger(__name__)

FIRST_STAGE = "first_stage"
"""Folder in ``output_dir`` of the training before a second stage."""


class ContAccumTrainer(SentenceTransformerTrainer):
    """Train a dense retriever by ``args.method``.

    Args:
        model: the encoder to train, a SentenceTransformer such as a `DualEncoder`.
        args: `ContAccumTrainingArguments`.
        train_dataset: columns in order: query, positive, then any number of hard negatives.
        eval_dataset: pairs whose loss is computed during training, with the same columns.
        loss: replaces the loss of ``args.method``; a bank in it is saved in checkpoints too.
        data_record: properties of the data for ``identity.json``; a missing ``fingerprint`` is
            computed.
        **kwargs: further arguments of SentenceTransformerTrainer. ``evaluator`` may be a
            `RetrievalEvaluator`.

    The first column is encoded as queries and the others as documents, with the model's prompts and
    maximum lengths, unless ``args.prompts`` or ``args.router_mapping`` are set. ``args.output_dir``
    gets a line per update (``train_log.jsonl``), the description of the run (``identity.json``),
    and checkpoints with the bank.

    Raises:
        ConfigError: for a data set or a model that cannot be used with these arguments.

    Example:
        ```python
        args = ContAccumTrainingArguments(
            "runs/example", per_device_train_batch_size=8, gradient_accumulation_steps=16
        )
        ContAccumTrainer(model=model, args=args, train_dataset=train_dataset).train()
        ```
    """

    training_args_class = ContAccumTrainingArguments
    args: ContAccumTrainingArguments
    loss: Any  # a module; `__init__` refuses a dictionary of losses

    def __init__(
        self,
        model: SentenceTransformer,
        args: ContAccumTrainingArguments | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        loss: Any = None,
        *,
        data_record: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        args = args or ContAccumTrainingArguments(output_dir="runs/contaccum")
        self._user_arguments = args.to_dict()
        self._data_record = data_record or {}
        args = copy.copy(args)  # some settings are changed below, and the caller's must not change
        if isinstance(loss, dict):
            raise ConfigError(
                "a dictionary of losses, one for each data set: give one loss for all, or use "
                "SentenceTransformerTrainer with contaccum's losses"
            )
        self.samplings = get_samplings(train_dataset)  # a sampling draws new texts in each epoch
        for part in [*losses.list_parts(train_dataset), *losses.list_parts(eval_dataset)]:
            if isinstance(part, IterableDataset):
                raise ConfigError(
                    "a streamed data set (IterableDataset) cannot be trained on, because a resumed "
                    "run could not find its place in it: give a Dataset, such as "
                    "Dataset.from_generator makes"
                )
        dataset = eval_dataset if train_dataset is None else train_dataset
        columns = get_text_columns(dataset)
        set_column_roles(args, model, columns)
        model.model_card_data.ir_model = True  # it shows how to encode queries and documents
        if loss is None and args.method == "query_side":
            loss, collator = passage_store.set_up_query_side(
                args, model, train_dataset, eval_dataset
            )
            kwargs.setdefault("data_collator", collator)
        if loss is None:
            loss = losses.make_loss(model, args)
        disable_unused_parameter_search(args, model, loss)
        args.hub_strategy = HubStrategy.END  # checkpoints contain local paths
        self.batch_sampler: Any = None  # the sampler of the data loader
        self.run_id: str | None = None  # set by train(); a resumed run keeps its id
        self._identity: dict[str, Any] = {}  # set by train()
        self._resumed: tuple[Path, checkpoint.Saved] | None = None  # a checkpoint and its result
        super().__init__(model, args, train_dataset, eval_dataset, loss, **kwargs)
        smallest_micro_batch = check_columns(self.args, self.loss, columns)
        if not args.card_examples:
            card = model.model_card_data
            card.widget, card.usage_examples = [], None
            for described_set in [*card.train_datasets, *card.eval_datasets]:
                for key in ("examples", "examples_table"):
                    described_set.pop(key, None)
        if reads_only_embeddings(loss):
            features: list[Batch] = []  # of each column in the first row of each data set
            for part in losses.list_parts(self.train_dataset):
                for row in islice(part or (), 1):
                    column_features, _ = self.collect_features(self.data_collator([row]))
                    features += column_features
            freeze_unused_parameters(self.args, self.model, features)
        if self.is_fsdp_enabled and has_adapter(model) and not is_tied(model):
            raise ConfigError(
                "fsdp with adapters of two towers: FSDP cannot shard the base model that both "
                "towers share. Train without fsdp (DDP)"
            )
        # super().__init__ has set this global config again; see engines.configure_deepspeed.
        unset_hf_deepspeed_config()
        losses.pass_known_positives(self.loss, [train_dataset, eval_dataset])
        self._documents = self.loss.documents if isinstance(self.loss, QuerySideLoss) else None
        if self._documents is not None and isinstance(self.evaluator, RetrievalEvaluator):
            # The document tower is frozen, so its embeddings are read from the store.
            self.evaluator.documents = self._documents
        self.updates = Updates(self, self.args, self.loss, smallest_micro_batch)
        # At the front of the list: UpdateLogCallback must add the measurements of an update before
        # the callbacks of transformers print them and send them to trackers.
        update_log = log.UpdateLogCallback(
            self.updates, self.loss, self._start_run, self._set_epoch
        )
        self.callback_handler.callbacks.insert(0, update_log)
        if self.args.eval_strategy != "no":
            log.choose_metric(self.args, self.evaluator, self.eval_dataset is not None)
            self.add_callback(log.EvaluationCallback(self.args.early_stopping_patience))
        if self.args.learning_rates is not None:
            self.add_callback(ListedRates(self.args.learning_rates))
        self.signals = log.SignalCallback()
        self.add_callback(self.signals)  # the last one: a signal also cancels an evaluation

    def bank_losses(self) -> list[ContAccumLoss]:
        """Return every ContAccumLoss in the training loss; see `losses.list_bank_losses`."""
        return losses.list_bank_losses(self.loss)

    @property
    def engine(self) -> str | None:
        """The engine that shards weights or gradients over ranks, for records; None without one."""
        if self.is_fsdp_enabled:
            return "FSDP"
        if self.is_deepspeed_enabled:
            stage = self.accelerator.state.deepspeed_plugin.zero_stage
            return f"ZeRO-{stage} on {self.accelerator.num_processes} ranks"
        return None

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train as in transformers.

        ``resume_from_checkpoint`` is the folder of a checkpoint, ``"last"`` (or ``True``) for the
        newest complete checkpoint in ``output_dir``, or ``"auto"``, which is ``"last"`` if there is
        a checkpoint and a new run otherwise.

        Raises:
            SystemExit: after SIGTERM (code 143) or SIGINT (code 130), once a checkpoint is saved.
            UserError: for a checkpoint that is incomplete or belongs to other settings, a full
                disk, or too little memory.
        """
        args = self.args
        work.require_own_folder(Path(str(args.output_dir)), TRAINING, allows_files=True)
        self._resumed = checkpoint.choose_checkpoint(resume_from_checkpoint, args)
        if not self._identity:  # in an earlier call, an engine may have sharded the parameters
            self._identity = self._describe_run()
        folder = None
        if self._resumed is None:
            # Not from the generators of training, whose seed may be the same in many runs.
            self.run_id = broadcast(uuid4().hex[:16])
        else:
            path, saved = self._resumed
            folder = str(path)
            self.run_id = saved["run_id"]
            self.updates.num_trained = saved["trained_updates"]
            if args.has_auto_micro_batch:
                # The result depends on the micro-batch size, so a run searches for it only once.
                self.updates.set_micro_batch_size(saved["micro_batch"])
            work.require_same_work(
                path,
                self._list_resume_settings(),
                "a run cannot resume from it, because its bank, optimizer or position in the data "
                f"would not be valid; set it back, or start a new run with --model {path}",
            )
            if self.is_deepspeed_enabled:
                engines.refuse_unsafe_files(path)
        self._save_total_limit = args.save_total_limit
        args.save_total_limit = None  # transformers removes nothing; see checkpoint.remove_oldest
        is_first = args.process_index == 0
        lock = work.lock(Path(str(args.output_dir)), "training") if is_first else nullcontext()
        try:
            with lock, self.signals:
                output = super().train(folder, trial, ignore_keys_for_eval)
        except Exception as error:
            if is_out_of_memory(error):
                raise UserError(
                    f"out of memory outside of a micro-step: {MEMORY_REMEDIES}"
                ) from error
            raise
        finally:
            args.save_total_limit = self._save_total_limit
        self.updates.require_trained(self.state.global_step)
        return output

    def get_train_dataloader(self) -> DataLoader:
        """Return a loader whose order depends only on seed and epoch, so that runs resume."""
        if self.args.has_auto_micro_batch:
            # Only now: gradient checkpointing is on, and transformers has not read the batch size.
            with keep_random_states():
                num_pairs = micro_batch.find_micro_batch(self, self.updates.smallest)
            self.updates.set_micro_batch_size(num_pairs)
            logger.info(f"micro-batches of {num_pairs} pairs, the most that memory allows")
        # transformers reads both settings when it makes the loader, so they are replaced meanwhile.
        # A sampler without a resumable version stays.
        args = self.args
        batch_sampler = args.batch_sampler
        seed = args.seed
        args.batch_sampler = RESUMABLE_SAMPLERS.get(get_name(batch_sampler), batch_sampler)
        args.seed = args.order_seed  # data_seed, if it is set
        try:
            loader = super().get_train_dataloader()
        finally:
            args.batch_sampler = batch_sampler
            args.seed = seed
        if len(loader) == 0:
            raise DataError(NO_BATCH)
        self.batch_sampler = get_batch_sampler(loader)
        return loader

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        # Private: the only place where a resumed run gets its epoch and the micro-batches to skip
        # in it.
        position = super()._init_training_state(*args, **kwargs)
        # The checkpoint's save_steps, eval_steps and logging_steps are loaded; those of args apply.
        state = self.state
        state.compute_steps(self.args, state.max_steps)
        patience = self.args.early_stopping_patience or sys.maxsize
        has_lost_patience = log.count_evaluations_without_gain(state) >= patience
        has_ended = state.global_step >= state.max_steps or has_lost_patience
        if self._resumed is not None and has_ended:
            logger.warning(
                f"nothing is left to train after update {state.global_step}: the run has ended. "
                "Raise max_steps, num_train_epochs or early_stopping_patience to train on"
            )
            return sys.maxsize, 0  # no epoch is left; transformers would train another update
        return position

    def _start_run(self) -> None:
        """Load the bank of a checkpoint, write the identity, remove checkpoints to be replaced."""
        args = self.args
        if self._resumed is not None:
            path, saved = self._resumed
            self.updates.set_max_rows(saved["rows_fit"])
            checkpoint.load_banks(path, self.bank_losses())
        if args.should_save:  # on the first rank, or with save_on_each_node one rank per host
            sizes = {"updates": self.state.max_steps, "micro_batch": args.pairs_per_micro_batch}
            identity = {"work": TRAINING, "run_id": self.run_id, **sizes, **self._identity}
            # The identity is written first. If the process is killed before checkpoints are
            # removed, their ids show that they belong to another run.
            work.write_identity(Path(str(args.output_dir)), identity)
            checkpoint.remove_replaced(args, self.run_id, self.state.global_step)
        self.updates.current = Update(self.state.global_step + 1, time.perf_counter())

    def _set_epoch(self, epoch: int) -> None:
        # transformers calls set_epoch too, but it removes only one wrapper of the batch sampler,
        # and when a run resumes, accelerate wraps the sampler twice.
        if hasattr(self.batch_sampler, "set_epoch"):
            self.batch_sampler.set_epoch(epoch)
        for sampling in self.samplings:
            sampling.set_epoch(epoch, self.args.order_seed)

    # An update -----------------------------------------------------------------------------------
    #
    # transformers calls, in this order:
    #   get_batch_samples  fetch all micro-batches of the update;
    #   training_step      for each micro-batch: forward and backward by `micro_step`, in smaller
    #                      micro-steps once memory has run out;
    #   _get_grad_norm     after the last micro-batch: drop gradients that are not finite;
    #   optimizer.step, then the callbacks, which write the log.

    def get_batch_samples(
        self, epoch_iterator: Any, num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """Fetch all micro-batches of an update, as in transformers."""
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        self.updates.set_micro_batches(batches)
        return batches, num_items

    def training_step(
        self, model: nn.Module, inputs: Batch, num_items_in_batch: Any = None
    ) -> Tensor:
        """Run forward and backward for a micro-batch; return its loss for the log."""
        return self.updates.run_micro_batch(model, self.micro_step)

    def micro_step(
        self, model: nn.Module, inputs: Batch, weight: float, is_last_part: bool
    ) -> Tensor:
        """Run forward and backward for a micro-batch or a part of it; return its weighted loss.

        Args:
            inputs: the collated micro-batch, or a part of its rows.
            weight: the fraction of the update's pairs that ``inputs`` holds.
            is_last_part: True for the last part of the newest micro-batch. Ranks reduce their
                gradients in no other part, and in this one if it ends the update.
        """
        num_steps = self.current_gradient_accumulation_steps
        # transformers divides the loss by this number, so this multiplies the loss by ``weight``.
        self.current_gradient_accumulation_steps = 1 / weight  # type: ignore[assignment]  # int
        synchronisation = nullcontext() if is_last_part else self.accelerator.no_sync(model)
        try:
            with synchronisation:
                loss = super().training_step(model, dict(inputs))
        finally:
            self.current_gradient_accumulation_steps = num_steps
        bank_loss = losses.unwrap_matryoshka(self.loss)
        info_nce = bank_loss.info_nce if isinstance(bank_loss, ContAccumLoss) else None
        if info_nce is not None and info_nce.diagnostics is not None:
            # The log gets the loss of the micro-batch's own queries, without banked queries and
            # without other terms. A loss that is not finite must stay visible.
            local_loss = info_nce.diagnostics.local_loss.to(loss) * weight
            loss = torch.where(torch.isfinite(loss), local_loss, loss)
        return loss

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        # Private: the only place where the norm over all ranks is known before the optimizer steps.
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        if norm is not None:
            self.updates.skip_if_nonfinite(float(norm), model)
        return norm

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Evaluate as in transformers; the training stays the same with and without it."""
        with keep_random_states():
            metrics = super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        # Of several data sets, transformers evaluates each with a prefix of its own.
        if self.is_in_train and metric_key_prefix == "eval":
            if self.is_world_process_zero():
                record: dict[str, Any] = {"update": self.state.global_step, **metrics}
                for speed in ("eval_samples_per_second", "eval_steps_per_second"):
                    record.pop(speed, None)
                log.append_line(Path(str(self.args.output_dir)) / log.EVAL_LOG, record)
            # The next update starts now.
            self.updates.current.started = time.perf_counter()
            micro_batch.reset_peak_memory(self.args.device)
        return metrics

    # The identity of a run -----------------------------------------------------------------------

    def _describe_run(self) -> dict[str, Any]:
        """Return what decides the result of the run; "resume" is the identity of a checkpoint."""
        model = self.model
        parameters = dict(model.named_parameters())
        num_trained = sum(each.numel() for each in parameters.values() if each.requires_grad)
        documents = self._documents
        data = {"rows": losses.count_rows(self.train_dataset), **self._data_record}
        if "fingerprint" not in data:
            texts = Fingerprint()
            for part in losses.list_parts(self.train_dataset):
                for batch in first_texts(part):
                    for row in zip(*batch.values(), strict=True):
                        texts.add(*row)
            data["fingerprint"] = texts.hex()
        frozen = {name: each for name, each in parameters.items() if not each.requires_grad}
        base_of_adapters = {name: each for name, each in frozen.items() if "lora_" not in name}
        # With another value of one of these, the saved states of bank and optimizer, or the saved
        # position in the data, would not be valid. Files are compared by their content, and the
        # pairs per update by their number, which also depends on the number of ranks.
        names = find("on_change", "restart").keys() - find("is_path").keys()
        names = names & self._user_arguments.keys() - {"total_train_batch_size"}
        resume = {
            **{name: self._user_arguments[name] for name in sorted(names)},
            # Messages show the names, so those that are not arguments are in plain words.
            "pairs per update": self.args.total_train_batch_size,
            "rows": data["rows"],
            "data fingerprint": data["fingerprint"],
            "batch_sampler": get_name(self.args.batch_sampler),
            "trained parameters": num_trained,
            "engine": self.engine,
            "adapters": describe_adapters(model),
            # A checkpoint does not hold the base of an adapter, whose files may have changed. The
            # settings of the tokenizer are read from the model's folder, too.
            "base of the adapters": hash_tensors(base_of_adapters if has_adapter(model) else {}),
            "tokenizer, prompts, lengths or pooling": tokenisation_fingerprint(model),
            "documents of the store": documents and documents.fingerprint,
        }
        evaluator: Any = self.evaluator
        return {
            "data": data,
            "model": {
                "base": getattr(model.model_card_data, "base_model", None),
                "parameters": sum(each.numel() for each in parameters.values()),
            },
            "documents": documents and documents.describe(),
            "evaluation": evaluator.describe() if hasattr(evaluator, "describe") else None,
            "resume": resume,
            "arguments": self._user_arguments,
            **provenance(),
        }

    def _list_resume_settings(self) -> dict[str, Any]:
        """Return the identity of a checkpoint: all that a resumed run must share with it."""
        settings = self._identity["resume"]
        # With another sampler than the default, or several data sets, the order of the rows also
        # depends on the batch size, which "auto" may have to find first.
        is_default_sampler = settings["batch_sampler"] == BatchSamplers.BATCH_SAMPLER.value
        if not is_default_sampler or isinstance(self.train_dataset, dict):
            settings["pairs per batch of the sampler"] = self.args.train_batch_size
        return settings

    # Checkpoints ---------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model as transformers does, without its pickled arguments and credentials."""
        folder = Path(str(output_dir or self.args.output_dir))
        if self.engine is not None:
            weights = None
            # Until DeepSpeed's engine exists, the model itself has the full weights.
            if self.is_fsdp_enabled or self.deepspeed is not None:
                weights = self.accelerator.get_state_dict(self.model_wrapped)
            engines.save_full_model(self.model, weights, folder, self.args.should_save)
            if self.args.push_to_hub and not _internal_call:
                self.push_to_hub("Model save")
        elif self.args.should_save:  # sentence-transformers would write on every rank
            with keep_random_states():  # a model card shows random rows of the data
                super().save_model(str(folder), _internal_call)  # also uploads
        if self.args.should_save:
            # Pickled arguments could run code when they are loaded. Credentials and local paths
            # would be published with the model.
            (folder / "training_args.bin").unlink(missing_ok=True)
            card = folder / "README.md"
            if card.is_file():
                write_text(card, redact(card.read_text(encoding="utf-8")))
            copy_module_code(self.model, folder)  # also that of a plain SentenceTransformer
            is_output = folder == Path(str(self.args.output_dir)) and not self.is_in_train
            if is_output and self.run_id is not None:  # it was trained
                work.finish(folder, {"updates": self.state.global_step})

    def push_to_hub(self, commit_message: str | None = "End of training", **kwargs: Any) -> Any:  # type: ignore[override]  # all but the message by keyword
        """Upload the model and its card, but no other file, because those contain local paths.

        ``token``, ``revision`` and ``private`` replace the values of the arguments. The result is
        the URL of the commit; None on other ranks than the first.
        """
        args = self.args
        name = args.hub_model_id or Path(str(args.output_dir)).resolve().name
        self.model.model_card_data.set_model_id(name)
        with tempfile.TemporaryDirectory() as folder:
            self.save_model(folder, _internal_call=True)
            if not self.is_world_process_zero():
                return None
            return self.model.push_to_hub(
                name,
                exist_ok=True,
                commit_message=commit_message,
                local_model_path=folder,
                token=kwargs.get("token", args.hub_token),
                revision=kwargs.get("revision", args.hub_revision),
                private=kwargs.get("private", args.hub_private_repo),
            )

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        # Private: transformers' method neither saves the bank nor finishes the checkpoint.
        args = self.args
        num_updates = self.state.global_step
        folder = Path(self._get_output_dir(trial)) / f"checkpoint-{num_updates}"
        if args.should_save:
            # An earlier start of the run may have been killed while it wrote the folder.
            shutil.rmtree(folder, ignore_errors=True)
        try:
            self.accelerator.wait_for_everyone()
            super()._save_checkpoint(model, trial)
            bank_losses = [] if args.save_only_model else self.bank_losses()
            banks = checkpoint.collect_banks(bank_losses, keep=args.should_save)
            self.accelerator.wait_for_everyone()
            if args.should_save:
                save_file(banks, folder / checkpoint.BANK_FILE)
                saved = {
                    "run_id": self.run_id,
                    "update": num_updates,
                    "trained_updates": self.updates.num_trained,
                    "resumable": not args.save_only_model,
                    "micro_batch": args.pairs_per_micro_batch,
                    "rows_fit": self.updates.max_rows,
                }
                work.write_identity(folder, self._list_resume_settings())
                work.finish(folder, saved, has_sizes=True)
                # The checkpoint is complete. Only now may older ones be removed.
                checkpoint.remove_oldest(
                    self._get_output_dir(trial),
                    self.run_id,
                    self._save_total_limit,
                    self.state.best_model_checkpoint,
                )
        except BaseException:
            if args.should_save:
                shutil.rmtree(folder, ignore_errors=True)
            raise
        self.accelerator.wait_for_everyone()

    def _load_from_checkpoint(self, checkpoint_path: str, model: nn.Module | None = None) -> None:
        # Private: sentence-transformers' method can load neither shards nor adapters.
        if self.deepspeed is not None:  # DeepSpeed's engine holds its own copy of the weights
            deepspeed_load_checkpoint(self.deepspeed, checkpoint_path)
            return
        trusted = bool(getattr(self.model, "trust_remote_code", False))
        with loading(checkpoint_path, trusted):
            if not (self.is_fsdp_enabled or has_adapter(self.model)):
                super()._load_from_checkpoint(checkpoint_path)
                return
            saved = DualEncoder(checkpoint_path, device="cpu", trust_remote_code=trusted)
            weights = dict(saved.state_dict())
        engines.load_full_weights(self.model, weights, is_sharded=self.is_fsdp_enabled)


@contextmanager
def keep_random_states() -> Iterator[None]:
    """Restore the states of all random number generators after the block.

    Evaluation, model cards and the search for a micro-batch size also use random numbers. The
    training stays the same with and without them.
    """
    python = random.getstate()
    numpy = np.random.get_state()
    with torch.random.fork_rng(range(torch.cuda.device_count())):  # also the CPU
        yield
    random.setstate(python)
    np.random.set_state(numpy)


# A training by settings --------------------------------------------------------------------------


def make_trainer(
    encoder: DualEncoder,
    args: ContAccumTrainingArguments,
    data: TrainingSets,
    **trainer_options: Any,
) -> ContAccumTrainer:
    """Return the trainer of a run; ``trainer_options`` are further arguments of the trainer.

    Raises:
        UserError: for a model that cannot be trained on the data or with the arguments.
    """
    if args.method != "query_side" and not has_adapter(encoder):
        # A SentenceTransformer is loaded in the dtype in which it was saved. In bfloat16 or float16
        # most of an update would be lost to rounding.
        encoder = encoder.float()
    try:
        return ContAccumTrainer(
            encoder, args, data.dataset, data_record=data.record(), **trainer_options
        )
    except UserError:
        raise
    except (ValueError, ImportError) as error:  # refusals of transformers, sentence-transformers
        raise ConfigError(str(error)) from error


def train_and_save(
    settings: Settings,
    seconds: float | None = None,
    print_line: Callable[[str], None] = print,
    callbacks: Sequence[TrainerCallback] = (),
) -> ContAccumTrainingArguments:
    """Train a model and save it into ``output_dir``: the work of `contaccum train`.

    Args:
        seconds: the time for loading model and data and for the updates; see `RatesByClock`.
        print_line: prints a line about the data.

    Returns:
        The arguments of the training, of its second stage if it has one.

    Raises:
        UserError: for an ``output_dir`` with another run, or settings, data or a model that cannot
            be used.
    """
    callbacks = [*callbacks, *([] if seconds is None else [RatesByClock(seconds)])]
    args = ContAccumTrainingArguments.from_settings(settings)
    output_dir = Path(str(args.output_dir))
    if settings.second_stage is not None:
        first_folder = output_dir / FIRST_STAGE
        if settings.resume_from_checkpoint is not None and work.read_result(first_folder):
            logger.info(f"{first_folder}: the first stage is finished; its model is used as it is")
        else:
            first_stage = replace(settings, second_stage=None, output_dir=str(first_folder))
            train_and_save(first_stage, print_line=print_line)
        settings = make_second_stage(settings, str(first_folder))
        args = ContAccumTrainingArguments.from_settings(settings)
    # These checks are quick, and come before the data and the model are loaded.
    checkpoint.require_free_folder(args)
    if settings.overwrite_output_dir:
        checkpoints = {path.resolve() for path in checkpoint.find_checkpoints(output_dir)}
        path = Path(settings.model).resolve()
        if not checkpoints.isdisjoint((path, *path.parents)):
            raise ConfigError(
                f"overwrite_output_dir=true with model={path}: the run would remove that "
                "checkpoint. Copy it to another folder, or set another output_dir"
            )
    require_model(settings.model)
    if args.process_index == 0:
        require_writable(output_dir / work.IDENTITY_FILE)
    data, evaluator = load_run_data(settings, args)
    if args.process_index == 0:
        print_line(data.summary())
    encoder = load_encoder(settings, args)
    trainer = make_trainer(encoder, args, data, evaluator=evaluator, callbacks=callbacks)
    if not progress.verbose:
        trainer.remove_callback(PrinterCallback)
        if not args.disable_tqdm:
            trainer.remove_callback(ProgressCallback)
            trainer.add_callback(log.ProgressLine())
    # With the redirection, log lines do not break the progress bar. The logger of transformers has
    # a handler of its own, so redirecting the root logger is not enough.
    with logging_redirect_tqdm([logging.getLogger(), logging.getLogger("transformers")]):
        trainer.train(args.resume_from_checkpoint)
    if settings.blend < 1:
        before_training = load_model(settings, str(args.device))
        trainer.model = merge_models(before_training, encoder, settings.blend)
    trainer.save_model(str(output_dir))
    return args
