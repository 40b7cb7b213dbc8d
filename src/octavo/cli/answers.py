"""Code shared by `octavo run`, `chat`, `generate` and `batch`: sampling flags, and the sources of answers.

Owns: loading a model in this process; streaming an answer's text from an engine or a server; the line of figures after
an answer. Does not: know the conversation beyond its messages.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import importlib.util
import json
import os
import secrets
import sys
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from octavo.artifacts.adapter import adapter_id, find_adapter
from octavo.cli.flags import UsageError, whole
from octavo.cli.servers import refusal_text
from octavo.cli.terminal import loading, reason_of, warn_limits
from octavo.config import Config
from octavo.core.request import FinishReason, SamplingParams, Span, sampling_defaults
from octavo.engine.adapters import read_lora_modules
from octavo.errors import EngineError, OctavoError
from octavo.media.item import MediaItem
from octavo.text.answer_format import AnswerFormat, CallArguments, CallBegin
from octavo.text.dialect import AnswerReader, Dialect, read_dialect, text_arguments

if TYPE_CHECKING:
    import httpx

    from octavo.assembly import LocalEngine
    from octavo.frontend.sessions import Usage

MAX_TOKENS = 512
CONNECT_TIMEOUT_S = 10.0
READ_TIMEOUT_S = 600.0
_FLAGS = ("temperature", "top_p", "top_k", "max_tokens")
IMAGE_TYPES = {"png": "png", "jpg": "jpeg", "jpeg": "jpeg", "webp": "webp", "gif": "gif", "bmp": "bmp"}
MAX_IMAGE_BYTES = 20 << 20
Messages = Sequence[Mapping[str, Any]]
Functions = Sequence[Mapping[str, Any]]  # OpenAI's `tools`


def add_answer_arguments(group: argparse._ArgumentGroup, max_tokens: int | None = MAX_TOKENS) -> None:
    """Add the sampling flags; `max_tokens` is the default, None for as many tokens as fit."""
    default = max_tokens if max_tokens is not None else "as many as fit"
    flags = ("--max-tokens", "--n-predict", "-n")
    group.add_argument(*flags, type=whole, default=max_tokens, metavar="N", help=f"at most N tokens [{default}]")
    group.add_argument(
        "--temperature", "--temp", type=float, metavar="X", help="0 = the likeliest token [the model's, else 1]"
    )
    group.add_argument("--top-p", type=float, metavar="X", help="total probability kept [the model's, else 1]")
    group.add_argument("--top-k", type=int, metavar="N", help="likeliest tokens kept [the model's, else all]")
    group.add_argument("--system", metavar="TEXT", help="system message")
    group.add_argument("--quiet", "-q", action="store_true", help="print no progress and no figures on stderr")


def image_part(path: str) -> dict[str, Any]:
    """Return the part of a message that has the image of a file. Raises UsageError."""
    file = Path(path).expanduser()
    kind = IMAGE_TYPES.get(file.suffix.lower().removeprefix("."))
    if kind is None:
        raise UsageError(f"the image {path!r} has no known suffix; give a file of {', '.join(IMAGE_TYPES)}")
    try:
        data = file.read_bytes()
    except OSError as error:
        raise UsageError(f"the image {path!r} cannot be read ({error.strerror or error})") from None
    if len(data) > MAX_IMAGE_BYTES:
        raise UsageError(f"the image {path!r} has {len(data)} bytes; at most {MAX_IMAGE_BYTES} are taken")
    url = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def params_given(args: argparse.Namespace) -> dict[str, float | int]:
    """Return the sampling parameters that flags set."""
    return {name: value for name in _FLAGS if (value := getattr(args, name)) is not None}


def sampling_params(args: argparse.Namespace, generation: Mapping[str, float]) -> SamplingParams:
    """Return the sampling parameters from flags, else from the model's generation config, else the defaults.

    Raises InvalidRequestError.
    """
    given = params_given(args)
    return SamplingParams(**{**sampling_defaults(generation), **given, "max_tokens": args.max_tokens})


def load_engine(config: Config, is_quiet: bool) -> LocalEngine:
    """Open an engine in this process; print progress and warnings. Raises OctavoError."""
    from octavo.assembly import build_local  # a slow import, not needed with a server

    with loading(config.model.model, is_quiet):
        engine = build_local(config)
    warn_limits(config, engine.capacity)
    return engine


class AnswerError(OctavoError):
    """A server refused a request, or could not be reached."""


class Answerer(Protocol):
    """A source of answers to conversations. `note` is the line of figures about the last answer.

    The model may call `tools`; `calls` are those of the last answer. Both are in OpenAI's form.
    """

    name: str
    note: str
    tools: Functions
    calls: list[dict[str, Any]]

    def stream(self, messages: Messages, params: Mapping[str, float | int]) -> AsyncGenerator[str, None]:
        """Yield the answer's text as it arrives. Closing the generator cancels the request. Raises OctavoError."""

    async def close(self) -> None:
        """Release the engine or the connection."""


