"""Train two separate encoders, one for queries and one for passages, as in DPR; then search.

    python examples/two_towers.py                         # two BERTs, on Natural Questions
    python examples/two_towers.py --data dpr/nq-train.json.gz --model roberta-base

Try two towers if queries and passages are very different texts. Their weights take twice the memory
of a single encoder. The settings of the ContAccum paper are in configs/paper.yaml.
"""

import argparse
from pathlib import Path

import torch
from sentence_transformers.util import semantic_search

from contaccum import ContAccumTrainer, ContAccumTrainingArguments, DualEncoder
from contaccum.data import load_training_data
from contaccum.training.log import read_log

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--model", default="bert-base-uncased")
parser.add_argument("--data", default="sentence-transformers/natural-questions")
parser.add_argument(
    "--max_steps", type=int, default=-1, help="number of updates; default: three epochs"
)
parser.add_argument("--output_dir", default="runs/two_towers")
options = parser.parse_args()

# 1. Create the model: a Router module with two copies of the backbone. SentenceTransformer(folder)
#    loads the saved model
model = DualEncoder.from_backbone(options.model, tied=False, pooling="mean", normalize=True)

# 2. Load the data. The first column goes to the query tower, all other columns to the passage tower
data = load_training_data(options.data)

# 3. Set the training arguments. There is one bank for each tower
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
    save_strategy="epoch",
    save_total_limit=1,
    logging_steps=10,
)

# 4. Train and save the model. The log holds the ratio of the towers' gradient norms. The paper
#    relates a ratio far from 1 to unstable training
trainer = ContAccumTrainer(model, args, data.dataset, data_record=data.record())
trainer.train()
trainer.save_model(options.output_dir)
log = read_log(Path(options.output_dir) / "train_log.jsonl")
# An update whose gradient is not finite has no ratio.
ratios = [record["grad_norm_ratio"] for record in log if record.get("grad_norm_ratio") is not None]
print(f"passage / query gradient norm: {ratios[0]:.2f} at first, {ratios[-1]:.2f} at the end")

# 5. Search: the query tower encodes the query, the passage tower encodes the passages
rows = data.dataset[:1000]
query = rows["query"][0]
passages = list(dict.fromkeys(rows["positive"]))  # without duplicates
query_embedding = model.encode_query([query], convert_to_tensor=True)
passage_embeddings = model.encode_document(passages, convert_to_tensor=True)
hits = semantic_search(query_embedding, passage_embeddings, top_k=3)[0]
for hit in hits:
    passage = passages[hit["corpus_id"]]
    print(f"{hit['score']:.3f}  {query}  ->  {passage[:80]}")
