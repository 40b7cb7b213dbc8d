"""What a check script needs: where the server is, and telling how each check went.

Owns: finding a script's `check_*` functions, running them in order, one JSON line for each on stdout.
Does not: import octavo or anything outside the standard library; it runs in an environment of its own.
A script names itself in CLIENT and what it needs in PACKAGES; `docs/clients.md` is made from the lines.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import inspect
import json
import os
import re
import sys
import time
import traceback
from typing import Any

URL = os.environ.get("CHECK_URL", "http://127.0.0.1:8000")  # without /v1
MODEL = os.environ.get("CHECK_MODEL", "smollm2")  # the served name
STATUSES = ("pass", "fail", "skip")


class Skip(Exception):  # noqa: N818 - raised as a word
    """Raised by a check that cannot run here; its text says why."""


def report(check: str, status: str, detail: str = "", *, count: int = 1, about: str = "", seconds: float = 0.0) -> None:
    """Print one line; for scripts that wrap a foreign suite, `count` may stand for several of its tests."""
    assert status in STATUSES, status
    script = sys.modules["__main__"]
    line = {
        "client": script.CLIENT,
        "check": check,
        "status": status,
        "detail": detail[:2000],
        "count": count,
        "about": about,
        "seconds": round(seconds, 2),
        "version": version_of(script.PACKAGES),
    }
    print(json.dumps(line), flush=True)


def version_of(packages: list[str]) -> str:
    """The version of the first package, as installed; "" where there is none."""
    name = re.split(r"[\[<>=!~ ]", packages[0])[0] if packages else ""
    try:
        return importlib.metadata.version(name) if name else getattr(sys.modules["__main__"], "VERSION", "")
    except importlib.metadata.PackageNotFoundError:
        return ""


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
