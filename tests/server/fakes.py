"""What server tests stand on: a byte-level text model, a scripted engine client, an app around them.

Sessions, tokenizer and template are the real ones; only the engine is played.
"""

from __future__ import annotations

import asyncio
import json
import math
import sys
from array import array
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
from starlette.applications import Starlette
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from octavo.artifacts.model_spec import ModelSpec
from octavo.config import Config, ServingConfig
from octavo.core.limits import check_token_ids
from octavo.core.plan import TokenLogprobs
from octavo.core.request import FinishError, FinishReason, Request, Want
from octavo.engine.client import Accepted, TokenOutput
from octavo.errors import DuplicateRequestError, PromptTooLongError, too_long_message
from octavo.frontend.open_request import num_choices
from octavo.frontend.sessions import Sessions
from octavo.media.item import MediaItem
from octavo.observe.explainer import unknown
from octavo.server.app import create_app
from octavo.server.http.limits import HttpLimits
from octavo.text.chat_template import ChatTemplate
from octavo.text.text_model import TextModel
from octavo.text.tokenizer import Tokenizer

EOS = 1
MAX_LEN = 4096
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}{% if m.name %}({{ m.name }}){% endif %}:{{ m.content }}\n{% endfor %}"
    "{% if mood %}[{{ mood }}]{% endif %}{% if reasoning_effort %}[{{ reasoning_effort }}]{% endif %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
STATISTICS: Mapping[str, object] = {
    "scheduler": {
        "num_running": 3,
        "num_waiting": 2,
        "num_blocks": 100,
        "num_blocks_used": 25,
        "num_preemptions": 7,
        "prefix_queried_tokens": 40,
        "prefix_hit_tokens": 30,
    }
}


VOCAB_SIZE = 258  # a piece for each byte, and two special ones


