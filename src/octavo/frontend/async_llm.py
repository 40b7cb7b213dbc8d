"""The library's asynchronous interface: whole answers and streams of text over Sessions.

Owns: reading prompts in their accepted forms, default parameters, and cancelling requests that a caller abandons.
Does not: build an engine (assembly does), or use threads except to write a file.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from os import PathLike
from typing import Any, Self, TypeVar, cast

from octavo.core.request import FinishError, FinishReason, SamplingParams, Want, sampling_defaults
from octavo.errors import ErrorKind, InvalidRequestError
from octavo.frontend.adapters import AdapterRegistry
from octavo.frontend.outputs import (
    ClassificationOutput,
    EmbeddingOutput,
    OutputBuilder,
    RequestOutput,
    ScoreOutput,
    by_choice,
    embedding_output,
    joined,
)
from octavo.frontend.scoring import TextPairs, likeliest
from octavo.frontend.sessions import Prompt, Session, Sessions, TextDelta, check_stream
from octavo.observe.metrics.export import Table, save_json_lines

_T = TypeVar("_T")
_IMAGES = "images"  # of a prompt that chat_prompt returns
AnyPrompt = Prompt | Mapping[str, Any]
Messages = Sequence[Mapping[str, Any]]
AnyParams = SamplingParams | Mapping[str, Any] | None
OnDelta = Callable[[TextDelta], None]
_NOTHING_SAMPLED = SamplingParams(seed=0)  # a fixed seed, so that embeddings do not change later requests' drawn seeds


class AsyncEngine:
    """Asynchronous generation from prompts and conversations. All methods belong to one event loop."""

    def __init__(self, sessions: Sessions, adapters: AdapterRegistry | None = None) -> None:
        self.sessions = sessions
        self.adapters = adapters

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
        self.sessions.text.check_output("vectors")
        return await self._pool(prompt, **options)

    async def _pool(self, prompt: AnyPrompt, **options: Any) -> EmbeddingOutput:
        """Return a prompt's vector, or a classifier's logits."""
        text, session = await self._open(prompt, _NOTHING_SAMPLED, {**options, "wants": Want.POOL})
        async with session:
            *_, last = await session.collect()
            return embedding_output(session.request_id, text, session.prompt_token_ids, last)

    async def classify(self, prompt: AnyPrompt, **options: Any) -> ClassificationOutput:
        """Return the likeliest label of a prompt, by a sequence classifier. Raises InvalidRequestError, EngineError."""
        self.sessions.text.check_output("labels")
        found = await self._pool(prompt, **options)
        encoder = self.sessions.text.spec.encoder
        label, probs = likeliest(found.embedding, encoder)
        labels = () if encoder is None else encoder.labels
        return ClassificationOutput(
            found.request_id, found.prompt, found.prompt_token_ids, label, labels, probs, found.metrics
        )

    async def score(self, comparison: TextPairs) -> list[ScoreOutput]:
        """Return the score of each pair, in order. Raises InvalidRequestError, EngineError."""
        text = self.sessions.text
        text.check_output("scores")
        wanted = [text.encode_input(each) for each in comparison.texts(text.spec.encoder)]
        outputs = await gather_all(self._pool(ids) for ids in wanted)
        scores = comparison.scores(text.spec.encoder, [array("f", output.embedding) for output in outputs])
        return [
            ScoreOutput(index, score, comparison.firsts[one], comparison.seconds[other])
            for index, (score, (one, other)) in enumerate(zip(scores, comparison.pairs, strict=True))
        ]

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

    def chat_prompt(self, messages: str | Messages, template: Mapping[str, Any] | None = None) -> AnyPrompt:
        """Return the prompt of a conversation: its ids, with its images if it has some. Raises InvalidRequestError."""
        listed: Messages = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        if not isinstance(listed, Sequence) or not all(isinstance(message, Mapping) for message in listed):
            raise InvalidRequestError(
                'messages must be a text or a list such as [{"role": "user", "content": "Hello"}]', "messages"
            )
        text, options = self.sessions.text, template or {}
        if text.spec.vision is None or not any(isinstance(message.get("content"), Sequence) for message in listed):
            ids: Sequence[int] = text.prompt_ids_from_messages([*map(dict, listed)], **options)
            return ids
        from octavo.frontend.images import read_conversation  # Pillow is an extra

        ids, *images = read_conversation(text, listed, **options)
        return {"prompt_token_ids": ids, _IMAGES: tuple(images)}

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

    async def cancel(self, request_ids: str | Sequence[str] | None = None) -> int:
        """End open requests, all if no id is given, with finish_reason "cancelled"; return how many were open."""
        if request_ids is None:
            return cast(int, await self.sessions.client.control("cancel_all"))
        return self.sessions.client.cancel([request_ids] if isinstance(request_ids, str) else request_ids)

    async def pause(self) -> None:
        """Start no waiting request until `resume`; running requests go on, and new ones wait."""
        await self.sessions.client.control("pause")

    async def resume(self) -> None:
        """End a pause."""
        await self.sessions.client.control("resume")

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; return False, and change nothing, while a request holds blocks."""
        return bool(await self.sessions.client.control("reset_prefix_cache"))

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
        options = dict(options)
        if isinstance(prompt, Mapping) and _IMAGES in prompt:
            options["spans"], options["media"] = prompt[_IMAGES]
        if is_streamed:
            check_stream(params)
        return text, await (await self._sessions_of(options.pop("lora_request", None))).submit(ids, params, **options)

    async def _sessions_of(self, wanted: object) -> Sessions:
        """Return the sessions of an adapter (a name or a LoRARequest), or the model's own for None."""
        if wanted is None:
            return self.sessions
        if self.adapters is None:
            raise InvalidRequestError("this engine has no adapters; give LLM(..., enable_lora=True)", "lora_request")
        return self.sessions.with_adapter((await self.adapters.find(wanted)).adapter_id)

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
            if not known or set(prompt) - {"prompt", "prompt_token_ids", _IMAGES}:
                raise InvalidRequestError(
                    f"a prompt has the keys {sorted(prompt)}; give 'prompt' (text) or 'prompt_token_ids'", "prompt"
                )
            prompt = prompt[known[0]]
        if isinstance(prompt, str):
            return prompt, self.sessions.prompt_ids(prompt)
        if isinstance(prompt, Sequence) and not isinstance(prompt, (str, bytes, bytearray)):
            return None, prompt
        raise InvalidRequestError(f"a prompt is a {type(prompt).__name__}; give a text or token ids", "prompt")


async def gather_all(works: Iterable[Coroutine[Any, Any, _T]]) -> list[_T]:
    """Run all concurrently and return their results, in order. The first error cancels the others."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


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
