"""`octavo chat [MODEL]`: a conversation in the terminal, with an engine in this process or a server (--server, --url).

Owns: the conversation (messages, parameters, `/...` commands); saved conversations; reading lines; the handling of
Ctrl-C and Ctrl-D; the tools of MCP servers, and the question before a call. Does not: generate answers (answers.py
does), or talk to MCP servers (mcp.py does).
Invariants: no call is made that the user has not agreed to, by an answer or by --mcp-yes. What a model or an MCP server
wrote about a call is shown without control characters.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.cli.answers import (
    Answerer,
    LocalAnswerer,
    RemoteAnswerer,
    add_answer_arguments,
    image_part,
    params_given,
    print_text,
)
from octavo.cli.flags import UsageError, add_settings, config_from, settings_given
from octavo.cli.servers import add_server_arguments, named_url
from octavo.cli.terminal import say
from octavo.config import ENGINE_SECTIONS, Config
from octavo.config.spelling import unknown
from octavo.core.request import SamplingParams
from octavo.errors import InvalidRequestError, OctavoError
from octavo.mcp import McpError, McpServers, McpServerSpec, McpTool, function_names, read_arguments, read_specs

MAX_ROUNDS = 10  # of answers that call tools, for one message
MAX_RESULT_CHARACTERS = 32_768  # that the model gets
_MAX_SHOWN = 2000  # characters of a call's arguments
_MAX_LINE = 160  # of a result or a description
NO_TOOLS = "no tools; --mcp and --mcp-config name servers that have some"
STOPPED = "error: the user stopped this call"
_FENCE = '"""'
MAX_FILE_BYTES = 8 << 20
NUMBERS = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "max_tokens": int,
    "seed": int,
    "presence_penalty": float,
    "frequency_penalty": float,
    "repetition_penalty": float,
}
HELP = """\
/help             these lines
/reset            start a new conversation with the same system message
/system [TEXT]    set the system message, or without text remove it
/params [A=X ...] show or set sampling parameters, such as /params temperature=0.2 max_tokens=100; A= resets one
/undo             remove the last message and its answer
/retry            answer the last message again
/image PATH       add an image to the next message; without PATH remove those that were added
/tools            list the tools that the model may call (--mcp)
/save FILE        save the conversation as JSON
/load FILE        continue a saved conversation
/bye              leave; so do /exit, /quit, exit, quit and Ctrl-D
Ctrl-C stops an answer. A line that ends with a backslash continues in the next; \"\"\" encloses several lines."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help="which model answers [smollm2]")
    group = parser.add_argument_group("a server that answers instead")
    add_server_arguments(group, default="none: a model is loaded")
    group.add_argument("--api-key", metavar="KEY", help="the server's key [OCTAVO_API_KEY]")
    group = parser.add_argument_group("conversation")
    group.add_argument("--load", metavar="FILE", help="continue a conversation that /save wrote")
    group.add_argument("--mcp-yes", action="store_true", help="let the model call MCP tools without asking")
    add_answer_arguments(group, max_tokens=None)
    add_settings(parser, (*ENGINE_SECTIONS, "adapters", "mcp"))


def run(args: argparse.Namespace) -> int:
    """Run a conversation until the end of the input, or /exit."""
    conversation = ChatSession(system=args.system)
    if args.load:
        say(conversation.command(f"/load {args.load}"))
    url = named_url(args)
    config = config_from(args, model=args.model if url is None else None)
    if specs := read_specs(config.mcp, needs_names=False):
        conversation.tools = ChatTools(specs, config.mcp.mcp_timeout_s, says_yes=args.mcp_yes)
    if url is None:
        return converse(args, config, conversation)
    with asyncio.Runner() as runner:
        _talk(runner, _open_server(args, url, runner), conversation, is_quiet=args.quiet)
    return 0


def converse(args: argparse.Namespace, config: Config, conversation: ChatSession | None = None) -> int:
    """Load a model in this process and run a conversation until the end of the input, or /exit."""
    with asyncio.Runner() as runner:
        answerer = _open_model(args, config, runner)
        _talk(runner, answerer, conversation or ChatSession(system=args.system), is_quiet=args.quiet)
    return 0


def _open_server(args: argparse.Namespace, url: str, runner: asyncio.Runner) -> Answerer:
    """Connect to a server, the source of answers. Raises OctavoError."""
    if given := [name for name in settings_given(args) if not name.startswith("mcp")]:
        raise UsageError(f"{', '.join(given)} is a setting of an engine here; leave it out with --server or --url")
    remote = RemoteAnswerer(url, args.api_key, args.model or "", defaults=params_given(args))
    runner.run(remote.connect())
    return remote


def _open_model(args: argparse.Namespace, config: Config, runner: asyncio.Runner) -> Answerer:
    """Load a model, the source of answers. Raises OctavoError."""
    answerer = LocalAnswerer.load(config, args)
    try:
        answerer.engine.text.check_generates()
    except InvalidRequestError:
        runner.run(answerer.close())
        raise
    if answerer.engine.text.chat_template is None:
        runner.run(answerer.close())
        raise UsageError(
            f"{answerer.name} has no chat template; give one with --chat-template, or use octavo run --raw"
        )
    return answerer


def _talk(runner: asyncio.Runner, answerer: Answerer, conversation: ChatSession, *, is_quiet: bool) -> None:
    """Read messages and print answers until the end of the input; then close the answerer and the tools."""
    tools = conversation.tools
    try:
        if tools is not None:
            runner.run(tools.open())
            answerer.tools = tools.definitions
        _take_turns(runner, answerer, conversation, is_shown=sys.stdin.isatty() and not is_quiet)
    finally:
        if tools is not None:
            runner.run(tools.close())
        runner.run(answerer.close())


def _take_turns(runner: asyncio.Runner, answerer: Answerer, conversation: ChatSession, *, is_shown: bool) -> None:
    if is_shown:
        say(f"{answerer.name}: type a message, or /help")
        if conversation.tools is not None:
            say(f"{len(answerer.tools)} tools, which /tools lists")
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
            _turn(conversation, text)
            if conversation.wants_answer:
                _answer(runner, answerer, conversation, is_shown)


def _turn(conversation: ChatSession, text: str) -> None:
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
        result = conversation.command(text)
    except OctavoError as error:
        result = f"error: {error}"
    if result:
        say(result)


def _answer(runner: asyncio.Runner, answerer: Answerer, conversation: ChatSession, is_shown: bool) -> None:
    """Print an answer as it arrives, after calls of tools. Ctrl-C stops it; the conversation keeps what there is."""
    for _ in range(MAX_ROUNDS):
        parts: list[str] = []
        note, has_failed = "", False
        try:
            runner.run(print_text(answerer.stream(conversation.prompt(), conversation.params), parts))
            note = answerer.note
        except KeyboardInterrupt:
            note = "stopped"
        except OctavoError as error:
            note, has_failed = f"error: {error}", True
        is_ended = note == "stopped" or has_failed or conversation.tools is None or not answerer.calls
        if parts or is_ended:
            print()
        if is_ended:
            break
        if not _call_tools(runner, answerer.calls, conversation, "".join(parts)):
            parts, note = [], "stopped"
            break
    else:
        parts, note, has_failed = [], f"error: stopped after {MAX_ROUNDS} rounds of tool calls", True
    conversation.answer("".join(parts))
    if note and (is_shown or has_failed):
        say(note)


def _call_tools(
    runner: asyncio.Runner, calls: Sequence[Mapping[str, Any]], conversation: ChatSession, text: str
) -> bool:
    """Make the calls and add them with their results to the conversation; return False if Ctrl-C stopped one."""
    assert conversation.tools is not None
    results: list[str] = []
    with contextlib.suppress(KeyboardInterrupt):
        for call in calls:
            results.append(conversation.tools.run(runner, call))
    is_whole = len(results) == len(calls)
    results += [STOPPED] * (len(calls) - len(results))
    conversation.messages.append({"role": "assistant", "content": text, "tool_calls": list(calls)})
    conversation.messages += [
        {"role": "tool", "tool_call_id": call["id"], "content": result}
        for call, result in zip(calls, results, strict=True)
    ]
    return is_whole


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
    """Enable line editing with a saved history, if there is a terminal and the readline library."""
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


class CommandError(OctavoError):
    """A `/...` command that cannot be run."""


@dataclass(slots=True)
class ChatSession:
    """Messages in OpenAI's form, and the parameters that differ from the answerer's defaults."""

    system: str | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)
    params: dict[str, float | int] = field(default_factory=dict)
    is_over: bool = False
    wants_answer: bool = False
    tools: ChatTools | None = None
    images: list[dict[str, Any]] = field(default_factory=list)  # of the next message

    def prompt(self) -> list[dict[str, Any]]:
        """Return the messages to send, the system message first."""
        head = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*head, *self.messages]

    def say(self, text: str) -> None:
        """Add the user's next message."""
        content: object = [*self.images, {"type": "text", "text": text}] if self.images else text
        self.messages.append({"role": "user", "content": content})
        self.images, self.wants_answer = [], True

    def answer(self, text: str) -> None:
        """Add the whole answer or its printed part. If it is empty, remove the question, unless tools were called."""
        self.wants_answer = False
        if text or self.messages[-1]["role"] == "tool":
            self.messages.append({"role": "assistant", "content": text})
        else:
            self.messages.pop()

    def command(self, line: str) -> str:
        """Run a `/...` command; return the text to show. Raises CommandError."""
        name, _, rest = line[1:].partition(" ")
        does: dict[str, Callable[[str], str]] = {
            "help": lambda _: HELP,
            "reset": self._reset,
            "system": self._system,
            "params": self._params,
            "undo": self._undo,
            "retry": self._retry,
            "image": self._image,
            "tools": lambda _: NO_TOOLS if self.tools is None else self.tools.listing(),
            "save": self._save,
            "load": self._load,
            "bye": self._exit,
            "exit": self._exit,
            "quit": self._exit,
        }
        if name not in does:
            raise CommandError(
                unknown("command", f"/{name}", [f"/{known}" for known in does if known not in ("exit", "quit")])
            )
        return does[name](rest.strip())

    def _reset(self, _: str) -> str:
        self.messages.clear()
        return "conversation forgotten"

    def _system(self, text: str) -> str:
        self.system = text or None
        return "system message set" if text else "no system message"

    def _params(self, text: str) -> str:
        changed = dict(self.params)
        for word in text.split():
            name, is_pair, value = word.partition("=")
            name = name.replace("-", "_")
            if not is_pair:
                raise CommandError(f"parameter {word!r} has no number; give {word}=NUMBER")
            if name not in NUMBERS:
                raise CommandError(unknown("parameter", name, NUMBERS))
            if not value:
                changed.pop(name, None)
                continue
            try:
                changed[name] = NUMBERS[name](value)
            except ValueError:
                raise CommandError(f"{name} is {value!r}; give a number") from None
        SamplingParams(**changed)  # type: ignore[arg-type]  # checked by itself
        self.params = changed
        return ", ".join(f"{name}={value}" for name, value in changed.items()) or "all at their defaults"

    def _undo(self, _: str) -> str:
        if not self.messages:
            raise CommandError("there is no message to undo")
        while self.messages and self.messages.pop()["role"] != "user":
            pass
        return "removed"

    def _retry(self, _: str) -> str:
        if not any(message["role"] == "user" for message in self.messages):
            raise CommandError("there is no message to answer again")
        while self.messages[-1]["role"] != "user":
            self.messages.pop()
        self.wants_answer = True
        return ""

    def _image(self, path: str) -> str:
        self.images = [*self.images, image_part(path)] if path else []
        return f"the next message has {len(self.images)} image{'s' * (len(self.images) != 1)}"

    def _exit(self, _: str) -> str:
        self.is_over = True
        return ""

    def _save(self, name: str) -> str:
        path = _path(name, "/save")
        saved = {"system": self.system, "params": self.params, "messages": self.messages}
        try:
            path.write_text(json.dumps(saved, ensure_ascii=False, indent=1) + "\n", "utf-8")
        except OSError as error:
            raise CommandError(f"{path} cannot be written ({error.strerror or error})") from None
        return f"saved to {path}"

    def _load(self, name: str) -> str:
        path = _path(name, "/load")
        try:
            if path.stat().st_size > MAX_FILE_BYTES:
                raise CommandError(f"{path} has more than {MAX_FILE_BYTES} bytes")
            saved = json.loads(path.read_text("utf-8"))
        except OSError as error:
            raise CommandError(f"{path} cannot be read ({error.strerror or error})") from None
        except (ValueError, RecursionError) as error:
            raise CommandError(f"{path} is not JSON ({error})") from None
        self._restore(saved, path)
        return f"{len(self.messages)} messages from {path}"

    def _restore(self, saved: object, path: Path) -> None:
        if isinstance(saved, list):
            saved = {"messages": saved}
        messages = saved.get("messages") if isinstance(saved, dict) else None
        roles = ("user", "assistant", "system", "tool")
        is_fine = isinstance(messages, list) and all(
            isinstance(m, dict) and m.get("role") in roles and isinstance(m.get("content"), str | list)
            for m in messages
        )
        if not is_fine or not isinstance(saved, dict) or messages is None:
            raise CommandError(f"{path} is not a conversation; it needs messages, each with role and content")
        system = saved.get("system")
        params = saved.get("params") or {}
        if not isinstance(params, dict):
            raise CommandError(f"{path}: params must be an object")
        wrong = [name for name in params if name not in NUMBERS]
        if wrong:
            raise CommandError(f"{path}: {unknown('parameter', str(wrong[0]), NUMBERS)}")
        SamplingParams(**params)
        self.system = system if isinstance(system, str) else None
        self.messages, self.params = list(messages), dict(params)


