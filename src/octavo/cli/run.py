"""`octavo run [MODEL] "prompt"`: one answer, streamed to the terminal; a model alone starts a conversation.

Owns: what the words mean, the template, streaming, the closing line of numbers, a clean end on Ctrl-C.
Does not: build the engine (assembly does) or keep a conversation (chat does).
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

from octavo.artifacts.resolve import DEFAULT_MODEL, SHORT_NAMES, check_here, names_model, read_reference
from octavo.assembly import LocalEngine, build_local
from octavo.cli.answer_flags import MAX_TOKENS, add_answer_arguments, sampling_params
from octavo.cli.chat import converse
from octavo.cli.flags import UsageError, add_settings, config_from, settings_given
from octavo.cli.terminal import loading, say, warn_limits
from octavo.config import ENGINE_SECTIONS
from octavo.config.spelling import did_you_mean
from octavo.core.request import FinishReason
from octavo.errors import EngineError

if TYPE_CHECKING:
    from octavo.frontend.sessions import Session, Usage
    from octavo.text.text_model import TextModel


@dataclass(frozen=True, slots=True)
class RunRequest:
    """What the command line asks for. `model` None means the configured one, `prompt` None a conversation."""

    prompt: str | None
    model: str | None
    raw: bool
    system: str | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.usage = "octavo run [MODEL] [PROMPT] [options]"
    parser.add_argument(
        "words", nargs="*", metavar="PROMPT", help="the prompt, in quotes; - or a pipe reads it; a model alone: a chat"
    )
    group = parser.add_argument_group("answer")
    add_answer_arguments(group)
    parser.set_defaults(max_tokens=None)  # MAX_TOKENS of one answer, as many as fit in a conversation
    group.add_argument("--raw", action="store_true", help="continue the prompt as it is, without the chat template")
    add_settings(parser, ENGINE_SECTIONS)


def run(args: argparse.Namespace) -> int:
    """Answer; return 0 when the answer ended by itself or at --max-tokens. Ctrl-C raises, which main makes 130."""
    is_named = "model" in settings_given(args)
    asked = read_words(args.words, args, sys.stdin, is_named=is_named)
    config = config_from(args, model=asked.model)
    if asked.prompt is None:
        return converse(args, config)
    if len(args.words) == 1 and not is_named and not args.quiet:
        say(*_lookalike(asked.prompt))
    args.max_tokens = MAX_TOKENS if args.max_tokens is None else args.max_tokens
    sampling_params(args, {})  # report a wrong flag before the model loads
    begun = time.perf_counter()
    with loading(config.model.model, args.quiet):
        engine = build_local(config)
    warn_limits(config, engine.capacity)
    return asyncio.run(_answer(engine, asked, args, time.perf_counter() - begun))


async def _answer(engine: LocalEngine, asked: RunRequest, args: argparse.Namespace, start_s: float) -> int:
    try:
        params = sampling_params(args, engine.text.spec.generation)
        session = await engine.sessions.submit(prompt_ids(engine.text, asked), params)
        reason, usage = await stream(session, sys.stdout)
        print()
        if not args.quiet:
            print(closing_line(reason, usage, start_s, params.max_tokens), file=sys.stderr)
    finally:
        await engine.client.close()
    return 0


def read_words(words: Sequence[str], args: argparse.Namespace, stdin: TextIO, *, is_named: bool = False) -> RunRequest:
    """Return model and prompt: two words are both; one is the model if it names one, else the prompt.

    A model alone starts a conversation on a terminal; elsewhere the prompt is read from stdin. `is_named`: --model is
    given.
    """
    if len(words) > 2:
        head = f"{words[0]} " if names_model(words[0]) else ""
        prompt = " ".join(words[1:] if head else words)
        raise UsageError(f'{len(words)} words are given; put the prompt in quotes: octavo run {head}"{prompt}"')
    if args.raw and args.system is not None:
        raise UsageError("--system needs the chat template; leave out --raw")
    model = words[0] if len(words) == 2 else None
    prompt = words[-1] if words else "-"
    if len(words) == 1 and not is_named and names_model(prompt):
        model, prompt = prompt, "-"
        check_here(model)
        if stdin.isatty() and not args.raw:
            return RunRequest(None, model, False, args.system)
    if prompt == "-":
        prompt = "" if stdin.isatty() else stdin.read()
        if not prompt.strip() and model is not None:
            raise UsageError(f'{model} is a model, and the prompt is missing: octavo run {model} "Hello"')
        if stdin.isatty():
            raise UsageError('the prompt is missing: octavo run "Why is the sky blue?"')
    if not prompt.strip():
        raise UsageError("the prompt is empty; give some text")
    return RunRequest(prompt, model, args.raw, args.system)


def _lookalike(prompt: str) -> Iterator[str]:
    """Yield a note if the prompt looks like a model's name."""
    near = did_you_mean(prompt, [DEFAULT_MODEL, *SHORT_NAMES])
    if near:
        yield f"note: {prompt!r} is taken as the prompt, for no model has that name; {near}"
    elif read_reference(prompt) is not None:
        yield f"note: {prompt!r} is taken as the prompt; octavo chat {prompt} downloads that model and talks with it"


def prompt_ids(text: TextModel, asked: RunRequest) -> Sequence[int]:
    """Return the prompt's ids through the chat template, or without it when raw or when the model has none."""
    if asked.raw or text.chat_template is None:
        if asked.system is not None:
            raise UsageError("this model has no chat template, so --system cannot be given; leave it out")
        return text.tokenizer.encode(asked.prompt or "")
    messages = [{"role": "user", "content": asked.prompt}]
    if asked.system is not None:
        messages.insert(0, {"role": "system", "content": asked.system})
    return text.prompt_ids_from_messages(messages)


async def stream(session: Session, out: TextIO) -> tuple[FinishReason, Usage]:
    """Write deltas as they arrive; cancel the request if this task is cancelled. Raises EngineError if it fails."""
    try:
        async for delta in session:
            out.write(delta.text)
            out.flush()
            if delta.finish_reason is not None and delta.usage is not None:
                if delta.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                    return delta.finish_reason, delta.usage
                raise EngineError(delta.message or "the engine failed on this prompt")
    except (asyncio.CancelledError, BrokenPipeError):
        await session.cancel()
        raise
    raise EngineError("the answer ended without a reason")


def closing_line(reason: FinishReason, usage: Usage, start_s: float, max_tokens: int | None) -> str:
    """Return tokens, speed and times of one answer; `start_s` is the engine's start-up time."""
    decode_s = usage.e2e_s - usage.ttft_s
    speed = f"{(usage.completion_tokens - 1) / decode_s:.1f} tokens/s" if decode_s > 0 else "- tokens/s"
    cut = f" (cut by --max-tokens {max_tokens})" if reason is FinishReason.LENGTH else ""
    return (
        f"{usage.completion_tokens} tokens{cut}, {speed}, first after {usage.ttft_s * 1e3:.0f} ms; "
        f"prompt {usage.prompt_tokens} tokens; start {start_s:.1f} s"
    )
