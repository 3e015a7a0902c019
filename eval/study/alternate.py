"""Experiment: train the document tower after query-side training, and measure the improvement.

    python eval/study/alternate.py runs/scifact --name scifact --arm query_full_corpus-4e-4 \\
        --output benchmarks/query_side --work runs/query_side

The experiment starts from models that `query_side.py` saved in ``--work``. The query tower is
frozen, so every training query is encoded only once. The loss is the exact cross-entropy of all
training pairs over the whole corpus. Each update encodes a few documents again, training positives
and hard negatives; all other documents keep their stored embeddings. After training, the program
encodes the corpus again and evaluates the model. Runs that already have a JSON file are skipped.
"""

from __future__ import annotations

import argparse
import resource
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from query_side import evaluate
from sentence_transformers.util import batch_to_device
from time_study.stores import collect_positives
from torch import Tensor
from torch.nn.functional import normalize
from transformers import get_linear_schedule_with_warmup

from contaccum import DualEncoder
from contaccum.data import load_beir_folder
from contaccum.data.beir import BeirDataset
from contaccum.data.rows import passage_text
from contaccum.encoders.settings import get_tower
from contaccum.files import provenance, write_json
from contaccum.retrieval.documents import StoreDocuments
from contaccum.retrieval.encode import CorpusEncoder
from contaccum.retrieval.store import EmbeddingStore

TEMPERATURE = 0.05
NUM_POSITIVES = 48
NUM_HARD = 16
MICRO_BATCH = 8


