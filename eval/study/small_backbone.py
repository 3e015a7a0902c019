"""Make a small encoder for studies: cut from a BERT, or of fresh weights.

python eval/study/small_backbone.py MODEL OUT
"""

import argparse

from transformers import AutoConfig, AutoModel, AutoTokenizer, set_seed


def small_backbone(model: str, output: str, layers: int, hidden_size: int | None, seed: int) -> str:
    """Write the first layers of a BERT, or as many with fresh weights of a width; returns what it is."""
    config = AutoConfig.from_pretrained(model)
    if config.model_type != "bert" or not 0 < layers <= config.num_hidden_layers:
        raise SystemExit(f"small_backbone: error: {model} is no bert of {layers} layers or more")
    config.num_hidden_layers = layers
    if hidden_size is None:
        backbone = AutoModel.from_pretrained(model, config=config)
    else:
        set_seed(seed)
        config.update({"hidden_size": hidden_size, "intermediate_size": 4 * hidden_size})
        config.num_attention_heads = hidden_size // 32
        backbone = AutoModel.from_config(config)
    backbone.save_pretrained(output)
    AutoTokenizer.from_pretrained(model).save_pretrained(output)
    return f"{output}: {layers} layers, {sum(p.numel() for p in backbone.parameters()) / 1e6:.1f}M weights"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a folder or hub name of a BERT")
    parser.add_argument("output", help="a new folder")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument(
        "--hidden_size", type=int, help="fresh weights of this width, a multiple of 32"
    )
    parser.add_argument("--seed", type=int, default=0, help="of fresh weights")
    print(small_backbone(**vars(parser.parse_args())))
