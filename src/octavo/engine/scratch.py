"""The folders of engine processes: their sockets, and the pages that are written at each step.

Owns: where they are made, the names in them, and removing what a killed engine left.
Does not: make them (frontend/process.py does).
Invariant: only what engines make is removed, by name and kind, in a folder of this user; no link is followed.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from pathlib import Path

VARIABLE = "OCTAVO_SCRATCH_DIR"
PREFIX = "octavo-"
SOCKET_NAME = "engine.sock"
PAGE_NAME = "heartbeat"
_MEMORY = "/dev/shm"
_NAME = re.compile(re.escape(PREFIX) + r"[a-z0-9_]{8}")  # as tempfile makes them
_FILES = {SOCKET_NAME: stat.S_ISSOCK, f"{SOCKET_NAME}~": stat.S_ISSOCK, PAGE_NAME: stat.S_ISREG}


def scratch_root() -> str | None:
    """Return the folder that a parent made for this process, else one that is no disk: the loop would wait for a page
    that is being written back. None: the system's folder of temporary files.
    """
    given = os.environ.get(VARIABLE)
    if given and os.access(given, os.W_OK | os.X_OK):
        return given
    return _MEMORY if os.access(_MEMORY, os.W_OK | os.X_OK) else None


def open_folder(path: str | Path, parent: int | None = None) -> int | None:
    """Open a folder to look at and remove what is in it; None for anything else, a link to a folder included."""
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    except OSError:
        return None


def is_own_folder(folder: int, inode: int | None = None) -> bool:
    """Return True if an open folder is this user's, closed to others, and has that inode."""
    status = os.fstat(folder)
    is_private = status.st_uid == os.getuid() and not stat.S_IMODE(status.st_mode) & 0o077
    return is_private and inode in (None, status.st_ino)


def remove_engine_folders(parent: int) -> None:
    """Remove the folders of engines below an open folder; a file that no engine makes keeps the folder it is in."""
    for name in os.listdir(parent):
        folder = open_folder(name, parent) if _NAME.fullmatch(name) else None
        if folder is None:
            continue
        try:
            if is_own_folder(folder):
                _remove_files(folder)
                with contextlib.suppress(OSError):
                    os.rmdir(name, dir_fd=parent)
        finally:
            os.close(folder)


def _remove_files(folder: int) -> None:
    for name, is_kind in _FILES.items():
        with contextlib.suppress(OSError):
            if is_kind(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
                os.unlink(name, dir_fd=folder)
