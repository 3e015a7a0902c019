"""Training from Python: own pairs, a bank of negatives, and a score before and after.

    python scripts/train.py PAIRS.jsonl BEIR_FOLDER [--model NAME]

`contaccum train` does the same from a YAML file, with every option. This is what it comes to in code.
"""

from __future__ import annotations

import argparse

from contaccum import ContAccumTrainer, ContAccumTrainingArguments, DualEncoder
from contaccum.data import load_beir_folder, load_training_data
from contaccum.evaluation.beir import evaluate_beir


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", help='lines of {"query": ..., "positive": ...}, or any format of docs/data.md')
    parser.add_argument("beir", help="a BEIR folder with a test split")
    parser.add_argument("--model", default="sentence-transformers/all-MiniLM-L6-v2")
    parser.add_argument("--output_dir", default="runs/train")
    parser.add_argument("--max_steps", type=int, default=100)
    options = parser.parse_args()

    data = load_training_data(options.pairs)
    test = load_beir_folder(options.beir, split="test")
    model = DualEncoder.from_pretrained(options.model)  # or from_backbone("bert-base-uncased", tied=False)
    args = ContAccumTrainingArguments(
        output_dir=options.output_dir,
        method="contaccum",
        bank_size=1024,  # negatives that every query sees beside those of its micro-batch
        per_device_train_batch_size=8,  # pairs that memory has room for
        gradient_accumulation_steps=16,  # micro-batches per update: 128 pairs
        max_steps=options.max_steps,
        learning_rate=5e-5,
        warmup_steps=10,
        save_strategy="no",
    )
    before = evaluate_beir(model, test).metrics["NDCG@10"]
    trainer = ContAccumTrainer(model=model, args=args, train_dataset=data.dataset, data_record=data.record())
    trainer.train()
    trainer.save_model(options.output_dir)  # SentenceTransformer(options.output_dir) loads it
    after = evaluate_beir(model, test).metrics["NDCG@10"]
    print(f"nDCG@10 {before:.4f} before, {after:.4f} after {args.max_steps} updates of {data.report.summary()}")


if __name__ == "__main__":
    main()
