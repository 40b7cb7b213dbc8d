"""Hide the keys given on the command line from `ps`, which shows them to every user of the machine.

Owns: overwriting the keys in this process's arguments (Linux: /proc). Does not: hide keys in a shell's history, or
before this code runs (variables such as OCTAVO_API_KEY and files avoid both). Child processes never have keys as
arguments.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

FLAGS = ("--api-key", "--fleet-token")
_BYTES = tuple(flag.encode() for flag in FLAGS)
_PROC = Path("/proc/self")
_ARG_START = 48 - 3  # index of arg_start among the fields of stat(5) after the process's name


def hide_keys(words: Sequence[str], proc: Path = _PROC) -> str | None:
    """Overwrite the keys in this process's arguments; return a warning if that is not possible."""
    given = [flag for flag in FLAGS if any(word == flag or word.startswith(f"{flag}=") for word in words)]
    if not given:
        return None
    try:
        _overwrite(proc)
        is_hidden = not any(set(shown) - {ord("*")} for _, shown in _keys((proc / "cmdline").read_bytes()))
    except (OSError, ValueError, IndexError):
        is_hidden = False
    if is_hidden:
        return None
    flag = given[0]
    variable = "OCTAVO_" + flag.removeprefix("--").upper().replace("-", "_")
    return f"{flag} can be seen by every user of this machine (ps); set {variable}, or use {flag}-file"


def _overwrite(proc: Path) -> None:
    shown = (proc / "cmdline").read_bytes()
    fields = (proc / "stat").read_text().rpartition(")")[2].split()
    start, end = (int(field) for field in fields[_ARG_START : _ARG_START + 2])
    with (proc / "mem").open("r+b", buffering=0) as memory:
        memory.seek(start)
        if end - start != len(shown) or memory.read(len(shown)) != shown:
            return
        for offset, key in _keys(shown):
            memory.seek(start + offset)
            memory.write(b"*" * len(key))


def _keys(shown: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, key) for each key in the NUL-terminated arguments."""
    offset, is_key = 0, False
    for argument in shown.split(b"\0"):
        if is_key:
            yield offset, argument
        else:
            for flag in _BYTES:
                if argument.startswith(flag + b"="):
                    yield offset + len(flag) + 1, argument[len(flag) + 1 :]
        is_key = argument in _BYTES and not is_key
        offset += len(argument) + 1
