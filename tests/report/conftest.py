"""Files as runs and evaluations leave them, with numbers that are made up and texts that mean harm."""

from pathlib import Path
from typing import Any

import pytest
from small_data import write_lines

HARM = '<script>document.title="taken"</script><img src="http://evil.invalid/x.png" onerror="alert(1)">'


class Made:
    """Writes files into a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, name: str, content: Any) -> Path:
        path = self.root / name
        return write_lines(path, content if isinstance(content, list) else [content])

    def training_run(self, name: str, offset: float = 0.0, **arguments: Any) -> Path:
        """Twelve updates of a bank of 512, evaluated three times, best at the eighth."""
        settings = {"bank_size": 512, "learning_rate": 5e-5, **arguments}
        record = {"method": "contaccum", "seed": 7, "pairs_per_update": 128, "updates": 12, "arguments": settings}
        self.write(f"{name}/run.json", {**record, "data": {"fingerprint": "f" * 64}, "model": {"base": "MiniLM"}})
        line = {"bank_fill": 512, "drift_cosine_query": 0.1, "seconds": 0.5, "peak_memory_mb": 700.0}
        self.write(f"{name}/train_log.jsonl", [{**line, "update": u, "loss": 3.0 / u + offset} for u in range(1, 13)])
        scores = ((4, 0.61), (8, 0.7234), (12, 0.70))
        self.write(f"{name}/eval_log.jsonl", [{"update": u, "eval_ndcg@10": x + offset} for u, x in scores])
        return self.root / name

    def evaluation(self, name: str, gain: float = 0.0, fingerprint: str = "d" * 64) -> Path:
        """20 queries: q0 gains by ``gain``, q1 loses as much, thirteen others gain a fifth of it."""
        changes = {0: gain, 1: -gain}
        scores = {f"q{n}": 0.5 + changes.get(n, gain / 5 if n < 15 else 0.0) for n in range(20)}
        record = {
            "metrics": {"NDCG@10": sum(scores.values()) / 20, "Recall@100": 0.9},
            "per_query": {query: {"NDCG@10": score, "Recall@100": 0.9} for query, score in scores.items()},
            "data": {"name": "made", "split": "test", "queries": 20, "documents": 40, "fingerprint": fingerprint},
            "model": {"name": f"models/{name}"},
            "search": {"index": "Flat"},
            "versions": {HARM: HARM},
        }
        return self.write(f"{name[:5].strip('<>')}.json", record)


@pytest.fixture
def made(tmp_path) -> Made:
    return Made(tmp_path)


@pytest.fixture(scope="session")
def everything(tmp_path_factory) -> list[Path]:
    """Two training runs and two evaluations."""
    made = Made(tmp_path_factory.mktemp("everything"))
    runs = [made.training_run("one"), made.training_run("two", offset=0.05, bank_size=2048)]
    return [*runs, made.evaluation("base"), made.evaluation("tuned", 0.2)]
