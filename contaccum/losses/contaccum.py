"""ContAccumLoss: BankedInfoNCE as a sentence-transformers loss, (model, features) -> loss.

It encodes the columns of a data set, names duplicates by their content and probes the encoder after updates. The loss
itself is in ``info_nce``, and so are its settings: they pass through here.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.losses.gradcache import CachedLossMixin, has_static_embedding_input
from sentence_transformers.base.losses.merged_forward import embed_columns
from sentence_transformers.sentence_transformer.losses.matryoshka import CachedLossDecorator, ForwardDecorator, shrink
from sentence_transformers.util import cos_sim, dot_score
from torch import Tensor, nn

from contaccum.bank.drift import MOVES_ENTRIES
from contaccum.bank.info_nce import BankedInfoNCE
from contaccum.bank.logits import NO_ID, PositivesTable
from contaccum.distributed import gather_states, rank, world_size
from contaccum.errors import ConfigError
from contaccum.losses.distillation import Distillation, split_labels
from contaccum.losses.guide import Guide
from contaccum.losses.probe import TextProbe
from contaccum.losses.text_ids import content_ids

logger = logging.getLogger(__name__)

PAIRS_PER_PROBE = 128
"""Pairs of training between two probes, at least: eight pairs, forward only, are then some 2 % of the work."""

# Keys of a state beside those of the banks: pairs at the last probe and whether an update has passed; before those of
# the probe; before those of a rank's own bank, in a state of several.
_PROGRESS, _PROBE, _OF_RANK = "progress", "probe.", "of_rank_"


class ContAccumLoss(nn.Module):
    """InfoNCE with banks of past queries and passages: MultipleNegativesRankingLoss for batches that are small.

    With ``gradient_accumulation_steps`` each micro-batch sees thousands of negatives instead of its own few.

    Args:
        model: a SentenceTransformer, tied or with a Router.
        bank_size: rows of the passage bank.
        scale: 1 / temperature.
        similarity_fct: ``sentence_transformers.util.cos_sim`` or ``dot_score``.
        gather_across_devices: all ranks hold one bank, of the batch of all. Otherwise each has a bank of its own.
        distill, distill_weight, distill_temperature: learn from a teacher's scores too, in training; "margin_mse" or
            "kl", see `contaccum.losses.distillation.Distillation`.
        guide: a frozen SentenceTransformer that says which columns are no negatives, as in GISTEmbedLoss; its
            ``margin`` and ``margin_strategy`` are ``guide_margin`` and ``guide_margin_strategy`` here.
        settings: any other of `BankedInfoNCE`. Duplicates go by `contaccum.losses.text_ids.content_ids`.

    Raises:
        ConfigError (a ValueError): for settings that cannot work.

    Inputs:
        (anchor, positive) pairs or (anchor, positive, negative_1, ..., negative_n) n-tuples; labels: none, or
        a teacher's scores of positive and negatives, (n, 1 + negatives).

    Relations:
        - `MultipleNegativesRankingLoss` is equivalent with ``bank_size=0`` and a batch without duplicates, with
          its ``directions``, ``partition_mode`` and hardness too, and is what ``eval_loss`` is: in eval mode, and
          without gradients, the loss is that of the batch alone.
        - `GISTEmbedLoss` is, with a ``guide``, and neither anchors nor positives contrasted among themselves.
        - Works inside `MatryoshkaLoss`, where each dimension has a bank of its own. Not inside
          ``AdaptiveLayerLoss``, which calls the loss once per layer on the same micro-batch.
        - In a loss that calls `compute_loss_from_embeddings`, updates are noticed; texts are not known there.

    Example:
        ```python
        loss = ContAccumLoss(model, bank_size=512)
        args = SentenceTransformerTrainingArguments(per_device_train_batch_size=8, gradient_accumulation_steps=16)
        SentenceTransformerTrainer(model=model, args=args, train_dataset=train_dataset, loss=loss).train()
        ```
    """

    def __init__(
        self,
        model: SentenceTransformer,
        bank_size: int = 1024,
        scale: float = 20.0,
        similarity_fct: Callable[[Tensor, Tensor], Tensor] = cos_sim,
        gather_across_devices: bool = False,
        distill: str | None = None,
        distill_weight: float = 1.0,
        distill_temperature: float = 1.0,
        guide: SentenceTransformer | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        if not scale > 0:
            raise ConfigError(f"scale must be a positive number, got {scale!r}")
        if similarity_fct not in (cos_sim, dot_score):
            name = getattr(similarity_fct, "__name__", similarity_fct)
            raise ConfigError(f"similarity_fct={name} is not supported: use cos_sim or dot_score of its util")
        self.model, self.scale, self.similarity_fct = model, scale, similarity_fct
        given = inspect.signature(BankedInfoNCE).bind(
            bank_size=bank_size,
            temperature=1.0 / scale,
            similarity="cos" if similarity_fct is cos_sim else "dot",
            gather_across_devices=gather_across_devices,
            **settings,
        )
        given.apply_defaults()
        self.settings: dict[str, Any] = given.arguments
        BankedInfoNCE(**self.settings)  # refuses bad settings now rather than in the first step
        about = distill_weight, distill_temperature, self.settings["similarity"], scale
        self.distillation = None if distill is None else Distillation(distill, *about)
        self._without_bank = BankedInfoNCE(**{**self.settings, "bank_size": 0, "query_bank_size": None})
        self.log_scale = self._without_bank.log_scale  # one for all sizes, in training and evaluation
        self.guide = None if guide is None else Guide(model, guide)
        self._guided: list[Tensor] | None = None  # its embeddings of the present micro-batch
        # One BankedInfoNCE per embedding size: MatryoshkaLoss calls this loss with several, and a bank belongs to one.
        self.info_nces: Any = nn.ModuleDict()
        self._positives: PositivesTable | None = None
        self._probe: TextProbe | None = None
        self._probed_at = 0  # pairs that the bank had seen
        self._embedded_probe: tuple[list[Tensor], bool] | None = None  # the last, and whether sizes are cut from it
        self._pairs_in_update: int | None = None  # of the one under way, where a training loop has told
        self._said: set[str] = set()
        self._stepped = False  # of a state: whether an optimizer had moved the model since its last micro-step

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None) -> Tensor:
        """Compute the loss of a micro-batch of tokenised columns: anchors, positives, any number of negatives.

        ``labels`` int64 (n, columns) are ids of the texts. A text is a duplicate of another if these ids are equal, or
        the hashes of their tokens. ``labels`` may be, or have after the ids, a teacher's scores: see
        `contaccum.losses.distillation.split_labels`.
        """
        features = list(sentence_features)
        ids, guided = self._look_at(features, labels), self._ask_guide(features)
        return self.compute_loss_from_embeddings(embed_columns(self.model, features), labels, ids, guided)

    def compute_loss_from_embeddings(
        self,
        embeddings: list[Tensor],
        labels: Tensor | None = None,
        ids: list[Tensor | None] | None = None,
        guide: list[Tensor] | None = None,
    ) -> Tensor:
        """The loss of embedded columns, (n, d) each: anchors, positives, any number of negatives. With ``distill``,
        ``labels`` hold a teacher's scores.

        Without ``ids`` int64 (n,) of each column, see `contaccum.losses.text_ids.content_ids`, no duplicates are
        masked; and as the texts are not known here, the encoder is not probed. ``guide``: the columns as a guide embeds
        them.
        """
        if self.guide is not None and guide is None:
            raise ConfigError("guide: the texts are not known here; give guide=loss.guide.embed(sentence_features)")
        ids = [None] * len(embeddings) if ids is None else ids
        if self._trains:
            self._say_what_is_off(ids)
        columns = [x.to(embeddings[0].device) for x in guide or ()]
        negatives, *guided = (torch.stack(x[2:], dim=1) if len(x) > 2 else None for x in (embeddings, columns))
        known = [x for x in ids[2:] if x is not None]
        negative_ids = torch.stack(known, dim=1) if known and len(known) == len(ids) - 2 else None
        loss_fn = self._of_size(embeddings[0].shape[-1]) if self._learns else self._without_bank
        seen = [*columns[:2], *guided]
        loss = loss_fn(embeddings[0], embeddings[1], negatives, ids[0], ids[1], negative_ids, seen)
        if self.distillation is not None and self._learns:
            scale = None if self.log_scale is None else self.log_scale.exp()
            loss = loss + self.distillation(embeddings, labels, scale)
        return loss

    @property
    def info_nce(self) -> BankedInfoNCE | None:
        """The `BankedInfoNCE` of the largest embedding size, None before the first call."""
        return self._of_size(max(map(int, self.info_nces))) if len(self.info_nces) else None

    @property
    def last(self) -> dict[str, Any]:
        """Diagnostics of the last call in training; see `BankedInfoNCE`; and ``distill_loss``, unweighted."""
        found = {} if self.info_nce is None else self.info_nce.last
        distilled = None if self.distillation is None else self.distillation.last
        return found if distilled is None else {**found, "distill_loss": distilled}

    def begin_update(self, pairs: int) -> None:
        """Say how many pairs the coming micro-batches will have until the optimizer steps; see `BankedInfoNCE`.

        Needed only where updates differ in that: ``pairs_per_update`` says it once and for all.
        """
        self._pairs_in_update = pairs
        for loss_fn in self.info_nces.values():
            loss_fn.begin_update(pairs)

    def know_positives(self, query_ids: Tensor, passage_ids: Tensor) -> None:
        """Never take these for negatives of each other, wherever they meet: ids of all positives, int64 (r,) each.

        They are those that ``labels`` will hold; see `forward`. Like the model, they are no part of the state.
        """
        self._positives = PositivesTable(query_ids, passage_ids)
        for loss_fn in (self._without_bank, *self.info_nces.values()):
            loss_fn.positives = self._positives

    def bank_state_dict(self, keep: bool = True) -> dict[str, Tensor]:
        """The banks and drift statistics, without the model: what a checkpoint needs beside the model's weights.

        With several ranks, all call it together, and those that do not ``keep`` it get an empty one. A bank that they
        share fits any number of ranks; banks of their own come out side by side, and fit as many ranks again.
        """
        self._stepped = self._has_stepped
        state = dict(self.info_nces.state_dict())
        if state:
            state[_PROGRESS] = torch.tensor([self._probed_at, self._stepped])
        if self._probe is not None:
            state |= {f"{_PROBE}{key}": value for key, value in self._probe.state_dict().items()}
        if world_size() > 1 and not self._shared:
            parts = enumerate(gather_states(state, next(self.model.parameters()).device))
            state = {f"{_OF_RANK}{index}.{key}": value for index, part in parts for key, value in part.items()}
        return state if keep else {}

    def load_bank_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore what `bank_state_dict` gave, on every rank; ConfigError when it has other settings or ranks."""
        state, ranks = dict(state), {key.split(".", 1)[0] for key in state if key.startswith(_OF_RANK)}
        if ranks and (self._shared or len(ranks) != world_size()):
            raise ConfigError(
                f"this state holds the banks of {len(ranks)} ranks: go on with as many, gather_across_devices=False, "
                "or start from the weights alone"
            )
        if ranks:
            own = f"{_OF_RANK}{rank()}."
            state = {key.removeprefix(own): value for key, value in state.items() if key.startswith(own)}
        probed_at, stepped = state.pop(_PROGRESS, torch.zeros(2, dtype=torch.int64)).tolist()
        self._embedded_probe = None
        probe = {key.removeprefix(_PROBE): state.pop(key) for key in list(state) if key.startswith(_PROBE)}
        self._probe = TextProbe.from_state_dict(probe, self._shared) if probe else None
        for size in {key.split(".", 1)[0] for key in state}:
            self._of_size(int(size))
        self.info_nces.load_state_dict(state)
        self._probed_at, self._stepped = probed_at, bool(stepped)

    def get_config_dict(self) -> dict[str, Any]:
        """What sentence-transformers writes into the model card."""
        config = {key: value for key, value in self.settings.items() if key not in ("temperature", "similarity")}
        config["bank_dtype"] = config["bank_dtype"] and str(config["bank_dtype"])
        if (term := self.distillation) is not None:
            config |= {"distill": term.kind, "distill_weight": term.weight, "distill_temperature": term.temperature}
        if self.guide is not None:
            config["guide"] = self.guide.name
        return {"scale": self.scale, "similarity_fct": self.similarity_fct.__name__, **config}

    @property
    def citation(self) -> str:
        """Of the paper, for the model card."""
        return (
            "@inproceedings{kim2024contaccum, author={Jaehee Kim and Yukyung Lee and Pilsung Kang}, year={2024},\n"
            "title={A Gradient Accumulation Method for Dense Retriever under Memory Constraint},\n"
            "booktitle={Advances in Neural Information Processing Systems}, eprint={2406.12356}}"
        )

    @property
    def _learns(self) -> bool:
        # Trainers leave the loss in training mode when they evaluate the model, without gradients.
        return self.training and torch.is_grad_enabled()

    @property
    def _trains(self) -> bool:
        return self._learns and bool(self.settings["bank_size"])

    @property
    def _has_stepped(self) -> bool:
        """Whether an optimizer has moved the model since the last micro-step."""
        return self._stepped or any(loss_fn.steps.stepped for loss_fn in self.info_nces.values())

    def _look_at(self, features: list[dict[str, Any]], labels: Tensor | None) -> list[Tensor | None]:
        """What a micro-batch tells before it is encoded: the ids of its texts; and the probe, if one is due."""
        if len(features) < 2:
            raise ValueError(f"{type(self).__name__} needs (anchor, positive, ...) columns, got {len(features)}")
        if self._trains:
            self._probe_encoder(features)
        ids, scores = split_labels(labels, len(features))
        if (labels is not None and ids is None and scores is None) or (scores is not None and not self.distillation):
            self._warn_once(f"{type(self).__name__} does not use the label or score column of the data")
        labelled = [None] * len(features) if ids is None else list(ids.unbind(1))
        return [_both_ids(given, content_ids(column)) for given, column in zip(labelled, features, strict=True)]

    def _ask_guide(self, features: list[dict[str, Any]], at_once: int | None = None) -> list[Tensor] | None:
        """The guide's embeddings of the columns, (n, g) each; once for all the sizes of a MatryoshkaLoss."""
        forward: Any = self.model.forward
        if self.guide is not None and not (isinstance(forward, ForwardDecorator) and forward.cache):
            self._guided = self.guide.embed(features, at_once)
        return self._guided

    def _probe_encoder(self, features: list[dict[str, Any]]) -> None:
        """Encode the probe when an update has passed and enough pairs with it."""
        # MatryoshkaLoss calls this for each size in turn, with a forward that replays the first one's embeddings; of a
        # cached loss it shrinks what calculate_loss gets.
        forward: Any = self.model.forward
        replays = isinstance(forward, ForwardDecorator)
        if self.settings["drift_compensation"] not in MOVES_ENTRIES or (replays and forward.cache):
            return
        shrinks = replays or isinstance(vars(self).get("calculate_loss"), CachedLossDecorator)
        stepped, self._stepped = self._has_stepped, False
        completed = self._collect_probe(features)
        if self._probe is None or not self._probe.is_complete:
            return
        # Counted by the bank, whose pairs are those of all ranks that share it: one that probed alone would wait.
        bank = None if self.info_nce is None else self.info_nce.bank
        pairs = 0 if bank is None else bank.pairs
        if completed or (stepped and pairs - self._probed_at >= PAIRS_PER_PROBE):
            self._probed_at = pairs
            self._embedded_probe = (self._probe.encode(self.model, features), shrinks)
            for size, loss_fn in self.info_nces.items():
                self._observe(int(size), loss_fn)

    def _collect_probe(self, features: list[dict[str, Any]]) -> bool:
        """Collect the probe's texts from the first micro-batches; True for the micro-batch that completes them."""
        if self._probe is None and self.info_nce is None:
            self._probe = TextProbe(self._shared)
        if self._probe is None or self._probe.is_complete:
            return False
        if not self._probe.collect(features):
            self._probe = None
            for loss_fn in self.info_nces.values():
                loss_fn.expects_probe = False
            return False
        return self._probe.is_complete

    def _observe(self, size: int, loss_fn: BankedInfoNCE) -> None:
        """Tell a bank of embeddings of that size what the probe's are."""
        if self._embedded_probe is not None:
            embeddings, shrinks = self._embedded_probe
            loss_fn.observe_probe(*(shrink(x, size) if shrinks else x for x in embeddings))

    def _say_what_is_off(self, ids: list[Tensor | None]) -> None:
        """A warning for what the caller keeps from working."""
        if self.settings["mask_duplicates"] and any(x is None for x in ids):
            self._warn_once(
                "duplicates are not masked, as some texts or images have no id; a loss that calls "
                "compute_loss_from_embeddings can give ids=[content_ids(x) for x in sentence_features]"
            )
        loss_fn = self.info_nce
        unprobed = loss_fn is not None and loss_fn.probe is None and loss_fn.bank is not None and loss_fn.bank.updates
        if unprobed and self._probe is None and self.settings["drift_compensation"] == "auto":
            self._warn_once(
                "no entry retires for its age, as these embeddings tell no text that could be encoded again; a loss "
                "that calls compute_loss_from_embeddings can call info_nce.observe_probe after updates (docs/drift.md)"
            )

    def _warn_once(self, text: str) -> None:
        if text not in self._said:
            logger.warning(text)
        self._said.add(text)

    @property
    def _shared(self) -> bool:
        """Whether all ranks hold one and the same bank."""
        return self.settings["gather_across_devices"] and world_size() > 1

    def _of_size(self, size: int) -> BankedInfoNCE:
        if str(size) not in self.info_nces:
            self.info_nces[str(size)] = loss_fn = BankedInfoNCE(**self.settings)
            loss_fn.positives, loss_fn.log_scale = self._positives, self.log_scale
            loss_fn.expects_probe = self._probe is not None
            if self._pairs_in_update is not None:
                loss_fn.begin_update(self._pairs_in_update)
            self._observe(size, loss_fn)
        return self.info_nces[str(size)]


