"""ContAccumTrainer: methods, resuming, the log, gradient norms, prompts."""

import inspect
import json
import math
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset, DatasetDict
from huggingface_hub import HfApi
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
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

from contaccum import ContAccumLoss, ContAccumTrainer
from contaccum.errors import ConfigError, UserError
from contaccum.training.arguments import BANK_METHODS
from contaccum.training.log import RUN_RECORD, CollapseWatch
from contaccum.training.options import METHODS


def test_at_most_eleven_methods_of_the_parents_are_overridden():
    own = {name for name, value in vars(ContAccumTrainer).items() if inspect.isfunction(value)}
    overridden = {name for name in own if hasattr(SentenceTransformerTrainer, name)}
    assert len(overridden) <= 11, overridden
    for name in overridden - {"__init__"}:
        if name.startswith("_"):
            assert "# Private: " in inspect.getsource(getattr(ContAccumTrainer, name))


@pytest.mark.parametrize(
    "update", [1, 4, 6]
)  # inside the first epoch, at its end, inside the second
def test_resumed_run_equals_the_uninterrupted_one_bit_for_bit(run, update, tmp_path):
    folder, expected, log = run
    resumed = make_trainer(tmp_path, **RUN_SETTINGS)
    resumed.train(resume_from_checkpoint=str(folder / f"checkpoint-{update}"))
    assert list_differences(expected, get_state(resumed)) == []
    # The log continues where it stopped, with the same losses.
    assert [line["loss"] for line in read_log(tmp_path)] == [line["loss"] for line in log[update:]]
    assert [line["epoch"] for line in read_log(tmp_path)] == [
        line["epoch"] for line in log[update:]
    ]


def test_a_run_leaves_its_record_its_log_and_a_model(run):
    folder, _, log = run
    assert [line["update"] for line in log] == list(range(1, 9))
    assert [line["pairs"] for line in log] == [12, 12, 12, 7] * 2
    for line in log:
        assert math.isfinite(line["loss"]) and 0.01 < line["grad_norm_ratio"] < 100
        assert line["grad_norm_ratio"] == pytest.approx(
            line["grad_norm_passage"] / line["grad_norm_query"]
        )
        assert line["pairs_per_second"] == pytest.approx(line["pairs"] / line["seconds"])
        assert line["peak_memory_mb"] > 10 and line["embedding_spread"] > 0
        assert {"columns", "bank_fill", "bank_age", "bank_mass", "in_batch_mass"} <= line.keys()
    assert log[-1]["bank_fill"] == 20 and log[-1]["columns"] == 3 + 3 + 40
    # Warm-up and decay count updates.
    assert [line["learning_rate"] for line in log[:3]] == pytest.approx([0.0, 5e-4, 1e-3])
    record = json.loads((folder / RUN_RECORD).read_text())
    assert (record["method"], record["seed"], record["pairs_per_update"], record["updates"]) == (
        "contaccum",
        5,
        12,
        8,
    )
    assert record["data"]["rows"] == 43 and len(record["data"]["fingerprint"]) == 64
    assert record["arguments"]["bank_size"] == 20 and record["versions"]["torch"]
    assert not (folder / "training_args.bin").exists()  # a pickle
    assert SentenceTransformer(str(folder), device="cpu").encode(["a cat"]).shape == (1, 16)


def test_drift_is_probed_and_logged_and_resumes_bit_for_bit(tmp_path):
    # 72 pairs an update: the encoder is probed at the start, and after updates 2, 4 and 6.
    settings = {
        "per_device_train_batch_size": 24,
        "bank_size": 150,
        "num_train_epochs": 3,
        "learning_rate": 3e-3,
    }
    settings |= {"data": 144, "tied": False, "drift_compensation": "mean"}
    assert_resumes(partial(make_trainer, **settings), tmp_path, 3)
    log = read_log(tmp_path / "straight")
    assert ["drift_age" in line for line in log] == [False, False, True, True, True, True]
    assert [line["bank_age"] for line in log] == [0, 1, 2, 2, 2, 2]
    for line in log[2:]:
        assert 0 < line["drift_shift_passage"] < 100 and -1 <= line["drift_cosine_query"] < 1
        assert line["drift_residual_passage"] > 0 and line["bank_mass_aged"] > 0


