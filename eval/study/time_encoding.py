"""Measure how long the encoding of each corpus of the study by time takes, in updates of contaccum.

    python eval/study/time_encoding.py --model MODEL --folder runs/time_study

Writes benchmarks/by_time/encoding.json. The programs of the study charge training alone; the
picture of the study adds the encoding. Both are measured in turns on one core, in float32. So the
ratio also holds on the machine that trained, whose seconds of an update are in seconds.json.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from sentence_transformers import SentenceTransformer
from time_study.clock import UpdateClock
from time_study.plan import read_plan
from time_study.trainers import make_contaccum_trainer

from contaccum.data.beir import load_beir_folder
from contaccum.files import provenance, write_json

ROOT = Path(__file__).resolve().parents[2]
NUM_DOCUMENTS = 512
NUM_TURNS = 3
NUM_UPDATES = 3  # the first one is left out


def main() -> None:
    """Measure all data sets of the plan that have a corpus of their own."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--folder", type=Path, required=True, help="parent of the data folders")
    args = parser.parse_args()
    torch.set_num_threads(1)
    plan = read_plan(ROOT / "eval" / "study" / "by_time.yaml")
    corpora = {}
    for data, data_plan in plan.data.items():
        if data_plan.folder is not None:  # another table of the same corpus
            continue
        corpus = load_beir_folder(args.folder / data, "train").corpus
        step = len(corpus) // NUM_DOCUMENTS
        documents = list(corpus.values())[: step * NUM_DOCUMENTS : step]
        texts = [f"{document['title']} {document['text']}".strip() for document in documents]
        model = SentenceTransformer(args.model, device="cpu")
        model.max_seq_length = data_plan.max_length
        settings = plan.make_settings(data, plan.entries["contaccum"], is_timed=True)
        settings |= {"learning_rate": plan.learning_rates[0], "max_steps": NUM_UPDATES}
        settings |= {"train_data": str(args.folder / data), "bf16": False}
        document_seconds, update_seconds = [], []
        with tempfile.TemporaryDirectory() as folder:
            settings["model"] = f"{folder}/base"
            model.save_pretrained(settings["model"])
            for turn in range(NUM_TURNS):
                start = time.process_time()
                model.encode(texts, batch_size=8)
                document_seconds.append((time.process_time() - start) / NUM_DOCUMENTS)
                trainer = make_contaccum_trainer({**settings, "output_dir": f"{folder}/{turn}"})
                clock = UpdateClock(trainer.model)
                trainer.add_callback(clock)
                trainer.train()
                update_seconds += clock.seconds[1:]
        corpora[data] = {
            "documents": len(corpus),
            "seconds_per_document": document_seconds,
            "seconds_of_updates": update_seconds,
            "updates_per_document": median(document_seconds) / median(update_seconds),
        }
        print(data, corpora[data], flush=True)
    write_json(
        ROOT / "benchmarks" / "by_time" / "encoding.json", {"corpora": corpora, **provenance()}
    )


if __name__ == "__main__":
    main()
