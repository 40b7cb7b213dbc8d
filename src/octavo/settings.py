"""Parse settings into a Config: flags, OCTAVO_* variables, a config file, defaults, in that order.

Owns: the table of settings derived from the config parts, reading one value of each type, precedence, origins.
Does not: define settings (config), parse argv (cli), or check a setting against a model or machine (assembly).
Invariant: every error names the setting as it was spelled, the value, and the remedy.
"""

from __future__ import annotations

import re
import tomllib
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from octavo.config import (
    AdmissionConfig,
    BatchConfig,
    CacheConfig,
    ChatConfig,
    Config,
    ExecutionConfig,
    ModelConfig,
    RecordingConfig,
    ResponsesConfig,
    RetryConfig,
    SchedulingConfig,
    ServingConfig,
    SpeculationConfig,
    StatisticsConfig,
    TelemetryConfig,
    WebConfig,
)
from octavo.config.spelling import did_you_mean, unknown
from octavo.errors import ConfigError

PREFIX = "OCTAVO_"
# The config file; the folder of servers; SCRATCH_DIR was read by earlier versions and has no effect.
_NO_SETTINGS = (PREFIX + "CONFIG", PREFIX + "RUN_DIR", PREFIX + "SCRATCH_DIR")
_PARTS: dict[str, Any] = {
    "model": ModelConfig,
    "chat": ChatConfig,
    "cache": CacheConfig,
    "scheduling": SchedulingConfig,
    "execution": ExecutionConfig,
    "speculation": SpeculationConfig,
    "serving": ServingConfig,
    "web": WebConfig,
    "admission": AdmissionConfig,
    "retry": RetryConfig,
    "responses": ResponsesConfig,
    "batch": BatchConfig,
    "statistics": StatisticsConfig,
    "recording": RecordingConfig,
    "telemetry": TelemetryConfig,
}
_SYNONYMS = {"bf16": "bfloat16", "fp16": "float16", "f16": "float16", "half": "float16"}
_SYNONYMS |= {"fp32": "float32", "f32": "float32", "float": "float32", "gpu": "cuda"}
_WORDS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
_NUMBER = re.compile(r"([+-]?(?:\d[\d_]*(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)\s*(?:([kKmMgGtT])(?:i?B|i)?)?")


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting: its field, its spellings, its type, and its allowed values."""

    name: str
    part: str
    kind: type
    is_optional: bool
    default: Any
    help: str
    flags: tuple[str, ...]
    choices: tuple[str, ...]
    low: float | None
    high: float | None
    is_secret: bool
    is_hidden: bool

    @property
    def key(self) -> str:
        """Return its name in files and in messages: the first flag without dashes."""
        return self.flags[0].removeprefix("--")

    @property
    def variable(self) -> str:
        """Return its environment variable."""
        return PREFIX + self.key.upper().replace("-", "_")

    @property
    def keys(self) -> tuple[str, ...]:
        """Return every spelling that a file may use, with dashes."""
        long = [flag.removeprefix("--") for flag in self.flags if flag.startswith("--")]
        return (*dict.fromkeys((*long, self.name.replace("_", "-"))),)

    def read(self, value: object, spelled: str) -> Any:
        """Check a value and convert it to the field's type. Raises ConfigError naming `spelled`, value and remedy."""
        if value is None or (isinstance(value, str) and value.lower() in ("auto", "none", "null", "default")):
            if self.is_optional:
                return None
            if value is None:
                raise ConfigError(f"{spelled} has no value; {self.remedy()}")
        if self.is_secret and _is_blank(value):
            raise ConfigError(f"{spelled} is empty; give a key, or leave it out")
        read = {bool: _read_bool, int: _read_int, float: _read_float, tuple: _read_tuple}.get(self.kind, _read_text)
        result = read(value)
        if self.choices:
            result = _SYNONYMS.get(str(result).lower(), str(result).lower())
        if self.choices and result not in self.choices:
            raise ConfigError(unknown(spelled, str(value), self.choices, self.remedy()))
        if result is None or not self._allows(result):
            shown = "***" if self.is_secret else repr(value)
            raise ConfigError(f"{spelled} is {shown}; {self.remedy()}")
        return result

    def remedy(self) -> str:
        """Return what to give, as the end of a sentence."""
        if self.choices:
            return f"give one of {', '.join(self.choices)}"
        if self.kind is bool:
            return "give true or false"
        if self.kind is tuple:
            return "give one or more texts"
        if self.kind is str:
            return "give a text"
        noun = "a whole number" if self.kind is int else "a number"
        example = " (32K is 32768, 32k is 32000)" if self.kind is int and (self.high or 2**30) > 2**20 else ""
        if self.low is not None and self.high is not None:
            return f"give {noun} from {self.low} to {self.high}{example}"
        return f"give {noun}{f' of at least {self.low}' if self.low is not None else ''}{example}"

    def _allows(self, value: Any) -> bool:
        if self.kind not in (int, float):
            return True
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)


@dataclass(frozen=True, slots=True)
class Resolved:
    """A Config, the origin of each value (by field name), and remarks for the user."""

    config: Config
    origins: Mapping[str, str]
    remarks: tuple[str, ...] = ()

    def value(self, setting: Setting) -> Any:
        """Return the value in force of one setting."""
        return getattr(getattr(self.config, setting.part), setting.name)


