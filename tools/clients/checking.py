"""What a check script needs: where the server is, and telling how each check went.

Owns: finding a script's `check_*` functions, running them in order, one JSON line for each on stdout; running a
program in Node, whose lines (see checking.mjs) are passed on. Does not: import octavo or anything outside the standard
library; it runs in an environment of its own. A script names itself in CLIENT and what it needs in PACKAGES and
NODE_PACKAGES (npm); `docs/clients.md` is made from the lines.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

URL = os.environ.get("CHECK_URL", "http://127.0.0.1:8000")  # without /v1
MODEL = os.environ.get("CHECK_MODEL", "smollm2")  # the served name
NODE = Path(os.environ.get("CHECK_NODE", "."))  # where this script's npm packages are
STATUSES = ("pass", "fail", "skip")
NODE_TIMEOUT_S = 600.0


class Skip(Exception):  # noqa: N818 - raised as a word
    """Raised by a check that cannot run here; its text says why."""


def report(check: str, status: str, detail: str = "", *, count: int = 1, about: str = "", seconds: float = 0.0) -> None:
    """Print one line; for scripts that wrap a foreign suite, `count` may stand for several of its tests."""
    assert status in STATUSES, status
    script = sys.modules["__main__"]
    packages = versions()
    line = {
        "client": script.CLIENT,
        "check": check,
        "status": status,
        "detail": detail[:2000],
        "count": count,
        "about": about,
        "seconds": round(seconds, 2),
        "version": next(iter(packages.values()), getattr(script, "VERSION", "")),
        "packages": packages,
    }
    print(json.dumps(line), flush=True)


def versions() -> dict[str, str]:
    """Return the installed version of each package that the script names; those not installed are left out."""
    script = sys.modules["__main__"]
    found = {}
    for package in script.PACKAGES:
        name = re.split(r"[\[<>=!~ ]", package)[0]
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    for name in getattr(script, "NODE_PACKAGES", ()):
        with contextlib.suppress(OSError):
            found[name] = json.loads((NODE / "node_modules" / name / "package.json").read_text())["version"]
    return found


def run_node(program: Path) -> int:
    """Run a program of checks in Node beside the script's npm packages; 1 when a check failed."""
    for path in (program, program.with_name("checking.mjs")):
        shutil.copy(path, NODE / path.name)  # imports are resolved from where the file is
    command = ["node", program.name, *sys.argv[1:]]
    environ = os.environ | {"CHECK_URL": URL, "CHECK_MODEL": MODEL}
    done = subprocess.run(
        command, cwd=NODE, env=environ, stdout=subprocess.PIPE, text=True, timeout=NODE_TIMEOUT_S, check=False
    )
    for line in done.stdout.splitlines():
        try:
            check = json.loads(line)
        except ValueError:  # what the packages print themselves
            print(line, file=sys.stderr)
            continue
        report(check["check"], check["status"], check["detail"], about=check["about"], seconds=check["seconds"])
    return done.returncode


def run(module_name: str) -> int:
    """Run every `check_*` of a module in order, or those named on the command line; 1 when one failed."""
    module = sys.modules[module_name]
    wanted = set(sys.argv[1:])
    num_failed = 0
    for name, check in list(vars(module).items()):
        short = name.removeprefix("check_")
        if short == name or not inspect.isfunction(check) or (wanted and short not in wanted):
            continue
        begun = time.perf_counter()
        status, detail = _outcome(check)
        num_failed += status == "fail"
        about = (inspect.getdoc(check) or "").partition("\n")[0]
        report(short, status, detail, about=about, seconds=time.perf_counter() - begun)
    return int(num_failed > 0)


def _outcome(check: Any) -> tuple[str, str]:
    try:
        result = check()
        if inspect.iscoroutine(result):
            asyncio.run(result)
    except Skip as why:
        return "skip", str(why)
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        traceback.print_exc()
        return "fail", f"{type(error).__name__}: {str(error)[:500] or place.line} ({place.name}:{place.lineno})"
    return "pass", ""
