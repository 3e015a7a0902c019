"""Train a decoder language model as a retriever with LoRA. Needs pip install 'contaccum[peft]'.

    python examples/decoder_lora.py            # Qwen3 with 0.6B parameters, on Natural Questions
    python examples/decoder_lora.py --data pairs.jsonl --model meta-llama/Llama-3.2-1B

Llama models need an accepted licence and a token (HF_TOKEN). The embedding of a text is the hidden
state of its last token. docs/training.md explains why, and what else a decoder needs.
configs/decoder-lora.yaml is a configuration file for `contaccum train`.
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
    "--max_steps", type=int, default=-1, help="number of updates; default: one epoch"
)
parser.add_argument("--output_dir", default="runs/decoder_lora")
options = parser.parse_args()

# 1. Create the model: the decoder with last-token pooling. An EOS token is appended to every text,
#    and an instruction is put before every query
model = DualEncoder.from_backbone(
    options.model,
    normalize=True,
    query_prompt="Instruct: Given a question, retrieve passages that answer it\nQuery:",
    query_max_length=64,
    passage_max_length=256,
)

# 2. Add LoRA matrices of rank 16 to every linear layer. Only these matrices are trained
add_adapter(model, r=16, alpha=32, dropout=0.05)

# 3. Load the data: rows of (query, positive)
data = load_training_data(options.data)

# 4. Set the training arguments: 128 pairs per update, and up to 4,096 negatives from the bank
args = ContAccumTrainingArguments(
    output_dir=options.output_dir,
    bank_size=4096,
    temperature=0.02,  # the value of E5-Mistral; other values were not compared here
    per_device_train_batch_size=2,  # as many pairs as fit in memory
    gradient_accumulation_steps=64,
    gradient_checkpointing=True,  # saves much memory; the activations are computed twice
    num_train_epochs=1,
    max_steps=options.max_steps,
    learning_rate=1e-4,  # higher than in full fine-tuning
    warmup_steps=0.05,  # a share of all updates
    bf16=torch.cuda.is_available(),
    save_strategy="no",
    logging_steps=10,
)

# 5. Train, merge the adapter into the weights and save a plain model. Without merge_adapter, only
#    the adapter of some tens of MB is saved
trainer = ContAccumTrainer(model, args, data.dataset, data_record=data.record())
trainer.train()
merge_adapter(model)
trainer.save_model(options.output_dir)
