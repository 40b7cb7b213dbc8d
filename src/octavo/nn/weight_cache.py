"""Packed weights in files, mapped by every process that runs the same model.

Owns: the folder, the file format, what makes a file fit, the bound on the folder's size.
Does not: pack.
"""

from __future__ import annotations

from pathlib import Path


class WeightCache:
    """A folder of packed models, at most `max_bytes` of them, the least recently used leaving first."""

    def __init__(self, folder: Path | None = None, max_bytes: int = 20 << 30) -> None:
        self.folder = folder
        self.max_bytes = max_bytes
