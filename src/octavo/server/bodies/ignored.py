"""IgnoredFields: the fields of one request that were ignored, and how they are told.

Owns: collecting paths while a body is checked, on any thread, and their bounds. Does not: decide what is ignored.
Invariant: a path holds letters, digits and `_ . [ ] -` only, and no index of a list; the number of paths and their
lengths are bounded, so that they can stand in a header and in the log.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from octavo.server.bodies.field_table import KNOWN_NAMES
from octavo.server.faults import bad_field

HEADER = "X-Octavo-Ignored"
IGNORED_FIELDS = "octavo.ignored_fields"  # of the request's scope
MAX_PATHS = 16
MAX_PATH_CHARACTERS = 64
OTHER = "other"  # the label of names that are in no table
_INDEX = re.compile(r"\[\d+\]")
_UNSAFE = re.compile(r"[^A-Za-z0-9_.\[\]-]")
_NAME = re.compile(r"[A-Za-z0-9_]+")


class IgnoredFields:
    """Of one request. `is_strict`: such fields are refused instead (--strict-fields)."""

    __slots__ = ("_paths", "is_strict")

    def __init__(self, is_strict: bool = False) -> None:
        self.is_strict = is_strict
        self._paths: dict[str, None] = {}

    def add(self, path: str) -> None:
        """Note a field; beyond MAX_PATHS of them, only that there are more."""
        path = _UNSAFE.sub("_", _INDEX.sub("[]", path[: 4 * MAX_PATH_CHARACTERS]))[:MAX_PATH_CHARACTERS]
        self._paths[path if path in self._paths or len(self._paths) < MAX_PATHS else "..."] = None

    @property
    def paths(self) -> list[str]:
        """The fields in the order in which they were met, each once."""
        return list(self._paths)

    @property
    def labels(self) -> list[str]:
        """Their names as a metric may have them: known ones, or OTHER."""
        names = (_NAME.findall(path) for path in self._paths)
        return [found[-1] if found and found[-1] in KNOWN_NAMES else OTHER for found in names]


_CURRENT: ContextVar[IgnoredFields | None] = ContextVar("octavo_ignored_fields", default=None)


@contextmanager
def collecting(ignored: IgnoredFields) -> Iterator[None]:
    """Have `ignore` note fields here, in this thread."""
    token = _CURRENT.set(ignored)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def ignore(path: str, is_known: bool = False) -> None:
    """Ignore a field, or refuse it: under --strict-fields, and where it could be told to no client. Raises ApiError.

    `is_known`: it is a field of the API, which does nothing here.
    """
    current = _CURRENT.get()
    if current is not None and not current.is_strict:
        current.add(path)
    elif is_known:
        raise bad_field(path, f"{path}: this server does not support it; leave it out", "unsupported_field")
    else:
        raise bad_field(path, f"{path} is not a field that this endpoint knows", "unknown_field")


def are_unknown_refused() -> bool:
    """Return True where `ignore` would raise."""
    current = _CURRENT.get()
    return current is None or current.is_strict
