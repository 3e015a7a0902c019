"""docs/stack.md: every cell of its table is tested, also for sentence-transformers' losses."""

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from sample_texts import sentences
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer.losses import (
    CachedMultipleNegativesRankingLoss,
    MatryoshkaLoss,
    MultipleNegativesRankingLoss,
)
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from tiny_models import qwen3_config
from torch import nn
from transformers import DataCollatorWithFlattening

from contaccum import CachedContAccumLoss, ContAccumLoss, DualEncoder

PAGE = (Path(__file__).parents[1] / "docs" / "stack.md").read_text(encoding="utf-8")
LOSSES: dict[str, Callable[[Any], nn.Module]] = {
    "ContAccumLoss": lambda model: ContAccumLoss(model, bank_size=16),
    "CachedContAccumLoss": lambda model: CachedContAccumLoss(
        model, bank_size=16, mini_batch_size=2
    ),
    "MultipleNegativesRankingLoss": MultipleNegativesRankingLoss,
    "CachedMultipleNegativesRankingLoss": lambda model: CachedMultipleNegativesRankingLoss(
        model, mini_batch_size=2
    ),
}


class Case:
    """A tiny model of the part's kind and a plain trainer's run of six updates: the losses, if it ends."""

    def __init__(self, tokenizer: Any, config: Any, folder: Path) -> None:
        self.tokenizer, self.config, self.folder = tokenizer, config, folder
        self.model: Any = DualEncoder.from_backbone(
            config, tokenizer=tokenizer, pooling="mean", device="cpu"
        )
        self.columns: dict[str, Any] = {
            "anchor": sentences(48, 1, 3),
            "positive": sentences(48, 2, 9),
        }
        self.columns["negative"] = sentences(48, 3, 9)
        self.arguments: dict[str, Any] = {}
        self.wrap: Callable[[nn.Module], nn.Module] = lambda loss: loss

    def run(self, name: str) -> list[float]:
        arguments: dict[str, Any] = {
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "max_steps": 6,
        }
        arguments |= {
            "learning_rate": 1e-2,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
        }
        arguments |= {"use_cpu": True, "disable_tqdm": True, **self.arguments}
        args = SentenceTransformerTrainingArguments(str(self.folder), **arguments)
        loss = self.wrap(LOSSES[name](self.model))
        trainer = SentenceTransformerTrainer(
            self.model, args, Dataset.from_dict(self.columns), loss=loss
        )
        before = [p.detach().clone() for p in self.model.parameters()]
        trainer.train()
        moved = any(
            not torch.equal(a, b) for a, b in zip(before, self.model.parameters(), strict=True)
        )
        losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
        assert moved and all(0 < x < 100 for x in losses), losses
        for ours in (x.info_nce for x in loss.modules() if isinstance(x, ContAccumLoss)):
            assert (ours.clock.num_updates, ours.bank.fill, len(ours.compensation.probe.pairs)) == (
                5,
                16,
                1,
            )
            assert (
                ours.bank.document_ids[1].unique().numel() == 2 * 16
            )  # positives and negatives: every text has an id
        return losses


def gradient_checkpointing(case: Case) -> None:
    case.arguments |= {"gradient_checkpointing": True}


def lora(case: Case) -> None:
    peft = pytest.importorskip("peft")
    case.model.add_adapter(peft.LoraConfig(r=4, target_modules=["query", "value"]))


def compiled(case: Case) -> None:
    case.arguments |= {"torch_compile": True, "torch_compile_backend": "aot_eager"}


def unpadded(case: Case) -> None:
    config = qwen3_config(len(case.tokenizer))
    case.model = DualEncoder.from_backbone(
        config, tokenizer=case.tokenizer, pooling="mean", device="cpu"
    )
    flatten = DataCollatorWithFlattening(return_flash_attn_kwargs=True)

    def preprocess(texts: list[str], prompt: Any = None, **_: Any) -> dict[str, Any]:
        found = flatten([{"input_ids": row} for row in case.tokenizer(texts)["input_ids"]])
        return {key: x for key, x in found.items() if key != "labels"}

    case.model[0].preprocess = preprocess


def static(case: Case) -> None:
    embedding = StaticEmbedding(case.tokenizer.backend_tokenizer, embedding_dim=16)
    case.model = SentenceTransformer(modules=[embedding], device="cpu")


class Pictures(nn.Module):
    """Texts with a picture each behind one placeholder token, as a vision-language model gets them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3 * 4 * 4, 32)

    def preprocess(
        self, inputs: list[Any], prompt: Any = None, **_: Any
    ) -> dict[str, torch.Tensor]:
        draws = [torch.Generator().manual_seed(zlib.crc32(str(x).encode())) for x in inputs]
        pixels = torch.stack([torch.randn(3, 4, 4, generator=draw) for draw in draws])
        tokens = torch.full((len(inputs), 5), 7)
        return {
            "input_ids": tokens,
            "attention_mask": torch.ones_like(tokens),
            "pixel_values": pixels,
        }

    def forward(self, features: dict[str, Any], **_: Any) -> dict[str, Any]:
        features["sentence_embedding"] = self.inner(features["pixel_values"].flatten(1))
        return features


def multimodal(case: Case) -> None:
    case.model = SentenceTransformer(modules=[Pictures()], device="cpu")


def matryoshka(case: Case) -> None:
    case.wrap = lambda loss: MatryoshkaLoss(case.model, loss, [32, 16])


def router(case: Case) -> None:
    given: Any = {"tied": False, "tokenizer": case.tokenizer, "pooling": "mean", "device": "cpu"}
    case.model = DualEncoder.from_backbone(case.config, **given)
    case.arguments |= {
        "router_mapping": {"anchor": "query", "positive": "document", "negative": "document"}
    }


PARTS = {
    "gradient checkpointing": gradient_checkpointing,
    "LoRA": lora,
    "torch.compile": compiled,
    "unpadded inputs (FlashAttention-2)": unpadded,
    "StaticEmbedding": static,
    "images": multimodal,
    "MatryoshkaLoss": matryoshka,
    "Router": router,
}
TABLE = {
    cells[0].strip(): dict(zip(LOSSES, map(str.strip, cells[1:]), strict=False))
    for cells in (line.strip("|").split("|") for line in PAGE.splitlines() if line.startswith("| "))
}


# Compiling takes most of a minute; test_a_compiled_model_trains_as_one_that_is_not compiles for every change.
MARKS = {"torch.compile": [pytest.mark.long]}


@pytest.mark.parametrize("part", [pytest.param(part, marks=MARKS.get(part, [])) for part in PARTS])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_trains_with_a_part_of_the_stack_where_the_table_says_so_and_else_does_not(
    name, part, tiny_tokenizer, tiny_config, tmp_path
):
    case = Case(tiny_tokenizer, tiny_config, tmp_path)
    PARTS[part](case)
    if TABLE[part][name] == "yes":
        case.run(name)
    else:
        assert TABLE[part][name] == "no"
        with pytest.raises(ValueError, match=r"not compatible|cannot split"):
            case.run(name)