@pytest.mark.parametrize(
    "method", [name for name in METHODS if name != "query_side"]
)  # test_query_side_runs.py
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_every_method_trains_logs_each_update_and_leaves_out_what_scores_too_high(
    method, tied, tmp_path
):
    k = 1 if method == "in_batch" else 3
    given = {
        "data": make_pairs(24, negatives=1),
        "tied": tied,
        "method": method,
        "gradient_accumulation_steps": k,
    }
    trainer = make_trainer(tmp_path, **given)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    trainer.train()
    log = read_log(tmp_path)
    assert [(line["update"], line["pairs"]) for line in log] == [
        (i + 1, 4 * k) for i in range(6 // k)
    ]
    assert all(line["loss"] > 0 and 0.01 < line["grad_norm_ratio"] < 100 for line in log)
    assert log[-1]["bank_fill"] == (20 if method in BANK_METHODS else 0)
    assert any(
        not torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items()
    )
    # By its own scores, or by a guide's.
    given |= {"false_negative_margin": 0.0} if tied else {"guide": tiny_encoder()}
    filtering = make_trainer(tmp_path / "filtering", max_steps=1, **given)
    filtering.train()
    assert filtering.description.get_resume_settings()["size of the guide"] == (
        None if tied else 16
    )
    assert log[0]["masked"] < read_log(tmp_path / "filtering")[0]["masked"] < 1


@pytest.mark.parametrize("method", ["grad_accum", "contaccum", "grad_cache"])
def test_the_loss_knows_the_pairs_of_an_update_so_that_its_gradients_sum_to_zero(method, tmp_path):
    trainer = make_trainer(
        tmp_path, method=method, center_gradients="both", similarity="dot", max_steps=2
    )
    of_queries: list[Tensor] = []

    def watch(module: Any, given: Any, output: Any) -> None:
        embedding = output["sentence_embedding"]
        if given[0].get("task") == "query" and embedding.requires_grad:
            embedding.register_hook(lambda gradient: of_queries.append(gradient.sum(0)))

    trainer.model.register_forward_hook(watch)
    trainer.train()
    steps = len(of_queries) // 2
    assert steps == 3 and trainer.loss.info_nce.centering.num_pairs == 12
    assert torch.stack(of_queries[:steps]).sum(0).abs().max() < 1e-6 < of_queries[0].abs().max()


def test_a_run_with_a_guide_resumes_bit_for_bit_and_with_no_other(tiny_model_path, tmp_path):
    given = {**RUN_SETTINGS, "guide_margin": 0.01, "guide_margin_strategy": "relative"}
    straight = assert_resumes(partial(make_trainer, guide=tiny_encoder(), **given), tmp_path, 5)
    assert any("bank.guide" in key for key in get_state(straight))
    for other in (None, SentenceTransformer(tiny_model_path, device="cpu")):
        with pytest.raises(UserError, match="size of the guide: 16 -> "):
            make_trainer(tmp_path, guide=other, **given).train(
                str(tmp_path / "straight" / "checkpoint-5")
            )


@pytest.mark.parametrize("method", ["contaccum", "contaccum_cached"])
def test_a_run_with_several_directions_and_hardness_resumes_bit_for_bit(method, tmp_path):
    given = {
        **RUN_SETTINGS,
        "method": method,
        "max_steps": 6,
        "hardness_mode": "in_batch_negatives",
        "hardness_strength": 2,
    }
    given |= {"directions": ["query_to_doc", "query_to_query", "doc_to_query"]}
    assert_resumes(partial(make_trainer, **given), tmp_path, 3)


def test_logged_loss_is_that_of_local_rows_and_trackers_get_every_number(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trainer = make_trainer(tmp_path, logging_steps=1, report_to="tensorboard")
    local: list[float] = []
    trainer.loss.register_forward_hook(
        lambda *_: local.append(trainer.loss.last["local_loss"].item())
    )
    trainer.train()
    expected = [sum(local[i : i + 3]) / 3 for i in range(0, len(local), 3)]
    log = read_log(tmp_path)
    assert [line["loss"] for line in log] == pytest.approx(expected, rel=1e-5)
    (file,) = tmp_path.rglob("events.out.tfevents.*")
    events = EventAccumulator(str(file))
    events.Reload()
    for key in ("bank_fill", "bank_mass", "embedding_spread", "grad_norm_ratio"):
        assert [x.value for x in events.Scalars(f"train/{key}")] == pytest.approx(
            [line[key] for line in log]
        ), key
    assert "train/loss" in events.Tags()["scalars"]


def test_trains_in_bf16_with_a_bank_in_float32(tmp_path):
    trainer = make_trainer(tmp_path, 24, False, bf16=True)
    trainer.train()
    assert all(
        math.isfinite(line["loss"]) and line["grad_norm_query"] > 0 for line in read_log(tmp_path)
    )
    assert next(iter(trainer.bank_losses())).info_nce.bank.passages.dtype == torch.float32


def test_prompts_and_lengths_of_the_model_are_used_in_training(tmp_path):
    lengths = {"query_max_length": 6, "passage_max_length": 20}
    model = tiny_encoder(query_prompt="what is ", passage_prompt="the ", **lengths)
    batch = next(iter(make_trainer(tmp_path, 8, model=model).get_train_dataloader()))
    assert model.tokenizer.decode(batch["query_input_ids"][0]).startswith("[CLS] what is ")
    assert model.tokenizer.decode(batch["positive_input_ids"][0]).startswith("[CLS] the ")
    assert batch["query_input_ids"].shape[1] == 6 < batch["positive_input_ids"].shape[1] <= 20


@pytest.mark.parametrize("rows", [4, "auto"])
def test_a_score_column_of_a_plain_data_set_is_distilled(tmp_path, rows):
    data = make_pairs(12, negatives=1).add_column("scores", [[2.0, float(i)] for i in range(12)])
    given = {
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": 1,
        "total_train_batch_size": 12,
    }
    make_trainer(tmp_path, data, distill="margin_mse", max_steps=1, **given).train()
    (line,) = read_log(tmp_path)
    assert line["pairs"] == 12 and line["distill_loss"] > 1 and line["loss"] < 5
    with pytest.raises(ConfigError, match="distill=kl with no hard negatives in the training data"):
        make_trainer(tmp_path, make_pairs(12), distill="kl")


def test_data_that_cannot_train_is_refused(tmp_path):
    with pytest.raises(
        ConfigError, match="has only the column 'query': it needs a query and a positive"
    ):
        make_trainer(tmp_path, Dataset.from_dict({"query": ["a"]}))
    alone = {"method": "grad_accum", "per_device_train_batch_size": 1}
    with pytest.raises(ConfigError, match="per_device_train_batch_size=1 and no hard negatives"):
        make_trainer(tmp_path, **alone)
    make_trainer(tmp_path, make_pairs(12, 1), **alone)


def test_parameters_that_no_embedding_depends_on_are_frozen(tmp_path):
    for tied in (True, False):
        model = tiny_encoder(tied).train()
        make_trainer(tmp_path, model=model)
        frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
        assert (
            len(frozen) == (2 if tied else 4)
            and all("pooler" in name for name in frozen)
            and model.training
        )


def test_collapse_is_warned_of_once_within_three_updates(caplog):
    watch = CollapseWatch()
    learning = [{"update": i, "loss": 1.0, "columns": 32} for i in range(3)]
    collapsed = [{"update": i, "loss": 3.46, "columns": 32, "bank_age": 7} for i in range(3, 9)]
    found = [watch.observe(record) for record in learning + collapsed]
    assert [len(lines) for lines in found] == [0] * 5 + [1] + [0] * 3
    assert "the loss is back at 3.46, a random guess among 32 columns" in found[5][0]


def test_what_goes_to_the_hub_is_the_model_with_a_card_that_says_what_it_is_and_no_credential(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("MY_API_TOKEN", "hush-hush-12345")
    uploads: list[set[str]] = []

    def upload(api, repo_id, folder_path, **about):
        found = [path for path in Path(folder_path).rglob("*") if path.is_file()]
        uploads.append({str(path.relative_to(folder_path)) for path in found})
        assert str(tmp_path) not in "".join(
            path.read_text() for path in found if path.suffix in (".json", ".md")
        )
        return SimpleNamespace(commit_url=f"https://hub/{repo_id}")

    monkeypatch.setattr(
        HfApi, "create_repo", lambda api, repo_id, **about: SimpleNamespace(repo_id=repo_id)
    )
    monkeypatch.setattr(HfApi, "upload_folder", upload)
    record = {"sets": {"faq": {"path": str(tmp_path / "faq.csv")}}}
    model = tiny_encoder()
    model.transformers_model.config._name_or_path = "someone/base"
    given = {
        "data_record": record,
        "hub_model_id": "me/mine",
        "run_name": "hush-hush-12345",
        **SAVE_EVERY_UPDATE,
    }
    trainer = make_trainer(tmp_path / "run", 12, model=model, **given)
    trainer.train()
    assert trainer.push_to_hub() == "https://hub/me/mine" and len(uploads) == 1
    assert {"README.md", "model.safetensors", "modules.json"} <= uploads[0]
    assert not [
        name
        for name in uploads[0]
        if re.search(r"bank|checkpoint|log|run\.json|optimizer|\.bin", name)
    ]
    trainer.save_model()
    card = (tmp_path / "run" / "README.md").read_text()
    wanted = [
        "# base trained on faq",
        "finetuned from [someone/base]",
        "method `contaccum`, 12 pairs per update",
    ]
    wanted += [
        "`bank_size=20`, `drift_compensation=auto`",
        'SentenceTransformer("me/mine")',
        "2406.12356",
    ]
    assert [text for text in wanted if text not in card] == []
    texts = [path for path in tmp_path.rglob("*") if path.suffix in (".json", ".md", ".jsonl")]
    assert len(texts) > 10
    assert [path.name for path in texts if "hush-hush-12345" in path.read_text()] == []


def test_matryoshka_dims_keep_a_bank_for_each_size_and_train_as_the_wrapped_loss_does(tmp_path):
    straight = assert_resumes(partial(make_trainer, matryoshka_dims=[8, 16]), tmp_path, 2)
    assert {int(size) for size in next(iter(straight.bank_losses())).info_nces} == {8, 16}
    model = tiny_encoder()
    loss = MatryoshkaLoss(model, ContAccumLoss(model, bank_size=20), [16, 8])
    wrapped = make_trainer(tmp_path / "wrapped", model=model, loss=loss)
    wrapped.train()
    assert list_differences(get_state(straight), get_state(wrapped)) == []
    with pytest.raises(ConfigError, match="have 16 dimensions"):
        make_trainer(tmp_path / "more", matryoshka_dims=[32])


@pytest.mark.long
@pytest.mark.parametrize("tied", [True, False])
def test_a_compiled_model_trains_as_one_that_is_not(tmp_path, tied):
    runs = []
    for compiled in ({}, {"torch_compile": True, "torch_compile_backend": "aot_eager"}):
        folder = tmp_path / str(len(runs))
        trainer = make_trainer(folder, 36, tied, **compiled)
        trainer.train()
        trainer.save_model(str(folder / "saved"))
        SentenceTransformer(str(folder / "saved"), device="cpu")
        runs.append(read_log(folder))
    for plain, fast in zip(*runs, strict=True):
        for key in ("loss", "grad_norm_query", "grad_norm_passage", "grad_norm_ratio", "bank_fill"):
            assert fast[key] == pytest.approx(plain[key], rel=1e-4), key


def test_a_route_that_only_the_training_data_reach_is_trained(tmp_path):
    """Positives take a third route; the poolers, which no embedding depends on, are frozen in every route that runs."""
    encoders = {task: tiny_encoder(tied=True) for task in ("query", "document", "summary")}
    router = Router({task: [encoder[0], encoder[1]] for task, encoder in encoders.items()})
    model = SentenceTransformer(modules=[router], device="cpu")
    mapping = {"query": "query", "positive": "summary"}
    trainer = make_trainer(tmp_path, model=model, router_mapping=mapping)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer.train()
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert {name.split(".")[2] for name in moved} == {"query", "summary"}
    assert len(frozen) == 4 and all(".pooler." in name for name in frozen)
    assert {name.split(".")[2] for name in frozen} == {"query", "summary"}


@pytest.mark.parametrize("rows", [43, 41])
def test_the_last_update_of_an_epoch_is_centred_over_its_own_pairs(tmp_path, rows):
    """Updates of 12 pairs, but the last of the epoch: of 7 or of 5, in two micro-batches of which the last is short."""
    trainer = make_trainer(tmp_path, data=rows, center_gradients="both", num_train_epochs=2)
    announced = []
    begin_update = ContAccumLoss.begin_update
    trainer.loss.begin_update = lambda pairs: (
        announced.append(pairs),
        begin_update(trainer.loss, pairs),
    )
    trainer.train()
    last = rows % 12
    assert announced == [12, 12, 12, last] * 2
    assert trainer.loss.info_nce.centering.num_pairs == last
    assert [line["pairs"] for line in read_log(tmp_path)] == announced


def test_of_several_losses_each_is_announced_the_pairs_of_its_own_data_set(tmp_path):
    data = DatasetDict(one=make_pairs(20), two=make_pairs(16))
    model = tiny_encoder()
    losses = {name: ContAccumLoss(model, bank_size=16) for name in data}
    trainer = make_trainer(tmp_path, data=data, model=model, loss=losses)
    announced: dict[str, list[int]] = {name: [] for name in data}
    trained: dict[str, list[int]] = {name: [] for name in data}
    for name, loss in losses.items():

        def begin_update(pairs: int, name: str = name) -> None:
            announced[name].append(pairs)
            trained[name].append(0)

        def count_pairs(module: Any, inputs: Any, output: Any, name: str = name) -> None:
            trained[name][-1] += 4

        loss.begin_update = begin_update
        loss.register_forward_hook(count_pairs)
    trainer.train()
    assert announced == trained
    assert {name: sum(counts) for name, counts in trained.items()} == {"one": 20, "two": 16}
