"""eval/study/by_time.py on a tiny model: its plan, its runs, its limit and its report."""

import importlib
import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from programs import ROOT
from small_data import read_lines, write_judged_sentences, write_lines

from contaccum import DualEncoder
from contaccum.data import read_records
from contaccum.errors import ConfigError
from contaccum.files import read_json, write_json
from contaccum.retrieval.documents import StoreDocuments
from contaccum.retrieval.store import EmbeddingStore

PLAN = ROOT / "eval" / "study" / "by_time.yaml"
SETTINGS = {
    "total_train_batch_size": 8,
    "temperature": 0.05,
    "dropout": 0.0,
    "save_strategy": "no",
    "logging_steps": 1,
    "disable_tqdm": True,
}
BANK = {"method": "contaccum", "per_device_train_batch_size": 4}
QUERY_SIDE = {
    "settings": {"method": "query_side", "per_device_train_batch_size": 4},
    "store": "corpus",
    "budget": "updates",
}


@pytest.fixture
def study(monkeypatch):
    """Return a function that imports a module of the study."""
    monkeypatch.syspath_prepend(str(ROOT / "eval" / "study"))
    return lambda name: importlib.import_module(f"time_study.{name}")


@pytest.fixture
def folder(tmp_path):
    """Return a folder with the data set `sentences`, with the splits train, dev and test."""
    data = write_judged_sentences(tmp_path / "sentences")
    header, *lines = (data / "qrels" / "train.tsv").read_text().splitlines()
    (data / "qrels" / "dev.tsv").write_text("\n".join([header, *lines[:6], ""]))
    (data / "qrels" / "train.tsv").write_text("\n".join([header, *lines[6:], ""]))
    return tmp_path


def write_plan(path, entries, **keys):
    """Write a plan with one data set, and read it."""
    plan = {
        "seeds": [0, 1],
        "learning_rates": ["1e-4", "3e-4"],
        "rate_factor": 3,
        "max_rates": 3,
        "settings": SETTINGS,
        "data": {"sentences": {"max_length": 32, "bank_size": 8, "updates": 4, "bf16": True}},
        "entries": entries,
        **keys,
    }
    path.write_text(yaml.safe_dump(plan))
    return path


def make_study(study, monkeypatch, folder, model, entries):
    """Return a study whose runs happen in this process, and the list of their jobs."""
    schedule = study("schedule")
    cell = study("cell")
    done = []

    def run_jobs(jobs, processes, progress, command):
        for job in jobs:
            done.append(job)
            Path(job["folder"]).mkdir(parents=True)
            work = cell.WORK[job["kind"]]
            write_json(Path(job["result"]), work(job))
        return {}

    monkeypatch.setattr(schedule, "run_jobs", run_jobs)
    plan = study("plan").read_plan(write_plan(folder / "plan.yaml", entries))
    output = folder / "results"
    return schedule.Study(plan, "sentences", folder, model, output, jobs=1), done


def test_the_plan_of_the_repository_is_valid(study):
    plan = study("plan").read_plan(PLAN)
    assert set(plan.data) == {"scifact", "nqg", "medquad", "scifact_float32"}
    assert "query_side_train" not in plan.get_entries("nqg")
    entry = plan.entries["contaccum_cached"]
    assert plan.make_settings("nqg", entry)["bank_size"] == 1024
    assert plan.make_settings("nqg", entry)["per_device_train_batch_size"] == 128
    timed = plan.make_settings("nqg", entry, is_timed=True)
    assert (timed["method"], timed["per_device_train_batch_size"]) == ("contaccum_cached", 8)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"settings": {}, "rate_of": "missing"}, "first: there is no entry missing"),
        ({"settings": {}, "compared_with": ["missing"]}, "first: there is no entry missing"),
        ({"settings": {}, "data": ["missing"]}, "there is no data set missing"),
        ({"settings": {}, "unknown": 1}, "unexpected keyword argument 'unknown'"),
    ],
)
def test_a_plan_with_a_wrong_entry_is_refused(study, tmp_path, entry, message):
    path = write_plan(tmp_path / "plan.yaml", {"first": entry})
    with pytest.raises(ConfigError, match=message):
        study("plan").read_plan(path)


