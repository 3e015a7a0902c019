"""The result of a fit, and fit.json, its record with all data that the HTML report shows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from contaccum.data.beir import BeirDataset
from contaccum.data.split import Split
from contaccum.encoders.dual_encoder import DualEncoder
from contaccum.files import provenance, read_json
from contaccum.fitting.final import (
    SystemResult,
    compare_queries,
    get_chosen_trial,
    read_best_dev_score,
    select_shown_metrics,
)
from contaccum.fitting.folder import FitFolder
from contaccum.fitting.source import DataSource
from contaccum.fitting.verdict import Verdict, collect_warnings, warn_of_test
from contaccum.training.log import read_run_record
from contaccum.tuning.baselines import Baselines
from contaccum.tuning.result import TunedSettings


@dataclass(frozen=True)
class FitResult:
    """The result of `fit`.

    Attributes:
        verdict: the comparison with the base model; `str` returns the line that was printed.
        folder: the output folder, with the paths of all its files.
        warnings: warnings about the verdict, one line each.
        trust_remote_code: True if code that comes with the base model was trusted.
    """

    verdict: Verdict
    folder: FitFolder
    warnings: list[str]
    trust_remote_code: bool = False

    @property
    def report(self) -> Path:
        """The path of the HTML report."""
        return self.folder.report

    @cached_property
    def model(self) -> DualEncoder:
        """The trained model, which is loaded at the first access."""
        return DualEncoder.from_pretrained(
            str(self.folder.model), trust_remote_code=self.trust_remote_code
        )


def read_result(folder: FitFolder, trust_remote_code: bool) -> FitResult:
    """Read the result from the record, as all processes do after the first one has written it."""
    record = read_json(folder.record_file)
    values = {field.name: record["verdict"][field.name] for field in fields(Verdict)}
    return FitResult(Verdict(**values), folder, record["warnings"], trust_remote_code)


def make_record(
    source: DataSource,
    base_name: str,
    folder: FitFolder,
    split: Split,
    baselines: Baselines,
    tuned: TunedSettings,
    test_set: BeirDataset,
    results: Mapping[str, SystemResult],
    verdict: Verdict,
    guard_record: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Return the content of fit.json, without the times of the stages.

    Args:
        source: the pairs.
        base_name: the name of the base model.
        folder: the output folder.
        split: the sizes of the train, dev and test sets.
        baselines: the scores on dev before training.
        tuned: the trials of the search, and the chosen settings.
        test_set: the test set.
        results: {system: result on the test set} with the systems "bm25", "base" and "trained".
        verdict: the comparison of the trained model with the base model.
        guard_record: the scores of the merged models; None: the fit has no guard.
    """
    trial_updates = get_chosen_trial(tuned)["updates"]
    if guard_record is None:
        trained_dev_score = read_best_dev_score(folder.model)
        is_like_trial = read_run_record(folder.model)["updates"] == trial_updates
    else:
        dev_scores_of_weights = {row[0]: row[1] for row in guard_record["scores"]}
        trained_dev_score = dev_scores_of_weights[guard_record["weight"]]
        is_like_trial = False
    # The dev scores of the choice are those of a trial. They say nothing about the test of a merged
    # model, or of a model that was trained for a shorter or longer time.
    warnings = [*tuned.choice.warnings, *warn_of_test(verdict)]
    if is_like_trial:
        warnings = collect_warnings(verdict, tuned.choice)
    dev_scores = {"bm25": baselines.bm25, "base": baselines.base, "trained": trained_dev_score}
    names = {"bm25": "BM25", "base": f"{base_name} (as it is)", "trained": "trained"}
    score_table = []
    for system, name in names.items():
        test_scores = select_shown_metrics(results[system].means)
        score_table.append({"name": name, "dev": dev_scores[system], **test_scores})
    return {
        "request": read_json(folder.record_file)["request"],
        "verdict": verdict.record(),
        "warnings": warnings,
        "model": base_name,
        "data": {
            "path": str(source.path),
            "corpus": None if source.corpus is None else str(source.corpus),
        },
        "split": asdict(split),
        "scores": score_table,
        "guard": guard_record,
        "choice": tuned.choice._asdict(),
        "trials": tuned.trials,
        "changes": compare_queries(test_set, results["base"], results["trained"]),
        "settings": yaml.safe_load(folder.config_file.read_text(encoding="utf-8")),
        "made_with": {**provenance(), "time": datetime.now(UTC).isoformat(timespec="seconds")},
    }
