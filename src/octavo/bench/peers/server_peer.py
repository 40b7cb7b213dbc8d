"""A peer with an HTTP server: it is started on loopback and driven by this package's client.

Owns: the server's process, and the conversion of answers to a run. Does not: know the server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from octavo.bench.arrivals import Arrivals
from octavo.bench.completion_client import CompletionClient, Target
from octavo.bench.online import OnlineLoad, run_online
from octavo.bench.peers.peer import PeerRun
from octavo.bench.server_facts import first_model
from octavo.bench.server_process import ServerProcess
from octavo.bench.workload import Item
from octavo.errors import EngineError


class ServerPeer:
    """See Peer. In `command`, `{port}` becomes a free port; `extra` goes into every body."""

    is_server = True

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        extra: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 1200.0,
    ) -> None:
        self.name = name
        self.startup_s = 0.0
        self.facts: dict[str, Any] = {"engine": name}
        self._command = command
        self._extra = extra or {}
        self._env = env
        self._timeout_s = timeout_s
        self._server: ServerProcess | None = None
        self._client: CompletionClient
        self._peak = 0

    async def start(self) -> None:
        """Start the server and get its model's name."""
        self._server = await ServerProcess.start(self._command, env=self._env, timeout_s=self._timeout_s)
        self.startup_s = self._server.startup_s
        target = Target(self._server.base_url, extra=self._extra, timeout_s=self._timeout_s)
        model = await first_model(CompletionClient(target))
        self._client = CompletionClient(Target(target.base_url, model, "", self._extra, self._timeout_s))

    async def run(self, items: Sequence[Item], at_once: int) -> PeerRun:
        """Send the requests, `at_once` open at a time. Raises EngineError for the first that failed or is too short."""
        bodies = [self._client.body(item.prompt_token_ids, item.max_tokens) for item in items]
        run = await run_online(self._client, bodies, OnlineLoad(Arrivals(), max_concurrency=at_once))
        for answer, item in zip(run.answers, items, strict=True):
            if answer.has_failed:
                raise EngineError(f"{self.name}: a request failed ({answer.kind}): {answer.error}")
            if answer.usage_tokens is None or not answer.chunk_times:
                raise EngineError(f"{self.name} did not tell the usage of a request, or streamed nothing of it")
            if answer.usage_tokens != item.max_tokens:
                raise EngineError(f"{self.name} gave {answer.usage_tokens} tokens of {item.max_tokens}")
        # A chunk may carry no text while a character is incomplete, so the requested tokens are counted.
        times = [
            (answer.chunk_times[0] - answer.sent, answer.chunk_times[-1] - answer.sent, item.max_tokens)
            for answer, item in zip(run.answers, items, strict=True)
        ]
        return PeerRun(run.duration_s, times)

    def freeze(self) -> None:
        """Stop its processes."""
        if self._server is not None:
            self._server.tree.freeze()

    def thaw(self) -> None:
        """Continue its processes."""
        if self._server is not None:
            self._server.tree.thaw()

    def end(self) -> int:
        """End the server; return the peak of its memory in bytes."""
        if self._server is not None:
            self._peak = self._server.end()
            self._server = None
        return self._peak
