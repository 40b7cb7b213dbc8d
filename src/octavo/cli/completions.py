"""`octavo completions bash|zsh|fish`: a script that lets a shell complete commands, flags and their values."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence

from octavo.cli.catalogue import Command, catalogue

# Into files: making the script builds every command's parser, which would delay each start of a shell.
_HOW = {
    "bash": "octavo completions bash > ~/.local/share/bash-completion/completions/octavo",
    "zsh": "octavo completions zsh > ~/.octavo.zsh, and in ~/.zshrc, behind compinit: source ~/.octavo.zsh",
    "fish": "octavo completions fish > ~/.config/fish/completions/octavo.fish",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument("shell", choices=list(_HOW), help="; ".join(f"{name}: {how}" for name, how in _HOW.items()))


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    from octavo.cli import COMMANDS  # this module is one of them

    make: dict[str, Callable[[Sequence[Command]], str]] = {"bash": bash, "zsh": zsh, "fish": fish}
    print(make[args.shell](list(catalogue(COMMANDS))), end="")
    return 0


def bash(commands: Sequence[Command]) -> str:
    """Return a function for bash's `complete`."""
    cases = "".join(
        f"    {_pattern(command.name)})\n        words={_quoted(_words(command))}\n{_bash_values(command)}        ;;\n"
        for command in _longest_first(commands)
    )
    return f"""# completions of octavo for bash
_octavo() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}"
    local line="${{COMP_WORDS[*]:1:COMP_CWORD-1}}" words="" values=""
    case "$line" in
    "") words={_quoted(_firsts(commands))} ;;
{_families(commands)}{cases}    esac
    if [ -n "$values" ]; then words="$values"; fi
    COMPREPLY=($(compgen -W "$words" -- "$current"))
    if [ ${{#COMPREPLY[@]}} -eq 0 ]; then COMPREPLY=($(compgen -f -- "$current")); fi
}}
complete -o filenames -F _octavo octavo
"""


def zsh(commands: Sequence[Command]) -> str:
    """Return bash's function, through zsh's bashcompinit."""
    return "# completions of octavo for zsh\nautoload -U +X bashcompinit && bashcompinit\n" + bash(commands)


def fish(commands: Sequence[Command]) -> str:
    """Return `complete` lines for fish."""
    lines = ["# completions of octavo for fish"]
    helps = {command.name: command.help for command in commands}
    for word in _firsts(commands):
        lines.append(f"complete -c octavo -n __fish_use_subcommand -f -a {word} -d {_fish(helps.get(word, ''))}")
    for command in commands:
        head, _, second = command.name.partition(" ")
        if second:
            seen = f"__fish_seen_subcommand_from {head}"
            lines.append(f"complete -c octavo -n '{seen}' -f -a {second} -d {_fish(command.help)}")
        condition = " and ".join(f"__fish_seen_subcommand_from {word}" for word in command.name.split())
        condition = condition.replace(" and ", "; and ")
        for flag in command.flags:
            spelled = " ".join(_fish_spelling(spelling) for spelling in flag.spellings)
            value = f" -x -a {_fish(' '.join(flag.choices))}" if flag.choices else " -r" if flag.takes_value else ""
            lines.append(f"complete -c octavo -n '{condition}' {spelled}{value} -d {_fish(flag.help)}")
        if command.words:
            lines.append(f"complete -c octavo -n '{condition}' -f -a {_fish(' '.join(command.words))}")
    return "\n".join(lines) + "\n"


def _fish_spelling(spelling: str) -> str:
    if spelling.startswith("--"):
        return f"-l {spelling[2:]}"
    return f"-s {spelling[1:]}" if len(spelling) == 2 else f"-o {spelling[1:]}"


def _fish(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _firsts(commands: Iterable[Command]) -> list[str]:
    return [*dict.fromkeys(command.name.split()[0] for command in commands), "help"]


def _families(commands: Sequence[Command]) -> str:
    """Return the cases for the first word of commands that have two words."""
    families: dict[str, list[str]] = {}
    for command in commands:
        head, _, second = command.name.partition(" ")
        if second:
            families.setdefault(head, []).append(second)
    return "".join(f"    {head}) words={_quoted(seconds)} ;;\n" for head, seconds in families.items())


def _longest_first(commands: Sequence[Command]) -> list[Command]:
    return sorted(commands, key=lambda command: -len(command.name.split()))


def _pattern(name: str) -> str:
    quoted = name.replace(" ", "\\ ")
    return f"{quoted}|{quoted}\\ *"


def _words(command: Command) -> list[str]:
    return [*command.words, *(spelling for flag in command.flags for spelling in flag.spellings)]


def _bash_values(command: Command) -> str:
    """Return the cases of the flags whose values are known."""
    cases = [(("|".join(flag.spellings)), flag.choices) for flag in command.flags if flag.choices]
    if not cases:
        return ""
    inner = "".join(f"        {spellings}) values={_quoted(choices)} ;;\n" for spellings, choices in cases)
    return f'        case "$previous" in\n{inner}        esac\n'


def _quoted(words: Iterable[str]) -> str:
    return "'" + " ".join(words).replace("'", "") + "'"
