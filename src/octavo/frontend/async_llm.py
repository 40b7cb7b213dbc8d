"""The library's asynchronous interface: whole answers and streams of text over Sessions.

Owns: reading prompts in their accepted forms, default parameters, and cancelling requests that a caller abandons.
Does not: build an engine (assembly does), or use threads except to write a file.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from os import PathLike
from typing import Any, Self, cast

from octavo.core.request import FinishError, FinishReason, SamplingParams, Want, sampling_defaults
from octavo.errors import ErrorKind, InvalidRequestError
from octavo.frontend.outputs import (
    EmbeddingOutput,
    OutputBuilder,
    RequestOutput,
    by_choice,
    embedding_output,
    joined,
)
from octavo.frontend.sessions import Prompt, Session, Sessions, TextDelta, check_stream
from octavo.observe.metrics.export import Table, save_json_lines

AnyPrompt = Prompt | Mapping[str, Any]
Messages = Sequence[Mapping[str, Any]]
AnyParams = SamplingParams | Mapping[str, Any] | None
OnDelta = Callable[[TextDelta], None]
_NOTHING_SAMPLED = SamplingParams(seed=0)  # a fixed seed, so that embeddings do not change later requests' drawn seeds


class AsyncEngine:
    """Asynchronous generation from prompts and conversations. All methods belong to one event loop."""

    def __init__(self, sessions: Sessions) -> None:
        self.sessions = sessions

    @property
    def default_params(self) -> SamplingParams:
        """The parameters used if none are given: the model's own generation config."""
        return self.read_params(None)

    async def generate(
        self, prompt: AnyPrompt, sampling_params: AnyParams = None, request_id: str | None = None, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """Continue a prompt, yielding the answer so far whenever it grew; the last one has `finished` set.

        `async for output in llm.generate("Hello", params, "my-id")`. Leaving the loop early (and closing it) cancels
        the request. With best_of > n only the final answer is yielded. Options are those of Sessions.submit.
        """
        text, session = await self._open(prompt, sampling_params, {**options, "request_id": request_id})
        async with session:
            builder = _builder(session, text)
            async for delta in session:
                if delta.prompt_logprobs is None:
                    builder.add(delta)
                    yield builder.output(session.prompt_logprobs)

    async def complete(
        self,
        prompt: AnyPrompt,
        sampling_params: AnyParams = None,
        *,
        on_delta: OnDelta | None = None,
        **options: Any,
    ) -> RequestOutput:
        """Return the whole answer; options are those of Sessions.submit. Cancelling the task cancels the request.

        `on_delta` gets every delta; if it raises, only this request ends with an error.
        """
        is_streamed = on_delta is not None
        text, session = await self._open(prompt, sampling_params, options, is_streamed=is_streamed)
        async with session:
            deltas = await session.collect() if on_delta is None else await _watched(session, on_delta)
        builder = _builder(session, text)
        for each in by_choice(deltas):
            builder.add(joined(each))
        return builder.output(session.prompt_logprobs)

    async def embed(self, prompt: AnyPrompt, **options: Any) -> EmbeddingOutput:
        """Return a prompt's vector (docs/apis.md); options are those of Sessions.submit. Raises EngineError."""
        text, session = await self._open(prompt, _NOTHING_SAMPLED, {**options, "wants": Want.POOL})
        async with session:
            *_, last = await session.collect()
            return embedding_output(session.request_id, text, session.prompt_token_ids, last)

    async def stream(
        self, prompt: AnyPrompt, sampling_params: AnyParams = None, **options: Any
    ) -> AsyncGenerator[TextDelta, None]:
        """Continue a prompt, delta by delta; leaving the loop early (and closing it) cancels the request.

        Deltas of several choices are interleaved; beams are yielded at the end. Raises InvalidRequestError for
        best_of > n.
        """
        _, session = await self._open(prompt, sampling_params, options, is_streamed=True)
        async with session:
            async for delta in session:
                yield delta

    async def chat(
        self,
        messages: str | Messages,
        sampling_params: AnyParams = None,
        *,
        template: Mapping[str, Any] | None = None,
        on_delta: OnDelta | None = None,
        **options: Any,
    ) -> RequestOutput:
        """Answer a conversation, or one message of a user, through the model's chat template.

        `template` holds keyword arguments of the chat template.
        """
        prompt = self.chat_prompt(messages, template)
        return await self.complete(prompt, self.chat_params(sampling_params), on_delta=on_delta, **options)

    async def stream_chat(
        self,
        messages: str | Messages,
        sampling_params: AnyParams = None,
        *,
        template: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> AsyncGenerator[TextDelta, None]:
        """Answer a conversation, delta by delta."""
        prompt = self.chat_prompt(messages, template)
        async with aclosing(self.stream(prompt, self.chat_params(sampling_params), **options)) as deltas:
            async for delta in deltas:
                yield delta

    def chat_prompt(self, messages: str | Messages, template: Mapping[str, Any] | None = None) -> Sequence[int]:
        """Return the ids of a conversation. Raises InvalidRequestError."""
        listed: Messages = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        if not isinstance(listed, Sequence) or not all(isinstance(message, Mapping) for message in listed):
            raise InvalidRequestError(
                'messages must be a text or a list such as [{"role": "user", "content": "Hello"}]', "messages"
            )
        ids: Sequence[int] = self.sessions.text.prompt_ids_from_messages([*map(dict, listed)], **(template or {}))
        return ids

    async def statistics(self) -> Mapping[str, object]:
        """Return engine counters and gauges as plain JSON values."""
        return await self.sessions.client.statistics()

    async def export_statistics(self) -> Mapping[str, Table]:
        """Return tables of the last steps and requests (docs/statistics.md). Raises EngineError if not collected."""
        return cast(Mapping[str, Table], await self.sessions.client.control("export_statistics"))

    async def reset_statistics(self) -> None:
        """Drop the figures of steps and requests, and keep the totals. Raises EngineError if not collected."""
        await self.sessions.client.control("reset_statistics")

    async def save_statistics(self, path: str | PathLike[str]) -> None:
        """Write the tables as lines of JSON, replacing the file atomically. Raises EngineError, OSError."""
        tables = await self.export_statistics()
        await asyncio.to_thread(save_json_lines, path, tables)

    async def close(self) -> None:
        """Stop the engine; every open request is answered first. Idempotent."""
        await self.sessions.client.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _open(
        self, prompt: AnyPrompt, given: AnyParams, options: Mapping[str, Any], is_streamed: bool = False
    ) -> tuple[str | None, Session]:
        """Submit a request; return the prompt's text and the session, which the caller enters with `async with`."""
        params = self.read_params(given)
        text, ids = self._read_prompt(prompt)
        if is_streamed:
            check_stream(params)
        return text, await self.sessions.submit(ids, params, **options)

    def read_params(self, given: object) -> SamplingParams:
        """Return the parameters to use: a SamplingParams unchanged, or a dict's fields over the model's own defaults.

        The default of max_tokens is 16. Raises InvalidRequestError.
        """
        if isinstance(given, SamplingParams):
            return given
        if given is None or isinstance(given, Mapping):
            return SamplingParams(**{**sampling_defaults(self.sessions.text.spec.generation), **(given or {})})
        kind = type(given).__name__
        raise InvalidRequestError(f"sampling_params is a {kind}; give SamplingParams(...) or a dict", "sampling_params")

    def chat_params(self, given: object) -> SamplingParams:
        """Return the parameters as read_params does, but a dict without max_tokens means as many tokens as fit."""
        if given is None or isinstance(given, Mapping):
            given = {"max_tokens": None, **(given or {})}
        return self.read_params(given)

    def _read_prompt(self, prompt: AnyPrompt) -> tuple[str | None, Sequence[int]]:
        """Return the prompt's text (None if the prompt is given as ids), and its ids."""
        if isinstance(prompt, Mapping):
            known = [name for name in ("prompt_token_ids", "prompt") if prompt.get(name) is not None]
            if not known or set(prompt) - {"prompt", "prompt_token_ids"}:
                raise InvalidRequestError(
                    f"a prompt has the keys {sorted(prompt)}; give 'prompt' (text) or 'prompt_token_ids'", "prompt"
                )
            prompt = prompt[known[0]]
        if isinstance(prompt, str):
            return prompt, self.sessions.prompt_ids(prompt)
        if isinstance(prompt, Sequence) and not isinstance(prompt, (str, bytes, bytearray)):
            return None, prompt
        raise InvalidRequestError(f"a prompt is a {type(prompt).__name__}; give a text or token ids", "prompt")


def _builder(session: Session, prompt: str | None) -> OutputBuilder:
    return OutputBuilder(session.request_id, prompt, session.prompt_token_ids, session.params)


async def _watched(session: Session, on_delta: OnDelta) -> list[TextDelta]:
    """Collect deltas, passing each to a callback; an error of the callback ends this request."""
    deltas: list[TextDelta] = []
    failure: FinishError | None = None
    async for delta in session:
        deltas.append(delta)
        if failure is None:
            try:
                on_delta(delta)
            except Exception as error:  # the caller's code: any error ends only this request
                failure = FinishError(ErrorKind.REQUEST, f"the callback raised {type(error).__name__}: {error}")
                await session.cancel(FinishReason.ERROR)
    if failure is None:
        return deltas
    return [
        delta
        if delta.finish_reason is None
        else replace(delta, finish_reason=FinishReason.ERROR, stop_reason=None, error=failure)
        for delta in deltas
    ]
