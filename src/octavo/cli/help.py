"""`octavo help [WORD]`: the help of a command, or all commands and flags that contain a word."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from octavo.cli.catalogue import Command, Commands, Flag, catalogue, parser_of
from octavo.cli.flags import UsageError

_SHOWN = 5  # commands listed for each flag


def run_help(words: Sequence[str], commands: Commands) -> int:
    """Print the matches; return 1 if there is none. Raises UsageError."""
    name = " ".join(words)
    if name in commands:
        parser_of(name, commands).print_help()
        return 0
    if any(not word.strip("-") for word in words):
        raise UsageError("give a word to look for, such as: octavo help cache")
    found = list(search([word.lower() for word in words], catalogue(commands)))
    for line in found:
        print(line)
    if not found:
        print(f"unknown word {name!r}; octavo --help lists the commands")
    return 0 if found else 1


def search(words: Sequence[str], known: Iterator[Command]) -> Iterator[str]:
    """Yield lines about commands and flags whose names or help contain all the words, each flag once."""
    owners: dict[Flag, list[str]] = {}
    for command in known:
        if _has(words, f"{command.name} {command.help}"):
            yield f"octavo {command.name:20} {command.help}"
        for flag in command.flags:
            if _has(words, f"{' '.join(flag.spellings)} {flag.help}"):
                owners.setdefault(flag, []).append(command.name)
    for flag, names in owners.items():
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        yield f"{', '.join(flag.spellings)}\n    {flag.help}\n    of: {', '.join(names[:_SHOWN])}{more}"


def _has(words: Sequence[str], text: str) -> bool:
    text = text.lower()
    return all(word in text for word in words)
