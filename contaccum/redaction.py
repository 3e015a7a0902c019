"""Removal of credentials from texts that are written or shown."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from contaccum.errors import ConfigError

KEY_VARIABLE = "CONTACCUM_ENDPOINT_KEY"
"""Environment variable with the key of a server, which is sent as a bearer token."""
_CREDENTIAL_NAME = re.compile(
    r"(?:^|_)(?:TOKEN|KEY|SECRET|PASSWORD|PASSWD|PASSPHRASE)(?:_|$)|PASSWORD$|APIKEY$", re.I
)
"""Names of environment variables with credentials, such as HF_TOKEN or AWS_SECRET_ACCESS_KEY."""
_MIN_CREDENTIAL_LENGTH = 8
# User and password in a URL, as in https://user:password@host or //user:password@host, where both
# have neither slashes nor blanks. Path() shortens "https://" to "https:/", so one slash is enough
# after a scheme.
_USER_IN_URL = re.compile(r"((?<=[a-z0-9+.-][a-z0-9+.-]:)/{1,2}|(?<![:/\w])//)[^\s/]+@", re.I)
# A key in the query of a URL, such as ?token=..., &api_key=... or &X-Amz-Signature=..., up to the
# next parameter or quote.
_KEY_IN_URL = re.compile(
    r"([?&;#](?:[\w.%-]*(?:token|key|secret|password|passwd|passphrase|signature|credentials?|jwt)"
    r"|pwd|pass|sig|auth|authorization|bearer|code|sas)=)[^&#\s\"'<>]+",
    re.I,
)


def redact(content: Any) -> Any:
    """Return a text, or all texts in dicts (keys too), lists and tuples, without credentials.

    If the name of an environment variable looks like that of a credential, such as HF_TOKEN, its
    value is replaced by ``<HF_TOKEN>`` everywhere. User and password in a URL, and the values of
    keys in its query such as ``?token=``, become ``***``. The markup of a page stays.
    """
    credentials = []
    for name, value in os.environ.items():
        # A short value may also be a part of ordinary text. A path is not a credential itself: it
        # names the file in which the credential is stored.
        is_long = len(value) >= _MIN_CREDENTIAL_LENGTH
        if is_long and _CREDENTIAL_NAME.search(name) and not os.path.exists(value):
            credentials.append((name, value))
    # A long value may contain a short one, so it is replaced first.
    credentials.sort(key=lambda credential: len(credential[1]), reverse=True)
    return _redact(content, credentials)


def refuse_credentials(options: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if an option is a token, or contains what `redact` removes."""
    has_token_option = any(key.endswith("_token") for key in options)
    if has_token_option or redact(dict(options)) != dict(options):
        raise ConfigError(
            "an option contains a credential, and options are written to files: put it into the "
            "environment"
        )


def read_endpoint_key() -> str:
    """Return the key of a server from the environment; "" without one.

    Raises `ConfigError` for characters that no key has: an HTTP library's error would show the key.
    """
    key = os.environ.get(KEY_VARIABLE, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(f"{KEY_VARIABLE} has characters that no key has: copy the key again")
    return key


def _redact(content: Any, credentials: list[tuple[str, str]]) -> Any:
    if isinstance(content, dict):
        items = content.items()
        return {_redact(key, credentials): _redact(value, credentials) for key, value in items}
    if isinstance(content, (list, tuple)):
        return type(content)(_redact(item, credentials) for item in content)
    if not isinstance(content, str) or hasattr(content, "__html__"):  # Jinja's Markup is a str
        return content
    for name, value in credentials:
        content = content.replace(value, f"<{name}>")
    # Keys first: the value of a key may hold an @, and so look like a user.
    return _USER_IN_URL.sub(r"\1***@", _KEY_IN_URL.sub(r"\1***", content))
