"""Our exact search beside beir's DenseRetrievalExactSearch, on the same embeddings, in turns within one run.

Both search through BEIR's interface with a model that hands out embeddings it has. What is timed of theirs begins when
the first block of the corpus is "encoded": scores, top k, and its heaps. Sorting the corpus by length, which it does
before, is not counted. Of ours it is all that follows encoding: preparing the index, the search, and the dictionary of
results.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

import numpy as np

from contaccum.benchmarks.search import SearchBenchSettings, made_up, set_threads

BEIR_DEFAULTS: dict[str, Any] = {"rows": 1_000_000, "k": 1000, "repeats": 1}

# What float32 scores of vectors of length 1 may differ by, summed in different orders.
_ROUNDING = 2e-6

Run = Mapping[str, Mapping[str, float]]


class _Model:
    """Hands out embeddings, and says when the first block of documents was had, on the clock and in CPU time.

    Handing out is a slice of an array, and takes nothing that could be told from it.
    """

    def __init__(self, documents: Any, queries: Any) -> None:
        self.documents, self.queries = documents, queries
        self.place, self.began, self.began_cpu = 0, 0.0, 0.0

    def encode_queries(self, texts: Any, **settings: Any) -> Any:
        return self.queries

    def encode_corpus(self, texts: Any, **settings: Any) -> Any:
        block = self.documents[self.place : self.place + len(texts)]
        self.place += len(texts)
        if not self.began:
            self.began, self.began_cpu = time.perf_counter(), time.process_time()
        return block


def measure_beir(settings: SearchBenchSettings, progress: Callable[[str], None] = print) -> list[dict[str, Any]]:
    """One record: ``seconds`` and ``seconds_beir`` (medians), ``speedup`` (theirs over ours of the same turn: median,
    ``_low``, ``_high``), ``turns``, ``turns_beir``; ``same_documents`` (share of queries), ``other_documents`` (that
    one finds and the other does not, and that rounding at the k-th place does not explain), ``score_difference``;
    ``cpu_seconds``, ``cpu_seconds_beir``: of all threads, which tell more where a machine has other work to do.

    A turn is ours, theirs, ours, after both have searched a small part; ours counts as the mean of its two.
    """
    import torch
    from beir.retrieval.search.dense import DenseRetrievalExactSearch

    from contaccum.retrieval.searcher import FaissSearcher

    settings.check()
    set_threads(settings.threads)
    documents, queries = made_up(settings)
    # One text for all: beir sorts by length, and so keeps the order.
    text = {"title": "", "text": ""}
    corpus = {f"d{row}": text for row in range(len(documents))}
    texts = dict.fromkeys([f"q{row}" for row in range(len(queries))], "")
    logging.getLogger("beir").setLevel(logging.WARNING)

    def ours(corpus: dict[str, dict[str, str]] = corpus) -> tuple[float, float, Run]:
        model = _Model(documents[: len(corpus)], queries)
        run = FaissSearcher(model, show_progress_bar=False).search(corpus, texts, settings.k, "cos_sim")
        return time.perf_counter() - model.began, time.process_time() - model.began_cpu, run

    def theirs(corpus: dict[str, dict[str, str]] = corpus) -> tuple[float, float, Run]:
        model = _Model(torch.from_numpy(documents[: len(corpus)]), torch.from_numpy(queries))
        searcher = DenseRetrievalExactSearch(model, show_progress_bar=False)
        run = searcher.search(corpus, texts, settings.k, "cos_sim")
        return time.perf_counter() - model.began, time.process_time() - model.began_cpu, run

    # What is loaded and set up on first use belongs to neither.
    for search in (ours, theirs):
        search(dict(islice(corpus.items(), 20_000)))
    times: dict[str, list[float]] = {"ours": [], "theirs": []}
    cpu: dict[str, list[float]] = {"ours": [], "theirs": []}
    found: dict[str, Run] = {}
    for turn in range(settings.repeats):
        before, cpu_before, _ = ours()
        progress(f"turn {turn + 1} of {settings.repeats}: ours {before:.2f} s ({cpu_before:.2f} s of CPU)")
        seconds, cpu_theirs, found["theirs"] = theirs()
        after, cpu_after, found["ours"] = ours()
        times["ours"].append((before + after) / 2)
        times["theirs"].append(seconds)
        cpu["ours"].append((cpu_before + cpu_after) / 2)
        cpu["theirs"].append(cpu_theirs)
        progress(f"turn {turn + 1} of {settings.repeats}: beir {seconds:.2f} s ({cpu_theirs:.2f}), ours {after:.2f} s")
    ratios = [b / a for a, b in zip(times["ours"], times["theirs"], strict=True)]
    return [
        {
            "rows": len(documents),
            "dimension": settings.dimension,
            "queries": len(queries),
            "k": settings.k,
            "seconds": statistics.median(times["ours"]),
            "seconds_beir": statistics.median(times["theirs"]),
            "speedup": statistics.median(ratios),
            "speedup_low": min(ratios),
            "speedup_high": max(ratios),
            "cpu_seconds": statistics.median(cpu["ours"]),
            "cpu_seconds_beir": statistics.median(cpu["theirs"]),
            "turns": times["ours"],
            "turns_beir": times["theirs"],
            **differences(found["ours"], found["theirs"]),
        }
    ]


def differences(ours: Run, theirs: Run) -> dict[str, Any]:
    """How two runs differ; see `measure_beir`."""
    same, other, greatest = 0, 0, 0.0
    for query, hits in ours.items():
        there = theirs[query]
        same += hits.keys() == there.keys()
        last = max(min(hits.values()), min(there.values()))
        apart = [hits.get(document, there.get(document, 0.0)) for document in hits.keys() ^ there.keys()]
        other += int(np.sum(np.abs(np.array(apart) - last) > _ROUNDING)) if apart else 0
        both = hits.keys() & there.keys()
        greatest = max([greatest, *(abs(hits[document] - there[document]) for document in both)])
    return {"same_documents": same / len(ours), "other_documents": other, "score_difference": greatest}
