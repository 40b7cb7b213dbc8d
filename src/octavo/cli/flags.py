"""Flags from settings: an argument parser whose options are the config parts' fields, with a short and a full help.

Owns: argparse options for the settings, what was given, the two helps, errors about unknown words.
Does not: read or check values (settings does, so that every source is checked alike).
"""

from __future__ import annotations

import argparse
import copy
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from octavo.config import Config
from octavo.config.spelling import unknown
from octavo.errors import ConfigError
from octavo.settings import SETTINGS, Resolved, Setting, load, whole_number

_DEST = "setting:"  # keeps settings apart from a command's own arguments
_TAKES_WORDS = {"served_model_name"}  # the flag takes all words after it, as vLLM's does; other flags are repeated
_TITLES = {
    "model": "model",
    "chat": "conversations and chat templates",
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
# The settings that the short help shows, with their text there: heading -> field name -> text, one line each.
COMMON_SETTINGS: Mapping[str, Mapping[str, str]] = {
    "model": {
        "model": "alias, folder, .gguf file or repository",
        "quantization": "auto, none, int8 or int4",
        "max_model_len": "longest prompt + output [the model's own]",
        "chat_template": "jinja file, instead of the model's",
        "offline": "use only what is on this machine",
    },
    "memory and speed": {
        "kv_cache_bytes": "bytes of the KV pool, such as 4G",
        "max_sequences": "sequences running at once [CPU 32, GPU 256]",
        "threads": "CPU threads [the usable cores]",
        "speculate": "ngram guesses tokens from earlier text",
    },
    "server": {
        "host": "address to listen on",
        "port": "port to listen on; 0 = any free one",
        "api_key": "key that clients must present",
        "api_key_file": "named keys with tenants and limits",
        "served_model_name": "the model's name for clients",
        "allowed_origins": "origins of web pages that may use this (CORS)",
        "ssl_certfile": "serve https with this certificate",
        "standby": "keep a second engine ready to take over",
        "record": "record every decision in this folder",
        "log_level": "debug, info, warning or error",
    },
}
# Other programs' spellings that are too different for near names -> ours. The flags of vLLM and llama.cpp that are ours
# too are spellings of the settings themselves.
_SPELLINGS = {
    "--max-model-len": ("--n-ctx", "--max-seq-len", "--context-length"),
    "--model": ("--hf-repo", "-hf", "-hfr", "--model-path"),
    "--max-num-seqs": ("--max-running-requests", "--max-concurrent-requests"),
    "--kv-cache-tokens": ("--max-total-tokens",),
    "--gpu-memory-utilization": ("--mem-fraction-static",),
    "--max-num-batched-tokens": ("--chunked-prefill-size", "--ubatch-size", "-ub"),
    "--block-size": ("--page-size",),
    "--policy": ("--schedule-policy",),
    "--no-enable-prefix-caching": ("--disable-radix-cache",),
    "--host-cache-bytes": ("--hicache-ratio", "--hicache-size", "--cpu-offload-gb"),
    "--seed": ("--random-seed",),
    "--numerics": ("--enable-deterministic-inference",),
    "--speculate": ("--speculative-algorithm", "--speculative-config", "--lookup"),
    "--chat-template": ("--chat-template-file",),
    "--kv-cache-dtype": ("--cache-type-k", "--cache-type-v", "-ctk", "-ctv"),
    "--threads": ("--threads-batch", "-tb", "--num-threads"),
    "--speculate-max-tokens": ("--num-speculative-tokens",),
    "--ssl-certfile": ("--ssl-cert-file",),
    "--ssl-keyfile": ("--ssl-key-file",),
    "--log-level": ("--uvicorn-log-level",),
    "--root-path": ("--api-prefix",),
    "--kv-cache-memory-bytes": ("--kv-cache-size",),
    "--max-tokens": ("-n", "--n-predict", "--predict", "--max-new-tokens"),
    "--system": ("--system-prompt", "-sys"),
    "--url": ("--host-url", "--endpoint"),
}
RENAMED_FLAGS = {theirs: ours for ours, names in _SPELLINGS.items() for theirs in names}
# Other programs' flags that have no counterpart here -> why.
UNSUPPORTED_FLAGS = {
    **dict.fromkeys(("--gpu-layers", "--n-gpu-layers", "-ngl"), "a model runs whole on one device (--device)"),
    **dict.fromkeys(
        ("--enable-lora", "--lora-modules", "--lora", "--lora-paths", "--max-loras"), "there are no adapters"
    ),
    "--trust-remote-code": "code from model repositories is never run",
    **dict.fromkeys(
        ("--tensor-parallel-size", "--tp", "-tp", "--pipeline-parallel-size", "--nnodes"), "there is one device"
    ),
    **dict.fromkeys(("--data-parallel-size", "--dp"), "start several servers"),
    **dict.fromkeys(("--model-draft", "-md", "--draft-model"), "there are no draft models (--speculate ngram)"),
    **dict.fromkeys(("--mmproj", "--limit-mm-per-prompt"), "this version reads no images"),
    **dict.fromkeys(("--tokenizer", "--tokenizer-mode"), "the tokenizer is the model's own"),
    "--load-format": "the format is read from the files",
    **dict.fromkeys(("--flash-attn", "-fa", "--enforce-eager"), "there is nothing to switch"),
    **dict.fromkeys(("--cont-batching", "-cb", "--jinja", "--enable-auto-tool-choice"), "it is always on"),
    **dict.fromkeys(
        ("--embedding", "--embeddings", "--is-embedding", "--metrics", "--enable-metrics"), "it is always on"
    ),
    **dict.fromkeys(("--mlock", "--no-mmap"), "weights are always read from the file's own pages"),
    "--download-dir": "set HF_HOME",
    "--slots": "octavo explain and octavo top show what runs",
    **dict.fromkeys(("--disable-log-requests", "--disable-log-stats"), "requests are not logged (--log-level)"),
}
_MAX_CHOICES = 26  # characters of the choices shown in place of a flag's value


class UsageError(ConfigError):
    """The command line cannot be parsed."""


class Parser(argparse.ArgumentParser):
    """An argument parser that raises UsageError, suggests near names, never abbreviates, and has two helps.

    `rare` are the command's own flags that the short help leaves out.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, add_help=False, formatter_class=_Formatter, **options)
        self.shows_settings = False
        self.rare: tuple[str, ...] = ()
        self._positionals.title = "arguments"
        self.add_argument("-h", "--help", action="store_true", help="show this help")
        self.add_argument("--help-all", action="store_true", help="show every option")

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """Parse the words; print a help and exit, or raise UsageError naming the wrong word and near ones."""
        words = list(words)
        before = words[: words.index("--")] if "--" in words else words
        if {"-h", "--help", "--help-all"} & set(before):
            print(self.format_help_all() if "--help-all" in before else self.format_help(), end="")
            self.exit()
        for word in before:  # argparse would take -ngl for -n gl
            name = word.split("=")[0]
            if name in {**RENAMED_FLAGS, **UNSUPPORTED_FLAGS} and name not in self._option_string_actions:
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
        """Return the short help: the command's own options but the rare ones, and the common settings."""
        own = [group for group in self._action_groups if group.title not in _TITLES.values()]
        shown = [(group.title, [a for a in group._group_actions if self._is_common(a)]) for group in own]
        settings = {a.dest: a for a in self._actions if a.dest.startswith(_DEST) and a.help != argparse.SUPPRESS}
        for title, texts in COMMON_SETTINGS.items() if self.shows_settings else ():
            if title != "server" or _DEST + "host" in settings:
                found = [(settings[_DEST + name], text) for name, text in texts.items() if _DEST + name in settings]
                shown.append((title, [_shortened(action, text) for action, text in found]))
        count = sum(len(actions) for _, actions in shown)
        visible = [action for action in self._actions if action.help != argparse.SUPPRESS]
        epilog = f"All {len(visible)} options: {self.prog} --help-all"
        return self._formatted(_ShortFormatter(self.prog), shown, epilog if count < len(visible) - 1 else "")

    def format_help_all(self) -> str:
        """Return the full help."""
        shown = [(group.title, group._group_actions) for group in self._action_groups]
        return self._formatted(_Formatter(self.prog), shown, self.epilog or "")

    def _formatted(
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

    def _is_common(self, action: argparse.Action) -> bool:
        return not {"--help-all", *self.rare} & set(action.option_strings)

    def _unknown_flag(self, flag: str) -> str:
        flags = [f for action in self._actions if action.help != argparse.SUPPRESS for f in action.option_strings]
        if flag in UNSUPPORTED_FLAGS:
            return f"{flag} is not supported: {UNSUPPORTED_FLAGS[flag]}"
        if (ours := RENAMED_FLAGS.get(flag)) in flags:
            return unknown("flag", flag, (), f"did you mean {ours!r}?")
        return unknown("flag", flag, flags, f"see {self.prog} --help")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            name = max(action.option_strings, key=len, default=action.metavar or action.dest)
            choices = [str(choice) for choice in action.choices]
            kind = str(name) if action.option_strings else str(name).lower()
            raise UsageError(unknown(kind, str(value), choices, f"give one of {', '.join(choices)}"))


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

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        spelled = self._spellings(action)
        if action.nargs == 0:
            return spelled
        return f"{spelled} {self._format_args(action, self._get_default_metavar_for_optional(action))}"

    def _metavar_formatter(self, action: argparse.Action, default_metavar: str) -> Callable[[int], tuple[str, ...]]:
        choices = "{" + ",".join(choices_of(action)) + "}"
        if action.metavar is None and choices != "{}":
            return lambda count: ("NAME" if len(choices) > _MAX_CHOICES else choices,) * count
        return super()._metavar_formatter(action, default_metavar)

    def _expand_help(self, action: argparse.Action) -> str:
        text, choices = super()._expand_help(action), choices_of(action)
        is_cut = action.metavar is None and len(",".join(choices)) + 2 > _MAX_CHOICES
        if not is_cut:
            return text
        said, bracket, default = text.rpartition(" [")
        return f"{said or text}: {', '.join(choices)}" + (bracket + default if said else "")

    def _spellings(self, action: argparse.Action) -> str:
        if isinstance(action, argparse.BooleanOptionalAction):
            return ", ".join(f"--[no-]{flag[2:]}" for flag in action.option_strings if not flag.startswith("--no-"))
        return ", ".join(action.option_strings)

    def _split_lines(self, text: str, width: int) -> list[str]:
        text = re.sub(r"\s+", " ", text).strip()
        return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)


class _ShortFormatter(_Formatter):
    """The formatter of the short help: one spelling of each flag, and its letter."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog)
        self._max_help_position = 32

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        if action.option_strings and action.nargs == "+":
            return f"{action.metavar or default_metavar} ..."
        return super()._format_args(action, default_metavar)

    def _spellings(self, action: argparse.Action) -> str:
        flags = action.option_strings
        if isinstance(action, argparse.BooleanOptionalAction):
            setting = _SETTING_OF.get(action.dest)
            is_on = setting.default if setting is not None else action.default
            return flags[1] if is_on else flags[0]
        long = [flag for flag in flags if flag.startswith("--")][:1]
        return ", ".join([*(flag for flag in flags if len(flag) == 2), *long])


def add_settings(
    parser: argparse.ArgumentParser,
    parts: Sequence[str] = tuple(_TITLES),
    *,
    is_short: bool = True,
    rare: Sequence[str] = (),
) -> None:
    """Add to the parser one option for each setting of these parts, and --config.

    The short help shows the common settings if `is_short`, and leaves out the command's own flags in `rare`.
    """
    parser.add_argument("--config", metavar="FILE", help="YAML or TOML file of settings")
    for part in parts:
        group = parser.add_argument_group(_TITLES[part])
        for setting in (setting for setting in SETTINGS if setting.part == part):
            _add(group, setting)
    parser.epilog = (
        "A setting is taken from its flag, else its variable (--max-num-seqs: OCTAVO_MAX_NUM_SEQS), else --config, "
        "else its default. Numbers may be written 32K (32768) or 32k (32000)."
    )
    if isinstance(parser, Parser):
        parser.shows_settings, parser.rare = is_short, tuple(rare)


def _add(group: Any, setting: Setting) -> None:
    default = readable_default(setting)
    options: dict[str, Any] = {"dest": _DEST + setting.name, "default": argparse.SUPPRESS}
    if setting.kind is bool:
        options["action"] = argparse.BooleanOptionalAction
    elif setting.kind is tuple:
        words = {"action": "extend", "nargs": "+"} if setting.name in _TAKES_WORDS else {"action": "append"}
        options |= {**words, "metavar": "TEXT"}
    elif not setting.choices:
        options["metavar"] = {int: "N", float: "X"}.get(setting.kind, "TEXT")
    text = setting.help + (f" [{default}]" if default else "")
    options["help"] = argparse.SUPPRESS if setting.is_hidden else text.replace("%", "%%")
    group.add_argument(*setting.flags, **options)


def _shortened(action: argparse.Action, text: str) -> argparse.Action:
    """Return a copy of the option with a short text, for the short help."""
    default = readable_default(_SETTING_OF[action.dest])
    short = copy.copy(action)
    short.help = text if "[" in text or not default else f"{text} [{default}]"
    short.metavar = "NAME" if choices_of(action) else action.metavar
    return short


def readable_default(setting: Setting) -> str:
    """Return a setting's default as a person would write it; "" if there is none, or if the help names it."""
    value = setting.default
    if value in (None, (), False, "") or "default" in setting.help:
        return ""
    if value is True:
        return "on"
    if isinstance(value, tuple):
        return ",".join(value)
    if setting.name.endswith("bytes") and isinstance(value, int) and value >= 1024:
        power = min((value.bit_length() - 1) // 10, 3)
        return f"{value / 1024**power:g} {('B', 'KiB', 'MiB', 'GiB')[power]}"
    return f"{value:,}" if isinstance(value, int) and value >= 10_000 else f"{value:g}" if value == 0 else str(value)


_SETTING_OF = {_DEST + setting.name: setting for setting in SETTINGS}


def choices_of(action: argparse.Action) -> tuple[str, ...]:
    """Return the possible values of an option; empty if any value is allowed."""
    setting = _SETTING_OF.get(action.dest)
    return setting.choices if setting is not None else tuple(map(str, action.choices or ()))


def whole(text: str) -> int:
    """Parse a whole number as settings are written, for `type=` of a command's own flags."""
    number = whole_number(text)
    if number is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number, such as 100 or 2K")
    return number


def check_output(flag: str, path: str | None) -> None:
    """Raise UsageError for a file that cannot be written, before the work that produces its contents."""
    if path is None or path == "-":
        return
    file, folder = Path(path), Path(path).absolute().parent
    if file.is_dir():
        raise UsageError(f"{flag} {path} is a folder; give a file")
    if not folder.is_dir():
        raise UsageError(f"{flag} {path}: there is no folder {folder}; make it, or give another path")
    if not os.access(file if file.exists() else folder, os.W_OK):
        raise UsageError(f"{flag} {path} cannot be written: permission denied; give another path")


def settings_given(args: argparse.Namespace) -> dict[str, object]:
    """Return the settings given by flags, by field name."""
    return {name.removeprefix(_DEST): value for name, value in vars(args).items() if name.startswith(_DEST)}


def respell(args: argparse.Namespace) -> list[str]:
    """Return words that give another command the same settings: the flags given here, and --config; no keys."""
    words = ["--config", args.config] if args.config else []
    flags = {setting.name: setting.flags[0] for setting in SETTINGS if not setting.is_secret}
    for name, value in settings_given(args).items():
        if name not in flags:
            continue
        flag = flags[name]
        if isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            values = value if isinstance(value, list) else [value]
            words += [f"{flag}={one}" for one in values]
    return words


def resolve_args(args: argparse.Namespace, **extra: object) -> Resolved:
    """Merge flags, environment, --config and defaults; print remarks. `extra` are further settings by field name."""
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
