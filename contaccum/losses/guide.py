"""A guide: a frozen SentenceTransformer beside the one that trains, whose scores say which columns are no negatives.

It reads the texts as the model got them, prompts included; the rule that its scores are put to is
in ``pairs``.
"""

from __future__ import annotations

from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.losses.gradcache import (
    _create_minibatch,  # private, but who else knows all layouts
)
from sentence_transformers.util import batch_to_device
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from contaccum.errors import ConfigError
from contaccum.losses.text_ids import rows_in


class Guide:
    """Embeddings of a ``guide`` for what ``model`` is trained on: of its tokens, or of its texts where they differ.

    It is no Module, so that nothing trains it, sets its mode, wraps or copies it. Raises
    ConfigError where one of the models has no tokenizer of transformers.
    """

    def __init__(self, model: SentenceTransformer, guide: SentenceTransformer) -> None:
        mine, own = (getattr(x, "tokenizer", None) for x in (model, guide))
        if not isinstance(mine, PreTrainedTokenizerBase) or not isinstance(
            own, PreTrainedTokenizerBase
        ):
            raise ConfigError(
                "guide: it and the model each need a tokenizer of transformers, to read the same texts"
            )
        cuts = (guide.max_seq_length or 2**62) < (model.max_seq_length or 2**62)
        self.tokenizer = mine if cuts or mine.get_vocab() != own.get_vocab() else None
        self.model = guide.eval().requires_grad_(False)
        self.name = own.name_or_path

    def __deepcopy__(self, memo: dict[int, Any]) -> Guide:
        return self

    @torch.no_grad()
    def embed(self, columns: list[dict[str, Any]], at_once: int | None = None) -> list[Tensor]:
        """(n, g) of each column as the model gets them, so many texts at once (None: all)."""
        found = []
        for read in map(self._read, columns):
            parts = [read]
            if at_once is not None:
                parts = [
                    _create_minibatch(read, i, i + at_once)
                    for i in range(0, rows_in(read) or 0, at_once)
                ]
            found.append(torch.cat([self.model(part)["sentence_embedding"] for part in parts]))
        return found

    def _read(self, column: dict[str, Any]) -> dict[str, Any]:
        if self.tokenizer is not None:
            tokens, bounds = column["input_ids"], column.get("cu_seq_lens_q")
            texts = tokens if bounds is None else tokens[0].split(bounds.diff().tolist())
            task = {"task": column["task"]} if "task" in column else {}
            column = self.model.preprocess(
                self.tokenizer.batch_decode(texts, skip_special_tokens=True), **task
            )
        # Copies, as modules may write into what they are given: Pooling masks prompts in place.
        read = {key: x.clone() if isinstance(x, Tensor) else x for key, x in column.items()}
        return batch_to_device(read, self.model.device)
