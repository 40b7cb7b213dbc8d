"""Resolve references of a JSON schema (RFC 6901, as a fragment)."""

from __future__ import annotations

from typing import Any, Final

NOWHERE: Final = object()


def target_of(root: object, reference: str) -> Any:
    """Return the target of a reference such as `#/$defs/a` in the document `root`, NOWHERE if there is none."""
    target: Any = root
    for part in reference.removeprefix("#").split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(target, list) and key.isdecimal() and len(key) < 6 and int(key) < len(target):
            target = target[int(key)]
        elif isinstance(target, dict) and key in target:
            target = target[key]
        else:
            return NOWHERE
    return target