async def print_text(texts: AsyncGenerator[str, None], parts: list[str]) -> None:
    """Print an answer as it arrives, and append its texts to `parts`. Close the stream even if printing fails."""
    async with contextlib.aclosing(texts):
        async for text in texts:
            parts.append(text)
            sys.stdout.write(text)
            sys.stdout.flush()


@dataclass(slots=True)
class LocalAnswerer:
    """An engine in this process. `defaults` apply to the parameters that a conversation does not set."""

    engine: LocalEngine
    defaults: SamplingParams
    name: str = ""
    note: str = ""
    usage: Usage | None = None
    tools: Functions = ()
    calls: list[dict[str, Any]] = field(default_factory=list)
    dialect: Dialect = field(default_factory=Dialect)

    @classmethod
    def load(cls, config: Config, args: argparse.Namespace) -> LocalAnswerer:
        """Check the flags, and load a model with at most one adapter, which all answers use. Raises OctavoError."""
        sampling_params(args, {})
        if len(config.adapters.lora_modules) > 1:
            raise UsageError("several --lora-modules are given; answers here come through one adapter")
        engine = load_engine(config, args.quiet)
        for path in read_lora_modules(config.adapters.lora_modules).values():
            engine = replace(engine, sessions=engine.sessions.with_adapter(adapter_id(find_adapter(path))))
        text, chat = engine.text, config.chat
        template = None if text.chat_template is None else text.chat_template.source
        dialect = read_dialect(template, chat.tool_call_parser, chat.reasoning_parser)
        return cls(engine, sampling_params(args, text.spec.generation), text.name, dialect=dialect)

    async def stream(
        self, prompt: str | Messages, params: Mapping[str, float | int] | None = None
    ) -> AsyncGenerator[str, None]:
        """Submit messages, or a text without a chat template. Cancel the request if the reader stops."""
        text = self.engine.text
        spans: tuple[Span, ...] = ()
        media: tuple[MediaItem, ...] = ()
        if isinstance(prompt, str):
            ids = text.tokenizer.encode(prompt)
        elif any(isinstance(message.get("content"), list) for message in prompt):
            self.check_images()
            from octavo.frontend.images import read_conversation  # Pillow is an extra

            ids, spans, media = read_conversation(text, prompt, tools=self.tools or None)
        else:
            ids = text.prompt_ids_from_messages(prompt, tools=self.tools or None)
        merged = replace(self.defaults, **(params or {}))  # type: ignore[arg-type]  # checked by SamplingParams
        reader = AnswerReader(None, "")
        if self.tools:
            merged = replace(merged, shown_special_ids=self.dialect.shown_ids(True, text.tokenizer))
            reader = AnswerReader(self._format(ids), secrets.token_hex(8))
        self.calls = []
        session = await self.engine.sessions.submit(ids, merged, spans=spans, media=media)
        try:
            async for delta in session:
                parts = reader.push(delta.text) + (reader.finish() if delta.finish_reason is not None else [])
                for part in parts:
                    if isinstance(part, CallBegin):
                        self.calls.append(_call(part.call_id, part.name))
                    elif isinstance(part, CallArguments):
                        self.calls[part.index]["function"]["arguments"] += part.text
                    else:
                        yield part.text
                if delta.finish_reason is not None and delta.usage is not None:
                    if delta.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
                        raise EngineError(delta.message or "the engine failed on this prompt")
                    is_cut = delta.finish_reason is FinishReason.LENGTH
                    self.usage = usage = delta.usage
                    self.note = _note(usage.completion_tokens, usage.e2e_s - usage.ttft_s, usage.ttft_s, is_cut)
        finally:
            await session.cancel()

    def check_images(self) -> None:
        """Raise UsageError if the model takes no images."""
        if "image" not in self.engine.capacity.media:
            raise UsageError(f"{self.name or self.engine.text.name} takes no images; leave them out")
        if importlib.util.find_spec("PIL") is None:
            raise UsageError("images cannot be decoded here; pip install 'octavo[vision]'")

    def _format(self, prompt: Sequence[int]) -> AnswerFormat:
        dialect = self.dialect
        reasoning, starts_inside = dialect.reasoning_after(prompt, self.engine.text.tokenizer)
        names = tuple(tool["function"]["name"] for tool in self.tools)
        texts = text_arguments(self.tools)
        return AnswerFormat(reasoning, starts_inside, calls=dialect.calls, names=names, texts=texts)

    async def close(self) -> None:
        """Close the engine."""
        await self.engine.client.close()


