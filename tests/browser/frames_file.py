"""A short stream of frames for the tests of the dashboard, as tools/sample_frames.py makes it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.source_tree import ROOT


def make_frames(path: Path, *flags: str) -> list[dict[str, Any]]:
    """Write them to a file, a frame a line; gives them too."""
    command = [sys.executable, "-m", "tools.sample_frames", str(path), *flags]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return [json.loads(line) for line in path.read_text().splitlines()]
