"""`octavo run [MODEL] "prompt"`: one answer, streamed to the terminal.

Owns: what the words mean, the template, streaming, the closing line of numbers, a clean end on Ctrl-C.
Does not: build the engine (assembly does) or keep a conversation.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from octavo.artifacts.resolve import DEFAULT_MODEL
from octavo.assembly import LocalEngine, build_local
from octavo.cli.flags import UsageError, add_settings, config_from, whole
from octavo.cli.terminal import loading, warn_limits
from octavo.core.request import FinishReason, SamplingParams
from octavo.core.sampling_params import sampling_defaults
from octavo.errors import EngineError

if TYPE_CHECKING:
    from octavo.engine.sessions import Session, Usage
    from octavo.text.text_model import TextModel

MAX_TOKENS = 512
_GIVEN = ("temperature", "top_p", "top_k")


@dataclass(frozen=True, slots=True)
class Asked:
    """What the command line asks for. `model` None means the configured one."""

    prompt: str
    model: str | None
    raw: bool
    system: str | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.usage = "octavo run [MODEL] PROMPT [options]"
    parser.add_argument("words", nargs="*", metavar="PROMPT", help="the prompt, in quotes; - or a pipe reads it")
    group = parser.add_argument_group("answer")
    add_answer_arguments(group)
    group.add_argument("--raw", action="store_true", help="continue the prompt as it is, without the chat template")
    add_settings(parser, ("model", "cache", "scheduling", "execution", "speculation"))


def add_answer_arguments(group: argparse._ArgumentGroup, max_tokens: int | None = MAX_TOKENS) -> None:
    """Add what says how to answer; `max_tokens` is the default, None for as many as fit."""
    most = max_tokens if max_tokens is not None else "as many as fit"
    flags = ("--max-tokens", "--n-predict", "-n")
    group.add_argument(*flags, type=whole, default=max_tokens, metavar="N", help=f"tokens at most [{most}]")
    group.add_argument("--temperature", "--temp", type=float, metavar="X", help="0 = greedy [the model's, else 1]")
    group.add_argument("--top-p", type=float, metavar="X", help="nucleus [the model's, else 1]")
    group.add_argument("--top-k", type=int, metavar="N", help="most likely tokens [the model's, else all]")
    group.add_argument("--system", metavar="TEXT", help="system message")
    group.add_argument("--quiet", "-q", action="store_true", help="no progress and no numbers on stderr")


def run(args: argparse.Namespace) -> int:
    """Answer; 0 when the answer ended by itself or at --max-tokens, 130 after Ctrl-C."""
    asked = read_words(args.words, args.raw, args.system, sys.stdin)
    config = config_from(args, model=asked.model)
    sampling_params(args, {})  # a mistaken flag should not wait for the model
    begun = time.perf_counter()
    with loading(config.model.model, args.quiet):
        engine = build_local(config)
    warn_limits(config, engine.capacity)
    return asyncio.run(_answer(engine, asked, args, time.perf_counter() - begun))


async def _answer(engine: LocalEngine, asked: Asked, args: argparse.Namespace, start_s: float) -> int:
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


def read_words(words: Sequence[str], raw: bool, system: str | None, stdin: TextIO) -> Asked:
    """Tell model and prompt apart: one word is the prompt, two are model and prompt, none reads stdin."""
    if len(words) > 2:
        head = f"{words[0]} " if _is_model(words[0]) else ""
        prompt = " ".join(words[1:] if head else words)
        raise UsageError(f'{len(words)} words are given; put the prompt in quotes: octavo run {head}"{prompt}"')
    if raw and system is not None:
        raise UsageError("--system needs the chat template; leave out --raw")
    model = words[0] if len(words) == 2 else None
    prompt = words[-1] if words else "-"
    if len(words) == 1 and _is_model(prompt):
        if stdin.isatty():
            raise UsageError(f'{prompt} is a model, and the prompt is missing: octavo run {prompt} "Hello"')
        model, prompt = prompt, "-"
    if prompt == "-":
        if stdin.isatty():
            raise UsageError('the prompt is missing: octavo run "Why is the sky blue?"')
        prompt = stdin.read()
    if not prompt.strip():
        raise UsageError("the prompt is empty; give some text")
    return Asked(prompt, model, raw, system)


def _is_model(word: str) -> bool:
    return word == DEFAULT_MODEL or (word.endswith(".gguf") and Path(word).exists())


def sampling_params(args: argparse.Namespace, generation: Mapping[str, float]) -> SamplingParams:
    """Return what flags ask for, else the model's generation config, else the defaults. Raises InvalidRequestError."""
    given = {name: value for name in _GIVEN if (value := getattr(args, name)) is not None}
    return SamplingParams(**{**sampling_defaults(generation), **given, "max_tokens": args.max_tokens})


def prompt_ids(text: TextModel, asked: Asked) -> Sequence[int]:
    """The prompt through the chat template, or as it is when raw or when the model has none."""
    if asked.raw or text.chat_template is None:
        if asked.system is not None:
            raise UsageError("this model has no chat template, so --system cannot be given; leave it out")
        return text.tokenizer.encode(asked.prompt)
    messages = [{"role": "user", "content": asked.prompt}]
    if asked.system is not None:
        messages.insert(0, {"role": "system", "content": asked.system})
    return text.prompt_ids_from_messages(messages)


async def stream(session: Session, out: TextIO) -> tuple[FinishReason, Usage]:
    """Write deltas as they come; cancel the request if this task is cancelled. Raises EngineError if it fails."""
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
    """Tokens, speed and times of one answer; `start_s` is what the engine took to start."""
    decode_s = usage.e2e_s - usage.ttft_s
    speed = f"{(usage.completion_tokens - 1) / decode_s:.1f} tokens/s" if decode_s > 0 else "- tokens/s"
    cut = f" (cut by --max-tokens {max_tokens})" if reason is FinishReason.LENGTH else ""
    return (
        f"{usage.completion_tokens} tokens{cut}, {speed}, first after {usage.ttft_s * 1e3:.0f} ms; "
        f"prompt {usage.prompt_tokens} tokens; start {start_s:.1f} s"
    )
