"""An api process that watches its own event loop: `python lag_api.py '{"limits": {...}, "settings": {...}}'`.

The engine is scripted; the text side is the default model's where it is installed. Says its port in one line; each line
on stdin is answered with one of JSON: what was seen since the last. Ends with its stdin.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from octavo.artifacts.resolve import find_wheel_model  # noqa: E402  the path comes first
from octavo.frontend.sessions import Sessions  # noqa: E402
from octavo.server.app import create_app  # noqa: E402
from octavo.server.http.body import HttpLimits  # noqa: E402
from octavo.server.http.lifecycle import Lifecycle  # noqa: E402
from octavo.server.http.listener import new_event_loop, open_socket  # noqa: E402
from octavo.server.http.server import HttpServer  # noqa: E402
from octavo.text.chat_template import ChatTemplate  # noqa: E402
from octavo.text.text_model import TextModel  # noqa: E402
from octavo.text.tokenizer import Tokenizer  # noqa: E402
from tests.reliability.api_child import api_child  # noqa: E402
from tests.reliability.load import quantile  # noqa: E402
from tests.server.fakes import FakeClient, make_text  # noqa: E402
from tests.settings import load_config  # noqa: E402

TICK_S = 0.002


class Watch:
    """How late the loop was, and how much was tokenized."""

    def __init__(self) -> None:
        self.late_s: list[float] = []
        self.own_s: list[float] = []  # of that, at most so much was this process's own work, not its neighbours'
        self.num_characters = 0
        for name in ("count", "encode"):
            self._count(name, getattr(Tokenizer, name))

    def _count(self, name: str, original: Any) -> None:
        def counted(tokenizer: Tokenizer, text: str, *args: Any) -> Any:
            self.num_characters += len(text)
            return original(tokenizer, text, *args)

        setattr(Tokenizer, name, counted)

    async def run(self) -> None:
        while True:
            due, used = time.perf_counter() + TICK_S, time.process_time()
            await asyncio.sleep(TICK_S)
            late = time.perf_counter() - due
            self.late_s.append(late)
            self.own_s.append(min(late, time.process_time() - used))

    def report(self) -> dict[str, float]:
        late, own, num = self.late_s, self.own_s, self.num_characters
        self.late_s, self.own_s, self.num_characters = [], [], 0
        return {
            "late_p50_s": quantile(late, 0.5),
            "late_p999_s": quantile(late, 0.999),
            "own_p999_s": quantile(own, 0.999),
            "late_max_s": max(late, default=0.0),
            "cpu_s": time.process_time(),
            "characters": num,
        }


def _report_when_asked(watch: Watch) -> None:
    for _ in sys.stdin:
        print(json.dumps(watch.report()), flush=True)


async def main(limits: dict[str, Any], settings: dict[str, Any]) -> None:
    watch = Watch()
    config = load_config({"port": 0, **settings})
    listener = open_socket(config.serving)
    files = find_wheel_model()
    text = make_text() if files is None else TextModel.load(files, trust_template=config.chat.trust_template)
    if config.chat.chat_template is not None:
        source = Path(config.chat.chat_template).read_text(encoding="utf-8")
        text = replace(text, chat_template=ChatTemplate(source, text.tokenizer.special_tokens))
    engine = FakeClient()
    lifecycle = Lifecycle()
    app = create_app(Sessions(engine, text), text, config, engine.statistics, limits=HttpLimits(**limits),
                     lifecycle=lifecycle)  # fmt: skip
    server = HttpServer(app, listener, lifecycle, 0.0)
    gc.freeze()  # as the api process does
    print(listener.getsockname()[1], flush=True)
    running, watching = asyncio.create_task(server.run()), asyncio.create_task(watch.run())
    await asyncio.to_thread(_report_when_asked, watch)
    watching.cancel()
    server.stop()
    server.stop()
    await running
    listener.close()


class Api:
    """For tests: such a process."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self._process = process
        self.port = port

    def report(self) -> dict[str, float]:
        """What was seen since the last report."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        found: dict[str, float] = json.loads(self._process.stdout.readline())
        return found

    @property
    def is_alive(self) -> bool:
        """Whether it runs."""
        return self._process.poll() is None


@contextlib.contextmanager
def watched_api(limits: dict[str, Any] | None = None, **settings: Any) -> Iterator[Api]:
    """Such a process, gone when the block ends."""
    with api_child(Path(__file__), {"limits": limits or {}, "settings": settings}) as (process, port):
        yield Api(process, port)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(main(**json.loads(sys.argv[1])))
