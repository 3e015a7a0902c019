"""A turn of the document tower after query-side training: does it pay?

    python eval/study/alternate.py runs/scifact --name scifact --arm query_full_corpus-4e-4 \\
        --output benchmarks/query_side --work runs/query_side

It goes on from runs that `query_side.py` has left in ``--work``. The query tower stands still, so
every training query is encoded once, and the document tower is trained against all of them: the
loss is the cross-entropy of all training pairs over the whole corpus, exactly. An update encodes a
few documents anew, training positives and hard negatives; the embeddings of the others are those of
the table. Afterwards the haystack is encoded again and scored. A cell whose JSON is there is
skipped.
"""

from __future__ import annotations

import argparse
import resource
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from query_side import positives_of, score
from sentence_transformers.util import batch_to_device
from torch import Tensor
from torch.nn.functional import normalize
from transformers import get_linear_schedule_with_warmup

from contaccum import DualEncoder
from contaccum.data import load_beir_folder
from contaccum.data.beir import BeirDataset
from contaccum.data.records import passage_text
from contaccum.encoders.towers import get_tower
from contaccum.files import provenance, write_json
from contaccum.retrieval.corpus import CorpusEncoder
from contaccum.retrieval.documents import StoreDocuments
from contaccum.retrieval.store import EmbeddingStore

TEMPERATURE = 0.05
NUM_POSITIVES = 48
NUM_HARD = 16
MICRO_BATCH = 8


