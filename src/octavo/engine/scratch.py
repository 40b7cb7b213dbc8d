"""Where the folders of engine processes are made: their sockets, and the pages that are written at each step.

Owns: the choice. Does not: make or remove anything. Whoever may be killed is given a folder by its parent, which
removes what is left.
"""

from __future__ import annotations

import os

VARIABLE = "OCTAVO_SCRATCH_DIR"
_MEMORY = "/dev/shm"


def scratch_root() -> str | None:
    """The folder that a parent made for this process, else one that is no disk: the loop would wait for a page that is
    being written back. None: the system's folder of temporary files.
    """
    given = os.environ.get(VARIABLE)
    if given and os.access(given, os.W_OK | os.X_OK):
        return given
    return _MEMORY if os.access(_MEMORY, os.W_OK | os.X_OK) else None
