"""Train a retriever with memory banks on query-passage pairs.

    python scripts/train.py --model bert-base-uncased --train_data pairs.jsonl \\
        --per_device_train_batch_size 8 --gradient_accumulation_steps 16 --bank_size 1024 \\
        --output_dir runs/mine

Every field of `ContAccumTrainingArguments` is an option. The output folder is a
SentenceTransformer; a model that is already there is replaced. The program trains on a single data
set and does not evaluate; `contaccum train` can do more.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field

from transformers import HfArgumentParser, set_seed

from contaccum import ContAccumTrainer, ContAccumTrainingArguments, DualEncoder
from contaccum.data import load_training_data
from contaccum.encoders.loading import is_sentence_transformer
from contaccum.errors import UserError


@dataclass
class ModelAndData:
    """The model to train and the data to train on."""

    model: str = field(metadata={"help": "a SentenceTransformer or a transformers backbone"})
    train_data: str = field(metadata={"help": "a file, a folder, or a data set on the hub"})
    num_hard_negatives: int = field(default=0, metadata={"help": "hard negatives per query"})
    tied: bool = field(
        default=True, metadata={"help": "for a backbone: use one encoder for queries and passages"}
    )
    normalize: bool = field(
        default=False, metadata={"help": "for a backbone: normalize embeddings"}
    )
    pooling: str | None = field(
        default=None,
        metadata={"help": "for a backbone: cls, mean or lasttoken; default: depends on its type"},
    )


def load_model(options: ModelAndData, device: str) -> DualEncoder:
    """Load a SentenceTransformer, or add pooling to a backbone; the weights are in float32."""
    if is_sentence_transformer(options.model):
        return DualEncoder.from_pretrained(options.model, device=device).float()
    return DualEncoder.from_backbone(
        options.model,
        tied=options.tied,
        pooling=options.pooling,
        normalize=options.normalize,
        device=device,
    )


def main() -> None:
    """Train and save a model."""
    parser = HfArgumentParser(
        [ModelAndData, ContAccumTrainingArguments],
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options, args = parser.parse_args_into_dataclasses()
    set_seed(args.seed)  # for new weights and dropout

    # The data are read first, so that an invalid record is refused before the model is loaded.
    data = load_training_data(
        options.train_data,
        num_hard_negatives=options.num_hard_negatives,
    )
    print(data.report.summary())

    model = load_model(options, device=str(args.device))
    trainer = ContAccumTrainer(model, args, data.dataset, data_record=data.record())
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model(args.output_dir)
    print(f"saved: {args.output_dir}")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(f"train.py: error: {error}", file=sys.stderr)
        sys.exit(2)
