"""Prove the server with the clients that people have: `make clients`, or `python tools/clients/runner.py openai llm`.

Owns: environments with the clients' packages (.venv-clients, and folders in it for npm packages and for packages whose
pins collide with the others'), servers for the scripts, counting, results.md and the table in docs/clients.md, written
when all scripts ran. Does not: know any client; a script `check_*.py` beside this file does (see checking).
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
import shutil
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
PAGE = ROOT / "docs" / "clients.md"  # has the tables, between these two lines
BEGIN, END = "<!-- checks: make clients -->", "<!-- end of checks -->"
RESULTS = FOLDER / "results.md"  # has every check
ENVIRONMENT = ROOT / ".venv-clients"
DEFAULT_SERVER = ("--model", "smollm2")
READY_S = 120.0
SCRIPT_S = 1800.0
STATUSES = ("pass", "fail", "skip")
INSTALL_S = 900.0


@dataclass(frozen=True)
class Script:
    """A check script as its text declares it; it is not imported."""

    path: Path
    client: str
    packages: tuple[str, ...]
    server: tuple[str, ...]
    is_fast: bool
    about: str
    node_packages: tuple[str, ...] = ()
    environment: str = ""  # the name of a Python environment of its own; "": the shared one
    is_fuzz: bool = False  # its checks are generated requests, which the page counts apart

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
        return cls(
            path,
            found["CLIENT"],
            tuple(found["PACKAGES"]),
            server,
            found.get("FAST", False),
            about,
            tuple(found.get("NODE_PACKAGES", ())),
            found.get("ENVIRONMENT", ""),
            found.get("FUZZ", False),
        )

    @property
    def home(self) -> Path:
        """The Python environment that its packages are installed in."""
        return ENVIRONMENT / "environments" / self.environment if self.environment else ENVIRONMENT

    @property
    def python(self) -> Path:
        """The Python of that environment."""
        return self.home / "bin" / "python"

    @property
    def node_home(self) -> Path:
        """The folder that its npm packages are installed in, each script's apart: their peers collide."""
        return ENVIRONMENT / "node" / self.path.stem.removeprefix("check_")


@dataclass
class Outcome:
    """What one script reported."""

    script: Script
    lines: list[dict[str, Any]] = field(default_factory=list)
    trouble: str = ""  # why the script itself ended badly

    def count(self, status: str) -> int:
        """Checks with this status; a script that ended badly is one failure more."""
        total = sum(line["count"] for line in self.lines if line["status"] == status)
        return total + (status == "fail" and bool(self.trouble))

    @property
    def version(self) -> str:
        """The client's, as its script saw it."""
        return str(next((line["version"] for line in self.lines if line["version"]), ""))


def scripts() -> list[Script]:
    """All check scripts, by name."""
    return [Script.read(path) for path in sorted(FOLDER.glob("check_*.py"))]


def prepare(chosen: Sequence[Script]) -> dict[Path, tuple[str, str]]:
    """Install what the scripts need; return (status, reason) for each script that cannot run, by path.

    Each script's packages are installed by themselves: one that cannot be had does not keep the others away.
    """
    trouble = {}
    for script in chosen:
        if script.node_packages and not shutil.which("npm"):
            trouble[script.path] = ("skip", "npm is not installed here")
            continue
        try:
            _install(script)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            trouble[script.path] = ("fail", f"its packages were not installed ({type(error).__name__})")
    return trouble


def _install(script: Script) -> None:
    """Install the packages of one script that are missing. Raises what subprocess.run does."""
    python = script.python
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(script.home)], check=True)
    missing = [package for package in script.packages if not _has(python, package)]
    if missing:
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *missing], check=True, timeout=INSTALL_S)
    home = script.node_home
    if any(not (home / "node_modules" / package).exists() for package in script.node_packages):
        home.mkdir(parents=True, exist_ok=True)
        (home / "package.json").write_text('{"private": true}')  # without one npm installs into a parent folder
        command = ["npm", "install", "--silent", "--no-fund", "--no-audit", *script.node_packages]
        subprocess.run(command, cwd=home, check=True, timeout=INSTALL_S)


