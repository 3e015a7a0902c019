"""What a student learns from a teacher's scores of a positive and its hard negatives, beside the contrastive loss.

The losses are sentence-transformers' MarginMSELoss and DistillKLDivLoss, over embeddings that are
there already. Scores come with the data set (docs/data.md); nothing here knows a bank.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from sentence_transformers.sentence_transformer.losses import DistillKLDivLoss, MarginMSELoss
from torch import Tensor
from torch.nn.functional import normalize

from contaccum.data.labels import decode
from contaccum.errors import ConfigError, check_choice


def split_labels(labels: Tensor | None, columns: int) -> tuple[Tensor | None, Tensor | None]:
    """Ids of all texts, int64 (n, columns), and a teacher's scores, (n, columns - 1), of a batch's ``labels``.

    Labels are either, or int64 (n, 2 columns - 1): ids, then scores as the bits of float32. None
    for what is not there.
    """
    decoded = decode(labels, columns)
    return decoded.text_ids, decoded.teacher_scores


class Distillation:
    """A distillation term; the student's scores are those of the contrastive loss, similarity times ``scale``.

    Args:
        kind: ``"margin_mse"``: the mean squared error of each margin between positive and negative;
            ``"kl"``: the divergence of the student's softmax over positive and negatives from the
                teacher's.
        weight: of the term.
        temperature: of ``"kl"``: divides both sides' scores; the divergence is multiplied by its
            square.
        similarity, scale: ``"cos"`` or ``"dot"``, and what it is multiplied by.

    Raises:
        ConfigError: for settings that cannot work.
    """

    def __init__(
        self,
        kind: str,
        weight: float = 1.0,
        temperature: float = 1.0,
        similarity: str = "dot",
        scale: float = 1.0,
    ) -> None:
        kinds: Any = {
            "margin_mse": MarginMSELoss,
            "kl": partial(DistillKLDivLoss, temperature=temperature),
        }
        check_choice("distill", kind, kinds)
        for name, value in (("distill_weight", weight), ("distill_temperature", temperature)):
            if not 0 < value < math.inf:
                raise ConfigError(f"{name} must be a positive number, got {value!r}")
        if kind != "kl" and temperature != 1:
            raise ConfigError(
                f"distill_temperature={temperature} with distill={kind}: it is for kl. Drop it"
            )
        self.kind, self.weight, self.temperature = kind, weight, temperature
        self.similarity, self.scale = similarity, scale
        self._loss = kinds[kind](None)  # no model, as embeddings are given
        self.last: Tensor | None = None  # the term of the last call, before its weight

    def __call__(self, embeddings: list[Tensor], labels: Tensor | None) -> Tensor:
        """Compute the weighted term of a micro-batch.

        Args:
            embeddings: queries, positives and hard negatives, (n, d) each.

        Raises `ConfigError` where there are no hard negatives, or no scores in ``labels``; see
        `split_labels`.
        """
        if len(embeddings) < 3:
            raise ConfigError(
                f"distill={self.kind} needs hard negatives: add columns of them, or drop distill"
            )
        _, scores = split_labels(labels, len(embeddings))
        if scores is None:
            what = "none" if labels is None else f"labels of shape {tuple(labels.shape)}"
            expected = f"({len(embeddings[0])}, {len(embeddings) - 1})"
            raise ConfigError(
                f"distill={self.kind} needs teacher scores {expected} as labels, got {what}: see docs/data.md"
            )
        dtype = torch.promote_types(embeddings[0].dtype, torch.float32)
        columns = [
            x.to(dtype) if self.similarity == "dot" else normalize(x.to(dtype), dim=-1)
            for x in embeddings
        ]
        columns[0] = columns[0] * self.scale
        term = self._loss.compute_loss_from_embeddings(columns, scores.to(columns[0]))
        self.last = term.detach()
        return self.weight * term
