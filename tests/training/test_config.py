"""From settings to training sets, arguments of the trainer and a model."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from contaccum.data import parse_columns, parse_training_sets, read_records
from contaccum.errors import ConfigError
from contaccum.settings import Settings, read, replace
from contaccum.training.arguments import ContAccumTrainingArguments
from contaccum.training.setup import load_model

CONFIGS = Path(__file__).parents[2] / "configs"
PLACES = {"model": "m", "output_dir": "o", "train_data": ["d"]}
EVALUATED = {"eval_data": "e", "eval_strategy": "steps", "eval_steps": 2}


def make_settings(*argv: str, **given: Any) -> Settings:
    """Return the settings of YAML files, options and keywords, for a model and data at PLACES."""
    return replace(Settings(), **{**PLACES, **read(argv), **given})


def make_arguments(*argv: str, **given: Any) -> ContAccumTrainingArguments:
    return ContAccumTrainingArguments.from_settings(make_settings(*argv, **given))


def test_a_metric_that_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match="ndgc@10"):
        make_arguments(**EVALUATED, metric_for_best_model="ndgc@10")


@pytest.mark.parametrize("name", ["log_level", "hub_strategy", "optim", "lr_scheduler_type"])
def test_a_choice_that_transformers_does_not_have_is_refused(name):
    with pytest.raises(ConfigError, match="loud"):
        make_arguments(f"--{name}=loud")


def test_settings_of_a_backbone_without_effect_give_a_warning(tiny_model_path, caplog):
    load_model(Settings(model=tiny_model_path), "cpu")
    assert "has no effect" not in caplog.text
    load_model(Settings(model=tiny_model_path, pooling="cls", normalize=True), "cpu")
    for setting in ("pooling=cls", "normalize=True"):
        warning = f"{setting} has no effect: {tiny_model_path} is a SentenceTransformer"
        assert warning in caplog.text


def test_data_columns_are_a_mapping_in_yaml_and_words_on_the_command_line(tmp_path):
    config = tmp_path / "c.yaml"
    config.write_text("data_columns: {query: question, negatives: hard}")
    words = ["--data_columns", "query=b", "title=c d"]
    by_yaml = parse_columns(make_settings(str(config)).data_columns)
    by_words = parse_columns(make_settings(str(config), *words).data_columns)
    assert by_yaml == {"query": "question", "negatives": "hard"}
    assert by_words == {"query": "b", "title": "c d"}
    with pytest.raises(ConfigError, match="did you mean 'query'"):
        parse_columns(["qurey=a"])


def test_sets_prompts_and_metrics_become_arguments_of_the_trainer(tmp_path):
    prompts = {"a": {"query": "cat: "}, "n": {"query": "dog: "}}
    content = {
        "train_data": ["a", {"path": "x/b", "name": "n"}],
        **EVALUATED,
        "metric_for_best_model": "NDCG@10",
        "multi_dataset_batch_sampler": "round_robin",
        "prompts": prompts,
        "early_stopping_patience": 3,
    }
    config = tmp_path / "c.yaml"
    config.write_text(yaml.safe_dump(content))
    args = make_arguments(str(config))
    assert args.multi_dataset_batch_sampler == "round_robin"
    assert args.prompts == prompts
    assert list(parse_training_sets(make_settings(str(config)).train_data, {})) == [*prompts]
    assert args.metric_for_best_model == "eval_ndcg@10" and args.greater_is_better


SHIPPED = sorted(str(path.relative_to(CONFIGS)) for path in CONFIGS.rglob("*.yaml"))


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_configs_are_arguments(name):
    assert make_arguments(str(CONFIGS / name)).total_train_batch_size == 128


def test_a_home_folder_is_expanded_in_models_and_data(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "pairs.jsonl").write_text('{"query": "q", "positive": "p"}')
    settings = make_settings("--model=~/m", "--train_data=~/pairs.jsonl")
    assert settings.model == f"{tmp_path}/m"
    assert len(list(read_records(settings.train_data[0]))) == 1