def _both_ids(label_ids: Tensor | None, token_ids: Tensor | None) -> Tensor | None:
    """Stack the two ids of each text, int64 (n, 2): the one in the labels and the hash of its tokens.

    Texts that differ in case, in white space or behind the truncation have equal tokens but no equal label.
    """
    present = label_ids if label_ids is not None else token_ids
    if present is None:
        return None
    missing = torch.full_like(present, NO_ID)
    both = [missing if ids is None else ids.to(present.device) for ids in (label_ids, token_ids)]
    return torch.stack(both, dim=1)


class CachedContAccumLoss(CachedLossMixin, ContAccumLoss):
    """`ContAccumLoss` over a gradient cache: every pair has the whole batch for fresh negatives, and the bank.

    What `ContAccumLoss` is to MultipleNegativesRankingLoss, this is to CachedMultipleNegativesRankingLoss: the
    batch is encoded without gradients first, ``mini_batch_size`` texts at a time, then again with those of its
    embeddings. It takes GradCache's time; the bank adds negatives, not memory of activations.

    Args:
        mini_batch_size: texts that are encoded at once.
        mini_batch_num_tokens: tokens that are encoded at once, instead.
        show_progress_bar: over mini-batches.
        Others: as in `ContAccumLoss`.

    Raises:
        ConfigError (a ValueError): for settings that cannot work; a StaticEmbedding, whose texts lie in one stream.

    Relations:
        - `CachedMultipleNegativesRankingLoss` is equivalent with ``bank_size=0`` and a batch without duplicates.

    Example:
        ```python
        loss = CachedContAccumLoss(model, bank_size=4096, mini_batch_size=8)
        args = SentenceTransformerTrainingArguments(per_device_train_batch_size=128)
        SentenceTransformerTrainer(model=model, args=args, train_dataset=train_dataset, loss=loss).train()
        ```
    """

    def __init__(
        self,
        model: SentenceTransformer,
        bank_size: int = 1024,
        scale: float = 20.0,
        similarity_fct: Callable[[Tensor, Tensor], Tensor] = cos_sim,
        mini_batch_size: int = 32,
        mini_batch_num_tokens: int | None = None,
        gather_across_devices: bool = False,
        show_progress_bar: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__(model, bank_size, scale, similarity_fct, gather_across_devices, **settings)
        if has_static_embedding_input(model):
            raise ConfigError("CachedContAccumLoss cannot split a StaticEmbedding's texts: use ContAccumLoss")
        if mini_batch_num_tokens is not None and mini_batch_num_tokens < 1:
            raise ConfigError(f"mini_batch_num_tokens must be at least 1, got {mini_batch_num_tokens}")
        self.mini_batch_size, self.mini_batch_num_tokens = mini_batch_size, mini_batch_num_tokens
        self.show_progress_bar = show_progress_bar
        self._of_scale: list[Tensor] = []  # gradients of log_scale, one of each size of a MatryoshkaLoss

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None) -> Tensor:
        """The loss of a batch of tokenised columns; as in `ContAccumLoss`."""
        features = list(sentence_features)
        given: Any = labels, self._look_at(features, labels), self._ask_guide(features, self.mini_batch_size)
        self._of_scale.clear()
        loss = self.forward_cached(features, given)
        if self.log_scale is None or not self._of_scale:
            return loss
        # What is cached are gradients of embeddings; that of the scale goes by the loss, which an outer loss may weigh.
        return loss + (self.log_scale - self.log_scale.detach()) * torch.stack(self._of_scale).sum()

    def calculate_loss(self, reps: list[list[Tensor]], labels: Any = None, *, with_backward: bool = False) -> Tensor:
        """The loss of a batch that is encoded, a list of mini-batches for each column; ``labels``: labels, ids, and a
        guide's embeddings."""
        loss = self.compute_loss_from_embeddings([torch.cat(column) for column in reps], *(labels or ()))
        if with_backward and self.log_scale is not None:
            self._of_scale += torch.autograd.grad(loss, self.log_scale, retain_graph=True)
        if with_backward:
            loss.backward(inputs=[x for column in reps for x in column])
        return loss.detach()
