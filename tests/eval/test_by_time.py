"""eval/study/by_time.py on a tiny model: its plan, its runs, its limit and its report."""

import copy
import importlib
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
    "store": "without_held_out",
    "budget": "updates",
}


@pytest.fixture
def study(monkeypatch):
    """Return a function that imports a module of the study by its name."""
    monkeypatch.syspath_prepend(str(ROOT / "eval" / "compare"))
    monkeypatch.syspath_prepend(str(ROOT / "eval" / "study"))
    return lambda name: importlib.import_module(f"time_study.{name}")


@pytest.fixture
def folder(tmp_path):
    """Return a folder with the data set `sentences`, with the splits train, dev and test.

    The first 6 of the 24 training queries are dev queries instead; 18 are left to train on.
    """
    data = write_judged_sentences(tmp_path / "sentences")
    header, *lines = (data / "qrels" / "train.tsv").read_text().splitlines()
    (data / "qrels" / "dev.tsv").write_text("\n".join([header, *lines[:6], ""]))
    (data / "qrels" / "train.tsv").write_text("\n".join([header, *lines[6:], ""]))
    return tmp_path


def write_plan(path, entries, **keys):
    """Write a plan with one data set to a file, and return its path."""
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
    """Return a study whose runs happen in this process, and a list that receives their jobs."""
    schedule = study("schedule")
    cell = study("cell")
    finished_jobs = []

    def run_jobs(jobs, processes, progress, command):
        for job in jobs:
            finished_jobs.append(job)
            Path(job["folder"]).mkdir(parents=True)
            work = cell.WORK[job["kind"]]
            write_json(Path(job["result"]), work(job))
        return {}

    monkeypatch.setattr(schedule, "run_jobs", run_jobs)
    plan = study("plan").read_plan(write_plan(folder / "plan.yaml", entries))
    output = folder / "results"
    runs = schedule.Study(plan, "sentences", folder, model, output, jobs=1)
    return runs, finished_jobs


def write_seconds(folder, seconds):
    """Write the timings of entries, as if they had been measured; return the file."""
    file = folder / "results" / "sentences" / "seconds.json"
    write_json(file, {"entries": seconds})
    return file


