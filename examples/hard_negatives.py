"""Mine hard negatives with a model, then train this model on them with a memory bank.

    python examples/hard_negatives.py   # Natural Questions, from the Hugging Face Hub
    python examples/hard_negatives.py --data pairs.jsonl --model all-mpnet-base-v2

Natural Questions has 100,000 pairs: on a CPU, first try your own data. The negatives are mined
among the passages of all pairs (of a BEIR folder: in its whole corpus). docs/mining.md explains how
to mine in another corpus or with BM25.
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
    "--max_steps", type=int, default=-1, help="number of updates; default: one epoch"
)
parser.add_argument("--output_dir", default="runs/hard_negatives")
options = parser.parse_args()

# 1. Load the model, which mines the negatives and is then trained on them
model = DualEncoder.from_pretrained(options.model)

# 2. Mine hard negatives: sample 8 of the 100 best passages of each query. The margin of 5% leaves
#    out passages that score almost as high as the positive, because they may be relevant as well
mined_file = Path(options.output_dir) / "mined.jsonl"
if mined_file.exists():
    print(
        f"{mined_file} exists and is used again; for other data or another model, name another "
        "--output_dir"
    )
else:
    mined_file.parent.mkdir(parents=True, exist_ok=True)
    mined = mine_hard_negatives(
        options.data,
        model,
        num_negatives=8,
        relative_margin=0.05,
        range_max=100,
        sampling="random",
    )
    write_mined(mined, mined_file)

# 3. Load rows of (query, positive, negative_1). Each epoch draws one of the 8 negatives; with one
#    epoch, as here, seven are only there for a longer training
data = load_training_data(mined_file, num_hard_negatives=1)
print(data.report.summary())
print("First row:")
print(data.dataset[0])

# 4. Set the training arguments. The bank stores hard negatives as well, so that all queries are
#    contrasted with them
args = ContAccumTrainingArguments(
    output_dir=options.output_dir,
    bank_size=1024,
    per_device_train_batch_size=8,
    gradient_accumulation_steps=16,
    num_train_epochs=1,
    max_steps=options.max_steps,
    learning_rate=1e-4,  # depends on the data: compare rates on dev, or use contaccum fit
    warmup_steps=0.1,
    bf16=torch.cuda.is_available(),
    save_strategy="no",
    logging_steps=10,
)

# 5. Train and save the model
trainer = ContAccumTrainer(model, args, data.dataset, data_record=data.record())
trainer.train()
trainer.save_model(options.output_dir)
