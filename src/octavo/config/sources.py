"""Merges the sources of settings into a Config. Precedence: flags, OCTAVO_* variables, a config file, defaults.

Owns: precedence; the origin of each value; reading config files; keyword arguments of LLM and AsyncLLM.
Does not: declare or check a setting (setting.py), parse argv (cli), or compare settings with a model or a machine
(assembly).
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from octavo.config import SETTINGS, Config
from octavo.config.other_engines import RENAMED_FLAGS, UNSUPPORTED_FLAGS, is_harmless
from octavo.config.setting import PREFIX, Setting
from octavo.config.spelling import near_names, unknown
from octavo.errors import ConfigError

# CONFIG names the config file, and RUN_DIR the folder of servers. SCRATCH_DIR has no effect; earlier versions read it.
_NO_SETTINGS = (PREFIX + "CONFIG", PREFIX + "RUN_DIR", PREFIX + "SCRATCH_DIR")
_SECTIONS: dict[str, type[Any]] = {section.name: type(section.default) for section in fields(Config)}
_BY_NAME: dict[str, Setting] = {setting.name: setting for setting in SETTINGS}
_BY_KEY: dict[str, Setting] = {key: setting for setting in SETTINGS for key in setting.keys}
_BY_VARIABLE: dict[str, Setting] = {variable: setting for setting in SETTINGS for variable in setting.variables}
_VARIABLE_WORDS = [variable.removeprefix(PREFIX) for variable in _BY_VARIABLE]
# Field name -> (value, the setting's spelling in messages).
_Given = dict[str, tuple[object, str]]


@dataclass(frozen=True, slots=True)
class Resolved:
    """A Config, the origin of each value (by field name), and remarks for the user."""

    config: Config
    origins: Mapping[str, str]
    remarks: tuple[str, ...] = ()

    def value(self, setting: Setting) -> Any:
        """Return the value in force of one setting."""
        return getattr(getattr(self.config, setting.section), setting.name)


def load(flags: Mapping[str, object], environ: Mapping[str, str], config_file: str | Path | None) -> Resolved:
    """Read the config file, if any, and merge all sources. OCTAVO_CONFIG names the file if `config_file` is None."""
    config_file = config_file or environ.get(PREFIX + "CONFIG")
    if config_file is None:
        return resolve(flags, environ, {})
    return resolve(flags, environ, read_config_file(Path(config_file)), str(config_file))


def resolve(
    flags: Mapping[str, object], environ: Mapping[str, str], file: Mapping[str, object], path: str = ""
) -> Resolved:
    """Merge flags (by field name), OCTAVO_* variables, file keys and defaults; the first source wins. Pure."""
    if wrong := [name for name in flags if name not in _BY_NAME]:
        raise ConfigError(unknown("setting", wrong[0], _BY_NAME))
    remarks: list[str] = []
    given = _from_file(file, path) | _from_environ(environ, remarks)
    given |= {name: (value, _BY_NAME[name].flags[0]) for name, value in flags.items()}
    values: dict[str, dict[str, Any]] = {section: {} for section in _SECTIONS}
    for name, (value, spelled) in given.items():
        values[_BY_NAME[name].section][name] = _BY_NAME[name].read(value, spelled)
    config = Config(**{section: cls(**values[section]) for section, cls in _SECTIONS.items()})
    origins = {name: given[name][1] if name in given else "default" for name in _BY_NAME}
    return Resolved(config, origins, tuple(remarks))


def config_from_keywords(model: str, keywords: Mapping[str, object]) -> Config:
    """Return a Config from a model's name and keyword arguments: field names, or flags spelled with underscores.

    None leaves a setting at its default. Arguments of vLLM that have no effect here are accepted.
    Raises ConfigError naming an unknown setting and near names, or a wrong value and the remedy.
    """
    given: dict[str, object] = {"model": model}
    for keyword, value in keywords.items():
        if value is None or is_harmless(keyword, value):
            continue
        setting = _BY_KEY.get(keyword.replace("_", "-"))
        if setting is None:
            raise ConfigError(_unknown_keyword(keyword, value))
        if setting.name in given:
            raise ConfigError(f"{setting.name} is given twice, once as {keyword}; give it once")
        given[setting.name] = value
    return resolve(given, {}, {}).config


def _unknown_keyword(keyword: str, value: object) -> str:
    flag = "--" + keyword.replace("_", "-")
    if flag in UNSUPPORTED_FLAGS:
        return f"{keyword}={value!r} is not supported: {UNSUPPORTED_FLAGS[flag]}"
    if (ours := RENAMED_FLAGS.get(flag, "").removeprefix("--")) in _BY_KEY:
        return unknown("setting", keyword, (), f"did you mean {ours.replace('-', '_')!r}?")
    return unknown("setting", keyword, [key.replace("-", "_") for key in _BY_KEY], "octavo config show lists them")


def _from_environ(environ: Mapping[str, str], remarks: list[str]) -> _Given:
    given: _Given = {}
    for variable in sorted(environ):
        if not variable.startswith(PREFIX) or variable in _NO_SETTINGS:
            continue
        if variable in _BY_VARIABLE:
            _add(given, _BY_VARIABLE[variable], environ[variable], variable)
        elif near := near_names(variable.removeprefix(PREFIX), _VARIABLE_WORDS):  # the common prefix would be near, too
            names = " or ".join(repr(PREFIX + name) for name in near)
            remarks.append(f"unknown variable {variable!r} has no effect; did you mean {names}?")
    return given


def _from_file(file: Mapping[str, object], path: str) -> _Given:
    given: _Given = {}
    for key, value in file.items():
        entries = value if key in _SECTIONS and isinstance(value, dict) else {key: value}
        for name, entry in entries.items():
            dashed = str(name).replace("_", "-")
            if dashed not in _BY_KEY:
                raise ConfigError(f"{path}: {unknown('setting', str(name), _BY_KEY, 'octavo config show lists them')}")
            _add(given, _BY_KEY[dashed], entry, f"{path}: {name}")
    return given


def _add(given: _Given, setting: Setting, value: object, spelled: str) -> None:
    if setting.name in given:
        raise ConfigError(f"{given[setting.name][1]} and {spelled} are one setting; give one of them")
    given[setting.name] = (value, spelled)


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
        content = tomllib.loads(text) if path.suffix == ".toml" else read_yaml(text)
    except ValueError as error:
        raise ConfigError(f"config file {path} is not well formed: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"config file {path} is not a list of settings; give 'name: value' lines")
    return content


def read_yaml(text: str) -> object:
    """Parse YAML. Raises ValueError with the fault in one line."""
    import yaml  # imported here because only YAML files need it

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
