"""Fine-tune an embedding model on your own pairs, with a bank of past pairs as negatives.

    python examples/finetune_on_pairs.py                          # Natural Questions, from the hub
    python examples/finetune_on_pairs.py --data faq.csv           # with the columns query and positive

Data are a csv with a header, lines of {"query": ..., "positive": ...}, a data set on the hub, or any other format of
docs/data.md. A test set is held out, on which the model is scored before and after. `contaccum fit` does the same with
a search for the best settings.
"""

import argparse
from pathlib import Path

import torch

from contaccum import ContAccumTrainer, ContAccumTrainingArguments, DualEncoder
from contaccum.data import load_beir_folder, load_training_data
from contaccum.data.readers import Source
from contaccum.data.split import SplitSettings, read_split, split_data
from contaccum.evaluation.evaluator import RetrievalEvaluator

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--model", default="sentence-transformers/all-MiniLM-L6-v2")
parser.add_argument("--data", default="sentence-transformers/natural-questions")
parser.add_argument("--held_out", type=int, default=500, help="queries")
parser.add_argument(
    "--max_steps", type=int, default=-1, help="updates; default: one pass over the data"
)
parser.add_argument("--output_dir", default="runs/finetune_on_pairs")
options = parser.parse_args()

# 1. The model: any SentenceTransformer; DualEncoder.from_backbone(...) makes one of a bare BERT
model = DualEncoder.from_pretrained(options.model)

# 2. The data: no text of a test query, and nothing nearly the same, is trained on
parts = Path(options.output_dir) / "data"
if not parts.exists():
    split_data(Source(options.data), parts, SplitSettings(dev=1, test=options.held_out))
print(read_split(parts).summary())
data = load_training_data(parts / "train.jsonl")

# 3. An evaluator: each test query has to find its passage among some thousands
evaluator = RetrievalEvaluator(load_beir_folder(parts / "test", "test"))
print("before:", evaluator(model)[evaluator.primary_metric])

# 4. The arguments: every query sees the 7 other passages of its micro-batch, and 1,024 from the bank
args = ContAccumTrainingArguments(
    output_dir=options.output_dir,
    bank_size=1024,  # 8 updates' worth; docs/drift.md says what keeps old entries honest
    per_device_train_batch_size=8,  # pairs that memory has room for
    gradient_accumulation_steps=16,  # micro-batches per update: 128 pairs
    num_train_epochs=1,
    max_steps=options.max_steps,
    learning_rate=2e-5,
    warmup_steps=0.1,  # of all updates
    bf16=torch.cuda.is_available(),
    save_strategy="no",
    logging_steps=10,
)

# 5. Train, score again, save: SentenceTransformer(options.output_dir) loads the model
trainer = ContAccumTrainer(model, args, data.dataset, data_record=data.record())
trainer.train()
print("after:", evaluator(model)[evaluator.primary_metric])
trainer.save_model(options.output_dir)
