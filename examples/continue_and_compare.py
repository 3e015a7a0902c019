"""Train with checkpoints, resume after an interruption, and compare the model before and after.

    python examples/continue_and_compare.py                        # SciFact, part of contaccum
    python examples/continue_and_compare.py --data my_beir_folder  # with splits train and test

You can stop the script at any time and start it again. It resumes from the last complete
checkpoint, with the state of the memory bank, and ends with the same model as a run without an
interruption (docs/surviving.md). When training is complete, the script only compares the models.
"""

import argparse

import torch

from contaccum import ContAccumTrainer, ContAccumTrainingArguments, DualEncoder
from contaccum.data import load_beir_folder, load_training_data
from contaccum.data.beir import shipped_scifact
from contaccum.data.near_duplicates import group_queries
from contaccum.evaluation.beir import evaluate_beir
from contaccum.evaluation.metrics import sign_flip_test

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--model", default="sentence-transformers/all-MiniLM-L6-v2")
parser.add_argument("--data", default=str(shipped_scifact()), help="a BEIR folder")
parser.add_argument("--max_steps", type=int, default=24, help="number of updates")
parser.add_argument("--save_steps", type=int, default=8, help="updates between checkpoints")
parser.add_argument("--output_dir", default="runs/continue_and_compare")
options = parser.parse_args()

# 1. Load the model, the training pairs (from the relevance labels of the train split) and the test
#    set; evaluate the model before training
model = DualEncoder.from_pretrained(options.model)
data = load_training_data(options.data)
test_set = load_beir_folder(options.data, split="test")
result_before = evaluate_beir(model, test_set)

# 2. Set the training arguments. After any change, use another --output_dir. A checkpoint with other
#    data, seed, loss, bank or pairs per update is refused, but another learning rate is not noticed
args = ContAccumTrainingArguments(
    output_dir=options.output_dir,
    bank_size=512,
    per_device_train_batch_size=8,
    gradient_accumulation_steps=16,
    max_steps=options.max_steps,
    learning_rate=1e-4,
    warmup_steps=2,
    save_strategy="steps",
    save_steps=options.save_steps,
    bf16=torch.cuda.is_available(),
)

# 3. Train. "auto" resumes from the last complete checkpoint, or starts anew if there is none
trainer = ContAccumTrainer(model, args, data.dataset, data_record=data.record())
trainer.train(resume_from_checkpoint="auto")
trainer.save_model(options.output_dir)

# 4. Evaluate the saved model. (With bf16, the model in memory still computes in bfloat16.) The
#    sign-flip test shows if the difference is significant. Its unit is a group of queries with the
#    same relevant documents
trained_model = DualEncoder.from_pretrained(options.output_dir)
result_after = evaluate_beir(trained_model, test_set)
scores_before = {query: scores["NDCG@10"] for query, scores in result_before.per_query.items()}
scores_after = {query: scores["NDCG@10"] for query, scores in result_after.per_query.items()}
test = sign_flip_test(scores_after, scores_before, group_queries(test_set))
print(f"nDCG@10 before: {result_before.metrics['NDCG@10']:.4f}")
print(f"nDCG@10 after: {result_after.metrics['NDCG@10']:.4f}")
print(f"difference: {test['difference']:+.4f} (p = {test['p_value']:.4f})")
print(f"95% confidence interval: {test['low']:+.4f} to {test['high']:+.4f}")
