"""Make a retriever of a decoder, with LoRA, two pairs at a time. Needs pip install 'contaccum[peft]'.

    python examples/decoder_lora.py                               # Qwen3 of 0.6B weights, on Natural Questions
    python examples/decoder_lora.py --data pairs.jsonl --model meta-llama/Llama-3.2-1B

A text is its last token; docs/training.md says why, and what else a decoder needs. For `contaccum train` there is
configs/decoder-lora.yaml.
"""

import argparse

import torch

from contaccum import ContAccumTrainer, ContAccumTrainingArguments, DualEncoder
from contaccum.data import load_training_data
from contaccum.encoders.adapters import add_adapter, merge_adapter

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--model", default="Qwen/Qwen3-0.6B-Base")
parser.add_argument("--data", default="sentence-transformers/natural-questions")
parser.add_argument(
    "--max_steps", type=int, default=-1, help="updates; default: one pass over the data"
)
parser.add_argument("--output_dir", default="runs/decoder_lora")
options = parser.parse_args()

# 1. The model: the decoder with last-token pooling and EOS after every text, queries with an instruction
model = DualEncoder.from_backbone(
    options.model,
    normalize=True,
    query_prompt="Instruct: Given a question, retrieve passages that answer it\nQuery:",
    query_max_length=64,
    passage_max_length=256,
)

# 2. The adapter: matrices of rank 16 beside every linear layer, which train while the decoder stays as it is
add_adapter(model, r=16, alpha=32, dropout=0.05)

# 3. The data: rows of query and positive
data = load_training_data(options.data)

# 4. The arguments: 128 pairs an update, 4,096 negatives from the bank
args = ContAccumTrainingArguments(
    output_dir=options.output_dir,
    bank_size=4096,
    temperature=0.02,  # cosines of a decoder lie close together
    per_device_train_batch_size=2,  # what memory allows
    gradient_accumulation_steps=64,
    gradient_checkpointing=True,  # a third slower, far smaller
    num_train_epochs=1,
    max_steps=options.max_steps,
    learning_rate=1e-4,  # five to ten times that of full fine-tuning
    warmup_steps=0.05,
    bf16=torch.cuda.is_available(),
    save_strategy="no",
    logging_steps=10,
)

# 5. Train, and add the adapter to the weights: what is saved is a plain model. Without this it is the adapter, a few MB
trainer = ContAccumTrainer(model, args, data.dataset, data_record=data.record())
trainer.train()
merge_adapter(model)
trainer.save_model(options.output_dir)
