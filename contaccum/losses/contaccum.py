"""ContAccumLoss and CachedContAccumLoss, the public losses for sentence-transformers.

A micro-batch is what one call of the loss gets: the columns of the data set, which are anchors
(queries), positives, and hard negatives. The "features" of a column are the dict of tensors that a
sentence-transformers model takes as input. An update is one optimizer step, after one or more
micro-batches whose gradients are accumulated. For each micro-batch a loss

1. encodes the drift probe (a few training pairs, see `contaccum.losses.probe`), if it is due;
2. computes the ids of the texts, by which duplicates and known positives are masked;
3. encodes the columns, and calls `contaccum.bank.info_nce.BankedInfoNCE` for the loss, which has
   the formula. `contaccum.bank` says in which order to read on.

Letters in shapes: n pairs in the micro-batch, h hard negatives per query, d the embedding size.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, cast

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.losses.gradcache import CachedLossMixin, has_static_embedding_input
from sentence_transformers.base.losses.merged_forward import embed_columns
from sentence_transformers.sentence_transformer.losses.matryoshka import (
    CachedLossDecorator,
    ForwardDecorator,
)
from sentence_transformers.sentence_transformer.modules import Normalize
from sentence_transformers.util import cos_sim, dot_score
from torch import Tensor, nn

from contaccum.bank.ids import PositivesTable
from contaccum.bank.info_nce import BankedInfoNCE
from contaccum.data.sampling import are_text_ids
from contaccum.distributed import gather_states, rank, world_size
from contaccum.encoders.dual_encoder import SIMILARITY_NAMES
from contaccum.errors import ConfigError, check_choice, warn_once
from contaccum.losses.model_loss import ModelLoss
from contaccum.losses.probe import EncoderProbe
from contaccum.losses.text_ids import combine_ids, content_ids
from contaccum.settings import (
    DEFAULT_BANK_SIZE,
    InfoNCESettings,
    LossSettings,
    Similarity,
    select,
    takes_settings,
)

logger = logging.getLogger(__name__)

_RANK_PREFIX = "of_rank_"
"""Prefix of the keys of a bank's state, before the rank, if each rank has a bank of its own."""

CITATION = """@inproceedings{kim2024contaccum,
author={Jaehee Kim and Yukyung Lee and Pilsung Kang}, year={2024},
title={A Gradient Accumulation Method for Dense Retriever under Memory Constraint},
booktitle={Advances in Neural Information Processing Systems}, eprint={2406.12356}}"""

GRADCACHE_CITATION = """@inproceedings{gao2021scaling,
author={Luyu Gao and Yunyi Zhang and Jiawei Han and Jamie Callan}, year={2021},
title={Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup},
booktitle={Proceedings of the 6th Workshop on Representation Learning for NLP},
eprint={2101.06983}}"""


@dataclass(frozen=True, eq=False)
class _Model:
    """The first argument of a loss. Fields of the last base class come first."""

    model: SentenceTransformer


@dataclass(frozen=True, eq=False)
class LossKeywords(LossSettings, _Model):
    """Arguments of `ContAccumLoss`: settings, and what only its caller has.

    Those before KW_ONLY may be given by position, in the order of MultipleNegativesRankingLoss.
    """

    bank_size: int = DEFAULT_BANK_SIZE
    scale: float = 20.0
    similarity_fct: Callable[[Tensor, Tensor], Tensor] = cos_sim
    gather_across_devices: bool = False
    _: KW_ONLY
    pairs_per_update: int | None = None


@dataclass(frozen=True, eq=False)
class CachedLossKeywords(LossKeywords):
    """Arguments of `CachedContAccumLoss`, in the order of CachedMultipleNegativesRankingLoss."""

    gather_across_devices: bool = field(default=False, kw_only=True)
    mini_batch_size: int = 32
    mini_batch_num_tokens: int | None = None
    _: KW_ONLY
    show_progress_bar: bool = False


