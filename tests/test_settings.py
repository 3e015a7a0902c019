"""Settings: each is declared once, values are typed, and what cannot work is refused by name."""

import inspect
from argparse import ArgumentTypeError
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from sentence_transformers import SentenceTransformerTrainingArguments
from transformers import HfArgumentParser

from contaccum import BankedInfoNCE, CachedContAccumLoss, ContAccumLoss
from contaccum.errors import ConfigError
from contaccum.settings import (
    InfoNCESettings,
    Settings,
    TrainerSettings,
    for_method,
    get_default,
    get_types_of_transformers,
    read,
    replace,
    require_complete,
    to_dict,
    to_yaml,
)

CONFIGS = Path(__file__).parents[1] / "configs"
AUTO = {"per_device_train_batch_size": "auto"}
EVALUATE = {"eval_strategy": "steps", "eval_steps": 2}
QUERY_SIDE = {"method": "query_side", "passage_store": "store"}
ZERO = {"deepspeed": "zero.json"}


def make(**given: Any) -> Settings:
    return replace(Settings(), **given)


def test_the_defaults_of_transformers_are_kept():
    theirs = SentenceTransformerTrainingArguments.__dataclass_fields__
    for setting in fields(TrainerSettings):
        if setting.name != "output_dir":
            assert get_default(setting) == theirs[setting.name].default, setting.name


def test_the_arguments_of_transformers_are_read_from_its_source_with_their_types():
    theirs = SentenceTransformerTrainingArguments.__dataclass_fields__.keys()
    own = Settings.__dataclass_fields__.keys()
    assert get_types_of_transformers().keys() == theirs - own
    parser = HfArgumentParser(SentenceTransformerTrainingArguments)
    compared = set()
    for action in parser._actions:
        # Texts of these types cannot be parsed by HfArgumentParser, or are a list there.
        of_other_type = action.dest in ("liger_kernel_config", "parallelism_config", "debug")
        if action.type is None or action.dest in own or action.choices or of_other_type:
            continue
        for text in ("7", "0.5", "true", "words"):
            try:
                expected = [action.type(text)] if action.nargs == "+" else action.type(text)
            except (ValueError, ArgumentTypeError):
                with pytest.raises(ConfigError, match=action.dest):
                    read([f"--{action.dest}={text}"])
            else:
                [value] = read([f"--{action.dest}={text}"]).values()
                assert (value, type(value)) == (expected, type(expected)), action.dest
                compared.add(type(value))
    assert compared == {bool, int, float, str, list}


def write_config(folder: Path, name: str = "c.yaml", text: str = "", **keys: Any) -> str:
    path = folder / name
    path.write_text(text or yaml.safe_dump(keys, sort_keys=False))
    return str(path)


def test_files_and_the_command_line_give_the_same_typed_values(tmp_path):
    """Later files override earlier ones, and the command line overrides all files."""
    config = write_config(
        tmp_path,
        learning_rate="1e-4",
        bank_size=64,
        normalize=True,
        train_data=["a", {"path": "b", "num_hard_negatives": 2}],
        data_columns={"query": "question"},
        max_steps=-1,
        save_strategy=False,
        lora_r=None,
    )
    later = write_config(tmp_path, "d.yaml", bank_size=32, weight_decay=0.1)
    given = read([config, later, "--tied=false", "--bf16", "--matryoshka_dims", "64", "32"])
    assert given == {
        "learning_rate": 1e-4,
        "bank_size": 32,
        "normalize": True,
        "train_data": ["a", '{"path": "b", "num_hard_negatives": 2}'],
        "data_columns": ['{"query": "question"}'],
        "max_steps": -1,
        "save_strategy": "no",
        "weight_decay": 0.1,
        "tied": False,
        "bf16": True,
        "matryoshka_dims": [64, 32],
    }
    settings = make(**given)
    assert settings.transformers == {"weight_decay": 0.1}
    assert read(["--per_device_train_batch_size=AUTO"]) == AUTO


@pytest.mark.parametrize("path", sorted(CONFIGS.rglob("*.yaml")), ids=lambda path: path.name)
def test_settings_written_as_yaml_are_read_as_the_same_settings(path, tmp_path):
    settings = make(**read([str(path)]))
    copy = make(**read([write_config(tmp_path, text=to_yaml(settings))]))
    assert copy == settings == make(**to_dict(settings))


def test_only_the_command_line_can_allow_remote_code(tmp_path):
    config = write_config(tmp_path, model="m", trust_remote_code=True)
    with pytest.raises(ConfigError, match=r"c\.yaml: .*add --trust_remote_code"):
        read([config])
    assert read([config, "--trust_remote_code"])["trust_remote_code"]
    assert not read([config, "--trust_remote_code=false"])["trust_remote_code"]
    config = write_config(tmp_path, train_data=["d", "--trust_remote_code"])
    assert read([config]) == {"train_data": ["d", "--trust_remote_code"]}
    # A config that is written says that it needs the flag.
    text = to_yaml(make(model="m", trust_remote_code=True))
    assert text.startswith("#") and "--trust_remote_code" in text
    assert read([write_config(tmp_path, text=text)]) == {"model": "m"}


