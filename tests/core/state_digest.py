"""A digest of everything that a scheduler remembers, for tests that two ways to a state lead to the same one."""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Iterator
from enum import Enum
from hashlib import blake2b
from typing import Any

from octavo.core.scheduler import Scheduler

_PLAIN = (int, float, str, bytes, bool, type(None), Enum)


def state_digest(scheduler: Scheduler) -> bytes:
    """Equal for schedulers that will act alike: every field of every object, in order; functions are left out."""
    digest = blake2b(digest_size=16)
    for piece in _pieces(scheduler._state, {}):
        digest.update(piece)
        digest.update(b"\0")
    return digest.digest()


def state_lines(scheduler: Scheduler) -> list[bytes]:
    """The same, to be compared by eye."""
    return list(_pieces(scheduler._state, {}))


def _pieces(value: Any, seen: dict[int, int]) -> Iterator[bytes]:
    """Containers by what is in them; an object met again by its number."""
    if isinstance(value, _PLAIN):
        yield repr(value).encode()
    elif isinstance(value, array):
        yield value.tobytes()
    elif isinstance(value, (list, tuple, deque)):
        yield f"[{len(value)}".encode()
        for entry in value:
            yield from _pieces(entry, seen)
    elif isinstance(value, (dict, OrderedDict)):
        yield f"{{{len(value)}".encode()
        for key, entry in value.items():
            yield from _pieces(key, seen)
            yield from _pieces(entry, seen)
    elif isinstance(value, frozenset):
        yield repr(sorted(value)).encode()
    elif not callable(value):
        yield from _object(value, seen)


def _object(value: object, seen: dict[int, int]) -> Iterator[bytes]:
    if id(value) in seen:
        yield f"@{seen[id(value)]}".encode()
        return
    seen[id(value)] = len(seen)
    yield type(value).__name__.encode()
    for name in _fields(value):
        yield name.encode()
        yield from _pieces(getattr(value, name), seen)


def _fields(value: object) -> list[str]:
    names = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    return [name for name in (*names, *getattr(value, "__dict__", {})) if hasattr(value, name)]
