"""Train the query encoder alone, against all documents of a corpus, which is encoded only once.

    python examples/query_side.py --data contaccum/data/scifact --output_dir runs/query_side

The document encoder does not change, so the same document embeddings serve before, during and after
training. docs/query_side.md explains when to choose this method.
"""

import argparse
from pathlib import Path

from contaccum import ContAccumTrainer, ContAccumTrainingArguments, DualEncoder
from contaccum.data import load_training_data

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--model", default="sentence-transformers/all-MiniLM-L6-v2")
parser.add_argument("--data", type=Path, required=True, help="training pairs, or a BEIR folder")
parser.add_argument("--corpus", type=Path, help="documents to search; default: the BEIR folder")
parser.add_argument("--output_dir", default="runs/query_side")
parser.add_argument("--learning_rate", type=float, default=3e-4)
parser.add_argument(
    "--max_steps", type=int, default=-1, help="number of updates of 128 pairs; default: 3 epochs"
)
options = parser.parse_args()

corpus = options.corpus
if corpus is None and options.data.is_dir():
    corpus = options.data
if corpus is None:
    parser.error(
        "--corpus is missing: --data is not a BEIR folder, so pass the documents to search"
    )

# 1. Load the model
model = DualEncoder.from_pretrained(options.model)

# 2. Load the training pairs
data = load_training_data(options.data)

# 3. Set the training arguments
args = ContAccumTrainingArguments(
    output_dir=options.output_dir,
    method="query_side",
    corpus=str(corpus),  # encoded once and stored in output_dir/passage_store
    per_device_train_batch_size=32,
    gradient_accumulation_steps=4,
    learning_rate=options.learning_rate,
    num_train_epochs=3,
    max_steps=options.max_steps,
    save_strategy="no",
)

# 4. Train and save the model beside its document embeddings
trainer = ContAccumTrainer(model, args, data.dataset, data_record=data.record())
trainer.train()
trainer.save_model()
print(f"The model is saved in {options.output_dir}")
print(f"The document embeddings are in {options.output_dir}/passage_store")
