"""The models of one server: each with a name, and settings of its own beside the common ones.

Owns: ServedModelConfig; the file of --models; the check that names are unique. Does not: resolve a model's files, or
know the settings that all models share (those are the common Config's).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any

from octavo.config import ENGINE_SECTIONS, SETTINGS, Config
from octavo.config.setting import Setting
from octavo.config.sources import read_config_file
from octavo.config.spelling import unknown
from octavo.errors import ConfigError

_SECTIONS = (*ENGINE_SECTIONS, "fleet")
_OF_FLEETS = ("replicas", "router")  # the other settings of fleets are of the whole server
_OWN = {
    key: setting
    for setting in SETTINGS
    if setting.section in ENGINE_SECTIONS or setting.name in _OF_FLEETS
    for key in setting.keys
}
_SHARED = {key for setting in SETTINGS for key in setting.keys} - _OWN.keys()


@dataclass(frozen=True, slots=True)
class ServedModelConfig:
    """One model of a server: its first name for clients, and its whole Config."""

    name: str
    config: Config


def served_models(common: Config, words: Sequence[str]) -> tuple[ServedModelConfig, ...]:
    """Return the models that the words name, then those of the file --models; without both, the common Config's model.

    The first is the default model. Raises ConfigError.
    """
    entries: list[tuple[str, Mapping[str, object]]] = [("MODEL", {"model": word}) for word in words]
    if common.models.models_file is not None:
        entries += _entries_of(common.models.models_file)
    if not entries:
        entries = [("MODEL", {"model": common.model.model})]
    if len(entries) > 1 and common.model.served_model_name:
        raise ConfigError("--served-model-name names one model; with several, give each its name in the file --models")
    if len(entries) > 1 and common.recording.record is not None:
        raise ConfigError("--record records one model's engine; with several models, leave it out")
    found = tuple(_served_model(common, where, dict(entry)) for where, entry in entries)
    counts = Counter(name for each in found for name in dict.fromkeys(each.config.model.served_model_name))
    twice = [name for name, count in counts.items() if count > 1]
    if twice:
        raise ConfigError(f"two models have the name {twice[0]!r}; give each a name of its own (name: in --models)")
    return found


def model_name(model: str) -> str:
    """Return a model's name for clients, if none is given: a path's last part, or else the word itself."""
    is_path = model.startswith(("scripted:", ".", "/", "~")) or model.endswith(".gguf") or model.count("/") > 1
    if is_path:
        path = PurePath(model.removeprefix("scripted:"))
        return path.stem if path.suffix in (".gguf", ".json", ".jsonl", ".yaml", ".yml") else path.name
    return model


def _entries_of(path: str) -> list[tuple[str, Mapping[str, object]]]:
    """Return each model of a file, and where it is, for messages. Raises ConfigError."""
    content = read_config_file(Path(path))
    listed = content.get("models")
    if not isinstance(listed, list) or not listed or len(content) > 1:
        raise ConfigError(f"--models {path} has no list of models; give 'models:' and a model per '-' line below it")
    entries: list[tuple[str, Mapping[str, object]]] = []
    for number, entry in enumerate(listed, 1):
        where = f"{path}: model {number}"
        if isinstance(entry, str):
            entry = {"model": entry}
        if not isinstance(entry, dict) or "model" not in entry:
            raise ConfigError(f"{where} has no 'model'; give 'model:' with a name, a path or a repository")
        entries.append((where, entry))
    return entries


def _served_model(common: Config, where: str, entry: dict[str, Any]) -> ServedModelConfig:
    """Return one model: its own settings replace the common ones. Raises ConfigError naming the place."""
    given_name = entry.pop("name", None)
    values: dict[str, dict[str, Any]] = {section: {} for section in _SECTIONS}
    for key, value in entry.items():
        setting = _own_setting(where, str(key))
        values[setting.section][setting.name] = setting.read(value, f"{where}: {key}")
    names = values["model"].get("served_model_name", common.model.served_model_name)
    if given_name is not None:
        if not isinstance(given_name, str) or not given_name:
            raise ConfigError(f"{where}: name is {given_name!r}; give a text")
        names = (given_name, *names)
    names = names or (model_name(values["model"].get("model", common.model.model)),)
    values["model"]["served_model_name"] = tuple(dict.fromkeys(names))
    changed = {section: replace(getattr(common, section), **own) for section, own in values.items() if own}
    return ServedModelConfig(names[0], replace(common, **changed))


def _own_setting(where: str, key: str) -> Setting:
    dashed = key.replace("_", "-")
    if dashed in _SHARED:
        raise ConfigError(f"{where}: {key} is a setting of the whole server; give it as a flag or in --config")
    if dashed not in _OWN:
        raise ConfigError(f"{where}: {unknown('setting', key, _OWN, 'octavo config show lists them')}")
    return _OWN[dashed]
