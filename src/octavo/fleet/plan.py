"""FleetPlan: the fleet that `octavo simulate --search --json FILE` found and `octavo fleet --plan FILE` starts.

Owns: the record, its checks, and its forms as words and as values for Kubernetes. Does not: search (simulator.search),
or start replicas.
The file is a JSON object whose `plan` is the record; the search's trials and figures beside it are not read. Settings
have the keys of a config file.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from octavo.config import ENGINE_SECTIONS, SETTINGS
from octavo.config.other_engines import UNSUPPORTED_FLAGS
from octavo.config.setting import Number
from octavo.config.spelling import unknown
from octavo.errors import ConfigError
from octavo.fleet.routing import ROUTERS

VERSION = 1
MAX_PLAN_BYTES = 16 << 20  # of the file, which has the search's trials too
POD_GPUS = 8
_CONTAINER = "/spec/template/spec/containers/0"
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
    **dict.fromkeys(("objective", "reached", "workload", "device"), (_is_text, "a text")),
    "version": (lambda value: value == VERSION, f"{VERSION}, the version that this Octavo reads: search again with it"),
}


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """A model, its replicas, their router, and settings by field name. The other settings keep their defaults.

    `objective` is what the search had to reach on `workload`, and `reached` the figures it reached on replicas of
    `device`. A search may choose settings that no engine has: see `why_not_served`.
    """

    model: str
    replicas: int
    router: str
    settings: Mapping[str, object] = field(default_factory=dict)
    objective: str = ""
    reached: str = ""
    workload: str = ""
    device: str = ""
    version: int = VERSION

    @property
    def num_devices(self) -> int:
        """Return the devices of one replica, those of sizes that no engine has included."""
        names = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
        return math.prod(size for name in names if isinstance(size := self.settings.get(name, 1), int))

    def why_not_served(self) -> str | None:
        """Return why no fleet can be started from the plan; None if one can."""
        names = [name for name in self.settings if name not in _PLANNED]
        return _not_served(_key(names[0]), self.settings[names[0]]) if names else None

    def words(self) -> list[str]:
        """Return the settings as flags, for replicas that join a fleet and for its front."""
        words = [f"--model={self.model}"]
        for name, value in self.settings.items():
            if value is not None:
                words += _PLANNED[name].words(value)
        return words

    def command(self) -> str:
        """Return the command that starts the fleet."""
        return shlex.join(["octavo", "fleet", *self.words(), f"--replicas={self.replicas}", f"--router={self.router}"])

    def kustomization(self) -> str:
        """Return the plan as a kustomization of deploy/kubernetes/fleet.yaml: replicas, flags, and GPUs of a replica.

        Raises ConfigError if no fleet can be started from the plan, or a replica does not fit in a pod.
        """
        if (why := self.why_not_served()) is not None:
            raise ConfigError(why)
        if self.num_devices > POD_GPUS:
            raise ConfigError(
                f"a replica has {self.num_devices} devices, and a machine seldom more than {POD_GPUS}: one pod cannot "
                "have them; deploy/kubernetes/ranks.yaml divides an engine among pods"
            )
        model, *others = self.words()
        is_gpu = self.device not in ("", "this")
        gpus: list[tuple[str, str, object]] = (
            [("add", f"{_CONTAINER}/resources/limits/nvidia.com~1gpu", self.num_devices)] if is_gpu else []
        )
        common = [
            ("replace", f"{_CONTAINER}/args/0", model),
            *(("add", f"{_CONTAINER}/args/-", word) for word in others),
        ]
        front = [*common, ("add", f"{_CONTAINER}/args/-", f"--router={self.router}")]
        machine = f" on {self.device}" if self.device else ""
        lines = [
            f"# What octavo simulate --search found for {_one_line(self.workload)}{machine}:",
            f"# {_one_line(self.reached)}. Beside deploy/kubernetes/fleet.yaml: kubectl apply -k .",
            "# Requests and limits of memory, and the kind of GPU (a nodeSelector), are yours to set.",
            "apiVersion: kustomize.config.k8s.io/v1beta1",
            "kind: Kustomization",
            "resources: [fleet.yaml]",
            "replicas:",
            f"  - {{name: octavo-replica, count: {self.replicas}}}",
            "patches:",
        ]
        for name, changes in (("octavo-front", front), ("octavo-replica", [*common, *gpus])):
            lines += [f"  - target: {{kind: Deployment, name: {name}}}", "    patch: |-"]
            lines += [
                f"      - {{op: {op}, path: {where}, value: {json.dumps(value)}}}" for op, where, value in changes
            ]
        return "\n".join([*lines, ""])

    def facts(self) -> dict[str, Any]:
        """Return the plan as the value of `plan` in a file."""
        return asdict(self) | {"settings": {_key(name): value for name, value in self.settings.items()}}


def _key(name: str) -> str:
    return _PLANNED[name].key if name in _PLANNED else name.replace("_", "-")


def _not_served(key: str, value: object) -> str:
    return f"no engine has {key} {value!r}: {UNSUPPORTED_FLAGS[f'--{key}']}; search without it"


def _one_line(text: str) -> str:
    return " ".join(text.split())


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
        if setting is None and f"--{key}" in UNSUPPORTED_FLAGS:
            raise ConfigError(f"{path}: {_not_served(key, value)}")
        if setting is None:
            raise ConfigError(f"{path}: {unknown('setting', key, _BY_KEY)}")
        settings[setting.name] = setting.read(value, f"{path}: plan.settings.{key}")
    return FleetPlan(**facts | {"settings": settings})
