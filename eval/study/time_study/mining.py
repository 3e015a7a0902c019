"""Hard negatives for the study by time, which the model before training mines."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from contaccum.data.beir import load_beir_folder
from contaccum.files import fingerprint
from contaccum.retrieval.store import EmbeddingStore

MINING_RULES = ("--num_negatives", "1", "--relative_margin", "0.05", "--range_max", "100")
"""Rules of `contaccum mine`: a hard negative has at most 95 % of the positive's score."""


def mine_negatives(model: Path, beir_folder: Path, store: Path, work: Path, bf16: bool) -> Path:
    """Mine a hard negative for each training pair with `contaccum mine`.

    Pairs without a negative are left out.

    Args:
        model: the model before training.
        beir_folder: the data set.
        store: only documents of this store are mined.
        work: folder of the file. A file of the same model, data, documents and rules is used again.
        bf16: encode in bfloat16 instead of float32.

    Returns:
        The file of pairs with negatives.
    """
    dataset = load_beir_folder(beir_folder, "train")
    documents = EmbeddingStore.open(store)
    precision = "bfloat16" if bf16 else "float32"
    made_from = fingerprint(dataset.fingerprint, documents.fingerprint, precision, MINING_RULES)
    file = work / f"mined-{made_from[:12]}.jsonl"
    if file.exists():
        return file
    corpus = work / "mining_corpus.jsonl"
    with open(corpus, "w", encoding="utf-8") as lines:
        for document_id in documents.ids(range(len(documents))):
            record = {"_id": document_id, **dataset.corpus[document_id]}
            lines.write(json.dumps(record) + "\n")
    command = [sys.executable, "-m", "contaccum.cli", "mine", str(model)]
    command += ["--data", str(beir_folder), "--split", "train", "--corpus", str(corpus)]
    mined_file = work / f"all-{file.name}"
    command += ["--output", str(mined_file), "--precision", precision, "--no_progress"]
    subprocess.run([*command, *MINING_RULES], check=True)
    with open(mined_file, encoding="utf-8") as lines, open(file, "w", encoding="utf-8") as kept:
        for line in lines:
            if json.loads(line)["negatives"]:  # other queries are left out
                kept.write(line)
    return file
