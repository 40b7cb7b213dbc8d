"""Prove the server with the clients that people have: `make clients`, or `python tools/clients/runner.py openai llm`.

Owns: an environment of their own with the clients' packages (.venv-clients), servers for the scripts, counting, and
the page docs/clients.md, written when all scripts ran. Does not: know any client; a script `check_*.py` beside this
file does (see checking).
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import datetime
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
PAGE = ROOT / "docs" / "clients.md"
ENVIRONMENT = ROOT / ".venv-clients"
DEFAULT_SERVER = ("--model", "smollm2")
READY_S = 120.0
SCRIPT_S = 1800.0
INSTALL_S = 300.0


@dataclass(frozen=True)
class Script:
    """A check script as its text declares it; it is not imported."""

    path: Path
    client: str
    packages: tuple[str, ...]
    server: tuple[str, ...]
    is_fast: bool
    about: str

    @classmethod
    def read(cls, path: Path) -> Script:
        """Read the literals at its top. Raises ValueError for one that is missing."""
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found: dict[str, Any] = {}
        for node in tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                with contextlib.suppress(ValueError):
                    found[node.targets[0].id] = ast.literal_eval(node.value)
        if "CLIENT" not in found or "PACKAGES" not in found:
            raise ValueError(f"{path.name}: CLIENT and PACKAGES must be literals at the top")
        about = (ast.get_docstring(tree) or "").partition("\n")[0]
        server = tuple(found.get("SERVER", DEFAULT_SERVER))
        return cls(path, found["CLIENT"], tuple(found["PACKAGES"]), server, found.get("FAST", False), about)


@dataclass
class Outcome:
    """What one script told."""

    script: Script
    lines: list[dict[str, Any]] = field(default_factory=list)
    trouble: str = ""  # why the script itself ended badly

    def count(self, status: str) -> int:
        """Checks with this status; a script that ended badly is one failure more."""
        told = sum(line["count"] for line in self.lines if line["status"] == status)
        return told + (status == "fail" and bool(self.trouble))

    @property
    def version(self) -> str:
        """The client's, as its script saw it."""
        return str(next((line["version"] for line in self.lines if line["version"]), ""))


def scripts() -> list[Script]:
    """All check scripts, by name."""
    return [Script.read(path) for path in sorted(FOLDER.glob("check_*.py"))]


def prepare(chosen: Sequence[Script]) -> tuple[Path, dict[Path, str]]:
    """Give the Python of the clients' environment, and why some scripts' packages are not in it, by script.

    Each script's packages are installed by themselves: one that cannot be had does not keep the others away.
    """
    python = ENVIRONMENT / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(ENVIRONMENT)], check=True)
    trouble = {}
    for script in chosen:
        missing = [package for package in script.packages if not _has(python, package)]
        if missing:
            command = [str(python), "-m", "pip", "install", "--quiet", *missing]
            try:
                subprocess.run(command, check=True, timeout=INSTALL_S)
            except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
                trouble[script.path] = f"its packages were not installed ({type(error).__name__})"
    return python, trouble


def _has(python: Path, package: str) -> bool:
    """Whether the environment has a distribution of this name; versions were chosen when it was installed."""
    name = re.split(r"[\[<>=!~ ]", package)[0]
    code = f"import importlib.metadata as m; m.version({name!r})"
    return subprocess.run([str(python), "-c", code], capture_output=True, check=False).returncode == 0


@contextlib.contextmanager
def serving(flags: Sequence[str]) -> Iterator[tuple[str, str]]:
    """A server with these flags on a free port, ended afterwards: (its URL, its model's name)."""
    command = [sys.executable, "-m", "octavo", "serve", "--port", "0", *flags]
    with tempfile.NamedTemporaryFile(prefix="octavo-clients-", suffix=".log") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=FOLDER)
        try:
            yield _wait(process, Path(log.name))
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def _wait(process: subprocess.Popen[bytes], log: Path) -> tuple[str, str]:
    end = time.monotonic() + READY_S
    while True:
        text = log.read_text(errors="replace")
        said = re.search(r"^try .*?(http://[^/\s]+)/", text, re.MULTILINE)
        if said is not None:
            return said[1], _served_name(said[1])
        if process.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"the server did not start:\n{text[-3000:]}")
        time.sleep(0.1)


def _served_name(url: str) -> str:
    with urllib.request.urlopen(url + "/v1/models", timeout=10) as answer:
        return str(json.load(answer)["data"][0]["id"])


