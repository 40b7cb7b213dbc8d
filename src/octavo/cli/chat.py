"""`octavo chat [MODEL]`: a conversation in the terminal, with an engine here or a server's (--server, --url).

Owns: reading lines, printing answers as they arrive, what Ctrl-C and Ctrl-D mean.
Does not: keep the conversation (conversation does) or answer (answerers do).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

from octavo.cli.answer_flags import add_answer_arguments, sampling_params
from octavo.cli.answerers import Answerer, LocalAnswerer, RemoteAnswerer
from octavo.cli.conversation import ChatSession
from octavo.cli.flags import UsageError, add_settings, config_from, settings_given
from octavo.cli.servers import add_server_arguments, named_url
from octavo.cli.terminal import loading, say, warn_limits
from octavo.config import ENGINE_SECTIONS, Config
from octavo.errors import OctavoError

_FENCE = '"""'
_GIVEN = ("temperature", "top_p", "top_k", "max_tokens")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help="which model answers [smollm2]")
    group = parser.add_argument_group("a server that answers instead")
    add_server_arguments(group, default="none: a model is loaded")
    group.add_argument("--api-key", metavar="KEY", help="the server's key [OCTAVO_API_KEY]")
    group = parser.add_argument_group("conversation")
    group.add_argument("--load", metavar="FILE", help="go on with a conversation that /save kept")
    add_answer_arguments(group, max_tokens=None)
    add_settings(parser, ENGINE_SECTIONS)


def run(args: argparse.Namespace) -> int:
    """Converse until the end of the input, or /exit."""
    conversation = ChatSession(system=args.system)
    if args.load:
        say(conversation.command(f"/load {args.load}"))
    url = named_url(args)
    if url is None:
        return converse(args, config_from(args, model=args.model), conversation)
    with asyncio.Runner() as runner:
        _talk(runner, _open_server(args, url, runner), conversation, is_quiet=args.quiet)
    return 0


def converse(args: argparse.Namespace, config: Config, conversation: ChatSession | None = None) -> int:
    """Load a model here and converse until the end of the input, or /exit."""
    with asyncio.Runner() as runner:
        answerer = _open_model(args, config, runner)
        _talk(runner, answerer, conversation or ChatSession(system=args.system), is_quiet=args.quiet)
    return 0


def _open_server(args: argparse.Namespace, url: str, runner: asyncio.Runner) -> Answerer:
    """Return an answerer that asks a server. Raises OctavoError."""
    if given := settings_given(args):
        raise UsageError(f"{', '.join(given)} is a setting of an engine here; leave it out with --server or --url")
    defaults = {name: value for name in _GIVEN if (value := getattr(args, name)) is not None}
    remote = RemoteAnswerer(url, args.api_key, args.model or "", defaults=defaults)
    runner.run(remote.connect())
    return remote


def _open_model(args: argparse.Namespace, config: Config, runner: asyncio.Runner) -> Answerer:
    """Return an answerer with a model loaded here. Raises OctavoError."""
    from octavo.assembly import build_local  # heavy, and needed here only

    sampling_params(args, {})  # report a wrong flag before the model loads
    with loading(config.model.model, args.quiet):
        engine = build_local(config)
    warn_limits(config, engine.capacity)
    if engine.text.chat_template is None:
        runner.run(engine.client.close())
        raise UsageError(
            f"{engine.text.name} has no chat template; give one with --chat-template, or use octavo run --raw"
        )
    return LocalAnswerer(engine, sampling_params(args, engine.text.spec.generation), engine.text.name)


def _talk(runner: asyncio.Runner, answerer: Answerer, conversation: ChatSession, *, is_quiet: bool) -> None:
    """Read messages and print answers until the end; then close the answerer."""
    try:
        _take_turns(runner, answerer, conversation, is_shown=sys.stdin.isatty() and not is_quiet)
    finally:
        runner.run(answerer.close())


def _take_turns(runner: asyncio.Runner, answerer: Answerer, conversation: ChatSession, *, is_shown: bool) -> None:
    if is_shown:
        say(f"{answerer.name}: type a message, or /help")
    with _editing(sys.stdin.isatty()):
        while not conversation.is_over:
            try:
                text = read_message("> " if sys.stdin.isatty() else "")
            except EOFError:
                if is_shown:
                    say("")
                return
            except KeyboardInterrupt:
                say("", "Ctrl-D or /bye leaves")
                continue
            _turn(runner, answerer, conversation, text)
            if conversation.wants_answer:
                _answer(runner, answerer, conversation, is_shown)


def _turn(runner: asyncio.Runner, answerer: Answerer, conversation: ChatSession, text: str) -> None:
    """Add one message to the conversation, or run one command."""
    if not text.strip():
        return
    if text.strip() in ("exit", "quit"):
        conversation.is_over = True
        return
    if not text.startswith("/"):
        conversation.say(text)
        return
    try:
        told = conversation.command(text)
    except OctavoError as error:
        told = f"error: {error}"
    if told:
        say(told)


def _answer(runner: asyncio.Runner, answerer: Answerer, conversation: ChatSession, is_shown: bool) -> None:
    """Print an answer as it arrives; Ctrl-C keeps the part that was printed."""
    parts: list[str] = []

    async def answer() -> None:
        async with contextlib.aclosing(answerer.stream(conversation.asked(), conversation.params)) as texts:
            async for text in texts:
                parts.append(text)
                sys.stdout.write(text)
                sys.stdout.flush()

    note, has_failed = "", False
    try:
        runner.run(answer())
        note = answerer.note
    except KeyboardInterrupt:
        note = "stopped"
    except OctavoError as error:
        note, has_failed = f"error: {error}", True
    print()
    conversation.answer("".join(parts))
    if note and (is_shown or has_failed):
        say(note)


def read_message(prompt: str) -> str:
    """Read one message: a line, lines joined by backslashes, or the text between two fences. Raises EOFError."""
    line = input(prompt)
    if line.strip().startswith(_FENCE):
        lines = [line.strip().removeprefix(_FENCE)]
        while not lines[-1].rstrip().endswith(_FENCE):
            lines.append(input("… " if prompt else ""))
        lines[-1] = lines[-1].rstrip().removesuffix(_FENCE)
        return "\n".join(lines).strip("\n")
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(input("… " if prompt else ""))
    return "\n".join(lines)


@contextlib.contextmanager
def _editing(is_terminal: bool) -> Iterator[None]:
    """Enable line editing with a saved history, where there is a terminal and a library for it."""
    try:
        import readline
    except ImportError:
        is_terminal = False
    if not is_terminal:
        yield
        return
    history = Path("~/.cache/octavo/chat_history").expanduser()
    with contextlib.suppress(OSError):
        readline.read_history_file(history)
    readline.set_history_length(1000)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            history.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(history)
            history.chmod(0o600)
