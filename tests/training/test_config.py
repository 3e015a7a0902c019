"""Parsing of YAML configs and the command line, and early errors for mistakes."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from contaccum.data import parse_columns, read_records
from contaccum.errors import ConfigError
from contaccum.training.config import load_model, parse
from contaccum.training.options import ModelArguments

CONFIGS = Path(__file__).parents[2] / "configs"
PLACES = {"model": "m", "output_dir": "o", "train_data": "d"}


def write_config(folder: Path, text: str = "", **keys: Any) -> str:
    """Write a config with the given text, or with PLACES and the given keys; return its path."""
    path = folder / "c.yaml"
    path.write_text(text or yaml.safe_dump({**PLACES, **keys}))
    return str(path)


def test_later_files_and_the_command_line_override(tmp_path):
    first = write_config(tmp_path, bank_size=64, learning_rate=3.0e-5, normalize=True)
    (tmp_path / "d.yaml").write_text("bank_size: 32\nmethod: pre_batch\n")
    model, data, args = parse(
        [first, str(tmp_path / "d.yaml"), "--learning_rate", "1e-4", "--tied=false"]
    )
    assert (args.bank_size, args.method, args.learning_rate) == (32, "pre_batch", 1e-4)
    assert (model.normalize, model.tied, data.train_data) == (True, False, ["d"])


@pytest.mark.parametrize(
    ("text", "arguments", "named"),
    [
        ("bank_sise: 3", [], "did you mean 'bank_size'"),
        ("", ["--bank_sise=3"], "did you mean 'bank_size'"),
        ("", ["--seed", "1", "more.yaml"], "more"),
        ("model: [", [], r"c\.yaml:1: not valid YAML"),
        ("- a", [], "`key: value`"),
        ("model: m", [], "train_data is not set"),
        ("pooling: max", [], "--pooling"),
        ("data_columns: {qurey: a}", [], "did you mean 'query'"),
        ("per_device_train_batch_size: 8.5", [], "a whole number or auto"),
        ("save_strategy: epoch\nload_best_model_at_end: true", [], "load_best_model_at_end"),
    ],
)
def test_a_mistake_in_a_config_or_option_is_refused(text, arguments, named, tmp_path):
    places = [f"--{key}={value}" for key, value in PLACES.items()] if "model" not in text else []
    with pytest.raises(ConfigError, match=named):
        parse([write_config(tmp_path, text or yaml.safe_dump(PLACES)), *places, *arguments])


def test_a_config_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"nothing\.yaml"):
        parse([str(tmp_path / "nothing.yaml")])


EVALUATED = {"eval_data": "e", "eval_strategy": "steps", "eval_steps": 2}
QUERY_SIDE = {"method": "query_side", "passage_store": "s"}


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"guide_margin": 0.1}, "without guide"),
        ({"lora_alpha": 8}, "without lora_r"),
        ({"eval_strategy": "steps", "eval_steps": 2}, "eval_data=None"),
        ({"eval_data": "e"}, "eval_strategy=no"),
        ({**EVALUATED, "metric_for_best_model": "ndgc@10"}, "ndgc@10"),
        ({**QUERY_SIDE, "guide": "g"}, "guide=g"),
        ({**QUERY_SIDE, "num_hard_negatives": 2}, "num_hard_negatives=2"),
        ({"lora_r": 2, "merge_adapter": True, "push_to_hub": True}, "push_to_hub"),
        ({"lora_r": 2, "merge_adapter": True, "output_dir": "m"}, "output_dir"),
    ],
)
def test_settings_that_cannot_be_combined_are_refused(keys, named, tmp_path):
    with pytest.raises(ConfigError, match=named):
        parse([write_config(tmp_path, **keys)])


def test_a_strategy_may_be_the_unquoted_word_no(tmp_path):
    """YAML reads this word as false."""
    lines = [f"{key}: {value}" for key, value in PLACES.items()]
    lines += ["save_strategy: no", "eval_strategy: no", "normalize: no"]
    model, _, args = parse([write_config(tmp_path, "\n".join(lines))])
    assert args.save_strategy == args.eval_strategy == "no"
    assert model.normalize is False


def test_settings_of_a_backbone_without_effect_give_a_warning(tiny_model_path, caplog):
    load_model(ModelArguments(model=tiny_model_path), "cpu")
    assert "has no effect" not in caplog.text
    load_model(ModelArguments(model=tiny_model_path, pooling="cls", normalize=True), "cpu")
    for setting in ("pooling=cls", "normalize=True"):
        warning = f"{setting} has no effect: {tiny_model_path} is a SentenceTransformer"
        assert warning in caplog.text


def test_data_columns_are_a_mapping_in_yaml_and_words_on_the_command_line(tmp_path):
    columns = {"query": "question", "negatives": "hard"}
    words = ["--data_columns", "query=b", "title=c d"]
    for arguments, expected in (([], columns), (words, {"query": "b", "title": "c d"})):
        _, data, _ = parse([write_config(tmp_path, data_columns=columns), *arguments])
        assert parse_columns(data.data_columns) == expected


def test_sets_prompts_and_metrics_become_arguments_of_the_trainer(tmp_path):
    prompts = {"a": {"query": "cat: "}, "n": {"query": "dog: "}}
    settings = {
        "train_data": ["a", {"path": "x/b", "name": "n"}],
        **EVALUATED,
        "metric_for_best_model": "NDCG@10",
        "multi_dataset_batch_sampler": "round_robin",
        "prompts": prompts,
        "early_stopping_patience": 3,
    }
    _, data, args = parse([write_config(tmp_path, **settings)])
    assert args.multi_dataset_batch_sampler == "round_robin"
    assert args.prompts == prompts and list(data.sets) == [*prompts]
    assert args.metric_for_best_model == "eval_ndcg@10" and args.greater_is_better


def test_auto_can_be_given_on_the_command_line(tmp_path):
    options = [write_config(tmp_path), "--total_train_batch_size=64"]
    assert parse([*options, "--per_device_train_batch_size=auto"])[2].has_auto_micro_batch
    args = parse([*options, "--per_device_train_batch_size", "16"])[2]
    assert not args.has_auto_micro_batch and args.gradient_accumulation_steps == 4


SHIPPED = sorted(str(path.relative_to(CONFIGS)) for path in CONFIGS.rglob("*.yaml"))


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_configs_parse(name):
    assert parse([str(CONFIGS / name)])[2].total_train_batch_size == 128


def test_the_papers_config_has_the_settings_of_the_paper():
    model, data, args = parse([str(CONFIGS / "paper.yaml")])
    assert args.method == "contaccum"
    assert args.pairs_per_micro_batch == 8
    assert args.bank_size == 2048
    assert args.num_train_epochs == 40
    assert args.warmup_steps == 1237
    assert args.learning_rate == 2e-5
    assert args.adam_epsilon == 1e-8
    assert args.weight_decay == 0.0
    assert args.max_grad_norm == 2.0
    assert args.similarity == "dot"
    assert args.temperature == 1.0
    assert args.drift_compensation == "none"
    assert args.normalize_by == "all"
    assert args.mask_duplicates is False
    assert model.tied is False
    assert model.pooling == "cls"
    assert data.num_hard_negatives == 1


def test_a_home_folder_is_expanded_in_models_and_data(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "pairs.jsonl").write_text('{"query": "q", "positive": "p"}')
    model_args, data_args, _ = parse(
        ["--model=~/m", "--guide=~/g", "--train_data=~/pairs.jsonl", "--output_dir=o"]
    )
    assert (model_args.model, model_args.guide) == (f"{tmp_path}/m", f"{tmp_path}/g")
    assert len(list(read_records(data_args.train_data[0]))) == 1
