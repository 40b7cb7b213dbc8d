"""Flags from settings: an argument parser with an option for each setting, a short help and a full help.

Owns: the settings' argparse options; the values that flags set; the two help texts; errors about unknown words.
Does not: parse or check values (config does, in the same way for every source).
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

from octavo.config import SETTINGS, Config, Setting
from octavo.config.other_engines import RENAMED_FLAGS, UNSUPPORTED_FLAGS
from octavo.config.setting import Number
from octavo.config.sources import Resolved, load
from octavo.config.spelling import unknown
from octavo.errors import ConfigError

_DEST = "setting:"  # prefix that separates settings from a command's own arguments
_BY_DEST: dict[str, Setting] = {_DEST + setting.name: setting for setting in SETTINGS}
_TITLES: dict[str, str] = {section.name: section.metadata["title"] for section in fields(Config)}
FLEET_HEADING = "several machines"
_HEADINGS = tuple(dict.fromkeys(section.metadata["heading"] for section in fields(Config)))
_SHORT_HEADINGS = tuple(heading for heading in _HEADINGS if heading != FLEET_HEADING)
_METAVARS = {int: "N", float: "X"}
_MAX_CHOICES = 26  # maximum characters of choices that the help shows as a flag's value


class UsageError(ConfigError):
    """The command line cannot be parsed."""


class Parser(argparse.ArgumentParser):
    """An argument parser that raises UsageError, suggests near names, never abbreviates, and has two helps.

    `rare` lists the command's own flags that the short help omits.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, add_help=False, formatter_class=_Formatter, **options)
        self.headings: tuple[str, ...] = ()  # of the settings that the short help shows
        self.rare: tuple[str, ...] = ()
        self._positionals.title = "arguments"
        self.add_argument("-h", "--help", action="store_true", help="show this help")
        self.add_argument("--help-all", action="store_true", help="show every option")

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """Parse the words. --help prints and exits. Raises UsageError naming the wrong word and near names."""
        words = list(words)
        before = words[: words.index("--")] if "--" in words else words
        if {"-h", "--help", "--help-all"} & set(before):
            print(self.format_help_all() if "--help-all" in before else self.format_help(), end="")
            self.exit()
        for word in before:  # argparse would read -ngl as -n gl
            name = word.split("=")[0]
            if (name in RENAMED_FLAGS or name in UNSUPPORTED_FLAGS) and name not in self._option_string_actions:
                raise UsageError(self._unknown_flag(name))
        args, extra = self.parse_known_intermixed_args(words)
        if extra:
            word = extra[0].split("=")[0]
            if word.startswith("-"):
                raise UsageError(self._unknown_flag(word))
            raise UsageError(unknown("argument", word, (), f"see {self.prog} --help"))
        return args

    def error(self, message: str) -> NoReturn:
        """Raise UsageError instead of printing the usage and exiting."""
        raise UsageError(f"{message}; see {self.prog} --help")

    def format_help(self) -> str:
        """Return the short help: the command's own options except the rare ones, and the settings with a brief."""
        hidden = {"--help-all", *self.rare}
        shown: list[tuple[str | None, list[argparse.Action]]] = []
        for group in self._action_groups:
            if group.title not in _TITLES.values():
                shown.append((group.title, [a for a in group._group_actions if not hidden & set(a.option_strings)]))
        shown += [(heading, self._brief_settings(heading)) for heading in self.headings]
        count = sum(len(actions) for _, actions in shown)
        num_visible = len(self._visible())
        epilog = f"All {num_visible} options: {self.prog} --help-all" if count < num_visible - 1 else ""
        return self._format(_Formatter(self.prog, is_short=True), shown, epilog)

    def format_help_all(self) -> str:
        """Return the full help."""
        shown = [(group.title, group._group_actions) for group in self._action_groups]
        return self._format(_Formatter(self.prog), shown, self.epilog or "")

    def _brief_settings(self, heading: str) -> list[argparse.Action]:
        """Return a heading's options with their brief texts. A command that starts no server has no server options."""
        if heading == "server" and _DEST + "host" not in {action.dest for action in self._actions}:
            return []
        pairs = [(action, _BY_DEST[action.dest]) for action in self._actions if action.dest in _BY_DEST]
        return [_brief(action, setting) for action, setting in pairs if setting.brief and setting.heading == heading]

    def _format(
        self, formatter: argparse.HelpFormatter, shown: Sequence[tuple[str | None, list[argparse.Action]]], epilog: str
    ) -> str:
        formatter.add_usage(self.usage, self._actions, ())
        formatter.add_text(self.description)
        for title, actions in shown:
            formatter.start_section(title)
            formatter.add_arguments(actions)
            formatter.end_section()
        formatter.add_text(epilog)
        return formatter.format_help()

    def _visible(self) -> list[argparse.Action]:
        return [action for action in self._actions if action.help != argparse.SUPPRESS]

    def _unknown_flag(self, flag: str) -> str:
        flags = [known for action in self._visible() for known in action.option_strings]
        if flag in UNSUPPORTED_FLAGS:
            return f"{flag} is not supported: {UNSUPPORTED_FLAGS[flag]}"
        if (ours := RENAMED_FLAGS.get(flag)) in flags:
            return unknown("flag", flag, (), f"did you mean {ours!r}?")
        return unknown("flag", flag, flags, f"see {self.prog} --help")

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError:
            kind = action.type if isinstance(action.type, Number) else Number(float if action.type is float else int)
            given = arg_string if Number(float).accepts(arg_string) else repr(arg_string)
            raise UsageError(f"{_name_of(action)} is {given}; give {kind}") from None

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            name = _name_of(action)
            choices = [str(choice) for choice in action.choices]
            kind = name if action.option_strings else name.lower()
            raise UsageError(unknown(kind, str(value), choices, f"give one of {', '.join(choices)}"))


