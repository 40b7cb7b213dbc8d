"""`octavo config show`: the settings in force, and with --origin where each comes from."""

from __future__ import annotations

import argparse
import json

from octavo.cli.flags import add_settings, resolve_args
from octavo.settings import SETTINGS, Resolved, Setting


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument("--origin", action="store_true", help="say where each value comes from")
    parser.add_argument("--changed", action="store_true", help="only settings that are not at their default")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_settings(parser)


def run(args: argparse.Namespace) -> int:
    """Print them."""
    resolved = resolve_args(args)
    shown = [s for s in SETTINGS if not args.changed or resolved.origins[s.name] != "default"]
    if args.json:
        print(json.dumps({s.key: {"value": _value(s, resolved), "origin": resolved.origins[s.name]} for s in shown}))
        return 0
    width = max((len(s.key) for s in shown), default=0)
    lines = [(f"{s.key:{width}}  {json.dumps(_value(s, resolved))}", resolved.origins[s.name]) for s in shown]
    column = max((len(line) for line, _ in lines), default=0)
    for line, origin in lines:
        print(f"{line:{column}}  # {origin}" if args.origin else line)
    return 0


def _value(setting: Setting, resolved: Resolved) -> object:
    value = resolved.value(setting)
    if setting.is_secret and value:
        return ["***" for _ in value]
    return list(value) if isinstance(value, tuple) else value
