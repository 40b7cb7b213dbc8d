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

from octavo.cli.flags import Parser, UsageError
from octavo.cli.record import record
from octavo.cli.servers import AdminError, add_server_arguments, call_admin, named_server
from octavo.errors import ConfigError, EngineError
from octavo.server.api.requests import explain_any, explain_open

if TYPE_CHECKING:
    from octavo.cli.api_process import ApiProcess, ApiTask, Engine
    from octavo.engine.client import Verb as EngineVerb
    from octavo.fleet.front import FleetFront
    from octavo.server.admin import Verb
    from octavo.server.context import Context
    from octavo.server.http.server import HttpServer

VERBS = {  # verb -> help text
    "status": "print processes and open requests",
    "statistics": "print counters and gauges",
    "frames": "print the steps since cursor ARG",
    "top": "print status, statistics, frames",
    "pause": "stop making steps; requests wait",
    "resume": "continue after pause",
    "drain": "refuse new requests, finish the open ones (ARG now: fail them), then exit",
    "cancel": "cancel the request with the id ARG",
    "cancel_all": "cancel every request in the engine",
    "explain": "why request ARG waits, or all open ones",
    "reset_prefix_cache": "free cached prefixes that no request uses",
    "record": "write the last minutes to folder ARG",
    "reload_keys": "read the key file again",
    "adapters": "print the adapters as JSON",
    "load_adapter": "load the adapter ARG, which is NAME=PATH",
    "unload_adapter": "unload ARG; its requests go on",
    "kill_engine": "kill the engine process, as a drill; requests continue in the next one",
    "replicas": "print the replicas of a fleet as JSON",
    "scale": "have ARG replicas; the newest are drained",
    "roll": "replace the replicas one by one (--to MODEL, --revision)",
    "drain_replica": "stop replica ARG after its last request",
    "remove_replica": "move its requests, and stop it",
}
_WITH_ARGUMENT = (
    "frames", "top", "drain", "cancel", "explain", "scale", "drain_replica", "remove_replica", "load_adapter",
    "unload_adapter", "record",
)  # fmt: skip
_OF_FLEETS = ("scale", "roll", "drain_replica", "remove_replica")
POLL_S = 0.5  # between two looks at a change of a fleet


