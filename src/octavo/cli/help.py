"""`octavo help [WORD]` searches all commands and flags; `octavo completions SHELL` prints a shell's completion script.

Both read every command's parser, so they import every command's module. shtab makes the scripts.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import shtab

from octavo.cli import COMMANDS, load_command
from octavo.cli.flags import Parser, UsageError, choices_of

_MAX_OWNERS = 5  # commands listed for each flag
_NUMBERS = ("N", "X", "S")  # metavars of values that are not completed with file names
# Scripts are installed as files, because making a script builds every parser and would delay each shell's start.
_INSTALL = {
    "bash": "octavo completions bash > ~/.local/share/bash-completion/completions/octavo",
    "zsh": "octavo completions zsh > ~/.zfunc/_octavo, with fpath=(~/.zfunc $fpath) before compinit in ~/.zshrc",
    "fish": "octavo completions fish > ~/.config/fish/completions/octavo.fish",
}


def add_completions_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `octavo completions`."""
    texts = "\n".join(["one of these shells:", *(f"{shell}: {command}" for shell, command in _INSTALL.items())])
    parser.add_argument("shell", choices=list(_INSTALL), help=texts)


def run_completions(args: argparse.Namespace) -> int:
    """Print the script for a shell."""
    print(shtab.complete(parser_of_all(), args.shell))
    return 0


def parser_of_all() -> Parser:
    """Return one parser with every command as a subparser. The arguments have shtab's completion attributes."""
    root = Parser(prog="octavo")
    families = {"": root.add_subparsers()}
    for name, (_, text) in COMMANDS.items():
        family, _, word = name.rpartition(" ")
        if family not in families:
            families[family] = families[""].add_parser(family, help=f"{family} commands").add_subparsers()
        parser = families[family].add_parser(word, help=text)
        load_command(name, parser)
        for action in parser._actions:
            _set_completion(action)
    families[""].add_parser("help", help="show the help of a command, or search all commands and flags")
    return root


def _set_completion(action: argparse.Action) -> None:
    """Make shells complete an argument with its choices, or with file names if it takes one word of text."""
    action.metavar = str(action.metavar or "NAME").replace(":", "=")  # zsh separates the parts of a rule by colons
    if choices := choices_of(action):
        action.choices = choices
    elif action.nargs in (None, "?") and action.metavar not in _NUMBERS:
        vars(action)["complete"] = shtab.FILE  # the attribute that shtab reads


def run_help(words: Sequence[str]) -> int:
    """Print a command's help, or the commands and flags that contain the words; return 1 if there are none."""
    name = " ".join(words)
    if name in COMMANDS:
        parser = Parser(prog=f"octavo {name}")
        load_command(name, parser)
        parser.print_help()
        return 0
    if any(not word.strip("-") for word in words):
        raise UsageError("give a word to look for, such as: octavo help cache")
    lines = _search([word.lower() for word in words])
    print("\n".join(lines) if lines else f"unknown word {name!r}; octavo --help lists the commands")
    return 0 if lines else 1


def _search(words: Sequence[str]) -> list[str]:
    """Return lines about the commands and flags whose names or help contain all the words; each flag once."""
    lines: list[str] = []
    owners: dict[tuple[str, str], list[str]] = {}  # spellings and help of a flag -> its commands
    for name, (_, text) in COMMANDS.items():
        if _has_all(words, f"{name} {text}"):
            lines.append(f"octavo {name:20} {text}")
        parser = Parser()
        load_command(name, parser)
        for action in parser._actions:
            spellings, flag_help = ", ".join(action.option_strings), (action.help or "").replace("%%", "%")
            if spellings and action.help != argparse.SUPPRESS and _has_all(words, f"{spellings} {flag_help}"):
                owners.setdefault((spellings, flag_help), []).append(name)
    # Flags whose names have the first word come first: "port" is a part of "importance" too.
    for (spellings, flag_help), names in sorted(owners.items(), key=lambda each: words[0] not in each[0][0]):
        more = f" and {len(names) - _MAX_OWNERS} more" if len(names) > _MAX_OWNERS else ""
        lines += [spellings, f"    {flag_help}", f"    of: {', '.join(names[:_MAX_OWNERS])}{more}"]
    return lines


def _has_all(words: Sequence[str], text: str) -> bool:
    text = text.lower()
    return all(word in text for word in words)
