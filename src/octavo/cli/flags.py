"""Flags from settings: an argument parser whose options are the config parts' fields.

Owns: argparse options for the settings, what was given, errors with near names.
Does not: read or check values (settings does, so that every source is checked alike).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

from octavo.config import Config
from octavo.errors import ConfigError
from octavo.settings import SETTINGS, Resolved, Setting, load, whole_number

_DEST = "setting:"  # keeps settings apart from a command's own arguments
_TAKES_WORDS = {"served_model_name"}  # the flag takes all words that follow it, as vLLM's does; others are repeated
_TITLES = {
    "model": "model",
    "cache": "KV cache",
    "scheduling": "scheduling",
    "execution": "execution",
    "speculation": "speculation",
    "serving": "serving",
    "web": "browsers, certificates, proxies",
    "admission": "admission",
    "retry": "retries and the journal",
    "responses": "stored responses",
    "batch": "files and batches",
    "statistics": "statistics",
    "recording": "recording",
    "telemetry": "traces and the log",
}


class UsageError(ConfigError):
    """The command line is not understood."""


class Parser(argparse.ArgumentParser):
    """An argument parser that raises UsageError, knows near names, and never abbreviates."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=_Formatter, **options)

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """Parse, or raise UsageError naming the word at fault and what is near it."""
        args, unknown = self.parse_known_intermixed_args(words)
        if unknown:
            word = unknown[0].split("=")[0]
            listed = (action for action in self._actions if action.help is not argparse.SUPPRESS)
            flags = [flag for action in listed for flag in action.option_strings]
            near = get_close_matches(word, flags, n=1) if word.startswith("-") else []
            raise UsageError(
                f"{word} is not understood; {f'did you mean {near[0]}?' if near else f'see {self.prog} --help'}"
            )
        return args

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage and exiting."""
        raise UsageError(f"{message}; see {self.prog} --help")


class _Formatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34)

    def _format_usage(
        self,
        usage: str | None,
        actions: Iterable[argparse.Action],
        groups: Iterable[Any],
        prefix: str | None,
    ) -> str:
        if usage is not None:
            return f"usage: {usage}\n\n"
        positionals = [action for action in actions if not action.option_strings]
        words = [self._format_args(action, self._get_default_metavar_for_positional(action)) for action in positionals]
        return f"usage: {self._prog} {' '.join([*words, '[options]'])}\n\n"


def add_settings(parser: argparse.ArgumentParser, parts: Sequence[str] = tuple(_TITLES)) -> None:
    """Give the parser one option for each setting of these parts, and --config."""
    group = parser.add_argument_group("settings")
    group.add_argument("--config", metavar="FILE", help="YAML or TOML file with settings, by flag or field name")
    for part in parts:
        group = parser.add_argument_group(_TITLES[part])
        for setting in (setting for setting in SETTINGS if setting.part == part):
            _add(group, setting)
    parser.epilog = (
        "A setting is taken from its flag, else its variable (--max-num-seqs: OCTAVO_MAX_NUM_SEQS), else --config, "
        "else its default. Numbers may be written 32K (32768) or 32k (32000)."
    )


def _add(group: Any, setting: Setting) -> None:
    is_silent = setting.default in (None, (), False) or "default" in setting.help
    default = "" if is_silent else " [on]" if setting.default is True else f" [{setting.default}]"
    options: dict[str, Any] = {"dest": _DEST + setting.name, "default": argparse.SUPPRESS}
    options["help"] = argparse.SUPPRESS if setting.is_hidden else (setting.help + default).replace("%", "%%")
    if setting.kind is bool:
        options["action"] = argparse.BooleanOptionalAction
    elif setting.kind is tuple:
        words = {"action": "extend", "nargs": "+"} if setting.name in _TAKES_WORDS else {"action": "append"}
        options |= {**words, "metavar": "TEXT"}
    elif setting.choices:
        options["metavar"] = "{" + ",".join(setting.choices) + "}"
    else:
        options["metavar"] = {int: "N", float: "X"}.get(setting.kind, "TEXT")
    group.add_argument(*setting.flags, **options)


def whole(text: str) -> int:
    """A whole number as settings are written, for `type=` of a command's own flags."""
    number = whole_number(text)
    if number is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number, such as 100 or 2K")
    return number


def settings_given(args: argparse.Namespace) -> dict[str, object]:
    """The settings that flags gave, by field name."""
    return {name.removeprefix(_DEST): value for name, value in vars(args).items() if name.startswith(_DEST)}


def respell(args: argparse.Namespace) -> list[str]:
    """The words that give another command the same settings: the flags given here, and --config."""
    words = ["--config", args.config] if args.config else []
    flags = {setting.name: setting.flags[0] for setting in SETTINGS}
    for name, value in settings_given(args).items():
        flag = flags[name]
        if isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            values = value if isinstance(value, list) else [value]
            words += [f"{flag}={one}" for one in values]
    return words


def resolve_args(args: argparse.Namespace, **extra: object) -> Resolved:
    """Merge flags, environment, --config and defaults; print remarks. `extra` are further flags by field name."""
    given = settings_given(args)
    for name, value in extra.items():
        if value is None:
            continue
        if name in given and given[name] != value:
            raise UsageError(f"{name} is given twice, as {value!r} and {given[name]!r}; give it once")
        given[name] = value
    resolved = load(given, os.environ, args.config)
    for remark in resolved.remarks:
        print(f"warning: {remark}", file=sys.stderr)
    return resolved


def config_from(args: argparse.Namespace, **extra: object) -> Config:
    """As resolve_args, only the Config."""
    return resolve_args(args, **extra).config
