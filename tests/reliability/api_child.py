"""An api of the reliability tests in a process of its own: started, told where it listens, and gone in the end."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def api_child(script: Path, settings: Mapping[str, Any]) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The process of a script that prints its port and ends with its stdin; and the port."""
    words = [sys.executable, str(script), json.dumps(settings)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            line = process.stdout.readline()
            assert line, "the api process did not start"
            yield process, int(line)
        finally:
            process.stdin.close()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