def _name_of(action: argparse.Action) -> str:
    """Return an argument's name for messages."""
    return str(max(action.option_strings, key=len, default=action.metavar or action.dest))


whole = Number(int)
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)?")
_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, None: 1.0}


def read_duration(flag: str, text: str) -> float:
    """Return the seconds, above 0, of 90s, 5m, 1h, 250ms or 90. Raises UsageError."""
    found = _DURATION.fullmatch(text.strip())
    if found is None or not float(found[1]):
        raise UsageError(f"{flag} is {text!r}; give a time such as 90s, 5m or 1h")
    return float(found[1]) * _SECONDS[found[2]]


class _Formatter(argparse.HelpFormatter):
    """The format of both help texts. The short help shows one spelling of each flag, and its letter."""

    def __init__(self, prog: str, is_short: bool = False) -> None:
        super().__init__(prog, max_help_position=32 if is_short else 34)
        self._is_short = is_short

    def _format_usage(
        self, usage: str | None, actions: Iterable[argparse.Action], groups: Iterable[Any], prefix: str | None
    ) -> str:
        if usage is not None:
            return f"usage: {usage}\n\n"
        positionals = [action for action in actions if not action.option_strings]
        words = [self._format_args(action, self._get_default_metavar_for_positional(action)) for action in positionals]
        return f"usage: {self._prog} {' '.join([*words, '[options]'])}\n\n"

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        spelled = ", ".join(self._spellings(action))
        if action.nargs == 0:
            return spelled
        return f"{spelled} {self._format_args(action, self._get_default_metavar_for_optional(action))}"

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        if self._is_short and action.option_strings and action.nargs == "+":
            return f"{action.metavar or default_metavar} ..."
        return super()._format_args(action, default_metavar)

    def _metavar_formatter(self, action: argparse.Action, default_metavar: str) -> Callable[[int], tuple[str, ...]]:
        choices = "{" + ",".join(choices_of(action)) + "}"
        if action.metavar is None and choices != "{}":
            return lambda count: ("NAME" if len(choices) > _MAX_CHOICES else choices,) * count
        return super()._metavar_formatter(action, default_metavar)

    def _expand_help(self, action: argparse.Action) -> str:
        text, choices = super()._expand_help(action), choices_of(action)
        if action.metavar is not None or len(",".join(choices)) + 2 <= _MAX_CHOICES:
            return text
        before, bracket, default = text.rpartition(" [")
        return f"{before or text}: {', '.join(choices)}" + (bracket + default if before else "")

    def _spellings(self, action: argparse.Action) -> Sequence[str]:
        flags = action.option_strings
        if not isinstance(action, argparse.BooleanOptionalAction):
            long = [flag for flag in flags if flag.startswith("--")][:1]
            return [*(flag for flag in flags if len(flag) == 2), *long] if self._is_short else flags
        if not self._is_short:
            return [f"--[no-]{flag[2:]}" for flag in flags if not flag.startswith("--no-")]
        setting = _BY_DEST.get(action.dest)
        is_on = action.default if setting is None else setting.default
        return [flags[1] if is_on else flags[0]]

    def _split_lines(self, text: str, width: int) -> list[str]:
        return [
            line
            for part in text.splitlines()
            for line in textwrap.wrap(part, width, break_long_words=False, break_on_hyphens=False)
        ]


