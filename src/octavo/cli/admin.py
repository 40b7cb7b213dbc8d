"""`octavo admin VERB`: queries or controls a running server. Also the server's functions behind the verbs.

Owns: the verbs, the server's status. Does not: know the socket (server.admin listens, servers.call_admin connects).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import msgspec

from octavo.cli.flags import UsageError
from octavo.cli.servers import add_server_arguments, call_admin, named_server
from octavo.errors import ConfigError, EngineError
from octavo.server.api.requests import explain_any, explain_open

if TYPE_CHECKING:
    from octavo.cli.api_process import ApiTask, Engine
    from octavo.engine.client import Verb as EngineVerb
    from octavo.server.admin import Verb
    from octavo.server.context import Context
    from octavo.server.http.server import HttpServer

VERBS = {  # verb -> help text
    "status": "print processes, epoch, restarts and open requests as JSON",
    "statistics": "print the engine's counters and gauges as JSON",
    "frames": "print what the engine did since the cursor ARG, replica 2's since 2/ARG (docs/statistics.md)",
    "top": "print status, statistics and frames at once",
    "pause": "stop making steps; requests wait",
    "resume": "continue after pause",
    "drain": "refuse new requests, finish the open ones (ARG now: fail them), then exit",
    "cancel": "cancel the request with the id ARG",
    "cancel_all": "cancel every request in the engine",
    "explain": "print the state of the request with the id ARG, or of all open ones, as JSON (octavo explain: as text)",
    "reset_prefix_cache": "free the cached prefixes that no request uses",
    "reload_keys": "read the key file again",
    "kill_engine": "kill the engine process, as a drill; requests continue in the next one",
}
_WITH_ARGUMENT = ("frames", "top", "drain", "cancel", "explain")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    texts = "\n".join(["one of these verbs:", *(f"{verb}: {text}" for verb, text in VERBS.items())])
    parser.add_argument("verb", choices=tuple(VERBS), metavar="VERB", help=texts)
    parser.add_argument("argument", nargs="?", default="", metavar="ARG", help="argument of the verb: an id, or now")
    add_server_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Send the verb and print the answer: text unchanged, other values as JSON."""
    if args.argument and args.verb not in _WITH_ARGUMENT:
        raise UsageError(f"{args.verb} takes no {args.argument!r}; choose a server with --server NAME|PID|PORT")
    answer = call_admin(named_server(args).admin, args.verb, args.argument)
    print(answer if isinstance(answer, str) else json.dumps(answer, indent=2))
    return 0


def admin_verbs(task: ApiTask, engine: Engine, server: HttpServer, context: Context, url: str) -> dict[str, Verb]:
    """Return the functions that answer the verbs in a server's api process."""

    async def drain(when: str) -> object:
        if when not in ("", "now"):
            raise ConfigError(f"drain {when!r} is not known; leave it out, or give now to fail open requests")
        loop = asyncio.get_running_loop()
        loop.call_soon(server.stop)
        if when:
            loop.call_soon(context.lifecycle.stop)
        return {"open_requests": sum(each.queue.num_requests for each in context.each_model)}

    async def cancel(request_id: str) -> object:
        if not request_id:
            raise ConfigError("cancel needs the id of a request")
        ids = context.request_index.find(request_id)
        engine.cancel(ids or (request_id,))
        return ids

    async def reload_keys(_: str) -> object:
        return context.keys.reload()

    async def kill_engine(_: str) -> object:
        engine.kill("octavo admin kill_engine")
        return engine.processes

    async def control(verb: EngineVerb, _: str) -> object:
        return await engine.control(verb)

    verbs: dict[str, Verb] = {
        **_reading_verbs(task, engine, context, url),
        "drain": drain,
        "cancel": cancel,
        "explain": partial(_explain, context),
        "reload_keys": reload_keys,
        "kill_engine": kill_engine,
        "pause": partial(control, "pause"),
        "resume": partial(control, "resume"),
        "cancel_all": partial(control, "cancel_all"),
        "reset_prefix_cache": partial(control, "reset_prefix_cache"),
    }
    assert verbs.keys() == VERBS.keys()
    return verbs


async def _explain(context: Context, request_id: str) -> object:
    """Explain a request, or all open requests; of several models, by the model's name."""
    if request_id:
        return await explain_any(context, request_id)
    if len(context.each_model) == 1:
        return await explain_open(context)
    return {"models": {each.model: await explain_open(each) for each in context.each_model if each.is_loaded}}


def _reading_verbs(task: ApiTask, engine: Engine, context: Context, url: str) -> dict[str, Verb]:
    """Return the verbs that only read."""
    started_at = time.monotonic()

    async def status(_: str) -> object:
        processes = {"supervisor": task.supervisor_pid} if task.supervisor_pid else {}
        return {
            "url": url,
            "model": context.model,
            "phase": context.lifecycle.phase.value,
            "trouble": engine.trouble(),
            "uptime_s": round(time.monotonic() - started_at, 3),
            "processes": {**processes, "api": os.getpid(), **engine.processes},
            "api_restarts": task.run_number - 1,
            "engine": engine.report(),
            "open_requests": sum(each.queue.num_requests for each in context.each_model),
            "api": _own_resources(),
        }

    async def statistics(_: str) -> object:
        return await engine.statistics()

    async def frames(cursor: str) -> object:
        return await engine.control("frames", cursor)

    async def top(cursors: str) -> object:
        found = _read_cursors(cursors)
        answer: dict[str, object] = {"status": await status("")}
        try:
            figures = await engine.statistics()
        except EngineError as error:  # the engine is restarting
            return {**answer, "trouble": str(error)}
        rows = cast(Mapping[str, Mapping[str, object]], figures.get("replicas", {}))
        prefixes = {number: f"{number}/" for number, row in rows.items() if row["up"]} if rows else {"0": ""}
        pages = {}
        for number, prefix in prefixes.items():
            with contextlib.suppress(EngineError):  # it died by now
                pages[number] = await frames(prefix + found.get(number, ""))
        return {**answer, "statistics": figures, "frames": pages}

    return {"status": status, "statistics": statistics, "frames": frames, "top": top}


def _read_cursors(text: str) -> dict[str, str]:
    """Parse the argument of `top`: a JSON object of cursors by replica, or nothing. Raises ConfigError."""
    try:
        return msgspec.json.decode(text or "{}", type=dict[str, str])
    except msgspec.MsgspecError:
        raise ConfigError(
            f'top {text[:64]!r} is no JSON object; give the cursor of each replica: {{"0": "..."}}'
        ) from None


def _own_resources() -> dict[str, object]:
    """Return this process's memory, file descriptors and tasks, which grow if there is a leak."""
    resources: dict[str, object] = {"tasks": len(asyncio.all_tasks())}
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        resources["rss_bytes"] = pages * os.sysconf("SC_PAGE_SIZE")
        resources["fds"] = len(os.listdir("/proc/self/fd"))
    except OSError:  # no /proc here
        pass
    return resources
