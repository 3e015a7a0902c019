"""The facts that identify a run: the content of ``run.json``, and the settings of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sentence_transformers import SentenceTransformer

from contaccum.encoders.adapters import describe_adapters
from contaccum.files import provenance
from contaccum.losses.guide import Guide
from contaccum.retrieval.documents import StoreDocuments
from contaccum.training.arguments import ContAccumTrainingArguments, name_of
from contaccum.training.checkpoint import SAME
from contaccum.training.train_data import fingerprint_of, num_rows


class RunFacts:
    """The facts that identify a run.

    Args:
        args: the arguments in use.
        user_arguments: the arguments as the user wrote them.
        model: the encoder. Its parameters are counted here, because ZeRO-3 leaves them empty later.
        guide: the model that decides which texts are no negatives, if there is one.
        engine: the engine that shards the model, if there is one.
        train_dataset: the training set, or several by name.
        data_record: facts about the data; without a ``fingerprint``, it is computed when needed.
        evaluator: a RetrievalEvaluator, or any other; None without evaluation.
        documents: the store of query-side training, if there is one.
    """

    def __init__(
        self,
        args: ContAccumTrainingArguments,
        user_arguments: Mapping[str, Any],
        model: SentenceTransformer,
        guide: Guide | None,
        engine: str | None,
        train_dataset: Any,
        data_record: Mapping[str, Any],
        evaluator: Any,
        documents: StoreDocuments | None = None,
    ) -> None:
        self._args = args
        self._user_arguments = user_arguments
        self._model = model
        self._guide = guide
        self._engine = engine
        self._train_dataset = train_dataset
        self._data_record = dict(data_record)
        self._evaluator = evaluator
        self._documents = documents
        self._num_parameters = 0
        self._num_trained_parameters = 0
        for parameter in model.parameters():
            self._num_parameters += parameter.numel()
            if parameter.requires_grad:
                self._num_trained_parameters += parameter.numel()

    def fingerprint(self) -> str | None:
        """Return the hash of the training texts, computed once; None for a stream."""
        if "fingerprint" not in self._data_record:
            self._data_record["fingerprint"] = fingerprint_of(self._train_dataset)
        return self._data_record["fingerprint"]

    def record(self, run_id: str | None, max_steps: int) -> dict[str, Any]:
        """Return the content of ``run.json``, from which the run can be repeated."""
        args = self._args
        rows = num_rows(self._train_dataset)
        data = {"fingerprint": self.fingerprint(), "rows": rows, **self._data_record}
        model = {
            "base": getattr(self._model.model_card_data, "base_model", None),
            "parameters": self._num_parameters,
            "adapters": describe_adapters(self._model),
            "guide": self._guide and self._guide.name,
        }
        record = {
            "run_id": run_id,
            "finished": False,
            "method": args.method,
            "seed": args.seed,
            "pairs_per_update": args.total_train_batch_size,
            "updates": max_steps,
            "data": data,
            "model": model,
        }
        if self._documents is not None:
            record["documents"] = self._documents.describe()
        if hasattr(self._evaluator, "describe"):
            record["evaluation"] = self._evaluator.describe()
        return {**record, "arguments": self._user_arguments, **provenance()}

    def settings(self) -> dict[str, Any]:
        """Return the settings that a run which resumes must have in common with its checkpoint."""
        args = self._args
        settings: dict[str, Any] = {}
        for name in SAME:
            settings[name] = self._user_arguments.get(name)
        # The number of ranks may change where all of them share one bank.
        del settings["gather_across_devices"]
        settings["pairs per update"] = args.total_train_batch_size
        settings["rows"] = num_rows(self._train_dataset)
        settings["trained parameters"] = self._num_trained_parameters
        settings["engine"] = self._engine
        settings["adapters"] = describe_adapters(self._model)
        settings["documents of the store"] = None
        if self._documents is not None:
            settings["documents of the store"] = self._documents.fingerprint
        settings["size of the guide"] = None
        if self._guide is not None:
            settings["size of the guide"] = self._guide.model.get_embedding_dimension()
        if self.fingerprint() is not None:
            settings["data fingerprint"] = self.fingerprint()
        sampler = name_of(args.batch_sampler)
        if sampler != "batch_sampler" or isinstance(self._train_dataset, dict):
            settings["batch_sampler"] = f"{sampler} of {args.train_batch_size}"
        return settings
