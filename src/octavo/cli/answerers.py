"""The answerers of `octavo chat`: an engine in this process, or a server at a URL.

Owns: streaming an answer's text from either, and the line of numbers after it.
Does not: know the conversation beyond its messages.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from octavo.cli.servers import bearer_headers, refusal_text
from octavo.cli.terminal import reason_of
from octavo.core.request import FinishReason, SamplingParams
from octavo.errors import EngineError, OctavoError

if TYPE_CHECKING:
    import httpx

    from octavo.assembly import LocalEngine

CONNECT_TIMEOUT_S = 10.0
READ_TIMEOUT_S = 600.0
Messages = Sequence[Mapping[str, Any]]


class AnswerError(OctavoError):
    """A server refused, or could not be reached."""


class Answerer(Protocol):
    """A source of answers to conversations. `note` is the line of numbers about the last answer."""

    name: str
    note: str

    def stream(self, messages: Messages, params: Mapping[str, float | int]) -> AsyncGenerator[str, None]:
        """Yield the answer's text as it arrives. Closing or cancelling it ends the request. Raises OctavoError."""
        ...

    async def close(self) -> None:
        """Release the engine or the connection."""
        ...


@dataclass(slots=True)
class LocalAnswerer:
    """An engine in this process. `defaults` are the parameters that a conversation does not set."""

    engine: LocalEngine
    defaults: SamplingParams
    name: str = ""
    note: str = ""

    async def stream(self, messages: Messages, params: Mapping[str, float | int]) -> AsyncGenerator[str, None]:
        """Submit the messages; cancel the request when the reader stops."""
        text = self.engine.text
        ids = text.prompt_ids_from_messages(messages)
        asked = replace(self.defaults, **params)  # type: ignore[arg-type]  # checked by SamplingParams
        session = await self.engine.sessions.submit(ids, asked)
        try:
            async for delta in session:
                if delta.text:
                    yield delta.text
                if delta.finish_reason is not None and delta.usage is not None:
                    if delta.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
                        raise EngineError(delta.message or "the engine failed on this prompt")
                    usage = delta.usage
                    cut = ", cut by max_tokens" if delta.finish_reason is FinishReason.LENGTH else ""
                    self.note = _note(usage.completion_tokens, usage.e2e_s - usage.ttft_s, usage.ttft_s) + cut
        finally:
            await session.cancel()

    async def close(self) -> None:
        """Close the engine."""
        await self.engine.client.close()


@dataclass(slots=True)
class RemoteAnswerer:
    """A server with OpenAI's interface, at `url` with or without its /v1."""

    url: str
    api_key: str | None = None
    name: str = ""
    note: str = ""
    defaults: dict[str, float | int] = field(default_factory=dict)
    _client: httpx.AsyncClient | None = None

    def _open(self) -> httpx.AsyncClient:
        import httpx

        if self._client is None:
            url = self.url.rstrip("/")
            timeout = httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
            base = url if url.endswith("/v1") else f"{url}/v1"
            self._client = httpx.AsyncClient(base_url=base, headers=bearer_headers(self.api_key), timeout=timeout)
        return self._client

    async def connect(self) -> None:
        """Take the first model that the server lists, unless a name is given. Raises AnswerError."""
        import httpx

        try:
            answer = await self._open().get("/models")
            if answer.status_code != 200:
                raise AnswerError(refusal_text(answer.status_code, answer.content))
            self.name = self.name or str(answer.json()["data"][0]["id"])
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise AnswerError(f"no server answers at {self.url} ({reason_of(error)})") from None
        except (ValueError, LookupError, TypeError):
            raise AnswerError(f"what answers at {self.url} has no list of models; give the server's URL") from None

    async def stream(self, messages: Messages, params: Mapping[str, float | int]) -> AsyncGenerator[str, None]:
        """Yield the text of the server's events."""
        import httpx

        body = {"model": self.name, "messages": list(messages), "stream": True, **self.defaults, **params}
        begun, first_s, count = time.perf_counter(), 0.0, 0
        try:
            async with self._open().stream("POST", "/chat/completions", json=body) as answer:
                if answer.status_code != 200:
                    raise AnswerError(refusal_text(answer.status_code, await answer.aread()))
                async for line in answer.aiter_lines():
                    text = _text(line)
                    if text:
                        first_s = first_s or time.perf_counter() - begun
                        count += 1
                        yield text
        except httpx.HTTPError as error:
            raise AnswerError(f"the server's answer broke off ({reason_of(error)})") from None
        self.note = _note(count, time.perf_counter() - begun - first_s, first_s, "pieces")

    async def close(self) -> None:
        """Close the connection."""
        if self._client is not None:
            await self._client.aclose()
            self._client = None


def _text(line: str) -> str:
    """Return the text of one line of an event stream. Raises AnswerError for an error in it."""
    if not line.startswith("data:") or line.endswith("[DONE]"):
        return ""
    event = json.loads(line[5:])
    if "error" in event:
        raise AnswerError(str(event["error"].get("message", "the server failed")))
    choices = event.get("choices") or [{}]
    delta = choices[0].get("delta") or {}
    return delta.get("content") or delta.get("reasoning_content") or ""


def _note(count: int, decode_s: float, first_s: float, what: str = "tokens") -> str:
    speed = f"{(count - 1) / decode_s:.1f} {what}/s" if decode_s > 0 and count > 1 else f"- {what}/s"
    return f"{count} {what}, {speed}, first after {first_s * 1e3:.0f} ms"
