"""ContAccumTrainer: methods, resuming, the log, gradient norms, prompts, frozen parameters."""

import math
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from huggingface_hub import HfApi
from sentence_transformers import SentenceTransformer
from sentence_transformers.losses import MatryoshkaLoss
from sentence_transformers.sentence_transformer.modules import Router
from tiny_models import tiny_encoder
from tiny_runs import (
    RUN_SETTINGS,
    SAVE_EVERY_UPDATE,
    assert_resumes,
    get_state,
    list_differences,
    make_pairs,
    make_trainer,
    read_log,
)
from torch import Tensor

from contaccum import ContAccumLoss, DualEncoder, work
from contaccum.errors import ConfigError
from contaccum.settings import WITH_BANK
from contaccum.training.log import CollapseWatch

Log = list[dict[str, Any]]


def list_values(log: Log, key: str) -> list[Any]:
    """Return one value of each line of a log."""
    return [line[key] for line in log]


def copy_parameters(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def list_frozen_parameters(model: torch.nn.Module) -> list[str]:
    return [name for name, value in model.named_parameters() if not value.requires_grad]


def test_other_models_in_the_output_folder_are_not_read_and_not_changed(tmp_path):
    config = tmp_path / "other" / "router_config.json"
    config.parent.mkdir()
    config.write_text("{}")
    make_trainer(tmp_path).save_model()
    assert config.read_text() == "{}"


@pytest.mark.parametrize(
    "update", [1, 4, 6], ids=["in the first epoch", "at its end", "in the second epoch"]
)
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(run, update, tmp_path):
    resumed = make_trainer(tmp_path, **RUN_SETTINGS)
    resumed.train(resume_from_checkpoint=str(run.folder / f"checkpoint-{update}"))
    assert list_differences(run.state, get_state(resumed)) == []
    # The log continues after the update of the checkpoint, with the same losses.
    log = read_log(tmp_path)
    expected_log = run.log[update:]
    assert list_values(log, "loss") == list_values(expected_log, "loss")
    assert list_values(log, "epoch") == list_values(expected_log, "epoch")


def test_a_run_writes_a_line_for_each_update(run):
    log = run.log
    assert list_values(log, "update") == [1, 2, 3, 4, 5, 6, 7, 8]
    assert list_values(log, "pairs") == [12, 12, 12, 7] * 2  # two epochs of 43 pairs
    for line in log:
        assert math.isfinite(line["loss"])
        assert 0.01 < line["grad_norm_ratio"] < 100
        ratio = line["grad_norm_passage"] / line["grad_norm_query"]
        assert line["grad_norm_ratio"] == pytest.approx(ratio)
        assert line["pairs_per_second"] == pytest.approx(line["pairs"] / line["seconds"])
        assert line["peak_memory_mb"] > 10
        assert line["embedding_spread"] > 0
        assert {"columns", "bank_fill", "bank_age", "bank_mass", "in_batch_mass"} <= line.keys()
    assert log[-1]["bank_fill"] == 20
    # 3 local positives, 3 hard negatives, and 20 banked pairs of 2 documents.
    assert log[-1]["columns"] == 3 + 3 + 40
    # Warm-up and decay count updates.
    assert list_values(log[:3], "learning_rate") == pytest.approx([0.0, 5e-4, 1e-3])


def test_a_run_leaves_its_record_and_a_model(run):
    record = work.read_identity(run.folder)
    assert record["arguments"]["method"] == "contaccum"
    assert record["arguments"]["seed"] == 5
    assert record["resume"]["pairs per update"] == 12
    assert record["updates"] == 8
    assert record["data"]["rows"] == 43
    assert len(record["data"]["fingerprint"]) == 64
    assert record["arguments"]["bank_size"] == 20
    assert record["versions"]["torch"]
    assert not (run.folder / "training_args.bin").exists()  # a pickle
    model = SentenceTransformer(str(run.folder), device="cpu")
    assert model.encode(["a cat"]).shape == (1, 16)


def test_drift_is_probed_and_logged_and_resumes_bit_for_bit(tmp_path):
    """An update has 72 pairs, so the drift is probed at the start and after updates 2 and 4.

    At this learning rate no entry drifts so far that it retires.
    """
    settings = {
        "data": 144,
        "tied": False,
        "per_device_train_batch_size": 24,
        "bank_size": 150,
        "num_train_epochs": 2,
        "learning_rate": 3e-4,
    }
    assert_resumes(partial(make_trainer, **settings), tmp_path, 3)
    log = read_log(tmp_path / "straight")
    assert list_values(log, "bank_age") == [0, 1, 2, 2]
    for line in log[:2]:
        assert "drift_age" not in line
    for line in log[2:]:
        assert "drift_age" in line
        assert 0 < line["drift_shift_passage"] < 100
        assert -1 <= line["drift_cosine_query"] < 1
        assert line["drift_residual_passage"] > 0
        assert line["bank_mass_aged"] > 0


@pytest.mark.parametrize(
    ("method", "tied"),
    [
        ("in_batch", True),
        ("grad_accum", False),
        ("grad_cache", True),
        ("contaccum", True),
        ("contaccum", False),
        ("contaccum_cached", False),
    ],
)
def test_every_method_trains_and_logs(method, tied, tmp_path):
    num_steps = 1 if method == "in_batch" else 3
    settings = {
        "data": make_pairs(24, negatives=1),
        "tied": tied,
        "method": method,
        "gradient_accumulation_steps": num_steps,
    }
    trainer = make_trainer(tmp_path, **settings)
    before = copy_parameters(trainer.model)
    trainer.train()
    log = read_log(tmp_path)
    num_updates = 6 // num_steps  # 24 pairs in micro-batches of 4
    assert list_values(log, "update") == list(range(1, num_updates + 1))
    for line in log:
        assert line["pairs"] == 4 * num_steps
        assert line["loss"] > 0
        assert 0.01 < line["grad_norm_ratio"] < 100
    assert log[-1]["bank_fill"] == (20 if method in WITH_BANK else 0)
    assert list_differences(before, copy_parameters(trainer.model)) != []


def test_a_model_is_saved_with_the_similarity_of_its_training(tmp_path):
    trainer = make_trainer(tmp_path, similarity="dot", max_steps=1)
    trainer.train()
    trainer.save_model(str(tmp_path / "model"))
    saved = DualEncoder.from_pretrained(tmp_path / "model", device="cpu")
    assert saved.similarity_fn_name == "dot"


def test_the_centred_gradients_of_an_update_sum_to_zero(tmp_path):
    """The loss receives the number of pairs of the update, over which it centres gradients.

    The first update has 12 pairs in three micro-batches, and no banked pair is aged. The second one
    is short: it has a micro-batch of four pairs and one of a single pair.
    """
    trainer = make_trainer(tmp_path, data=17, similarity="dot")
    sums: list[Tensor] = []  # of the gradients of the documents of a micro-batch

    def record_gradient_of_documents(module: Any, arguments: Any, output: Any) -> None:
        embedding = output["sentence_embedding"]
        if arguments[0].get("task") == "document" and embedding.requires_grad:
            embedding.register_hook(lambda gradient: sums.append(gradient.sum(0)))

    trainer.model.register_forward_hook(record_gradient_of_documents)
    trainer.train()
    assert list_values(read_log(tmp_path), "pairs") == [12, 5]
    assert len(sums) == 5
    assert torch.stack(sums[:3]).sum(0).abs().max() > 1e-4
    assert torch.stack(sums[3:]).sum(0).abs().max() < 1e-6


def test_the_logged_loss_is_that_of_local_rows_and_trackers_get_all_numbers(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trainer = make_trainer(tmp_path, logging_steps=1, report_to="tensorboard")
    local_losses: list[float] = []

    def record_local_loss(*_: Any) -> None:
        local_losses.append(trainer.loss.last["local_loss"].item())

    trainer.loss.register_forward_hook(record_local_loss)
    trainer.train()
    losses_of_updates = torch.tensor(local_losses).reshape(-1, 3)  # three micro-batches each
    log = read_log(tmp_path)
    assert list_values(log, "loss") == pytest.approx(losses_of_updates.mean(1).tolist(), rel=1e-5)
    (file,) = tmp_path.rglob("events.out.tfevents.*")
    events = EventAccumulator(str(file))
    events.Reload()
    for key in ("bank_fill", "bank_mass", "embedding_spread", "grad_norm_ratio"):
        tracked = [event.value for event in events.Scalars(f"train/{key}")]
        assert tracked == pytest.approx(list_values(log, key)), key
    assert "train/loss" in events.Tags()["scalars"]


def test_a_run_in_bf16_has_a_bank_in_float32(tmp_path):
    trainer = make_trainer(tmp_path, 24, tied=False, bf16=True)
    trainer.train()
    for line in read_log(tmp_path):
        assert math.isfinite(line["loss"])
        assert line["grad_norm_query"] > 0
    (loss,) = trainer.bank_losses()
    assert loss.info_nce.bank.documents.dtype == torch.float32


def test_prompts_and_lengths_of_the_model_are_used_in_training(tmp_path):
    model = tiny_encoder(
        query_prompt="what is ", passage_prompt="the ", query_max_length=6, passage_max_length=20
    )
    trainer = make_trainer(tmp_path, 8, model=model)
    batch = next(iter(trainer.get_train_dataloader()))
    queries = batch["query_input_ids"]
    passages = batch["positive_input_ids"]
    assert model.tokenizer.decode(queries[0]).startswith("[CLS] what is ")
    assert model.tokenizer.decode(passages[0]).startswith("[CLS] the ")
    assert queries.shape[1] == 6
    assert 6 < passages.shape[1] <= 20


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"data": Dataset.from_dict({"query": ["a"]})}, "needs a query and a positive"),
        ({"data": make_pairs(8).to_iterable_dataset(), "max_steps": 2}, "streamed data set"),
        ({"loss": {"a": None, "b": None}}, "a dictionary of losses"),
        ({"method": "grad_accum", "per_device_train_batch_size": 1}, "no hard negatives"),
        ({"model": tiny_encoder().requires_grad_(False)}, "every weight of the model is frozen"),
        ({"model": tiny_encoder(query_prompt="cat " * 30)}, "no room for text"),
    ],
)
def test_data_and_models_that_do_not_fit_the_settings_are_refused(settings, named, tmp_path):
    with pytest.raises(ConfigError, match=named):
        make_trainer(tmp_path, **settings)


