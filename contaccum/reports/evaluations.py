"""Results of evaluations on a page: what each scored, and how those on the same data differ, query by query."""

from __future__ import annotations

from collections.abc import Sequence

from contaccum.errors import ConfigError
from contaccum.evaluation.table import MAIN_METRICS
from contaccum.reports.blocks import Block, Facts, Notes, Section, Table, about, cell, is_number, plain
from contaccum.reports.queries import HEADER, NOTE, Against, compared, query_blocks, scores_of
from contaccum.reports.sources import Evaluation, query_texts

_COLUMNS = 6


def evaluation_sections(evaluations: Sequence[Evaluation], metric: str | None = None) -> list[Section]:
    """A section for each data set, in the order in which they were given.

    Args:
        metric: what is compared; None: nDCG@10, or the first of the main metrics that all results have.

    Raises:
        ConfigError: no result has the metric.
    """
    if metric is not None and not any(metric in one.record["metrics"] for one in evaluations):
        known = ", ".join(dict.fromkeys(name for one in evaluations for name in one.record["metrics"]))
        raise ConfigError(f"--metric {metric}: no result has it; there are {known or 'none'}")
    groups: dict[tuple[object, ...], list[Evaluation]] = {}
    for one in evaluations:
        groups.setdefault(one.data_identity, []).append(one)
    return [_section(group, metric) for group in groups.values()]


def _section(group: Sequence[Evaluation], metric: str | None) -> Section:
    data = group[0].record["data"]
    shared = [
        name
        for name in dict.fromkeys((*MAIN_METRICS, *group[0].record["metrics"]))
        if all(is_number(one.record["metrics"].get(name)) for one in group)
    ]
    chosen = metric if metric in shared else next(iter(shared), None)
    shown = list(dict.fromkeys([*([chosen] if chosen else []), *shared]))[:_COLUMNS]
    pairs = [_against(one, group[0], chosen) for one in group]
    rows = [[cell(one.name), *(cell(float(one.record["metrics"][name])) for name in shown)] for one in group]
    blocks: list[Block] = [Table(["result", *shown], rows)]
    found = [pair for pair in pairs if pair is not None]
    if found:
        beside = [[cell(pair.name), *cells] for pair, cells in zip(found, compared(found), strict=True)]
        blocks.append(Table(["result", *HEADER], beside, f"{chosen} against {group[0].name}", NOTE))
    other = [one.name for one, pair in zip(group[1:], pairs[1:], strict=True) if pair is None]
    if other:
        blocks.append(Notes([f"{name} has no scores of the same queries, and is not compared" for name in other]))
    if found:
        blocks += query_blocks([(pair, str(chosen)) for pair in found], query_texts(data))
    blocks += [Facts(_facts(one), f"{one.name}: model, search and versions", folded=True) for one in group]
    counts = [f"{data[key]:,} {key}" for key in ("queries", "questions", "documents", "passages") if key in data]
    split = f" ({data['split']})" if data.get("split") else ""
    return Section(f"{data.get('name') or 'data'}{split}", blocks, ", ".join(counts))


def _against(one: Evaluation, first: Evaluation, metric: str | None) -> Against | None:
    if one is first or metric is None:
        return None
    try:
        ours, theirs = scores_of(one.record, metric), scores_of(first.record, metric)
    except KeyError:
        return None
    return Against(one.name, ours, first.name, theirs) if ours and ours.keys() == theirs.keys() else None


def _facts(one: Evaluation) -> dict[str, str]:
    record = one.record
    facts = {"file": str(one.path), "created": str(record.get("created") or "")}
    for part in ("model", "data", "search", "tokenisation", "timing"):
        for key, value in (record.get(part) or {}).items():
            facts[f"{part} {key}"] = plain(value)
    facts["precision"] = str(record.get("precision") or "")
    facts |= about(record)
    return {key: value for key, value in facts.items() if value not in ("", "None")}