@pytest.mark.long
def test_every_run_has_a_file_and_is_done_once(study, monkeypatch, folder, tiny_model_path):
    """Timing, ladder and seeds of two entries; the second start has nothing to do."""
    entries = {
        "contaccum": {"has_bank": True, "settings": BANK},
        "query_side": {**QUERY_SIDE, "compared_with": ["contaccum"]},
    }
    runs, done = make_study(study, monkeypatch, folder, tiny_model_path, entries)
    runs.run()
    output = folder / "results" / "sentences"
    results = study("results").Results(runs.plan, output)
    for name in entries:
        rates = list(results.get_dev_scores(name))
        assert 2 <= len(rates) <= 3
        assert results.choose_rate(name) in rates
        assert results.is_complete(name)
        record = results.get_final_runs(name)[1]
        assert record["updates"] == 4
        assert [len(record["query_scores"][split]) for split in ("dev", "test")] == [6, 8]
        assert set(record["curve"]) == {"1", "2"}
        assert record["versions"]["contaccum"]
        assert len(record["bank_fill"]) == (4 if name == "contaccum" else 0)
    seconds = results.get_timings()
    # The two updates that are counted have 8 and 2 of the 18 pairs.
    assert seconds["contaccum"]["passes_per_update"] == 2 * 5
    assert seconds["query_side"]["passes_per_update"] == 5

    num_done = len(done)
    again, _ = make_study(study, monkeypatch, folder, tiny_model_path, entries)
    again.run()
    assert len(done) == num_done

    record_file = next(output.glob("contaccum-*-1.json"))
    record = read_json(record_file)
    record["identity"]["temperature"] = 1.0
    write_json(record_file, record)
    with pytest.raises(ConfigError, match="had other settings or data than the plan"):
        again.run()


@pytest.mark.long
def test_a_second_stage_trains_queries_against_the_new_documents(
    study, monkeypatch, folder, tiny_model_path
):
    """Four updates of contaccum take 8 s; four of the second stage 2 s, so three fit before."""
    entries = {
        "contaccum": {"has_bank": True, "settings": BANK},
        "query_side": QUERY_SIDE,
        "both": {
            "has_bank": True,
            "settings": BANK,
            "timed_as": "contaccum",
            "rate_of": "contaccum",
            "second_stage": "query_side",
        },
    }
    runs, done = make_study(study, monkeypatch, folder, tiny_model_path, entries)
    seconds = {
        "contaccum": {"seconds_per_update": 2.0, "passes_per_update": 16},
        "query_side": {"seconds_per_update": 0.5, "passes_per_update": 8},
    }
    write_json(folder / "results" / "sentences" / "seconds.json", {"entries": seconds})
    runs.run()
    results = runs.results
    (record, _) = results.get_final_runs("both")
    assert record["updates"] == 3
    assert results.get_cost("both", 3) == (8.0 / 60, 3 * 16 + 4 * 8)
    job = next(job for job in done if job["entry"] == "both")
    first = DualEncoder.from_pretrained(f"{job['folder']}/first_model", device="cpu")
    stores = f"{job['folder']}/stores"
    documents = StoreDocuments(EmbeddingStore.open(f"{stores}/haystack"))
    texts = [line["text"] for line in read_lines(folder / "sentences" / "corpus.jsonl")]
    _, stored = documents.find_embeddings(texts)
    assert abs(stored - first.encode_document(texts)).max() < 1e-5
    base = DualEncoder.from_pretrained(tiny_model_path, device="cpu")
    assert abs(stored - base.encode_document(texts)).max() > 1e-3
    curve = read_json(runs.output / f"both-{record['rate']}-1.json")["curve"]
    assert set(curve) == {"1", "2", "3"}  # the last one is the end of the first stage
    second = record["identity"]["second_stage_learning_rate"]
    assert second == results.choose_rate("query_side")


