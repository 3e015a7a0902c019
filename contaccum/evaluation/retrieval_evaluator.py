"""RetrievalEvaluator: this project's retrieval and metrics as an evaluator of sentence-transformers' trainers.

It encodes, searches exactly and scores as `contaccum evaluate` does, on data that is in memory. When to evaluate, and
what becomes of the figures, is the trainer's business.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any, Literal

from sentence_transformers.sentence_transformer.evaluation import SentenceEvaluator

from contaccum.data.beir_folder import BeirDataset
from contaccum.errors import ConfigError
from contaccum.evaluation.metrics import KINDS, score_run

DEFAULT_METRICS = ("ndcg@10", "mrr@10", "map@100", "recall@20", "recall@100", "accuracy@1", "accuracy@20")
_KINDS = {kind.lower(): kind for kind in KINDS}


class RetrievalEvaluator(SentenceEvaluator):
    """Scores a model on a BEIR data set, in memory, by exact search.

    Args:
        dataset: what to score on; `contaccum.evaluation.sampling` makes smaller ones.
        metrics: `kind@k` in lower case, of the kinds ndcg, map, recall, p, mrr, accuracy.
        batch_size: texts of the greatest length per batch, see `encode_texts`.
        similarity: "cos" or "dot"; None is the model's own.
        primary_metric: the one that a model card shows; None: the first.
        about: what a record is to say of the data beside its counts, such as how it was sampled.

    The scores are those of the model in the precision that it runs in: under the trainer's bf16 or fp16, of that.

    Raises:
        ConfigError: an unknown metric.

    Example::

        evaluator = RetrievalEvaluator(sample(load_beir_folder("scifact", "dev"), corpus=10_000))
        trainer = ContAccumTrainer(model=model, args=args, train_dataset=train_dataset, evaluator=evaluator)
    """

    def __init__(
        self,
        dataset: BeirDataset,
        metrics: Sequence[str] = DEFAULT_METRICS,
        batch_size: int = 32,
        similarity: Literal["cos", "dot"] | None = None,
        primary_metric: str | None = None,
        about: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.dataset = dataset
        self.metrics = tuple(dict.fromkeys(map(check_metric, metrics)))
        self.batch_size = batch_size
        self.similarity = similarity
        # The base class says that it is None.
        self.primary_metric: Any = primary_metric or self.metrics[0]
        self.about = about or {}

    def __call__(
        self, model: Any, output_path: str | None = None, epoch: float = -1, steps: int = -1
    ) -> dict[str, float]:
        """{"ndcg@10": ...}, means over the judged queries; nothing is written to ``output_path``."""
        from contaccum.retrieval.searcher import FaissSearcher

        searcher = FaissSearcher(model, self.batch_size, show_progress_bar=False)
        metric = searcher.metric(self.similarity)
        cuts = sorted({int(name.partition("@")[2]) for name in self.metrics})
        data = self.dataset
        run = searcher.search(data.corpus, data.queries, cuts[-1], metric)
        means, _ = score_run(data.qrels, run, cuts)
        scores = {name: means[_long(name)] for name in self.metrics}
        self.store_metrics_in_model_card_data(model, scores, epoch, steps)  # type: ignore[arg-type]  # epochs are floats
        return scores

    def describe(self) -> dict[str, Any]:
        """Which data, and how much of it; for records."""
        data = self.dataset
        return {
            "name": data.name,
            "split": data.split,
            "path": str(data.path),
            "queries": len(data.queries),
            "documents": len(data.corpus),
            "fingerprint": data.fingerprint,
            **self.about,
        }

    @property
    def description(self) -> str:
        return "Retrieval"

    def get_config_dict(self) -> dict[str, Any]:
        return {key: value for key, value in self.describe().items() if key != "path"}


def check_metric(name: str) -> str:
    """A metric's name in lower case, without a trainer's `eval_`; raises `ConfigError` for one that there is not."""
    plain = name.lower().removeprefix("eval_")
    kind, at, k = plain.partition("@")
    if kind not in _KINDS or not at or not k.isdecimal() or int(k) < 1:
        close = difflib.get_close_matches(plain, DEFAULT_METRICS, n=1, cutoff=0.4)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ConfigError(
            f"there is no metric {name!r}: write a kind ({', '.join(_KINDS)}), @ and a number, such as ndcg@10{hint}"
        )
    return f"{kind}@{int(k)}"


def _long(name: str) -> str:
    kind, _, k = name.partition("@")
    return f"{_KINDS[kind]}@{k}"
