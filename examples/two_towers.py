"""Train two towers, one for queries and one for passages, as DPR and the paper do; then search with them.

    python examples/two_towers.py                                 # two BERTs, on Natural Questions
    python examples/two_towers.py --data dpr/nq-train.json.gz --model roberta-base

Worth a try where queries and passages differ in kind; two towers take twice the memory for weights. The paper's own
settings are in configs/paper.
"""

import argparse
import json
from pathlib import Path

import torch
from sentence_transformers.util import semantic_search

from contaccum import ContAccumTrainer, ContAccumTrainingArguments, DualEncoder
from contaccum.data import load_training_data

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--model", default="bert-base-uncased")
parser.add_argument("--data", default="sentence-transformers/natural-questions")
parser.add_argument(
    "--max_steps", type=int, default=-1, help="updates; default: three passes over the data"
)
parser.add_argument("--output_dir", default="runs/two_towers")
options = parser.parse_args()

# 1. The model: a Router with the backbone twice, which SentenceTransformer(folder) loads once it is saved
model = DualEncoder.from_backbone(options.model, tied=False, pooling="mean", normalize=True)

# 2. The data: the first column goes to the query tower, all others to the passage tower
data = load_training_data(options.data)

# 3. The arguments: a bank for each tower, so that neither learns faster than the other
args = ContAccumTrainingArguments(
    output_dir=options.output_dir,
    bank_size=1024,
    per_device_train_batch_size=8,
    gradient_accumulation_steps=16,
    num_train_epochs=3,
    max_steps=options.max_steps,
    learning_rate=2e-5,
    warmup_steps=0.1,
    bf16=torch.cuda.is_available(),
    save_strategy="no",
    logging_steps=10,
)

# 4. Train. The norms of the towers' gradients are in the log: a ratio that runs away from 1 is a bad sign
trainer = ContAccumTrainer(model, args, data.dataset, data_record=data.record())
trainer.train()
log = (Path(options.output_dir) / "train_log.jsonl").read_text(encoding="utf-8").splitlines()
ratios = [json.loads(line)["grad_norm_ratio"] for line in log]
print(f"passage over query gradient norm: {ratios[0]:.2f} at first, {ratios[-1]:.2f} in the end")
trainer.save_model(options.output_dir)

# 5. Search: queries through their tower, passages through theirs
rows = data.dataset[:1000]
passages = list(dict.fromkeys(rows["positive"]))
embeddings = model.encode_document(passages, convert_to_tensor=True)
for hit in semantic_search(
    model.encode_query(rows["query"][:1], convert_to_tensor=True), embeddings, top_k=3
)[0]:
    print(f"{hit['score']:.3f}  {rows['query'][0]}  ->  {passages[hit['corpus_id']][:80]}")
