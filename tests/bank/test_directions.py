"""Hardness, directions and a learned temperature, against the dense loss and sentence-transformers' own, in float64."""

from typing import Any

import pytest
import torch
from dense_reference import errors
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.util import cos_sim, dot_score
from test_info_nce import ALL, BOTH, EVERY, HARD, IN_BATCH, leaves
from torch import Tensor

from contaccum import BankedInfoNCE
from contaccum.errors import ConfigError

PUBLISHED: dict[str, dict[str, Any]] = {
    "plain": {},
    "in-batch negatives": IN_BATCH,
    "hard negatives": HARD,
    "all negatives": EVERY,
    "symmetric": {"directions": BOTH, "partition_mode": "per_direction"},
    "joint": {"directions": BOTH, **IN_BATCH},
    "GTE": {"directions": ALL},
    "GTE, penalised": {"directions": ALL, **HARD},
}


def draw(n: int, h: int, generator: torch.Generator) -> list[Tensor]:
    """Queries (n, 8), passages near them, hard negatives (n, h, 8)."""
    queries, passages, negatives = (
        torch.randn(*x, 8, generator=generator, dtype=torch.float64) for x in ((n,), (n,), (n, h))
    )
    return [queries, passages + queries, *([negatives + 0.5 * queries[:, None]] if h else [])]


def learned(settings: dict[str, Any], scale: float = 20.0, bank_size: int = 0) -> BankedInfoNCE:
    """With the scale in float64 as well."""
    loss_fn = BankedInfoNCE(bank_size, temperature=1 / scale, learn_temperature=True, **settings)
    loss_fn.log_scale = torch.nn.Parameter(torch.tensor(scale, dtype=torch.float64).log())
    return loss_fn


@pytest.mark.parametrize("drift", ["none", "auto"])
@pytest.mark.parametrize("similarity", [cos_sim, dot_score])
@pytest.mark.parametrize(
    ("rows", "n", "h", "scale"), [(4, 4, 2, 1), (12, 3, 2, 20), (64, 4, 0, 20), (200, 40, 1, 1), (512, 128, 1, 20)]
)
@pytest.mark.parametrize("setting", PUBLISHED)
def test_accumulated_gradient_equals_full_batch_when_nothing_drifts(setting, rows, n, h, scale, similarity, drift):
    """And the loss: those of sentence-transformers. With ``auto``, entries lie beside means that are far from zero."""
    generator = torch.Generator().manual_seed(rows)
    tensors, given = draw(rows, h, generator), PUBLISHED[setting]
    kind = "cos" if similarity is cos_sim else "dot"
    loss_fn = learned({**given, "similarity": kind, "drift_compensation": drift}, scale, rows - n)
    texts = draw(4, 0, generator)
    loss_fn.observe_probe(*texts)
    loss_fn.observe_probe(texts[0] + 0.7, texts[1] - 0.4)
    ours, dense, value = leaves(tensors), leaves(tensors), 0.0
    for step in range(2 * rows // n):
        part = slice(step * n % rows, step * n % rows + n)
        loss = loss_fn(*(x[part] for x in ours))
        if step >= rows // n:
            (loss * n / rows).backward()
            value += loss_fn.last["local_loss"].item() * n / rows
    log_scale = torch.tensor(float(scale), dtype=torch.float64).log().requires_grad_()
    theirs = MultipleNegativesRankingLoss(None, scale, similarity, **given)
    # Its own masks are -inf, which it multiplies by the scale: a gradient of NaN for the scale.
    theirs.scale = scale if given.get("directions") == ALL else log_scale.exp()
    columns = [dense[0], dense[1], *(dense[2].unbind(1) if h else ())]
    expected = theirs.compute_loss_from_embeddings(columns, None)
    expected.backward()
    assert value == pytest.approx(expected.item(), abs=1e-12, rel=1e-12)
    assert errors(loss, ours, expected, dense)[1] <= 1e-12
    if log_scale.grad is not None:
        assert loss_fn.log_scale.grad.item() == pytest.approx(log_scale.grad.item(), abs=1e-10, rel=1e-10)


def test_a_state_fits_no_other_settings_and_a_scale_stays_below_a_hundred():
    given = {"directions": ALL, "similarity": "cos", **HARD}
    straight = learned(given, 99.999, 7)
    for step in range(6):
        straight(*leaves(draw(3, step % 3, torch.Generator().manual_seed(step)))).backward()
        straight.log_scale.data += 0.1
    assert straight.last["temperature"].item() == pytest.approx(0.01, rel=1e-9)
    state = straight.state_dict()
    learned(given, 9.0, 7).load_state_dict(state)
    changes = ({"directions": BOTH}, {"hardness_mode": None, "hardness_strength": 0.0})
    for other in (*(learned({**given, **change}, 99.0, 7) for change in changes), BankedInfoNCE(7, **given)):
        with pytest.raises(ConfigError, match="directions, hardness_mode or learn_temperature"):
            other.load_state_dict(state)
