"""Train with checkpoints, go on where the last one is, and compare with the model of before, query by query.

    python examples/continue_and_compare.py                       # SciFact, which comes with contaccum
    python examples/continue_and_compare.py --data my_beir_folder # with the splits train and test

Kill it at any time and start it again: it goes on from its last whole checkpoint, with its bank, and ends as if it
had never been killed (docs/surviving.md). Once done, it only compares.
"""

import argparse

import torch

from contaccum import ContAccumTrainer, ContAccumTrainingArguments, DualEncoder
from contaccum.data import load_beir_folder, load_training_data
from contaccum.data.beir import shipped_scifact
from contaccum.evaluation.beir_sets import evaluate_beir
from contaccum.evaluation.metrics import paired_bootstrap

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--model", default="sentence-transformers/all-MiniLM-L6-v2")
parser.add_argument("--data", default=str(shipped_scifact()), help="a BEIR folder")
parser.add_argument("--max_steps", type=int, default=24, help="updates in all")
parser.add_argument("--save_steps", type=int, default=8, help="updates between checkpoints")
parser.add_argument("--output_dir", default="runs/continue_and_compare")
options = parser.parse_args()

# 1. The model, the pairs that the train split judges relevant, and what to compare on
model = DualEncoder.from_pretrained(options.model)
data = load_training_data(options.data)
test = load_beir_folder(options.data, split="test")
before = evaluate_beir(model, test)

# 2. The arguments: what a checkpoint was trained with must not change, or it is refused by name
args = ContAccumTrainingArguments(
    output_dir=options.output_dir,
    bank_size=512,
    per_device_train_batch_size=8,
    gradient_accumulation_steps=16,
    max_steps=options.max_steps,
    learning_rate=5e-5,
    warmup_steps=2,
    save_strategy="steps",
    save_steps=options.save_steps,
    bf16=torch.cuda.is_available(),
)

# 3. Train from the last whole checkpoint, or from the start where there is none
trainer = ContAccumTrainer(model, args, data.dataset, data_record=data.record())
trainer.train(resume_from_checkpoint="auto")
trainer.save_model(options.output_dir)

# 4. Compare: the same queries before and after, resampled, say whether the difference is more than chance
after = evaluate_beir(model, test)
old, new = (
    [result.per_query[query]["NDCG@10"] for query in test.queries] for result in (before, after)
)
found = paired_bootstrap(new, old)
print(f"nDCG@10 {before.metrics['NDCG@10']:.4f} before, {after.metrics['NDCG@10']:.4f} after")
print(
    "difference {difference:+.4f}, 95% from {low:+.4f} to {high:+.4f}, p = {p_value:.4f}".format(
        **found
    )
)
