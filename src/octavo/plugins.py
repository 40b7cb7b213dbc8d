"""Finds third-party policies: installed policies by their entry points, local policies by module:Class.

Owns: the entry point group `octavo.policies`, and the messages about a plug-in that does not load.
Does not: own the registry (octavo.core.policy) or call policies. The core never looks for plug-ins.
Invariant: the log names a broken plug-in and the remedy, and only the use of that plug-in fails.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType

from octavo.config.spelling import unknown
from octavo.core import policy as registry
from octavo.errors import ConfigError

GROUP = "octavo.policies"

_log = logging.getLogger(__name__)


@cache
def load_policies() -> Mapping[str, str]:
    """Register every installed policy, once per process. Return failures: entry point -> reason."""
    failures: dict[str, str] = {}
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: (entry.name, entry.value)):
        try:
            registry.register_policy(entry.load())
        except Exception as error:  # a plug-in may raise anything
            failures[entry.name] = f"{type(error).__name__}: {error}"
            _log.warning(
                "policy plug-in %s (%s, from %s) is left out: %s; mend or uninstall it",
                entry.name,
                entry.value,
                _origin(entry),
                failures[entry.name],
            )
    return MappingProxyType(failures)


def find_policy(name: str) -> str:
    """Return the registered name of a policy. A policy given as "module:Class" is imported and registered first.

    Raises ConfigError naming the known policies, or the reason why this one does not load.
    """
    failures = load_policies()
    if ":" in name:
        return _import_policy(name)
    if name in failures and name not in registry.POLICIES:
        raise ConfigError(f"policy plug-in {name!r} does not load ({failures[name]}); mend it or choose another policy")
    if name not in registry.POLICIES:
        known = sorted(registry.POLICIES)
        raise ConfigError(unknown("policy", name, known, f"give one of {', '.join(known)}"))
    return registry.find_policy(name).name


def _import_policy(path: str) -> str:
    module_name, _, class_name = path.partition(":")
    try:
        found = getattr(import_module(module_name), class_name)
    except Exception as error:
        raise ConfigError(
            f"policy {path!r} does not load ({type(error).__name__}: {error}); "
            f"give module:Class of a module that python can import, with its folder on PYTHONPATH if need be"
        ) from error
    return registry.register_policy(found).name


def _origin(entry: EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else "an unknown package"