@pytest.mark.parametrize(("tied", "num_frozen"), [(True, 2), (False, 4)], ids=["tied", "untied"])
def test_parameters_that_no_embedding_depends_on_are_frozen(tmp_path, tied, num_frozen):
    model = tiny_encoder(tied).train()
    make_trainer(tmp_path, model=model)
    frozen = list_frozen_parameters(model)
    assert len(frozen) == num_frozen
    for name in frozen:
        assert "pooler" in name
    assert model.training


def test_a_collapse_gives_one_warning_in_its_third_update():
    watch = CollapseWatch()
    spreads = [0.5, 1e-4, 0.5] + [1e-4] * 6
    records = [
        {"update": update, "embedding_spread": spread, "bank_age": 7}
        for update, spread in enumerate(spreads)
    ]
    warnings_of_updates = [watch.observe(record) for record in records]
    assert [len(warnings) for warnings in warnings_of_updates] == [0, 0, 0, 0, 0, 1, 0, 0, 0]
    [warning] = warnings_of_updates[5]
    assert "update 5: collapse: all passages" in warning
    assert "or set a smaller bank_size" in warning


def read_text_files(folder: Path) -> dict[str, str]:
    """Return {path in the folder: content} of the text files in a folder and its subfolders."""
    files = [path for path in folder.rglob("*") if path.suffix in (".json", ".md", ".jsonl")]
    return {str(path.relative_to(folder)): path.read_text() for path in files}