def _has(python: Path, package: str) -> bool:
    """Return True if the environment has a distribution of this name; its version was chosen at installation."""
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
        match = re.search(r"^try .*?(http://[^/\s]+)/", text, re.MULTILINE)
        if match is not None:
            return match[1], _served_name(match[1])
        if process.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"the server did not start:\n{text[-3000:]}")
        time.sleep(0.1)


def _served_name(url: str) -> str:
    with urllib.request.urlopen(url + "/v1/models", timeout=10) as answer:
        return str(json.load(answer)["data"][0]["id"])


def run_script(script: Script, python: Path, server: tuple[str, str], checks: Sequence[str] = ()) -> Outcome:
    """Run one script against a server; its other output is printed to stderr."""
    environ = os.environ | {"CHECK_URL": server[0], "CHECK_MODEL": server[1], "PYTHONUNBUFFERED": "1"}
    environ |= {"CHECK_NODE": str(script.node_home)}
    outcome = Outcome(script)
    command = [str(python), str(script.path), *checks]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, env=environ, cwd=FOLDER, timeout=SCRIPT_S, check=False
    )
    for line in done.stdout.splitlines():
        try:
            check = json.loads(line)
            outcome.lines.append(check if check["status"] and check["check"] else {})
        except (ValueError, KeyError, TypeError):
            print(line, file=sys.stderr)
    if not outcome.lines:
        outcome.trouble = f"reported nothing, and ended with status {done.returncode}"
    elif done.returncode != 0 and not outcome.count("fail"):
        outcome.trouble = f"ended with status {done.returncode}"
    return outcome


def run_all(chosen: Sequence[Script]) -> list[Outcome]:
    """Run scripts, those that want the same server one after another on one."""
    trouble = prepare(chosen)
    outcomes = {script.path: _not_run(script, *trouble[script.path]) for script in chosen if script.path in trouble}
    for path, (status, reason) in trouble.items():
        print(f"{outcomes[path].script.client}: {status}: {reason}", flush=True)
    able = [script for script in chosen if script.path not in trouble]
    for flags in dict.fromkeys(script.server for script in able):
        with serving(flags) as server:
            for script in (script for script in able if script.server == flags):
                outcomes[script.path] = outcome = run_script(script, script.python, server)
                for line in outcome.lines:
                    note = f"  {line['detail']}" if line["detail"] else ""
                    print(f"{script.client}: {line['check']}: {line['status']}{note}", flush=True)
                if outcome.trouble:
                    print(f"{script.client}: {outcome.trouble}", flush=True)
    return [outcomes[script.path] for script in chosen]


def _not_run(script: Script, status: str, reason: str) -> Outcome:
    line = {"check": "all", "status": status, "detail": reason, "count": 1, "about": "", "version": "", "packages": {}}
    return Outcome(script, [line])


def page(outcomes: Sequence[Outcome], when: str) -> str:
    """Return results.md: the tables, then every check of each client."""
    parts = [
        "# Checks of clients\n",
        "`make clients` installs other projects' clients into their own environments, runs the scripts in this folder",
        "against a server, and writes this page. [docs/clients.md](../../docs/clients.md) has the tables too.\n",
        tables(outcomes, when),
    ]
    for outcome in sorted(outcomes, key=lambda outcome: outcome.script.is_fuzz):
        parts += [f"## {outcome.script.client}", *_listed(outcome), ""]
    return "\n".join(parts)