def test_the_plan_of_the_repository_is_valid(study):
    plan = study("plan").read_plan(PLAN)
    assert set(plan.data) == {"scifact", "nqg", "medquad", "scifact_float32"}
    assert "query_side_train" not in plan.get_entries("nqg")
    entry = plan.entries["contaccum_cached"]
    assert plan.make_settings("nqg", entry)["bank_size"] == 1024
    assert plan.make_settings("nqg", entry)["per_device_train_batch_size"] == 128
    timed = plan.make_settings("nqg", entry, is_timed=True)
    assert timed["method"] == "contaccum_cached"
    assert timed["per_device_train_batch_size"] == 8


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"settings": {}, "rate_of": "missing"}, "first: there is no entry missing"),
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
    """Timing, learning rates and seeds of two entries. A second start has nothing to do."""
    entries = {
        "contaccum": {"has_bank": True, "settings": BANK},
        "query_side": {**QUERY_SIDE, "compared_with": ["contaccum"]},
    }
    runs, _ = make_study(study, monkeypatch, folder, tiny_model_path, entries)
    runs.run()
    output = folder / "results" / "sentences"
    results = study("results").Results(runs.plan, output)
    for name in entries:
        rates = list(results.get_dev_scores(name))
        assert len(rates) in (2, 3)
        assert results.choose_rate(name) in rates
        assert results.is_complete(name)
        _, record = results.get_final_runs(name)
        assert record["updates"] == 4
        assert len(record["query_scores"]["dev"]) == 6
        assert len(record["query_scores"]["test"]) == 8
        assert set(record["curve"]) == {"1", "2"}
        assert record["versions"]["contaccum"]
        num_updates_with_bank = 4 if name == "contaccum" else 0
        assert len(record["bank_fill"]) == num_updates_with_bank
    seconds = results.get_timings()
    # The two updates that are counted have 8 and 2 of the 18 pairs, 5 on average. Contaccum encodes
    # two texts of a pair, query_side one.
    assert seconds["contaccum"]["passes_per_update"] == 2 * 5
    assert seconds["query_side"]["passes_per_update"] == 5

    again, jobs_of_second_start = make_study(study, monkeypatch, folder, tiny_model_path, entries)
    again.run()
    assert jobs_of_second_start == []

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
    """The budget is 8 s, the time of four updates of contaccum.

    Four updates of the second stage take 2 s, so three updates of contaccum fit in before them.
    """
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
    runs, finished_jobs = make_study(study, monkeypatch, folder, tiny_model_path, entries)
    seconds = {
        "contaccum": {"seconds_per_update": 2.0, "passes_per_update": 16},
        "query_side": {"seconds_per_update": 0.5, "passes_per_update": 8},
    }
    write_seconds(folder, seconds)
    runs.run()
    results = runs.results
    (record, _) = results.get_final_runs("both")
    assert record["updates"] == 3
    cost = results.get_cost("both", 3)
    assert cost.minutes == 8.0 / 60
    assert cost.texts == 3 * 16 + 4 * 8

    # The second stage searches documents that the model of the first stage has encoded.
    job = next(job for job in finished_jobs if job["entry"] == "both")
    job_folder = Path(job["folder"])
    store = EmbeddingStore.open(str(job_folder / "stores" / "haystack"))
    texts = [line["text"] for line in read_lines(folder / "sentences" / "corpus.jsonl")]
    _, stored = StoreDocuments(store).find_embeddings(texts)
    first = DualEncoder.from_pretrained(str(job_folder / "first_model"), device="cpu")
    assert abs(stored - first.encode_document(texts)).max() < 1e-5
    base = DualEncoder.from_pretrained(tiny_model_path, device="cpu")
    assert abs(stored - base.encode_document(texts)).max() > 1e-3

    curve = read_json(runs.output / f"both-{record['rate']}-1.json")["curve"]
    assert set(curve) == {"1", "2", "3"}  # the last one is the end of the first stage
    second_rate = record["identity"]["second_stage_learning_rate"]
    assert second_rate == results.choose_rate("query_side")


def test_entries_that_are_added_later_are_timed_beside_contaccum(
    study, monkeypatch, folder, tiny_model_path
):
    """The machine is twice as slow as at the first timing, so the new seconds are halved."""
    entries = {
        "contaccum": {"has_bank": True, "settings": BANK},
        "later": {"settings": {"method": "grad_accum", "per_device_train_batch_size": 4}},
    }
    runs, _ = make_study(study, monkeypatch, folder, tiny_model_path, entries)
    file = write_seconds(folder, {"contaccum": {"seconds_per_update": 2.0}})
    turns = {
        "contaccum": [{"seconds": [4.0], "passes": [8]}],
        "later": [{"seconds": [5.0], "passes": [8]}],
    }

    def run_timing(names):
        return {name: turns[name] for name in names}

    monkeypatch.setattr(runs, "_run_timing", run_timing)
    runs.measure_seconds()
    seconds = read_json(file)["entries"]
    assert seconds["contaccum"]["seconds_per_update"] == 2.0
    assert seconds["later"]["seconds_per_update"] == 2.5


def test_finished_turns_of_the_timing_are_not_repeated(study, monkeypatch, folder, tiny_model_path):
    """The first of three turns is finished; the second one was timed with another bank size."""
    entries = {"contaccum": {"has_bank": True, "settings": BANK}}
    runs, _ = make_study(study, monkeypatch, folder, tiny_model_path, entries)
    schedule = study("schedule")
    first, second, third = [runs._make_timing_job("contaccum", turn) for turn in range(3)]
    earlier_second = copy.deepcopy(second)
    earlier_second["settings"]["bank_size"] = 16
    for job in (first, earlier_second):
        write_json(Path(job["folder"], "job.json"), job)
        write_json(Path(job["result"]), {"seconds": [3.0], "passes": [8]})
    timed_folders = []

    def time_updates(jobs, processes, progress, command):
        for job in jobs:
            timed_folders.append(job["folder"])
            write_json(Path(job["result"]), {"seconds": [5.0], "passes": [8]})
        return {}

    monkeypatch.setattr(schedule, "run_jobs", time_updates)
    runs.measure_seconds()
    assert timed_folders == [second["folder"], third["folder"]]
    seconds = read_json(folder / "results" / "sentences" / "seconds.json")["entries"]
    assert seconds["contaccum"]["seconds_of_updates"] == [[3.0], [5.0], [5.0]]
    assert not Path(first["folder"]).exists()
    timed_folders.clear()
    runs.measure_seconds()
    assert timed_folders == []


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