def test_an_upload_has_a_model_and_a_card_and_no_credentials(tmp_path, monkeypatch):
    secret = "hush-hush-12345"
    monkeypatch.setenv("MY_API_TOKEN", secret)
    uploads: list[set[str]] = []  # the paths of the files of each upload

    def create_repo(api: Any, repo_id: str, **kwargs: Any) -> Any:
        return SimpleNamespace(repo_id=repo_id)

    def upload_folder(api: Any, repo_id: str, folder_path: Any, **kwargs: Any) -> Any:
        uploads.append(
            {str(path.relative_to(folder_path)) for path in Path(folder_path).rglob("*")}
        )
        for content in read_text_files(Path(folder_path)).values():
            assert str(tmp_path) not in content
        return SimpleNamespace(commit_url=f"https://hub/{repo_id}")

    monkeypatch.setattr(HfApi, "create_repo", create_repo)
    monkeypatch.setattr(HfApi, "upload_folder", upload_folder)
    trainer = make_trainer(
        tmp_path / "run",
        12,
        data_record={"sets": {"faq": {"path": str(tmp_path / "faq.csv")}}},
        hub_model_id="me/mine",
        run_name=secret,
        **SAVE_EVERY_UPDATE,
    )
    trainer.train()
    with pytest.raises(TypeError):
        trainer.push_to_hub("a message", True)  # would be ignored
    assert trainer.push_to_hub() == "https://hub/me/mine"
    (uploaded_names,) = uploads
    assert {"README.md", "model.safetensors", "modules.json"} <= uploaded_names
    for name in uploaded_names:
        assert not re.search(r"bank|checkpoint|log|identity|result|optimizer|\.bin", name)

    trainer.save_model()
    card = (tmp_path / "run" / "README.md").read_text()
    assert 'SentenceTransformer("me/mine")' in card
    assert "2406.12356" in card
    text_files = read_text_files(tmp_path)
    assert len(text_files) > 10
    for path, content in text_files.items():
        assert secret not in content, path


