"""Fine-tune an embedding model on your own query-passage pairs, with a memory bank of negatives.

    python examples/finetune_on_pairs.py                  # Natural Questions, from the Hub
    python examples/finetune_on_pairs.py --data faq.csv   # with the columns query and positive

The data can be a csv file with a header, a jsonl file with lines {"query": ..., "positive": ...}, a
data set on the Hugging Face Hub, or any other format of docs/data.md. The script holds out a test
set and scores the model on it before and after training. (It also holds out a dev set, to compare
settings with; the script does not use it.) `contaccum fit` does the same and also searches for the
best settings. Natural Questions has 100,000 pairs: on a CPU, first try
--max_steps 20.
"""

import argparse
from pathlib import Path

import torch

from contaccum import ContAccumTrainer, ContAccumTrainingArguments, DualEncoder
from contaccum.data import load_beir_folder, load_training_data
from contaccum.data.records import RecordSource
from contaccum.data.split import SplitSettings, read_split, split_data
from contaccum.evaluation.evaluator import RetrievalEvaluator

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--model", default="sentence-transformers/all-MiniLM-L6-v2")
parser.add_argument("--data", default="sentence-transformers/natural-questions")
parser.add_argument(
    "--held_out",
    type=float,
    help="test queries: a number, or a share; default: a fifth, at most 1,000",
)
parser.add_argument(
    "--max_steps", type=int, default=-1, help="number of updates; default: one epoch"
)
parser.add_argument("--output_dir", default="runs/finetune_on_pairs")
options = parser.parse_args()

# 1. Load a model. Any SentenceTransformer works; for a bare BERT use DualEncoder.from_backbone(...)
model = DualEncoder.from_pretrained(options.model)

# 2. Split the data. The training part contains no text of a test query and no near-duplicate of one
split_folder = Path(options.output_dir) / "data"
if split_folder.exists():
    print(f"{split_folder} exists and is used again; for other data, name another --output_dir")
else:
    settings = SplitSettings(test=options.held_out)
    split_data(RecordSource(options.data), split_folder, settings, show_progress=True)
print(read_split(split_folder).summary())
data = load_training_data(split_folder / "train.jsonl")

# 3. Create an evaluator. It searches each test query's passage among the passages of the test set
test_set = load_beir_folder(split_folder / "test", "test")
evaluator = RetrievalEvaluator(test_set)
scores_before = evaluator(model)
print("before:", scores_before[evaluator.primary_metric])

# 4. Set the training arguments. Each query is contrasted with the 7 other passages of its
#    micro-batch and with up to 1,024 passages from the bank
args = ContAccumTrainingArguments(
    output_dir=options.output_dir,
    bank_size=1024,  # the pairs of 8 updates; docs/drift.md explains how stale entries are handled
    per_device_train_batch_size=8,  # pairs per micro-batch: as many as fit in memory
    gradient_accumulation_steps=16,  # micro-batches per update: 16 * 8 = 128 pairs
    num_train_epochs=1,
    max_steps=options.max_steps,
    learning_rate=1e-4,  # depends on the data: compare rates on dev, or use contaccum fit
    warmup_steps=0.1,  # a share of all updates
    bf16=torch.cuda.is_available(),
    save_strategy="no",
    logging_steps=10,
)

# 5. Train, save, and evaluate the saved model. (With bf16, the model in memory still computes in
#    bfloat16.) SentenceTransformer(options.output_dir) loads the saved model too
trainer = ContAccumTrainer(model, args, data.dataset, data_record=data.record())
trainer.train()
trainer.save_model(options.output_dir)
scores_after = evaluator(DualEncoder.from_pretrained(options.output_dir))
print("after:", scores_after[evaluator.primary_metric])