def make_text(generation: Mapping[str, float] | None = None) -> TextModel:
    """One piece per byte, and two special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: index for index, piece in enumerate(["<s>", "</s>", *alphabet])}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    spec = ModelSpec(
        family="llama",
        vocab_size=VOCAB_SIZE,
        hidden_size=8,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        intermediate_size=8,
        rms_norm_eps=1e-5,
        rope_theta=1e4,
        max_model_len=MAX_LEN,
        eos_token_ids=(EOS,),
        generation=generation or {},
    )
    tokenizer = Tokenizer(backend, {"eos_token": "</s>"}, [EOS], Path("fake"))
    return TextModel("tiny", spec, tokenizer, ChatTemplate(TEMPLATE, {}, is_trusted=True))


class FakeClient:
    """An engine that answers every request with `text`, one token an output; held, it answers when told.

    The choices of a request take turns; choice k of several says `texts[k]`, where given. Token k of a choice has the
    log-probability -0.25 * (choice + 1).
    """

    def __init__(self, text: str = "Hello é!") -> None:
        self.text = text
        self.texts: list[str] = []
        self.tokenizer = make_text().tokenizer
        self.requests: list[Request] = []
        self.cancelled: list[tuple[str, FinishReason]] = []
        self.cut: list[tuple[str, int]] = []  # choices ended alone
        self.submit_error: Exception | None = None
        self.end: tuple[FinishReason, FinishError | None] | None = None  # instead of the natural end
        self.is_held = False
        self.forecast: Mapping[str, object] = {"new_request_s": None, "model": None}
        self.submitted = asyncio.Event()
        self.cached_tokens = 0
        self.vocab_size = sys.maxsize  # a Harness sets its model's
        self._queues: dict[str, asyncio.Queue[TokenOutput]] = {}
        self._open: dict[str, set[int]] = {}  # choices without an end
        self._scored: set[str] = set()

    async def submit(self, request: Request, media: tuple[MediaItem, ...] = ()) -> Accepted:
        if self.submit_error is not None:
            raise self.submit_error
        if request.request_id in self._queues:
            raise DuplicateRequestError(f"request id {request.request_id!r} is in use; choose another", "request_id")
        check_token_ids(request, self.vocab_size)  # as the scheduler does
        if request.num_prompt_tokens + bool(request.wants & Want.SAMPLE) > MAX_LEN:
            message = too_long_message(MAX_LEN, f"the prompt has {request.num_prompt_tokens}")
            raise PromptTooLongError(message, "prompt")
        self.requests.append(request)
        self._queues[request.request_id] = asyncio.Queue()
        self._open[request.request_id] = set(range(num_choices(request.params)))
        if not self.is_held:
            self.answer(request)
        self.submitted.set()
        return Accepted(request.request_id, request.params.max_tokens or 100, False)

    def answer(self, request: Request, num_tokens: int | None = None) -> None:
        """Say the texts, up to max_tokens, or only their first tokens and no end."""
        if not request.wants & Want.SAMPLE:
            self._give(request, _first_output(request))
            return
        said: list[list[int]] = []
        ends: list[tuple[FinishReason, str]] = []
        for choice in sorted(self._open[request.request_id]):
            ids = [*self.tokenizer.encode(dict(enumerate(self.texts)).get(choice, self.text)), EOS]
            limit = request.params.max_tokens or len(ids)
            reason = FinishReason.STOP if len(ids) <= limit else FinishReason.LENGTH
            ends.append(self.end or (reason, None))
            said.append(ids[: num_tokens if num_tokens is not None else limit])
        for position in range(max(map(len, said))):
            for choice, ids in enumerate(said):
                if position < len(ids):
                    is_last = num_tokens is None and position == len(ids) - 1
                    self._put(request, (choice, position), ids[position], ends[choice] if is_last else None)

    def _put(
        self, request: Request, where: tuple[int, int], token_id: int | None, end: tuple[FinishReason, str] | None
    ) -> None:
        choice, position = where
        open_choices = self._open[request.request_id]
        if choice not in open_choices:
            return
        k = request.params.num_logprobs
        logprobs = None
        if k is not None and token_id is not None:
            tops = [token_id, *(i for i in range(2, 30) if i != token_id)][:k]
            best = tuple(-0.5 * i - 0.25 for i in range(k))
            logprobs = (TokenLogprobs(token_id, -0.25 * (choice + 1), 1, tuple(tops), best),)
        if end is not None:
            open_choices.discard(choice)
        output = TokenOutput(
            request.request_id,
            choice,
            position,
            array("i", [] if token_id is None else [token_id]),
            logprobs,
            finish_reason=end[0] if end else None,
            error=end[1] if end else None,
            cached_tokens=self.cached_tokens,
            is_final=not open_choices,
        )
        self._give(request, output)

    def _give(self, request: Request, output: TokenOutput) -> None:
        if request.wants & Want.SCORE and request.request_id not in self._scored:
            self._scored.add(request.request_id)
            output = replace(output, prompt_logprobs=scores_of(request))
        if output.is_final:
            self._open[request.request_id] = set()
        self._queues[request.request_id].put_nowait(output)

    async def outputs(
        self, request_id: str, final_only: bool = False, max_ids: int = sys.maxsize
    ) -> AsyncIterator[TokenOutput]:
        while request_id in self._queues:
            output = await self._queues[request_id].get()
            if output.is_final:
                del self._queues[request_id], self._open[request_id]
            yield output

    def cancel(
        self, request_ids: Iterable[str], reason: FinishReason = FinishReason.CANCELLED, choice: int | None = None
    ) -> int:
        ids = tuple(request_ids)
        for request_id in ids:
            request = next(r for r in self.requests if r.request_id == request_id)
            if choice is None or num_choices(request.params) == 1:
                self.cancelled.append((request_id, reason))
            else:
                self.cut.append((request_id, choice))
            for each in sorted(self._open.get(request_id, ())):
                if choice in (None, each):
                    self._put(request, (each, 99), None, (reason, None))
        return len(ids)

    async def statistics(self) -> Mapping[str, object]:
        return STATISTICS

    async def control(self, verb: Any, argument: str = "") -> object:
        if verb == "explain":
            return self._explained(argument)
        if verb == "forecast":
            return self.forecast
        raise NotImplementedError

    def _explained(self, name: str) -> dict[str, object]:
        """As the engine says it; of those ended it knows the last."""
        if name not in self._queues:
            is_known = any(request.request_id == name for request in self.requests)
            return ended(name) if is_known else unknown(name)
        ahead = [other for other in self._queues if other != name]
        behind = ahead[0] if ahead else None
        return {
            "id": name,
            "tenant": "nobody else's business",
            "state": "waiting",
            "text": f"{name} waits at position 2 of 2, after {behind}: behind",
            "public_text": "waits at position 2 of 2: behind",
            "position": 1 + len(ahead),
            "behind": behind,
            "ahead": [{"name": other, "tenant": "nobody's", "why": "arrival 1"} for other in ahead],
            "events": [{"event": "preempted", "time_s": 0.5, "step": 3, "by": behind, "num_tokens": 4}],
        }

    async def close(self) -> None:
        pass


def ended(name: str) -> dict[str, object]:
    """What the engine says of a request that has ended."""
    return {"id": name, "state": "finished", "text": f"{name} ended (stop)", "public_text": "ended (stop)"}


def scores_of(request: Request) -> tuple[int, tuple[TokenLogprobs, ...]]:
    """Token p of a prompt has the log-probability -p / 8, and ids beside it of -1, -2, ..."""
    ids, k = request.prompt_token_ids, request.params.prompt_logprobs or 0
    assert ids is not None
    tops = tuple(range(2, 2 + k)), tuple(-1.0 - i for i in range(k))
    return 1, tuple(TokenLogprobs(ids[p], -p / 8, p, *tops) for p in range(1, len(ids)))


def vector_of(ids: Iterable[int]) -> array[float]:
    """A prompt's vector: how often each of eight kinds of ids is in it, scaled to length 1."""
    counts = [0.0] * 8
    for token_id in ids:
        counts[token_id % 8] += 1
    length = math.hypot(*counts)
    return array("f", [count / length for count in counts])