@pytest.mark.parametrize("shown", [False, True])
@pytest.mark.parametrize("plain", [False, True])
def test_a_model_card_has_texts_of_the_data_only_if_it_is_asked_for(shown, plain, tmp_path):
    model = tiny_encoder()
    if plain:
        model.save_pretrained(str(tmp_path / "plain"))
        model = SentenceTransformer(str(tmp_path / "plain"), device="cpu")
    data = make_pairs(12)
    trainer = make_trainer(
        tmp_path / "run", data, model=model, card_examples=shown, **SAVE_EVERY_UPDATE
    )
    trainer.train()
    trainer.save_model()
    cards = list((tmp_path / "run").rglob("README.md"))
    assert len(cards) > 1  # of a checkpoint, and of the model
    for card in cards:
        text = card.read_text()
        assert any(x in text for x in [*data["query"], *data["positive"]]) == shown
        assert "encode_query" in text


def test_matryoshka_dims_train_like_a_wrapped_loss_with_a_bank_for_each_size(tmp_path):
    straight = assert_resumes(partial(make_trainer, matryoshka_dims=[8, 16]), tmp_path, 2)
    (bank_loss,) = straight.bank_losses()
    assert set(bank_loss.info_nces) == {"8", "16"}
    model = tiny_encoder()
    loss = MatryoshkaLoss(model, ContAccumLoss(model, bank_size=20), [16, 8])
    wrapped = make_trainer(tmp_path / "wrapped", model=model, loss=loss)
    wrapped.train()
    assert list_differences(get_state(straight), get_state(wrapped)) == []
    # The loss of the log is that of the full size, and not the sum over the sizes.
    last_loss = read_log(tmp_path / "wrapped", "train_log.jsonl")[-1]["loss"]
    assert last_loss < 1.5 * float(bank_loss.last["local_loss"])


@pytest.mark.long
@pytest.mark.parametrize("tied", [True, False])
def test_a_compiled_model_trains_like_an_uncompiled_one(tmp_path, tied):

    def train_and_save(folder: Path, **settings: Any) -> Log:
        trainer = make_trainer(folder, 36, tied, **settings)
        trainer.train()
        trainer.save_model(str(folder / "saved"))
        SentenceTransformer(str(folder / "saved"), device="cpu")  # can be loaded
        return read_log(folder)

    plain_log = train_and_save(tmp_path / "plain")
    compiled_log = train_and_save(
        tmp_path / "compiled", torch_compile=True, torch_compile_backend="aot_eager"
    )
    for plain, compiled in zip(plain_log, compiled_log, strict=True):
        for key in ("loss", "grad_norm_query", "grad_norm_passage", "grad_norm_ratio", "bank_fill"):
            assert compiled[key] == pytest.approx(plain[key], rel=1e-4), key


def list_routes(names: list[str]) -> set[str]:
    """Return the routes of parameters of a Router; their names begin with 0.sub_modules.ROUTE."""
    return {name.split(".")[2] for name in names}


def test_a_route_that_only_the_training_data_reach_is_trained(tmp_path):
    """Positives take a third route of a Router.

    The poolers, which no embedding depends on, are frozen in every route that runs.
    """
    routes = {}
    for task in ("query", "document", "summary"):
        encoder = tiny_encoder(tied=True)
        routes[task] = [encoder[0], encoder[1]]
    model = SentenceTransformer(modules=[Router(routes)], device="cpu")
    mapping = {"query": "query", "positive": "summary"}
    trainer = make_trainer(tmp_path, model=model, router_mapping=mapping)
    before = copy_parameters(model)
    trainer.train()
    trained = list_differences(before, copy_parameters(model))
    assert list_routes(trained) == {"query", "summary"}
    frozen = list_frozen_parameters(model)
    assert len(frozen) == 4
    assert list_routes(frozen) == {"query", "summary"}
    for name in frozen:
        assert ".pooler." in name
