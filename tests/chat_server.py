"""A local chat server with OpenAI's interface for tests, with faults that can be switched on."""

from collections.abc import Callable
from typing import Any

from embedding_server import EmbeddingServer


def make_completion(text: Any, finish_reason: str = "stop") -> dict[str, Any]:
    """Return a right answer."""
    message = {"role": "assistant", "content": text}
    return {
        "id": "1",
        "object": "chat.completion",
        "created": 0,
        "model": "served",
        "choices": [{"index": 0, "message": message, "finish_reason": finish_reason}],
        "usage": {"prompt_tokens": 8, "completion_tokens": 2, "total_tokens": 10},
    }


class ChatServer(EmbeddingServer):
    """A server of chat completions; see `EmbeddingServer`.

    Attributes:
        write: function of the text of the last message that returns an answer: a text, or JSON
            content, or bytes that are sent as they are.
        model: name of the only model.
    """

    def __init__(self, url: str, write: Callable[[str], Any]) -> None:
        super().__init__(url, embed=lambda texts: None)  # type: ignore[arg-type,return-value]
        self.write = write
        self.model = "small"

    @property
    def passages(self) -> list[str]:
        """The last message of each request, in the order of the requests."""
        return [request["messages"][-1]["content"] for request in self.requests]

    def reply(self, path: str, request: dict[str, Any]) -> Any:
        """Return status and content of an answer."""
        if path != "/v1/chat/completions" or request["model"] != self.model:
            return 404, {"error": {"message": f"no model {request['model']}"}}
        answer = self.write(request["messages"][-1]["content"])
        return 200, make_completion(answer) if isinstance(answer, str) else answer