def _first_output(request: Request) -> TokenOutput:
    """The only one of a request that samples nothing."""
    assert request.prompt_token_ids is not None
    return TokenOutput(
        request.request_id,
        0,
        0,
        array("i"),
        pooled=vector_of(request.prompt_token_ids).tobytes() if request.wants & Want.POOL else None,
        finish_reason=FinishReason.STOP,
        is_final=True,
    )


@dataclass
class Harness:
    """An app, its engine, and a client of it."""

    engine: FakeClient = field(default_factory=FakeClient)
    text: TextModel = field(default_factory=make_text)
    config: Config = field(default_factory=Config)
    limits: HttpLimits = field(default_factory=HttpLimits)
    headers: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.engine.vocab_size = self.text.spec.vocab_size
        sessions = Sessions(self.engine, self.text)
        self.app: Starlette = create_app(sessions, self.text, self.config, self.engine.statistics, limits=self.limits)
        self.context = self.app.state.context

    async def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        options["headers"] = {**self.headers, **options.get("headers", {})}
        async with httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://localhost") as client:
            return await client.request(method, path, **options)

    async def get(self, path: str, **options: Any) -> httpx.Response:
        return await self.request("GET", path, **options)

    async def chat(self, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **fields}
        return await self.request("POST", "/v1/chat/completions", json=body, headers=headers or {})

    async def complete(self, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        body = {"model": "tiny", "prompt": "hi", **fields}
        return await self.request("POST", "/v1/completions", json=body, headers=headers or {})

    async def post(self, body: bytes, path: str = "/v1/chat/completions") -> httpx.Response:
        return await self.request("POST", path, content=body, headers={"content-type": "application/json"})

    @property
    def prompt(self) -> str:
        """The last prompt that the engine saw, as text."""
        ids = self.engine.requests[-1].prompt_token_ids
        assert ids is not None
        return self.text.tokenizer.decode(ids, skip_special_tokens=False)


def keyed(*keys: str) -> Config:
    return Config(serving=ServingConfig(api_key=keys))


def events(body: str) -> list[Any]:
    """The data of an event stream; every event must be one line of data and a blank one."""
    found: list[Any] = []
    for block in body.removesuffix("\n\n").split("\n\n"):
        if block.startswith(": "):
            continue
        assert block.startswith("data: ") and "\n" not in block, block
        data = block.removeprefix("data: ")
        found.append(data if data == "[DONE]" else json.loads(data))
    return found


def assert_ignored(response: httpx.Response, *fields: str) -> None:
    """Fields that are not known here: the request is answered as without them, and they are told in a header."""
    assert response.status_code == 200, response.text
    assert response.headers["x-octavo-ignored"] == ", ".join(fields)


class Wire:
    """One ASGI request whose client reads, waits and leaves as told."""

    def __init__(
        self, app: Starlette, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
    ) -> None:
        self._app = app
        self.scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "headers": [(k.lower().encode(), v.encode()) for k, v in {"host": "localhost", **(headers or {})}.items()],
            "server": ("test", 80),
            "client": ("test", 1),
        }
        self._body = json.dumps(body).encode()
        self._gone = asyncio.Event()
        self._is_read = False
        self.sent: list[dict[str, Any]] = []
        self.changed = asyncio.Event()
        self.reads = asyncio.Event()
        self.reads.set()
        self.pause_after: int | None = None  # messages, behind which it reads no more until told

    async def receive(self) -> dict[str, Any]:
        if not self._is_read:
            self._is_read = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        await self.reads.wait()
        self.sent.append(message)
        if len(self.sent) == self.pause_after:
            self.reads.clear()
        self.changed.set()

    def leave(self) -> None:
        self._gone.set()

    def start(self) -> asyncio.Task[None]:
        return asyncio.create_task(self._app(self.scope, self.receive, self.send))

    @property
    def status(self) -> int | None:
        return self.sent[0]["status"] if self.sent else None

    @property
    def text(self) -> str:
        return b"".join(m.get("body", b"") for m in self.sent[1:]).decode()

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(60):
            while not condition():
                await asyncio.sleep(0.001)
