"""Setting: the declaration of one option, from which its flag, variable, file key, help and checks are derived.

Owns: `option` (a field of a section), the spellings, parsing and checking of one value.
Does not: list the options (engine, server), or decide between sources (sources).
Invariant: every error names the setting as it was spelled, the value, and the remedy.
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
_REMEDIES: Mapping[type, str] = {bool: "give true or false", tuple: "give one or more texts"}
_NUMBER = re.compile(r"([+-]?(?:\d[\d_]*(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)\s*(?:([kKmMgGtT])(?:i?B|i)?)?")


@dataclass(frozen=True, slots=True)
class Number:
    """A kind of number in a range, ends included, for settings and for `type=` of argparse; 2K is a whole number.

    With `is_above` the low end is not allowed. Its text says which numbers are.
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
        """Return True if the value is such a number."""
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
    """One option. `flags[0]` is also its key in files and the source of its variable.

    `brief` is its line in the short help, where it is listed under `heading` (default: its section's); an option
    without one is only in the full help. A hidden one has no effect yet: it is accepted and not listed.
    `takes_words`: the flag takes all words after it, as vLLM's does; flags of other tuples are repeated.
    """

    help: str
    flags: tuple[str, ...]
    choices: tuple[str, ...] = ()
    within: tuple[float | None, float | None] = (None, None)
    brief: str = ""
    heading: str = ""
    is_secret: bool = False
    is_hidden: bool = False
    takes_words: bool = False
    # derived from the field and its place in Config, see settings_of
    name: str = ""
    section: str = ""
    kind: type = str
    is_optional: bool = False
    default: Any = None

    @property
    def key(self) -> str:
        """Return its name in files and in messages: the first flag without dashes."""
        return self.flags[0].removeprefix("--")

    @property
    def keys(self) -> tuple[str, ...]:
        """Return every spelling that a file may use, with dashes."""
        long = [flag.removeprefix("--") for flag in self.flags if flag.startswith("--")]
        return (*dict.fromkeys((*long, self.name.replace("_", "-"))),)

    @property
    def variables(self) -> tuple[str, ...]:
        """Return its environment variables, one for each key."""
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
                raise ConfigError(unknown(spelled, str(value), self.choices, self.remedy()))
        if result is None:
            shown = "***" if self.is_secret else repr(value)
            raise ConfigError(f"{spelled} is {shown}; {self.remedy()}")
        return result

    def remedy(self) -> str:
        """Return what to give, as the end of a sentence."""
        if self.choices:
            return f"give one of {', '.join(self.choices)}"
        if self.kind not in (int, float):
            return _REMEDIES.get(self.kind, "give a text")
        is_large = self.kind is int and (self.within[1] or 2**30) > 2**20
        return f"give {Number(self.kind, *self.within)}" + (" (32K is 32768, 32k is 32000)" if is_large else "")

    def readable_default(self) -> str:
        """Return the default as a person would write it; "" if there is none, or if the help names it."""
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
        return (
            f"{value:,}" if isinstance(value, int) and value >= 10_000 else f"{value:g}" if value == 0 else str(value)
        )

    def _parse(self, value: object) -> Any:
        """Return the value as the field's type, None if it is none."""
        if self.kind is bool:
            return _read_bool(value)
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
    is_hidden: bool
    takes_words: bool


def option(default: Any, help: str, *flags: str, **rules: Unpack[_Rules]) -> Any:
    """Declare a field of a section as a setting: its default, help, flags, and the rules of Setting."""
    return field(default=default, metadata={"setting": Setting(help=help, flags=flags, **rules)})


def section(cls: type[Any], title: str, heading: str) -> Any:
    """Declare a field of Config as a section: its title in the full help, and its options' heading in the short one."""
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
    """Parse a whole number, such as 32K (32768) or 32k (32000); None if it is none."""
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


def _read_bool(value: object) -> bool | None:
    return value if isinstance(value, bool) else _BOOLEANS.get(str(value).lower())


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
    """Return True if a secret, or one of several, is only white space: mostly a variable that was not filled in."""
    parts = value.split(",") if isinstance(value, str) else value
    return isinstance(parts, (list, tuple)) and any(isinstance(part, str) and not part.strip() for part in parts)
