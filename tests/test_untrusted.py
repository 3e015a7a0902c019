"""Files from others cannot run code: a payload planted in each place is refused in one line, and never runs."""

from __future__ import annotations

import ast
import json
import os
import pickle
import re
import shutil
import stat
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sample_texts import sentences, write_training_and_beir_data
from sentence_transformers.sentence_transformer.modules import Dense
from transformers import AutoModel, BertForSequenceClassification

from contaccum import DualEncoder
from contaccum.cli import main
from contaccum.errors import ConfigError, DataError, UserError
from contaccum.retrieval.searcher import load_embeddings
from contaccum.training.checkpoint_folder import MANIFEST, write_manifest
from contaccum.untrusted import inside, unpack

MARK = "it_ran"


class Payload:
    """Leaves a folder behind when it is unpickled. Nothing worse: it only has to be seen."""

    def __init__(self, mark: Path) -> None:
        self.mark = str(mark)

    def __reduce__(self) -> Any:
        return os.makedirs, (self.mark,)


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    return tmp_path / MARK


@pytest.fixture
def plant(mark: Path) -> Callable[..., Path]:
    """Writes a payload to a path: as torch.save would, or a plain pickle."""

    def write(path: Path, as_torch: bool = False) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        if as_torch:
            torch.save({"weight": Payload(mark)}, path)
        else:
            path.write_bytes(pickle.dumps(Payload(mark)))
        return path

    return write


