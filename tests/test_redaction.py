"""Removal of credentials."""

from pathlib import Path

import pytest

from contaccum.files import read_json, write_json
from contaccum.redaction import redact

SECRETS = {
    "HF_TOKEN": "hf_QwErTyUiOpAsDfGhJk",
    "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567",
    "PGPASSWORD": "staple-horse-battery",
    "SOME_CLIENT_SECRET": "planted-client-secret",
}
URL = "https://someone:planted-url-password@example.org/data"


@pytest.mark.parametrize("name", SECRETS)
def test_write_json_removes_credentials_at_any_depth(name, monkeypatch, tmp_path):
    monkeypatch.setenv(name, SECRETS[name])
    content = {
        "a": [f"--token={SECRETS[name]}!", {"b": [URL, 3, None]}],
        SECRETS[name]: str(Path(URL)),
    }
    write_json(tmp_path / "run.json", content)
    # A path makes one slash of two.
    expected = {"b": ["https://***@example.org/data", 3, None]}, "https:/***@example.org/data"
    assert read_json(tmp_path / "run.json") == {
        "a": [f"--token=<{name}>!", expected[0]],
        f"<{name}>": expected[1],
    }


@pytest.mark.parametrize(
    "user", ["me:p@planted", "me:@", "me:p'lan\"ted", "me:p?lan#ted", "planted@token", "me:"]
)
def test_a_url_is_cut_up_to_the_last_at_sign_before_the_path(user):
    text = f"https://{user}@example.org:80/a@b: no answer"
    assert redact(text) == "https://***@example.org:80/a@b: no answer"
    for scheme in ("https://", "//", "https:/", "x+y://", "1s://"):
        assert redact(f"see {scheme}{user}@example.org") == f"see {scheme}***@example.org"


@pytest.mark.parametrize(
    "key",
    ["token", "api_key", "apikey", "key", "X-Amz-Signature", "accessToken", "PASSWORD", "sig"],
)
@pytest.mark.parametrize("value", ["planted", "pla?nted@/%0A=="])
def test_a_key_in_the_query_of_a_url_is_cut(key, value):
    for start in ("https://a.org/v1?", "https://a.org?a=b&", "//a.org/#", "s3://a/b?x&amp;"):
        assert redact(f"{start}{key}={value}&n=2") == f"{start}{key}=***&n=2"
        assert redact(f'"{start}{key}={value}", 1') == f'"{start}{key}=***", 1'


def test_values_that_are_no_credentials_are_kept(monkeypatch, tmp_path):
    # A short value would also occur in ordinary texts.
    monkeypatch.setenv("SHORT_KEY", "cat")
    # This is the path of a key, not a key.
    monkeypatch.setenv("SSH_KEY", str(tmp_path))
    monkeypatch.setenv("KEYBOARD_LAYOUT", "layout-of-keys")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "parallelism")
    text = f"the cat sat on {tmp_path}, layout-of-keys, parallelism, "
    text += "https://example.org/a@b, mail me@example.org or https://a.org: b@c, http://a:80/b@c, "
    text += "https://a.org/?keyword=x&tokenizer=y&page=2, C://a, a//b:c@d, // see: a@b, http://a:80"
    text += "\n\n@misc{a, title = {b}}"
    assert redact(text) == text
