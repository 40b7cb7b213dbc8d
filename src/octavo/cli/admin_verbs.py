"""The verbs of a running server's admin socket.

Owns: the verbs and the status. Does not: know the socket (server.admin), or the command line's words.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.cli.admin import VERBS
from octavo.cli.engines import Engine
from octavo.engine.client import Verb as EngineVerb
from octavo.errors import ConfigError, EngineError
from octavo.server.admin import Verb
from octavo.server.explanations import explain_any, explain_open

if TYPE_CHECKING:
    from octavo.cli.api_task import ApiTask
    from octavo.server.context import Context
    from octavo.server.run import HttpServer


def _looks(task: ApiTask, engine: Engine, context: Context, url: str) -> dict[str, Verb]:
    """Return the verbs that only read."""
    begun = time.monotonic()

    async def status(_: str) -> object:
        processes = {"supervisor": task.supervisor} if task.supervisor else {}
        return {
            "url": url,
            "model": context.model,
            "phase": context.lifecycle.phase.value,
            "trouble": engine.trouble(),
            "uptime_s": round(time.monotonic() - begun, 3),
            "processes": {**processes, "api": os.getpid(), **engine.processes},
            "api_restarts": task.life - 1,
            "engine": engine.report(),
            "open_requests": context.queue.num_requests,
            "api": _own_figures(),
        }

    async def statistics(_: str) -> object:
        return await engine.client.statistics()

    async def frames(cursor: str) -> object:
        return await engine.client.control("frames", cursor)

    async def top(cursor: str) -> object:
        answer: dict[str, object] = {"status": await status("")}
        try:
            answer["statistics"] = await statistics("")
            answer["frames"] = await frames(cursor)
        except EngineError as error:  # it is being restarted
            answer["trouble"] = str(error)
        return answer

    return {"status": status, "statistics": statistics, "frames": frames, "top": top}


def admin_verbs(task: ApiTask, engine: Engine, server: HttpServer, context: Context, url: str) -> dict[str, Verb]:
    """Return all verbs of one server."""

    async def drain(when: str) -> object:
        if when not in ("", "now"):
            raise ConfigError(f"drain {when!r} is not known; leave it out, or give now to end open requests")
        loop = asyncio.get_running_loop()
        loop.call_soon(server.stop)
        if when:
            loop.call_soon(context.lifecycle.stop)
        return {"open_requests": context.queue.num_requests}

    async def cancel(request_id: str) -> object:
        names = context.request_index.find(_needed(request_id, "cancel"))
        engine.client.cancel(names or (request_id,))
        return names

    async def explain(request_id: str) -> object:
        return await (explain_any(context, request_id) if request_id else explain_open(context))

    async def reload_keys(_: str) -> object:
        return context.keys.reload()

    async def kill_engine(_: str) -> object:
        engine.kill("asked for by octavo admin")
        return engine.processes

    asked: dict[str, Verb] = {
        **_looks(task, engine, context, url),
        "drain": drain,
        "cancel": cancel,
        "explain": explain,
        "reload_keys": reload_keys,
        "kill_engine": kill_engine,
        "pause": _control(engine, "pause"),
        "resume": _control(engine, "resume"),
        "cancel_all": _control(engine, "cancel_all"),
        "reset_prefix_cache": _control(engine, "reset_prefix_cache"),
    }
    assert asked.keys() == VERBS.keys()
    return asked


def _control(engine: Engine, verb: EngineVerb) -> Callable[[str], Awaitable[object]]:
    async def ask(_: str) -> object:
        return await engine.client.control(verb)

    return ask


def _needed(argument: str, verb: str) -> str:
    if not argument:
        raise ConfigError(f"{verb} needs the id of a request")
    return argument


def _own_figures() -> dict[str, object]:
    """Return the figures that show leaks: this process's memory, file descriptors and tasks."""
    figures: dict[str, object] = {"tasks": len(asyncio.all_tasks())}
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        figures["rss_bytes"] = pages * os.sysconf("SC_PAGE_SIZE")
        figures["fds"] = len(os.listdir("/proc/self/fd"))
    except OSError:  # no /proc here
        pass
    return figures