@pytest.mark.parametrize(
    ("text", "arguments", "named"),
    [
        ("bank_sise: 3", [], "did you mean 'bank_size'"),
        ("seed: 1", ["--bank_sise=3"], "did you mean 'bank_size'"),
        ("seed: 1", ["--seed", "1", "more.yaml"], "more"),
        ("model: [", [], r'c\.yaml", line 1'),
        ("- a", [], "`key: value`"),
        ("pooling: max", [], "pooling must be one of"),
        ("bank_size: many", [], r"c\.yaml: bank_size cannot be 'many'"),
        ("per_device_train_batch_size: 8.5", [], "cannot be 8.5"),
        ("bf16: 2", [], "must be true or false"),
        ("weight_decay: much", [], "weight_decay cannot be 'much'"),
    ],
)
def test_text_that_cannot_be_read_is_refused(text, arguments, named, tmp_path):
    with pytest.raises(ConfigError, match=named):
        make(**read([write_config(tmp_path, text=text), *arguments]))
    with pytest.raises(ConfigError, match=r"nothing\.yaml"):
        read([str(tmp_path / "nothing.yaml")])


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"method": "gradcache"}, "did you mean 'grad_cache'"),
        ({"bank_size": -1}, "bank_size=-1: it must be at least 0"),
        ({"bank_size": 4, "query_bank_size": 2}, "query_bank_size"),
        ({"temperature": 0.0}, "temperature=0.0: it must be above 0"),
        ({"temperature": float("inf")}, "temperature"),
        ({"method": "grad_accum", "bank_size": 128}, "bank_size=128.*contaccum, contaccum_cached"),
        ({"method": "in_batch", "gradient_accumulation_steps": 4}, "gradient_accumulation_steps"),
        ({"method": "query_side"}, "passage_store"),
        ({**QUERY_SIDE, "corpus": "b"}, "one of them"),
        ({**QUERY_SIDE, "num_hard_negatives": 2}, "num_hard_negatives=2"),
        ({**QUERY_SIDE, "method": "contaccum"}, "passage_store=store"),
        ({**QUERY_SIDE, "fsdp": True}, "fsdp"),
        ({"towers": "one", **QUERY_SIDE}, "towers=one"),
        ({"towers": "one", "tied": False}, "towers=one"),
        ({"lora_alpha": 8}, "without lora_r"),
        ({**ZERO, "method": "grad_cache"}, "method=grad_cache"),
        ({**ZERO, "fp16": True}, "fp16=true"),
        ({"fsdp": True, **AUTO, "total_train_batch_size": 12}, "fsdp"),
        (AUTO, "total_train_batch_size"),
        ({"early_stopping_patience": 2}, "eval_strategy=no"),
        ({"num_train_epochs": 0}, "num_train_epochs=0: it must be above 0"),
        ({"bank_sise": 3}, "did you mean 'bank_size'"),
        ({"weight_deca": 0.1}, "did you mean 'weight_decay'"),
    ],
)
def test_settings_that_cannot_work_are_refused(given, named):
    with pytest.raises(ConfigError, match=named):
        make(**given)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"train_data": []}, "train_data is not set"),
        (EVALUATE, "eval_data=None"),
        ({"eval_data": "e"}, "eval_strategy=no"),
    ],
)
def test_a_training_from_the_command_line_needs_complete_settings(given, named):
    complete = make(model="m", train_data=["d"], output_dir="o")
    require_complete(complete)
    require_complete(replace(complete, eval_data="e", **EVALUATE))
    with pytest.raises(ConfigError, match=named):
        require_complete(replace(complete, **given))


def test_settings_for_another_method_lose_what_it_does_not_use():
    settings = make(bank_size=64, normalize_by="all", seed=1)
    assert to_dict(for_method(settings, "grad_accum")) == {"method": "grad_accum", "seed": 1}
    query_side = for_method(settings, "query_side", passage_store="s")
    assert to_dict(query_side) == {"method": "query_side", "passage_store": "s", "seed": 1}
    assert for_method(query_side, "contaccum") == make(seed=1)


def test_a_loss_holds_the_settings_that_it_was_made_with():
    settings = InfoNCESettings(bank_size=8, temperature=0.05, normalize_by="all")
    assert BankedInfoNCE.from_settings(settings).settings == settings
    assert BankedInfoNCE(8, None, 0.05, normalize_by="all").settings == settings
    assert BankedInfoNCE(bank_size=np.int64(8)).settings.bank_size == 8
    with pytest.raises(TypeError, match="unexpected keyword argument 'bank_sise'"):
        BankedInfoNCE(bank_sise=8)
    with pytest.raises(ConfigError, match="similarity must be one of cos, dot"):
        BankedInfoNCE(similarity="euclidean")  # type: ignore[arg-type]  # it is refused


def test_the_arguments_of_a_loss_are_its_settings_with_their_defaults():
    parameters = inspect.signature(BankedInfoNCE).parameters
    assert list(parameters)[:5] == [
        "bank_size",
        "query_bank_size",
        "temperature",
        "similarity",
        "normalize_by",
    ]
    assert {name: parameter.default for name, parameter in parameters.items()} == asdict(
        BankedInfoNCE().settings
    )
    assert parameters["bank_size"].default == 1024
    shared = parameters.keys() - {"temperature", "similarity"}  # scale and similarity_fct there
    for loss_class in (ContAccumLoss, CachedContAccumLoss):
        own = inspect.signature(loss_class).parameters
        assert {own[name].default == parameters[name].default for name in shared} == {True}
    names = list(inspect.signature(CachedContAccumLoss).parameters)
    assert names[:5] == ["model", "bank_size", "scale", "similarity_fct", "mini_batch_size"]
