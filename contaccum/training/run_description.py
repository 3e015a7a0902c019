"""The description of a run: ``run.json``, and the settings that a resumed run must share.

This module makes the records. `contaccum.training.trainer` writes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from sentence_transformers import SentenceTransformer

from contaccum.encoders.adapters import describe_adapters, has_adapter
from contaccum.files import provenance
from contaccum.retrieval.encode import (
    hash_tensors,
    model_fingerprint,
    tokenisation_fingerprint,
)
from contaccum.training.arguments import ContAccumTrainingArguments, get_name
from contaccum.training.loss_factory import get_guide, get_store_documents
from contaccum.training.resuming import PAIRS_PER_BATCH, RESUME_SETTINGS
from contaccum.training.train_data import compute_fingerprint, count_rows


class RunDescription:
    """The description of a run, for ``run.json`` and for the markers of its checkpoints.

    Args:
        args: the arguments in use.
        user_arguments: the arguments as the user wrote them.
        model: the encoder. Its parameters are counted in the constructor, because they are empty
            once ZeRO-3 has sharded them.
        loss: the training loss, or a dictionary with one loss for each data set.
        engine: name of the engine that shards the model; None without one.
        train_dataset: the training set, or a dictionary of training sets.
        data_record: properties of the data for ``run.json``; a missing ``fingerprint`` is computed
            when needed.
        evaluator: the evaluator of the run; None without evaluation.
    """

    def __init__(
        self,
        args: ContAccumTrainingArguments,
        user_arguments: Mapping[str, Any],
        model: SentenceTransformer,
        loss: Any,
        engine: str | None,
        train_dataset: Any,
        data_record: Mapping[str, Any],
        evaluator: Any,
    ) -> None:
        self._args = args
        self.user_arguments = user_arguments
        self._model = model
        self._guide = get_guide(loss)
        self._documents = get_store_documents(loss)
        self._engine = engine
        self._train_dataset = train_dataset
        self._data_record = dict(data_record)
        self._evaluator = evaluator
        self._num_parameters = 0
        self._num_trained_parameters = 0
        frozen_parameters = {}
        for name, parameter in model.named_parameters():
            self._num_parameters += parameter.numel()
            if parameter.requires_grad:
                self._num_trained_parameters += parameter.numel()
            elif "lora_" not in name:
                frozen_parameters[name] = parameter
        self._base_of_adapters = None
        if has_adapter(model):
            self._base_of_adapters = hash_tensors(frozen_parameters)

    @cached_property
    def _tokenisation(self) -> str | None:
        return tokenisation_fingerprint(self._model)

    @cached_property
    def _guide_fingerprint(self) -> str | None:
        return None if self._guide is None else model_fingerprint(self._guide.model)

    def get_fingerprint(self) -> str | None:
        """Return the hash of the training texts, which is computed once; None for a stream."""
        if "fingerprint" not in self._data_record:
            self._data_record["fingerprint"] = compute_fingerprint(self._train_dataset)
        return self._data_record["fingerprint"]

    def make_run_record(self, run_id: str | None, max_steps: int) -> dict[str, Any]:
        """Return the content of ``run.json``, from which the run can be repeated.

        Args:
            run_id: id of the run.
            max_steps: number of updates of the run.
        """
        args = self._args
        num_rows = count_rows(self._train_dataset)
        data = {"fingerprint": self.get_fingerprint(), "rows": num_rows, **self._data_record}
        model = {
            "base": getattr(self._model.model_card_data, "base_model", None),
            "parameters": self._num_parameters,
            "adapters": describe_adapters(self._model),
            "guide": None if self._guide is None else self._guide.name,
        }
        record = {
            "run_id": run_id,
            "finished": False,
            "method": args.method,
            "seed": args.seed,
            "pairs_per_update": args.total_train_batch_size,
            "micro_batch": None if args.has_auto_micro_batch else args.pairs_per_micro_batch,
            "updates": max_steps,
            "data": data,
            "model": model,
        }
        if self._documents is not None:
            record["documents"] = self._documents.describe()
        if hasattr(self._evaluator, "describe"):
            record["evaluation"] = self._evaluator.describe()
        return {**record, "arguments": self.user_arguments, **provenance()}

    def make_marker(
        self, run_id: str | None, num_updates: int, num_trained: int, rows_fit: int | None
    ) -> dict[str, Any]:
        """Return the record that `checkpoint.write_marker` writes into a checkpoint.

        Args:
            run_id: id of the run.
            num_updates: number of updates at the checkpoint.
            num_trained: number of them that have trained; see `Update.has_trained`.
            rows_fit: number of rows per micro-step after memory has run out; None before that.
        """
        return {
            "run_id": run_id,
            "update": num_updates,
            "trained_updates": num_trained,
            "resumable": not self._args.save_only_model,
            "micro_batch": self._args.pairs_per_micro_batch,
            "rows_fit": rows_fit,
            "settings": self.get_resume_settings(),
        }

    def get_resume_settings(self) -> dict[str, Any]:
        """Return the settings that a resumed run must share with its checkpoint, by name.

        An error message shows the names, so those that are not arguments are in plain words.
        """
        args = self._args
        settings: dict[str, Any] = {}
        for name in RESUME_SETTINGS:
            settings[name] = self.user_arguments.get(name)
        # A run whose ranks share one bank may resume on another number of ranks, where this
        # argument may have another value.
        del settings["gather_across_devices"]
        settings["pairs per update"] = args.total_train_batch_size
        settings["rows"] = count_rows(self._train_dataset)
        settings["trained parameters"] = self._num_trained_parameters
        settings["engine"] = self._engine
        settings["adapters"] = describe_adapters(self._model)
        # A checkpoint holds neither the base of an adapter nor the guide, and their files may have
        # changed. The settings of the tokenizer are read from the folder of the model, too.
        settings["base of the adapters"] = self._base_of_adapters
        settings["tokenizer, prompts, lengths or pooling"] = self._tokenisation
        settings["guide"] = self._guide_fingerprint
        settings["documents of the store"] = None
        if self._documents is not None:
            settings["documents of the store"] = self._documents.fingerprint
        fingerprint = self.get_fingerprint()
        if fingerprint is not None:
            settings["data fingerprint"] = fingerprint
        # With another sampler than the default, or several data sets, the order of the rows also
        # depends on the batch size.
        sampler = get_name(args.batch_sampler)
        settings["batch_sampler"] = sampler
        is_default_sampler = sampler == "batch_sampler"
        if not is_default_sampler or isinstance(self._train_dataset, dict):
            settings[PAIRS_PER_BATCH] = args.train_batch_size
        return settings
