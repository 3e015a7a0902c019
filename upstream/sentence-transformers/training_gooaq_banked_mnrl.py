"""
This script trains MPNet on 100,000 question-answer pairs of GooAQ with gradient accumulation and
BankedMultipleNegativesRankingLoss: each batch of 16 pairs is also contrasted with 1,024 past pairs, but training needs
only the memory for 16 pairs.

Usage:
python training_gooaq_banked_mnrl.py
"""

from __future__ import annotations

import logging
import traceback

from datasets import load_dataset

from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerModelCardData,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.base.sampler import BatchSamplers
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator
from sentence_transformers.sentence_transformer.losses import BankedMultipleNegativesRankingLoss

logging.basicConfig(format="%(asctime)s - %(message)s", datefmt="%Y-%m-%d %H:%M:%S", level=logging.INFO)

# 1. Load a model to finetune, with optional model card data
model = SentenceTransformer(
    "microsoft/mpnet-base",
    model_card_data=SentenceTransformerModelCardData(
        language="en", license="apache-2.0", model_name="MPNet base trained on GooAQ with banks of past pairs"
    ),
)

# 2. Load question-answer pairs, and hold out 1,000 of them for evaluation
dataset = load_dataset("sentence-transformers/gooaq", split="train").select(range(100_000))
dataset = dataset.train_test_split(test_size=1_000, seed=12)
train_dataset, eval_dataset = dataset["train"], dataset["test"]

# 3. Define the loss. An update has 16 * 8 = 128 pairs, so the bank contains the pairs of 8 updates
loss = BankedMultipleNegativesRankingLoss(model, bank_size=1024)

# 4. Specify training arguments: the batch size that fits in memory, and the number of batches per update
args = SentenceTransformerTrainingArguments(
    output_dir="models/mpnet-base-gooaq-banked",
    num_train_epochs=1,
    per_device_train_batch_size=16,
    gradient_accumulation_steps=8,
    learning_rate=4e-5,
    warmup_steps=0.1,
    bf16=True,  # Set fp16=True instead if your GPU does not support BF16
    batch_sampler=BatchSamplers.NO_DUPLICATES,
    eval_strategy="steps",  # The evaluation loss does not use the bank
    eval_steps=100,
    save_strategy="steps",
    save_steps=100,
    save_total_limit=2,
    logging_steps=20,
)

# 5. Create an evaluator that searches all held-out answers, and evaluate the base model
evaluator = InformationRetrievalEvaluator(
    queries=dict(enumerate(eval_dataset["question"])),
    corpus=dict(enumerate(eval_dataset["answer"])),
    relevant_docs={index: {index} for index in range(len(eval_dataset))},
    name="gooaq-dev",
)
evaluator(model)

# 6. Train, evaluate and save the model
trainer = SentenceTransformerTrainer(
    model=model, args=args, train_dataset=train_dataset, eval_dataset=eval_dataset, loss=loss, evaluator=evaluator
)
trainer.train()
evaluator(model)
final_output_dir = "models/mpnet-base-gooaq-banked/final"
model.save_pretrained(final_output_dir)

# 7. (Optional) Push the model to the Hugging Face Hub. Run `hf auth login` first
try:
    model.push_to_hub("mpnet-base-gooaq-banked")
except Exception:
    logging.error(f"The model was saved in {final_output_dir}, but not pushed to the Hub:\n{traceback.format_exc()}")
