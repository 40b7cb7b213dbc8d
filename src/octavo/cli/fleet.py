"""`octavo fleet [MODEL ...]`: one endpoint in front of several engines. It is `octavo serve` with another task.

Owns: the command's settings; what a plan of `octavo simulate --search` sets; the checks of settings that contradict.
Does not: serve (serve does), start engines (fleet.front does), or route.
"""

from __future__ import annotations

import argparse
import re
from functools import partial
from pathlib import Path

from octavo.cli.flags import FLEET_HEADING, add_settings, resolve_args
from octavo.cli.serve import check_config, run_server
from octavo.config import Config
from octavo.config.sources import Resolved
from octavo.errors import ConfigError
from octavo.fleet.plan import read_fleet_plan
from octavo.fleet.security import parse_address
from octavo.observe.log import print_notice

_LEFT_OUT = ("join", "offer")  # octavo serve has them
_RAY_ADDRESS = re.compile(r"local|auto|(ray://)?[^\s:]+:\d+|\[[0-9a-fA-F:]+\]:\d+")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument("models", nargs="*", metavar="MODEL", help="what to serve, one or more [smollm2]")
    parser.add_argument("--quiet", "-q", action="store_true", help="print nothing at start-up and while busy")
    add_settings(parser, without=_LEFT_OUT, headings=("model", FLEET_HEADING))


def run(args: argparse.Namespace) -> int:
    """Serve until a signal; return 0 after a clean drain (docs/serving.md lists the other statuses)."""
    return run_server(partial(_config, args), is_quiet=args.quiet, is_fleet=True, words=args.models)


def _config(args: argparse.Namespace) -> Config:
    """Return the settings in force. Raises ConfigError, UsageError."""
    resolved = resolve_args(args, model=next(iter(args.models), None))
    if resolved.config.fleet.plan is not None:
        resolved = _with_plan(args, resolved, Path(resolved.config.fleet.plan))
    config = check_config(resolved)
    _check(config)
    return config


def _with_plan(args: argparse.Namespace, resolved: Resolved, path: Path) -> Resolved:
    """Return the settings with those of a plan, except where the user set another; say which. Raises ConfigError."""
    plan = read_fleet_plan(path)
    planned = {"model": plan.model, "replicas": plan.replicas, "router": plan.router, **plan.settings}
    taken = {name: value for name, value in planned.items() if resolved.origins[name] == "default"}
    given = {"model": next(iter(args.models), None)} | taken
    if not args.quiet:
        kept = ", ".join(name for name in planned if name not in taken)
        print_notice(f"plan      {path}: {', '.join(f'{name} {value}' for name, value in taken.items()) or 'nothing'}")
        if kept:
            print_notice(f"          not taken, because they are set: {kept}")
    return resolve_args(args, **given)


def _check(config: Config) -> None:
    """Raise ConfigError for settings that contradict, or that no fleet can have."""
    fleet = config.fleet
    if config.serving.in_process:
        raise ConfigError("--in-process is for one engine; leave it out, or use octavo serve")
    if config.adapters.is_enabled:
        raise ConfigError("adapters are for the one engine of octavo serve; leave out --enable-lora and --lora-modules")
    for flag, value in (("--standby-of", fleet.standby_of), ("--journal-address", fleet.journal_address)):
        if value is not None and config.retry.journal is None:
            raise ConfigError(f"{flag} needs --journal DIR, the folder of this front's journal")
        if value is not None:
            parse_address(value, flag)
    if config.retry.journal_sync == "standby" and fleet.journal_address is None:
        raise ConfigError("--journal-sync standby needs --journal-address HOST:PORT, where the standby connects")
    if fleet.ray is not None and not _RAY_ADDRESS.fullmatch(fleet.ray):
        raise ConfigError(f"--ray is {fleet.ray!r}; give HOST:PORT, or nothing for a local Ray (and MODEL before it)")
    if fleet.ray is not None and config.models.keep_alive_s >= 0:
        raise ConfigError("--keep-alive unloads models, and --ray keeps its replicas placed; give one of them")
    if fleet.replicas == 0 and fleet.hosts is None and fleet.fleet_address is None:
        raise ConfigError("--replicas is 0 and no engine can join; give --hosts FILE or --fleet-address HOST:PORT")
