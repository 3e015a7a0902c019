"""ContAccumLoss and CachedContAccumLoss, the public losses for sentence-transformers.

Memory banks hold the embeddings of recent training pairs, without gradients, as further negatives
and further queries of the loss. A micro-batch is what one call of the loss gets. An update is one
optimizer step, after one or more micro-batches whose gradients are accumulated.
`CachedContAccumLoss` encodes a micro-batch in smaller mini-batches.

This module has the constructors and the gradient cache. `contaccum.losses.banked_text_loss`
computes the loss from texts. `contaccum.bank.info_nce` computes it from embeddings; it has the
formula and documents the settings.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.losses.gradcache import CachedLossMixin, has_static_embedding_input
from sentence_transformers.util import cos_sim, dot_score
from torch import Tensor

from contaccum.errors import ConfigError
from contaccum.losses.banked_text_loss import BankedTextLoss
from contaccum.losses.distillation import Distillation
from contaccum.losses.guide import Guide
from contaccum.settings import (
    DEFAULT_BANK_SIZE,
    DistillationSettings,
    InfoNCESettings,
    LossSettings,
    Similarity,
    select,
    takes_settings,
)

CITATION = """@inproceedings{kim2024contaccum,
author={Jaehee Kim and Yukyung Lee and Pilsung Kang}, year={2024},
title={A Gradient Accumulation Method for Dense Retriever under Memory Constraint},
booktitle={Advances in Neural Information Processing Systems}, eprint={2406.12356}}"""

GRADCACHE_CITATION = """@inproceedings{gao2021scaling,
author={Luyu Gao and Yunyi Zhang and Jiawei Han and Jamie Callan}, year={2021},
title={Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup},
booktitle={Proceedings of the 6th Workshop on Representation Learning for NLP},
eprint={2101.06983}}"""


_OF_THE_REPLACED_LOSS = (
    "For directions, partition_mode and hardness weights, use MultipleNegativesRankingLoss"
)


@dataclass(frozen=True, eq=False)
class _Model:
    """The first argument of a loss. Fields of the last base class come first."""

    model: SentenceTransformer


@dataclass(frozen=True, eq=False)
class LossKeywords(DistillationSettings, LossSettings, _Model):
    """Arguments of `ContAccumLoss`, which documents them: settings, and what only its caller has.

    Those before KW_ONLY may be given by position, in the order of MultipleNegativesRankingLoss.
    """

    bank_size: int = DEFAULT_BANK_SIZE
    scale: float = 20.0
    similarity_fct: Callable[[Tensor, Tensor], Tensor] = cos_sim
    gather_across_devices: bool = False
    _: KW_ONLY
    guide: SentenceTransformer | None = None
    pairs_per_update: int | None = None


@dataclass(frozen=True, eq=False)
class CachedLossKeywords(LossKeywords):
    """Arguments of `CachedContAccumLoss`, in the order of CachedMultipleNegativesRankingLoss."""

    gather_across_devices: bool = field(default=False, kw_only=True)
    mini_batch_size: int = 32
    mini_batch_num_tokens: int | None = None
    _: KW_ONLY
    show_progress_bar: bool = False


class ContAccumLoss(BankedTextLoss):
    """InfoNCE with memory banks of past queries and passages, for small batches.

    It replaces MultipleNegativesRankingLoss where memory allows only small batches: each
    micro-batch has up to ``bank_size`` passages of the bank as negatives, not only its own.

    Args:
        model: a SentenceTransformer: one encoder for both queries and passages, or a Router with an
            encoder for each.
        bank_size: maximum number of past pairs in the banks; 0 trains without banks. With several
            ranks it is the size of the shared bank, or that of each rank's own bank. By default,
            the hard negatives of these pairs are in the bank too.
        scale: factor of the similarities, 1 / temperature.
        similarity_fct: ``sentence_transformers.util.cos_sim`` or ``dot_score``.
        gather_across_devices: True: all ranks share one bank, and the loss is that of the pairs of
            all ranks. False: each rank has its own bank.
        distill: ``"margin_mse"`` or ``"kl"`` adds a distillation loss in training, from the teacher
            scores in ``labels``; None adds nothing.
        distill_weight, distill_temperature: factor and temperature of the distillation loss; see
            `contaccum.losses.distillation.Distillation`.
        guide: a frozen SentenceTransformer that finds false negatives, as in GISTEmbedLoss.
            ``margin`` and ``margin_strategy`` of GISTEmbedLoss are called ``guide_margin`` and
            ``guide_margin_strategy`` here.
        query_bank_size: None for ``bank_size``, 0 for a passage bank alone.
        mask_duplicates: exclude negatives that are the positive once more; by the hashes of their
            tokens (`contaccum.losses.text_ids.content_ids`) and the ids in ``labels``.
        drift_compensation: what is done about banked embeddings that become outdated. ``"auto"``
            corrects them, and retires those that have drifted too far.
        center_gradients: ``"auto"`` subtracts the mean gradient of the passages while outdated
            embeddings are in use.
        pairs_per_update: number of training pairs per update, for ``center_gradients``. None
            centres each micro-batch by itself.
        normalize_by, bank_hard_negatives, bank_weight, false_negative_margin, guide_margin,
        guide_margin_strategy: see `contaccum.bank.info_nce.BankedInfoNCE`, which describes all
            settings in full.

    Raises:
        ConfigError (a ValueError): for settings out of range, and for a model that compares
            embeddings by another similarity than cosine and dot product.

    Inputs:
        (anchor, positive) pairs or (anchor, positive, negative_1, ..., negative_h) tuples;
        labels: None; or ids of the texts, integers; or a teacher's scores of the positive and the
            h negatives, (micro-batch, 1 + h); or ids, then scores. See
            `contaccum.data.sampling`.

    Relations:
        - With ``bank_size=0`` and a batch without duplicates, the loss equals
          `MultipleNegativesRankingLoss` with the same ``scale``. Other directions than from
          queries to documents, and hardness weights, are not supported.
        - With a ``guide`` as well, it equals `GISTEmbedLoss` with the temperature 1 / ``scale``,
          ``contrast_anchors=False`` and ``contrast_positives=False``.
        - In training the loss is a sum over banked queries too: a trainer's log shows many times
          the loss of `MultipleNegativesRankingLoss`, and it grows while the bank fills.
          ``loss.last["local_loss"]`` is the mean over the queries of the last micro-batch.
        - In eval mode or without gradients, the loss uses the batch alone, without the bank.
        - It works inside `MatryoshkaLoss`, where each dimension has a bank of its own. Leave
          ``n_dims_per_step`` of `MatryoshkaLoss` at -1. Otherwise it skips some dimensions in some
          micro-batches, and their gradients are not centred over the whole update.
        - A bank belongs to a model: if the trainer replaces the model (`hyperparameter_search`,
          ``model_init``), the loss starts anew, with empty banks.
        - It does not work inside ``AdaptiveLayerLoss`` and ``Matryoshka2dLoss``, which call a loss
          once per layer on the same micro-batch.
        - A loss of your own may call `compute_loss_from_embeddings`. `ContAccumLoss` then sees no
          texts, so pass their ids, and call ``loss.info_nce.observe_probe`` after updates.
          Otherwise the drift of the encoder is not measured (docs/drift.md).

    Example:
        ```python
        loss = ContAccumLoss(model, bank_size=512)
        args = SentenceTransformerTrainingArguments(
            per_device_train_batch_size=8, gradient_accumulation_steps=16
        )
        trainer = SentenceTransformerTrainer(
            model=model, args=args, train_dataset=train_dataset, loss=loss
        )
        trainer.train()
        ```
    """

    @takes_settings(LossKeywords, _OF_THE_REPLACED_LOSS)
    def __init__(self, keywords: LossKeywords) -> None:
        similarities: dict[object, Similarity] = {cos_sim: "cos", dot_score: "dot"}
        if keywords.similarity_fct not in similarities:
            raise ConfigError(
                f"similarity_fct={keywords.similarity_fct} is not supported: use cos_sim or "
                "dot_score of sentence_transformers.util"
            )
        settings = InfoNCESettings(
            temperature=1.0 / keywords.scale,
            similarity=similarities[keywords.similarity_fct],
            **select(keywords, InfoNCESettings),
        )
        distillation = None
        if keywords.distill is not None:
            distillation = Distillation(
                keywords.distill,
                keywords.distill_weight,
                keywords.distill_temperature,
                settings.similarity,
                keywords.scale,
            )
        guide = None
        if keywords.guide is not None:
            guide = Guide(keywords.model, keywords.guide)
        super().__init__(keywords.model, settings, distillation, guide)
        self.scale = keywords.scale
        self.similarity_fct = keywords.similarity_fct

    def get_config_dict(self) -> dict[str, Any]:
        """Return the settings that sentence-transformers writes into the model card."""
        config: dict[str, Any] = {
            "scale": self.scale,
            "similarity_fct": self.similarity_fct.__name__,
        }
        for name, value in dataclasses.asdict(self.settings).items():
            if name not in ("temperature", "similarity"):
                config[name] = value
        if self.distillation is not None:
            config["distill"] = self.distillation.kind
            config["distill_weight"] = self.distillation.weight
            config["distill_temperature"] = self.distillation.temperature
        if self.guide is not None:
            config["guide"] = self.guide.name
        return config

    @property
    def citation(self) -> str:
        """The citation of the paper, for the model card."""
        return CITATION


class CachedContAccumLoss(CachedLossMixin, ContAccumLoss):
    """`ContAccumLoss` for batches that are larger than memory allows, by a gradient cache.

    Every pair has the other pairs of a large batch, and the bank, as negatives.

    It adds a bank to CachedMultipleNegativesRankingLoss, as `ContAccumLoss` adds one to
    MultipleNegativesRankingLoss. A gradient cache (GradCache, arXiv 2101.06983) needs memory for
    the activations of one mini-batch only:

    1. Encode the whole batch without gradients, ``mini_batch_size`` texts at a time.
    2. Compute the loss, and its gradients with respect to the embeddings.
    3. In backward, encode each mini-batch again, and propagate those gradients through the model.

    The bank adds negatives to step 2, but no activations.

    Args:
        mini_batch_size: number of texts that are encoded at once.
        mini_batch_num_tokens: maximum number of tokens that are encoded at once. If it is set,
            ``mini_batch_size`` limits only what the guide encodes at once.
        show_progress_bar: True to show the progress over mini-batches.
        model, bank_size, ...: as in `ContAccumLoss`.

    Raises:
        ConfigError (a ValueError): for settings out of range, and for a model with a
            StaticEmbedding, whose texts cannot be split into mini-batches.

    Relations:
        - With ``bank_size=0`` and a batch without duplicates, the loss equals
          `CachedMultipleNegativesRankingLoss`. The other relations are those of `ContAccumLoss`.

    Example:
        ```python
        loss = CachedContAccumLoss(model, bank_size=4096, mini_batch_size=8)
        args = SentenceTransformerTrainingArguments(per_device_train_batch_size=128)
        trainer = SentenceTransformerTrainer(
            model=model, args=args, train_dataset=train_dataset, loss=loss
        )
        trainer.train()
        ```
    """

    @takes_settings(CachedLossKeywords, _OF_THE_REPLACED_LOSS)
    def __init__(self, keywords: CachedLossKeywords) -> None:
        super().__init__(**select(keywords, LossKeywords))
        if has_static_embedding_input(keywords.model):
            raise ConfigError(
                "CachedContAccumLoss cannot split the texts of a StaticEmbedding into "
                "mini-batches: use ContAccumLoss"
            )
        self.mini_batch_size = keywords.mini_batch_size
        self.mini_batch_num_tokens = keywords.mini_batch_num_tokens
        self.show_progress_bar = keywords.show_progress_bar

    def get_config_dict(self) -> dict[str, Any]:
        """Return the settings that sentence-transformers writes into the model card."""
        config = super().get_config_dict()
        config["mini_batch_size"] = self.mini_batch_size
        config["mini_batch_num_tokens"] = self.mini_batch_num_tokens
        return config

    @property
    def citation(self) -> str:
        """The citations of the paper and of GradCache, for the model card."""
        return f"{CITATION}\n\n{GRADCACHE_CITATION}"

    def forward(
        self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None
    ) -> Tensor:
        """Compute the loss of a batch of tokenised columns; see `BankedTextLoss.forward`."""
        features = list(sentence_features)
        text_ids = self._encode_probe_and_compute_ids(features, labels)
        guide_embeddings = self._compute_guide_embeddings(features, self.mini_batch_size)
        # `forward_cached` of CachedLossMixin calls `calculate_loss` and passes on its second
        # argument unchanged, so a tuple can carry more than labels.
        loss_inputs: Any = (labels, text_ids, guide_embeddings)
        return self.forward_cached(features, loss_inputs)

    def embed_minibatch(self, *args: Any, **kwargs: Any) -> Any:
        """Embed a mini-batch, and cast the result to at least float32.

        Arguments and result are those of CachedLossMixin. The cached gradients of step 2 have the
        dtype of these embeddings. In float16 small gradients would underflow, because a gradient
        scaler multiplies them only in step 3.
        """
        embeddings, random_state = super().embed_minibatch(*args, **kwargs)
        dtype = torch.promote_types(embeddings.dtype, torch.float32)
        return embeddings.to(dtype), random_state

    def calculate_loss(
        self, reps: list[list[Tensor]], labels: Any = None, *, with_backward: bool = False
    ) -> Tensor:
        """Compute the loss of an encoded batch; the result is detached.

        CachedLossMixin calls this method, and defines the names of its arguments.

        Args:
            reps: for each column the embeddings of its mini-batches, (mini-batch, d) each.
            labels: the tuple that `forward` passes (labels, text ids, guide embeddings), or None.
            with_backward: True to set ``grad`` of the tensors in ``reps``.
        """
        embeddings = [torch.cat(mini_batches) for mini_batches in reps]
        loss_inputs: tuple[Any, ...] = ()
        if labels is not None:
            loss_inputs = labels
        loss = self.compute_loss_from_embeddings(embeddings, *loss_inputs)
        if with_backward:
            all_mini_batches = list(itertools.chain.from_iterable(reps))
            loss.backward(inputs=all_mini_batches)
        return loss.detach()
