"""Untrusted models cannot run code: each planted payload is refused and does not run."""

import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Router
from tiny_models import bert_config, tiny_encoder
from transformers import AutoModel, BertForSequenceClassification

from contaccum import DualEncoder
from contaccum.encoders.loading import loading
from contaccum.errors import UserError


class Payload:
    """An object that makes the folder ``mark`` when it is unpickled.

    An attacker's code could do anything. Making a folder is harmless, and tests can see it.
    """

    def __init__(self, mark: Path) -> None:
        self.mark = str(mark)

    def __reduce__(self) -> Any:
        return os.makedirs, (self.mark,)


@pytest.fixture
def mark(tmp_path) -> Path:
    """Return the folder that exists only if a payload ran."""
    return tmp_path / "it_ran"


@pytest.fixture(scope="module")
def harmless(tiny_config, tiny_tokenizer, tmp_path_factory) -> Path:
    """Return a folder with a backbone, a cross-encoder, and a tied and an untied DualEncoder."""
    root = tmp_path_factory.mktemp("harmless")
    torch.manual_seed(0)
    AutoModel.from_config(tiny_config).save_pretrained(root / "backbone")
    cross_config = bert_config(2, 32, 64, num_labels=1)
    BertForSequenceClassification(cross_config).save_pretrained(root / "cross")
    for name in ("backbone", "cross"):
        tiny_tokenizer.save_pretrained(root / name)
    tied = tiny_encoder()
    tied.append(Dense(16, 16))
    tied.save_pretrained(str(root / "tied"))
    tiny_encoder(tied=False).save_pretrained(str(root / "untied"))
    return root


def load_cross_encoder(path: Path) -> None:
    with loading(path) as name:
        CrossEncoder(name)


LOADERS: dict[str, Callable[[Path], Any]] = {
    "backbone": DualEncoder.from_backbone,
    "tied": DualEncoder.from_pretrained,
    "untied": DualEncoder.from_pretrained,
    "cross": load_cross_encoder,
}


def assert_is_refused(kind: str, folder: Path, mark: Path) -> str:
    """Check that a model is refused and that no payload runs; return the error message."""
    with pytest.raises(UserError) as error:
        LOADERS[kind](folder)
    assert not mark.exists(), "the payload ran"
    return str(error.value)


def write_own_code(folder: Path, mark: Path) -> None:
    """Write a Python module into a model's folder, which runs the payload when imported."""
    (folder / "evil.py").write_text(
        f"import os\nos.makedirs({str(mark)!r})\n"
        "import torch\nclass Evil(torch.nn.Module):\n    load = Evil = None\n"
    )


def change_entries(file: Path, **entries: Any) -> None:
    """Set entries of a JSON file."""
    file.write_text(json.dumps({**json.loads(file.read_text()), **entries}))


def change_module_type(model: Path, number: int, name: str) -> Path:
    """Let a class be the type of a module in modules.json; return this file."""
    file = model / "modules.json"
    modules = json.loads(file.read_text())
    modules[number]["type"] = name
    file.write_text(json.dumps(modules))
    return file


def change_router_type(model: Path, name: str) -> Path:
    """Let a class be the type of the first module in router_config.json; return this file."""
    file = model / "router_config.json"
    types = json.loads(file.read_text())["types"]
    change_entries(file, types={**types, next(iter(types)): name})
    return file


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("form", ["torch", "plain", "as safetensors"])
def test_pickled_weights_with_code_are_refused(kind, form, harmless, tmp_path, mark):
    folder = Path(shutil.copytree(harmless / kind, tmp_path / kind))
    # The weights of the last module, if there are several.
    weights = sorted(folder.rglob("model.safetensors"))[-1]
    weights.unlink()
    if form == "torch":
        torch.save({"weight": Payload(mark)}, weights.with_name("pytorch_model.bin"))
    else:
        name = "pytorch_model.bin" if form == "plain" else "model.safetensors"
        weights.with_name(name).write_bytes(pickle.dumps(Payload(mark)))
    error = assert_is_refused(kind, folder, mark)
    assert str(folder) in error
    expected_reason = "not a model" if form == "as safetensors" else "could run code"
    assert expected_reason in error


@pytest.mark.parametrize(
    "name",
    [
        "evil.Evil",
        "os.system",
        # A module of sentence-transformers imports importlib, so this path leads to it.
        "sentence_transformers.util.misc.importlib",
        "sentence_transformers.nothing.Here",
    ],
)
@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_a_class_of_the_folder_s_choice_is_refused(name, kind, harmless, tmp_path, mark):
    folder = Path(shutil.copytree(harmless / kind, tmp_path / "model"))
    write_own_code(folder, mark)
    if kind == "tied":
        file = change_module_type(folder, 1, name)
    else:
        file = change_router_type(folder, name)
    error = assert_is_refused(kind, folder, mark)
    assert str(file) in error
    assert repr(name) in error


