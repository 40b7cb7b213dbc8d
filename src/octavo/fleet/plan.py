"""FleetPlan: the fleet that `octavo simulate --search --json FILE` found and `octavo fleet --plan FILE` starts.

Owns: the record, and its checks. Does not: search (simulator.search), or start replicas.
The file is a JSON object whose `plan` is the record; the search's trials and figures beside it are not read. Settings
have the keys of a config file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from octavo.config import ENGINE_SECTIONS, SETTINGS
from octavo.config.setting import Number
from octavo.config.spelling import unknown
from octavo.errors import ConfigError
from octavo.fleet.routing import ROUTERS

VERSION = 1
MAX_PLAN_BYTES = 16 << 20  # of the file, which has the search's trials too
_REPLICAS = Number(int, 1, 1024)
_PLANNED = {one.name: one for one in SETTINGS if one.section in ENGINE_SECTIONS and one.name != "model"}
_BY_KEY = {key: setting for setting in _PLANNED.values() for key in setting.keys}


def _is_text(value: object) -> bool:
    return isinstance(value, str)


_REQUIRED = ("model", "replicas", "router")
_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {  # field -> whether a value is right, and the remedy
    "model": (lambda value: _is_text(value) and bool(value), "a model's name"),
    "replicas": (lambda value: type(value) is int and _REPLICAS.accepts(value), str(_REPLICAS)),
    "router": (lambda value: _is_text(value) and value in ROUTERS, f"one of {', '.join(ROUTERS)}"),
    "settings": (lambda value: isinstance(value, dict), "an object with the keys of a config file"),
    **dict.fromkeys(("objective", "reached", "workload"), (_is_text, "a text")),
    "version": (lambda value: value == VERSION, f"{VERSION}, the version that this Octavo reads: search again with it"),
}


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """A model, its replicas, their router, and settings by field name. The other settings keep their defaults.

    `objective` is what the search had to reach on `workload`, and `reached` the figures it reached.
    """

    model: str
    replicas: int
    router: str
    settings: Mapping[str, object] = field(default_factory=dict)
    objective: str = ""
    reached: str = ""
    workload: str = ""
    version: int = VERSION

    def facts(self) -> dict[str, Any]:
        """Return the plan as the value of `plan` in a file."""
        return asdict(self) | {"settings": {_PLANNED[name].key: value for name, value in self.settings.items()}}


def read_fleet_plan(path: Path) -> FleetPlan:
    """Read a file of `octavo simulate --search --json FILE`. Raises ConfigError naming the file, the field and why."""
    try:
        if path.stat().st_size > MAX_PLAN_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_PLAN_BYTES} bytes; give what a search wrote by --json FILE")
        content = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror}); give what a search wrote by --json FILE"
        ) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON ({error}); give what a search wrote by --json FILE") from None
    if not isinstance(content, dict) or "plan" not in content:
        raise ConfigError(f"{path} has no plan; give what octavo simulate --search --json FILE wrote")
    return _check(path, content["plan"])


def _check(path: Path, facts: object) -> FleetPlan:
    if facts is None:
        raise ConfigError(f"{path} has no plan: no fleet reached the search's objectives; search again with wider ones")
    if not isinstance(facts, dict):
        raise ConfigError(f"{path}: plan is {facts!r:.80}; give an object with model, replicas and router")
    if wrong := [name for name in facts if name not in _CHECKS]:
        raise ConfigError(f"{path}: {unknown('field of plan', wrong[0], _CHECKS)}")
    for name, (is_right, remedy) in _CHECKS.items():
        if name in facts or name in _REQUIRED:
            value = facts.get(name)
            if not is_right(value):
                raise ConfigError(f"{path}: plan.{name} is {value!r:.80}; give {remedy}")
    settings = {}
    for key, value in facts.get("settings", {}).items():
        setting = _BY_KEY.get(key)
        if setting is None:
            raise ConfigError(f"{path}: {unknown('setting', key, _BY_KEY)}")
        settings[setting.name] = setting.read(value, f"{path}: plan.settings.{key}")
    return FleetPlan(**facts | {"settings": settings})
