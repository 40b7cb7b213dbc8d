"""`octavo admin VERB`: query or control a running server over its admin socket."""

from __future__ import annotations

import argparse
import json

from octavo.cli.admin_client import ask
from octavo.cli.flags import UsageError
from octavo.cli.servers import add_server_arguments, named_server

VERBS = {  # verb -> what it does
    "status": "processes, epoch, restarts and open requests, as JSON",
    "statistics": "the engine's counters and gauges, as JSON",
    "frames": "what the engine did since the cursor ARG, as docs/statistics.md has it",
    "top": "status, statistics and frames at once",
    "pause": "stop making steps; requests wait",
    "resume": "go on after pause",
    "drain": "take no new requests, finish the open ones (ARG now: end them), end the server",
    "cancel": "end the request with the id ARG",
    "cancel_all": "end every request in the engine",
    "explain": "where the request with the id ARG stands, or all open ones, as JSON (octavo explain says it in words)",
    "reset_prefix_cache": "forget the cached prefixes that nobody uses",
    "reload_keys": "read the key file again",
    "kill_engine": "kill the engine process, for a drill; requests go on in the next",
}

_WITH_ARGUMENT = ("frames", "top", "drain", "cancel", "explain")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    known = "; ".join(f"{verb}: {text}" for verb, text in VERBS.items())
    parser.add_argument("verb", choices=VERBS, metavar="VERB", help=known)
    parser.add_argument("argument", nargs="?", default="", metavar="ARG", help="what a verb needs: the id, or now")
    add_server_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print the answer: text as it is, anything else as JSON."""
    if args.argument and args.verb not in _WITH_ARGUMENT:
        raise UsageError(f"{args.verb} takes no {args.argument!r}; choose a server with --server NAME|PID|PORT")
    answer = ask(named_server(args).admin, args.verb, args.argument)
    print(answer if isinstance(answer, str) else json.dumps(answer, indent=2))
    return 0
