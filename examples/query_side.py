"""Train the query tower alone, against every document of a corpus that is encoded once.

    python examples/query_side.py --data contaccum/data/scifact --output_dir runs/query_side

The document tower does not move, so its embeddings serve before and after. docs/query_side.md says
when this is the method to choose.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from contaccum import ContAccumTrainer, ContAccumTrainingArguments, DualEncoder
from contaccum.data import load_training_data


def main() -> None:
    """Encode the corpus, train, and save the model beside its index."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="sentence-transformers/all-MiniLM-L6-v2")
    parser.add_argument("--data", type=Path, required=True, help="pairs, or a BEIR folder")
    parser.add_argument("--corpus", type=Path, help="default: the BEIR folder")
    parser.add_argument("--output_dir", default="runs/query_side")
    parser.add_argument("--learning_rate", type=float, default=1.6e-4)
    parser.add_argument("--max_steps", type=int, default=24, help="updates of 128 pairs")
    options = parser.parse_args()
    corpus = options.corpus
    if corpus is None and options.data.is_dir():
        corpus = options.data
    if corpus is None:
        parser.error("--corpus: name the documents to search in")

    model = DualEncoder.from_pretrained(options.model)
    data = load_training_data(options.data)
    args = ContAccumTrainingArguments(
        output_dir=options.output_dir,
        method="query_side",
        corpus=str(corpus),  # encoded once, into output_dir/passage_store
        missing="add",  # positives that the corpus lacks become documents as well
        per_device_train_batch_size=32,
        gradient_accumulation_steps=4,
        learning_rate=options.learning_rate,
        max_steps=options.max_steps,
        save_strategy="no",
    )
    trainer = ContAccumTrainer(model, args, data.dataset, data_record=data.record())
    trainer.train()
    trainer.save_model()
    print(f"saved {options.output_dir}, and its index in {options.output_dir}/passage_store")


if __name__ == "__main__":
    main()
