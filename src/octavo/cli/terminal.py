"""What commands show while they work, on stderr; progress only on a terminal."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from octavo.cli.startup import limit_remarks
from octavo.config import Config
from octavo.executors.protocol import Capacity
from octavo.observe.log import print_notice


@contextmanager
def loading(model: str, is_quiet: bool = False) -> Iterator[None]:
    """Print that a model is loading, and erase the line when it has loaded."""
    shown = sys.stderr.isatty() and not is_quiet
    if shown:
        print(f"loading {model} ...", end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        if shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def reason_of(error: Exception) -> str:
    """Return why a call of the system or network failed, as text: without an error number, never empty."""
    number = getattr(error, "errno", None) or 0
    text = os.strerror(number) if number > 0 else re.sub(r"\[Errno -?\d+\] ", "", str(error)) or type(error).__name__
    return text[:1].lower() + text[1:]


def say(*lines: str) -> None:
    """Print lines to stderr, as the log is written; stdout is for answers."""
    for line in lines:
        print_notice(line)


def warn_limits(config: Config, capacity: Capacity) -> None:
    """Print warnings about settings that the engine could not satisfy."""
    say(*(f"warning: {remark}" for remark in limit_remarks(config, capacity)))
