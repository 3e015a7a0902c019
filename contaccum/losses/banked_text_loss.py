"""BankedTextLoss: the loss of a micro-batch of tokenised columns, with a memory bank.

The columns are those of the data set: anchors (queries), positives, and hard negatives. The
"features" of a column are the dict of tensors that a sentence-transformers model takes as input,
such as ``input_ids`` and ``attention_mask``. A micro-batch is what one call of the loss gets; an
update is one optimizer step, after one or more micro-batches. The bank holds embeddings of earlier
micro-batches as further negatives. For each micro-batch BankedTextLoss

1. encodes the drift probe, if it is due. The probe is a few training pairs that are encoded again
   and again, to measure how much the encoder has changed since the bank was filled;
2. computes the ids of the texts, by which duplicates and known positives are masked;
3. encodes the columns, and calls `contaccum.bank.info_nce.BankedInfoNCE` for the loss.

The public losses, ContAccumLoss and CachedContAccumLoss, are in `contaccum.losses.contaccum`.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.losses.merged_forward import embed_columns
from sentence_transformers.sentence_transformer.losses.adaptive_layer import (
    ForwardDecorator as LayerForwardDecorator,
)
from sentence_transformers.sentence_transformer.losses.adaptive_layer import (
    TransformerDecorator as LayerDecorator,
)
from sentence_transformers.sentence_transformer.losses.matryoshka import (
    CachedLossDecorator,
    ForwardDecorator,
)
from sentence_transformers.sentence_transformer.modules import Normalize
from torch import Tensor, nn

from contaccum.bank.info_nce import BankedInfoNCE
from contaccum.bank.logits import PositivesTable
from contaccum.data.sampling import are_text_ids, decode
from contaccum.distributed import world_size
from contaccum.encoders.dual_encoder import SIMILARITY_NAMES
from contaccum.errors import ConfigError, check_choice
from contaccum.losses.bank_states import gather_bank_states, select_bank_state
from contaccum.losses.distillation import Distillation
from contaccum.losses.guide import Guide
from contaccum.losses.model_loss import ModelLoss
from contaccum.losses.probe import EncoderProbe
from contaccum.losses.text_ids import combine_ids, content_ids
from contaccum.settings import InfoNCESettings

logger = logging.getLogger(__name__)


class BankedTextLoss(ModelLoss):
    """`BankedInfoNCE` over texts, with one bank for each embedding size.

    There are several embedding sizes only inside MatryoshkaLoss. In evaluation, that is in eval
    mode or without gradients, the loss uses the micro-batch alone, without bank and distillation.
    If another model is assigned to ``model``, the loss starts anew: with empty banks, and without
    measurements of drift.

    Args:
        model: the encoder of the columns.
        settings: the settings of the loss.
        distillation: a distillation term that is added in training, or None.
        guide: a guide model that finds false negatives, or None.
    """

    def __init__(
        self,
        model: SentenceTransformer,
        settings: InfoNCESettings,
        distillation: Distillation | None = None,
        guide: Guide | None = None,
    ) -> None:
        super().__init__()
        self.settings = settings
        self.distillation = distillation
        self.guide = guide
        # For evaluation. Without a bank, there is no bank of queries either.
        settings_without_bank = dataclasses.replace(settings, bank_size=0, query_bank_size=None)
        self._without_bank = BankedInfoNCE.from_settings(settings_without_bank)
        self._positives: PositivesTable | None = None
        self._logged_warnings: set[str] = set()
        self.model = model

    def start_with_model(self, model: SentenceTransformer) -> None:
        """Make empty banks and a new probe, and let the guide read the tokens of the model.

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
        if self.guide is not None:
            self.guide = Guide(model, self.guide.model)
        # One BankedInfoNCE per embedding size, for training; the key is the size.
        self.info_nces: nn.ModuleDict = nn.ModuleDict()
        # If drift compensation moves banked embeddings along with the mean embedding, the probe
        # measures how far the mean has moved.
        self._probe = EncoderProbe(model, is_used=self.settings.moves_entries)
        self._guide_embeddings: list[Tensor] | None = None
        self._pairs_in_update: int | None = None
        self._has_seen_ids = False

    def forward(
        self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None
    ) -> Tensor:
        """Compute the loss of a micro-batch of tokenised columns.

        Args:
            sentence_features: the features of each column: anchors, positives and any number of
                columns of hard negatives.
            labels: None; or ids of the texts, int64 (n, columns), hashes from
                `contaccum.data.sampling.text_ids`; or teacher scores, float; or
                ids, then scores. See `contaccum.data.sampling`. Two texts are
                duplicates if these ids are equal, or if the hashes of their tokens are equal.

        Raises:
            ValueError: for fewer than two columns, inside AdaptiveLayerLoss or Matryoshka2dLoss,
                and for labels of the shape of text ids that are none.
        """
        features = list(sentence_features)
        ids = self._encode_probe_and_compute_ids(features, labels)
        guide_embeddings = self._compute_guide_embeddings(features)
        embeddings = embed_columns(self.model, features)
        return self.compute_loss_from_embeddings(embeddings, labels, ids, guide_embeddings)

    def compute_loss_from_embeddings(
        self,
        embeddings: list[Tensor],
        labels: Tensor | None = None,
        ids: Sequence[Tensor | None] | None = None,
        guide: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """Compute the loss of embedded columns.

        The drift probe is not encoded here: it needs texts, and only embeddings are passed.

        Args:
            embeddings: anchors, positives and any number of hard negatives, (n, d) each.
            labels: as in `forward`; only teacher scores are used here.
            ids: ids of the texts of each column: int64 (n, 2), a label id and a hash of the tokens,
                from `combine_ids`; or (n,), the hashes of `content_ids` alone, by which no
                positives of `set_known_positives` are found. Without ids no duplicates are masked.
            guide: guide embeddings of the columns, (n, g) each; required if the loss has a guide.

        Raises:
            ConfigError: if the loss has a guide and ``guide`` is None.
        """
        if self.guide is not None and guide is None:
            raise ConfigError(
                "guide: compute_loss_from_embeddings gets no texts for the guide to embed; "
                "pass guide=loss.guide.embed(sentence_features)"
            )
        if ids is None:
            ids = [None] * len(embeddings)
        if self._is_training and self.settings.bank_size:
            self._warn_if_texts_are_missing(ids)
        loss_fn = self._without_bank
        if self._is_training:
            loss_fn = self._get_or_make_info_nce(embeddings[0].shape[-1])
        device = embeddings[0].device
        guide_embeddings: list[Tensor | None] = []
        if guide is not None:
            guide_embeddings = _stack_negatives([x.to(device) for x in guide])
        # BankedInfoNCE takes queries, positives and negatives, then the ids of each of the three.
        columns = _stack_negatives(embeddings)
        ids_of_columns = _stack_negatives(ids)
        loss = loss_fn(*columns, *ids_of_columns, guide=guide_embeddings)
        if self.distillation is not None and self._is_training:
            loss = loss + self.distillation(embeddings, labels)
        return loss

    @property
    def info_nce(self) -> BankedInfoNCE | None:
        """The `BankedInfoNCE` of the largest embedding size; None before the first call."""
        loss_fns = self._get_info_nces()
        if not loss_fns:
            return None
        return loss_fns[max(loss_fns)]

    @property
    def last(self) -> dict[str, Any]:
        """Diagnostics of the last call in training; see `BankedInfoNCE`.

        With several embedding sizes they are those of the largest. With ``distill`` they include
        ``distill_loss``, the unweighted term (with several sizes, that of the last one computed).
        """
        info_nce = self.info_nce
        diagnostics = {}
        if info_nce is not None:
            diagnostics.update(info_nce.last)
        if self.distillation is not None and self.distillation.last is not None:
            diagnostics["distill_loss"] = self.distillation.last
        return diagnostics

    @property
    def local_loss(self) -> Tensor | None:
        """The entry ``local_loss`` of `last`, which costs less than all; None before it exists."""
        if self.info_nce is None:
            return None
        return self.info_nce.local_loss

    def begin_update(self, pairs: int) -> None:
        """Set the number of pairs until the next optimizer step, over all ranks that share a bank.

        Gradients are centred over that many pairs; see ``center_gradients`` of `BankedInfoNCE`. The
        call is needed only if updates differ in their number of pairs; otherwise
        ``pairs_per_update`` sets it once.
        """
        self._pairs_in_update = pairs
        for loss_fn in self._get_info_nces().values():
            loss_fn.begin_update(pairs)

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
            state = gather_bank_states(state, next(self.model.parameters()).device)
        if not keep:
            return {}
        return state

    def load_bank_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore what `bank_state_dict` returned, on every rank.

        Raises:
            ConfigError: if the state was saved with other settings or by another number of ranks.
        """
        state = select_bank_state(state, self._is_shared)
        state = self._probe.load_state_dict(state, self._is_shared)
        # The keys are "<embedding size>.<name>".
        sizes = {int(key.split(".", 1)[0]) for key in state}
        for size in self._get_info_nces().keys() - sizes:
            del self.info_nces[str(size)]
        for size in sizes:
            self._get_or_make_info_nce(size)
        self.info_nces.load_state_dict(state)

    @property
    def _is_training(self) -> bool:
        # Trainers evaluate without gradients but leave the loss in training mode, so the mode alone
        # is not enough.
        return self.training and torch.is_grad_enabled()

    @property
    def _is_shared(self) -> bool:
        """True if all ranks hold the same bank."""
        return self.settings.gather_across_devices and world_size() > 1

    @property
    def _is_inside_matryoshka(self) -> bool:
        """True if MatryoshkaLoss calls the loss, once per embedding size.

        While it does, it has replaced a method by a decorator that cuts the embeddings to the size.
        This is the forward method of the model, or `calculate_loss` of the loss instance, if the
        loss has a gradient cache (CachedContAccumLoss).
        """
        forward: object = self.model.forward
        calculate_loss = vars(self).get("calculate_loss")
        has_decorated_forward = isinstance(forward, ForwardDecorator)
        return has_decorated_forward or isinstance(calculate_loss, CachedLossDecorator)

    @property
    def _is_matryoshka_replay(self) -> bool:
        """True if MatryoshkaLoss calls the loss again on the same micro-batch, for the next size.

        The decorator of the forward method then has the embeddings of the first call in its cache.
        """
        forward: object = self.model.forward
        return isinstance(forward, ForwardDecorator) and bool(forward.cache)

    def _get_info_nces(self) -> dict[int, BankedInfoNCE]:
        """Return the `BankedInfoNCE` of each embedding size."""
        loss_fns = {}
        for size, loss_fn in self.info_nces.items():
            assert isinstance(loss_fn, BankedInfoNCE)  # a ModuleDict has values of any Module
            loss_fns[int(size)] = loss_fn
        return loss_fns

    def _get_or_make_info_nce(self, size: int) -> BankedInfoNCE:
        """Return the `BankedInfoNCE` of an embedding size; the first call makes it."""
        loss_fn = self._get_info_nces().get(size)
        if loss_fn is not None:
            return loss_fn
        loss_fn = BankedInfoNCE.from_settings(self.settings)
        loss_fn.positives = self._positives
        self._set_expects_probe(loss_fn)
        if self._pairs_in_update is not None:
            loss_fn.begin_update(self._pairs_in_update)
        self.info_nces[str(size)] = loss_fn
        self._probe.pass_to_loss(loss_fn, size)
        return loss_fn

    def _encode_probe_and_compute_ids(
        self, features: list[dict[str, Any]], labels: Tensor | None
    ) -> list[Tensor | None]:
        """Check the columns, encode the drift probe if it is due, and compute the text ids.

        Returns:
            For each column the ids of its texts, int64 (n, 2); see `combine_ids`.
        """
        if len(features) < 2:
            raise ValueError(
                f"{type(self).__name__} needs (anchor, positive, ...) columns, got {len(features)}"
            )
        # The first module is the Transformer, or in a wrapper (DDP) the model itself.
        first_module = next(self.model.children(), self.model)
        if isinstance(first_module.forward, (LayerDecorator, LayerForwardDecorator)):
            raise ConfigError(
                f"AdaptiveLayerLoss and Matryoshka2dLoss call a loss once per layer, which would "
                f"fill the bank of {type(self).__name__} with copies: use MatryoshkaLoss"
            )
        if self._is_training and self.settings.bank_size and not self._is_matryoshka_replay:
            self._encode_probe_if_due(features)
        decoded = decode(labels, len(features))
        label_ids = decoded.text_ids
        if label_ids is not None and not self._has_seen_ids:
            # Only once, because reading the result stops a GPU's queue.
            if not are_text_ids(label_ids):
                raise ConfigError(
                    f"{type(self).__name__}: the label column has small integers where ids of the "
                    "texts are expected (contaccum.data.sampling.text_ids): remove or rename the "
                    'column, for example with dataset.remove_columns("label")'
                )
            self._has_seen_ids = True
        has_scores = decoded.teacher_scores is not None
        is_unknown_label = labels is not None and label_ids is None and not has_scores
        has_unused_scores = has_scores and self.distillation is None
        if is_unknown_label or has_unused_scores:
            name = type(self).__name__
            self._warn_once(
                f"{name} does not use the label or score column of the data: to learn from teacher "
                "scores, set distill; otherwise remove the column"
            )
        ids_of_columns: list[Tensor | None] = []
        for index, column in enumerate(features):
            column_ids = None
            if label_ids is not None:
                column_ids = label_ids[:, index]
            ids_of_columns.append(combine_ids(column_ids, content_ids(column)))
        return ids_of_columns

    def _encode_probe_if_due(self, features: list[dict[str, Any]]) -> None:
        """Encode the drift probe if it is due; see `EncoderProbe.encode_if_due`."""
        loss_fns = self._get_info_nces()
        # The probe is due at the start of an update, and the loss counts an optimizer step only in
        # its next call. So the step must be counted before the clock is read.
        for loss_fn in loss_fns.values():
            loss_fn.end_pending_update()
        clock = None
        if self.info_nce is not None:
            clock = self.info_nce.clock
        is_inside_matryoshka = self._is_inside_matryoshka
        if self._probe.encode_if_due(features, clock, self._is_shared, is_inside_matryoshka):
            for size, loss_fn in loss_fns.items():
                self._probe.pass_to_loss(loss_fn, size)
        for loss_fn in loss_fns.values():
            self._set_expects_probe(loss_fn)

    def _set_expects_probe(self, loss_fn: BankedInfoNCE) -> None:
        """Tell a `BankedInfoNCE` whether it will get embeddings of the probe.

        Without them it estimates the mean embeddings of queries and passages from micro-batches.
        If the probe turns off while its texts are collected, the pairs so far leave the bank.
        """
        expects_probe = self._probe.texts is not None
        is_probe_lost = loss_fn.compensation.expects_probe and not expects_probe
        if is_probe_lost and loss_fn.bank is not None:
            # Its pairs are relative to a mean of 0; the means now start at those of a micro-batch.
            loss_fn.bank.retire_all()
        loss_fn.compensation.expects_probe = expects_probe

    def _compute_guide_embeddings(
        self, features: list[dict[str, Any]], batch_size: int | None = None
    ) -> list[Tensor] | None:
        """Compute the guide embeddings of the columns, (n, g) each; return None without a guide.

        Inside MatryoshkaLoss the guide runs once per micro-batch, and its embeddings are stored for
        the other embedding sizes.

        Args:
            batch_size: number of texts to encode at once; None encodes all of them.
        """
        if self.guide is not None and not self._is_matryoshka_replay:
            self._guide_embeddings = self.guide.embed(features, batch_size)
        return self._guide_embeddings

    def _warn_if_texts_are_missing(self, ids: Sequence[Tensor | None]) -> None:
        """Warn once if masks or the drift probe are off because texts or their ids are missing."""
        if self.settings.mask_duplicates and any(x is None for x in ids):
            self._warn_once(
                "duplicates are not masked, because some texts or images have no id: a loss that "
                "calls compute_loss_from_embeddings can pass "
                "ids=[content_ids(x) for x in sentence_features]"
            )
        loss_fn = self.info_nce
        if self.settings.drift_compensation != "auto" or loss_fn is None:
            return
        has_probe = loss_fn.compensation.probe is not None or self._probe.texts is not None
        if loss_fn.clock.num_updates > 0 and not has_probe:
            self._warn_once(
                "old bank entries are not retired, because the drift probe is off: it needs single "
                "texts, and got only embeddings, or features that cannot be split into texts. A "
                "loss that calls compute_loss_from_embeddings can call info_nce.observe_probe "
                "after updates (docs/drift.md)"
            )

    def _warn_once(self, text: str) -> None:
        if text not in self._logged_warnings:
            logger.warning(text)
        self._logged_warnings.add(text)


def _stack_negatives(columns: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Stack the h columns of hard negatives, (n, ...) each, to one tensor (n, h, ...).

    Args:
        columns: embeddings or ids of the anchors, the positives and the h columns of negatives.

    Returns:
        The anchors, the positives and the stack. The stack is None if h is 0, or if the ids of a
        column are missing (None).
    """
    negatives = [column for column in columns[2:] if column is not None]
    stacked_negatives = None
    if negatives and len(negatives) == len(columns) - 2:
        stacked_negatives = torch.stack(negatives, dim=1)
    return [*columns[:2], stacked_negatives]
