"""ContAccumTrainer: SentenceTransformerTrainer with the method, the bank and its checkpoints.

transformers owns the training loop, the optimizer, mixed precision, distribution and checkpoints.
This class adds the loss of ``args.method``, prompts and gradient norms by tower, the bank in every
checkpoint, an order of data that resumes, and updates that are skipped whole or split.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import IterableDataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers.integrations.deepspeed import deepspeed_load_checkpoint, unset_hf_deepspeed_config
from transformers.trainer_utils import HubStrategy, TrainOutput

from contaccum.data.sampling import get_samplings
from contaccum.distributed import world_size
from contaccum.encoders.adapters import has_adapter
from contaccum.encoders.loading import loading
from contaccum.evaluation.evaluator import RetrievalEvaluator
from contaccum.files import write_json
from contaccum.losses.contaccum import ContAccumLoss
from contaccum.losses.text_ids import count_texts
from contaccum.mining import MiningData
from contaccum.training import (
    callbacks,
    checkpoint,
    engines,
    log,
    loss_factory,
    nonfinite,
    out_of_memory,
    resources,
    saving,
    train_data,
)
from contaccum.training.arguments import ContAccumTrainingArguments
from contaccum.training.query_side import QuerySide, warn_of_useless_documents
from contaccum.training.random_states import RandomStates
from contaccum.training.refresh import NegativeRefresh
from contaccum.training.run_facts import RunFacts
from contaccum.training.updates import Updates


class ContAccumTrainer(SentenceTransformerTrainer):
    """Train a dense retriever by ``args.method``.

    Args:
        model: a SentenceTransformer, a `DualEncoder` for instance.
        args: `ContAccumTrainingArguments`.
        train_dataset: columns in order query, positive, then any number of negatives.
        loss: overrides the loss of ``args.method``; banks in it are checkpointed all the same.
        data_record: facts about the data for ``run.json``, such as ``TrainingData.record()``; its
            ``fingerprint`` identifies the texts (None: computed).
        mining_data: for ``args.refresh_negatives_every``; None: the data set's own texts.
        guide: decides which texts are no negatives; see `ContAccumLoss`.
        Others: as in SentenceTransformerTrainer; an ``evaluator`` may be a `RetrievalEvaluator`.

    Unless ``args.prompts`` or ``args.router_mapping`` say otherwise, the first column is encoded as
    a query and the others as documents, with the model's prompts and lengths. Writes a line per
    update (``train_log.jsonl``), a record of the run (``run.json``) and checkpoints with the bank
    into ``args.output_dir``.

    Raises:
        ConfigError: for a data set or model that cannot work with the arguments.

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

    def __init__(
        self,
        model: SentenceTransformer,
        args: ContAccumTrainingArguments | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        loss: Any = None,
        *,
        data_record: Mapping[str, Any] | None = None,
        mining_data: MiningData | None = None,
        guide: SentenceTransformer | None = None,
        **kwargs: Any,
    ) -> None:
        args = args or ContAccumTrainingArguments(output_dir="runs/contaccum")
        user_arguments = args.to_dict()
        args = copy.copy(args)  # the changes below belong to this model and data set
        self.refresh: NegativeRefresh | None = None
        if args.refresh_negatives_every is not None:
            self.refresh = NegativeRefresh(args, train_dataset, mining_data)
            train_dataset = self.refresh.dataset  # its rows have their number
        self.samplings = get_samplings(train_dataset)
        dataset = eval_dataset if train_dataset is None else train_dataset
        columns = loss_factory.columns_by_set(dataset)
        loss_factory.take_roles(args, model, columns)
        log.describe_in_card(model, args, data_record or {}, has_own_loss=loss is not None)
        if loss is None and args.method == "query_side":
            query_side = QuerySide(args, model, train_dataset, eval_dataset)
            train_dataset = query_side.dataset
            eval_dataset = query_side.eval_dataset
            loss = query_side.loss
            kwargs.setdefault("data_collator", query_side.collator)
        if loss is None:
            loss = loss_factory.make_loss(model, args, guide)
        loss_factory.check_columns(args, loss, columns)
        loss_factory.settle_search_of_unused_parameters(args, model, loss)
        args.hub_strategy = HubStrategy.END  # a checkpoint's upload would include run.json
        self.batch_sampler: Any = None
        self.run_id: str | None = None  # of the run in progress; a resumed run keeps its id
        self._resume_point: checkpoint.ResumePoint | None = None
        super().__init__(model, args, train_dataset, eval_dataset, loss, **kwargs)
        if loss_factory.reads_embeddings_alone(loss):
            self._freeze_unused_parameters()
        if self.is_fsdp_enabled:
            engines.refuse_adapters_of_two_towers(model)
        unset_hf_deepspeed_config()  # the arguments unset it, and the accelerator has set it again
        loss_factory.pass_known_positives(self.loss, [train_dataset, eval_dataset])
        documents = loss_factory.documents_of(self.loss)
        if documents is not None and isinstance(self.evaluator, RetrievalEvaluator):
            self.evaluator.documents = documents  # which stand still, so they are encoded once
        self.facts = RunFacts(
            self.args,
            user_arguments,
            model,
            guide=loss_factory.guide_of(self.loss),
            engine=self.engine,
            train_dataset=self.train_dataset,
            data_record=data_record or {},
            evaluator=self.evaluator,
            documents=documents,
        )
        self._make_updates(loss_factory.smallest_micro_batch(self.loss, columns))
        self._add_callbacks()

    def _freeze_unused_parameters(self) -> None:
        """Freeze parameters that no embedding of the training data depends on."""
        features: list[train_data.Batch] = []
        for row in train_data.first_rows(self.train_dataset):
            columns, _ = self.collect_features(self.data_collator([row]))
            features += columns
        args = self.args
        waits_for_all = args.world_size > 1 and args.ddp_find_unused_parameters is False
        if features:
            loss_factory.freeze_unused(self.model, features, freezes_unreached=waits_for_all)

    def _make_updates(self, smallest_micro_batch: int) -> None:
        """Make what runs, splits and skips updates."""
        can_halve = world_size() == 1 and not self.is_deepspeed_enabled
        limit = out_of_memory.MicroBatchLimit(
            self.loss, smallest_micro_batch, self.args.process_index, can_halve
        )
        is_whole = self.engine is None
        self.updates = Updates(
            self.args, self.loss, self.accelerator, limit, self._count_pairs, is_whole
        )
        self.nonfinite_updates = nonfinite.NonFiniteUpdates(
            self.args.max_skipped_updates, self.accelerator, covers_loss=is_whole
        )
        for loss in train_data.parts_of(self.loss):
            nonfinite.make_gradient_nonfinite_too(loss)

    def _add_callbacks(self) -> None:
        args = self.args
        refresh = self._refresh_negatives if self.refresh is not None else None
        # Before the others, so that those who log get the numbers that the second one adds.
        self.callback_handler.callbacks[:0] = [
            callbacks.RunCallback(self._begin_run, self._set_epoch, refresh),
            callbacks.UpdateLogCallback(self.updates, list(self.bank_losses())),
        ]
        if args.eval_strategy != "no":
            callbacks.choose_metric(args, self.evaluator, self.eval_dataset is not None)
            patience = args.early_stopping_patience
            evaluation = partial(callbacks.EvaluationCallback, patience, self.updates)
            self.add_callback(evaluation(lambda: self.is_in_train))
        self.signals = callbacks.SignalCallback()
        self.add_callback(self.signals)

    def bank_losses(self) -> Iterator[ContAccumLoss]:
        """Yield every ContAccumLoss that trains; see `loss_factory.bank_losses`."""
        return loss_factory.bank_losses(self.loss)

    @property
    def engine(self) -> str | None:
        """The engine that shards weights or gradients over ranks, if there is one."""
        if self.is_fsdp_enabled:
            return "FSDP"
        return engines.describe_deepspeed(self.accelerator) if self.is_deepspeed_enabled else None

    # The loop ------------------------------------------------------------------------------------

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train as in transformers; ``"last"`` (or ``True``) is the newest whole checkpoint.

        ``"auto"`` is that too, or a start where there is none.

        Raises:
            SystemExit: with code 143 after SIGTERM, 130 after SIGINT, when a checkpoint is saved.
            UserError: for a checkpoint that is not whole or not this run's, a full disk, or too
                little memory.
        """
        args = self.args
        request = checkpoint.parse_resume_request(resume_from_checkpoint)
        self._resume_point = None
        if request is not None:
            self._resume_point = checkpoint.choose_checkpoint(request, args, self.facts.settings())
        point = self._resume_point
        if point is None:
            self.run_id = checkpoint.new_run_id(args.device)
        else:
            self.run_id = point.run_id
            # The result of training depends on the micro-batch, so it is found once in a run.
            if args.finds_micro_batch:
                self.updates.take_micro_batch(point.facts["micro_batch"])
            final_model = point.final_model(args)
            if final_model is not None:
                self.state = point.state
                self._load_from_checkpoint(final_model)
                return TrainOutput(self.state.global_step, 0.0, {})
            if self.is_deepspeed_enabled:
                engines.refuse_code(point.folder)
        folder = None if point is None else str(point.folder)
        report_full_disk = resources.report_full_disk(str(args.output_dir))
        with report_full_disk, out_of_memory.report_out_of_memory(), self.signals:
            return super().train(folder, trial, ignore_keys_for_eval)

    def get_train_dataloader(self) -> DataLoader:
        """Return batches whose order depends on seed and epoch alone, so that runs can resume."""
        args = self.args
        # Here, because gradient checkpointing is on by now, and no sizes have been read yet.
        if args.finds_micro_batch:
            smallest = self.updates.limit.smallest
            num_pairs = out_of_memory.find_micro_batch(
                args, self.model, self.loss, self.train_dataset, smallest, self._loss_of_rows
            )
            self.updates.take_micro_batch(num_pairs)
        if isinstance(self.train_dataset, IterableDataset):
            # Each rank reads all rows and takes its own; accelerate would tokenize on one for all.
            self.accelerator.dataloader_config.dispatch_batches = False
            return super().get_train_dataloader()
        with train_data.resumable_order(args):
            loader = super().get_train_dataloader()
        self.batch_sampler = train_data.innermost_batch_sampler(loader)
        return loader

    def _loss_of_rows(self, loss: nn.Module, rows: list[dict[str, Any]]) -> Tensor:
        inputs = self._prepare_inputs(self.data_collator(rows))
        with self.accelerator.autocast():
            return loss(*self.collect_features(inputs))

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        # Private: the only place where a resumed run gets its position in the data. Of a stream,
        # transformers skips all micro-batches of the run in its first pass, and starts it again.
        position = super()._init_training_state(*args, **kwargs)
        if self._resume_point is None or not isinstance(self.train_dataset, IterableDataset):
            return position
        passes, updates = self._resume_point.position_in_stream()
        return passes, updates * self.args.gradient_accumulation_steps

    def _begin_run(self) -> None:
        """Load the rest of a checkpoint, write ``run.json`` and remove what the run replaces."""
        self.updates.begin(self.state.global_step + 1)
        if self._resume_point is not None:
            checkpoint.drop_lost_best(self.state, self.run_id)
            self.updates.limit.rows = self._resume_point.facts["rows_fit"]
            checkpoint.load_states(self._resume_point.folder, self._state_parts())
        elif loss_factory.documents_of(self.loss) and self.is_world_process_zero():
            warn_of_useless_documents(self.evaluator, self.model)
        if self.args.should_save:  # the first rank; with save_on_each_node that of each host
            record = self.facts.record(self.run_id, self.state.max_steps)
            # The record comes first: if a kill comes between the two, the old checkpoints belong to
            # another run already.
            write_json(Path(str(self.args.output_dir)) / log.RUN_RECORD, record)
            checkpoint.remove_replaced(self.args, self.run_id, self.state.global_step)

    def _set_epoch(self, epoch: int) -> None:
        # A resumed run reaches its sampler through two wrappers; transformers looks through one.
        if hasattr(self.batch_sampler, "set_epoch"):
            self.batch_sampler.set_epoch(epoch)
        for sampling in self.samplings:
            sampling.set_epoch(epoch, self.args.order_seed)

    def _refresh_negatives(self, update: int) -> None:
        """Mine hard negatives anew, where they are due after ``update`` updates."""
        if self.refresh is None or not self.refresh.is_due(update):
            return
        encoder = self.accelerator.unwrap_model(self.model_wrapped, keep_torch_compile=False)
        numbers = self.refresh.mine(encoder, update, self.is_world_process_zero())
        self.updates.current.log_entries |= numbers

    def _count_pairs(self, inputs: dict[str, Any]) -> int:
        return count_texts(self.collect_features(inputs)[0][0]) or 0

    def get_batch_samples(
        self, epoch_iterator: Any, num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """Fetch the micro-batches of an update, as in transformers, and count their pairs."""
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        self.updates.expect(batches)
        return batches, num_items

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        """Do the forward and backward passes of a micro-batch; return its loss for the log."""
        if self.refresh is not None:
            inputs = self.refresh.replace_negatives(inputs, self.data_collator)
        assert self.optimizer is not None  # it is made by now
        return self.updates.step(model, inputs, self.micro_step, self.optimizer)

    def micro_step(
        self, model: nn.Module, inputs: dict[str, Any], share: float, is_last: bool
    ) -> Tensor:
        """Do the forward and backward passes of a share of a micro-batch; return its loss.

        With ``is_last``, the update ends with it, and ranks reduce their gradients.
        """
        steps = self.current_gradient_accumulation_steps
        # transformers divides the loss by it.
        self.current_gradient_accumulation_steps = steps / share  # type: ignore[assignment]  # int
        try:
            with nullcontext() if is_last else self.accelerator.no_sync(model):
                loss = super().training_step(model, dict(inputs))
        finally:
            self.current_gradient_accumulation_steps = steps
        if isinstance(self.loss, ContAccumLoss) and self.loss.last:
            # Logged is the loss of local rows: that of stale rows says nothing about the encoder.
            local = self.loss.last["local_loss"].to(loss) * share / steps
            loss = torch.where(torch.isfinite(loss), local, loss)
        return loss

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        # Private: the only place with the norm over all ranks before the optimizer steps.
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        if norm is not None:
            assert self.optimizer is not None
            self.nonfinite_updates.check(
                self.updates.current, float(norm), model, self.optimizer, self._find_rows
            )
        return norm

    def _find_rows(self, micro_batches: list[int]) -> list[int] | None:
        num_batches = len(self._train_dataloader)
        return train_data.rows_of_micro_batches(
            self.args, self.batch_sampler, num_batches, self.state.global_step, micro_batches
        )

    # Checkpoints ---------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save as transformers does, without credentials in the card and without a pickle."""
        folder = Path(str(output_dir or self.args.output_dir))
        states = RandomStates.capture()
        if self.engine is not None:
            # Before DeepSpeed begins, the model's weights are whole.
            has_begun = self.is_fsdp_enabled or self.deepspeed is not None
            weights = self.accelerator.get_state_dict(self.model_wrapped) if has_begun else None
            engines.save_gathered(self.model, weights, folder, self.args.should_save)
        elif self.args.should_save:  # sentence-transformers would have every rank write
            super().save_model(str(folder), _internal_call)
        # Model cards take random rows of the data; a run that saves goes on as one that does not.
        states.restore()
        if self.args.should_save:
            saving.clean_saved_model(folder)
            if folder == Path(str(self.args.output_dir)) and not self.is_in_train:
                log.mark_finished(folder, self.run_id)

    def push_to_hub(
        self, commit_message: str | None = "End of training", *_: Any, **kwargs: Any
    ) -> Any:
        """Upload the model and its card; see `saving.upload_model`."""
        save = partial(self.save_model, _internal_call=True)
        is_writer = self.is_world_process_zero()
        return saving.upload_model(self.model, self.args, save, is_writer, commit_message, kwargs)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        # Private: the only place between writing a checkpoint and removing older ones.
        args = self.args
        run_folder = self._get_output_dir(trial)
        folder = Path(run_folder) / f"checkpoint-{self.state.global_step}"
        limit = args.save_total_limit
        args.save_total_limit = None
        try:
            with checkpoint.removed_on_failure(folder, args.should_save):
                self.accelerator.wait_for_everyone()
                super()._save_checkpoint(model, trial)
                parts = [] if args.save_only_model else list(self._state_parts())
                states = checkpoint.collect_states(parts)
                self.accelerator.wait_for_everyone()
                if args.should_save:
                    checkpoint.save_states(folder, states)
                    checkpoint.seal(folder, self._checkpoint_facts())
                    best = self.state.best_model_checkpoint
                    checkpoint.remove_oldest(run_folder, self.run_id, limit, best)
        finally:
            args.save_total_limit = limit
        self.accelerator.wait_for_everyone()

    def _checkpoint_facts(self) -> dict[str, Any]:
        return {
            "run_id": self.run_id,
            "update": self.state.global_step,
            "resumable": not self.args.save_only_model,
            "micro_batch": self.args.pairs_per_micro_batch,
            "rows_fit": self.updates.limit.rows,
            "settings": self.facts.settings(),
        }

    def _state_parts(self) -> Iterator[checkpoint.StatePart]:
        """Yield the states that a checkpoint holds beside model and optimizer."""
        for index, loss in enumerate(self.bank_losses()):
            get = partial(loss.bank_state_dict, keep=self.args.should_save)
            yield checkpoint.StatePart(f"{index}.", get, loss.load_bank_state_dict)
        refresh = self.refresh
        if refresh is not None:
            yield checkpoint.StatePart("refresh.", refresh.state_dict, refresh.load_state_dict)

    def _load_from_checkpoint(self, checkpoint_path: str, model: nn.Module | None = None) -> None:
        # Private: sentence-transformers' own knows no shards, no adapters of towers or over weights
        # in 4 bits, and not the model that FSDP's caller passes.
        if self.deepspeed is not None:  # its engine has copies of the weights
            deepspeed_load_checkpoint(self.deepspeed, checkpoint_path)
            return
        trusted = bool(getattr(self.model, "trust_remote_code", False))
        with loading(checkpoint_path, trusted):
            if not (self.is_fsdp_enabled or has_adapter(self.model)):
                super()._load_from_checkpoint(checkpoint_path)
                return
            weights = engines.read_whole_weights(checkpoint_path, trusted)
        engines.load_whole_weights(self.model, weights, is_sharded=self.is_fsdp_enabled)
