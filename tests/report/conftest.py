"""Files as runs, evaluations and comparisons leave them, with numbers that are made up and texts that mean harm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

HARM = '<script>document.title="taken"</script><img src="http://evil.invalid/x.png" onerror="alert(1)">'
TOWERS = ("query", "passage")


class Made:
    """Writes files into a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def training_run(self, name: str, offset: float = 0.0, **arguments: Any) -> Path:
        """Twelve updates of a bank of 512, evaluated three times, best at the eighth."""
        folder = self.root / name
        folder.mkdir(parents=True)
        settings = {"bank_size": 512, "learning_rate": 5e-5, "metric_for_best_model": "eval_ndcg@10", **arguments}
        evaluation = {"name": "scifact", "split": "dev", "queries": 50, "documents": 900, "of_documents": 5183}
        record = {"method": "contaccum", "seed": 7, "pairs_per_update": 128, "updates": 12, "arguments": settings}
        record |= {"data": {"fingerprint": "f" * 64}, "model": {"base": "MiniLM"}, "evaluation": evaluation}
        record |= {"versions": {"torch": "2.13.0"}, "git_commit": "c0ffee" + "0" * 34}
        (folder / "run.json").write_text(json.dumps(record))
        lines = []
        for update in range(1, 13):
            line = {"update": update, "loss": 3.0 / update + offset, "grad_norm_ratio": 1.5 - offset, "columns": 520}
            line |= {"bank_fill": min(512, 128 * update), "seconds": 0.5, "peak_memory_mb": 700.0 + update}
            line |= {"embedding_spread": 0.4, "in_batch_mass": 0.1, "bank_mass": 0.8, "bank_mass_aged": 0.9}
            line |= {f"drift_{kind}_{tower}": 0.1 for kind in ("cosine", "shift", "residual") for tower in TOWERS}
            lines.append(json.dumps(line) + "\n")
        (folder / "train_log.jsonl").write_text("".join(lines))
        figures = [{"update": u, "eval_ndcg@10": x + offset} for u, x in ((4, 0.61), (8, 0.7234), (12, 0.70))]
        (folder / "eval_log.jsonl").write_text("".join(json.dumps(x | {"eval_runtime": 2.0}) + "\n" for x in figures))
        return folder

    def beir(self) -> Path:
        folder = self.root / "data"
        folder.mkdir(exist_ok=True)
        texts = {"q0": HARM, **{f"q{n}": f"question number {n}" for n in range(1, 20)}}
        lines = (json.dumps({"_id": query, "text": text}) + "\n" for query, text in texts.items())
        (folder / "queries.jsonl").write_text("".join(lines))
        return folder

    def evaluation(self, name: str, gain: float = 0.0, fingerprint: str = "d" * 64) -> Path:
        """20 queries: q0 gains by ``gain``, q1 loses as much, thirteen others gain a fifth of it."""
        changes = {0: gain, 1: -gain}
        scores = {f"q{n}": 0.5 + changes.get(n, gain / 5 if n < 15 else 0.0) for n in range(20)}
        data = {"name": "made", "split": "test", "path": str(self.beir()), "queries": 20, "documents": 40}
        record = {
            "metrics": {"NDCG@10": sum(scores.values()) / 20, "Recall@100": 0.9},
            "per_query": {query: {"NDCG@10": score, "Recall@100": 0.9} for query, score in scores.items()},
            "data": data | {"fingerprint": fingerprint},
            "model": {"name": f"models/{name}"},
            "search": {"index": "Flat"},
            "versions": {HARM: HARM},
        }
        path = self.root / f"{name[:5].strip('<>')}.json"
        path.write_text(json.dumps(record))
        return path

    def comparison(self) -> Path:
        """Two methods on one seed, with logs of their runs."""
        folder = self.root / "compared"
        runs: dict[str, Any] = {}
        groups: dict[str, Any] = {}
        cost = dict.fromkeys(("train_seconds", "peak_memory_mb", "grad_norm_ratio", "final_loss"))
        for entry, score in (("grad_accum", 0.5), ("contaccum", 0.6)):
            name = f"{entry}_seed-0"
            self.training_run(f"compared/runs/{name}")
            common = {"entry": entry, "labels": {}, "seed": 0}
            curve = [{"update": u, "train_seconds": float(u), "NDCG@10": score * u / 8} for u in (4, 8)]
            runs[name] = {**common, "name": name, "curve": curve}
            figures = {"NDCG@10": {"mean": score, "sd": None, "values": [score]}}
            groups[entry] = {**common, "seeds": [0], "metrics": {"made": figures}, "seconds_per_update": 0.5, **cost}
        row = {"group": "contaccum", "baseline_group": "grad_accum", "labels": {}, "data": "made", "seeds": [0]}
        row |= {"metric": "NDCG@10", "difference": 0.1, "low": 0.05, "high": 0.15, "p_value": 0.0001, "p_holm": 0.0002}
        data = {"name": "made", "split": "test", "path": str(self.beir()), "queries": 20, "documents": 40}
        report = {"command": "contaccum compare x.yaml", "baseline": "grad_accum", "seeds": [0], "grid": {}}
        report |= {"entries": [], "warnings": ["one run saw other pairs"], "failed": {}, "groups": groups}
        report |= {"comparisons": [row], "runs": runs, "data": {"evaluation": [data]}}
        report |= {"settings": {"options": {"bank_size": "512"}, "evaluation": {}}}
        (folder / "report.json").write_text(json.dumps(report))
        return folder


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return Made(tmp_path)


@pytest.fixture(scope="session")
def everything(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two training runs, two evaluations and a comparison."""
    made = Made(tmp_path_factory.mktemp("everything"))
    runs = [made.training_run("one"), made.training_run("two", offset=0.05, bank_size=2048)]
    return [*runs, made.evaluation("base"), made.evaluation("tuned", 0.2), made.comparison()]
