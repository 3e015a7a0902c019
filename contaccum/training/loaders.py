"""Loaders over several training sets: what sentence-transformers' trainer would not load by itself."""

from __future__ import annotations

from typing import Any

from sentence_transformers import SentenceTransformerTrainer
from torch.utils.data import ConcatDataset, DataLoader

from contaccum.data.set_samplers import RowsOfSets, WeightedBatchSampler
from contaccum.training.arguments import ContAccumTrainingArguments
from contaccum.training.set_sampling import describe_shares, make_set_sampler


class SetLoadingTrainer(SentenceTransformerTrainer):
    """SentenceTransformerTrainer that samples training sets by temperature and weights as well.

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

    def _build_dataloader(self, dataset: Any, batch_size: int, dataset_kind: str) -> DataLoader:
        loader = super()._build_dataloader(dataset, batch_size, dataset_kind)
        if not isinstance(loader.batch_sampler, WeightedBatchSampler):
            return loader
        # The sampler's numbers say which pass a row is read in; a loader's data set cannot be replaced.
        rows = RowsOfSets(loader.dataset.datasets)  # type: ignore[attr-defined]  # a ConcatDataset
        kept = ("collate_fn", "num_workers", "pin_memory", "persistent_workers", "prefetch_factor")
        return DataLoader(rows, batch_sampler=loader.batch_sampler, **{name: getattr(loader, name) for name in kept})
