"""How much of the source one streamed chat request crosses: what was reached, which is lowered and never raised."""

import json
import subprocess
import sys

from tests.source_tree import ROOT, SRC

MAX_FILES = 48
MAX_FUNCTIONS = 384  # code objects; they vary by a few with how the engine's thread keeps up


def test_a_streamed_chat_request_crosses_no_more_files_and_functions_than_were_reached() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tools.request_path"],
        cwd=ROOT,
        env={"PYTHONPATH": str(SRC), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout.splitlines()[-1])
    assert counts["files"] <= MAX_FILES and counts["functions"] <= MAX_FUNCTIONS, counts
    assert counts["files"] > 40 and counts["cross_file_calls"] > counts["files"], "it is counted at all"
