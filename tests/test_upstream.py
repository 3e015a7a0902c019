"""The loss for sentence-transformers: its own tests, and its equality with contaccum's losses."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from sample_texts import sentences
from sentence_transformers.sentence_transformer import losses
from sentence_transformers.util import cos_sim, dot_score
from tiny_models import tiny_encoder
from torch import Tensor

from contaccum import BankedInfoNCE, ContAccumLoss

UPSTREAM = Path(__file__).parents[1] / "upstream" / "sentence-transformers"
sys.path.insert(0, str(UPSTREAM))

import banked_multiple_negatives_ranking as banked  # noqa: E402

# Register the module under the name that it has after the pull request, because its tests import it
# by this name.
sys.modules[f"{losses.__name__}.{banked.__name__}"] = banked
losses.banked_multiple_negatives_ranking = banked
losses.BankedMultipleNegativesRankingLoss = banked.BankedMultipleNegativesRankingLoss

from test_banked_multiple_negatives_ranking import *  # noqa: E402, F403


def make_batches(
    num_batches: int, batch_size: int, num_negatives: int, dtype: torch.dtype
) -> Iterator[tuple[list[Tensor], Tensor]]:
    """Yield random embeddings (n, d) of all columns, and their int64 ids (n, columns).

    There are only 300 different ids, so that some texts are duplicates.
    """
    generator = torch.Generator().manual_seed(3)
    num_columns = 2 + num_negatives
    for _ in range(num_batches):
        embeddings = []
        for _ in range(num_columns):
            embeddings.append(torch.randn(batch_size, 12, generator=generator, dtype=dtype))
        yield embeddings, torch.randint(300, (batch_size, num_columns), generator=generator)


def call_our_loss(loss_fn: BankedInfoNCE, embeddings: list[Tensor], ids: Tensor) -> Tensor:
    queries, passages, *negatives = embeddings
    if not negatives:
        return loss_fn(queries, passages, None, ids[:, 0], ids[:, 1], None)
    return loss_fn(queries, passages, torch.stack(negatives, 1), ids[:, 0], ids[:, 1], ids[:, 2:])


def call_upstream_loss(
    loss_fn: banked.BankedMultipleNegativesRankingLoss, embeddings: list[Tensor], ids: Tensor
) -> Tensor:
    return loss_fn.compute_loss_from_embeddings(embeddings, ids=ids)


def compute_loss_and_gradients(
    compute_loss: Callable[[list[Tensor]], Tensor], embeddings: list[Tensor]
) -> Tensor:
    """Return the loss and the gradients of all embeddings as one vector."""
    leaves = [column.clone().requires_grad_() for column in embeddings]
    loss = compute_loss(leaves)
    loss.backward()
    return torch.cat([loss.detach()[None], *(leaf.grad.flatten() for leaf in leaves)])


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize(("similarity", "num_negatives"), [("cos", 0), ("dot", 1)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-6)])
@pytest.mark.parametrize(
    ("bank_size", "batch_size", "num_batches"),
    [(1000, 40, 26), (1024, 128, 10)],
    ids=["until full", "wrapped"],
)
def test_loss_and_gradients_equal_banked_info_nce(
    bank_size, batch_size, num_batches, dtype, tolerance, similarity, num_negatives
):
    """The losses are equal until the bank is full.

    After that they are equal if a micro-batch is a whole number of blocks, because contaccum's bank
    overwrites whole blocks.
    """
    scale = 20.0 if similarity == "cos" else 0.5
    ours = BankedInfoNCE(
        bank_size,
        similarity=similarity,
        temperature=1 / scale,
        drift_compensation="none",
        center_gradients="none",
    )
    upstream = banked.BankedMultipleNegativesRankingLoss(
        torch.nn.Linear(1, 1),
        bank_size,
        scale,
        cos_sim if similarity == "cos" else dot_score,
        drift_compensation=False,
    )
    for embeddings, ids in make_batches(num_batches, batch_size, num_negatives, dtype):
        num_banked = 0 if ours.bank is None else ours.bank.in_use
        num_banked_upstream = 0 if upstream._bank is None else len(upstream._bank.queries)
        assert num_banked == num_banked_upstream
        expected = compute_loss_and_gradients(
            lambda leaves, ids=ids: call_our_loss(ours, leaves, ids), embeddings
        )
        actual = compute_loss_and_gradients(
            lambda leaves, ids=ids: call_upstream_loss(upstream, leaves, ids), embeddings
        )
        assert relative_error(actual, expected) < tolerance
    assert num_banked == bank_size


def test_loss_and_gradients_equal_contaccum_loss_while_a_model_trains():
    """Both losses notice the same optimizer updates and measure the same mean shifts."""
    model = tiny_encoder(tied=False).double()
    ours = ContAccumLoss(model, bank_size=256, drift_compensation="mean", center_gradients="none")
    upstream = banked.BankedMultipleNegativesRankingLoss(model, bank_size=256, max_drift=None)
    parameters = [p for name, p in model.named_parameters() if "pooler" not in name]
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    for step in range(14):
        seed = step % 8 * 3  # from step 8 on, texts are repeated
        queries = sentences(32, seed, 4)
        positives = sentences(32, seed + 1, 7)
        negatives = sentences(32, seed + 2, 7)
        results = []
        for loss_fn in (ours, upstream):
            model.zero_grad()
            features = [
                model.preprocess(queries, task="query"),
                model.preprocess(positives, task="document"),
                model.preprocess(negatives, task="document"),
            ]
            loss = loss_fn(features)
            loss.backward()
            gradients = [parameter.grad.flatten() for parameter in parameters]
            results.append(torch.cat([loss.detach()[None], *gradients]))
        assert relative_error(results[1], results[0]) < 1e-10
        if step % 2:
            optimizer.step()
    assert ours.info_nce is not None
    assert ours.info_nce.bank is not None
    assert upstream._mean_shifts is not None
    assert ours.info_nce.clock.num_updates == upstream._num_updates == 6
    assert ours.info_nce.bank.in_use == len(upstream._bank.queries)
    assert upstream._mean_shifts[0].norm(dim=1).min() > 0.1


@pytest.mark.long
def test_experiment_dry_run_records_settings_data_and_versions(tmp_path):
    import experiment_gooaq

    output = tmp_path / "dry_run.json"
    argv = ["--output_file", str(output), "--dry_run", "--seeds", "0"]
    experiment_gooaq.main([*argv, "--methods", "plain_small"])
    first_report = json.loads(output.read_text())
    experiment_gooaq.main(argv)
    report = json.loads(output.read_text())

    plain, large, cached, with_bank = report["runs"]
    assert first_report["runs"] == [plain]
    methods = [row["method"] for row in report["summary"]]
    assert methods == ["plain_small", "cached_large", "cached_small", "banked_small"]
    assert plain["train_loss"] == pytest.approx(cached["train_loss"], abs=1e-4)
    assert large["updates"] == plain["updates"] == with_bank["updates"] == 4
    assert with_bank["loss"]["bank_size"] == 64
    assert report["versions"]["torch"] == torch.__version__
    assert len(report["data"]["sha256"]) == 64
    assert all(0 < run["ndcg@10"] < 1 for run in report["runs"])
    with pytest.raises(SystemExit, match="other settings"):
        experiment_gooaq.main([*argv, "--bank_size", "32"])
