"""Published figures to set beside an evaluation's own: one number a model and a BEIR set, with its source.

They lie in published.json, which also tells how each was scored. Nothing is computed here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from contaccum.data.beir_names import default_split


@dataclass(frozen=True)
class Published:
    """Attributes: metric; models: {name: {BEIR name: score}}; judged_queries: {BEIR name: how many}; document: all."""

    metric: str
    models: Mapping[str, Mapping[str, float]]
    judged_queries: Mapping[str, int]
    document: Mapping[str, Any]

    def scores(self, name: str, split: str) -> dict[str, float]:
        """{model: score} on one split of the set of that name; empty where none is published."""
        if split != default_split(name):
            return {}
        return {model: scores[name] for model, scores in self.models.items() if name in scores}


@lru_cache(maxsize=1)
def published() -> Published:
    """The figures that come with this package."""
    document = json.loads(Path(__file__).with_name("published.json").read_text(encoding="utf-8"))
    models = {model["name"]: model["scores"] for model in document["models"]}
    return Published(document["metric"], models, document["judged_queries"], document)
