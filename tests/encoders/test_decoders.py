"""Decoder backbones: the last token, EOS at the end of every text, padding, instructions; the recipes of configs/."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from datasets import Dataset
from sample_texts import WORDS, sentences
from sentence_transformers import SentenceTransformer
from small_data import read_lines, write_training_and_beir_data
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import ByteLevel, Sequence, TemplateProcessing
from transformers import AutoModel, PreTrainedTokenizerFast

from contaccum import ContAccumTrainer, ContAccumTrainingArguments, DualEncoder
from contaccum.cli import main
from contaccum.errors import ConfigError

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
KEYS = {"num_key_value_heads": 1, "head_dim": 16}
CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen3": {**SIZES, **KEYS},
    "Llama": SIZES,
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 2},
    "Qwen3Moe": {
        **SIZES,
        **KEYS,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
    "Gemma3Text": {**SIZES, **KEYS, "use_bidirectional_attention": True},
    "ModernBert": {**SIZES, "pad_token_id": 0},
    "T5": {"d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 2, "d_kv": 16},
}
DECODERS = ("Qwen3", "Llama", "GPT2")
SPECIAL = ["<unk>", "<bos>", "<eos>"]
BEGIN = TemplateProcessing(["<bos>", "$A"], special_tokens=[("<bos>", 1)])
CLOSE = TemplateProcessing(["<bos>", "$A", "<eos>"], special_tokens=[("<bos>", 1), ("<eos>", 2)])
INSTRUCTION = "Instruct: find what is in the door\nQuery:"


def tokenizer(
    post_processor: Any = None, words: list[str] = WORDS, **settings: Any
) -> PreTrainedTokenizerFast:
    """One over WORDS that has no pad token, as decoders' often have none."""
    backend = Tokenizer(
        models.WordLevel({t: i for i, t in enumerate([*SPECIAL, *words])}, unk_token="<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    if post_processor is not None:
        backend.post_processor = post_processor
    given = {
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "unk_token": "<unk>",
        "model_max_length": 64,
    } | settings
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, model_input_names=["input_ids", "attention_mask"], **given
    )


def config(kind: str) -> Any:
    return getattr(transformers, f"{kind}Config")(
        vocab_size=len(SPECIAL) + len(WORDS), **CONFIGS[kind]
    )


def encoder(kind: str = "Qwen3", **settings: Any) -> DualEncoder:
    return DualEncoder.from_backbone(
        config(kind), device="cpu", **{"tokenizer": tokenizer(), **settings}
    )


def tokens(model: SentenceTransformer, text: str, task: str = "document") -> list[str]:
    return model.tokenizer.convert_ids_to_tokens(
        model.preprocess([text], task=task)["input_ids"][0]
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_backbone_whose_first_token_sees_no_other_gets_its_last(kind, dtype):
    """Gemma and T5 here have classes of decoders and see both ways; the mixture of experts sees one way."""
    causal = kind in (*DECODERS, "Qwen3Moe")
    model = encoder(kind, dtype=dtype)
    assert model[1].pooling_mode == ("lasttoken" if causal else "cls")
    assert all(parameter.grad is None for parameter in model.parameters())
    assert (tokens(model, "cat dog")[-1] == "<eos>") == causal
    assert len(np.unique(model.encode(sentences(4)), axis=0)) == 4
    assert encoder(kind, pooling="mean")[1].pooling_mode == "mean"
    if causal:
        unknown = tokenizer(
            words=[word for word in WORDS if word != "how"]
        )  # the text's first token comes again
        assert encoder(kind, tokenizer=unknown)[1].pooling_mode == "lasttoken"
        with pytest.raises(
            ConfigError,
            match=rf"pooling=cls with a decoder \({kind}Model\).*Set lasttoken or mean$",
        ):
            encoder(kind, pooling="cls")


@pytest.mark.parametrize(
    ("post_processor", "first"),
    [
        (None, []),
        (BEGIN, ["<bos>"]),
        (Sequence([ByteLevel(), BEGIN]), ["<bos>"]),
        (CLOSE, ["<bos>"]),
    ],
    ids=["nothing added", "bos", "bos in a chain", "eos already"],
)
@pytest.mark.parametrize("tied", [True, False])
def test_every_text_ends_in_one_eos_cut_or_not_and_saved(post_processor, first, tied, tmp_path):
    given = tokenizer(post_processor)
    before = given("cat dog")["input_ids"]
    backbone, saved = tmp_path / "backbone", str(tmp_path / "saved")
    AutoModel.from_config(config("Qwen3")).save_pretrained(backbone)
    tokenizer().save_pretrained(backbone)
    model = DualEncoder.from_backbone(
        backbone, tied, tokenizer=given, query_max_length=5, device="cpu"
    )
    model.save_pretrained(saved)
    for one in (model, SentenceTransformer(saved, device="cpu")):
        assert tokens(one, "cat dog") == [*first, "cat", "dog", "<eos>"]
        words = ["cat", "dog", "bird", "fish"][: 4 - len(first)]
        assert tokens(one, "cat dog bird fish tree river", "query") == [*first, *words, "<eos>"]
        assert one.tokenizer.pad_token == "<eos>"
    assert given.pad_token is None and given("cat dog")["input_ids"] == before


def test_what_a_tokenizer_lacks_is_taken_from_what_it_has_or_is_one_line():
    assert encoder("ModernBert", tokenizer=tokenizer(eos_token=None)).tokenizer.pad_token == "<unk>"
    assert encoder(tokenizer=tokenizer(pad_token="the")).tokenizer.pad_token == "the"
    assert encoder(pooling="mean").tokenizer("cat")["input_ids"] == tokenizer()("cat")["input_ids"]
    with pytest.raises(ConfigError, match="has no pad token, .*: set pad_token in its"):
        encoder(tokenizer=tokenizer(eos_token=None, unk_token=None))
    with pytest.raises(ConfigError, match="has no eos_token: set pooling=mean"):
        encoder(tokenizer=tokenizer(eos_token=None, pad_token="the"))


@pytest.mark.parametrize("kind", DECODERS)
@pytest.mark.parametrize("side", ["right", "left"])
def test_texts_of_unequal_lengths_encode_together_as_alone(kind, side):
    model = encoder(kind, tokenizer=tokenizer(padding_side=side))
    assert model.tokenizer.padding_side == "right"
    texts = [" ".join(WORDS[i : 2 * i + 1]) for i in range(1, 9)]
    alone = np.concatenate([model.encode([text]) for text in texts])
    assert np.abs(model.encode(texts) - alone).max() < 1e-5
    model.tokenizer.padding_side = (
        "left"  # what others may set; rotary positions are relative, GPT-2's are not
    )
    error = np.abs(model.encode(texts) - alone).max()
    assert error < 1e-5 if kind != "GPT2" else error > 1e-3


@pytest.mark.parametrize("kind", DECODERS)
def test_a_trained_decoder_encodes_identically_in_sentence_transformers(kind, tmp_path):
    torch.manual_seed(0)
    model = encoder(kind, query_prompt=INSTRUCTION, normalize=True, query_max_length=24)
    texts = sentences(9, length=15)
    before = model.encode_query(texts)
    sizes = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "bank_size": 8,
        "max_steps": 4,
    }
    how = {
        "learning_rate": 1e-2,
        "gradient_checkpointing": True,
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    args = ContAccumTrainingArguments(output_dir=str(tmp_path), **sizes, **how)
    data = Dataset.from_dict({"query": sentences(16, 1), "positive": sentences(16, 2, 9)})
    trainer = ContAccumTrainer(model, args, data)
    trainer.train()
    queries, passages = model.encode_query(texts), model.encode_document(texts)
    assert np.abs(queries - before).max() > 1e-2
    trainer.save_model()
    loaded = SentenceTransformer(str(tmp_path), device="cpu")
    assert np.array_equal(loaded.encode_query(texts), queries)
    assert np.array_equal(loaded.encode_document(texts), passages)


@pytest.mark.parametrize("name", ["decoder-lora", "bert-full"])
def test_a_recipe_trains_a_tiny_model_as_it_stands(
    name, tiny_config, tiny_tokenizer, tmp_path, capsys
):
    file = Path(__file__).parents[2] / "configs" / f"{name}.yaml"
    backbone, decoder = tmp_path / "backbone", name == "decoder-lora"
    bert = type(tiny_config)(**{**tiny_config.to_dict(), "max_position_embeddings": 512})
    AutoModel.from_config(config("Qwen3") if decoder else bert).save_pretrained(backbone)
    (tokenizer(model_max_length=512) if decoder else tiny_tokenizer).save_pretrained(backbone)
    write_training_and_beir_data(tmp_path, 128)
    given = {
        "model": backbone,
        "train_data": tmp_path / "pairs.jsonl",
        "output_dir": tmp_path / "out",
        "max_steps": 1,
    }
    assert main(["train", str(file), *(f"--{key}={value}" for key, value in given.items())]) == 0, (
        capsys.readouterr()
    )
    model = SentenceTransformer(str(tmp_path / "out"), device="cpu")
    assert model[1].pooling_mode == ("lasttoken" if decoder else "mean")
    log = read_lines(tmp_path / "out" / "train_log.jsonl")
    assert [line["pairs"] for line in log] == [128] and log[0]["bank_fill"] == 128
