"""`octavo help [WORD]`: the help of a command, or all commands and flags that a word is found in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from octavo.cli.catalogue import Command, Commands, Flag, catalogue, parser_of
from octavo.cli.flags import UsageError

_SHOWN = 5  # commands that are named beside a flag


def run_help(words: Sequence[str], commands: Commands) -> int:
    """Print what is found; 1 when nothing is. Raises UsageError."""
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
    """Lines about commands and flags whose names or help have all the words; a flag of several commands comes once."""
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