def test_entries_that_are_added_later_are_timed_beside_contaccum(
    study, monkeypatch, folder, tiny_model_path
):
    """The machine is twice as slow as at the first timing, so the new seconds are halved."""
    entries = {
        "contaccum": {"has_bank": True, "settings": BANK},
        "later": {"settings": {"method": "grad_accum", "per_device_train_batch_size": 4}},
    }
    runs, _ = make_study(study, monkeypatch, folder, tiny_model_path, entries)
    file = folder / "results" / "sentences" / "seconds.json"
    write_json(file, {"entries": {"contaccum": {"seconds_per_update": 2.0}}})
    turn = {
        "contaccum": {"seconds": [4.0], "passes": [8]},
        "later": {"seconds": [5.0], "passes": [8]},
    }
    monkeypatch.setattr(runs, "_run_timing", lambda names: {name: [turn[name]] for name in names})
    runs.measure_seconds()
    seconds = read_json(file)["entries"]
    assert seconds["contaccum"]["seconds_per_update"] == 2.0
    assert seconds["later"]["seconds_per_update"] == 2.5


def test_finished_turns_of_the_timing_are_not_repeated(study, monkeypatch, folder, tiny_model_path):
    entries = {"contaccum": {"has_bank": True, "settings": BANK}}
    runs, _ = make_study(study, monkeypatch, folder, tiny_model_path, entries)
    schedule = study("schedule")
    first = runs._make_timing_job("contaccum", 0)
    second = runs._make_timing_job("contaccum", 1)
    other = {**second, "settings": {**second["settings"], "bank_size": 16}}
    for job, written in ((first, first), (second, other)):
        write_json(Path(job["folder"], "job.json"), written)
        write_json(Path(job["result"]), {"seconds": [3.0], "passes": [8]})

    def time_updates(jobs, processes, progress, command):
        done.extend(job["folder"] for job in jobs)
        for job in jobs:
            write_json(Path(job["result"]), {"seconds": [5.0], "passes": [8]})
        return {}

    done = []
    monkeypatch.setattr(schedule, "run_jobs", time_updates)
    runs.measure_seconds()
    assert done == [runs._make_timing_job("contaccum", turn)["folder"] for turn in (1, 2)]
    seconds = read_json(folder / "results" / "sentences" / "seconds.json")["entries"]
    assert seconds["contaccum"]["seconds_of_updates"] == [[3.0], [5.0], [5.0]]
    assert not Path(first["folder"]).exists()
    done.clear()
    runs.measure_seconds()
    assert not done


def test_another_model_or_entry_is_refused(study, monkeypatch, folder, tiny_model_path):
    entries = {"contaccum": {"has_bank": True, "settings": BANK}}
    runs, _ = make_study(study, monkeypatch, folder, tiny_model_path, entries)
    arguments = (runs.plan, "sentences", folder, tiny_model_path, folder / "results", 1)
    with pytest.raises(ConfigError, match="missing"):
        study("schedule").Study(*arguments, names=["missing"])
    with pytest.raises(ConfigError, match="did you mean 'sentences'"):
        runs.plan.get_entries("sentence")
    write_json(folder / "results" / "sentences" / "base.json", {"model_fingerprint": "other"})
    with pytest.raises(ConfigError, match="started from another model"):
        study("schedule").Study(*arguments)


def test_the_rate_of_an_entry_that_is_not_run_must_be_chosen(
    study, monkeypatch, folder, tiny_model_path
):
    entries = {
        "contaccum": {"has_bank": True, "settings": BANK},
        "variant": {"has_bank": True, "settings": BANK, "rate_of": "contaccum"},
    }
    runs, _ = make_study(study, monkeypatch, folder, tiny_model_path, entries)
    runs.entries = {"variant": runs.entries["variant"]}
    with pytest.raises(ConfigError, match="learning rate of contaccum, which is not chosen yet"):
        runs.run_learning_rates()


def test_updates_fit_into_the_time_of_contaccum(study, monkeypatch, folder, tiny_model_path):
    entries = {
        "contaccum": {"has_bank": True, "settings": BANK},
        "slow": {"settings": {"method": "grad_cache", "per_device_train_batch_size": 4}},
        "same": {"settings": {"method": "grad_accum"}, "budget": "updates"},
    }
    runs, _ = make_study(study, monkeypatch, folder, tiny_model_path, entries)
    seconds = {
        "contaccum": {"seconds_per_update": 2.0},
        "slow": {"seconds_per_update": 2.1},
        "same": {"seconds_per_update": 3.0},
    }
    write_json(folder / "results" / "sentences" / "seconds.json", {"entries": seconds})
    assert {name: runs.count_updates(name) for name in entries} == {
        "contaccum": 4,
        "slow": 3,
        "same": 4,
    }


