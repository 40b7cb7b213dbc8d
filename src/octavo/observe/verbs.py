"""Verbs that look: whatever goes wrong in one is told to whoever asked, and the engine goes on.

Owns: the guard. Does not: know the verbs (see EngineLoop.verbs), or guard those that change something.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from octavo.errors import EngineError

_LOG = logging.getLogger(__name__)


def guarded(name: str, look: Callable[[str], object]) -> Callable[[str], object]:
    """A verb that answers what `look` gives, or an EngineError with what went wrong."""

    def answer(argument: str) -> object:
        try:
            return look(argument)
        except Exception as error:  # the instrument shell
            _LOG.exception("%s failed", name)
            return EngineError(f"{name} failed: {type(error).__name__}: {error}")

    return answer
