"""Create a small encoder for studies: the first layers of a BERT, or a BERT with random weights.

python eval/study/small_backbone.py MODEL OUT
"""

import argparse

from transformers import AutoConfig, AutoModel, AutoTokenizer, set_seed


def save_small_backbone(
    model: str, output: str, layers: int, hidden_size: int | None, seed: int
) -> str:
    """Save a small encoder with its tokenizer.

    Args:
        model: folder or hub name of a BERT.
        output: folder of the new encoder.
        layers: number of layers.
        hidden_size: width of an encoder with random weights; None: copy the first layers of
        ``model``.
        seed: random seed of the weights.

    Returns:
        A line that describes the new encoder.
    """
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
    num_parameters = sum(parameter.numel() for parameter in backbone.parameters())
    return f"{output}: {layers} layers, {num_parameters / 1e6:.1f}M parameters"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="folder or hub name of a BERT")
    parser.add_argument("output", help="a new folder")
    parser.add_argument("--layers", type=int, default=2, help="number of layers")
    parser.add_argument(
        "--hidden_size",
        type=int,
        help="use random weights with this hidden size, a multiple of 32",
    )
    parser.add_argument("--seed", type=int, default=0, help="random seed of the weights")
    print(save_small_backbone(**vars(parser.parse_args())))