@pytest.fixture(scope="module")
def places(tiny_config: Any, tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A backbone, a SentenceTransformer (tied and untied), a cross-encoder, pairs and a BEIR folder, all harmless."""
    root = tmp_path_factory.mktemp("harmless")
    torch.manual_seed(0)
    AutoModel.from_config(tiny_config).save_pretrained(root / "backbone")
    cross = {**tiny_config.to_dict(), "id2label": {0: "relevant"}, "label2id": {"relevant": 0}}
    BertForSequenceClassification(type(tiny_config)(**cross)).save_pretrained(root / "cross")
    for name in ("backbone", "cross"):
        tiny_tokenizer.save_pretrained(root / name)
    for name, tied in (("tied", True), ("untied", False)):
        model = DualEncoder.from_backbone(tiny_config, tokenizer=tiny_tokenizer, pooling="mean", tied=tied)
        if tied:
            model.append(Dense(32, 32))
        model.save_pretrained(str(root / name))
    write_training_and_beir_data(root, 12)
    return root


def refused(capsys: pytest.CaptureFixture[str], mark: Path, *arguments: str) -> str:
    """The one line that a command refuses with."""
    code = main(list(arguments))
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("contaccum: error: ")]
    assert not mark.exists(), "the payload ran"
    assert (code, len(lines)) == (2, 1), (code, lines)
    return lines[0]


def training(places: Path, output: Path, *more: str, **overrides: str) -> list[str]:
    given = {"model": str(places / "backbone"), "train_data": str(places / "pairs.jsonl"), "output_dir": str(output)}
    given |= {"per_device_train_batch_size": "4", "gradient_accumulation_steps": "1", "max_steps": "2"}
    given |= {"bank_size": "8", "use_cpu": "true", "report_to": "none", "disable_tqdm": "true"}
    return ["train", *(f"--{key}={value}" for key, value in {**given, **overrides}.items()), *more]


def evaluation(places: Path, model: Path) -> list[str]:
    return ["evaluate", str(model), "--data", str(places / "beir"), f"--output={model.parent / 'out.json'}"]


def write_own_code(folder: Path, mark: Path) -> None:
    """A module with code, as a model folder may bring it."""
    (folder / "evil.py").write_text(
        f"import os\nos.makedirs({str(mark)!r})\nimport torch\nclass Evil(torch.nn.Module):\n    load = Evil = None\n"
    )


# Weights ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["backbone", "tied", "untied"])
def test_pickled_weights_with_code_are_refused(
    kind: str, places: Path, tmp_path: Path, plant: Any, mark: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(places / kind, tmp_path / kind))
    weights = sorted(folder.rglob("model.safetensors"))[0]
    weights.unlink()
    plant(weights.with_name("pytorch_model.bin"), as_torch=True)
    line = refused(capsys, mark, *training(places, tmp_path / "out", model=str(folder)))
    assert str(folder) in line and "could run code" in line


def test_pickled_weights_of_a_later_module_are_refused(
    places: Path, tmp_path: Path, plant: Any, mark: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(places / "tied", tmp_path / "model"))
    weights = folder / "2_Dense" / "model.safetensors"
    weights.unlink()
    plant(weights.with_name("pytorch_model.bin"), as_torch=True)
    assert "could run code" in refused(capsys, mark, *evaluation(places, folder))


def test_plain_pickle_under_the_name_of_weights_is_refused(
    places: Path, tmp_path: Path, plant: Any, mark: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(places / "tied", tmp_path / "model"))
    plant(folder / "model.safetensors")
    assert "weights are damaged" in refused(capsys, mark, *evaluation(places, folder))
    (folder / "model.safetensors").unlink()
    plant(folder / "pytorch_model.bin")
    assert "could run code" in refused(capsys, mark, *evaluation(places, folder))


def test_weights_pickled_as_tensors_alone_are_read(places: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    folder = Path(shutil.copytree(places / "tied", tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    ours, theirs = (DualEncoder.from_pretrained(x).state_dict() for x in (folder, places / "tied"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_cross_encoder_with_code_is_refused(
    places: Path, tmp_path: Path, plant: Any, mark: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(places / "cross", tmp_path / "cross"))
    (folder / "model.safetensors").unlink()
    plant(folder / "pytorch_model.bin", as_torch=True)
    mine = ["mine", str(places / "tied"), "--data", str(places / "pairs.jsonl"), "--output", str(tmp_path / "o.jsonl")]
    assert "could run code" in refused(capsys, mark, *mine, "--cross_encoder", str(folder))


# Code that a model folder brings, or names --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "evil.Evil",
        "os.system",
        "contaccum.losses.ContAccumLoss",
        # Reached through what sentence-transformers' own modules have imported.
        "sentence_transformers.util.misc.importlib",
        "sentence_transformers.base.model.torch",
    ],
)
@pytest.mark.parametrize("where", ["modules.json", "router"])
def test_class_of_the_folders_choice_is_refused(
    name: str, where: str, places: Path, tmp_path: Path, mark: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(places / ("tied" if where == "modules.json" else "untied"), tmp_path / "model"))
    write_own_code(folder, mark)
    file = folder / ("modules.json" if where == "modules.json" else "router_config.json")
    content = json.loads(file.read_text())
    if where == "modules.json":
        content[1]["type"] = name
    else:
        content["types"][next(iter(content["types"]))] = name
    file.write_text(json.dumps(content))
    for command in (evaluation(places, folder), training(places, tmp_path / "out", model=str(folder))):
        line = refused(capsys, mark, *command)
        assert str(file) in line and repr(name) in line and "--trust_remote_code" in line


def test_activation_of_the_folders_choice_is_refused(
    places: Path, tmp_path: Path, mark: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(places / "tied", tmp_path / "model"))
    write_own_code(folder, mark)
    config = folder / "2_Dense" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "activation_function": "evil.Evil"}))
    assert "'evil.Evil'" in refused(capsys, mark, *evaluation(places, folder))


@pytest.mark.parametrize("kind", ["backbone", "tied", "cross"])
def test_modelling_code_of_a_folder_is_refused(
    kind: str, places: Path, tmp_path: Path, mark: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(places / kind, tmp_path / kind))
    write_own_code(folder, mark)
    content = json.loads((folder / "config.json").read_text())
    automatic = ("AutoConfig", "AutoModel", "AutoModelForSequenceClassification")
    content |= {"model_type": "evil", "auto_map": dict.fromkeys(automatic, "evil.Evil")}
    (folder / "config.json").write_text(json.dumps(content))
    if kind == "cross":
        given = ["--data", str(places / "pairs.jsonl"), "--output", str(tmp_path / "o.jsonl")]
        command = ["mine", str(places / "tied"), *given, "--cross_encoder", str(folder)]
    else:
        command = training(places, tmp_path / "out", model=str(folder))
    assert str(folder) in refused(capsys, mark, *command)


def test_tokenizer_code_of_a_folder_is_not_run(places: Path, tmp_path: Path, mark: Path) -> None:
    """transformers takes its own tokenizer for the model type instead."""
    folder = Path(shutil.copytree(places / "tied", tmp_path / "model"))
    write_own_code(folder, mark)
    path = folder / "tokenizer_config.json"
    own = {"tokenizer_class": "EvilTokenizer", "auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}}
    path.write_text(json.dumps({**json.loads(path.read_text()), **own}))
    model = DualEncoder.from_pretrained(folder)
    assert type(model.tokenizer).__module__.startswith("transformers.") and not mark.exists()


def test_code_of_a_folder_runs_by_the_flag_alone(places: Path, tmp_path: Path, mark: Path) -> None:
    """The payload of these tests does run once it is asked for: what refuses it above is the missing flag."""
    folder = Path(shutil.copytree(places / "tied", tmp_path / "model"))
    write_own_code(folder, mark)
    modules = json.loads((folder / "modules.json").read_text())
    modules[1]["type"] = "evil.Evil"
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(TypeError):  # it is no module that works
        main([*evaluation(places, folder), "--trust_remote_code"])
    assert mark.exists()


# Checkpoints --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(places: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a checkpoint after its first update."""
    output = tmp_path_factory.mktemp("trained") / "run"
    assert main(training(places, output, save_strategy="steps", save_steps="1", max_steps="1")) == 0
    return output


def make_checksums_fit(checkpoint: Path) -> None:
    (checkpoint / MANIFEST).unlink()
    write_manifest(checkpoint)


def test_checkpoint_holds_no_pickle(trained: Path) -> None:
    names = {path.name for path in (trained / "checkpoint-1").rglob("*") if path.is_file()}
    assert {name for name in names if not name.endswith((".json", ".safetensors", ".txt", ".md", ".jinja"))} == set()


@pytest.mark.parametrize(
    "name",
    ["contaccum_bank.safetensors", "model.safetensors", "optimizer.safetensors", "random_states_0.safetensors"],
)
@pytest.mark.parametrize("as_torch", [False, True], ids=["pickle", "torch"])
def test_payload_in_a_checkpoint_is_refused(
    name: str,
    as_torch: bool,
    trained: Path,
    places: Path,
    tmp_path: Path,
    plant: Any,
    mark: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = Path(shutil.copytree(trained, tmp_path / "run"))
    checkpoint = output / "checkpoint-1"
    plant(checkpoint / name, as_torch)
    line = refused(capsys, mark, *training(places, output, resume_from_checkpoint="last"))
    assert checkpoint.name in line
    # Nor when the checksums were made to fit.
    make_checksums_fit(checkpoint)
    line = refused(capsys, mark, *training(places, output, resume_from_checkpoint="last"))
    assert str(checkpoint) in line


def test_checkpoint_that_names_its_own_class_is_refused(
    trained: Path, places: Path, tmp_path: Path, mark: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = Path(shutil.copytree(trained, tmp_path / "run"))
    write_own_code(output / "checkpoint-1", mark)
    modules = json.loads((output / "checkpoint-1" / "modules.json").read_text())
    modules[1]["type"] = "evil.Evil"
    (output / "checkpoint-1" / "modules.json").write_text(json.dumps(modules))
    make_checksums_fit(output / "checkpoint-1")
    line = refused(capsys, mark, *training(places, output, resume_from_checkpoint="last"))
    assert "'evil.Evil'" in line


# Data, configs, results, embeddings ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["data.jsonl", "data.json", "data.csv", "data.tsv", "data.parquet", "data.jsonl.gz"])
def test_pickle_for_training_data_is_refused(
    name: str, places: Path, tmp_path: Path, plant: Any, mark: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = plant(tmp_path / name)
    assert str(path) in refused(capsys, mark, *training(places, tmp_path / "out", train_data=str(path)))


def test_script_in_a_data_folder_is_not_run(
    places: Path, tmp_path: Path, mark: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "scripted"
    folder.mkdir()
    (folder / "scripted.py").write_text(f"import os\nos.makedirs({str(mark)!r})\n")
    assert str(folder) in refused(capsys, mark, *training(places, tmp_path / "out", train_data=str(folder)))


@pytest.mark.parametrize("name", ["state.json", "dataset_info.json", "data-00000-of-00001.arrow"])
def test_pickle_in_a_saved_dataset_is_refused(
    name: str, places: Path, tmp_path: Path, plant: Any, mark: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from datasets import Dataset

    Dataset.from_dict({"query": sentences(4, 1), "positive": sentences(4, 2)}).save_to_disk(str(tmp_path / "saved"))
    assert (tmp_path / "saved" / name).is_file()
    plant(tmp_path / "saved" / name)
    line = refused(capsys, mark, *training(places, tmp_path / "out", train_data=str(tmp_path / "saved")))
    assert str(tmp_path / "saved") in line


@pytest.mark.parametrize("name", ["corpus.jsonl", "queries.jsonl", "qrels/test.tsv"])
def test_pickle_in_a_beir_folder_is_refused(
    name: str, places: Path, tmp_path: Path, plant: Any, mark: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(places / "beir", tmp_path / "beir")
    plant(tmp_path / "beir" / name)
    arguments = ["evaluate", str(places / "tied"), "--data", str(tmp_path / "beir"), f"--output={tmp_path / 'o.json'}"]
    assert name in refused(capsys, mark, *arguments)


@pytest.mark.parametrize("tag", ["!!python/object/apply:os.makedirs", "!!python/object/new:os.makedirs"])
def test_yaml_that_calls_is_refused(
    tag: str, places: Path, tmp_path: Path, mark: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(f"model: {tag} ['{mark}']\n")
    assert f"{config}:1" in refused(capsys, mark, "train", str(config))
    arguments = training(places, tmp_path / "out")[1:]
    value = f"learning_rate={tag} ['{mark}']"
    refused(capsys, mark, "compare", *arguments, "--eval_data", str(places / "beir"), "--grid", value)


def test_pickle_for_a_result_is_refused(plant: Any, tmp_path: Path, mark: Path) -> None:
    from contaccum.evaluation.results import read_result

    with pytest.raises(DataError, match="not a results file"):
        read_result(plant(tmp_path / "results.json"))
    assert not mark.exists()


def test_pickle_in_a_folder_of_comparisons_is_refused(plant: Any, tmp_path: Path, mark: Path) -> None:
    from contaccum.comparison.command import read_run

    plant(tmp_path / "run" / "result.json")
    with pytest.raises(DataError, match="not a result that contaccum wrote"):
        read_run(tmp_path / "run")
    assert not mark.exists()


def test_pickled_embeddings_are_refused(plant: Any, tmp_path: Path, mark: Path) -> None:
    np.savez(tmp_path / "a.npz", embeddings=np.zeros((1, 2), np.float32), ids=np.array([Payload(mark)], dtype=object))
    for path in (tmp_path / "a.npz", plant(tmp_path / "b.npz")):
        with pytest.raises(DataError, match="not a file of embeddings"):
            load_embeddings(path)
    with pytest.raises(ConfigError, match="never in pickles"):
        load_embeddings(plant(tmp_path / "c.pkl"))
    assert not mark.exists()


# Names and paths ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["../out", "a/../../out", "/etc/out", "C:\\out", "a\\..\\..\\out", "\\\\host\\out", "a\0b"]
)
def test_name_that_leads_out_of_its_folder_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataError):
        inside(tmp_path, name)


@pytest.mark.parametrize("name", ["a", "a/b", "a..b", "..a", "é/ü"])
def test_name_inside_its_folder_is_kept(name: str, tmp_path: Path) -> None:
    assert inside(tmp_path, name) == tmp_path / name


@pytest.mark.parametrize("name", ["../out.txt", "/tmp/out.txt", "fine/../../out.txt"])
def test_archive_that_leads_out_of_its_folder_writes_nothing(name: str, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("fine.txt", "fine")
        archive.writestr(name, "out")
    (tmp_path / "here").mkdir()
    with pytest.raises(DataError, match="leads out of"):
        unpack(tmp_path / "a.zip", tmp_path / "here")
    assert list((tmp_path / "here").iterdir()) == []


def test_archive_with_a_link_writes_nothing(tmp_path: Path) -> None:
    link = zipfile.ZipInfo("corpus.jsonl")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr(link, "/etc/passwd")
    with pytest.raises(DataError, match="is a link"):
        unpack(tmp_path / "a.zip", tmp_path / "here")
    assert not (tmp_path / "here").exists()


def test_module_path_that_leads_out_of_the_model_is_refused(
    places: Path, tmp_path: Path, mark: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(places / "tied", tmp_path / "model"))
    modules = json.loads((folder / "modules.json").read_text())
    modules[1]["path"] = "../../elsewhere"
    (folder / "modules.json").write_text(json.dumps(modules))
    assert "leads out of" in refused(capsys, mark, *evaluation(places, folder))


def test_run_does_not_write_through_a_link_that_was_planted(
    places: Path, tmp_path: Path, mark: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    precious = tmp_path / "precious"
    precious.write_text("keep me")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "train_log.jsonl").symlink_to(precious)
    line = refused(capsys, mark, *training(places, tmp_path / "out"))
    assert str(tmp_path / "out" / "train_log.jsonl") in line and precious.read_text() == "keep me"


def test_result_replaces_a_link_and_leaves_what_it_led_to(tmp_path: Path) -> None:
    from contaccum.evaluation.results import write_atomically

    precious = tmp_path / "precious"
    precious.write_text("keep me")
    (tmp_path / "out.json").symlink_to(precious)
    write_atomically(tmp_path / "out.json", ["new"])
    assert precious.read_text() == "keep me" and (tmp_path / "out.json").read_text() == "new"


def test_ids_never_become_names_of_files(places: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ids from data go into lines of files, blanks and all."""
    root = Path(shutil.copytree(places / "beir", tmp_path / "beir"))
    for name, bad in (("corpus", "../../corpus0"), ("queries", "/etc/queries0\n")):
        path = root / f"{name}.jsonl"
        path.write_text(path.read_text().replace(f'"{name}0"', json.dumps(bad)))
    qrels = root / "qrels" / "test.tsv"
    qrels.write_text(qrels.read_text().replace("corpus0", "../../corpus0"))
    before = set(tmp_path.rglob("*"))
    main(["evaluate", str(places / "tied"), "--data", str(root), f"--output={tmp_path / 'out.json'}", "--no_progress"])
    assert {path.name for path in set(tmp_path.rglob("*")) - before} <= {"out.json", "out.trec"}


# The code of the library ---------------------------------------------------------------------------------------------

FORBIDDEN = re.compile(
    r"^(pickle|cPickle|dill|cloudpickle|joblib|marshal|shelve)\.(load|loads|Unpickler|open)$"
    r"|^(eval|exec|os\.system|tarfile\.open|shutil\.unpack_archive|yaml\.(unsafe_load|full_load))$"
)


def test_library_calls_nothing_that_runs_what_it_reads() -> None:
    found = []
    root = Path(__file__).parents[1]
    for path in [p for folder in ("contaccum", "scripts", "eval") for p in (root / folder).rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func)
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            bad = FORBIDDEN.match(name) is not None
            bad |= name == "torch.load" and given.get("weights_only") != "True"
            bad |= name == "np.load" and given.get("allow_pickle") != "False"
            bad |= name == "yaml.load" and given.get("Loader") not in ("yaml.BaseLoader", "yaml.SafeLoader")
            bad |= name.startswith("subprocess.") and given.get("shell", "False") != "False"
            bad |= name.endswith(".extractall") and path.name != "untrusted.py"
            # Only where a file has been checked and tried in a process of its own.
            bad |= name == "faiss.read_index" and path.name != "index_file.py"
            if bad:
                found.append(f"{path.relative_to(root)}:{node.lineno}: {name}")
    assert found == []


def test_trust_in_remote_code_is_off_unless_it_is_asked_for() -> None:
    import inspect

    from contaccum.mining.rescoring import load_cross_encoder
    from contaccum.training.config import ModelArguments

    assert ModelArguments().trust_remote_code is False
    for function in (DualEncoder.from_backbone, load_cross_encoder):
        assert inspect.signature(function).parameters["trust_remote_code"].default is False
    with pytest.raises(UserError, match="no such model folder"):
        DualEncoder.from_pretrained("./nowhere")