@pytest.mark.parametrize(
    ("entry", "needed"),
    [
        ({"has_bank": True, "settings": BANK, "rate_of": "contaccum"}, "contaccum"),
        ({"has_bank": True, "settings": BANK, "second_stage": "query_side"}, "query_side"),
    ],
    ids=["rate of another entry", "second stage"],
)
def test_the_rate_of_an_entry_that_is_not_run_must_be_chosen(
    study, monkeypatch, folder, tiny_model_path, entry, needed
):
    entries = {
        "contaccum": {"has_bank": True, "settings": BANK},
        "query_side": QUERY_SIDE,
        "variant": entry,
    }
    runs, jobs = make_study(study, monkeypatch, folder, tiny_model_path, entries)
    runs.entries = {"variant": runs.entries["variant"]}
    with pytest.raises(ConfigError, match=f"learning rate of {needed}, which is not chosen yet"):
        runs.run_learning_rates()
    assert jobs == []


def test_updates_fit_into_the_time_of_contaccum(study, monkeypatch, folder, tiny_model_path):
    """Four updates of contaccum take 8 s. The budget of the entry `same` is updates, not time."""
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
    write_seconds(folder, seconds)
    assert runs.count_updates("contaccum") == 4
    assert runs.count_updates("slow") == 3
    assert runs.count_updates("same") == 4


@torch.no_grad()
def encode_column(model, micro_batches, column):
    """Return the normalised embeddings of a column of texts: 0 for queries, 1 for passages."""
    embeddings = []
    for features in micro_batches:
        embeddings.append(model(dict(features[column]))["sentence_embedding"])
    return torch.nn.functional.normalize(torch.cat(embeddings), dim=-1)


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
    refresh_class = study("oracle").BankRefresh
    callbacks = trainer.callback_handler.callbacks
    (refresh,) = [callback for callback in callbacks if isinstance(callback, refresh_class)]
    trainer.train()
    bank = trainer.loss.info_nce.bank
    model = trainers.get_trained_model(trainer)
    queries = encode_column(model, refresh._micro_batches, 0)
    passages = encode_column(model, refresh._micro_batches, 1)
    assert len(queries) == 16
    assert bank.in_use == 16
    oldest = bank.total_enqueued - 16  # number of pairs that were enqueued before the bank's oldest
    slots = torch.arange(oldest, oldest + 16) % bank.num_slots
    assert torch.allclose(bank.queries[slots], queries, atol=1e-5)
    assert torch.allclose(bank.passages[slots], passages, atol=1e-5)
    logits = queries @ passages.T / SETTINGS["temperature"]
    is_positive = torch.eye(16, dtype=torch.bool)
    log_sums = logits.masked_fill(is_positive, -torch.inf).logsumexp(1)  # over the negatives
    assert torch.allclose(bank.total_log_sums[slots], log_sums, atol=1e-3)


@pytest.mark.parametrize("has_guide", [False, True])
def test_the_recipe_of_sentence_transformers_trains(study, tiny_model_path, tmp_path, has_guide):
    rows = []
    for i in range(16):
        rows.append(
            {"query": f"cat {i}", "positive": f"the cat {i}", "negatives": [f"the dog {i}"]}
        )
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
    assert len(losses) == 2
    assert min(losses) > 0


