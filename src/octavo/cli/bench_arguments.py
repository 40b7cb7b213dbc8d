"""Arguments and bars that several `octavo bench` commands share.

Owns: the workload's arguments, least values, the bar of tokens. Does not: measure.
"""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from octavo.cli.flags import UsageError


def add_workload(parser: argparse.ArgumentParser) -> Any:
    """Add the workload's arguments; return their group, so that a caller can add more."""
    group = parser.add_argument_group("workload")
    group.add_argument(
        "--workload", metavar="FILE", help="JSON list of {prompt_token_ids, max_tokens}, or of such lists"
    )
    group.add_argument(
        "--num-prompts", type=int, default=64, metavar="N", help="random prompts, without --workload [64]"
    )
    group.add_argument("--input-len", type=int, default=128, metavar="N", help="tokens of each random prompt [128]")
    group.add_argument("--output-len", type=int, default=128, metavar="N", help="tokens produced for each [128]")
    return group


def check_at_least(args: argparse.Namespace, least: int, *names: str) -> None:
    """Raise UsageError for a number, or any of a list of numbers, below `least`."""
    for name in names:
        given = getattr(args, name)
        smallest = min(given) if isinstance(given, (list, tuple)) else given
        if smallest < least:
            raise UsageError(f"--{name.replace('_', '-')} is {smallest}; give at least {least}")


def token_progress(unit: str = "tokens") -> Progress:
    """Return a progress bar on stderr that counts up to a total; shown on a terminal only."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:,} of {task.total:,} " + unit),
    )
    shown = Console(stderr=True)
    return Progress(*columns, TimeRemainingColumn(), console=shown, transient=True, disable=not shown.is_terminal)
