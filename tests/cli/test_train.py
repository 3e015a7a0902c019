"""`contaccum train`: output, resuming, refused settings, examples of the docs, torchrun."""

import json
import re
from pathlib import Path

import pytest
import yaml
from programs import run_torchrun
from sample_texts import sentences
from small_data import read_lines, write_lines, write_pairs

DOCS = Path(__file__).parents[2] / "docs"


def read_updates(folder: Path) -> list[int]:
    """Return the number of the update in each line of the training log of a run."""
    return [line["update"] for line in read_lines(folder / "train_log.jsonl")]


def test_run_writes_a_model_and_resumes_from_a_checkpoint(places, train, tmp_path, capsys):
    output = tmp_path / "out"
    assert train(output, tied="false", save_strategy="epoch") == 0
    assert f"saved {output}; score it with: contaccum evaluate {output}" in capsys.readouterr().out
    for name in ("modules.json", "identity.json", "train_log.jsonl"):
        assert (output / name).exists(), name
    assert not list(output.rglob("training_args.bin"))
    assert train(output) == 2
    assert f"{output}: the folder contains a finished run" in capsys.readouterr().err
    assert train(output, tied="false", num_train_epochs=2, resume_from_checkpoint="last") == 0
    assert read_updates(output) == [1, 2, 3, 4, 5, 6]


def test_overwrite_output_dir_is_needed_to_replace_a_run(places, train, tmp_path, capsys):
    output = tmp_path / "out"
    saves = {"save_strategy": "steps", "save_steps": 1}
    assert train(output, **saves, max_steps=2) == 0
    # Without this file, the run looks like one that was killed after update 2.
    (output / "result.json").unlink()
    assert train(output, **saves) == 2
    error = capsys.readouterr().err
    assert f"{output}: the folder contains an unfinished run" in error
    assert "resume_from_checkpoint=last" in error
    assert "overwrite_output_dir=true" in error
    assert train(output, model=output / "checkpoint-2", overwrite_output_dir="true") == 2
    assert "the run would remove that checkpoint" in capsys.readouterr().err
    # The refused calls have removed nothing.
    checkpoints = sorted(output.glob("checkpoint-*"))
    assert checkpoints == [output / "checkpoint-1", output / "checkpoint-2"]
    # With "auto", the run in the folder is resumed and not replaced.
    resume = {"resume_from_checkpoint": "auto", "overwrite_output_dir": "true"}
    assert train(output, **saves, **resume) == 0
    assert read_updates(output) == [1, 2, 3]


def test_evaluation_during_training_is_logged_and_recorded(places, train, tmp_path, capsys):
    evaluation = {
        "eval_data": places / "beir",
        "eval_split": "test",
        "eval_strategy": "steps",
        "eval_steps": 2,
        "eval_corpus_size": 6,
        "early_stopping_patience": 5,
        "metric_for_best_model": "Recall@1",
    }
    assert train(tmp_path / "run", save_strategy="best", **evaluation) == 0
    lines = read_lines(tmp_path / "run" / "eval_log.jsonl")
    assert [line["update"] for line in lines] == [2, 3]  # every two updates and at the end
    assert 0 <= lines[0]["eval_recall@1"] <= 1
    record = json.loads((tmp_path / "run" / "identity.json").read_text())["evaluation"]
    assert record["documents"] == 6
    assert record["of_documents"] == 8
    evaluation["eval_split"] = "dev"
    assert train(tmp_path / "no", **evaluation) == 2
    assert "dev" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"output_dir": "{places}/pairs.jsonl"}, "cannot be written"),
        (
            # A folder without a model: the data are read before the model is loaded.
            {"num_hard_negatives": 1, "model": "{places}"},
            "pairs.jsonl: no record has a negative",
        ),
    ],
)
def test_wrong_settings_are_refused_in_one_line(places, train, keys, message, tmp_path, capsys):
    settings = {key: str(value).format(places=places) for key, value in keys.items()}
    assert train(tmp_path / "o", **settings) == 2
    lines = capsys.readouterr().err.splitlines()
    [error] = [line for line in lines if line.startswith("contaccum: error")]
    assert message in error


def test_bad_record_stops_before_a_model_is_loaded(places, train, tmp_path, capsys):
    """With on_bad_record=skip, the record is counted and left out."""
    data = tmp_path / "pairs.jsonl"
    data.write_text((places / "pairs.jsonl").read_text() + '{"query": "no positive"}\n')
    # The folder of the model has no model, so loading it would give another error.
    assert train(tmp_path / "out", train_data=data, model=tmp_path) == 2
    error = capsys.readouterr().err
    assert "pairs.jsonl:25" in error
    assert "--on_bad_record skip" in error
    assert train(tmp_path / "out", train_data=data, on_bad_record="skip", max_steps=1) == 0
    assert "1 left out" in capsys.readouterr().out


def test_docs_example_of_several_sets_trains(places, train, tmp_path, monkeypatch, capsys):
    page = (DOCS / "data.md").read_text()
    (section,) = re.findall(r"^## Several sets\n(.*?)^## ", page, re.MULTILINE | re.DOTALL)
    first_example = re.findall(r"```yaml\n(.*?)```", section, re.DOTALL)[0]
    (tmp_path / "example.yaml").write_text(first_example)
    queries, passages = sentences(20, 1), sentences(60, 2, 9)
    write_pairs(tmp_path / "pairs.jsonl", queries, passages[:20])
    mined = [
        {"query": query, "positive": passages[i], "negatives": passages[20 + 2 * i : 22 + 2 * i]}
        for i, query in enumerate(queries)
    ]
    write_lines(tmp_path / "hard.jsonl", mined)
    faq = zip(queries, reversed(passages), strict=False)
    lines = ["frage,antwort", *(f"{question},{answer}" for question, answer in faq)]
    (tmp_path / "faq.csv").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    exit_code = train(tmp_path / "out", "example.yaml", train_data=None, max_steps=2)
    assert exit_code == 0, capsys.readouterr().err
    data = json.loads(Path("out/identity.json").read_text())["data"]
    num_rows = {name: data_set["rows"] for name, data_set in data["sets"].items()}
    assert num_rows == {"pairs": 20, "faq": 20, "mined": 20}


@pytest.mark.long
def test_torchrun_reads_data_once_and_prints_on_rank_0_only(places, train, tmp_path):
    """The command is that of docs/scaling.md for one host."""
    page = (DOCS / "scaling.md").read_text()
    (options,) = re.findall(
        r"^    torchrun (.*--nproc_per_node.*) CONFIG.yaml$", page, re.MULTILINE
    )
    config = {
        "model": str(places / "backbone"),
        "train_data": str(places / "pairs.jsonl"),
        "output_dir": str(tmp_path / "run"),
        "per_device_train_batch_size": 4,
        "bank_size": 16,
        "use_cpu": True,
        "num_train_epochs": 1,
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    options_of_two_processes = options.replace("node 8", "node 2").split()
    done = run_torchrun(*options_of_two_processes, tmp_path / "config.yaml")
    assert done.returncode == 0, done.stderr[-3000:]
    for text in ("saved ", "24 "):  # the number of pairs is printed when the data are read
        lines = [line for line in done.stdout.splitlines() if text in line]
        assert len(lines) == 1, text
    assert read_updates(tmp_path / "run") == [1, 2, 3]