@dataclass(slots=True)
class RemoteAnswerer:
    """A server with OpenAI's API. `url` may end in /v1."""

    url: str
    api_key: str | None = None
    name: str = ""
    note: str = ""
    defaults: dict[str, float | int] = field(default_factory=dict)
    tools: Functions = ()
    calls: list[dict[str, Any]] = field(default_factory=list)
    _client: httpx.AsyncClient | None = None

    def _open(self) -> httpx.AsyncClient:
        import httpx

        if self._client is None:
            url = self.url.rstrip("/")
            key = self.api_key or os.environ.get("OCTAVO_API_KEY", "").split(",")[0]
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            timeout = httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
            base = url if url.endswith("/v1") else f"{url}/v1"
            self._client = httpx.AsyncClient(base_url=base, headers=headers, timeout=timeout)
        return self._client

    async def connect(self) -> None:
        """Use the first model that the server lists, unless the user named one. Raises AnswerError."""
        import httpx

        try:
            answer = await self._open().get("/models")
            if answer.status_code != 200:
                raise AnswerError(refusal_text(answer.status_code, answer.content))
            self.name = self.name or str(answer.json()["data"][0]["id"])
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise AnswerError(f"no server answers at {self.url} ({reason_of(error)})") from None
        except (ValueError, LookupError, TypeError):
            raise AnswerError(f"{self.url} has no list of models; give the URL of a server") from None

    async def stream(self, messages: Messages, params: Mapping[str, float | int]) -> AsyncGenerator[str, None]:
        """Yield the texts of the server's events."""
        import httpx

        body: dict[str, Any] = {
            "model": self.name,
            "messages": list(messages),
            "stream": True,
            **self.defaults,
            **params,
        }
        if self.tools:
            body["tools"] = list(self.tools)
        self.calls = []
        started_at, first_s, count = time.perf_counter(), 0.0, 0
        try:
            async with self._open().stream("POST", "/chat/completions", json=body) as answer:
                if answer.status_code != 200:
                    raise AnswerError(refusal_text(answer.status_code, await answer.aread()))
                async for line in answer.aiter_lines():
                    text = self._read_event(line)
                    if text:
                        first_s = first_s or time.perf_counter() - started_at
                        count += 1
                        yield text
        except httpx.HTTPError as error:
            raise AnswerError(f"the server's answer broke off ({reason_of(error)})") from None
        self.note = _note(count, time.perf_counter() - started_at - first_s, first_s, unit="pieces")

    def _read_event(self, line: str) -> str:
        """Return the text of one line of an event stream, and keep its calls. Raises AnswerError."""
        if not line.startswith("data:") or line.endswith("[DONE]"):
            return ""
        event = json.loads(line[5:])
        if "error" in event:
            raise AnswerError(str(event["error"].get("message", "the server failed")))
        choices = event.get("choices") or [{}]
        delta = choices[0].get("delta") or {}
        for part in delta.get("tool_calls") or () if self.tools else ():
            function = part.get("function") or {}
            if part.get("id") and function.get("name"):
                self.calls.append(_call(part["id"], function["name"]))
            if self.calls:
                self.calls[-1]["function"]["arguments"] += function.get("arguments") or ""
        return delta.get("content") or delta.get("reasoning_content") or ""

    async def close(self) -> None:
        """Close the connection."""
        if self._client is not None:
            await self._client.aclose()
            self._client = None


def _call(call_id: str, name: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": ""}}


def _note(count: int, decode_s: float, first_s: float, is_cut: bool = False, unit: str = "tokens") -> str:
    speed = f"{(count - 1) / decode_s:.1f}" if decode_s > 0 and count > 1 else "-"
    cut = " (cut by max_tokens)" if is_cut else ""
    return f"{count} {unit}{cut}, {speed} {unit}/s, first after {first_s * 1e3:.0f} ms"
