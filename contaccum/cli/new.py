"""`contaccum new DIR --data DATA`: looks at training data, and writes a config for it whose lines say why.

Data are read as `contaccum train` reads them, into the same cache. Of the model only the tokenizer is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from contaccum.cli.options import Parser
from contaccum.errors import ConfigError, UserError
from contaccum.files import read_json, write_text

SAMPLE = 1000  # rows whose texts are measured
ENOUGH = 50_000  # pairs for two towers: the paper's smallest set has 58,880


def run(argv: Sequence[str]) -> int:
    """Returns 0; raises `UserError` for a config that is there already, and for data that cannot be used."""
    parser = Parser("new", "Look at training data, and write a config for it whose lines say why.", "on_bad_record")
    add = parser.add_argument
    add("folder", type=Path, metavar="DIR", help="gets config.yaml")
    add("--data", required=True, metavar="DATA", help="training data, in any format of docs/data.md")
    add("--data_columns", nargs="+", metavar="ROLE=NAME", help="columns with names of their own: query=question ...")
    add("--split", default="train", help="of a BEIR or MS MARCO folder, or of a Hugging Face data set")
    add("--model", default="sentence-transformers/all-MiniLM-L6-v2", help="to train; default: %(default)s")
    args = parser.parse(argv)
    config = args.folder / "config.yaml"
    if config.exists():
        raise ConfigError(f"{config}: is there already; name another DIR, or remove it")

    import numpy as np
    import yaml
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    from contaccum.data import load_training_data, parse_columns

    found = {"split": args.split, "columns": parse_columns(args.data_columns), "on_bad_record": args.on_bad_record}
    data = load_training_data(args.data, num_hard_negatives=1, negatives_to_come=True, **found)
    pairs, (queries, passages) = len(data.pairs), map(np.unique, data.pairs.T)
    rows = np.random.default_rng(0).permutation(len(data.dataset))[:SAMPLE]
    texts = data.transform.first_texts(sorted(rows.tolist()))
    families = yaml.safe_load(Path(__file__).with_name("prompts.yaml").read_text(encoding="utf-8"))
    prompts = next((known for family, known in families.items() if re.search(family, args.model, re.I)), ("", ""))
    length, limit, measured = _measure(args.model)
    lengths = []
    for prompt, column in zip(prompts, ("query", "positive"), strict=True):
        most = np.quantile([length(f"{prompt}{text}") for text in texts[column]], 0.95)
        lengths.append(int(min(limit, most // 8 * 8 + 8)))  # of whole eights, which accelerators like
    alike = bool(np.isin(queries, passages).mean() > 0.01 or lengths[1] <= 2 * lengths[0])
    found |= {"data": data, "model": args.model, "folder": args.folder, "config": config, "prompts": prompts}
    found |= {"pairs": pairs, "queries": len(queries), "passages": len(passages), "lengths": lengths}
    found |= {"measured": measured, "alike": alike, "tied": alike or any(prompts) or pairs < ENOUGH}
    found |= {"negatives": any(texts["negative_1"]), "steps": max(1, min(16, pairs // 64))}
    found |= {"bank_size": 2 ** int(np.log2(min(1024, max(8, len(passages) // 2))))}
    templates = Environment(loader=FileSystemLoader(Path(__file__).parent), undefined=StrictUndefined, trim_blocks=True)
    text = templates.get_template("config.yaml.j2").render(found)
    write_text(config, text + "\n")
    print(text.partition("\n")[0].removeprefix("# "), f"written: {config}", sep="\n")
    print(f"look through it, then: contaccum train {config}")
    return 0


def _measure(model: str) -> tuple[Callable[[str], float], int, str]:
    """The length of a text in tokens, the most to use, and how both are known: by the tokenizer, if it can be had."""
    from sentence_transformers.util import load_file_path
    from transformers import AutoTokenizer

    from contaccum.encoders.loading import require_model

    try:
        require_model(model)
        tokenizer, own = AutoTokenizer.from_pretrained(model), load_file_path(model, "sentence_bert_config.json")
    except (UserError, OSError, ValueError):
        return lambda text: len(text.encode()) / 4, 512, "guessed from their letters, without the tokenizer"
    most = min(512, tokenizer.model_max_length, (own and read_json(own).get("max_seq_length")) or 512)
    return lambda text: len(tokenizer(text, verbose=False)["input_ids"]), most, "by the tokenizer"
