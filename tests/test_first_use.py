"""Structs that two threads may read at once have their types resolved at import.

msgspec resolves them at the first use otherwise, and a second thread in the middle of that dies with SIGSEGV.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import pathlib, sys
from {module} import {names}
resolved = []
sys.setprofile(lambda frame, event, _: resolved.append(frame.f_code.co_name) if event == "call" else None)
{use}
sys.setprofile(None)
assert resolved, "nothing ran"
sys.exit("get_class_annotations" in resolved)
"""
READS = [
    ("octavo.artifacts.script", "read_script", "read_script(pathlib.Path('FILE'))"),
    ("octavo.grammar.answer", "read_answer", "read_answer('{}')"),
    ("octavo.server.api.batches.run", "usage_of", "usage_of(b'{}')"),
    ("octavo.server.api.batches.run", "usage_in", "usage_in(pathlib.Path('FILE'))"),
]


@pytest.mark.parametrize(("module", "names", "use"), READS, ids=[read[1] for read in READS])
def test_types_are_resolved_at_import(module: str, names: str, use: str, tmp_path: object) -> None:
    path = f"{tmp_path}/script.json"
    with open(path, "w") as file:
        file.write('{"rules": [{"echo": true}]}')
    code = CODE.format(module=module, names=names, use=use.replace("FILE", path))
    found = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, timeout=60)
    assert found.returncode == 0, found.stderr or "types are resolved at the first use"
