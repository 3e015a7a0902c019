"""Loaders over several training sets and over streams: what sentence-transformers' trainer would not load by itself."""

from __future__ import annotations

import logging
from typing import Any

from accelerate.data_loader import prepare_data_loader
from sentence_transformers import SentenceTransformerTrainer
from torch.utils.data import ConcatDataset, DataLoader

from contaccum.data.set_samplers import RowsOfSets, WeightedBatchSampler
from contaccum.data.stream_batches import StreamedSets
from contaccum.training.arguments import ContAccumTrainingArguments
from contaccum.training.set_sampling import describe_shares, make_set_sampler
from contaccum.training.streaming import StreamCallback, describe_streams, stream_loader

logger = logging.getLogger(__name__)


class SetLoadingTrainer(SentenceTransformerTrainer):
    """SentenceTransformerTrainer that samples training sets by temperature and weights as well, and streams them.

    Attributes:
        set_shares: what an epoch takes of each set, by name, once there is a loader of several.
    """

    training_args_class: Any = ContAccumTrainingArguments  # its own type names fewer kinds of samplers than the base's
    args: ContAccumTrainingArguments
    set_shares: dict[str, dict[str, Any]] = {}  # noqa: RUF012  # replaced, never written into

    def trains_on(self, dataset: ConcatDataset) -> bool:
        """Whether these are the training sets, in their order."""
        own: Any = self.train_dataset
        return isinstance(own, dict) and [*map(id, own.values())] == [*map(id, dataset.datasets)]

    def sample_sets(
        self, dataset: ConcatDataset, batch_samplers: list[Any], generator: Any, seed: int
    ) -> tuple[Any, dict[str, dict[str, Any]]]:
        """The sampler over the training sets, and what it takes of each."""
        own: Any = self.train_dataset
        sizes = {name: len(part) for name, part in own.items()}
        sampler = make_set_sampler(self.args, sizes, dataset, batch_samplers, generator, seed)
        if sampler is None:
            given = (dataset, batch_samplers, generator, seed)
            sampler = SentenceTransformerTrainer.get_multi_dataset_batch_sampler(self, *given)  # type: ignore[assignment]
        return sampler, describe_shares(self.args, sizes, batch_samplers, sampler)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if isinstance(self.train_dataset, StreamedSets):
            self.add_callback(StreamCallback(self.train_dataset))

    def add_model_card_callback(self, default_args_dict: dict[str, Any]) -> None:
        # A model card shows rows of the data and counts them; a stream is only read to train on it.
        dataset: Any = self.train_dataset
        if isinstance(dataset, StreamedSets):
            self.train_dataset = None
        super().add_model_card_callback(default_args_dict)
        self.train_dataset = dataset

    def get_train_dataloader(self) -> DataLoader:
        if not isinstance(self.train_dataset, StreamedSets):
            return super().get_train_dataloader()
        args = self.args
        seed = args.seed if args.data_seed is None else args.data_seed
        self.set_shares = describe_streams(args, self.train_dataset)
        loader = stream_loader(args, self.train_dataset, self.data_collator, seed)
        # Each rank takes its own micro-batches; accelerate would have one rank tokenize for all.
        device = args.device if self.accelerator.device_placement else None
        self._train_dataloader = prepare_data_loader(
            loader, device, num_processes=1, process_index=0, put_on_device=device is not None, dispatch_batches=False
        )
        return self._train_dataloader

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        data: Any = self.train_dataset
        if checkpoint is not None and isinstance(data, StreamedSets) and not data.load(checkpoint):
            logger.warning(
                f"{checkpoint}: the streamed data has changed since then, so that this run will not be what the "
                "uninterrupted one would have been"
            )

    def _build_dataloader(self, dataset: Any, batch_size: int, dataset_kind: str) -> DataLoader:
        loader = super()._build_dataloader(dataset, batch_size, dataset_kind)
        if not isinstance(loader.batch_sampler, WeightedBatchSampler):
            return loader
        # The sampler's numbers say which pass a row is read in; a loader's data set cannot be replaced.
        rows = RowsOfSets(loader.dataset.datasets)  # type: ignore[attr-defined]  # a ConcatDataset
        kept = ("collate_fn", "num_workers", "pin_memory", "persistent_workers", "prefetch_factor")
        return DataLoader(rows, batch_sampler=loader.batch_sampler, **{name: getattr(loader, name) for name in kept})