class ContAccumLoss(ModelLoss):
    """InfoNCE with memory banks of past queries and passages, for small batches.

    It replaces MultipleNegativesRankingLoss where memory allows only small batches: each
    micro-batch has up to ``bank_size`` passages of the bank as negatives, not only its own.

    The arguments are settings of `contaccum train`, which docs/training.md describes, and

    Args:
        model: a SentenceTransformer: one encoder for both queries and passages, or a Router with an
            encoder for each.
        scale: factor of the similarities, 1 / temperature.
        similarity_fct: ``sentence_transformers.util.cos_sim`` or ``dot_score``.
        gather_across_devices: True: all ranks share one bank, and the loss is that of the pairs of
            all ranks. False: each rank has its own bank.
        pairs_per_update: number of training pairs per update, over which the gradients of passages
            are centred (docs/drift.md). None centres each micro-batch by itself.

    Raises:
        ConfigError (a ValueError): for settings out of range, and for a model that compares
            embeddings by another similarity than cosine and dot product.

    Inputs:
        (anchor, positive) pairs or (anchor, positive, negative_1, ..., negative_h) tuples;
        labels: None, or ids of the texts, int64 (n, 2 + h), hashes from
            `contaccum.data.sampling.text_ids`.

    Relations:
        - With ``bank_size=0`` and a batch without duplicates, the loss equals
          `MultipleNegativesRankingLoss` with the same ``scale``. Other directions than from
          queries to documents, and hardness weights, are not supported.
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

    @takes_settings(LossKeywords)
    def __init__(self, keywords: LossKeywords) -> None:
        similarities: dict[object, Similarity] = {cos_sim: "cos", dot_score: "dot"}
        if keywords.similarity_fct not in similarities:
            raise ConfigError(
                f"similarity_fct={keywords.similarity_fct} is not supported: use cos_sim or "
                "dot_score of sentence_transformers.util"
            )
        super().__init__()
        settings = InfoNCESettings(
            temperature=1.0 / keywords.scale,
            similarity=similarities[keywords.similarity_fct],
            **select(keywords, InfoNCESettings),
        )
        self.settings = settings
        # For evaluation, whose loss must not depend on what was trained last. Without a bank, there
        # is no bank of queries either.
        settings_without_bank = dataclasses.replace(settings, bank_size=0, query_bank_size=None)
        self._without_bank = BankedInfoNCE.from_settings(settings_without_bank)
        self._positives: PositivesTable | None = None
        self.scale = keywords.scale
        self.similarity_fct = keywords.similarity_fct
        self.model = keywords.model  # the last line, because it calls `start_with_model`

    def start_with_model(self, model: SentenceTransformer) -> None:
        """Make empty banks and a new probe.

        Raises:
            ConfigError: for a model that compares embeddings neither by cosine nor by dot product.
        """
        model_similarity = getattr(model, "similarity_fn_name", None)
        name = "the model's similarity_fn_name (similarity in a config)"
        check_choice(name, model_similarity, (None, *SIMILARITY_NAMES.values()))
        loss_similarity = SIMILARITY_NAMES[self.settings.similarity]
        if model_similarity not in (None, loss_similarity):
            # Normalised embeddings have the same order by either similarity.
            if not any(isinstance(module, Normalize) for module in model.modules()):
                logger.warning(
                    f"the loss trains the similarity {loss_similarity!r}, but the model compares "
                    f"embeddings by {model_similarity!r}: set similarity_fct of the loss or "
                    "similarity_fn_name of the model"
                )
        # One BankedInfoNCE per embedding size, for training; the key is the size.
        self.info_nces: nn.ModuleDict = nn.ModuleDict()
        # If drift compensation moves banked embeddings along with the mean embedding, the probe
        # measures how far the mean has moved.
        self._probe = EncoderProbe(
            model,
            is_used=self.settings.drift_compensation == "auto",
            gathers=self.settings.gather_across_devices,
        )
        self._pairs_in_update: int | None = None
        self._has_seen_ids = False

    # A micro-step ---------------------------------------------------------------------------------

    def forward(
        self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None
    ) -> Tensor:
        """Compute the loss of a micro-batch of tokenised columns.

        Args:
            sentence_features: the features of each column: anchors, positives and any number of
                columns of hard negatives.
            labels: see "Inputs" of the class. Two texts are duplicates if their ids there are
                equal, or if the hashes of their tokens are equal.

        Raises:
            ValueError: for fewer than two columns, inside AdaptiveLayerLoss or Matryoshka2dLoss,
                and for labels that look like ids of texts but are small integers.
        """
        features = list(sentence_features)
        self._require_columns(features)
        self._encode_probe_if_due(features)
        ids = self._compute_ids(features, labels)
        embeddings = embed_columns(self.model, features)  # (n, d) of each column
        return self.compute_loss_from_embeddings(embeddings, ids)

    def compute_loss_from_embeddings(
        self,
        embeddings: list[Tensor],
        ids: Sequence[Tensor | None] | None = None,
    ) -> Tensor:
        """Compute the loss of embedded columns.

        The drift probe is not encoded here: it needs texts, and only embeddings are passed.

        Args:
            embeddings: anchors, positives and any number of hard negatives, (n, d) each.
            ids: ids of the texts of each column: int64 (n, 2), a label id and a hash of the tokens,
                from `combine_ids`; or (n,), the hashes of `content_ids` alone, by which no
                positives of `set_known_positives` are found. Without ids no duplicates are masked.
        """
        if ids is None:
            ids = [None] * len(embeddings)
        loss_fn = self._without_bank
        if self._is_training:
            loss_fn = self._get_or_make_info_nce(embeddings[0].shape[-1])
        # BankedInfoNCE takes queries, positives and negatives, then the ids of each of the three.
        columns = _stack_negatives(embeddings)  # (n, d), (n, d), (n, h, d)
        ids_of_columns = _stack_negatives(ids)  # (n, 2), (n, 2), (n, h, 2)
        return loss_fn(*columns, *ids_of_columns)

    def _require_columns(self, features: list[dict[str, Any]]) -> None:
        if len(features) < 2:
            raise ValueError(
                f"{type(self).__name__} needs (anchor, positive, ...) columns, got {len(features)}"
            )
        # The first module is the Transformer, or in a wrapper (DDP) the model itself.
        first_module = next(self.model.children(), self.model)
        if type(first_module.forward).__module__.endswith(".adaptive_layer"):  # a decorator
            raise ConfigError(
                f"AdaptiveLayerLoss and Matryoshka2dLoss call a loss once per layer, which would "
                f"fill the bank of {type(self).__name__} with copies: use MatryoshkaLoss"
            )

    def _encode_probe_if_due(self, features: list[dict[str, Any]]) -> None:
        """Encode a few fixed texts again if it is time, by which each loss measures its drift."""
        if not self._uses_bank or self._is_repeated_call:
            return
        clock = None if self.info_nce is None else self.info_nce.clock
        if self._probe.encode_if_due(features, clock, self._is_inside_matryoshka):
            for dim, loss_fn in self._get_info_nces().items():
                self._probe.pass_to_loss(loss_fn, dim)

    def _compute_ids(
        self, features: list[dict[str, Any]], labels: Tensor | None
    ) -> list[Tensor | None]:
        """Compute for each column the ids of its texts, int64 (n, 2); see `combine_ids`."""
        label_ids = self._require_text_ids(labels, len(features))
        ids_of_columns: list[Tensor | None] = []
        for index, column in enumerate(features):
            column_ids = None if label_ids is None else label_ids[:, index]  # (n,)
            hashes = content_ids(column)
            if hashes is None and self._uses_bank:
                warn_once(
                    "copies of a text are not masked, and old bank entries are not retired: that "
                    "needs texts, and a column has images or sounds"
                )
            ids_of_columns.append(combine_ids(column_ids, hashes))
        return ids_of_columns

    def _require_text_ids(self, labels: Tensor | None, num_columns: int) -> Tensor | None:
        """Return labels that are ids of texts, int64 (n, columns); None for other labels."""
        name = type(self).__name__
        if labels is None:
            return None
        if labels.dtype != torch.int64 or labels.shape[1:] != (num_columns,):
            warn_once(f"{name} does not use the label or score column of the data: remove it")
            return None
        if not self._has_seen_ids:
            # Only once, because reading the result stops a GPU's queue.
            if not are_text_ids(labels):
                raise ConfigError(
                    f"{name}: the label column has small integers where ids of the texts are "
                    "expected (contaccum.data.sampling.text_ids): remove or rename the column, for "
                    'example with dataset.remove_columns("label")'
                )
            self._has_seen_ids = True
        return labels

    def _get_or_make_info_nce(self, dim: int) -> BankedInfoNCE:
        """Return the `BankedInfoNCE` of an embedding size; the first call makes it."""
        loss_fn = self._get_info_nces().get(dim)
        if loss_fn is None:
            loss_fn = BankedInfoNCE.from_settings(self.settings)
            loss_fn.positives = self._positives
            if self._pairs_in_update is not None:
                loss_fn.begin_update(self._pairs_in_update)
            self.info_nces[str(dim)] = loss_fn
            self._probe.pass_to_loss(loss_fn, dim)
        loss_fn.compensation.expects_probe = self._probe.parts is not None
        return loss_fn

    @property
    def _is_training(self) -> bool:
        # Trainers evaluate without gradients but leave the loss in training mode, so the mode alone
        # is not enough.
        return self.training and torch.is_grad_enabled()

    @property
    def _uses_bank(self) -> bool:
        return self._is_training and self.settings.bank_size > 0

    # MatryoshkaLoss calls the loss on the same micro-batch once per embedding size. It has then
    # replaced a method by a decorator that cuts the embeddings to the size: the forward method of
    # the model, which keeps the embeddings of the first call in a cache, or `calculate_loss` of a
    # loss with a gradient cache.

    @property
    def _is_inside_matryoshka(self) -> bool:
        calculate_loss = vars(self).get("calculate_loss")
        return isinstance(self.model.forward, ForwardDecorator) or isinstance(
            calculate_loss, CachedLossDecorator
        )

    @property
    def _is_repeated_call(self) -> bool:
        """True if the embeddings of this micro-batch are in MatryoshkaLoss's cache already."""
        forward: object = self.model.forward
        return isinstance(forward, ForwardDecorator) and bool(forward.cache)

    # The data and the update ----------------------------------------------------------------------

    def set_known_positives(self, query_ids: Tensor, passage_ids: Tensor) -> None:
        """Set pairs of query and passage that are never negatives of each other.

        `bank_state_dict` does not contain these pairs, so they must be set again after a restart.

        Args:
            query_ids, passage_ids: int64 (p,) each, the ids that ``labels`` of `forward` contains.
        """
        self._positives = PositivesTable(query_ids, passage_ids)
        self._without_bank.positives = self._positives
        for loss_fn in self._get_info_nces().values():
            loss_fn.positives = self._positives

    def begin_update(self, pairs: int) -> None:
        """Set the number of pairs until the next optimizer step; see `BankedInfoNCE`."""
        self._pairs_in_update = pairs
        for loss_fn in self._get_info_nces().values():
            loss_fn.begin_update(pairs)

    # The loss of an embedding size, and its diagnostics -------------------------------------------

    def _get_info_nces(self) -> dict[int, BankedInfoNCE]:
        """Return the `BankedInfoNCE` of each embedding size."""
        items = self.info_nces.items()
        return {int(dim): cast(BankedInfoNCE, loss_fn) for dim, loss_fn in items}

    @property
    def info_nce(self) -> BankedInfoNCE | None:
        """The `BankedInfoNCE` of the largest embedding size; None before the first call."""
        loss_fns = self._get_info_nces()
        if not loss_fns:
            return None
        return loss_fns[max(loss_fns)]

    @property
    def last(self) -> dict[str, Any]:
        """Diagnostics of the last call in training, of the largest embedding size.

        See `BankedInfoNCE.last`.
        """
        return {} if self.info_nce is None else dict(self.info_nce.last)

    # The state ------------------------------------------------------------------------------------

    def bank_state_dict(self, keep: bool = True) -> dict[str, Tensor]:
        """Return the banks, the drift statistics and the probe's texts, for a checkpoint.

        All ranks must call this method together. The state of a bank that the ranks share can be
        loaded by any number of ranks. If each rank has its own bank, the banks are gathered into
        one state, which can be loaded by the same number of ranks only.

        Args:
            keep: False to return an empty dict, on ranks that do not save the checkpoint.
        """
        state = dict(self.info_nces.state_dict())
        if state:
            state.update(self._probe.state_dict())
        if world_size() > 1 and not self._is_shared:
            states_of_ranks = gather_states(state)
            state = {}
            for index, state_of_rank in enumerate(states_of_ranks):
                for key, value in state_of_rank.items():
                    state[f"{_RANK_PREFIX}{index}.{key}"] = value
        return state if keep else {}

    def load_bank_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore what `bank_state_dict` returned, on every rank.

        Raises:
            ConfigError: if the state was saved with other settings; or if it holds the banks of
                several ranks, and there is another number of ranks now, or they share one bank.
        """
        rank_prefixes = {key.split(".", 1)[0] for key in state if key.startswith(_RANK_PREFIX)}
        if rank_prefixes:
            num_saved = len(rank_prefixes)
            if self._is_shared or num_saved != world_size():
                raise ConfigError(
                    f"this state holds the banks of {num_saved} ranks: resume with {num_saved} "
                    "ranks and gather_across_devices=False, or start a new run from the saved "
                    "weights"
                )
            prefix = f"{_RANK_PREFIX}{rank()}."
            names = [name for name in state if name.startswith(prefix)]
            state = {name.removeprefix(prefix): state[name] for name in names}
        state = self._probe.load_state_dict(state)
        # The keys are "<embedding size>.<name>".
        dims = {int(key.split(".", 1)[0]) for key in state}
        for dim in self._get_info_nces().keys() - dims:
            del self.info_nces[str(dim)]
        for dim in dims:
            self._get_or_make_info_nce(dim)
        self.info_nces.load_state_dict(state)

    @property
    def _is_shared(self) -> bool:
        """True if all ranks hold the same bank."""
        return self.settings.gather_across_devices and world_size() > 1

    # The model card -------------------------------------------------------------------------------

    def get_config_dict(self) -> dict[str, Any]:
        """Return the settings that sentence-transformers writes into the model card."""
        config: dict[str, Any] = {
            "scale": self.scale,
            "similarity_fct": self.similarity_fct.__name__,
        }
        for name, value in dataclasses.asdict(self.settings).items():
            if name not in ("temperature", "similarity"):
                config[name] = value
        return config

    @property
    def citation(self) -> str:
        """The citation of the paper, for the model card."""
        return CITATION


class CachedContAccumLoss(CachedLossMixin, ContAccumLoss):
    """`ContAccumLoss` for batches that are larger than memory allows, by a gradient cache.

    It adds a bank to CachedMultipleNegativesRankingLoss, as `ContAccumLoss` adds one to
    MultipleNegativesRankingLoss. A gradient cache (GradCache, arXiv 2101.06983) needs memory for
    the activations of one mini-batch only:

    1. Encode the whole batch without gradients, ``mini_batch_size`` texts at a time.
    2. Compute the loss, with the bank, and its gradients with respect to the embeddings.
    3. In backward, encode each mini-batch again, and propagate those gradients through the model.

    Args:
        mini_batch_size: number of texts that are encoded at once.
        mini_batch_num_tokens: maximum number of tokens that are encoded at once, in place of
            ``mini_batch_size``.
        show_progress_bar: True to show the progress over mini-batches.
        model, bank_size, ...: as in `ContAccumLoss`.

    Raises:
        ConfigError (a ValueError): also for a model with a StaticEmbedding, whose texts cannot be
            split into mini-batches.

    Relations:
        - With ``bank_size=0`` and a batch without duplicates, the loss equals
          `CachedMultipleNegativesRankingLoss`. The other relations are those of `ContAccumLoss`.

    Example:
        ```python
        loss = CachedContAccumLoss(model, bank_size=4096, mini_batch_size=8)
        args = SentenceTransformerTrainingArguments(per_device_train_batch_size=128)
        ```
    """

    @takes_settings(CachedLossKeywords)
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
        """Compute the loss of a batch of tokenised columns; see `ContAccumLoss.forward`."""
        features = list(sentence_features)
        self._require_columns(features)
        self._encode_probe_if_due(features)
        # `forward_cached` of CachedLossMixin passes its second argument to `calculate_loss`
        # unchanged, so ids can take the place of labels.
        ids: Any = self._compute_ids(features, labels)
        return self.forward_cached(features, ids)

    def embed_minibatch(self, *args: Any, **kwargs: Any) -> Any:
        """Embed a mini-batch as CachedLossMixin does, and cast the result to at least float32.

        The cached gradients of step 2 have the dtype of these embeddings. In float16 small
        gradients would underflow, because a gradient scaler multiplies them only in step 3.
        """
        embeddings, random_state = super().embed_minibatch(*args, **kwargs)
        dtype = torch.promote_types(embeddings.dtype, torch.float32)
        return embeddings.to(dtype), random_state

    def calculate_loss(
        self, reps: list[list[Tensor]], labels: Any = None, *, with_backward: bool = False
    ) -> Tensor:
        """Compute the detached loss of an encoded batch, and set ``grad`` in ``reps`` if asked to.

        CachedLossMixin calls this method, and defines the names of its arguments: ``reps`` has for
        each column the embeddings of its mini-batches, (mini-batch, d) each, and ``labels`` are the
        ids of the texts of each column, or None.
        """
        embeddings = [torch.cat(mini_batches) for mini_batches in reps]  # (n, d) of each column
        loss = self.compute_loss_from_embeddings(embeddings, labels)
        if with_backward:
            all_mini_batches = list(itertools.chain.from_iterable(reps))
            loss.backward(inputs=all_mini_batches)
        return loss.detach()


def _stack_negatives(columns: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return anchors, positives, and the h columns of negatives, (n, ...) each, as (n, h, ...).

    The columns are embeddings or ids. The last result is None if h is 0, or if the ids of a column
    are missing (None).
    """
    negatives = [column for column in columns[2:] if column is not None]
    stacked_negatives = None
    if negatives and len(negatives) == len(columns) - 2:
        stacked_negatives = torch.stack(negatives, dim=1)
    return [*columns[:2], stacked_negatives]