class FleetOrder(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """The argument of a verb that changes a fleet, as JSON. `count` is a number of replicas, or of one."""

    count: int = -1
    model: str | None = None
    to: str | None = None
    revision: str | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    texts = "\n".join(["one of these verbs:", *(f"{verb}: {text}" for verb, text in VERBS.items())])
    parser.add_argument("verb", choices=tuple(VERBS), metavar="VERB", help=texts)
    parser.add_argument(
        "argument", nargs="?", default="", metavar="ARG", help="argument of the verb: an id, a number, or now"
    )
    parser.add_argument("--model", metavar="NAME", help="of a fleet with several models, the one to change")
    parser.add_argument("--to", metavar="MODEL", help="roll: the model that the new replicas run")
    parser.add_argument("--revision", metavar="TEXT", help="roll: the revision that they run")
    parser.add_argument("--no-wait", action="store_true", help="do not wait until a change of a fleet has ended")
    add_server_arguments(parser)
    if isinstance(parser, Parser):
        parser.rare = ("--model", "--to", "--revision", "--no-wait")


def run(args: argparse.Namespace) -> int:
    """Send the verb and print the answer: text unchanged, other values as JSON."""
    if args.argument and args.verb not in _WITH_ARGUMENT:
        raise UsageError(f"{args.verb} takes no {args.argument!r}; choose a server with --server NAME|PID|PORT")
    if args.verb in _OF_FLEETS:
        return _change_fleet(args)
    for flag, value in (("--model", args.model), ("--to", args.to), ("--revision", args.revision)):
        if value is not None:
            raise UsageError(f"{flag} is for changes of a fleet ({', '.join(_OF_FLEETS)}); {args.verb} takes none")
    answer = call_admin(named_server(args).admin, args.verb, args.argument)
    print(answer if isinstance(answer, str) else json.dumps(answer, indent=2))
    return 0


def _change_fleet(args: argparse.Namespace) -> int:
    """Start a change of a fleet, and print the states of the replicas until it has ended; return 1 if it failed."""
    socket = named_server(args).admin
    if args.verb != "roll" and not args.argument.isdecimal():
        what = "the number of replicas" if args.verb == "scale" else "the number of a replica"
        raise UsageError(f"{args.verb} is given {args.argument!r}; give {what}")
    if args.verb != "roll" and (args.to or args.revision):
        raise UsageError(f"--to and --revision are for roll; leave them out of {args.verb}")
    order = FleetOrder(int(args.argument or -1), args.model, args.to, args.revision)
    answer = call_admin(socket, args.verb, msgspec.json.encode(order).decode())
    shown = ""
    while True:
        states = ", ".join(f"{row['name']} {row['state']}" for row in answer["replicas"])
        if states != shown:
            print(states or "no replica", flush=True)
        shown, change = states, answer["change"]
        if args.no_wait or change is None or change["state"] != "running":
            break
        time.sleep(POLL_S)
        answer = call_admin(socket, "replicas")
    if change is not None and change["error"]:
        raise AdminError(f"{change['what']} failed: {change['error']}")
    return 0


def admin_verbs(api: ApiProcess, engine: Engine, server: HttpServer, context: Context, url: str) -> dict[str, Verb]:
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
        **_reading_verbs(api.task, engine, context, url),
        **_fleet_verbs(api.front, engine),
        **_adapter_verbs(context),
        "drain": drain,
        "cancel": cancel,
        "explain": partial(_explain, context),
        "record": partial(record, engine, api.task.config.flight),
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
        return await context.engine_statistics()

    async def frames(cursor: str) -> object:
        if "/" in cursor and not cursor.partition("/")[0].isdecimal():
            raise ConfigError(
                f"frames {cursor[:64]!r} is no cursor; give what the last answer has, of replica 2 as 2/CURSOR"
            )
        return await engine.control("frames", cursor)

    async def top(cursors: str) -> object:
        found = _read_cursors(cursors)
        answer: dict[str, object] = {"status": await status("")}
        try:
            figures = await context.engine_statistics()
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


def _adapter_verbs(context: Context) -> dict[str, Verb]:
    """Return the verbs that show, load and unload adapters."""

    async def adapters(_: str) -> object:
        return [{"name": each.name, "path": each.path} for each in context.adapters]

    async def load_adapter(argument: str) -> object:
        name, _, path = argument.partition("=")
        if not name or not path:
            raise ConfigError(f"load_adapter {argument[:64]!r} is no NAME=PATH, such as sql=/models/sql-lora")
        await context.adapters.load(name, path, context.all_models)
        return await adapters("")

    async def unload_adapter(name: str) -> object:
        if context.adapters.unload(name) is None:
            known = ", ".join(each.name for each in context.adapters) or "none"
            raise ConfigError(f"there is no adapter {name[:64]!r}; there are: {known}")
        return await adapters("")

    return {"adapters": adapters, "load_adapter": load_adapter, "unload_adapter": unload_adapter}


def _fleet_verbs(front: FleetFront | None, engine: Engine) -> dict[str, Verb]:
    """Return the verbs that show and change the replicas. Only `octavo fleet` has a front."""

    async def replicas(_: str) -> object:
        return {"replicas": engine.report().get("replicas", []), "change": None if front is None else front.change}

    async def change(verb: str, argument: str) -> object:
        if front is None:
            raise ConfigError(f"{verb} is for a fleet; start one with: octavo fleet MODEL --replicas N")
        try:
            order = msgspec.json.decode(argument, type=FleetOrder | int)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{verb} {argument[:64]!r} cannot be read: {error}") from None
        order = FleetOrder(order) if isinstance(order, int) else order
        if verb == "scale":
            front.scale(order.count, order.model)
        elif verb == "roll":
            front.roll(order.model, order.to, order.revision)
        elif verb == "drain_replica":
            front.drain(order.count, order.model)
        else:
            await front.remove(order.count, order.model)
        return await replicas("")

    return {"replicas": replicas, **{verb: partial(change, verb) for verb in _OF_FLEETS}}


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