class Corpus(NamedTuple):
    """Training data of the document tower: q queries, c documents and p relevant pairs."""

    queries: Tensor  # (q, d), normalized query embeddings, which do not change
    documents: Tensor  # (c, d), normalized document embeddings; training updates some rows
    texts: list[str]  # c document texts
    pair_queries: Tensor  # int64 (p,), row in `queries` of each pair
    pair_documents: Tensor  # int64 (p,), row in `documents` of each pair


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path, help="the BEIR folder of the query_side.py run")
    parser.add_argument("--name", required=True, help="name of the data in result file names")
    parser.add_argument("--arm", required=True, help="arm and rate of the runs to start from")
    parser.add_argument("--rates", nargs="+", default=["5e-5", "1e-4", "2e-4"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--updates", type=int, default=14)
    parser.add_argument("--output", type=Path, required=True, help="folder of the results")
    parser.add_argument(
        "--work", type=Path, required=True, help="folder of embedding stores and models"
    )
    return parser.parse_args()


def main() -> None:
    """Do all runs that have no result yet."""
    args = parse_arguments()
    train = load_beir_folder(args.data, "train")
    eval_sets = {split: load_beir_folder(args.data, split) for split in ("dev", "test")}
    for seed in args.seeds:
        for rate in args.rates:
            run_experiment(args, rate, seed, train, eval_sets)


def run_experiment(
    args: argparse.Namespace,
    rate: str,
    seed: int,
    train: BeirDataset,
    eval_sets: dict[str, BeirDataset],
) -> None:
    """Train the document tower, encode the corpus again, evaluate and write the result."""
    result_file = args.output / f"{args.name}-{args.arm}-then_documents-{rate}-{seed}.json"
    if result_file.exists():
        return
    torch.manual_seed(seed)
    model = DualEncoder.from_pretrained(args.work / f"{args.name}-{args.arm}-{seed}", device="cpu")
    held_out = collect_positives(eval_sets["dev"]) | collect_positives(eval_sets["test"])
    started = time.perf_counter()
    cpu_before = cpu_seconds()
    corpus = load_corpus(args, model, train, held_out)
    losses = train_document_tower(model, corpus, float(rate), args.updates, seed)
    seconds = time.perf_counter() - started
    cpu = cpu_seconds() - cpu_before

    folder = args.work / result_file.stem
    model.save_pretrained(str(folder))
    store_folder = folder / "haystack"
    CorpusEncoder(model, args.name, args.data, store_folder, overwrite=True).encode()
    documents = StoreDocuments(EmbeddingStore.open(store_folder))
    scores = {}
    for split, dataset in eval_sets.items():
        scores[split] = evaluate(folder, dataset, documents)
    result = {
        "data": args.name,
        "arm": f"{args.arm}-then_documents",
        "rate": rate,
        "seed": seed,
        "scores": scores,
        "updates": args.updates,
        "documents_per_update": NUM_POSITIVES + NUM_HARD,
        "losses": losses,
        "cpu_seconds_of_training": round(cpu, 1),
        "seconds_of_training": round(seconds, 1),
        "documents": len(corpus.texts),
        **provenance(),
    }
    write_json(result_file, result)
    print(f"{result_file.stem}: dev {scores['dev']:.3f}, test {scores['test']:.3f}", flush=True)


def cpu_seconds() -> float:
    """Return the CPU time of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def load_corpus(
    args: argparse.Namespace, model: DualEncoder, train: BeirDataset, held_out: set[str]
) -> Corpus:
    """Encode the training queries, and read the document embeddings from the store.

    Documents that are relevant to dev or test queries only are excluded, as in query-side training.
    """
    excluded = held_out - collect_positives(train)
    document_ids = [document_id for document_id in train.corpus if document_id not in excluded]
    texts = [passage_text(**train.corpus[document_id]) for document_id in document_ids]
    store_folder = args.work / "stores" / args.name / "haystack"
    store = StoreDocuments(EmbeddingStore.open(store_folder))
    stored_indices, embeddings = store.find_embeddings(texts)
    if len(stored_indices) != len(texts):
        raise SystemExit(
            f"{store_folder} has {len(stored_indices)} of {len(texts)} documents; "
            "run query_side.py again with the same data"
        )
    document_rows = {document_id: row for row, document_id in enumerate(document_ids)}
    query_rows = {query_id: row for row, query_id in enumerate(train.queries)}
    pair_queries = []
    pair_documents = []
    for query_id, grades in train.qrels.items():
        for document_id, grade in grades.items():
            if grade > 0 and document_id in document_rows:
                pair_queries.append(query_rows[query_id])
                pair_documents.append(document_rows[document_id])
    queries = model.encode_query(list(train.queries.values()), convert_to_tensor=True)
    return Corpus(
        queries=normalize(queries, dim=-1),
        documents=normalize(torch.from_numpy(embeddings), dim=-1),
        texts=texts,
        pair_queries=torch.tensor(pair_queries),
        pair_documents=torch.tensor(pair_documents),
    )


def train_document_tower(
    model: DualEncoder, corpus: Corpus, rate: float, updates: int, seed: int
) -> list[float]:
    """Train the document tower; return the loss of all pairs before each update."""
    get_tower(model, "query").requires_grad_(False)
    document_tower = get_tower(model, "document")
    document_tower.requires_grad_(True)
    document_tower.eval()  # no dropout, as in query-side training
    weights = list(document_tower.parameters())
    optimizer = torch.optim.AdamW(weights, lr=rate, weight_decay=0.01)
    scheduler = get_linear_schedule_with_warmup(optimizer, 2, updates)
    generator = np.random.default_rng(seed)
    losses = []
    for update in range(updates):
        logits = corpus.queries @ corpus.documents.T / TEMPERATURE
        rows = choose_documents(corpus, logits, generator)
        losses.append(compute_loss(corpus, logits).item())
        for micro_batch in rows.split(MICRO_BATCH):
            embeddings = encode_documents(model, [corpus.texts[row] for row in micro_batch])
            new_logits = corpus.queries @ embeddings.T / TEMPERATURE
            logits_with_gradient = logits.index_copy(1, micro_batch, new_logits)
            compute_loss(corpus, logits_with_gradient).backward()
            corpus.documents[micro_batch] = embeddings.detach()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        print(f"update {update + 1} of {updates}: loss {losses[-1]:.4f}", flush=True)
    return losses


def encode_documents(model: DualEncoder, texts: list[str]) -> Tensor:
    """Return normalized embeddings, (n, d), with a gradient."""
    features = batch_to_device(model.preprocess(texts, task="document"), model.device)
    embeddings = model(features, task="document")["sentence_embedding"]
    return normalize(embeddings, dim=-1)


def choose_documents(corpus: Corpus, logits: Tensor, generator: np.random.Generator) -> Tensor:
    """Choose documents for an update: random training positives and hard negatives.

    A document is a hard negative if its softmax probabilities are large, summed over the queries
    that it is not relevant to.

    Returns:
        Rows of the documents, int64 (NUM_POSITIVES + NUM_HARD,).
    """
    all_positives = np.unique(corpus.pair_documents.numpy())
    num_positives = min(NUM_POSITIVES, len(all_positives))
    positives = torch.from_numpy(generator.choice(all_positives, num_positives, replace=False))
    probabilities = mask_positives(corpus, logits).softmax(1).sum(0)
    probabilities[positives] = 0.0
    hardest = probabilities.topk(4 * NUM_HARD).indices
    chosen = torch.from_numpy(generator.permutation(len(hardest))[:NUM_HARD])
    return torch.cat([positives, hardest[chosen]])


def mask_positives(corpus: Corpus, logits: Tensor) -> Tensor:
    """Return the logits, (q, c), with minus infinity for all relevant pairs."""
    return logits.index_put((corpus.pair_queries, corpus.pair_documents), torch.tensor(-torch.inf))


def compute_loss(corpus: Corpus, logits: Tensor) -> Tensor:
    """Compute the mean cross-entropy of all pairs. Positives of a query are never its negatives."""
    negatives = mask_positives(corpus, logits).logsumexp(1)[corpus.pair_queries]
    positives = logits[corpus.pair_queries, corpus.pair_documents]
    return (torch.logaddexp(negatives, positives) - positives).mean()


if __name__ == "__main__":
    main()
