"""An api process over a timed engine: `python timed_api.py '{"model": "20", ...}'`; ends with its stdin.

Says one line: its port. The settings are those of octavo.config, by field name.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from octavo.frontend.sessions import Sessions  # noqa: E402
from octavo.server.app import create_app  # noqa: E402
from octavo.server.http.lifecycle import Lifecycle  # noqa: E402
from octavo.server.http.listener import new_event_loop, open_socket  # noqa: E402
from octavo.server.http.server import HttpServer  # noqa: E402
from tests.engine.direct_client import start_engine  # noqa: E402  the path comes first
from tests.reliability.api_child import api_child  # noqa: E402
from tests.server.fakes import make_text  # noqa: E402
from tests.settings import load_config  # noqa: E402

ENGINE = Path(__file__).with_name("timed_engine.py")


async def main(settings: dict[str, Any]) -> None:
    config = load_config({"port": 0, **settings})
    listener = open_socket(config.serving)
    engine = await start_engine(config, command=(sys.executable, str(ENGINE)))
    try:
        sessions = Sessions(engine.client, make_text(), capacity=engine.capacity)
        lifecycle = Lifecycle()
        app = create_app(sessions, sessions.text, config, engine.client.statistics, lifecycle=lifecycle)
        server = HttpServer(app, listener, lifecycle, 0.0)
        gc.collect()
        gc.freeze()  # as cli/api_server does
        print(listener.getsockname()[1], flush=True)
        running = asyncio.create_task(server.run())
        await asyncio.to_thread(sys.stdin.read)
        server.stop()
        server.stop()
        await running
    finally:
        await engine.close()
        listener.close()


@contextlib.contextmanager
def serving(**settings: Any) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """For tests: such a process and its port; gone when the block ends."""
    with api_child(Path(__file__), settings) as (process, port):
        yield process, port


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(main(json.loads(sys.argv[1])))