@pytest.mark.long
def test_another_file_of_mined_negatives_is_recorded_and_does_not_make_a_run_another(
    study, monkeypatch, folder, tiny_model_path
):
    """The file of another machine has other digits in its scores."""
    entries = {
        "contaccum": {"has_bank": True, "settings": BANK},
        "mined": {"has_bank": True, "has_mined_negatives": True, "settings": BANK},
    }
    monkeypatch.setattr(study("mining"), "MINING_RULES", ("--num_negatives", "1"))
    runs, _ = make_study(study, monkeypatch, folder, tiny_model_path, entries)
    cell = study("schedule").Cell("mined", "1e-4", 0)
    write_seconds(folder, {name: {"seconds_per_update": 2.0} for name in entries})
    job = runs._make_job(cell)
    [file] = runs.work.glob("mined-*.jsonl")
    text = file.read_text()
    assert '"negative_scores": [0.' in text
    file.write_text(text.replace('"negative_scores": [0.', '"negative_scores": [0.0'))
    later_job = runs._make_job(cell)
    assert later_job["identity"] == job["identity"]
    assert later_job["mined_negatives"] != job["mined_negatives"]
    assert runs._make_job(cell._replace(entry="contaccum"))["mined_negatives"] is None


@pytest.mark.long
def test_mined_negatives_are_no_document_of_held_out_queries(
    study, monkeypatch, folder, tiny_model_path
):
    entries = {"contaccum": {"has_bank": True, "settings": BANK}}
    runs, _ = make_study(study, monkeypatch, folder, tiny_model_path, entries)
    corpus = read_lines(folder / "sentences" / "corpus.jsonl")
    # The document of query i is number i; 0 to 5 are dev queries, 24 to 31 test queries.
    held_out = {document["text"] for document in corpus[:6] + corpus[24:32]}
    # The scores of a random model are too similar for a margin.
    monkeypatch.setattr(study("mining"), "MINING_RULES", ("--num_negatives", "1"))
    records = list(read_records(runs._mine_negatives()))
    assert len(held_out) == 14
    for record in records:
        assert record.negatives
        assert held_out.isdisjoint(record.negatives)


def write_runs(output, entry, test_scores):
    """Write the results of two runs of an entry, which have the same test scores per query."""
    for seed in (0, 1):
        record = {
            "entry": entry,
            "rate": "1e-4",
            "updates": 4,
            "encoder_passes": 1_000 + 20 * seed,
            "scores": {"dev": 0.5, "test": sum(test_scores) / len(test_scores)},
            "query_scores": {"dev": [0.5], "test": test_scores},
            "curve": {},
        }
        if seed == 1:
            record["curve"] = {"2": {"dev": 0.4, "test": 0.6}}
        write_json(output / f"{entry}-1e-4-{seed}.json", record)


def write_base(output):
    """Write the scores of the base model and of BM25. Two of four queries have known documents."""
    record = {
        "scores": {"dev": 0.3, "test": 0.4},
        "bm25": {"dev": 0.2, "test": 0.25},
        "query_scores": {"test": [0.1, 0.2, 0.6, 0.7]},
        "query_groups": {"test": [0, 0, 1, 1]},
        "has_known_document": {"test": [True, True, False, False]},
    }
    write_json(output / "base.json", record)


def run_report(monkeypatch, *options):
    """Run the program that writes the report; the fixture `study` makes it importable."""
    monkeypatch.setattr("sys.argv", ["report", *map(str, options)])
    importlib.import_module("by_time_report").main()


def read_rows(text):
    """Return the cells of each line of the tables in a Markdown text."""
    rows = []
    for line in text.splitlines():
        if line.startswith("|"):
            cells = line.split("|")[1:-1]  # the line ends with | too
            rows.append([cell.strip() for cell in cells])
    return rows


def find_row(page, table, first_cell):
    """Return the only row of a table of the page that starts with a cell."""
    _, _, text = page.partition(f"<!-- table: {table} -->\n")
    text, _, _ = text.partition("<!-- end of table -->")
    (row,) = [row for row in read_rows(text) if row[0] == first_cell]
    return row


