"""Setting: the declaration of one option. It defines the option's flag, variable, file key, help and checks.

Owns: `option`, which declares a field of a section; the spellings; parsing and checking one value.
Does not: list the options (engine.py, server.py, fleet.py), or choose between sources (sources.py).
Invariant: every error names the setting as the user spelled it, the value (*** for a secret), and the remedy.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypedDict, Unpack

from octavo.config.spelling import unknown
from octavo.errors import ConfigError

PREFIX = "OCTAVO_"
_SYNONYMS = {"bf16": "bfloat16", "fp16": "float16", "f16": "float16", "half": "float16"}
_SYNONYMS |= {"fp32": "float32", "f32": "float32", "float": "float32", "gpu": "cuda"}
_BOOLEANS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
_REFUSED = dict.fromkeys(("mps", "rocm", "xpu"), "the kernels are built and checked for CUDA alone; give cpu")
_REFUSED["cuda"] = "CUDA_VISIBLE_DEVICES selects devices; give cuda"  # of cuda:1
_REMEDIES: Mapping[type, str] = {bool: "give true or false", tuple: "give one or more texts"}
_NUMBER = re.compile(r"([+-]?(?:\d[\d_]*(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)\s*(?:([kKmMgGtT])(?:i?B|i)?)?")


@dataclass(frozen=True, slots=True)
class Number:
    """A range of whole or real numbers, both ends included, for settings and for argparse's `type=`. 2K means 2048.

    With `is_above`, the low end is excluded. str() describes the range for messages.
    """

    kind: type
    low: float | None = None
    high: float | None = None
    is_above: bool = False

    def __call__(self, value: object) -> int | float:
        """Parse a number. Raises ValueError."""
        number = read_whole_number(value) if self.kind is int else _read_float(value)
        if number is None or (self.low is not None and number < self.low) or (self.is_above and number == self.low):
            raise ValueError(value)
        if self.high is not None and number > self.high:
            raise ValueError(value)
        return number

    def accepts(self, value: object) -> bool:
        """Return True if the value is a number in the range."""
        try:
            self(value)
        except ValueError:
            return False
        return True

    def __str__(self) -> str:
        noun = "a whole number" if self.kind is int else "a number"
        if self.low is None:
            return noun
        if self.is_above:
            return f"{noun} above {self.low}" + (f", at most {self.high}" if self.high is not None else "")
        return f"{noun} of at least {self.low}" if self.high is None else f"{noun} from {self.low} to {self.high}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One option. `flags[0]` also gives the option's key in files and the name of its variable.

    `brief` is the option's line in the short help, under `heading` (default: the section's heading). An option without
    `brief` is only in the full help.
    With `takes_words`, the flag takes all words after it, as vLLM's flag does. The flag of any other tuple is repeated.
    `metavar` stands for a value in the help, unless it is a number or one of `choices`.
    `bare` is the value of a flag without one, if that is allowed.
    """

    help: str
    flags: tuple[str, ...]
    choices: tuple[str, ...] = ()
    within: tuple[float | None, float | None] = (None, None)
    brief: str = ""
    heading: str = ""
    metavar: str = "TEXT"
    is_secret: bool = False
    takes_words: bool = False
    bare: str = ""
    # settings_of derives these from the field and its section
    name: str = ""
    section: str = ""
    kind: type = str
    is_optional: bool = False
    default: Any = None

    @property
    def key(self) -> str:
        """Return the option's name in files and in messages: the first flag without leading dashes."""
        return self.flags[0].removeprefix("--")

    @property
    def keys(self) -> tuple[str, ...]:
        """Return every spelling that a file may use; words are joined by dashes."""
        long = [flag.removeprefix("--") for flag in self.flags if flag.startswith("--")]
        return (*dict.fromkeys((*long, self.name.replace("_", "-"))),)

    @property
    def variables(self) -> tuple[str, ...]:
        """Return the option's environment variables, one for each key."""
        return tuple(PREFIX + key.upper().replace("-", "_") for key in self.keys)

    def read(self, value: object, spelled: str) -> Any:
        """Check a value and convert it to the field's type. Raises ConfigError naming `spelled`, value and remedy."""
        if value is None or (isinstance(value, str) and value.lower() in ("auto", "none", "null", "default")):
            if self.is_optional:
                return None
            if value is None:
                raise ConfigError(f"{spelled} has no value; {self.remedy()}")
        if self.is_secret and _is_blank(value):
            raise ConfigError(f"{spelled} is empty; give a key, or leave it out")
        result = self._parse(value)
        if self.choices:
            result = _SYNONYMS.get(str(result).lower(), str(result).lower())
            if result not in self.choices:
                why = _REFUSED.get(result.partition(":")[0])
                raise ConfigError(
                    f"{spelled} is {value!r}: {why}"
                    if why
                    else unknown(spelled, str(value), self.choices, self.remedy())
                )
        if result is None:
            shown = "***" if self.is_secret else repr(value)
            raise ConfigError(f"{spelled} is {shown}; {self.remedy()}")
        return result

    def words(self, value: object) -> list[str]:
        """Return the words that give this value on a command line."""
        flag = self.flags[0]
        if isinstance(value, bool):
            return [flag if value else flag.replace("--", "--no-", 1)]
        return [f"{flag}={one}" for one in (value if isinstance(value, (list, tuple)) else [value])]

    def remedy(self) -> str:
        """Return the end of an error message, which names the accepted values."""
        if self.choices:
            return f"give one of {', '.join(self.choices)}"
        if self.kind not in (int, float):
            return _REMEDIES.get(self.kind, "give a text")
        is_large = self.kind is int and (self.within[1] or 2**30) > 2**20
        return f"give {Number(self.kind, *self.within)}" + (" (32K is 32768, 32k is 32000)" if is_large else "")

    def readable_default(self) -> str:
        """Return the default in readable form, such as 256 MiB; "" if there is none or the help names it."""
        value = self.default
        if value in (None, (), False, "") or "default" in self.help:
            return ""
        if value is True:
            return "on"
        if isinstance(value, tuple):
            return ",".join(value)
        if self.name.endswith("bytes") and value >= 1024:
            power = min((value.bit_length() - 1) // 10, 3)
            return f"{value / 1024**power:g} {('B', 'KiB', 'MiB', 'GiB')[power]}"
        if isinstance(value, str) or self.name.endswith("port") or value != int(value):
            return str(value)
        return f"{int(value):{',' if value >= 10_000 else ''}}"

    def _parse(self, value: object) -> Any:
        """Convert the value to the field's type; return None if that is not possible."""
        if self.kind is bool:
            return value if isinstance(value, bool) else _BOOLEANS.get(str(value).lower())
        if self.kind is tuple:
            return _read_tuple(value)
        if self.kind is str:
            return _read_text(value)
        number = Number(self.kind, *self.within)
        return number(value) if number.accepts(value) else None


class _Rules(TypedDict, total=False):
    choices: tuple[str, ...]
    within: tuple[float | None, float | None]
    brief: str
    heading: str
    is_secret: bool
    takes_words: bool
    bare: str


def option(default: Any, help: str, *flags: str, **rules: Unpack[_Rules]) -> Any:
    """Declare a field of a section as a setting: its default, help, flags, and the rules of Setting.

    The first flag may say what it takes: --record=DIR.
    """
    first, _, metavar = flags[0].partition("=")
    setting = Setting(help=help, flags=(first, *flags[1:]), metavar=metavar or "TEXT", **rules)
    return field(default=default, metadata={"setting": setting})


def section(cls: type[Any], title: str, heading: str) -> Any:
    """Declare a field of Config as a section. `title` heads it in the full help, `heading` in the short help."""
    return field(default=cls(), metadata={"title": title, "heading": heading})


def settings_of(config: type[Any]) -> tuple[Setting, ...]:
    """Return the settings of every section of a config class, in the order of declaration."""
    found = []
    for part in fields(config):
        cls: type[Any] = type(part.default)
        hints = typing.get_type_hints(cls)
        for item in fields(cls):
            hint, declared = hints[item.name], item.metadata["setting"]
            kinds = [kind for kind in typing.get_args(hint) if kind is not type(None)]
            is_tuple = typing.get_origin(hint) is tuple
            is_optional = not is_tuple and type(None) in typing.get_args(hint)
            setting = replace(
                declared,
                name=item.name,
                section=part.name,
                heading=declared.heading or part.metadata["heading"],
                kind=tuple if is_tuple else kinds[0] if is_optional else hint,
                is_optional=is_optional,
                default=item.default,
            )
            found.append(setting)
    return tuple(found)


def read_whole_number(value: object) -> int | None:
    """Parse a whole number, such as 32K (32768) or 32k (32000); return None for other values."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    match = _NUMBER.fullmatch(str(value).strip())
    if match is None:
        return None
    digits, suffix = match[1].replace("_", ""), match[2] or ""
    factor = (1024 if suffix.isupper() else 1000) ** ("kmgt".index(suffix.lower()) + 1) if suffix else 1
    if digits.lstrip("+-").isdigit():
        return int(digits) * factor
    number = float(digits) * factor
    return int(number) if number.is_integer() else None


def _read_float(value: object) -> float | None:
    if isinstance(value, bool):
        return None
    try:
        number = float(str(value))
    except ValueError:
        return None
    return number if number == number and abs(number) != float("inf") else None


def _read_text(value: object) -> str | None:
    return value if isinstance(value, str) else str(value) if isinstance(value, (int, float)) else None


def _read_tuple(value: object) -> tuple[str, ...] | None:
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    if isinstance(value, (list, tuple)) and all(isinstance(part, str) and part for part in value):
        return tuple(value)
    return None


def _is_blank(value: object) -> bool:
    """Return True if a secret, or one of a list, is empty or white space, as from an unset shell variable."""
    parts = value.split(",") if isinstance(value, str) else value
    return isinstance(parts, (list, tuple)) and any(isinstance(part, str) and not part.strip() for part in parts)
