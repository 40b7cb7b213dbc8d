"""Freeze what is reached by name: `python -m tests.freeze.surface --write | --check`.

Owns: flags, variables, keys of files, exit codes, routes, error codes, entry points, public names and their attributes.
Metric names and types are in the pairs (`/metrics`), fields of bodies too (`/openapi.json`). Prose is not frozen.
"""

from __future__ import annotations

import argparse
import contextlib
import enum
import inspect
import io
import json
import sys
import tomllib
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import octavo
from octavo import cli, plugins
from octavo.cli.flags import Parser
from octavo.config import SETTINGS
from octavo.config.setting import PREFIX
from octavo.server.http.endpoints import find_endpoints
from octavo.server.http.errors import CODES
from tests.freeze.pairs import places

FILE = Path(__file__).with_name("surface.json")
ROOT = Path(__file__).resolve().parents[2]

# Differences that were decided on: the place -> the reason.
_TYPED = "an end carries a typed error; message is its text"
DECIDED: dict[str, str] = {
    ".octavo.TextDelta.init[7]": _TYPED,
    ".octavo.TextDelta.fields[7]": _TYPED,
    ".octavo.TextDelta.message": _TYPED,
    ".octavo.TextDelta.error": _TYPED,
    ".commands.admin.verb[2]": "verbs of fleets",
    ".settings.journal_sync.choices": "standby is added",
    ".settings.speculate.choices": "a draft model's name or path is a value too",
    ".settings.decoder.choices": "transformers is added",
    ".settings.kv_cache_dtype.choices": "int8 and fp8 are added",
    ".octavo.SamplingParams.fields": "rare samplers are added",
    ".octavo.SamplingParams.init": "rare samplers are added",
    ".octavo.Config.init": "sections, which are given by name, are added",
    ".octavo.Config.fields": "sections, which are given by name, are added",
    ".octavo.Request.init": "session is added as the last field",
    ".octavo.Request.fields": "session is added as the last field",
}
# Of the scheduler's own state only what policies read is public.
READ_BY_POLICIES = {
    "RequestState": ("is_decoding", "lane", "num_preemptions", "order", "request", "seen", "sequences", "status"),
}

# What is run, and what it must end with, whatever it says: the statuses of servers and signals are in the pairs.
COMMANDS = (
    "", "--help", "--version", "help", "help port", "nosuch", "start", "bench", "bench --help", "bench nosuch",
    "serve --help", "serve --help-all", "serve --nosuch", "serve --port x", "serve --port", "serve a b",
    "serve scripted:/nowhere.json", "serve --config /nowhere.yaml", "run --help", "run -m /nowhere hello",
    "config show", "config show --nosuch", "completions bash", "completions nosuch", "admin status --server 1",
    "admin nosuch", "stop --server 1", "explain x --server 1", "ps", "replay /nowhere", "trace /nowhere",
    "batch /nowhere.jsonl", "generate /nowhere.txt", "plan /nowhere", "rm nosuch-model", "list", "simulate --nosuch",
)  # fmt: skip


def surface() -> dict[str, Any]:
    """All that is frozen."""
    found = {
        "commands": {name: _flags(name) for name in sorted(cli.COMMANDS)},
        "renamed commands": cli.RENAMED_COMMANDS,
        "settings": {setting.name: _setting(setting) for setting in SETTINGS},
        "variables": sorted(
            {*(s.variables[0] for s in SETTINGS), *(PREFIX + n for n in ("CONFIG", "RUN_DIR", "CACHE_DIR"))}
        ),
        "exit codes": {words: _exit_code(words.split()) for words in COMMANDS},
        "routes": sorted(f"{path}: {access.name}" for path, access in find_endpoints().access.items()),
        "error codes": {
            code: [list(row.statuses), row.raised and row.raised.__name__] for code, row in sorted(CODES.items())
        },
        "entry points": _entry_points(),
        "octavo": {name: _public(getattr(octavo, name)) for name in sorted(octavo.__all__)},
        "errors": {
            name: [base.__name__ for base in kind.__mro__[1:-1]]
            for name, kind in sorted(vars(octavo.errors).items())
            if isinstance(kind, type) and issubclass(kind, Exception) and not name.startswith("_")
        },
    }
    plain: dict[str, Any] = json.loads(json.dumps(found))
    return plain


