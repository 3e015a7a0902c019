"""ContAccumLoss: BankedInfoNCE as a sentence-transformers loss, (model, features) -> loss.

It encodes the columns of a data set and names duplicates by their tokens; the loss itself is in ``info_nce``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses.matryoshka import ForwardDecorator
from sentence_transformers.util import cos_sim, dot_score
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from contaccum.distributed import gather_states, rank, world_size
from contaccum.drift import MOVES_ENTRIES
from contaccum.duplicates import PositivesTable, mix64
from contaccum.errors import ConfigError
from contaccum.info_nce import BankedInfoNCE
from contaccum.probe import PAIRS_PER_PROBE, SharedProbe

OF_RANK = "of_rank_"  # before the keys of a rank's own bank, in a state of several

_LOSSES: weakref.WeakSet[ContAccumLoss] = weakref.WeakSet()


def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Tell the losses whose model this optimizer moves. Fused optimizers leave no other trace of a step."""
    for loss in list(_LOSSES):
        some = next((p for p in loss.model.parameters() if p.requires_grad), None)
        if any(p is some for group in optimizer.param_groups for p in group["params"]):
            loss._stepped = True


register_optimizer_step_post_hook(_after_step)


class ContAccumLoss(nn.Module):
    """InfoNCE whose negatives come from the batch and from banks of past queries and passages.

    A drop-in for :class:`~sentence_transformers.losses.MultipleNegativesRankingLoss` when the batch is small: with
    ``gradient_accumulation_steps`` each micro-batch sees thousands of negatives instead of its own few.

    Args:
        model: a SentenceTransformer, tied or with a Router.
        bank_size: rows of the passage bank; 0 is MultipleNegativesRankingLoss.
        scale: 1 / temperature.
        similarity_fct: ``sentence_transformers.util.cos_sim`` or ``dot_score``.
        gather_across_devices: build the batch of all ranks before the loss, so that all hold the same bank. Otherwise
            each has a bank of its own.
        query_bank_size, normalize_by, mask_duplicates, bank_hard_negatives, drift_compensation, bank_dtype,
            bank_device, shard_bank: as in :class:`BankedInfoNCE`. Duplicates are recognised by a hash of their tokens.

    Requirements:
        1. (anchor, positive) pairs, (anchor, positive, negative) triplets, or
           (anchor, positive, negative_1, ..., negative_n) n-tuples

    Inputs:
        +-------------------------------------------------+--------+
        | Inputs                                          | Labels |
        +=================================================+========+
        | (anchor, positive) pairs                        | none   |
        +-------------------------------------------------+--------+
        | (anchor, positive, negative) triplets           | none   |
        +-------------------------------------------------+--------+
        | (anchor, positive, negative_1, ..., negative_n) | none   |
        +-------------------------------------------------+--------+

    Recommendations:
        - Set ``gradient_accumulation_steps`` so that ``bank_size`` is a few updates' worth of pairs: older entries
          come from an encoder that no longer exists.
        - In evaluation (``model.eval()``) the loss is that of the batch alone, so that ``eval_loss`` compares with
          other losses and does not move as the bank fills.

    Relations:
        - :class:`MultipleNegativesRankingLoss` is equivalent with ``bank_size=0`` and a batch without duplicates.
        - :class:`CachedMultipleNegativesRankingLoss` (GradCache) has fresh negatives only, at the price of a second
          forward pass and a batch as large as the number of negatives.
        - Works inside :class:`MatryoshkaLoss`: each dimension keeps a bank of its own. Not inside
          ``AdaptiveLayerLoss``, which calls the loss once per layer on the same micro-batch.

    Example::

        from contaccum import ContAccumLoss
        from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
        from sentence_transformers import SentenceTransformerTrainingArguments

        model = SentenceTransformer("sentence-transformers/all-MiniLM-L6-v2")
        trainer = SentenceTransformerTrainer(
            model=model,
            args=SentenceTransformerTrainingArguments(
                output_dir="runs/example", per_device_train_batch_size=8, gradient_accumulation_steps=16
            ),
            train_dataset=train_dataset,  # columns: anchor, positive
            loss=ContAccumLoss(model, bank_size=512),
        )
        trainer.train()
    """

    def __init__(
        self,
        model: SentenceTransformer,
        bank_size: int = 1024,
        scale: float = 20.0,
        similarity_fct: Callable[[Tensor, Tensor], Tensor] = cos_sim,
        gather_across_devices: bool = False,
        query_bank_size: int | None = None,
        normalize_by: Literal["local", "all"] = "local",
        mask_duplicates: bool = True,
        bank_hard_negatives: bool = True,
        drift_compensation: Literal["auto", "mean", "fresh", "none"] = "auto",
        bank_dtype: torch.dtype | None = None,
        bank_device: torch.device | str | None = None,
        shard_bank: bool = False,
    ) -> None:
        super().__init__()
        if not scale > 0:
            raise ConfigError(f"scale must be a positive number, got {scale!r}")
        similarities: dict[Callable[..., Tensor], Literal["cos", "dot"]] = {cos_sim: "cos", dot_score: "dot"}
        if similarity_fct not in similarities:
            raise ConfigError(
                f"similarity_fct={getattr(similarity_fct, '__name__', similarity_fct)} is not supported: the bank's "
                "gradients are worked out for sentence_transformers.util.cos_sim and dot_score. Use one of them."
            )
        self.model = model
        self.scale = scale
        self.similarity_fct = similarity_fct
        self.settings: dict[str, Any] = {
            "bank_size": bank_size,
            "query_bank_size": query_bank_size,
            "temperature": 1.0 / scale,
            "similarity": similarities[similarity_fct],
            "normalize_by": normalize_by,
            "mask_duplicates": mask_duplicates,
            "bank_hard_negatives": bank_hard_negatives,
            "drift_compensation": drift_compensation,
            "bank_dtype": bank_dtype,
            "gather_across_devices": gather_across_devices,
            "bank_device": bank_device,
            "shard_bank": shard_bank,
        }
        # One BankedInfoNCE per embedding size: MatryoshkaLoss calls this loss with several, and a bank belongs to one.
        self.info_nces = nn.ModuleDict({})
        self._size: str | None = None
        self._probe: SharedProbe | None = None
        self._positives: PositivesTable | None = None
        self._probed_at = 0  # pairs that the bank had seen
        self._stepped = False  # whether an optimizer has moved the model since the last micro-step
        _LOSSES.add(self)
        self._without_bank = BankedInfoNCE(**{**self.settings, "bank_size": 0, "query_bank_size": 0})
        BankedInfoNCE(**self.settings)  # refuses bad settings now rather than in the first step

    @property
    def info_nce(self) -> BankedInfoNCE | None:
        """The :class:`BankedInfoNCE` of the full embedding size (the first called), None before the first call."""
        return None if self._size is None else self.info_nces[self._size]  # type: ignore[return-value]  # ModuleDict holds Modules

    @property
    def last(self) -> dict[str, Any]:
        """Diagnostics of the last call in training; see :class:`BankedInfoNCE`."""
        return {} if self.info_nce is None else self.info_nce.last

    def know_positives(self, query_ids: Tensor, passage_ids: Tensor) -> None:
        """Never take these for negatives of each other, wherever they meet: all positives of a data set, by id.

        The ids are those that ``labels`` will hold; see :meth:`forward`. Like the model, they are no part of the state.

        Args:
            query_ids, passage_ids: int64 (r,) each.
        """
        self._positives = PositivesTable(query_ids, passage_ids)
        for loss_fn in (*self.info_nces.values(), self._without_bank):
            loss_fn.know_positives(self._positives)  # type: ignore[operator]  # a BankedInfoNCE

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None) -> Tensor:
        """The loss of a micro-batch of tokenised columns: anchors, positives, any number of negatives.

        Args:
            labels: int64 (n, columns): an id for each text, equal for equal texts. Anything else is ignored, and ids
                are content hashes of the tokens.
        """
        features = list(sentence_features)
        if len(features) < 2:
            raise ValueError(f"ContAccumLoss needs (anchor, positive, ...) columns, got {len(features)}")
        if self.training and torch.is_grad_enabled() and self.settings["bank_size"]:
            self._follow_encoder(features)
        if labels is not None and labels.shape == (len(labels), len(features)) and labels.dtype == torch.int64:
            ids: list[Tensor | None] = list(labels.unbind(1))
        else:
            ids = [token_hashes(column) for column in features]
        embeddings = [self.model(column)["sentence_embedding"] for column in features]
        return self.compute_loss_from_embeddings(embeddings, labels, ids=ids)

    def compute_loss_from_embeddings(
        self, embeddings: list[Tensor], labels: Tensor | None = None, ids: list[Tensor | None] | None = None
    ) -> Tensor:
        """The loss of embedded columns: anchors (n, d), positives (n, d), any number of negatives (n, d).

        Args:
            ids: one int64 (n,) per column, or None; equal ids mean the same text.
        """
        ids = [None] * len(embeddings) if ids is None else ids
        negatives = torch.stack(embeddings[2:], dim=1) if len(embeddings) > 2 else None
        negative_ids = None
        if negatives is not None and all(x is not None for x in ids[2:]):
            negative_ids = torch.stack([x for x in ids[2:] if x is not None], dim=1)
        loss_fn = self._for_size(embeddings[0].shape[-1]) if self.training else self._without_bank
        return loss_fn(embeddings[0], embeddings[1], negatives, ids[0], ids[1], negative_ids)

    def _follow_encoder(self, features: list[dict[str, Any]]) -> None:
        """Count updates, and probe the encoder when one has passed and enough pairs with it."""
        stepped, self._stepped = self._stepped, False
        if stepped:
            for loss_fn in self.info_nces.values():
                loss_fn.end_update()  # type: ignore[operator]  # a BankedInfoNCE
        # MatryoshkaLoss replays the embeddings of a micro-step in order, and would take a probe's for them.
        if self.settings["drift_compensation"] not in MOVES_ENTRIES or isinstance(self.model.forward, ForwardDecorator):
            return
        first = self._probe is None and self.info_nce is None
        if first:
            self._probe = SharedProbe.of(features, self._shared)
        # Counted by the bank, whose pairs are those of all ranks that share it: one that probed alone would wait.
        pairs = self._pairs_seen
        if self._probe is not None and (first or (stepped and pairs - self._probed_at >= PAIRS_PER_PROBE)):
            queries, passages = self._probe.encode(self.model)
            self._for_size(queries.shape[-1]).observe_probe(queries, passages)
            self._probed_at = pairs

    @property
    def _shared(self) -> bool:
        """Whether all ranks hold one and the same bank."""
        return self.settings["gather_across_devices"] and world_size() > 1

    @property
    def _pairs_seen(self) -> int:
        return 0 if self.info_nce is None or self.info_nce.bank is None else self.info_nce.bank.pairs

    def _for_size(self, size: int) -> BankedInfoNCE:
        key = str(size)
        if key not in self.info_nces:
            self.info_nces[key] = BankedInfoNCE(**self.settings)
            if self._positives is not None:
                self.info_nces[key].know_positives(self._positives)  # type: ignore[operator]  # a BankedInfoNCE
        if self._size is None or int(self._size) < size:
            self._size = key
        return self.info_nces[key]  # type: ignore[return-value]  # ModuleDict holds Modules

    def bank_state_dict(self, keep: bool = True) -> dict[str, Tensor]:
        """The banks and drift statistics, without the model: what a checkpoint needs beside the model's weights.

        With several ranks, all call it together. A bank that they share comes out in one piece, sharded or not, and
        fits any number of ranks; banks of their own come out side by side, and fit as many ranks again.

        Args:
            keep: whether this rank wants the result, to write it; otherwise it only takes part, and gets an empty one.
        """
        state: dict[str, Tensor] = {}
        for size, loss_fn in self.info_nces.items():
            whole = loss_fn.gathered_state_dict(keep or not self._shared)  # type: ignore[operator]  # a BankedInfoNCE
            state |= {f"{size}.{key}": value for key, value in whole.items()}
        if self._probe is not None and state:
            device = next(iter(state.values())).device
            since = {"pairs": self._pairs_seen - self._probed_at, "stepped": int(self._stepped)}
            state |= {f"probe.{key}": value for key, value in self._probe.state_dict().items()}
            state |= {f"since_probe.{key}": torch.tensor(value, device=device) for key, value in since.items()}
        if world_size() > 1 and not self._shared:
            parts = enumerate(gather_states(state, next(self.model.parameters()).device))
            state = {f"{OF_RANK}{index}.{key}": value for index, part in parts for key, value in part.items()}
        return state if keep else {}

    def load_bank_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore what :meth:`bank_state_dict` gave, on every rank.

        Raises:
            ConfigError: when the state was written with other settings, or holds banks of other ranks.
        """
        state = self._own_part(state)
        probe = {key.removeprefix("probe."): value for key, value in state.items() if key.startswith("probe.")}
        if probe:
            self._probe = SharedProbe.from_state_dict(probe, self._shared)
            self._stepped = bool(state["since_probe.stepped"])
        banks = {key: value for key, value in state.items() if not key.startswith(("probe.", "since_probe."))}
        for size in sorted({key.split(".", 1)[0] for key in banks}, key=int):
            self._for_size(int(size))
        self.info_nces.load_state_dict(banks)
        self._probed_at = self._pairs_seen - int(state.get("since_probe.pairs", 0))

    def _own_part(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Of the states of ranks with banks of their own, this rank's."""
        ranks = {key.split(".", 1)[0] for key in state if key.startswith(OF_RANK)}
        if not ranks:
            return state
        if self._shared or len(ranks) != world_size():
            raise ConfigError(
                f"this state holds the banks of {len(ranks)} ranks, written with gather_across_devices=False, and this "
                f"run has {world_size()} with gather_across_devices={self._shared}: nobody could go on with them. Use "
                f"{len(ranks)} ranks and gather_across_devices=False again, or start from the weights alone"
            )
        prefix = f"{OF_RANK}{rank()}."
        return {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}

    def get_config_dict(self) -> dict[str, Any]:
        config = {key: value for key, value in self.settings.items() if key not in ("temperature", "similarity")}
        for key in ("bank_dtype", "bank_device"):
            config[key] = None if config[key] is None else str(config[key])
        return {"scale": self.scale, "similarity_fct": self.similarity_fct.__name__, **config}

    @property
    def temperature(self) -> float:
        return 1.0 / self.scale

    @property
    def citation(self) -> str:
        return """
@inproceedings{kim2024contaccum,
    title={A Gradient Accumulation Method for Dense Retriever under Memory Constraint},
    author={Jaehee Kim and Yukyung Lee and Pilsung Kang},
    booktitle={Advances in Neural Information Processing Systems},
    year={2024},
    eprint={2406.12356},
    archivePrefix={arXiv},
}
"""


def token_hashes(features: dict[str, Any]) -> Tensor | None:
    """A 64-bit content hash of each tokenised text, int64 (n,); equal for equal tokens whatever the padding.

    Texts that truncation makes equal are equal to the encoder as well, and so they are here. None when the features
    hold no (n, length) ``input_ids`` (images, flattened inputs): then no duplicates are masked.
    """
    tokens = features.get("input_ids")
    if not isinstance(tokens, Tensor) or tokens.ndim != 2:
        return None
    attention = features.get("attention_mask")
    present = torch.ones_like(tokens) if attention is None else attention.to(tokens.dtype)
    # Positions count real tokens only, which makes the hash blind to the side and amount of padding.
    position = present.cumsum(1)
    mixed = mix64(tokens.long() * -7046029254386353131 + position.long() * -4417276706812531889)
    return mix64((mixed * present.long()).sum(1))