def tables(outcomes: Sequence[Outcome], when: str) -> str:
    """Return the tables of checks and of generated requests, which are counted apart."""
    checked = [outcome for outcome in outcomes if not outcome.script.is_fuzz]
    fuzzed = [outcome for outcome in outcomes if outcome.script.is_fuzz]
    passed, failed, skipped = _totals(checked)
    parts = [
        f"{when}: {passed} checks passed, {failed} failed, {skipped} skipped.\n",
        "| client | version | passed | failed | skipped | what |",
        "|---|---|---|---|---|---|",
        *map(_row, checked),
        "",
    ]
    if fuzzed:
        passed, failed, _ = _totals(fuzzed)
        parts += [
            "### Fuzzed requests\n",
            f"{passed} generated requests passed and {failed} operations failed, apart from the checks.",
            "A request passes if the answer's status is below 500, or is 501 or 503 with an error `code` in the body.",
            "This does not mean that the answer was right: most requests have faults on purpose and get 400.\n",
            "| client | version | requests passed | operations failed | skipped | what |",
            "|---|---|---|---|---|---|",
            *map(_row, fuzzed),
            "",
        ]
    return "\n".join(parts)


def with_tables(text: str, new: str) -> str:
    """Return docs/clients.md with other tables. Raises ValueError where the two lines around them are not there."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE.name} lacks the lines {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{new}{END}{after}"


def _totals(outcomes: Sequence[Outcome]) -> list[int]:
    return [sum(outcome.count(status) for outcome in outcomes) for status in STATUSES]


def _row(outcome: Outcome) -> str:
    script = outcome.script
    counts = " | ".join(str(outcome.count(status)) for status in STATUSES)
    return f"| {script.client} | {outcome.version} | {counts} | {script.about} |"


def _listed(outcome: Outcome) -> Iterator[str]:
    """Yield the server and packages of one client, and its checks with the reason where one failed or was skipped."""
    if outcome.script.server and outcome.script.server != DEFAULT_SERVER:
        yield f"Server: `octavo serve {' '.join(outcome.script.server)}`\n"
    packages = next((line["packages"] for line in outcome.lines if line["packages"]), {})
    if len(packages) > 1:
        yield f"Packages: {', '.join(f'{name} {version}' for name, version in packages.items())}\n"
    for line in outcome.lines:
        times = f" ({line['count']})" if line["count"] > 1 else ""
        words = f": {line['about']}" if line["about"] else ""
        why = f" - {_plain(line['detail'])}" if line["detail"] else ""
        yield f"- {line['status']}{times} `{line['check']}`{words}{why}"
    if outcome.trouble:
        yield f"- fail: the script {outcome.trouble}"


def _plain(text: str) -> str:
    """Return one line without marks of its own, and without addresses and paths that are only this run's."""
    flat = re.sub(r"http://127\.0\.0\.1:\d+", "the server", " ".join(text.split())).replace(f"{ROOT}/", "")
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
        system = f"Python {platform.python_version()}, {platform.machine()}"
        when = f"{datetime.date.today().isoformat()}, {_commit()}{system}"
        RESULTS.write_text(page(outcomes, when), encoding="utf-8")
        PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8"), tables(outcomes, when)), encoding="utf-8")
    passed, failed, skipped = _totals([outcome for outcome in outcomes if not outcome.script.is_fuzz])
    fuzz_passed, fuzz_failed, _ = _totals([outcome for outcome in outcomes if outcome.script.is_fuzz])
    print(f"checks: {passed} passed, {failed} failed, {skipped} skipped")
    if fuzz_passed + fuzz_failed:
        print(f"fuzzed requests: {fuzz_passed} answered without a 5xx status, {fuzz_failed} operations failed")
    return int(failed + fuzz_failed > 0)


def _commit() -> str:
    """Return "commit abc1234, " where this is a checkout that has git, else ""."""
    git = shutil.which("git")
    if git is None:
        return ""
    done = subprocess.run([git, "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return f"commit {done.stdout.strip()}, " if done.returncode == 0 else ""


if __name__ == "__main__":
    sys.exit(main())
