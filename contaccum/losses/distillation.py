"""Distillation from teacher scores of positives and hard negatives, a term added to the loss.

For a query with the positive p and the hard negatives j, let s be the scores of the student, which
is the model in training, and t those of the teacher. With the temperature T, the term is the mean
over queries of

    margin_mse:  mean_j ( (s_p - s_j) - (t_p - t_j) )^2
    kl:          T^2 KL( softmax(t / T) || softmax(s / T) )

MarginMSELoss and DistillKLDivLoss of sentence-transformers compute it, from the embeddings that the
contrastive loss uses. The teacher's scores are in the data set (docs/data.md).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from sentence_transformers.sentence_transformer.losses import DistillKLDivLoss, MarginMSELoss
from torch import Tensor
from torch.nn.functional import normalize

from contaccum.data.sampling import decode
from contaccum.errors import ConfigError, check_choice


class Distillation:
    """Distillation term of the loss, ``"margin_mse"`` or ``"kl"``, times ``weight``.

    The student's scores are those of the contrastive loss: the similarity times ``scale``.
    """

    def __init__(
        self,
        kind: str,
        weight: float = 1.0,
        temperature: float = 1.0,
        similarity: str = "dot",
        scale: float = 1.0,
    ) -> None:
        loss_classes: dict[str, Callable[..., MarginMSELoss | DistillKLDivLoss]] = {
            "margin_mse": MarginMSELoss,
            "kl": partial(DistillKLDivLoss, temperature=temperature),
        }
        check_choice("distill", kind, loss_classes)
        self.kind = kind
        self.weight = weight
        self.temperature = temperature
        self.similarity = similarity
        self.scale = scale
        # The model is None, because only `compute_loss_from_embeddings` is called.
        self._loss = loss_classes[kind](None)
        self.last: Tensor | None = None  # the term of the last call, unweighted and detached

    def __call__(self, embeddings: list[Tensor], labels: Tensor | None) -> Tensor:
        """Compute the weighted term of a micro-batch.

        Args:
            embeddings: queries, positives and hard negatives, (n, d) each.
            labels: teacher scores, with or without ids; see `contaccum.data.sampling`.

        Raises:
            ConfigError: if there are no hard negatives, or if ``labels`` contains no scores.
        """
        if len(embeddings) < 3:
            raise ConfigError(
                f"distill={self.kind} needs hard negatives: add columns of hard negatives, or "
                "remove distill"
            )
        teacher_scores = decode(labels, len(embeddings)).teacher_scores
        if teacher_scores is None:
            shape = (len(embeddings[0]), len(embeddings) - 1)
            raise ConfigError(
                f"distill={self.kind} needs teacher scores {shape} as labels: see docs/data.md"
            )
        # In half precision, rounding would remove small margins between scores.
        dtype = torch.promote_types(embeddings[0].dtype, torch.float32)
        columns = [x.to(dtype) for x in embeddings]  # (n, d) each
        if self.similarity != "dot":
            columns = [normalize(x, dim=-1) for x in columns]
        # The losses of sentence-transformers use dot products, so the queries carry the scale.
        columns[0] = columns[0] * self.scale
        term = self._loss.compute_loss_from_embeddings(columns, teacher_scores.to(columns[0]))
        self.last = term.detach()
        return self.weight * term
