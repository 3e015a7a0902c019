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
from tiny_models import qwen3_config, tiny_encoder
from torch import nn
from transformers import DataCollatorWithFlattening

from contaccum import CachedContAccumLoss, ContAccumLoss

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
    """A tiny model, its training data and trainer arguments; a part of the stack changes them."""

    def __init__(self, tokenizer: Any, config: Any, folder: Path) -> None:
        self.tokenizer = tokenizer
        self.config = config
        self.folder = folder
        self.model: Any = tiny_encoder(config=config, normalize=False)
        self.columns = {
            "anchor": sentences(48, 1, 3),
            "positive": sentences(48, 2, 9),
            "negative": sentences(48, 3, 9),
        }
        self.arguments: dict[str, Any] = {
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "max_steps": 6,
            "learning_rate": 1e-2,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "use_cpu": True,
            "disable_tqdm": True,
        }
        self.wrap_loss: Callable[[nn.Module], nn.Module] = lambda loss: loss
        self.has_texts = True

    def train(self, loss_name: str) -> None:
        """Train with a loss; check that the weights change and that the bank works."""
        args = SentenceTransformerTrainingArguments(str(self.folder), **self.arguments)
        loss_fn = self.wrap_loss(LOSSES[loss_name](self.model))
        dataset = Dataset.from_dict(self.columns)
        trainer = SentenceTransformerTrainer(self.model, args, dataset, loss=loss_fn)
        initial_weights = [parameter.detach().clone() for parameter in self.model.parameters()]
        trainer.train()
        have_weights_changed = any(
            not torch.equal(initial, trained)
            for initial, trained in zip(initial_weights, self.model.parameters(), strict=True)
        )
        assert have_weights_changed
        losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
        assert all(0 < loss < 100 for loss in losses), losses
        for module in loss_fn.modules():
            if isinstance(module, ContAccumLoss):
                check_bank(module, self.has_texts)


def check_bank(loss_fn: ContAccumLoss, has_texts: bool) -> None:
    """Check the bank after six updates of eight pairs with one hard negative each."""
    info_nce = loss_fn.info_nce
    assert info_nce.clock.num_updates == 6
    assert info_nce.bank.total_enqueued >= 16
    if not has_texts:
        assert info_nce.compensation.probe is None
        return
    assert len(info_nce.compensation.probe.pairs) == 1
    # Every positive and every hard negative has its own id.
    assert info_nce.bank.document_ids[1].unique().numel() == 2 * 16


def use_gradient_checkpointing(case: Case) -> None:
    case.arguments["gradient_checkpointing"] = True


def use_lora(case: Case) -> None:
    peft = pytest.importorskip("peft")
    case.model.add_adapter(peft.LoraConfig(r=4, target_modules=["query", "value"]))


def use_torch_compile(case: Case) -> None:
    case.arguments["torch_compile"] = True
    case.arguments["torch_compile_backend"] = "aot_eager"


def use_unpadded_inputs(case: Case) -> None:
    config = qwen3_config(len(case.tokenizer))
    case.model = tiny_encoder(config=config, normalize=False)
    flatten = DataCollatorWithFlattening(return_flash_attn_kwargs=True)

    def preprocess(texts: list[str], prompt: Any = None, **_: Any) -> dict[str, Any]:
        rows = [{"input_ids": token_ids} for token_ids in case.tokenizer(texts)["input_ids"]]
        features = flatten(rows)
        return {key: value for key, value in features.items() if key != "labels"}

    case.model[0].preprocess = preprocess


def use_static_embedding(case: Case) -> None:
    embedding = StaticEmbedding(case.tokenizer.backend_tokenizer, embedding_dim=16)
    case.model = SentenceTransformer(modules=[embedding], device="cpu")


class ImageEncoder(nn.Module):
    """An encoder of images, with inputs as in a vision-language model.

    Each text stands for a random image. All texts have the same placeholder tokens.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3 * 4 * 4, 32)

    def preprocess(
        self, inputs: list[Any], prompt: Any = None, **_: Any
    ) -> dict[str, torch.Tensor]:
        images = []
        for text in inputs:
            generator = torch.Generator().manual_seed(zlib.crc32(str(text).encode()))
            images.append(torch.randn(3, 4, 4, generator=generator))
        token_ids = torch.full((len(inputs), 5), 7)
        return {
            "input_ids": token_ids,
            "attention_mask": torch.ones_like(token_ids),
            "pixel_values": torch.stack(images),
        }

    def forward(self, features: dict[str, Any], **_: Any) -> dict[str, Any]:
        features["sentence_embedding"] = self.linear(features["pixel_values"].flatten(1))
        return features


def use_images(case: Case) -> None:
    case.model = SentenceTransformer(modules=[ImageEncoder()], device="cpu")
    case.has_texts = False


def use_matryoshka_loss(case: Case) -> None:
    case.wrap_loss = lambda loss: MatryoshkaLoss(case.model, loss, [32, 16])


def use_router(case: Case) -> None:
    case.model = tiny_encoder(tied=False, config=case.config, normalize=False)
    case.arguments["router_mapping"] = {
        "anchor": "query",
        "positive": "document",
        "negative": "document",
    }


PARTS = {
    "gradient checkpointing": use_gradient_checkpointing,
    "LoRA": use_lora,
    "torch.compile": use_torch_compile,
    "unpadded inputs (FlashAttention-2)": use_unpadded_inputs,
    "StaticEmbedding": use_static_embedding,
    "images": use_images,
    "MatryoshkaLoss": use_matryoshka_loss,
    "Router": use_router,
}
# Compiling takes almost a minute. A test of the encoders compiles a model for every change.
MARKS = {"torch.compile": [pytest.mark.long]}
CASES = [pytest.param(part, marks=MARKS.get(part, [])) for part in PARTS]


def read_table() -> dict[str, dict[str, str]]:
    """Read the table of the page: {part: {loss: "yes" or "no"}}."""
    table = {}
    for line in PAGE.splitlines():
        if line.startswith("| "):
            part, *cells = [cell.strip() for cell in line.strip("|").split("|")]
            table[part] = dict(zip(LOSSES, cells, strict=False))
    return table


TABLE = read_table()


# The cached loss shares its parts with `ContAccumLoss`; published losses are the work of
# sentence-transformers.
LOSS_CASES = [
    pytest.param(name, marks=[] if name == "ContAccumLoss" else [pytest.mark.long])
    for name in LOSSES
]


@pytest.mark.parametrize("part", CASES)
@pytest.mark.parametrize("loss_name", LOSS_CASES)
def test_losses_train_with_parts_of_the_stack_as_the_table_says(
    loss_name, part, tiny_tokenizer, tiny_config, tmp_path
):
    case = Case(tiny_tokenizer, tiny_config, tmp_path)
    PARTS[part](case)
    if TABLE[part][loss_name] == "yes":
        case.train(loss_name)
    else:
        assert TABLE[part][loss_name] == "no"
        with pytest.raises(ValueError, match=r"not compatible|cannot split"):
            case.train(loss_name)
