"""What a newcomer's machine may lack: torch, memory. Each is one line with the remedy, from a child process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.source_tree import SRC
from tests.tiny_models import make_tiny_model

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits addresses as Linux does")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model("smollm2", tmp_path_factory.mktemp("install") / "tiny"))


def _run(command: list[str], path: Path, runs: Path) -> subprocess.CompletedProcess[str]:
    """Run a command in a child process that imports from `path` first."""
    environ = {**os.environ, "PYTHONPATH": f"{path}{os.pathsep}{SRC}", "OCTAVO_RUN_DIR": str(runs)}
    return subprocess.run(command, capture_output=True, text=True, env=environ, timeout=100)


@pytest.fixture
def no_torch(tmp_path: Path) -> Path:
    """Return a folder that hides torch, as if it were not installed."""
    text = "raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n"
    (tmp_path / "torch.py").write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [
        ["run", "MODEL", "hi"],
        ["chat", "MODEL"],
        ["serve", "MODEL", "--port", "0"],
        ["serve", "MODEL", "--port", "0", "--in-process"],
        ["plan", "MODEL"],
        ["bench", "kernel"],
    ],
    ids=lambda words: " ".join(words),
)
def test_without_torch_a_command_says_what_to_install(words: list[str], model: str, no_torch: Path) -> None:
    command = [sys.executable, "-m", "octavo", *(model if word == "MODEL" else word for word in words)]
    done = _run(command, no_torch, no_torch)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: torch is not installed: pip install 'octavo[torch]'")
    assert done.stderr.count("\n") == 1


def test_without_torch_the_library_says_what_to_install(model: str, no_torch: Path) -> None:
    code = f"import octavo\ntry: octavo.LLM({model!r})\nexcept octavo.ConfigError as error: print(error)"
    done = _run([sys.executable, "-c", code], no_torch, no_torch)
    assert done.stdout.startswith("torch is not installed: pip install 'octavo[torch]'"), done.stderr


@linux
@pytest.mark.parametrize("words", [["run", "MODEL", "hi"], ["serve", "MODEL", "--port", "0"]], ids=["run", "serve"])
def test_too_little_memory_is_one_line(words: list[str], model: str, tmp_path: Path) -> None:
    words = [model if word == "MODEL" else word for word in words]
    line = 'ulimit -v 600000; exec "$0" -m octavo "$@"'
    done = _run(["sh", "-c", line, sys.executable, *words], tmp_path, tmp_path)
    assert done.returncode == 2, done.stderr
    assert "needs about 0.9 GiB of memory and a KV cache, and 0." in done.stderr
    assert done.stderr.endswith("GiB were free to this process; raise the limit (ulimit -v)\n")
    assert done.stderr.count("\n") == 1


@linux
def test_the_pool_fits_into_the_addresses_that_are_left(model: str, tmp_path: Path) -> None:
    line = 'ulimit -v 1500000; exec "$0" -m octavo run "$1" hi -q -n 2 --threads 1'
    done = _run(["sh", "-c", line, sys.executable, model], tmp_path, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
