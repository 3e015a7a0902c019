"""Untrusted models cannot run code: each planted payload is refused and does not run."""

import ast
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
from transformers import AutoModel, BertForSequenceClassification

from contaccum import DualEncoder
from contaccum.encoders.loading import loading
from contaccum.errors import UserError


class Payload:
    """Leaves a folder behind when it is unpickled. Nothing worse: it only has to be seen."""

    def __init__(self, mark: Path) -> None:
        self.mark = str(mark)

    def __reduce__(self) -> Any:
        return os.makedirs, (self.mark,)


@pytest.fixture
def mark(tmp_path) -> Path:
    return tmp_path / "it_ran"


@pytest.fixture(scope="module")
def harmless(tiny_config, tiny_tokenizer, tmp_path_factory) -> Path:
    """A backbone, a SentenceTransformer (tied and untied) and a cross-encoder."""
    root = tmp_path_factory.mktemp("harmless")
    torch.manual_seed(0)
    AutoModel.from_config(tiny_config).save_pretrained(root / "backbone")
    cross = {**tiny_config.to_dict(), "id2label": {0: "relevant"}, "label2id": {"relevant": 0}}
    BertForSequenceClassification(type(tiny_config)(**cross)).save_pretrained(root / "cross")
    for name in ("backbone", "cross"):
        tiny_tokenizer.save_pretrained(root / name)
    for name, tied in (("tied", True), ("untied", False)):
        model = DualEncoder.from_backbone(
            tiny_config, tokenizer=tiny_tokenizer, pooling="mean", tied=tied
        )
        if tied:
            model.append(Dense(32, 32))
        model.save_pretrained(str(root / name))
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


def refused(kind: str, folder: Path, mark: Path) -> str:
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


def change(file: Path, **entries: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **entries}))


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
    line = refused(kind, folder, mark)
    assert str(folder) in line
    expected_reason = "not a model" if form == "as safetensors" else "could run code"
    assert expected_reason in line


@pytest.mark.parametrize(
    "name",
    # The third is reached through what sentence-transformers' own modules have imported.
    [
        "evil.Evil",
        "os.system",
        "sentence_transformers.util.misc.importlib",
        "sentence_transformers.nothing.Here",
    ],
)
@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_a_class_of_the_folder_s_choice_is_refused(name, kind, harmless, tmp_path, mark):
    folder = Path(shutil.copytree(harmless / kind, tmp_path / "model"))
    write_own_code(folder, mark)
    if kind == "tied":
        file = folder / "modules.json"
        modules = json.loads(file.read_text())
        modules[1]["type"] = name
        file.write_text(json.dumps(modules))
    else:
        file = folder / "router_config.json"
        types = json.loads(file.read_text())["types"]
        change(file, types={**types, next(iter(types)): name})
    line = refused(kind, folder, mark)
    assert str(file) in line and repr(name) in line


def test_a_class_of_a_tower_s_choice_is_refused(harmless, tmp_path, mark):
    """The tower is a whole SentenceTransformer, whose own modules.json names the class."""
    tower = SentenceTransformer(str(harmless / "tied"), device="cpu")
    document = SentenceTransformer(str(harmless / "tied"), device="cpu")
    folder = tmp_path / "model"
    router = Router.for_query_document(query_modules=[tower], document_modules=[document])
    SentenceTransformer(modules=[router], device="cpu").save_pretrained(str(folder))
    with loading(folder) as name:
        SentenceTransformer(name, device="cpu")
    [*_, file] = sorted(folder.glob("*/modules.json"))
    modules = json.loads(file.read_text())
    modules[0]["type"] = "evil.Module"
    file.write_text(json.dumps(modules))
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
    automatic = ("AutoConfig", "AutoModel", "AutoModelForSequenceClassification")
    change(
        folder / "config.json", model_type="evil", auto_map=dict.fromkeys(automatic, "evil.Evil")
    )
    line = f"{folder}: needs code that comes with the model. "
    line += "Read that code, then set trust_remote_code"
    assert refused(kind, folder, mark) == line
    if kind != "cross":
        assert train(tmp_path / "out", model=folder) == 2
        assert capsys.readouterr().err == f"contaccum: error: {line}\n" and not mark.exists()


def test_code_of_a_folder_runs_by_the_flag_alone(harmless, tmp_path, mark):
    """This shows that the payload of the tests above can run, and that the flag is what matters."""
    folder = Path(shutil.copytree(harmless / "tied", tmp_path / "model"))
    write_own_code(folder, mark)
    modules = json.loads((folder / "modules.json").read_text())
    modules[1]["type"] = "evil.Evil"
    (folder / "modules.json").write_text(json.dumps(modules))
    # The class of the payload is not a working module.
    with pytest.raises(UserError):
        DualEncoder.from_pretrained(folder, trust_remote_code=True)
    assert mark.exists()


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("1_Pooling/config.json", None),
        ("1_Pooling/config.json", '{"unknown": 1}'),
        ("modules.json", "[1]"),
        ("config.json", '{"model_type": "bert", "hidden_size": "wide"}'),
        ("config.json", '{"model_type": "bert", "hidden_size": 8, "num_attention_heads": 1}'),
        ("tokenizer.json", "{"),
    ],
)
def test_damaged_models_are_refused(file, content, harmless, tmp_path):
    folder = Path(shutil.copytree(harmless / "tied", tmp_path / "model"))
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_text(content)
    with pytest.raises(UserError, match=f"^{re.escape(str(folder))}"):
        DualEncoder.from_pretrained(folder)


def test_backbone_whose_weights_do_not_fit_its_config_is_refused(harmless, tmp_path):
    folder = Path(shutil.copytree(harmless / "backbone", tmp_path / "model"))
    change(folder / "config.json", intermediate_size=48)
    with pytest.raises(UserError, match="do not have the shapes of config"):
        DualEncoder.from_backbone(folder)


def test_empty_weights_are_refused(harmless, tmp_path):
    folder = Path(shutil.copytree(harmless / "backbone", tmp_path / "model"))
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").touch()
    with pytest.raises(UserError, match="not a model that can be loaded"):
        DualEncoder.from_backbone(folder)


FORBIDDEN = re.compile(
    r"^(pickle|cPickle|dill|cloudpickle|joblib|marshal|shelve)\.(load|loads|Unpickler|open)$"
    r"|^(eval|exec|os\.system|tarfile\.open|shutil\.unpack_archive|yaml\.(unsafe_load|full_load))$"
)


def test_library_calls_nothing_that_runs_what_it_reads():
    found = []
    root = Path(__file__).parents[1]
    for path in [
        p for folder in ("contaccum", "scripts", "eval") for p in (root / folder).rglob("*.py")
    ]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func)
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            bad = FORBIDDEN.match(name) is not None
            bad |= name == "torch.load" and given.get("weights_only") != "True"
            bad |= name == "np.load" and given.get("allow_pickle") != "False"
            bad |= name == "yaml.load" and given.get("Loader") not in (
                "yaml.BaseLoader",
                "yaml.SafeLoader",
            )
            bad |= name.startswith("subprocess.") and given.get("shell", "False") != "False"
            if bad:
                found.append(f"{path.relative_to(root)}:{node.lineno}: {name}")
    assert found == []
