"""How the step loop answers those who asked.

Owns: the shape of a reply, and the two that ask for nothing. Does not: know what is answered.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

_LOG = logging.getLogger(__name__)

Reply = Callable[[object], None]  # called once, in the loop's thread or the caller's: a value or an Exception


def attempt(last: Callable[[], object]) -> None:
    """Do one of the last things; what fails keeps nobody else from hearing."""
    try:
        last()
    except Exception:  # the shell: nobody is left to tell
        _LOG.exception("something failed at the engine's end")


def ignore(*_: object) -> None:
    """Nobody asked, or waits."""
