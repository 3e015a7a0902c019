"""The pull request for sentence-transformers: its own tests, and that its loss is ours."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sample_texts import sentences
from sentence_transformers.sentence_transformer import losses
from sentence_transformers.util import cos_sim, dot_score
from tiny_models import tiny_encoder
from torch import Tensor

from contaccum import BankedInfoNCE, ContAccumLoss

UPSTREAM = Path(__file__).parents[1] / "upstream" / "sentence-transformers"
TASKS = ("query", "document", "document")
sys.path.insert(0, str(UPSTREAM))

import banked_multiple_negatives_ranking as banked  # noqa: E402

# As if the file were where the pull request puts it.
sys.modules[f"{losses.__name__}.{banked.__name__}"] = losses.banked_multiple_negatives_ranking = (
    banked
)
losses.BankedMultipleNegativesRankingLoss = banked.BankedMultipleNegativesRankingLoss

from test_banked_multiple_negatives_ranking import *  # noqa: E402, F403


def batches(
    count: int, n: int, h: int, dtype: torch.dtype
) -> Iterator[tuple[list[Tensor], Tensor]]:
    """Embeddings (n, d) of 2 + h columns, and int64 ids of which some come again."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(count):
        embeddings = [torch.randn(n, 12, generator=generator, dtype=dtype) for _ in range(2 + h)]
        yield embeddings, torch.randint(300, (n, 2 + h), generator=generator)


def loss_and_gradient(loss_fn: Any, embeddings: list[Tensor], ids: Tensor) -> Tensor:
    leaves = [x.clone().requires_grad_() for x in embeddings]
    if isinstance(loss_fn, BankedInfoNCE):
        negatives = torch.stack(leaves[2:], 1) if len(leaves) > 2 else None
        loss = loss_fn(
            *leaves[:2], negatives, ids[:, 0], ids[:, 1], ids[:, 2:] if len(leaves) > 2 else None
        )
    else:
        loss = loss_fn.compute_loss_from_embeddings(leaves, ids=ids)
    loss.backward()
    return torch.cat([loss.detach()[None], *(x.grad.flatten() for x in leaves)])


@pytest.mark.parametrize(("similarity", "h"), [("cos", 0), ("dot", 1)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-6)])
@pytest.mark.parametrize(
    ("bank_size", "n", "count"), [(1000, 40, 26), (1024, 128, 10)], ids=["until full", "wrapped"]
)
def test_its_loss_and_gradient_are_ours(bank_size, n, count, dtype, tolerance, similarity, h):
    """Until the bank is full; and beyond, where micro-batches are whole blocks of ours, which it forgets at once."""
    scale = 20.0 if similarity == "cos" else 0.5
    settings: dict[str, Any] = {"drift_compensation": "none", "center_gradients": "none"}
    ours = BankedInfoNCE(bank_size, similarity=similarity, temperature=1 / scale, **settings)  # type: ignore[arg-type]
    similarity_fct = cos_sim if similarity == "cos" else dot_score
    theirs = banked.BankedMultipleNegativesRankingLoss(
        torch.nn.Linear(1, 1), bank_size, scale, similarity_fct, drift_compensation=False
    )
    for embeddings, ids in batches(count, n, h, dtype):
        used = 0 if ours.bank is None else ours.bank.in_use
        assert used == (0 if theirs._bank is None else len(theirs._bank.queries))
        mine, found = (
            loss_and_gradient(ours, embeddings, ids),
            loss_and_gradient(theirs, embeddings, ids),
        )
        assert ((mine - found).norm() / mine.norm()).item() < tolerance
    assert used == bank_size


def test_while_a_model_trains_it_is_our_loss_that_moves_entries():
    """With texts, updates and a probe: both notice and measure the same."""
    model = tiny_encoder(tied=False).double()
    ours = ContAccumLoss(model, bank_size=256, drift_compensation="mean", center_gradients="none")
    theirs = banked.BankedMultipleNegativesRankingLoss(model, bank_size=256, max_drift=None)
    parameters = [p for name, p in model.named_parameters() if "pooler" not in name]
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    for step in range(14):
        # Of four words the queries, of seven the others; from step 8 on some come again.
        columns = [sentences(32, step % 8 * 3 + i, 4 + 3 * min(i, 1)) for i in range(3)]
        results = []
        for loss_fn in (ours, theirs):
            model.zero_grad()
            loss = loss_fn(
                [model.preprocess(x, task=t) for x, t in zip(columns, TASKS, strict=True)]
            )
            loss.backward()
            results.append(
                torch.cat([loss.detach()[None], *(p.grad.flatten() for p in parameters)])
            )
        assert ((results[0] - results[1]).norm() / results[0].norm()).item() < 1e-10
        if step % 2:
            optimizer.step()
    assert (
        ours.info_nce is not None and ours.info_nce.bank is not None and theirs._shifts is not None
    )
    assert ours.info_nce.clock.num_updates == theirs._update == 6
    assert ours.info_nce.bank.in_use == len(theirs._bank.queries)
    assert theirs._shifts[0].norm(dim=1).min() > 0.1


@pytest.mark.long
def test_the_dry_run_of_its_experiment_records_what_it_takes_to_repeat_it(tmp_path):
    import experiment_gooaq

    output = tmp_path / "dry_run.json"
    argv = ["--output_file", str(output), "--dry_run", "--seeds", "0"]
    experiment_gooaq.main([*argv, "--methods", "plain_small"])
    first = json.loads(output.read_text())
    experiment_gooaq.main(argv)
    report = json.loads(output.read_text())
    plain, large, cached, with_bank = report["runs"]
    methods = [x["method"] for x in report["summary"]]
    assert [plain] == first["runs"] and methods == [
        "plain_small",
        "cached_large",
        "cached_small",
        "banked_small",
    ]
    assert plain["train_loss"] == pytest.approx(cached["train_loss"], abs=1e-4)
    assert large["updates"] == plain["updates"] == with_bank["updates"] == 4
    assert with_bank["loss"]["bank_size"] == 64 and report["versions"]["torch"] == torch.__version__
    assert len(report["data"]["sha256"]) == 64 and all(0 < x["ndcg@10"] < 1 for x in report["runs"])
    with pytest.raises(SystemExit, match="other settings"):
        experiment_gooaq.main([*argv, "--bank_size", "32"])
