"""Terminal output of commands: progress, messages and warnings on stderr; columns; durations."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from octavo.config import Config
from octavo.executors.protocol import Capacity
from octavo.observe.log import print_notice


@contextmanager
def loading(model: str, is_quiet: bool = False) -> Iterator[None]:
    """While the body loads a model, show a line about it if stderr is a terminal."""
    shown = sys.stderr.isatty() and not is_quiet
    if shown:
        print(f"loading {model} ...", end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        if shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def say(*lines: str) -> None:
    """Print lines to stderr, like the log; stdout is for answers."""
    for line in lines:
        print_notice(line)


def reason_of(error: Exception) -> str:
    """Return the reason of a failed system or network call: a text without an error number, never empty."""
    number = getattr(error, "errno", None) or 0
    text = os.strerror(number) if number > 0 else re.sub(r"\[Errno -?\d+\] ", "", str(error)) or type(error).__name__
    return text[:1].lower() + text[1:]


def align_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows of cells as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def duration_text(seconds: float) -> str:
    """Return a duration as text: 5.0 s, 3 m 07 s, 2 h 05 m."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes} m {rest:02} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} m"


def warn_limits(config: Config, capacity: Capacity) -> None:
    """Print a warning for each setting that the engine could not satisfy."""
    say(*(f"warning: {remark}" for remark in limit_remarks(config, capacity)))


def limit_remarks(config: Config, capacity: Capacity) -> Iterator[str]:
    """Yield a remark for each setting that the engine could not satisfy."""
    requested = config.model.max_model_len
    if requested is not None and requested > capacity.max_model_len:
        yield f"--max-model-len is {requested}, this model holds {capacity.max_model_len} tokens; that is used"
    if 0 < capacity.usable_len < capacity.max_model_len:
        yield (
            f"a request can use {capacity.usable_len:,} tokens, which is what the KV pool holds, and not "
            f"{capacity.max_model_len:,}; enlarge the pool, or give --max-model-len {capacity.usable_len}"
        )
    yield from capacity.notes
