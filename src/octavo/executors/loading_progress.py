"""The progress of loading weights: a bar on a terminal, else lines in the log.

Owns: when and how the progress is shown. Does not: read weights, or decide whether this rank shows it.
Invariant: loading that takes less than a second shows nothing.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from octavo.artifacts.resolve import ModelFiles

if TYPE_CHECKING:
    from rich.console import Console

_LOG = logging.getLogger(__name__)
_QUIET_S = 1.0  # before the bar appears
_LOG_S = 10.0  # between two lines of the log


class LoadingProgress:
    """Shows which part of the files was read. `advance` is called in one thread at a time, `close` at the end."""

    def __init__(
        self, num_bytes: int, console: Callable[[], Console] | None, now: Callable[[], float] = time.monotonic
    ) -> None:
        """Make the progress of a load that begins now. `console` makes the bar's terminal; None: write to the log."""
        self._num_bytes, self._console, self._now = num_bytes, console, now
        self._num_read = 0
        self._begun_at = self._logged_at = now()
        self._show: Callable[[float], None] | None = None
        self.close: Callable[[], None] = lambda: None

    def advance(self, num_values: int, total: int) -> None:
        """Count values that were read, of `total`."""
        self._num_read += num_values
        share, now = min(1.0, self._num_read / max(1, total)), self._now()
        if self._console is None:
            if now - self._logged_at >= _LOG_S:
                self._logged_at = now
                self._log(share, now - self._begun_at)
        elif self._show is not None:
            self._show(share)
        elif now - self._begun_at >= _QUIET_S:
            self._show = self._start_bar(self._console(), share)

    def _log(self, share: float, elapsed_s: float) -> None:
        left_s = elapsed_s * (1 - share) / max(share, 1e-9)
        sizes = share * self._num_bytes / 2**30, self._num_bytes / 2**30
        _LOG.info("loading weights: %.2f of %.2f GiB, %.0f s left", *sizes, left_s)

    def _start_bar(self, console: Console, share: float) -> Callable[[float], None]:
        from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn  # 60 ms

        columns = "loading weights", BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn()
        bar = Progress(*columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False)
        task = bar.add_task("", total=self._num_bytes, completed=int(share * self._num_bytes))
        bar.start()
        self.close = bar.stop
        return lambda share: bar.update(task, completed=share * self._num_bytes)


@contextmanager
def loading_progress(files: ModelFiles) -> Iterator[Callable[[int, int], None]]:
    """Show the progress of loading these files while the body runs; yield the function that advances it."""
    num_bytes = sum(path.stat().st_size for path in files.weights if path.is_file())
    progress = LoadingProgress(num_bytes, _stderr_console if sys.stderr is not None and sys.stderr.isatty() else None)
    try:
        yield progress.advance
    finally:
        progress.close()


def _stderr_console() -> Console:
    from rich.console import Console

    return Console(stderr=True)
