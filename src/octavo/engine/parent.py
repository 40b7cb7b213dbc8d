"""Ends an engine or api process when its parent ends; defines the signal for stack dumps.

Owns: the watch on stdin, which the parent holds open while it runs. Does not: clean up.
Invariant: on Linux the process ends even if it is stopped, or its interpreter is busy.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

EXIT_ORPHANED = 3
DUMP_SIGNAL = signal.SIGUSR1  # writes every thread's stack to stderr, even while a step hangs: it runs no Python code
_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """End this process as soon as stdin ends. Call this after the last line was read from stdin."""
    if sys.platform == "linux":
        _ask_the_kernel()
    threading.Thread(target=_watch, name="octavo-parent", daemon=True).start()


def _watch() -> None:
    while os.read(0, 4096):
        pass
    os._exit(EXIT_ORPHANED)


def _ask_the_kernel() -> None:
    """Have the kernel send SIGKILL when the thread that started this process ends."""
    import ctypes  # here only: macOS has no prctl

    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
