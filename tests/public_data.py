"""Where tests find public data: beside the repository, or they are skipped; none of it is copied here."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.source_tree import ROOT


def public_file(name: str) -> Path:
    """A file of the public data, by its path below `shared/data`; skips the test where there is none."""
    for folder in (ROOT, ROOT.parent):
        if (path := folder / "shared" / "data" / name).exists():
            return path
    pytest.skip(f"no shared/data/{name} in the repository or beside it")
