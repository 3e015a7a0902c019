"""CorpusEncoder refuses wrong settings before it creates a store."""

import pytest
from small_data import write_lines
from tiny_models import tiny_encoder

from contaccum.errors import ConfigError
from contaccum.retrieval.corpus import CorpusEncoder


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "bfloat16"}, "dtype must be one of"),
        ({"precision": "bf16"}, "precision must be one of"),
        ({"shard_size": 0}, "shard_size must be at least 1"),
    ],
)
def test_wrong_settings_are_refused_before_the_store_is_created(tmp_path, settings, message):
    corpus = write_lines(tmp_path / "corpus.jsonl", [{"_id": "d0", "text": "a text"}])
    with pytest.raises(ConfigError, match=message):
        CorpusEncoder(tiny_encoder(), "tiny", corpus, tmp_path / "store", **settings)
    assert not (tmp_path / "store").exists()
