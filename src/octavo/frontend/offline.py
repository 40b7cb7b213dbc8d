"""The library's synchronous interface: batches of prompts, answered in input order.

Owns: a thread with an event loop, batches with a progress bar, iterators over streams.
Does not: call the engine except through AsyncEngine.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from os import PathLike
from typing import Any, Self, TypeVar

from octavo.core.request import SamplingParams
from octavo.errors import InvalidRequestError, RequestError
from octavo.frontend.adapters import AdapterRegistry
from octavo.frontend.async_llm import AnyParams, AnyPrompt, AsyncEngine, Messages, gather_all
from octavo.frontend.outputs import ClassificationOutput, EmbeddingOutput, RequestOutput, ScoreOutput
from octavo.frontend.scoring import TextPairs, ranked
from octavo.frontend.sessions import Sessions, TextDelta
from octavo.observe.metrics.export import Table

_T = TypeVar("_T")
_P = TypeVar("_P")
_Answer = TypeVar("_Answer", bound=RequestOutput | EmbeddingOutput | ClassificationOutput)
Params = AnyParams | Sequence[AnyParams]
_TEMPLATE_OPTIONS = ("add_generation_prompt", "continue_final_message", "tools")
# Other arguments of vLLM's methods -> what to do instead. An argument that is None is ignored.
_ELSEWHERE = {
    "lora_request": "give it to generate or chat",
    "priority": "give it to AsyncLLM.generate, or serve with --policy priority",
    "prompt_token_ids": 'give {"prompt_token_ids": [...]} as the prompt',
    "tokenization_kwargs": 'give {"prompt_token_ids": [...]} as the prompt',
    "chat_template": 'give it to LLM(..., chat_template="FILE")',
    "chat_template_content_format": "messages hold text",
    "mm_processor_kwargs": "images are processed as the model's files say",
}
Advance = Callable[[RequestOutput | EmbeddingOutput | ClassificationOutput], None]


class OfflineEngine:
    """Synchronous generation in batches. Safe to use from several threads; close() or leave the context when done."""

    def __init__(self, sessions: Sessions, adapters: AdapterRegistry | None = None) -> None:
        self._engine = AsyncEngine(sessions, adapters)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=_serve, args=(self._loop,), name="octavo-sessions", daemon=True)
        self._thread.start()
        self._close = weakref.finalize(self, _shut, self._engine, self._loop, self._thread)

    def generate(
        self,
        prompts: AnyPrompt | Sequence[AnyPrompt],
        sampling_params: Params = None,
        use_tqdm: bool = True,
        *,
        on_delta: Callable[[int, TextDelta], None] | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Continue one prompt or a list of prompts; return one answer per prompt, in input order.

        A prompt is text, ids, {"prompt": ...} or {"prompt_token_ids": ...}. `sampling_params` (or `params`) is a
        SamplingParams, or a dict whose fields override the model's own defaults; give one for all prompts, or a list
        with one for each. `use_tqdm` (or `progress`) shows a progress bar, on a terminal only. `on_delta(index, delta)`
        runs in another thread; if it raises, that answer ends with an error. `lora_request` is an adapter's name or a
        LoRARequest, or a list with one (or None) for each prompt. If a prompt is refused, the other prompts
        are cancelled and RequestError is raised. A request that fails later has finish_reason "error".
        """
        wanted, listed = others.pop("lora_request", None), _as_list(prompts)
        given, shown = _named("generate", sampling_params, use_tqdm, others)
        return self._run_all(listed, given, shown, on_delta, _spread(wanted, len(listed), "lora_request"))

    def chat(
        self,
        messages: str | Messages | Sequence[str | Messages],
        sampling_params: Params = None,
        use_tqdm: bool = True,
        *,
        template: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them, through the model's chat template, in input order.

        A conversation is a list of messages, or a text (one user message). For a model that takes images, a part of a
        message may be {"type": "image", "image": a PIL image, bytes, a path or a data URL}, or vLLM's image_url and
        image_pil. `template` (or `chat_template_kwargs`)
        holds keyword arguments of the chat template. `tools`, `add_generation_prompt` and `continue_final_message` can
        also be given by name. All other arguments are those of generate.
        """
        arguments = {**(template or {}), **(others.pop("chat_template_kwargs", None) or {})}
        arguments |= {name: others.pop(name) for name in _TEMPLATE_OPTIONS if name in others}
        wanted = others.pop("lora_request", None)
        given, shown = _named("chat", sampling_params, use_tqdm, others)
        is_list = isinstance(messages, Sequence) and not isinstance(messages, str)
        is_one = not is_list or (len(messages) > 0 and isinstance(messages[0], Mapping))
        conversations: Sequence[Any] = [messages] if is_one else messages
        prompts = [self._engine.chat_prompt(conversation, arguments) for conversation in conversations]
        each = [self._engine.chat_params(one) for one in _spread(given, len(prompts))]
        return self._run_all(prompts, each, shown, None, _spread(wanted, len(prompts), "lora_request"))

    def embed(
        self, prompts: AnyPrompt | Sequence[AnyPrompt], use_tqdm: bool = True, **others: Any
    ) -> list[EmbeddingOutput]:
        """Return each prompt's vector (docs/apis.md), in input order. Prompts have the forms that generate accepts.

        The first prompt that is refused or fails raises its error and cancels the others.
        """
        _, shown = _named("embed", None, use_tqdm, others)
        return self._each(self._engine.embed, _as_list(prompts), shown)

    def classify(
        self, prompts: AnyPrompt | Sequence[AnyPrompt], use_tqdm: bool = True, **others: Any
    ) -> list[ClassificationOutput]:
        """Return each prompt's likeliest label, in input order; the model must be a sequence classifier."""
        _, shown = _named("classify", None, use_tqdm, others)
        return self._each(self._engine.classify, _as_list(prompts), shown)

    def score(
        self, text_1: str | Sequence[str], text_2: str | Sequence[str], use_tqdm: bool = True, **others: Any
    ) -> list[ScoreOutput]:
        """Score pairs of texts: one text with each of `text_2`, or each with its counterpart; in order.

        A classifier of one label (a cross-encoder) reads both texts at once. Of any other model the score is the cosine
        of the texts' vectors.
        """
        _named("score", None, use_tqdm, others)
        firsts, seconds = ([each] if isinstance(each, str) else list(each) for each in (text_1, text_2))
        return self._wait(self._engine.score(TextPairs.of(firsts, seconds))) if seconds else []

    def rerank(
        self, query: str, documents: Sequence[str], top_n: int | None = None, use_tqdm: bool = True, **others: Any
    ) -> list[ScoreOutput]:
        """Return the documents' scores for a query, best first, at most `top_n`; `index` is the document's."""
        _named("rerank", None, use_tqdm, others)
        if not documents:
            return []
        found = self._wait(self._engine.score(TextPairs.of_documents(query, list(documents))))
        return [found[index] for index in ranked([output.score for output in found], top_n)]

    def stream(self, prompt: AnyPrompt, sampling_params: AnyParams = None) -> Iterator[TextDelta]:
        """Continue one prompt, delta by delta; leaving the loop early cancels the request."""
        return self._iterate(self._engine.stream(prompt, sampling_params))

    def stream_chat(
        self, messages: str | Messages, sampling_params: AnyParams = None, template: Mapping[str, Any] | None = None
    ) -> Iterator[TextDelta]:
        """Answer one conversation, delta by delta."""
        return self._iterate(self._engine.stream_chat(messages, sampling_params, template=template))

    @property
    def text(self) -> Any:
        """The tokenizer, chat template and specification (a TextModel)."""
        return self._engine.sessions.text

    @property
    def default_params(self) -> SamplingParams:
        """The parameters used if none are given: the model's own generation config."""
        return self._engine.default_params

    def statistics(self) -> Mapping[str, object]:
        """Return engine counters and gauges as plain JSON values."""
        return self._wait(self._engine.statistics())

    def export_statistics(self) -> Mapping[str, Table]:
        """Return tables of the last steps and requests (docs/statistics.md). Raises EngineError if not collected."""
        return self._wait(self._engine.export_statistics())

    def reset_statistics(self) -> None:
        """Drop the figures of steps and requests, and keep the totals. Raises EngineError if not collected."""
        self._wait(self._engine.reset_statistics())

    def save_statistics(self, path: str | PathLike[str]) -> None:
        """Write the tables as lines of JSON, replacing the file atomically. Raises EngineError, OSError."""
        self._wait(self._engine.save_statistics(path))

    def cancel(self, request_ids: str | Sequence[str] | None = None) -> int:
        """End open requests, all if no id is given, from any thread; return how many were open.

        A call that waits for them returns outputs with finish_reason "cancelled", and the ids generated so far.
        """
        return self._wait(self._engine.cancel(request_ids))

    def pause(self) -> None:
        """Start no waiting request until `resume`; running requests go on, and new ones wait."""
        self._wait(self._engine.pause())

    def resume(self) -> None:
        """End a pause."""
        self._wait(self._engine.resume())

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; return False, and change nothing, while a request holds blocks."""
        return self._wait(self._engine.reset_prefix_cache())

    def close(self) -> None:
        """Stop the engine and its threads; open requests are answered first. Idempotent."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _each(
        self, answer: Callable[[AnyPrompt], Awaitable[_Answer]], prompts: Sequence[AnyPrompt], is_shown: bool
    ) -> list[_Answer]:
        if not prompts:
            return []
        with progress_bar(len(prompts), is_shown) as advance:
            return self._wait(_all(answer, prompts, advance))

    def _run_all(
        self,
        prompts: Sequence[AnyPrompt],
        params: Params,
        is_shown: bool,
        on_delta: Callable[[int, TextDelta], None] | None,
        adapters: Sequence[object],
    ) -> list[RequestOutput]:
        each = [self._engine.read_params(one) for one in _spread(params, len(prompts))]
        if not prompts:
            return []

        def answer(index: int) -> Awaitable[RequestOutput]:
            watch = None if on_delta is None else partial(on_delta, index)
            options = {} if adapters[index] is None else {"lora_request": adapters[index]}
            return self._engine.complete(prompts[index], each[index], on_delta=watch, **options)

        with progress_bar(len(prompts), is_shown) as advance:
            return self._wait(_all(answer, range(len(prompts)), advance))

    def _wait(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine in the event loop's thread and return its result; an interrupt cancels the coroutine."""
        if not self._close.alive:
            work.close()
            raise RuntimeError("this engine is closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _iterate(self, deltas: AsyncGenerator[TextDelta, None]) -> Iterator[TextDelta]:
        async def following() -> TextDelta | None:
            return await anext(deltas, None)

        async def close() -> None:
            await deltas.aclose()

        try:
            while (delta := self._wait(following())) is not None:
                yield delta
        finally:
            if self._close.alive:
                self._wait(close())


async def _all(answer: Callable[[_P], Awaitable[_Answer]], prompts: Sequence[_P], advance: Advance) -> list[_Answer]:
    """Return the answers to all prompts, in order; the prompts run concurrently. The first error cancels the others."""

    async def one(index: int) -> _Answer:
        try:
            output = await answer(prompts[index])
        except RequestError as error:
            if len(prompts) > 1:
                error.add_note(f"this was prompt {index} of {len(prompts)}")
            raise
        advance(output)
        return output

    return await gather_all(one(index) for index in range(len(prompts)))


def _named(method: str, params: Params, use_tqdm: object, others: dict[str, Any]) -> tuple[Params, bool]:
    """Return the sampling parameters, and True if a progress bar is shown; each may be given under two names.

    Raises InvalidRequestError for any other argument; the error names what to give instead.
    """
    if (alias := others.pop("params", None)) is not None:
        if params is not None:
            raise InvalidRequestError("sampling_params and params are one argument; give one of them", "params")
        params = alias
    is_shown = bool(others.pop("progress", use_tqdm))
    for name, value in others.items():
        if name not in _ELSEWHERE:
            raise InvalidRequestError(f"{method}() has no argument {name}; see help(LLM.{method})", name)
        if value is not None:
            raise InvalidRequestError(f"{method}() has no argument {name}; {_ELSEWHERE[name]}", name)
    return params, is_shown


def _spread(params: object, count: int, name: str = "sampling_params") -> list[object]:
    """Return one entry per prompt: a list has one for each prompt, any other value is used for all."""
    if not isinstance(params, (list, tuple)):
        return [params] * count
    if len(params) != count:
        raise InvalidRequestError(f"{len(params)} {name} for {count} prompts; give one, or one for each", name)
    return list(params)


def _as_list(prompts: AnyPrompt | Sequence[AnyPrompt]) -> list[AnyPrompt]:
    """Return prompts as a list. One prompt is a text, a mapping, or a list that begins with a token id."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, (bytes, bytearray)):
        kind = type(prompts).__name__
        raise InvalidRequestError(f"prompts is a {kind}; give a text, token ids, or a list of them", "prompts")
    return [prompts] if len(prompts) > 0 and isinstance(prompts[0], int) else list(prompts)  # type: ignore[list-item, arg-type]


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        loop.close()


def _shut(engine: AsyncEngine, loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    if loop.is_closed() or not thread.is_alive() or thread is threading.current_thread():
        return  # finalized in the loop's own thread, which cannot wait for itself and ends with the process
    asyncio.run_coroutine_threadsafe(_close_all(engine), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


async def _close_all(engine: AsyncEngine) -> None:
    """Close the engine, and give open readers a second to read the end of their streams."""
    await engine.close()
    rest = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    if rest:
        await asyncio.wait(rest, timeout=1.0)
    loop = asyncio.get_running_loop()
    await loop.shutdown_asyncgens()
    await loop.shutdown_default_executor()


@contextmanager
def progress_bar(total: int, is_shown: bool = True) -> Iterator[Advance]:
    """Show finished answers, remaining time and tokens per second, on a terminal; yield a function for answers."""
    if not (is_shown and sys.stderr.isatty()):
        yield lambda _: None
        return
    from rich.console import Console  # takes 50 ms to import: only if a bar is shown
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    started_at, num_in, num_out = time.monotonic(), 0, 0
    columns = "generating", BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"), TimeRemainingColumn()

    def advance(output: RequestOutput | EmbeddingOutput | ClassificationOutput) -> None:
        nonlocal num_in, num_out
        num_in += len(output.prompt_token_ids)
        if isinstance(output, RequestOutput):
            num_out += sum(len(choice.token_ids) for choice in output.outputs)
        seconds = max(time.monotonic() - started_at, 1e-6)
        progress.update(task, advance=1, rate=f"{num_in / seconds:.0f} in, {num_out / seconds:.0f} out tokens/s")

    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=total, rate="")
        yield advance