def _flags(command: str) -> dict[str, Any]:
    parser = Parser(prog="octavo")
    cli.load_command(command, parser)
    found = {}
    for action in parser._actions:
        name = ", ".join(action.option_strings) or action.dest
        kind = type(action).__name__.strip("_")
        choices = None if action.choices is None else sorted(map(str, action.choices))
        found[name] = [kind, action.nargs, choices, action.required]
    return dict(sorted(found.items()))


def _setting(setting: Any) -> dict[str, Any]:
    return {
        "part": setting.section,
        "kind": setting.kind.__name__,
        "optional": setting.is_optional,
        "default": setting.default,
        "flags": setting.flags,
        "keys": setting.keys,
        "variable": setting.variables[0],
        "choices": setting.choices,
        "within": setting.within,
        "secret": setting.is_secret,
    }


def _exit_code(words: list[str]) -> int | str:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            return cli.main(words)
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else str(end.code)


def _entry_points() -> dict[str, Any]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {"scripts": project["scripts"], "own groups": project.get("entry-points", {}), "plug-ins": plugins.GROUP}


def _public(value: Any) -> Any:
    if not isinstance(value, type):
        return _parameters(value)
    found: dict[str, Any] = {"init": _parameters(value)}
    if issubclass(value, enum.Enum):
        return {"members": {member.name: str(member.value) for member in value}}
    if is_dataclass(value):
        found["fields"] = [each.name for each in fields(value) if not each.name.startswith("_")]
    if value.__name__ in READ_BY_POLICIES:
        return {name: hasattr(value, name) for name in READ_BY_POLICIES[value.__name__]}
    for name in sorted(dir(value)):
        if name.startswith("_") or name in dir(Exception):
            continue
        item = inspect.getattr_static(value, name)
        if isinstance(item, property):
            found[name] = "property"
        elif callable(getattr(value, name)):
            found[name] = _parameters(getattr(value, name))
        else:
            found[name] = "attribute"
    return found


def _parameters(value: Any) -> list[str]:
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return []
    marks = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    kept = [each for each in parameters if not each.name.startswith("_")]
    return [marks.get(each.kind, "") + each.name + ("" if each.default is each.empty else "=") for each in kept]


def differences(frozen: Any, found: Any) -> list[str]:
    """One line for each place where they differ. What is new is no difference, except an exit code."""
    told = [line for line in places(_as_sets(frozen), _as_sets(found)) if line.split(" was ")[0] not in DECIDED]
    return [line for line in told if line.startswith(".exit codes.") or ' was "(absent)"' not in line]


def _as_sets(found: Any) -> Any:
    """Variables and routes by name, so that a new one moves no other."""
    return found | {part: dict.fromkeys(found[part], True) for part in ("variables", "routes")}


def write_surface(found: dict[str, Any]) -> None:
    """Freeze this, one thing a line."""
    parts = []
    for part, items in found.items():
        named = items.items() if isinstance(items, dict) else enumerate(items)
        lines = [(f"{json.dumps(k)}: " if isinstance(items, dict) else "") + json.dumps(v) for k, v in named]
        opening, closing = "{}" if isinstance(items, dict) else "[]"
        parts.append(f"{json.dumps(part)}: {opening}\n" + ",\n".join(lines) + f"\n{closing}")
    FILE.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def read_surface() -> Any:
    """The surface that is frozen."""
    return json.loads(FILE.read_text())


def main() -> int:
    """Write or check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="freeze this tree's surface")
    parser.add_argument("--check", action="store_true", help="compare this tree's surface with the frozen one")
    args = parser.parse_args()
    if args.write:
        write_surface(surface())
        return 0
    told = differences(read_surface(), surface())
    print("\n".join(told) or "no differences")
    return 1 if told else 0


if __name__ == "__main__":
    sys.exit(main())
