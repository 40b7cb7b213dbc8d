"""`octavo explain [ID]`: why a request waits, what it is doing, or what became of it; without an ID, all open ones."""

from __future__ import annotations

import argparse
import json
import os
import time
from typing import Any
from urllib.parse import quote

from octavo.cli.admin_client import ask
from octavo.cli.explain_text import headline, story, table
from octavo.cli.flags import UsageError
from octavo.cli.servers import add_server_arguments, full_url, is_server_named, named_server, server_at
from octavo.cli.terminal import reason_of
from octavo.errors import OctavoError

TIMEOUT_S = 30.0
_OVER = ("finished", "unknown")


class NotAnsweredError(OctavoError):
    """The server did not answer, or does not know the request."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument("id", nargs="?", metavar="ID", help="as an answer, X-Request-Id or the log has it [all open]")
    add_server_arguments(parser)
    parser.add_argument("--api-key", metavar="KEY", help="for a --url elsewhere: its key [OCTAVO_API_KEY]")
    parser.add_argument("--json", action="store_true", help="print the answer as one line of JSON")
    parser.add_argument("--follow", action="store_true", help="go on, with a line for each change, to the end")
    parser.add_argument(
        "--interval", type=float, default=0.5, metavar="X", help="seconds between looks, --follow [0.5]"
    )


def run(args: argparse.Namespace) -> int:
    """Print the explanation; return 0 if the request is known."""
    is_server_named(args)
    is_elsewhere = args.url is not None and (bool(args.api_key) or server_at(full_url(args.url)) is None)
    if is_elsewhere and not args.id:
        raise UsageError("--url names a server that is not one of yours; to explain one request there, give its ID")
    if args.api_key and args.url is None:
        raise UsageError("--api-key is for --url; a server here needs none")
    if args.follow and not args.id:
        raise UsageError("--follow follows one request; give its ID (octavo top shows all)")
    if not args.interval > 0:
        raise UsageError(f"--interval is {args.interval:g}; give seconds above 0")
    answer = _follow(args, is_elsewhere) if args.follow else _ask(args, is_elsewhere)
    if args.json:
        print(json.dumps(answer))
    else:
        print("\n".join(story(answer) if args.id else table(answer)))
    return 0


def _follow(args: argparse.Namespace, is_elsewhere: bool) -> dict[str, Any]:
    """Print a line for each change of state until the request has ended; return the last answer."""
    last: list[tuple[object, ...]] = []
    while True:
        answer = _ask(args, is_elsewhere)
        told = answer["explanations"]
        standing = [tuple(one.get(name) for name in ("state", "position", "reason", "epoch")) for one in told]
        if standing != last and not args.json:
            print(*map(headline, told), sep="\n", flush=True)
        last = standing
        if all(one["state"] in _OVER for one in told):
            return answer
        time.sleep(args.interval)


def _ask(args: argparse.Namespace, is_elsewhere: bool) -> dict[str, Any]:
    """Ask once, over HTTP if the server is not this user's. Raises AdminError, NotAnsweredError."""
    if is_elsewhere:
        base = full_url(args.url).removesuffix("/v1")
        key = args.api_key or os.environ.get("OCTAVO_API_KEY", "").split(",")[0]
        return _get(f"{base}/v1/requests/{quote(args.id, safe='')}/explain", key)
    answer: dict[str, Any] = ask(named_server(args).admin, "explain", args.id or "")
    told = answer.get("explanations", ())
    if told and all(one["state"] == "unknown" for one in told):
        raise NotAnsweredError(told[0]["text"])
    return answer


def _get(url: str, key: str) -> dict[str, Any]:
    import httpx

    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        response = httpx.get(url, headers=headers, timeout=TIMEOUT_S)
        body: Any = response.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise NotAnsweredError(f"no answer from {url} ({reason_of(error)})") from None
    if response.status_code != 200:
        said = body.get("error") if isinstance(body, dict) else None
        message = said.get("message") if isinstance(said, dict) else None
        raise NotAnsweredError(f"{url} answers {response.status_code}: {message or response.reason_phrase}")
    if not isinstance(body, dict):
        raise NotAnsweredError(f"{url} answers something that is no explanation; is it an Octavo server?")
    return body
