"""An oracle for contaccum: banks whose pairs are encoded again after each update.

Banked embeddings then never become outdated, but each update costs a forward pass for all banked
pairs. The difference to contaccum shows what outdated embeddings cost.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize
from transformers import TrainerCallback

from contaccum import ContAccumLoss
from contaccum.bank.logits import make_pairs, stack_ids, stack_texts
from contaccum.bank.memory_bank import MemoryBank, score_blocks

Features = dict[str, Tensor]


class BankRefresh(TrainerCallback):
    """Callback that encodes all entries of the banks again after each update.

    Args:
        loss: the loss of the training, with ``drift_compensation="none"`` and without hard
            negatives.
        bank_size: number of pairs in the bank.
    """

    def __init__(self, loss: ContAccumLoss, bank_size: int) -> None:
        self._loss = loss
        self._bank_size = bank_size
        self._micro_batches: deque[list[Features]] = deque()
        loss.register_forward_pre_hook(self._store_texts)

    def _store_texts(self, loss: nn.Module, arguments: tuple[Any, ...]) -> None:
        """Store the tokens of a micro-batch, and drop the oldest beyond the size of the bank."""
        features = [dict(column) for column in arguments[0]]
        self._micro_batches.append(features)
        num_pairs = sum(len(columns[0]["input_ids"]) for columns in self._micro_batches)
        while num_pairs > self._bank_size:
            num_pairs -= len(self._micro_batches.popleft()[0]["input_ids"])

    @torch.no_grad()
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Fill the banks with new embeddings of the same texts."""
        info_nce = self._loss.info_nce
        assert info_nce is not None and info_nce.bank is not None
        bank = info_nce.bank
        ids = self._read_ids(bank)
        bank.retire_all()
        settings = info_nce.settings
        for columns, (query_ids, passage_ids) in zip(self._micro_batches, ids, strict=True):
            embeddings = [self._loss.model(dict(c))["sentence_embedding"].float() for c in columns]
            texts = stack_texts(embeddings)
            if settings.similarity == "cos":
                texts = normalize(texts, dim=-1)
            text_ids = stack_ids(query_ids, passage_ids, None, texts)
            local = make_pairs(texts, text_ids, settings.temperature)
            blocks = score_blocks(local, bank, settings, info_nce.positives)
            bank.append(local, blocks, not_finite=torch.tensor(False))

    def _read_ids(self, bank: MemoryBank) -> list[tuple[Tensor, Tensor]]:
        """Read the ids of queries and passages of each micro-batch from the bank, oldest first.

        The bank still holds them, because `_store_texts` keeps no more pairs than the bank.
        """
        sizes = [len(columns[0]["input_ids"]) for columns in self._micro_batches]
        first = bank.total_enqueued - sum(sizes)
        ids = []
        for size in sizes:
            slots = torch.arange(first, first + size) % bank.num_slots
            query_ids = bank.query_ids[:, slots].T.clone()
            passage_ids = bank.document_ids[:, slots, 0].T.clone()
            ids.append((query_ids, passage_ids))
            first += size
        return ids
