"""A conversation in the terminal: its messages, its parameters, and the commands that change them.

Owns: what `/...` lines do, saved conversations. Does not: read or write the terminal, or answer anything.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.config.spelling import unknown
from octavo.core.request import SamplingParams
from octavo.errors import OctavoError

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
/reset            forget the conversation; the system message stays
/system [TEXT]    set the system message, or without text remove it
/params [A=X ...] show or set sampling parameters, such as /params temperature=0.2 max_tokens=100; A= takes one back
/undo             take back the last message and its answer
/retry            answer the last message again
/save FILE        keep the conversation as JSON
/load FILE        go on with a kept one
/bye              leave; so do /exit, /quit, exit, quit and Ctrl-D
Ctrl-C stops an answer. A line that ends with a backslash goes on in the next; \"\"\" begins and ends several lines."""


class CommandError(OctavoError):
    """A `/...` line that cannot be carried out."""


@dataclass(slots=True)
class ChatSession:
    """Messages in OpenAI's form, and the parameters that differ from the answerer's defaults."""

    system: str | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)
    params: dict[str, float | int] = field(default_factory=dict)
    is_over: bool = False
    wants_answer: bool = False

    def asked(self) -> list[dict[str, Any]]:
        """Return the messages to send, the system message first."""
        head = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*head, *self.messages]

    def say(self, text: str) -> None:
        """Add the user's next message."""
        self.messages.append({"role": "user", "content": text})
        self.wants_answer = True

    def answer(self, text: str) -> None:
        """Add the answer, whole or up to where it was stopped; without any text, remove the question instead."""
        self.wants_answer = False
        if text:
            self.messages.append({"role": "assistant", "content": text})
        else:
            self.messages.pop()

    def command(self, line: str) -> str:
        """Run a `/...` line; return the text to show the user. Raises CommandError."""
        name, _, rest = line[1:].partition(" ")
        does: dict[str, Callable[[str], str]] = {
            "help": lambda _: HELP,
            "reset": self._reset,
            "system": self._system,
            "params": self._params,
            "undo": self._undo,
            "retry": self._retry,
            "save": self._save,
            "load": self._load,
            "bye": self._exit,
            "exit": self._exit,
            "quit": self._exit,
        }
        if name not in does:
            raise CommandError(unknown("command", f"/{name}", [f"/{known}" for known in does]))
        return does[name](rest.strip())

    def _reset(self, _: str) -> str:
        self.messages.clear()
        return "forgotten"

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
        return ", ".join(f"{name}={value}" for name, value in changed.items()) or "all as by default"

    def _undo(self, _: str) -> str:
        if not self.messages:
            raise CommandError("there is nothing to take back")
        while self.messages and self.messages.pop()["role"] != "user":
            pass
        return "taken back"

    def _retry(self, _: str) -> str:
        if not any(message["role"] == "user" for message in self.messages):
            raise CommandError("there is nothing to answer again")
        while self.messages[-1]["role"] != "user":
            self.messages.pop()
        self.wants_answer = True
        return ""

    def _exit(self, _: str) -> str:
        self.is_over = True
        return ""

    def _save(self, name: str) -> str:
        path = _path(name, "/save")
        kept = {"system": self.system, "params": self.params, "messages": self.messages}
        try:
            path.write_text(json.dumps(kept, ensure_ascii=False, indent=1) + "\n", "utf-8")
        except OSError as error:
            raise CommandError(f"{path} cannot be written ({error.strerror or error})") from None
        return f"kept in {path}"

    def _load(self, name: str) -> str:
        path = _path(name, "/load")
        try:
            if path.stat().st_size > MAX_FILE_BYTES:
                raise CommandError(f"{path} has more than {MAX_FILE_BYTES} bytes")
            kept = json.loads(path.read_text("utf-8"))
        except OSError as error:
            raise CommandError(f"{path} cannot be read ({error.strerror or error})") from None
        except (ValueError, RecursionError) as error:
            raise CommandError(f"{path} is no JSON ({error})") from None
        self._take(kept, path)
        return f"{len(self.messages)} messages from {path}"

    def _take(self, kept: object, path: Path) -> None:
        if isinstance(kept, list):
            kept = {"messages": kept}
        messages = kept.get("messages") if isinstance(kept, dict) else None
        roles = ("user", "assistant", "system", "tool")
        is_fine = isinstance(messages, list) and all(
            isinstance(m, dict) and m.get("role") in roles and isinstance(m.get("content"), str) for m in messages
        )
        if not is_fine or not isinstance(kept, dict) or messages is None:
            raise CommandError(f"{path} holds no conversation; it needs messages, each with role and content")
        system = kept.get("system")
        params = kept.get("params") or {}
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