def _derive() -> tuple[Setting, ...]:
    table = []
    for part, cls in _PARTS.items():
        hints = typing.get_type_hints(cls)
        for item in fields(cls):
            kinds = [kind for kind in typing.get_args(hints[item.name]) if kind is not type(None)]
            origin = typing.get_origin(hints[item.name])
            is_optional = origin is not tuple and type(None) in typing.get_args(hints[item.name])
            kind = tuple if origin is tuple else (kinds[0] if is_optional else hints[item.name])
            meta = item.metadata
            flags = meta["flags"] or ("--" + item.name.replace("_", "-"),)
            table.append(
                Setting(
                    item.name, part, kind, is_optional, item.default, meta["help"], flags,
                    meta["choices"], meta["low"], meta["high"], meta["secret"], meta["hidden"],
                )
            )  # fmt: skip
    return tuple(table)


SETTINGS: tuple[Setting, ...] = _derive()
_BY_KEY: dict[str, Setting] = {key: setting for setting in SETTINGS for key in setting.keys}


def resolve(
    flags: Mapping[str, object], environ: Mapping[str, str], file: Mapping[str, object], path: str = ""
) -> Resolved:
    """Merge the sources, the first wins: flags (by field name), OCTAVO_* variables, file keys, defaults. Pure."""
    given = {name: (value, _flag_of(name)) for name, value in flags.items()}
    remarks: list[str] = []
    for source in (_from_environ(environ, remarks), _from_file(file, path)):
        for name, entry in source.items():
            given.setdefault(name, entry)
    values: dict[str, dict[str, Any]] = {part: {} for part in _PARTS}
    origins = {setting.name: "default" for setting in SETTINGS}
    for setting in SETTINGS:
        if setting.name in given:
            value, spelled = given[setting.name]
            values[setting.part][setting.name] = setting.read(value, spelled)
            origins[setting.name] = spelled
    config = Config(**{part: cls(**values[part]) for part, cls in _PARTS.items()})
    return Resolved(config, origins, tuple(remarks))


def load_config(
    flags: Mapping[str, object], environ: Mapping[str, str] | None = None, config_file: str | Path | None = None
) -> Config:
    """Read the file, if any, and merge: flag (by field name) > OCTAVO_* > file > default."""
    return load(flags, environ or {}, config_file).config


def load(flags: Mapping[str, object], environ: Mapping[str, str], config_file: str | Path | None) -> Resolved:
    """Do as load_config, and return origins and remarks too. OCTAVO_CONFIG names the file when config_file is None."""
    config_file = config_file or environ.get(PREFIX + "CONFIG")
    if config_file is None:
        return resolve(flags, environ, {})
    return resolve(flags, environ, read_config_file(Path(config_file)), str(config_file))


def read_config_file(path: Path) -> Mapping[str, object]:
    """Read .toml as TOML, anything else as YAML. Raises ConfigError naming the file and the reason."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"config file not found: {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(f"config file {path} cannot be read ({reason}); give a YAML or TOML file") from None
    try:
        content = tomllib.loads(text) if path.suffix == ".toml" else _read_yaml(text)
    except ValueError as error:
        raise ConfigError(f"config file {path} is not well formed: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"config file {path} is not a list of settings; give 'name: value' lines")
    return content


def _read_yaml(text: str) -> object:
    import yaml  # kept out of start-up: only a config file needs it

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None


def _flag_of(name: str) -> str:
    setting = next((setting for setting in SETTINGS if setting.name == name), None)
    if setting is None:
        raise ConfigError(unknown("setting", name, [setting.name for setting in SETTINGS]))
    return setting.flags[0]


def _from_environ(environ: Mapping[str, str], remarks: list[str]) -> dict[str, tuple[object, str]]:
    found: dict[str, tuple[object, str]] = {}
    variables = {PREFIX + key.upper().replace("-", "_"): setting for key, setting in _BY_KEY.items()}
    for variable in sorted(environ):
        if not variable.startswith(PREFIX) or variable in _NO_SETTINGS:
            continue
        setting = variables.get(variable)
        if setting is not None:
            _add(found, setting, environ[variable], variable)
        elif near := did_you_mean(variable, variables):
            remarks.append(f"unknown variable {variable!r} has no effect; {near}")
    return found


def _from_file(file: Mapping[str, object], path: str) -> dict[str, tuple[object, str]]:
    found: dict[str, tuple[object, str]] = {}
    for key, value in file.items():
        if key in _PARTS and isinstance(value, dict):
            entries: Iterable[tuple[object, object]] = value.items()
        else:
            entries = ((key, value),)
        for name, entry in entries:
            dashed = str(name).replace("_", "-")
            if dashed not in _BY_KEY:
                raise ConfigError(f"{path}: {unknown('setting', str(name), _BY_KEY, 'octavo config show lists them')}")
            _add(found, _BY_KEY[dashed], entry, f"{path}: {name}")
    return found


def _add(found: dict[str, tuple[object, str]], setting: Setting, value: object, spelled: str) -> None:
    if setting.name in found:
        raise ConfigError(f"{found[setting.name][1]} and {spelled} are one setting; give one of them")
    found[setting.name] = (value, spelled)


def _is_blank(value: object) -> bool:
    """Return True if a secret, or one of several, is only white space: mostly a variable that was not filled in."""
    parts = value.split(",") if isinstance(value, str) else value
    return isinstance(parts, (list, tuple)) and any(isinstance(part, str) and not part.strip() for part in parts)


def _read_bool(value: object) -> bool | None:
    return value if isinstance(value, bool) else _WORDS.get(str(value).lower())


def whole_number(text: str) -> int | None:
    """Parse a whole number, such as 32K (32768) or 32k (32000); None if it is none."""
    return _read_int(text)


def _read_int(value: object) -> int | None:
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
