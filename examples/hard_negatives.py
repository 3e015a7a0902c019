"""Mine hard negatives with the model that is to be trained, and train on them beside the bank.

    python examples/hard_negatives.py                             # Natural Questions, from the hub
    python examples/hard_negatives.py --data pairs.jsonl --model BAAI/bge-small-en-v1.5

Negatives are sought among the passages of all pairs; docs/mining.md has other corpora, BM25, and what they are worth:
the fewer negatives a query sees otherwise, the more.
"""

import argparse
from pathlib import Path

import torch

from contaccum import ContAccumTrainer, ContAccumTrainingArguments, DualEncoder
from contaccum.data import load_training_data
from contaccum.mining import mine_hard_negatives, write_mined

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--model", default="sentence-transformers/all-MiniLM-L6-v2")
parser.add_argument("--data", default="sentence-transformers/natural-questions")
parser.add_argument(
    "--max_steps", type=int, default=-1, help="updates; default: one pass over the data"
)
parser.add_argument("--output_dir", default="runs/hard_negatives")
options = parser.parse_args()

# 1. The model, which mines first
model = DualEncoder.from_pretrained(options.model)

# 2. Mine: eight of the best hundred that score 5% below the positive: others may well be relevant
mined = Path(options.output_dir) / "mined.jsonl"
if not mined.exists():
    mined.parent.mkdir(parents=True, exist_ok=True)
    rules = {"num_negatives": 8, "relative_margin": 0.05, "range_max": 100, "sampling": "random"}
    write_mined(mine_hard_negatives(options.data, model, **rules), mined)

# 3. The data: rows of query, positive and one negative, in each epoch another of the eight
data = load_training_data(mined, num_hard_negatives=1)
print(data.report.summary(), "For example:", data.dataset[0], sep="\n")

# 4. The arguments: hard negatives enter the bank as well, so that all queries see them
args = ContAccumTrainingArguments(
    output_dir=options.output_dir,
    bank_size=1024,
    per_device_train_batch_size=8,
    gradient_accumulation_steps=16,
    num_train_epochs=1,
    max_steps=options.max_steps,
    learning_rate=2e-5,
    warmup_steps=0.1,
    bf16=torch.cuda.is_available(),
    save_strategy="no",
    logging_steps=10,
)

# 5. Train and save
trainer = ContAccumTrainer(model, args, data.dataset, data_record=data.record())
trainer.train()
trainer.save_model(options.output_dir)