def _path(name: str, command: str) -> Path:
    if not name:
        raise CommandError(f"give a file: {command} FILE")
    return Path(name).expanduser()


class ChatTools:
    """The tools of the servers that could be reached. `says_yes`: calls are made without a question."""

    def __init__(self, specs: Sequence[McpServerSpec], timeout_s: float, *, says_yes: bool) -> None:
        self._servers = McpServers(specs, timeout_s)
        self._says_yes = says_yes
        self._always: set[str] = set()  # names of tools
        self.functions: Mapping[str, McpTool] = {}

    async def open(self) -> None:
        """List the tools of all servers; tell which servers failed."""
        names = list(self._servers.specs)
        found = await asyncio.gather(*map(self._servers.tools, names), return_exceptions=True)
        tools: list[McpTool] = []
        for listed in found:
            if isinstance(listed, McpError):
                say(f"error: {_shown(listed.full, _MAX_SHOWN)}")
            elif isinstance(listed, BaseException):
                raise listed
            else:
                tools += listed
        self.functions = function_names(tools)

    async def close(self) -> None:
        """End the servers that were started."""
        await self._servers.close()

    @property
    def definitions(self) -> list[dict[str, Any]]:
        """The tools as OpenAI's `tools`."""
        return [
            {
                "type": "function",
                "function": {"name": name, "description": tool.description, "parameters": dict(tool.schema)},
            }
            for name, tool in self.functions.items()
        ]

    def listing(self) -> str:
        """Return a line for each tool."""
        lines = [
            f"{name} ({tool.server}): {_shown(tool.description or 'without a description', _MAX_LINE)}"
            for name, tool in self.functions.items()
        ]
        return "\n".join(lines) or NO_TOOLS

    def run(self, runner: asyncio.Runner, call: Mapping[str, Any]) -> str:
        """Ask the user about a call and make it; return the text that the model gets."""
        name, text = call["function"]["name"], call["function"]["arguments"]
        tool = self.functions.get(name)
        if tool is None:
            return f"error: there is no tool {name!r}; the tools are {', '.join(self.functions) or 'none'}"
        say(f"[{tool.server}] {name} {_shown(text, _MAX_SHOWN)}")
        if not self._is_agreed(name):
            return "error: the user declined this call"
        try:
            result = runner.run(self._servers.call(tool, read_arguments(text), MAX_RESULT_CHARACTERS))
        except McpError as error:
            say(f"error: {_shown(error.full, _MAX_SHOWN)}")
            return f"error: {error}"
        say(f"[{tool.server}] {'failed: ' if result.is_error else '-> '}{_shown(result.text, _MAX_LINE)}")
        return f"error: {result.text}" if result.is_error else result.text

    def _is_agreed(self, name: str) -> bool:
        if self._says_yes or name in self._always:
            return True
        if not sys.stdin.isatty():
            say("not called: the input is no terminal, so the user cannot be asked; --mcp-yes agrees to all calls")
            return False
        try:
            answer = input("call it? y(es), n(o), a(lways this tool): ").strip().lower()
        except EOFError:
            return False
        if answer in ("a", "always"):
            self._always.add(name)
        return answer in ("y", "yes", "a", "always")


def _shown(text: str, most: int) -> str:
    """Return a text in one line of at most `most` characters, with what is not printable as escapes."""
    plain = "".join(c if c.isprintable() else " " if c in "\n\t" else ascii(c)[1:-1] for c in text[: most + 1])
    return plain if len(text) <= most else f"{plain[:most]}... ({len(text)} characters)"
