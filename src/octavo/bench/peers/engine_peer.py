"""A peer whose engine runs in its own Python, under peers/host.py.

Owns: the process and its lines. Does not: know the engine.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from octavo.bench.peers.peer import PeerRun
from octavo.bench.process_tree import ProcessTree
from octavo.bench.workload import Item
from octavo.errors import ConfigError, EngineError

FOLDER = Path(__file__).parent
LAST_LINES = 8


class EnginePeer:
    """See Peer. `script` is the file of its engine beside host.py."""

    is_server = False

    def __init__(
        self,
        name: str,
        python: str,
        script: str,
        options: Mapping[str, Any],
        env: Mapping[str, str] | None = None,
        timeout_s: float = 1200.0,
    ) -> None:
        self.name = name
        self.startup_s = 0.0
        self.facts: dict[str, Any] = {}
        self._command = [python, str(FOLDER / "host.py"), str(FOLDER / script), json.dumps(dict(options))]
        self._env = env
        self._timeout_s = timeout_s
        self._tree: ProcessTree | None = None
        self._log: IO[bytes]
        self._peak = 0

    async def start(self) -> None:
        """Start the process and wait until it reports that the engine is open."""
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (ended with the peer)
        try:
            self._tree = ProcessTree(self._command, self._log, self._env, is_talking=True)
        except OSError as error:
            self._log.close()
            raise ConfigError(f"{self.name}: {self._command[0]} cannot be started: {error.strerror}") from None
        told = await self._listen()
        self.startup_s = time.perf_counter() - self._tree.begun
        self.facts = told["facts"]

    async def run(self, items: Sequence[Item], at_once: int) -> PeerRun:
        """Send the requests as one line, and wait for the line of their times.

        Raises EngineError if a request has another number of tokens than requested: its times would not compare.
        """
        requests = [
            {"prompt_token_ids": item.prompt_token_ids.tolist(), "max_tokens": item.max_tokens} for item in items
        ]
        assert self._tree is not None and self._tree.process.stdin is not None, "start comes first"
        try:
            self._tree.process.stdin.write(json.dumps({"requests": requests, "at_once": at_once}).encode() + b"\n")
            self._tree.process.stdin.flush()
        except OSError:
            raise EngineError(f"{self.name} ended\n{self._tail()}") from None
        told = await self._listen()
        times = [(first, last, tokens) for first, last, tokens in told["requests"]]
        if len(times) != len(items):
            raise EngineError(f"{self.name} answered {len(times)} requests of {len(items)}")
        counts, wanted = (sorted(of) for of in ((count for _, _, count in times), (item.max_tokens for item in items)))
        if counts != wanted:  # answers may be in the order of their ends
            raise EngineError(
                f"{self.name} gave {sum(counts)} tokens of {sum(wanted)}, or other lengths than asked for"
            )
        return PeerRun(told["seconds"], times)

    def freeze(self) -> None:
        """Stop its processes."""
        if self._tree is not None:
            self._tree.freeze()

    def thaw(self) -> None:
        """Continue its processes."""
        if self._tree is not None:
            self._tree.thaw()

    def end(self) -> int:
        """End its processes; return the peak of their memory in bytes."""
        if self._tree is not None:
            self._peak = max(self._peak, self._tree.peak_bytes())
            self._tree.end()
            self._tree = None
            self._log.close()
        return self._peak

    async def _listen(self) -> dict[str, Any]:
        assert self._tree is not None and self._tree.process.stdout is not None, "start comes first"
        reading = asyncio.create_task(asyncio.to_thread(self._tree.process.stdout.readline))
        done, _ = await asyncio.wait((reading,), timeout=self._timeout_s)
        if not done:
            self._peak = self._tree.peak_bytes()
            self._tree.end()  # closes its pipe, which ends the reading thread
            await reading
            raise EngineError(f"{self.name} did not answer within {self._timeout_s:g} s\n{self._tail()}")
        line = reading.result()
        if not line:
            raise EngineError(f"{self.name} ended\n{self._tail()}")
        told: dict[str, Any] = json.loads(line)
        if "error" in told:
            raise EngineError(f"{self.name} failed: {told['error']}")
        return told

    def _tail(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode("utf-8", "replace").splitlines()
        return "\n".join(lines[-LAST_LINES:])
