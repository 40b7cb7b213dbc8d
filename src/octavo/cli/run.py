"""`octavo run [MODEL] "prompt"`: streams one answer to the terminal. A model without a prompt starts a conversation.

Owns: the meaning of the words, the prompt, the closing line of figures.
Does not: load a model or stream an answer (answers.py does), or run a conversation (chat.py does).
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
from octavo.cli.answers import MAX_TOKENS, LocalAnswerer, Messages, add_answer_arguments, image_part, print_text
from octavo.cli.chat import ChatSession, converse
from octavo.cli.flags import UsageError, add_settings, config_from, settings_given
from octavo.cli.terminal import say
from octavo.config import ENGINE_SECTIONS
from octavo.config.spelling import did_you_mean

if TYPE_CHECKING:
    from octavo.text.text_model import TextModel


@dataclass(frozen=True, slots=True)
class RunRequest:
    """The command line's request. `model` None is the configured model; `prompt` None is a conversation."""

    prompt: str | None
    model: str | None
    raw: bool
    system: str | None
    images: tuple[str, ...] = ()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.usage = "octavo run [MODEL] [PROMPT] [options]"
    text = "the prompt, in quotes; - reads it from stdin; a MODEL alone starts a chat"
    parser.add_argument("words", nargs="*", metavar="PROMPT", help=text)
    group = parser.add_argument_group("answer")
    add_answer_arguments(group)
    parser.set_defaults(max_tokens=None)  # default: MAX_TOKENS for one answer, no limit in a conversation
    group.add_argument(
        "--image", action="append", default=[], metavar="PATH", help="an image before the prompt; may be repeated"
    )
    group.add_argument("--raw", action="store_true", help="continue the prompt as it is, without the chat template")
    add_settings(parser, (*ENGINE_SECTIONS, "adapters"))


def run(args: argparse.Namespace) -> int:
    """Print one answer, or run a conversation. Return 0 if the answer ended by itself or at --max-tokens.

    Ctrl-C raises KeyboardInterrupt, for which main returns 130.
    """
    is_named = "model" in settings_given(args)
    request = read_words(args.words, args, sys.stdin, is_named=is_named)
    config = config_from(args, model=request.model)
    if request.prompt is None:
        conversation = ChatSession(system=args.system)
        for path in request.images:
            conversation.command(f"/image {path}")
        return converse(args, config, conversation)
    if len(args.words) == 1 and not is_named and not args.quiet:
        say(*_lookalike(request.prompt))
    args.max_tokens = MAX_TOKENS if args.max_tokens is None else args.max_tokens
    started_at = time.perf_counter()
    answerer = LocalAnswerer.load(config, args)
    return asyncio.run(_answer(answerer, request, args.quiet, time.perf_counter() - started_at))


async def _answer(answerer: LocalAnswerer, request: RunRequest, is_quiet: bool, start_s: float) -> int:
    try:
        await print_text(answerer.stream(prompt_of(answerer.engine.text, request)), [])
        print()
        if not is_quiet and answerer.usage is not None:
            tokens = answerer.usage.prompt_tokens
            print(f"{answerer.note}; prompt {tokens} tokens; start {start_s:.1f} s", file=sys.stderr)
    finally:
        await answerer.close()
    return 0


def read_words(words: Sequence[str], args: argparse.Namespace, stdin: TextIO, *, is_named: bool = False) -> RunRequest:
    """Return model and prompt. Two words are model and prompt; one word is the model if it names one, else the prompt.

    Without a prompt, a conversation starts if stdin is a terminal; otherwise stdin is the prompt. `is_named`: the user
    gave --model.
    """
    if len(words) > 2:
        head = f"{words[0]} " if names_model(words[0]) else ""
        prompt = " ".join(words[1:] if head else words)
        raise UsageError(f'{len(words)} words are given; put the prompt in quotes: octavo run {head}"{prompt}"')
    if args.raw and (args.system is not None or args.image):
        raise UsageError(f"{'--image' if args.image else '--system'} needs the chat template; leave out --raw")
    model = words[0] if len(words) == 2 else None
    prompt = words[-1] if words else "-"
    if len(words) == 1 and not is_named and names_model(prompt):
        model, prompt = prompt, "-"
        check_here(model)
        if stdin.isatty() and not args.raw:
            return RunRequest(None, model, False, args.system, tuple(args.image))
    if prompt == "-":
        prompt = "" if stdin.isatty() else stdin.read()
        if not prompt.strip() and model is not None:
            raise UsageError(f'{model} is a model, and the prompt is missing: octavo run {model} "Hello"')
        if stdin.isatty():
            raise UsageError('the prompt is missing: octavo run "Why is the sky blue?"')
    if not prompt.strip():
        raise UsageError("the prompt is empty; give some text")
    return RunRequest(prompt, model, args.raw, args.system, tuple(args.image))


def _lookalike(prompt: str) -> Iterator[str]:
    """Yield a note if the prompt looks like a model's name."""
    near = did_you_mean(prompt, [DEFAULT_MODEL, *SHORT_NAMES])
    if near:
        yield f"note: {prompt!r} is taken as the prompt, for no model has that name; {near}"
    elif read_reference(prompt) is not None:
        yield f"note: {prompt!r} is taken as the prompt; octavo chat {prompt} downloads that model and talks with it"


def prompt_of(text: TextModel, request: RunRequest) -> str | Messages:
    """Return messages for the chat template, or the text itself if the user wants raw or the model has no template."""
    prompt = request.prompt or ""
    if request.raw or text.chat_template is None:
        for name, value in (("--system", request.system), ("--image", request.images)):
            if value:
                raise UsageError(f"this model has no chat template, so {name} cannot be given; leave it out")
        return prompt
    system = [] if request.system is None else [{"role": "system", "content": request.system}]
    images = [image_part(path) for path in request.images]
    return [*system, {"role": "user", "content": [*images, {"type": "text", "text": prompt}] if images else prompt}]
