"""All commands with all their flags, for the search in the help and for the shells' completions.

Owns: building every command's parser, without running any. Does not: print.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from octavo.cli.flags import Parser, choices_of

Commands = Mapping[str, tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Flag:
    """One option of a command: its spellings, its help, and its choices (empty for a switch or for any value)."""

    spellings: tuple[str, ...]
    help: str
    takes_value: bool
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Command:
    """A command: its line of help, its flags, whether it takes words without a dash, and their choices."""

    name: str
    help: str
    flags: tuple[Flag, ...]
    takes_words: bool
    words: tuple[str, ...] = ()


def parser_of(name: str, commands: Commands) -> Parser:
    """Return the parser of a command. Imports its module."""
    module_name, text = commands[name]
    parser = Parser(prog=f"octavo {name}", description=text[0].upper() + text[1:] + ".")
    importlib.import_module(module_name).add_arguments(parser)
    return parser


def catalogue(commands: Commands) -> Iterator[Command]:
    """Yield every command."""
    for name, (_, text) in commands.items():
        actions = [action for action in parser_of(name, commands)._actions if action.help is not argparse.SUPPRESS]
        flags = tuple(_flag(action) for action in actions if action.option_strings)
        words = [action for action in actions if not action.option_strings]
        choices = tuple(str(choice) for action in words for choice in action.choices or ())
        yield Command(name, text, flags, bool(words), choices)


def _flag(action: argparse.Action) -> Flag:
    text = (action.help or "").replace("%%", "%")
    return Flag(tuple(action.option_strings), text, action.nargs != 0, choices_of(action))
