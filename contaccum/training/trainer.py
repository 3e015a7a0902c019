"""ContAccumTrainer: SentenceTransformerTrainer with the method, the bank and its checkpoints.

The training loop, the optimizer, mixed precision, distribution, early stopping and checkpoints are transformers'. What
is added: the loss that ``args.method`` names, prompts by tower, gradient norms per tower, the bank beside every
checkpoint, an order of data that resumes, updates that are skipped whole or split when memory runs out.
"""

from __future__ import annotations

import copy
import logging
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from datasets import IterableDataset
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.utils.data import DataLoader
from transformers import TrainerState
from transformers.integrations.deepspeed import deepspeed_load_checkpoint, unset_hf_deepspeed_config
from transformers.trainer_utils import HubStrategy, TrainOutput

from contaccum.data.samplers import RESUMING
from contaccum.data.sampling import first_texts, samplings_of
from contaccum.encoders.adapters import describe, has_adapter
from contaccum.encoders.dual_encoder import DualEncoder, is_tied, loading
from contaccum.errors import ConfigError, UserError
from contaccum.files import Fingerprint, redact, write_text
from contaccum.losses.contaccum import ContAccumLoss
from contaccum.losses.guide import Guide
from contaccum.mining import MiningData
from contaccum.training import checkpoint, log
from contaccum.training.arguments import ContAccumTrainingArguments, name_of
from contaccum.training.callbacks import EvaluationCallback, SignalCallback, UpdateCallback
from contaccum.training.log import rows_of
from contaccum.training.loss_factory import (
    check_columns,
    columns_by_set,
    freeze_unused,
    make_loss,
    reads_embeddings_alone,
    settle_search_of_unused_parameters,
    take_roles,
)
from contaccum.training.refresh import NegativeRefresh
from contaccum.training.updates import WHAT_ELSE, Updates, is_out_of_memory, random_states, set_random_states

logger = logging.getLogger(__name__)