def test_entries_of_the_oracle_are_encoded_by_the_present_encoder(study, tiny_model_path, folder):
    """After each update the bank holds present embeddings, and exact log-sums."""
    settings = {
        **SETTINGS,
        **BANK,
        "bank_size": 16,
        "drift_compensation": "none",
        "model": tiny_model_path,
        "train_data": str(folder / "sentences"),
        "output_dir": str(folder / "model"),
        "max_steps": 2,
        "learning_rate": "0.01",
        "bf16": False,
    }
    trainers = study("trainers")
    trainer = trainers.make_oracle_trainer(settings)
    (refresh,) = [c for c in trainer.callback_handler.callbacks if hasattr(c, "_micro_batches")]
    trainer.train()
    bank = trainer.loss.info_nce.bank
    model = trainers.get_trained_model(trainer)
    with torch.no_grad():
        columns = [
            [model(dict(batch[column]))["sentence_embedding"] for batch in refresh._micro_batches]
            for column in (0, 1)
        ]
    queries, passages = (torch.nn.functional.normalize(torch.cat(c), dim=-1) for c in columns)
    assert bank.in_use == len(queries) == 16
    first = bank.total_enqueued - 16
    slots = torch.arange(first, first + 16) % bank.num_slots
    assert torch.allclose(bank.queries[slots], queries, atol=1e-5)
    assert torch.allclose(bank.passages[slots], passages, atol=1e-5)
    logits = queries @ passages.T / 0.05
    is_own = torch.eye(16, dtype=torch.bool)
    negatives = logits.masked_fill(is_own, -torch.inf).logsumexp(1)
    assert torch.allclose(bank.total_log_sums[slots], negatives, atol=1e-3)


@pytest.mark.parametrize("has_guide", [False, True])
def test_the_recipe_of_sentence_transformers_trains(study, tiny_model_path, tmp_path, has_guide):
    rows = [
        {"query": f"cat {n}", "positive": f"the cat {n}", "negatives": [f"the dog {n}"]}
        for n in range(16)
    ]
    data = write_lines(tmp_path / "mined.jsonl", rows)
    settings = {
        **SETTINGS,
        "batch_sampler": "no_duplicates",
        "per_device_train_batch_size": 4,
        "model": tiny_model_path,
        "train_data": str(data),
        "output_dir": str(tmp_path / "model"),
        "max_steps": 2,
        "learning_rate": "1e-3",
        "seed": 0,
    }
    if has_guide:
        settings["guide"] = tiny_model_path
    trainer = study("trainers").make_sentence_transformers_trainer(settings)
    clock = study("clock").UpdateClock(trainer.model)
    trainer.add_callback(clock)
    before = trainer.model.encode("cat 1", convert_to_tensor=True)
    trainer.train()
    after = trainer.model.encode("cat 1", convert_to_tensor=True)
    assert not torch.allclose(before, after, atol=1e-4)
    # 8 pairs with a negative are 24 texts, which the cached loss encodes twice.
    assert clock.texts == [48, 48]
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 2 and all(loss > 0 for loss in losses)


@pytest.mark.long
def test_mined_negatives_are_no_document_of_held_out_queries(
    study, monkeypatch, folder, tiny_model_path
):
    entries = {"contaccum": {"has_bank": True, "settings": BANK}}
    runs, _ = make_study(study, monkeypatch, folder, tiny_model_path, entries)
    texts = {line["_id"]: line["text"] for line in read_lines(folder / "sentences/corpus.jsonl")}
    held_out = {texts[f"d{row}"] for row in (*range(6), *range(24, 32))}
    # The scores of a random model are too similar for a margin.
    monkeypatch.setattr(study("schedule"), "MINING_RULES", ("--num_negatives", "1"))
    records = list(read_records(runs._mine_negatives()))
    assert all(record.negatives for record in records)
    negatives = {negative for record in records for negative in record.negatives}
    assert not negatives & held_out


