"""The tools of `octavo chat`: shown to the user, called when the user agrees.

Owns: the question before a call, and what of a call and its result is shown. Does not: talk to servers (mcp.py does).
Invariants: no call is made that the user has not agreed to, by an answer or by --mcp-yes. What a model or a server
wrote is shown without control characters.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.cli.terminal import say
from octavo.mcp import McpError, McpServers, McpServerSpec, McpTool, function_names, read_arguments

MAX_ROUNDS = 10  # of answers that call tools, for one message
MAX_RESULT_CHARACTERS = 32_768  # that the model gets
_MAX_SHOWN = 2000  # characters of a call's arguments
_MAX_LINE = 160  # of a result or a description
NO_TOOLS = "no tools; --mcp and --mcp-config name servers that have some"
STOPPED = "error: the user stopped this call"


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
