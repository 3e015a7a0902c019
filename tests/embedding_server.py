"""A local OpenAI-compatible embedding server for tests, with faults that can be switched on."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread
from typing import Any

import numpy as np
from sentence_transformers import SentenceTransformer

Embed = Callable[[Sequence[str]], np.ndarray]
Answer = Callable[[list[str], np.ndarray], Any]


def embed_with(model: SentenceTransformer) -> Embed:
    """Return the function of a right server: the texts hold their prompts already."""

    def embed(texts: Sequence[str]) -> np.ndarray:
        return np.asarray(model.encode_document(list(texts), prompt="", batch_size=8))

    return embed


def make_answer(texts: list[str], embeddings: np.ndarray) -> dict[str, Any]:
    """Return a right answer."""
    items = []
    for index, embedding in enumerate(embeddings):
        items.append({"object": "embedding", "index": index, "embedding": embedding.tolist()})
    return {"object": "list", "data": items, "model": "served"}


class EmbeddingServer:
    """A server on a free port of 127.0.0.1.

    Attributes:
        url: base URL.
        embed: function that encodes the texts of a request.
        answer: function of texts and embeddings that returns the JSON content.
        statuses: statuses of the next requests, before they are answered.
        location: target of redirects.
        requests: JSON contents of all requests.
        authorizations: the header Authorization of all requests, or None.
    """

    def __init__(self, url: str, embed: Embed) -> None:
        self.url = url
        self.embed = embed
        self.answer: Answer = make_answer
        self.statuses: list[int] = []
        self.location = ""
        self.requests: list[dict[str, Any]] = []
        self.authorizations: list[str | None] = []
        self._lock = Lock()

    def respond(self, path: str, request: dict[str, Any], authorization: str | None) -> Any:
        """Return the next status, or status and content of a right answer."""
        with self._lock:
            self.requests.append(request)
            self.authorizations.append(authorization)
            if self.statuses:
                return self.statuses.pop(0), {"error": {"message": f"sent {authorization}"}}
        return self.reply(path, request)

    def reply(self, path: str, request: dict[str, Any]) -> Any:
        """Return status and content of an answer."""
        if path != "/v1/embeddings":
            return 404, {"error": "not found"}
        texts = request["input"]
        return 200, self.answer(texts, self.embed(texts))


@contextmanager
def run_server(embed: Any, make_server: Any = EmbeddingServer) -> Iterator[Any]:
    """Run a server, which is made from its URL and `embed`, in a thread."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers["Content-Length"])
            request = json.loads(self.rfile.read(length))
            status, answer = server.respond(self.path, request, self.headers["Authorization"])
            content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Location", server.location)
            self.send_header("Retry-After-Ms", "1")
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http_server:
        server = make_server(f"http://127.0.0.1:{http_server.server_port}", embed)
        thread = Thread(target=http_server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        http_server.shutdown()
        thread.join()
