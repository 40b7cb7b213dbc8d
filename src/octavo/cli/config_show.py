"""`octavo config show`: the settings in force, and with --origin the source of each.

Also prints the sampling defaults, which requests may override: the model's generation config, if it has one.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator

from octavo.artifacts.read_spec import read_model_spec
from octavo.artifacts.resolve import resolve_model
from octavo.cli.flags import add_settings, resolve_args
from octavo.config import SETTINGS, Setting
from octavo.config.sources import Resolved
from octavo.core.request import MODEL_FIELDS, SamplingParams, sampling_defaults


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument("--origin", action="store_true", help="say where each value comes from")
    parser.add_argument("--sampling", action="store_true", help="also the sampling defaults of the model's requests")
    parser.add_argument("--changed", action="store_true", help="only settings that are not at their default")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_settings(parser)


def run(args: argparse.Namespace) -> int:
    """Print the settings."""
    resolved = resolve_args(args)
    is_given = {s.name: resolved.origins[s.name] != "default" for s in SETTINGS}
    shown = [s for s in SETTINGS if is_given[s.name] or not args.changed]
    rows = [(s.key, _value(s, resolved), resolved.origins[s.name]) for s in shown]
    if args.sampling:
        rows += [row for row in _sampling(resolved) if not args.changed or row[2] != "default"]
    if args.json:
        print(json.dumps({name: {"value": value, "origin": origin} for name, value, origin in rows}))
        return 0
    width = max((len(name) for name, _, _ in rows), default=0)
    lines = [(f"{name:{width}}  {json.dumps(value)}", origin) for name, value, origin in rows]
    column = max((len(line) for line, _ in lines), default=0)
    for line, origin in lines:
        print(f"{line:{column}}  # {origin}" if args.origin else line)
    return 0


def _sampling(resolved: Resolved) -> Iterator[tuple[str, object, str]]:
    """Yield requests' sampling defaults with their origins. Finds the model's files and reads the headers."""
    model = resolved.config.model
    own = sampling_defaults(read_model_spec(resolve_model(model.model, model.revision)).generation)
    for name in MODEL_FIELDS:
        origin = f"generation config of {model.model}" if name in own else "default"
        yield f"sampling.{name}", own.get(name, getattr(SamplingParams(), name)), origin


def _value(setting: Setting, resolved: Resolved) -> object:
    value = resolved.value(setting)
    if setting.is_secret and value:
        return ["***" for _ in value] if isinstance(value, tuple) else "***"
    return list(value) if isinstance(value, tuple) else value