def test_the_report_shows_finished_runs_and_names_missing_ones(study, tmp_path, monkeypatch):
    """Two entries have known scores; two others have no runs, or none of their second stage."""
    entries = {
        "contaccum": {"settings": {}, "compared_with": ["grad_cache"]},
        "grad_cache": {"settings": {}, "timed_settings": {"method": "grad_cache"}},
        "later": {"settings": {}, "compared_with": ["grad_cache"]},
        "two_stages": {"settings": {}, "second_stage": "later"},
    }
    plan_file = write_plan(tmp_path / "plan.yaml", entries)
    results = tmp_path / "results"
    write_runs(results / "sentences", "contaccum", [0.8, 0.9, 0.7, 0.8])
    write_runs(results / "sentences", "grad_cache", [0.7, 0.8, 0.6, 0.7])
    write_runs(results / "sentences", "two_stages", [0.5, 0.5, 0.5, 0.5])
    write_base(results / "sentences")
    timing = {"seconds_per_update": 30.0, "passes_per_update": 256.0}
    write_seconds(tmp_path, {"contaccum": timing, "grad_cache": timing})
    page_file = tmp_path / "page.md"
    tables = ("comparisons", "sentences", "sentences, learning rates", "sentences, known documents")
    for file, names in (
        (results / "README.md", tables),
        (page_file, ("scores", "differences")),
    ):
        places = [f"<!-- table: {name} -->\n<!-- end of table -->\n" for name in names]
        file.write_text("".join(places))
    run_report(monkeypatch, "--plan", plan_file, "--results", results, "--page", page_file)

    page = page_file.read_text()
    assert find_row(page, "scores", "`contaccum`")[1] == "80.0 (0.0), 2.0 min"
    assert find_row(page, "scores", "`grad_cache`")[1] == "70.0 (0.0), 2.0 min"
    assert find_row(page, "scores", "BM25")[1] == "25.0"
    (difference,) = find_row(page, "differences", "`contaccum` - `grad_cache`")[1:]
    assert difference == "+10.0 (-100.0 to +100.0)"  # without a star
    page = (results / "README.md").read_text()
    _, *cells = find_row(page, "sentences", "`contaccum`")
    assert cells == ["1e-4", "4", "2.0", "1,010", "2", "50.0 (0.0)", "80.0 (0.0)"]
    # Trained as one batch, and charged with what was measured: 4 updates of 256 texts.
    assert find_row(page, "sentences", "`grad_cache`")[4] == "1,024"
    # The runs of its second stage are missing.
    assert find_row(page, "sentences", "`two_stages`")[1] == "not yet run"
    _, score_of_known, score_of_others, change = find_row(
        page, "sentences, known documents", "`contaccum`"
    )
    assert score_of_known == "85.0"
    assert score_of_others == "75.0"
    assert change.startswith("+10.0 (")  # from the 65.0 of the base model
    _, pair, difference, interval, _ = find_row(page, "comparisons", "sentences")
    assert pair == "`contaccum` - `grad_cache`"
    assert difference == "+10.0"
    assert interval == "-100.0 to +100.0"  # two groups show nothing
    assert find_row(page, "sentences", "`later`")[1] == "not yet run"
    assert find_row(page, "sentences, learning rates", "`later`")[1] == "not yet run"
    (test,) = read_json(results / "tests.json")["tests"]
    assert test["p_holm"] == test["p_value"]


@pytest.mark.long  # the tests of all runs take seconds
def test_the_pages_are_those_of_the_finished_runs(study, tmp_path, monkeypatch):
    """The tables of the page and of all runs are those that the report program writes."""
    page = tmp_path / "page.md"
    shutil.copy(ROOT / "docs" / "time_study.md", page)
    results = tmp_path / "results"
    shutil.copytree(ROOT / "benchmarks" / "by_time", results)
    run_report(monkeypatch, "--results", results, "--page", page)
    assert page.read_text() == (ROOT / "docs" / "time_study.md").read_text()
    table = (ROOT / "benchmarks" / "by_time" / "README.md").read_text()
    assert (results / "README.md").read_text() == table


def test_the_page_of_the_bank_is_that_of_its_reports(study, tmp_path, monkeypatch):
    text = (ROOT / "docs" / "study.md").read_text()
    page = tmp_path / "page.md"
    changed = text
    for cell in ("| 78.7 ", "| 41.2 (0.4), 1.1e-3", "| +5.4 ("):
        assert cell in text
        changed = changed.replace(cell, "| 0.0 ")
    page.write_text(changed)
    monkeypatch.setattr("sys.argv", ["report", "--page", str(page)])
    importlib.import_module("bank_report").main()
    assert page.read_text() == text