def test_a_class_of_a_tower_s_choice_is_refused(harmless, tmp_path, mark):
    """The tower is a whole SentenceTransformer, whose own modules.json names the class."""
    tower = SentenceTransformer(str(harmless / "tied"), device="cpu")
    document = SentenceTransformer(str(harmless / "tied"), device="cpu")
    folder = tmp_path / "model"
    router = Router.for_query_document(query_modules=[tower], document_modules=[document])
    SentenceTransformer(modules=[router], device="cpu").save_pretrained(str(folder))
    # Without the planted class, the model can be loaded.
    with loading(folder) as name:
        SentenceTransformer(name, device="cpu")
    last_tower = sorted(folder.glob("*/modules.json"))[-1].parent
    change_module_type(last_tower, 0, "evil.Module")
    (folder / "evil.py").write_text(f"import os\nos.makedirs({str(mark)!r})\n")
    with pytest.raises(UserError, match=r"evil\.Module.*could run any code"), loading(folder):
        pytest.fail("the folder is loaded")


def test_a_class_of_a_router_inside_a_router_is_refused(harmless, tmp_path):
    folder = Path(shutil.copytree(harmless / "untied", tmp_path / "model"))
    types = json.loads((folder / "router_config.json").read_text())["types"]
    inner_config = folder / next(iter(types)) / "router_config.json"
    inner_config.write_text(json.dumps({"types": {"0_Evil": "os.system"}}))
    with pytest.raises(UserError, match=r"os\.system.*could run any code"), loading(folder):
        pytest.fail("the folder is loaded")


@pytest.mark.parametrize("kind", ["backbone", "tied", "cross"])
def test_modelling_code_of_a_folder_is_refused(kind, harmless, train, tmp_path, mark, capsys):
    folder = Path(shutil.copytree(harmless / kind, tmp_path / kind))
    write_own_code(folder, mark)
    auto_classes = ("AutoConfig", "AutoModel", "AutoModelForSequenceClassification")
    auto_map = dict.fromkeys(auto_classes, "evil.Evil")
    change_entries(folder / "config.json", model_type="evil", auto_map=auto_map)
    error = f"{folder}: needs code that comes with the model. "
    error += "Read that code, then set trust_remote_code"
    assert assert_is_refused(kind, folder, mark) == error
    if kind != "cross":
        assert train(tmp_path / "out", model=folder) == 2
        assert capsys.readouterr().err == f"contaccum: error: {error}\n"
        assert not mark.exists()


def test_code_of_a_folder_runs_by_the_flag_alone(harmless, tmp_path, mark):
    """This shows that the payload of the tests above can run, and that the flag lets it run."""
    folder = Path(shutil.copytree(harmless / "tied", tmp_path / "model"))
    write_own_code(folder, mark)
    change_module_type(folder, 1, "evil.Evil")
    # The class of the payload is not a working module.
    with pytest.raises(UserError):
        DualEncoder.from_pretrained(folder, trust_remote_code=True)
    assert mark.exists()


@pytest.mark.parametrize(
    ("kind", "file", "content"),
    [
        ("tied", "1_Pooling/config.json", None),
        ("tied", "modules.json", "[1]"),
        ("tied", "config.json", '{"model_type": "bert", "hidden_size": "wide"}'),
        ("tied", "tokenizer.json", "{"),
        ("backbone", "model.safetensors", ""),
    ],
)
def test_damaged_models_are_refused(kind, file, content, harmless, tmp_path):
    folder = Path(shutil.copytree(harmless / kind, tmp_path / "model"))
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_text(content)
    with pytest.raises(UserError, match=f"^{re.escape(str(folder))}"):
        LOADERS[kind](folder)


def test_backbone_whose_weights_do_not_fit_its_config_is_refused(harmless, tmp_path):
    folder = Path(shutil.copytree(harmless / "backbone", tmp_path / "model"))
    change_entries(folder / "config.json", intermediate_size=48)
    with pytest.raises(UserError, match="do not have the shapes of config"):
        DualEncoder.from_backbone(folder)


def test_library_calls_nothing_that_unpickles():
    """For pickle, yaml, shells and others, ruff has the rules "S..." in pyproject.toml."""
    root = Path(__file__).parents[1]
    forbidden = []
    for folder in ("contaccum", "scripts", "eval"):
        for path in (root / folder).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            for call in re.findall(r"(?:torch|np|numpy|joblib|pickle)\.loads?\([^)]*\)", text):
                if not re.search("weights_only=True|allow_pickle=False", call):
                    forbidden.append(f"{path}: {call}")
    assert forbidden == []