def _brief(action: argparse.Action, setting: Setting) -> argparse.Action:
    """Return a copy of the option for the short help."""
    default = setting.readable_default()
    short = copy.copy(action)
    short.help = setting.brief if "[" in setting.brief or not default else f"{setting.brief} [{default}]"
    short.metavar = "NAME" if setting.choices else action.metavar
    return short


def choices_of(action: argparse.Action) -> tuple[str, ...]:
    """Return the possible values of an option; empty if any value is allowed."""
    setting = _BY_DEST.get(action.dest)
    return setting.choices if setting is not None else tuple(map(str, action.choices or ()))


def add_settings(
    parser: argparse.ArgumentParser,
    sections: Sequence[str] = tuple(_TITLES),
    *,
    is_short: bool = True,
    rare: Sequence[str] = (),
    without: Sequence[str] = (),
    headings: Sequence[str] = _SHORT_HEADINGS,
) -> None:
    """Add to the parser one option for each setting of these sections, but those `without`, and --config.

    With `is_short`, the short help shows the settings with a brief, below these `headings`. It omits the command's own
    flags in `rare`.
    """
    parser.add_argument("--config", metavar="FILE", help="YAML or TOML file of settings")
    for section in sections:
        group = parser.add_argument_group(_TITLES[section])
        for setting in SETTINGS:
            if setting.section == section and setting.name not in without:
                group.add_argument(*setting.flags, **_argparse_options(setting))
    parser.epilog = (
        "A setting is taken from its flag, else its variable (--max-num-seqs: OCTAVO_MAX_NUM_SEQS), else --config, "
        "else its default. Numbers may be written 32K (32768) or 32k (32000)."
    )
    if isinstance(parser, Parser):
        parser.headings, parser.rare = tuple(headings) if is_short else (), tuple(rare)


def _argparse_options(setting: Setting) -> dict[str, Any]:
    default = setting.readable_default()
    text = setting.help + (f" [{default}]" if default else "")
    options: dict[str, Any] = {
        "dest": _DEST + setting.name,
        "default": argparse.SUPPRESS,
        "help": text.replace("%", "%%"),
    }
    if setting.kind is bool:
        return options | {"action": argparse.BooleanOptionalAction}
    if setting.kind is tuple:
        words = {"action": "extend", "nargs": "+"} if setting.takes_words else {"action": "append"}
        return options | words | {"metavar": setting.metavar}
    if setting.bare:
        options |= {"nargs": "?", "const": setting.bare}
    return options if setting.choices else options | {"metavar": _METAVARS.get(setting.kind, setting.metavar)}


def settings_given(args: argparse.Namespace) -> dict[str, object]:
    """Return the settings that flags set, by field name."""
    return {name.removeprefix(_DEST): value for name, value in vars(args).items() if name.startswith(_DEST)}


def respell(args: argparse.Namespace) -> list[str]:
    """Return words that pass the same flags and --config to another command. API keys are omitted."""
    words = ["--config", args.config] if args.config else []
    for name, value in settings_given(args).items():
        setting = _BY_DEST[_DEST + name]
        if not setting.is_secret:
            words += setting.words(value)
    return words


def resolve_args(args: argparse.Namespace, **extra: object) -> Resolved:
    """Merge flags, environment, --config and defaults; print remarks. `extra` has more settings by field name."""
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
    """Return the Config of resolve_args."""
    return resolve_args(args, **extra).config


def check_output(flag: str, path: str | None) -> None:
    """Raise UsageError if the file cannot be written. Called before the work that produces the contents."""
    if path is None or path == "-":
        return
    file, folder = Path(path), Path(path).absolute().parent
    if file.is_dir():
        raise UsageError(f"{flag} {path} is a folder; give a file")
    if not folder.is_dir():
        raise UsageError(f"{flag} {path}: there is no folder {folder}; make it, or give another path")
    if not os.access(file if file.exists() else folder, os.W_OK):
        raise UsageError(f"{flag} {path} cannot be written: permission denied; give another path")


@contextlib.contextmanager
def writing(path: str) -> Iterator[None]:
    """Convert an OSError of writing the file `path` to a ConfigError with a remedy."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}); give a path in a folder that exists") from None


def write_text(path: str, text: str) -> None:
    """Write a file. Raises ConfigError."""
    with writing(path):
        Path(path).write_text(text, encoding="utf-8")


def output_json(path: str | None, text: str) -> bool:
    """Print JSON if the path of --json is -, or write it to the file, if there is one.

    Return True if the command has to print its result as text: it did not go to stdout.
    """
    if path == "-":
        print(text)
    elif path is not None:
        write_text(path, text + "\n")
    return path != "-"
