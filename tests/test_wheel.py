"""The wheel, built and installed as a user gets it: kernels inside, one for all Pythons; no compiler is fine too."""

import os
import shutil
import site
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from tests.source_tree import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
HAS_COMPILER = any(shutil.which(name) for name in ("c++", "g++", "clang++"))
SOURCES = ["pyproject.toml", "setup.py", "MANIFEST.in", "LICENSE", "README.md", "csrc", "src"]


def copy_sources(target: Path) -> Path:
    """A copy to build in: the tree itself stays as it is."""
    target.mkdir()
    junk = shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info")
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=junk)
        else:
            shutil.copy(source, target / name)
    return target


def run(*command: object, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, env=environment, cwd="/")
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def build_wheel(folder: Path, **variables: str) -> tuple[Path, str]:
    """(wheel, what the build said)."""
    sources = copy_sources(folder / "sources")
    done = run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, sources, **variables)
    (wheel,) = folder.glob("*.whl")
    return wheel, done.stdout + done.stderr


def missing_modules(wheel: Path) -> set[str]:
    """Modules of the source tree that the wheel does not hold."""
    here = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src" / "octavo").rglob("*.py")}
    return here - set(zipfile.ZipFile(wheel).namelist())


def install(wheel: Path, folder: Path) -> Path:
    """A new environment with the wheel, and this one's packages (but not its octavo) visible."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    (packages,) = folder.glob("lib/python*/site-packages")
    # Path entries of a .pth file have their own .pth files left unread: an editable octavo stays out.
    (packages / "outer.pth").write_text("\n".join(site.getsitepackages()))
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel)
    return python


@pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler here")
def test_wheel_holds_the_kernels_and_runs(tmp_path):
    wheel, _ = build_wheel(tmp_path)
    assert "-py3-none-" in wheel.name and not wheel.name.endswith("-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "octavo/ops/libkernels.so" in names and "octavo/py.typed" in names
    pages = {f"octavo/dashboard/static/{path.name}" for path in (ROOT / "src/octavo/dashboard/static").iterdir()}
    assert pages <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if name.startswith(("tests/", "csrc/", "tools/"))]

    python = install(wheel, tmp_path / "venv")
    code = "import octavo.core.plan as m; from octavo.ops import cpu; print(m.__file__); print(cpu.status().is_loaded)"
    path, is_loaded = run(python, "-c", code).stdout.split()
    assert path.startswith(str(tmp_path)) and is_loaded == "True"
    assert "serve" in run(python.with_name("octavo"), "--help").stdout


def test_wheel_without_a_compiler_says_so_and_runs(tmp_path):
    wheel, said = build_wheel(tmp_path, CC="/nonexistent/cc", CXX="/nonexistent/c++")
    assert "WARNING" in said and "without the CPU kernels" in said
    assert "octavo/ops/libkernels.so" not in zipfile.ZipFile(wheel).namelist()
    assert missing_modules(wheel) == set()

    python = install(wheel, tmp_path / "venv")
    code = (
        "import torch; from octavo.ops import cpu, rms_norm; x = torch.ones(2, 8)\n"
        "print(rms_norm.add_rms_norm(x, x, x[0], 1e-5)[1].sum().item(), cpu.status().reason)"
    )
    assert run(python, "-c", code).stdout.startswith("32.0 not built")
    assert "serve" in run(python.with_name("octavo"), "--help").stdout
