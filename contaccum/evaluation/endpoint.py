"""Client of an OpenAI-compatible embedding server (``POST /v1/embeddings``).

Texts are sent as they are: `endpoint_check` puts the prompts before them, and compares the
embeddings.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import numpy as np
import requests
from requests.adapters import HTTPAdapter
from tqdm import tqdm
from urllib3.exceptions import MaxRetryError
from urllib3.util import Retry

from contaccum.data.records import quoted
from contaccum.errors import ConfigError, UserError
from contaccum.files import redact

KEY_VARIABLE = "CONTACCUM_ENDPOINT_KEY"
"""Environment variable with the API key of the server."""

BACKOFF_SECONDS = 0.5
"""Unit of the pauses before retries: 0, 1, 2, 4 and 8 seconds; see `urllib3.util.Retry`."""

_MAX_RETRIES = 5
_RETRIED_STATUSES = (429, 500, 502, 503, 504)
# Timeouts of connecting to the server, and of waiting for its answer.
_CONNECT_SECONDS = 10
_ANSWER_SECONDS = 300
_MAX_QUOTED_LENGTH = 200  # characters of an answer in an error message


class EmbeddingEndpoint:
    """Client of one embedding server.

    A request is sent again after a connection error, and after the statuses 429, 500, 502, 503 and
    504, up to five times. If the environment variable `KEY_VARIABLE` is set, its value is sent as a
    bearer token.

    Args:
        url: base URL of the server, or the URL with ``/v1`` or ``/v1/embeddings`` at its end.
        model_name: name of the model in requests.
        dimension: expected dimension d of the embeddings.
        batch_size: texts per request.
        show_progress: show a progress bar.
        request_fields: further fields of each request, such as ``truncate_prompt_tokens``.

    Raises:
        ConfigError: the URL is invalid, or the key cannot be sent in a header.
    """

    def __init__(
        self,
        url: str,
        model_name: str,
        dimension: int,
        batch_size: int = 32,
        show_progress: bool = True,
        request_fields: Mapping[str, Any] | None = None,
    ) -> None:
        self.url = complete_url(url)
        self.model_name = model_name
        self.dimension = dimension
        self.batch_size = batch_size
        self.show_progress = show_progress
        self._request_fields = dict(request_fields or {})
        self._key = _read_key()
        self._session = requests.Session()
        self._session.mount("http://", _make_adapter())
        self._session.mount("https://", _make_adapter())

    def embed(self, texts: Sequence[str], description: str = "Endpoint") -> np.ndarray:
        """Return the server's embeddings of k texts, float32 (k, d).

        Args:
            texts: k texts, with their prompts.
            description: label of the progress bar.

        Raises:
            UserError: the server cannot be reached, refuses a request, or gives an answer that
                cannot be used.
        """
        embeddings = np.empty((len(texts), self.dimension), dtype=np.float32)
        with tqdm(
            total=len(texts), desc=description, unit=" texts", disable=not self.show_progress
        ) as progress:
            for start in range(0, len(texts), self.batch_size):
                batch = texts[start : start + self.batch_size]
                embeddings[start : start + len(batch)] = self._embed_batch(batch)
                progress.update(len(batch))
        return embeddings

    def _embed_batch(self, texts: Sequence[str]) -> np.ndarray:
        """Return the server's embeddings of the texts of one request, float32 (k, d)."""
        response = self._post(texts)
        self._check_status(response)
        vectors = self._read_vectors(response, len(texts))
        for text, vector in zip(texts, vectors, strict=True):
            if len(vector) != self.dimension:
                raise self._error(
                    f"answers with {len(vector)} dimensions, but the model has {self.dimension}: "
                    "serve this model, or name the served one as MODEL"
                )
            if not np.isfinite(vector).all():
                raise self._error(
                    f"answers with NaN or infinity for the text {quoted(text)}: check the type of "
                    "the server's weights (bfloat16 or float32 instead of float16)"
                )
        return np.stack(vectors)

    def _post(self, texts: Sequence[str]) -> requests.Response:
        """Send one request and return the answer, whatever its status."""
        content = {
            "encoding_format": "float",
            **self._request_fields,
            "model": self.model_name,
            "input": list(texts),
        }
        try:
            return self._session.post(
                self.url,
                json=content,
                auth=self._authorize,
                timeout=(_CONNECT_SECONDS, _ANSWER_SECONDS),
                # requests would follow a redirection with a GET, which has no texts.
                allow_redirects=False,
            )
        except requests.RequestException as error:
            raise self._error(
                f"no answer after {_MAX_RETRIES} retries ({_get_reason(error)}): start the server, "
                "or correct the URL"
            ) from error

    def _authorize(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        """Add the key to a request; `requests` calls this function because of ``auth=``.

        The key is not passed in ``headers=``, because `requests` would replace it by a password
        that ~/.netrc has for the server.
        """
        if self._key:
            request.headers["Authorization"] = f"Bearer {self._key}"
        return request

    def _check_status(self, response: requests.Response) -> None:
        """Raise `UserError` unless the server answers with status 200."""
        status = response.status_code
        if status == 200:
            return
        if status in (401, 403):
            if self._key:
                raise self._error(
                    f"refuses the key (status {status}): correct the environment variable "
                    f"{KEY_VARIABLE}"
                )
            raise self._error(
                f"asks for a key (status {status}): set the environment variable {KEY_VARIABLE}"
            )
        if status == 404:
            raise self._error(
                f"has no model {self.model_name!r}, or no embeddings at this URL (status 404): set "
                "--served_model to the name that the server gives the model, or correct the URL"
            )
        if response.is_redirect:
            target = self._hide_key(response.headers["Location"])
            raise self._error(f"redirects to {target} (status {status}): name that URL instead")
        if status in _RETRIED_STATUSES:
            raise self._error(
                f"still answers with status {status} after {_MAX_RETRIES} retries "
                f"({self._quote(response)}): see the server's log, or lower --batch_size"
            )
        raise self._error(
            f"refuses a request with status {status} ({self._quote(response)}): if it has too many "
            "texts, lower --batch_size; if a text is empty, remove it from the data, because this "
            "server does not encode it; if a text is too long, let the server truncate (TEI: "
            "--auto-truncate; vLLM: --request_fields '{\"truncate_prompt_tokens\": -1}')"
        )

    def _read_vectors(self, response: requests.Response, num_texts: int) -> list[np.ndarray]:
        """Return the vectors of an answer in the order of the texts."""
        vectors = {}  # {position of the text in the request: vector}
        try:
            for position, item in enumerate(response.json()["data"]):
                index = item.get("index")
                if index is None:
                    # Servers that omit the index answer in the order of the texts.
                    index = position
                vectors[index] = _decode_vector(item["embedding"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._error(
                f"does not answer in the form of OpenAI's embeddings ({self._quote(response)}): "
                "name the URL of an OpenAI-compatible server of pooled embeddings"
            ) from error
        if len(vectors) == num_texts and vectors.keys() != set(range(num_texts)):
            raise self._error(
                f"does not number its embeddings from 0 to {num_texts - 1}, as OpenAI's API does: "
                "correct the server, or use another one"
            )
        if len(vectors) != num_texts:
            raise self._error(
                f"answers with {len(vectors)} embeddings for {num_texts} texts: "
                "see the server's log, or lower --batch_size"
            )
        return [vectors[index] for index in range(num_texts)]

    def _quote(self, response: requests.Response) -> str:
        """Return the start of an answer's text on one line, without the key."""
        content = self._hide_key(" ".join(response.text.split()))
        if not content:
            return "an empty answer"
        return quoted(content, _MAX_QUOTED_LENGTH)

    def _hide_key(self, text: str) -> str:
        """Replace the key by the name of its variable.

        A server may repeat the headers of a request in its answer.
        """
        if self._key:
            return text.replace(self._key, f"<{KEY_VARIABLE}>")
        return text

    def _error(self, message: str) -> UserError:
        """Return an error whose message starts with the URL."""
        return UserError(f"{redact(self.url)}: {message}")


def complete_url(url: str) -> str:
    """Return the URL of a server's embeddings, which ends with ``/embeddings``.

    Args:
        url: base URL of the server, or the URL with ``/v1`` or ``/v1/embeddings`` at its end.

    Raises:
        ConfigError: this is not a URL of a server.
    """
    try:
        parts = urlsplit(url)
    except ValueError:  # such as a bracket that is not closed
        parts = urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(
            f"{redact(url)}: not the URL of a server; write it as http://localhost:8080"
        )
    if parts.query or parts.fragment:
        # The query of a URL may contain a key, which would then be written to records.
        raise ConfigError(
            f"{redact(urlunsplit(parts._replace(query='', fragment='')))}: remove what follows ? "
            f"or # in the URL; put a key into the environment variable {KEY_VARIABLE}"
        )
    path = parts.path.rstrip("/")
    if path.endswith("/v1"):
        path += "/embeddings"
    elif not path.endswith("/embeddings"):
        path += "/v1/embeddings"
    return urlunsplit(parts._replace(path=path))


def _read_key() -> str | None:
    """Return the key from the environment variable, or None if there is none.

    Raises:
        ConfigError: the key cannot be sent in a header.
    """
    key = os.environ.get(KEY_VARIABLE, "").strip()
    if not key:
        return None
    # Without this check, requests would refuse the header, and its message would show the key.
    if not key.isascii() or not key.isprintable():
        raise ConfigError(
            f"the environment variable {KEY_VARIABLE} contains characters that a key cannot have: "
            "copy the key again"
        )
    return key


def _make_adapter() -> HTTPAdapter:
    """Return the part of a session that sends requests and repeats failed ones."""
    retry = Retry(
        total=_MAX_RETRIES,
        backoff_factor=BACKOFF_SECONDS,
        status_forcelist=_RETRIED_STATUSES,
        allowed_methods=["POST"],
        # After the last retry, the answer is returned, so that `_check_status` can quote it.
        raise_on_status=False,
    )
    return HTTPAdapter(max_retries=retry)


def _get_reason(error: requests.RequestException) -> str:
    """Return the message of the error that made a request fail.

    `requests` and urllib3 wrap it in errors of their own, whose messages are long.
    """
    inner_error = error.args[0] if error.args else None
    if isinstance(inner_error, MaxRetryError) and inner_error.reason is not None:
        return str(inner_error.reason)
    return str(error)


def _decode_vector(value: Any) -> np.ndarray:
    """Return an embedding as float32 (d,).

    Args:
        value: a list of numbers, or little-endian float32 numbers in base64.

    Raises:
        ValueError, TypeError: the value is neither.
    """
    if isinstance(value, str):
        return np.frombuffer(base64.b64decode(value, validate=True), dtype="<f4")
    vector = np.asarray(value, dtype=np.float32)
    if vector.ndim != 1:
        raise ValueError(f"an embedding has {vector.ndim} axes")
    return vector