class ContAccumTrainer(SentenceTransformerTrainer):
    """Train a dense retriever by ``args.method``.

    Args:
        model: a SentenceTransformer, a `DualEncoder` for instance.
        args: `ContAccumTrainingArguments`.
        train_dataset: columns in order query, positive, then any number of negatives.
        loss: overrides what ``args.method`` would make; the bank of a ContAccumLoss in it is checkpointed all the same.
        data_record: what ``run.json`` says of the data beside the rows, a ``fingerprint`` of the texts at least (None:
            computed); ``TrainingData.record()`` for instance.
        mining_data: what ``args.refresh_negatives_every`` mines in; None: the queries and positives of the data set.
        guide: for the loss that ``args.method`` names: says which texts are no negatives; see `ContAccumLoss`.
        Others: as in SentenceTransformerTrainer; an ``evaluator`` may be a `RetrievalEvaluator`.

    Unless ``args.prompts`` or ``args.router_mapping`` say otherwise, the first column is encoded as a query and the
    others as documents, with the model's prompts and lengths. Writes ``train_log.jsonl``, a line per update,
    ``run.json``, what the run is, and checkpoints with the bank into ``args.output_dir``.

    Raises:
        ConfigError: for a data set or model that cannot work with the arguments.

    Example:
        ```python
        args = ContAccumTrainingArguments("runs/example", per_device_train_batch_size=8, gradient_accumulation_steps=16)
        ContAccumTrainer(model=model, args=args, train_dataset=train_dataset).train()
        ```
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
        data_record: Mapping[str, Any] | None = None,
        mining_data: MiningData | None = None,
        guide: SentenceTransformer | None = None,
        **kwargs: Any,
    ) -> None:
        args = ContAccumTrainingArguments(output_dir="runs/contaccum") if args is None else args
        self.given_arguments = args.to_dict()
        args = copy.copy(args)  # what follows belongs to this model and data set
        self.refresh: NegativeRefresh | None = None
        if args.refresh_negatives_every is not None:
            self.refresh = NegativeRefresh(args, train_dataset, mining_data)
            train_dataset = self.refresh.dataset  # whose rows know their number
        self.samplings = samplings_of(train_dataset)
        columns = columns_by_set(train_dataset if train_dataset is not None else eval_dataset)
        take_roles(args, model, columns)
        log.describe_in_card(model.model_card_data, model, args, data_record or {}, own_loss=loss is not None)
        loss = make_loss(model, args, guide) if loss is None else loss
        check_columns(args, loss, columns)
        settle_search_of_unused_parameters(args, model, loss)
        self.hard_negatives = max((len(names) - 2 for names in columns.values()), default=0)
        self.data_record = dict(data_record or {})
        args.hub_strategy = HubStrategy.END  # else transformers uploads output_dir at each checkpoint, run.json and all
        self.batch_sampler: Any = None
        self._checkpoint: str | None = None
        self.run_id: str | None = None  # of the run in progress; a run that resumes keeps its id
        super().__init__(
            model=model, args=args, train_dataset=train_dataset, eval_dataset=eval_dataset, loss=loss, **kwargs
        )
        features = self._features_of_first_rows()
        if features and reads_embeddings_alone(loss):
            waits_for_all = args.world_size > 1 and args.ddp_find_unused_parameters is False
            freeze_unused(model, features, freezes_unreached=waits_for_all)
        # Counted here, as ZeRO-3 leaves parameters empty later on.
        self.parameters = sum(p.numel() for p in model.parameters())
        self.trained_parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
        if self.is_fsdp_enabled and has_adapter(model) and not is_tied(model):
            raise ConfigError("fsdp with adapters of two towers: FSDP cannot shard the base that they share. Use DDP")
        unset_hf_deepspeed_config()  # as the arguments have: the accelerator has set it again
        known = [x.known_positives for x in (*self.samplings, *samplings_of(eval_dataset))]
        pairs = [x for x in known if x is not None]
        for bank_loss in self.bank_losses() if pairs else ():
            bank_loss.know_positives(*torch.from_numpy(np.concatenate(pairs)).T.contiguous())
        self.updates = Updates(self)
        # Before the others, so that those who log get what it adds.
        self.callback_handler.callbacks.insert(0, UpdateCallback(self))
        if args.eval_strategy != "no":
            self._settle_metric()
            self.add_callback(EvaluationCallback(self))
        self.signals = SignalCallback()
        self.add_callback(self.signals)

    def _features_of_first_rows(self) -> list[dict[str, Any]]:
        """Collate the first row of every training set: one dictionary of features for each column."""
        datasets = self.train_dataset.values() if isinstance(self.train_dataset, dict) else [self.train_dataset]
        features: list[dict[str, Any]] = []
        for dataset in datasets:
            row = next(iter(dataset), None) if dataset is not None else None
            if row is not None:
                columns, _ = self.collect_features(self.data_collator([row]))
                features += columns
        return features

    def bank_losses(self) -> Iterator[ContAccumLoss]:
        """Every ContAccumLoss that trains, wrapped ones (MatryoshkaLoss) and one per data set included."""
        for loss in self.loss.values() if isinstance(self.loss, dict) else [self.loss]:
            yield from (module for module in loss.modules() if isinstance(module, ContAccumLoss))

    @property
    def guide(self) -> Guide | None:
        """What says which texts are no negatives, if anything does."""
        return next((loss.guide for loss in self.bank_losses() if loss.guide is not None), None)

    @property
    def engine(self) -> str | None:
        """What shards weights or gradients over ranks; None: every rank has them whole."""
        if self.is_deepspeed_enabled:
            return f"ZeRO-{self.accelerator.state.deepspeed_plugin.zero_stage} on {self.args.world_size} ranks"
        return "FSDP" if self.is_fsdp_enabled else None

    def fingerprint(self) -> str | None:
        """Of the training data: as given, or else computed once from its texts; None for a stream."""
        if "fingerprint" not in self.data_record and rows_of(self.train_dataset) is not None:
            parts = self.train_dataset.values() if isinstance(self.train_dataset, dict) else [self.train_dataset]
            found = Fingerprint()
            for batch in (batch for part in parts for batch in first_texts(part)):
                found.add(*(text for row in zip(*batch.values(), strict=True) for text in row))
            self.data_record["fingerprint"] = found.hex()
        return self.data_record.get("fingerprint")

    def _settle_metric(self) -> None:
        """What is best is measured by the evaluator, where there is one."""
        args, evaluator = self.args, cast(Any, self.evaluator)
        names = getattr(evaluator, "metrics", ())
        metric = str(args.metric_for_best_model).removeprefix("eval_")
        if args.keeps_best and names and (metric == "None" or (metric == "loss" and self.eval_dataset is None)):
            args.metric_for_best_model, args.greater_is_better = f"eval_{evaluator.primary_metric}", True
        elif args.keeps_best and names and "@" in metric and metric not in names:
            raise ConfigError(f"metric_for_best_model={metric}: the evaluator measures {', '.join(names)}")

    # The loop --------------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: Any = None, trial: Any = None, ignore_keys_for_eval: Any = None) -> Any:
        """As in transformers; ``"last"`` (or ``True``) is the newest whole checkpoint, ``"auto"`` that or a start.

        Raises:
            SystemExit: with code 143 after SIGTERM, 130 after SIGINT, when a checkpoint is saved.
            UserError: for a checkpoint that is not whole or not this run's, a disk that is full, too little memory.
        """
        args, asked = self.args, str(resume_from_checkpoint or "")
        self._checkpoint = checkpoint.choose_checkpoint(asked, args, self.settings()) if asked else None
        if self._checkpoint is None:
            self.run_id = checkpoint.new_run_id(args.device)
        else:
            facts = checkpoint.facts_of(self._checkpoint)
            self.run_id = facts.get("run_id")
            if args.finds_micro_batch:  # once a run: what is trained depends on it
                self.updates.take_micro_batch(facts["micro_batch"])
            state = TrainerState.load_from_json(str(Path(self._checkpoint) / "trainer_state.json"))
            ended = checkpoint.ended_with(self._checkpoint, state, args)
            if ended is not None:
                self.state = state
                self._load_from_checkpoint(ended)
                return TrainOutput(self.state.global_step, 0.0, {})
            if self.is_deepspeed_enabled:
                checkpoint.refuse_code(Path(self._checkpoint))
        try:
            with self.signals:
                return super().train(self._checkpoint, trial, ignore_keys_for_eval)
        except Exception as error:
            if checkpoint.is_no_room(error):
                raise UserError(f"{args.output_dir}: no room on the disk: make some, and resume from `last`") from error
            if is_out_of_memory(error):
                raise UserError(f"out of memory outside of a micro-step: {WHAT_ELSE}") from error
            raise

    def get_train_dataloader(self) -> DataLoader:
        """Batches in an order that depends on seed and epoch alone, so that a resumed run goes on with it."""
        if self.args.finds_micro_batch:  # gradient checkpointing is on by now, and nobody has asked for sizes yet
            self.updates.find_micro_batch()
        args: Any = self.args
        if isinstance(self.train_dataset, IterableDataset):
            # Each rank reads all rows and takes its own; accelerate would have one rank tokenize for all.
            self.accelerator.dataloader_config.dispatch_batches = False
            return super().get_train_dataloader()
        given = args.batch_sampler, args.seed
        args.batch_sampler, args.seed = RESUMING.get(name_of(given[0]), given[0]), args.order_seed
        loader = super().get_train_dataloader()
        args.batch_sampler, args.seed = given
        self.batch_sampler = loader.batch_sampler
        while hasattr(self.batch_sampler, "batch_sampler"):  # accelerate wraps it
            self.batch_sampler = self.batch_sampler.batch_sampler
        return loader

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        # Private: the only place where a resumed run gets its position in the data. Of a stream, whose length is not
        # known, transformers skips all micro-batches of the run in its first pass, and then starts it again.
        position = super()._init_training_state(*args, **kwargs)
        if self._checkpoint is None or not isinstance(self.train_dataset, IterableDataset):
            return position
        passes, updates = checkpoint.position_in_stream(self._checkpoint)
        return passes, updates * self.args.gradient_accumulation_steps

    def begin(self) -> None:
        """What transformers does not load of a checkpoint; called when everything else is ready."""
        self.updates.begin()
        if self._checkpoint is None:
            return
        best = self.state.best_model_checkpoint
        fault = None if best is None else checkpoint.fault_for_run(Path(best), self.run_id)
        if fault is not None:
            logger.warning(f"the best checkpoint so far, {best}, is left out: {fault}")
            self.state.best_model_checkpoint = None
        state = load_file(Path(self._checkpoint) / checkpoint.BANK_FILE)
        self.updates.rows_fit = checkpoint.facts_of(self._checkpoint)["rows_fit"]
        for prefix, _, load in self._parts():
            load({key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)})

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> tuple[list[Any], Any]:
        """Fetch the micro-batches of an update, as in transformers, and count their pairs for the loss."""
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        self.updates.count_pairs(batches)
        return batches, num_items

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Forward and backward of a micro-batch."""
        if self.refresh is not None:
            inputs = self.refresh.replace_negatives(inputs, self.data_collator)
        return self.updates.step(model, inputs)

    def micro_step(self, model: nn.Module, inputs: dict[str, Any], share: float, last: bool) -> Tensor:
        """Forward and backward of a share of a micro-batch. Returns the loss to log."""
        steps = self.current_gradient_accumulation_steps
        self.current_gradient_accumulation_steps = steps / share  # type: ignore[assignment]  # the loss is divided by it
        try:
            with nullcontext() if last else self.accelerator.no_sync(model):
                loss = super().training_step(model, dict(inputs))
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
        folder, states = Path(str(output_dir or self.args.output_dir)), random_states()
        if self.engine is not None:
            begun = self.is_fsdp_enabled or self.deepspeed is not None  # before, DeepSpeed's weights are whole
            state = self.accelerator.get_state_dict(self.model_wrapped) if begun else None
            with _whole_parameters(self.model, state or {}):  # ZeRO-3 gives it to the first rank alone
                if self.args.should_save:  # a model card would need a forward pass, and so all ranks
                    self.model.save_pretrained(str(folder), create_model_card=False)
        elif self.args.should_save:  # sentence-transformers has every rank write, one over the other
            super().save_model(str(folder), _internal_call)
        set_random_states(states)  # model cards are drawn from the data; a run that saves goes on as one that does not
        if self.args.should_save:
            (folder / "training_args.bin").unlink(missing_ok=True)
            card = folder / "README.md"
            if card.is_file():
                write_text(card, redact(card.read_text(encoding="utf-8")))
            if folder == Path(str(self.args.output_dir)) and not self.is_in_train:
                log.mark_finished(folder, self.run_id)

    def push_to_hub(self, commit_message: str | None = "End of training", *_: Any, **given: Any) -> Any:
        """The model with its card to ``args.hub_model_id``, and nothing else of ``output_dir``, whose files hold paths;
        ``given``: token, revision, private. Returns the commit's address; always waits for it."""
        args = self.args
        name = args.hub_model_id or Path(str(args.output_dir)).resolve().name
        self.model.model_card_data.set_model_id(name)
        about: Any = {"token": args.hub_token, "revision": args.hub_revision, "private": args.hub_private_repo}
        about |= {key: given[key] for key in about if given.get(key) is not None}
        with tempfile.TemporaryDirectory() as folder:
            self.save_model(folder, _internal_call=True)
            if not self.is_world_process_zero():
                return None
            about |= {"commit_message": commit_message, "local_model_path": folder, "exist_ok": True}
            return self.model.push_to_hub(name, **about)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        # Private: the only place between writing a checkpoint and throwing older ones away.
        args, run = self.args, self._get_output_dir(trial)
        folder, limit = Path(run) / f"checkpoint-{self.state.global_step}", args.save_total_limit
        args.save_total_limit = None
        try:
            if args.should_save:
                shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed while it wrote
            self.accelerator.wait_for_everyone()
            super()._save_checkpoint(model, trial)
            parts = [] if args.save_only_model else self._parts()
            state = {f"{prefix}{key}": value for prefix, get, _ in parts for key, value in get().items()}
            self.accelerator.wait_for_everyone()
            if args.should_save:
                state = {key: value.detach().cpu().clone().contiguous() for key, value in state.items()}
                save_file(state, folder / checkpoint.BANK_FILE)
                facts: dict[str, Any] = {"run_id": self.run_id, "update": self.state.global_step}
                facts |= {"resumable": not args.save_only_model}
                facts |= {"micro_batch": args.pairs_per_micro_batch, "rows_fit": self.updates.rows_fit}
                checkpoint.seal(folder, facts | {"settings": self.settings()})
                checkpoint.remove_oldest(run, self.run_id, limit, self.state.best_model_checkpoint)
        except BaseException:
            if args.should_save:
                shutil.rmtree(folder, ignore_errors=True)
            raise
        finally:
            args.save_total_limit = limit
        self.accelerator.wait_for_everyone()

    def _parts(self) -> Iterator[tuple[str, Any, Any]]:
        """What a checkpoint keeps beside model and optimizer: prefix, how to get it on all ranks, how to load it."""
        for index, loss in enumerate(self.bank_losses()):
            yield f"{index}.", partial(loss.bank_state_dict, keep=self.args.should_save), loss.load_bank_state_dict
        if self.refresh is not None:
            yield "refresh.", self.refresh.state_dict, self.refresh.load_state_dict

    def settings(self) -> dict[str, Any]:
        """What a run that goes on from a checkpoint must have in common with it."""
        args = self.args
        # Ranks may be other ones, where all hold one bank.
        found = {name: self.given_arguments.get(name) for name in checkpoint.SAME if name != "gather_across_devices"}
        found |= {"pairs per update": args.total_train_batch_size, "rows": rows_of(self.train_dataset)}
        found |= {"trained parameters": self.trained_parameters, "engine": self.engine}
        found["adapters"] = describe(self.model)
        found["size of the guide"] = self.guide and self.guide.model.get_embedding_dimension()
        if self.fingerprint() is not None:
            found["data fingerprint"] = self.fingerprint()
        if name_of(args.batch_sampler) != "batch_sampler" or isinstance(self.train_dataset, dict):
            found["batch_sampler"] = f"{name_of(args.batch_sampler)} of {args.train_batch_size}"
        return found

    def _load_from_checkpoint(self, checkpoint_path: str, model: nn.Module | None = None) -> None:
        # Private: that of sentence-transformers knows no shards, no adapters of towers or over weights in 4 bits, nor
        # the model that FSDP's caller passes.
        if self.deepspeed is not None:  # an engine with copies of the weights
            deepspeed_load_checkpoint(self.deepspeed, checkpoint_path)
            return
        trusted = bool(getattr(self.model, "trust_remote_code", False))
        with loading(checkpoint_path, trusted):
            if not (self.is_fsdp_enabled or has_adapter(self.model)):
                return super()._load_from_checkpoint(checkpoint_path)
            whole = DualEncoder(checkpoint_path, device="cpu", trust_remote_code=trusted).state_dict()
            if not self.is_fsdp_enabled:
                every = self.model.named_parameters(remove_duplicate=False)
                names = [name for name, parameter in every if parameter.is_floating_point()]
                self.model.load_state_dict({name: whole[name] for name in names}, strict=False)
                return
        set_model_state_dict(self.model, dict(whole), options=StateDictOptions(full_state_dict=True))


@contextmanager
def _whole_parameters(model: nn.Module, state: dict[str, Tensor]) -> Iterator[None]:
    """For a while, the parameters of a model that an engine shards are those of its full ``state``, to be saved."""
    shards = {name: p for name, p in model.named_parameters(remove_duplicate=False) if name in state}

    def put(parameters: dict[str, nn.Parameter]) -> None:
        for name, parameter in parameters.items():
            place, _, key = name.rpartition(".")
            model.get_submodule(place)._parameters[key] = parameter

    put({name: nn.Parameter(state[name], requires_grad=False) for name in shards})
    try:
        yield
    finally:
        put(shards)
