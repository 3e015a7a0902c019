"""Settings of the loss: a value out of range is refused with the name of the setting."""

from __future__ import annotations

import pytest

from contaccum import BankedInfoNCE
from contaccum.bank.settings import LossSettings
from contaccum.errors import ConfigError


@pytest.mark.parametrize(
    ("message", "settings"),
    [
        ("bank_size", {"bank_size": -1}),
        ("query_bank_size", {"bank_size": 4, "query_bank_size": 2}),
        ("temperature", {"temperature": 0.0}),
        ("bank_weight", {"bank_weight": 0.0}),
        ("similarity", {"similarity": "euclidean"}),
    ],
)
def test_a_setting_that_cannot_work_is_refused(message, settings):
    with pytest.raises(ConfigError, match=message):
        BankedInfoNCE(**settings)


def test_a_loss_holds_the_settings_that_it_was_made_with():
    settings = LossSettings(bank_size=8, temperature=0.05, normalize_by="all")
    assert BankedInfoNCE.from_settings(settings).settings == settings
    assert BankedInfoNCE(bank_size=8, temperature=0.05, normalize_by="all").settings == settings
    assert BankedInfoNCE().settings == LossSettings()