def test_the_report_shows_finished_runs_and_names_missing_ones(study, tmp_path, monkeypatch):
    """Two entries with known scores: means, difference and p; a third one is not yet run."""
    entries = {
        "contaccum": {"settings": {}, "compared_with": ["grad_cache"]},
        "grad_cache": {"settings": {}},
        "later": {"settings": {}, "compared_with": ["grad_cache"]},
    }
    plan_file = write_plan(tmp_path / "plan.yaml", entries)
    output = tmp_path / "results" / "sentences"
    scores = {"contaccum": [0.8, 0.9, 0.7, 0.8], "grad_cache": [0.7, 0.8, 0.6, 0.7]}
    seconds = {}
    for name, test in scores.items():
        seconds[name] = {"seconds_per_update": 30.0, "passes_per_update": 256.0}
        for seed in (0, 1):
            record = {
                "entry": name,
                "rate": "1e-4",
                "updates": 4,
                "scores": {"dev": 0.5, "test": sum(test) / 4},
                "query_scores": {"dev": [0.5], "test": test},
                "curve": {"2": {"dev": 0.4, "test": 0.6}} if seed == 1 else {},
            }
            write_json(output / f"{name}-1e-4-{seed}.json", record)
    write_json(output / "seconds.json", {"entries": seconds})
    write_json(
        output / "base.json",
        {
            "scores": {"dev": 0.3, "test": 0.4},
            "bm25": {"dev": 0.2, "test": 0.25},
            "query_scores": {"test": [0.1, 0.2, 0.6, 0.7]},
            "has_known_document": {"test": [True, True, False, False]},
        },
    )
    page = tmp_path / "page.md"
    places = ("comparisons", "sentences", "sentences, learning rates", "sentences, known documents")
    page.write_text("".join(f"<!-- table: {p} -->\n<!-- end of table -->\n" for p in places))
    monkeypatch.setattr(
        "sys.argv",
        [
            "report",
            "--plan",
            str(plan_file),
            "--results",
            str(tmp_path / "results"),
            "--page",
            str(page),
            "--pictures",
            str(tmp_path),
        ],
    )
    importlib.import_module("by_time_report").main()
    rows = [[cell.strip() for cell in line.split("|")] for line in page.read_text().splitlines()]
    cells = next(row[2:9] for row in rows if len(row) > 8 and row[1] == "`contaccum`")
    assert cells == ["1e-4", "4", "2.0", "1,024", "2", "50.0 (0.0)", "80.0 (0.0)"]
    (known,) = (row[2:5] for row in rows if row[1:2] == ["`contaccum`"] and len(row) == 6)
    assert known[:2] == ["85.0", "75.0"]
    assert known[2].startswith("+10.0 (")
    comparison = next(row for row in rows if len(row) > 2 and " - " in row[2])
    assert comparison[2:5] == ["`contaccum` - `grad_cache`", "+10.0", "+10.0 to +10.0"]
    assert sum("not yet run" in row for row in rows) == 2
    (test,) = json.loads((tmp_path / "results" / "tests.json").read_text())["tests"]
    assert test["p_holm"] == test["p_value"]
    for name in ("time_study.png", "time_study_texts.png"):
        assert (tmp_path / name).stat().st_size > 1000


def test_the_page_is_that_of_the_finished_runs(study, tmp_path, monkeypatch):
    """The tables of docs/time_study.md are those that the report program writes."""
    page = tmp_path / "page.md"
    shutil.copy(ROOT / "docs" / "time_study.md", page)
    results = tmp_path / "results"
    shutil.copytree(ROOT / "benchmarks" / "by_time", results)
    monkeypatch.setattr(
        "sys.argv",
        [
            "report",
            "--results",
            str(results),
            "--page",
            str(page),
            "--pictures",
            str(tmp_path),
        ],
    )
    importlib.import_module("by_time_report").main()
    assert page.read_text() == (ROOT / "docs" / "time_study.md").read_text()