def run_script(script: Script, python: Path, server: tuple[str, str], checks: Sequence[str] = ()) -> Outcome:
    """Run one script against a server; its other output goes to stderr."""
    environ = os.environ | {"CHECK_URL": server[0], "CHECK_MODEL": server[1], "PYTHONUNBUFFERED": "1"}
    outcome = Outcome(script)
    command = [str(python), str(script.path), *checks]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, env=environ, cwd=FOLDER, timeout=SCRIPT_S, check=False
    )
    for line in done.stdout.splitlines():
        try:
            told = json.loads(line)
            outcome.lines.append(told if told["status"] and told["check"] else {})
        except (ValueError, KeyError, TypeError):
            print(line, file=sys.stderr)
    if not outcome.lines:
        outcome.trouble = f"told nothing, and ended with status {done.returncode}"
    elif done.returncode != 0 and not outcome.count("fail"):
        outcome.trouble = f"ended with status {done.returncode}"
    return outcome


def run_all(chosen: Sequence[Script]) -> list[Outcome]:
    """Run scripts, those that want the same server one after another on one."""
    python, trouble = prepare(chosen)
    outcomes = {
        path: Outcome(script, [], trouble[script.path]) for script in chosen if (path := script.path) in trouble
    }
    for script in (script for script in chosen if script.path in trouble):
        print(f"{script.client}: {trouble[script.path]}", flush=True)
    able = [script for script in chosen if script.path not in trouble]
    for flags in dict.fromkeys(script.server for script in able):
        with serving(flags) as server:
            for script in (script for script in able if script.server == flags):
                outcomes[script.path] = outcome = run_script(script, python, server)
                for line in outcome.lines:
                    note = f"  {line['detail']}" if line["detail"] else ""
                    print(f"{script.client}: {line['check']}: {line['status']}{note}", flush=True)
                if outcome.trouble:
                    print(f"{script.client}: {outcome.trouble}", flush=True)
    return [outcomes[script.path] for script in chosen]


def page(outcomes: Sequence[Outcome], when: str) -> str:
    """docs/clients.md."""
    rows = []
    for outcome in outcomes:
        passed, failed, skipped = (outcome.count(status) for status in ("pass", "fail", "skip"))
        script = outcome.script
        rows.append(f"| {script.client} | {outcome.version} | {passed} | {failed} | {skipped} | {script.about} |")
    totals = [sum(outcome.count(status) for outcome in outcomes) for status in ("pass", "fail", "skip")]
    parts = [
        "# Clients\n",
        "People's own clients against a running server. `make clients` installs them into an environment of their own,",
        "runs the scripts in `tools/clients/` and writes this page; do not edit it. The quick part, with what the",
        "test extra has, also runs in `make test`.\n",
        f"{when}: {totals[0]} passed, {totals[1]} failed, {totals[2]} skipped.\n",
        "| client | version | passed | failed | skipped | what |",
        "|---|---|---|---|---|---|",
        *rows,
    ]
    for outcome in outcomes:
        parts += [f"\n## {outcome.script.client}", *_listed(outcome)]
    return "\n".join(parts) + "\n"


def _listed(outcome: Outcome) -> Iterator[str]:
    """The checks of one client, and why those failed or were skipped that were."""
    if len(outcome.script.server) and outcome.script.server != DEFAULT_SERVER:
        yield f"Server: `octavo serve {' '.join(outcome.script.server)}`\n"
    for line in outcome.lines:
        times = f" ({line['count']})" if line["count"] > 1 else ""
        words = f": {line['about']}" if line["about"] else ""
        why = f" - {_plain(line['detail'])}" if line["detail"] else ""
        yield f"- {line['status']}{times} `{line['check']}`{words}{why}"
    if outcome.trouble:
        yield f"- fail: the script {outcome.trouble}"


def _plain(text: str) -> str:
    """One line without marks of its own, and without an address that is only this run's."""
    flat = re.sub(r"http://127\.0\.0\.1:\d+", "the server", " ".join(text.split()))
    return flat.replace("|", "\\|").replace("`", "'").replace("<", "&lt;")[:300]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all scripts and write the page, or the named ones and write nothing; 1 when a check failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("clients", nargs="*", help="names of scripts without check_; default: all, and the page")
    args = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # servers are ended on the way out
    everything = scripts()
    names = {script.path.stem.removeprefix("check_"): script for script in everything}
    unknown = [name for name in args.clients if name not in names]
    if unknown:
        parser.error(f"no script check_{unknown[0]}.py; there are {', '.join(names)}")
    chosen = [names[name] for name in args.clients] or everything
    outcomes = run_all(chosen)
    if not args.clients:
        when = f"{datetime.date.today().isoformat()}, Python {platform.python_version()}, {platform.machine()}"
        PAGE.write_text(page(outcomes, when), encoding="utf-8")
    failed = sum(outcome.count("fail") for outcome in outcomes)
    print(f"{sum(outcome.count('pass') for outcome in outcomes)} passed, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
