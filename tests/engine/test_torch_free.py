"""The front end's side of the engine loads no torch, and importing octavo loads next to nothing."""

import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parents[2] / "src"
MODULES = sorted(f"octavo.engine.{path.stem}" for path in (SRC / "octavo" / "engine").glob("[a-z]*.py"))


def run(code: str) -> str:
    code = f"import sys; sys.path.insert(0, {str(SRC)!r})\n{code}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_no_module_of_the_engine_nor_assembly_loads_torch() -> None:
    imports = "\n".join(f"import {name}" for name in (*MODULES, "octavo.assembly"))
    assert run(f"{imports}\nprint('torch' in sys.modules)") == "False\n"


def test_importing_octavo_loads_nothing_but_itself() -> None:
    assert run("import octavo; print([m for m in sys.modules if m.startswith('octavo')])") == "['octavo']\n"


def test_public_names_are_what_is_listed() -> None:
    import octavo

    for name in octavo.__all__:
        assert getattr(octavo, name).__module__.startswith("octavo.")
    assert dir(octavo) == sorted([*octavo.__all__, "__version__"])
    with pytest.raises(AttributeError, match="nothing_here"):
        _ = octavo.nothing_here