class Corpus(NamedTuple):
    """What the document tower is trained on: q training queries, c documents, p pairs."""

    queries: Tensor  # (q, d), embeddings of length 1, which stand still
    documents: Tensor  # (c, d), embeddings of length 1; rows are replaced as they are encoded anew
    texts: list[str]  # of the documents
    pair_queries: Tensor  # int64 (p,), row of each pair's query
    pair_documents: Tensor  # int64 (p,), row of each pair's document


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path, help="the BEIR folder that query_side.py had")
    parser.add_argument("--name", required=True, help="of the data, in names of results")
    parser.add_argument("--arm", required=True, help="arm and rate of the runs to go on from")
    parser.add_argument("--rates", nargs="+", default=["5e-5", "1e-4", "2e-4"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--updates", type=int, default=14)
    parser.add_argument("--output", type=Path, required=True, help="folder of the results")
    parser.add_argument("--work", type=Path, required=True, help="folder of stores and models")
    return parser.parse_args()


def main() -> None:
    """Do the cells that are missing."""
    args = parse_arguments()
    train = load_beir_folder(args.data, "train")
    haystack = {split: load_beir_folder(args.data, split) for split in ("dev", "test")}
    for seed in args.seeds:
        for rate in args.rates:
            run_cell(args, rate, seed, train, haystack)


def run_cell(
    args: argparse.Namespace,
    rate: str,
    seed: int,
    train: BeirDataset,
    haystack: dict[str, BeirDataset],
) -> None:
    """Train the document tower, encode the haystack again, score it and write the result."""
    result_file = args.output / f"{args.name}-{args.arm}-then_documents-{rate}-{seed}.json"
    if result_file.exists():
        return
    torch.manual_seed(seed)
    model = DualEncoder.from_pretrained(args.work / f"{args.name}-{args.arm}-{seed}", device="cpu")
    held_out = positives_of(haystack["dev"]) | positives_of(haystack["test"])
    started = time.perf_counter()
    cpu_before = cpu_seconds()
    corpus = load_corpus(args, model, train, held_out)
    losses = train_document_tower(model, corpus, float(rate), args.updates, seed)
    seconds = time.perf_counter() - started
    cpu = cpu_seconds() - cpu_before

    folder = args.work / result_file.stem
    model.save_pretrained(str(folder))
    whole = folder / "haystack"
    CorpusEncoder(model, args.name, args.data, whole, overwrite=True).encode()
    documents = StoreDocuments(EmbeddingStore.open(whole))
    scores = {split: score(folder, dataset, documents) for split, dataset in haystack.items()}
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
    """Encode the training queries, and take the documents from the store of the corpus.

    Documents that only dev or test queries need are left out, as in query-side training.
    """
    names = [name for name in train.corpus if name not in held_out - positives_of(train)]
    texts = [passage_text(**train.corpus[name]) for name in names]
    store = StoreDocuments(EmbeddingStore.open(args.work / "stores" / args.name / "haystack"))
    found, embeddings = store.embeddings_of(texts)
    if len(found) != len(texts):
        raise SystemExit(f"the store has {len(found)} of {len(texts)} documents")
    row_of_document = {name: row for row, name in enumerate(names)}
    row_of_query = {name: row for row, name in enumerate(train.queries)}
    pair_queries = []
    pair_documents = []
    for query, judged in train.qrels.items():
        for document, grade in judged.items():
            if grade > 0:
                pair_queries.append(row_of_query[query])
                pair_documents.append(row_of_document[document])
    queries = model.encode_query(list(train.queries.values()), convert_to_tensor=True)
    return Corpus(
        normalize(queries, dim=-1),
        normalize(torch.from_numpy(embeddings), dim=-1),
        texts,
        torch.tensor(pair_queries),
        torch.tensor(pair_documents),
    )


def train_document_tower(
    model: DualEncoder, corpus: Corpus, rate: float, updates: int, seed: int
) -> list[float]:
    """Train the document tower; returns the loss of all pairs before each update."""
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
        losses.append(loss_of_pairs(corpus, logits).item())
        for micro_batch in rows.split(MICRO_BATCH):
            embeddings = encode_documents(model, [corpus.texts[row] for row in micro_batch])
            new_logits = corpus.queries @ embeddings.T / TEMPERATURE
            loss_of_pairs(corpus, logits.index_copy(1, micro_batch, new_logits)).backward()
            corpus.documents[micro_batch] = embeddings.detach()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        print(f"update {update + 1} of {updates}: loss {losses[-1]:.4f}", flush=True)
    return losses


def encode_documents(model: DualEncoder, texts: list[str]) -> Tensor:
    """Return embeddings of length 1 with a gradient."""
    features = batch_to_device(model.preprocess(texts, task="document"), model.device)
    embeddings = model(features, task="document")["sentence_embedding"]
    return normalize(embeddings, dim=-1)


def choose_documents(corpus: Corpus, logits: Tensor, generator: np.random.Generator) -> Tensor:
    """Return rows of documents to encode: training positives at random, and the hardest others.

    The hardest are those with the largest share in the softmax, summed over queries of which they
    are no positives.
    """
    all_positives = np.unique(corpus.pair_documents.numpy())
    num_positives = min(NUM_POSITIVES, len(all_positives))
    positives = torch.from_numpy(generator.choice(all_positives, num_positives, replace=False))
    shares = mask_positives(corpus, logits).softmax(1).sum(0)
    shares[positives] = 0.0
    hardest = shares.topk(4 * NUM_HARD).indices
    chosen = torch.from_numpy(generator.permutation(len(hardest))[:NUM_HARD])
    return torch.cat([positives, hardest[chosen]])


def mask_positives(corpus: Corpus, logits: Tensor) -> Tensor:
    """Return the logits, (q, c), with those of all known pairs at minus infinity."""
    return logits.index_put((corpus.pair_queries, corpus.pair_documents), torch.tensor(-torch.inf))


def loss_of_pairs(corpus: Corpus, logits: Tensor) -> Tensor:
    """Return the mean cross-entropy of all pairs; a query's other positives are no negatives."""
    negatives = mask_positives(corpus, logits).logsumexp(1)[corpus.pair_queries]
    positives = logits[corpus.pair_queries, corpus.pair_documents]
    return (torch.logaddexp(negatives, positives) - positives).mean()


if __name__ == "__main__":
    main()
