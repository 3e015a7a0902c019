"""From ``args.method`` to a loss: ours with its banks, or one of sentence-transformers' own."""

from __future__ import annotations

from typing import Any

from sentence_transformers import SentenceTransformer
from sentence_transformers.losses import CachedMultipleNegativesRankingLoss, MultipleNegativesRankingLoss
from sentence_transformers.util import cos_sim, dot_score
from torch import nn

from contaccum.losses import ContAccumLoss
from contaccum.training.arguments import BANK_DTYPES, BANK_METHODS, DEFAULT_TEMPERATURE, ContAccumTrainingArguments


def make_loss(model: SentenceTransformer, args: ContAccumTrainingArguments) -> nn.Module:
    """The loss that ``args.method`` names; the baselines are sentence-transformers' own."""
    own = "dot" if str(getattr(model, "similarity_fn_name", "cosine")).endswith("dot") else "cos"
    similarity = args.similarity or own
    temperature = args.temperature if args.temperature is not None else DEFAULT_TEMPERATURE[similarity]
    common: dict[str, Any] = {
        "scale": 1.0 / temperature,
        "similarity_fct": cos_sim if similarity == "cos" else dot_score,
        "gather_across_devices": args.gathers,
    }
    if args.method in BANK_METHODS:
        return ContAccumLoss(
            model,
            bank_size=args.bank_size or 0,
            query_bank_size=args.query_bank_size,
            normalize_by=args.normalize_by,  # type: ignore[arg-type]  # checked by the arguments
            mask_duplicates=args.mask_duplicates,
            bank_hard_negatives=args.bank_hard_negatives,
            drift_compensation=args.drift_compensation,  # type: ignore[arg-type]  # checked by the arguments
            bank_dtype=None if args.bank_dtype is None else BANK_DTYPES[args.bank_dtype],
            bank_device=args.bank_device,
            shard_bank=args.shard_bank,
            **common,
        )
    if args.method == "grad_cache":
        return CachedMultipleNegativesRankingLoss(model, mini_batch_size=args.pairs_per_micro_batch, **common)
    return MultipleNegativesRankingLoss(model, **common)
