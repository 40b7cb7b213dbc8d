"""The folder of cache files, which hold weights packed for this machine; they may be deleted at any time.

Owns: the folder's path, its size, and its bound: the least recently used files are removed first.
Does not: read or write the files' contents.
Invariants: removing a file does not disturb a process that has mapped it. Only regular files with the name of a cache
file, finished or unfinished, are counted and removed.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from pathlib import Path

SUFFIX = ".octavo"
UNFINISHED = ".unfinished"
_NAME = re.compile(rf"[0-9a-f]{{32}}({re.escape(SUFFIX)}|\.[a-z0-9_]{{8}}{re.escape(UNFINISHED)})")
_ABANDONED_S = 3600.0  # a file that is unfinished after an hour has no writer any more


def cache_folder(given: str | None) -> Path:
    """Return the folder to use: `given`, else $OCTAVO_CACHE_DIR, else octavo/weights in the user's cache folder."""
    if given := given or os.environ.get("OCTAVO_CACHE_DIR"):
        return Path(given).expanduser()
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "octavo" / "weights"


def used_bytes(folder: Path) -> int:
    """Return the bytes of all cache files, including unfinished ones; 0 if there is no such folder."""
    return sum(size for _, size, _ in _files(folder))


def make_room(folder: Path, max_bytes: int, keep: Path) -> None:
    """Remove files above the bound, least recently used first, but never `keep`. Also remove abandoned files."""
    files = _files(folder)
    excess = sum(size for _, size, _ in files) - max_bytes
    for used, size, path in sorted(files):
        is_abandoned = path.suffix == UNFINISHED and time.time() - used > _ABANDONED_S
        if path != keep and (is_abandoned or (excess > 0 and path.suffix == SUFFIX)):
            with contextlib.suppress(OSError):  # another process may have removed it first
                path.unlink()
                excess -= size


def touch(path: Path) -> None:
    """Set the file's time of last use to now; do nothing if this is not permitted."""
    with contextlib.suppress(OSError):
        os.utime(path, follow_symlinks=False)


def _files(folder: Path) -> list[tuple[float, int, Path]]:
    """Return the time of last use, size and path of each cache file."""
    files = []
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            if _NAME.fullmatch(entry.name):
                with contextlib.suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode):
                        files.append((status.st_mtime, status.st_size, Path(entry.path)))
    return files
