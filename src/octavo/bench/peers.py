"""Starts and drives the engines of a comparison, each in its own processes.

Owns: engines without a server, each in its own Python environment (through peer_host.py); servers on loopback; the
commands that start the known peers. Does not: install peers, choose workloads, or judge.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.bench.completion_client import CompletionClient, Target, first_model
from octavo.bench.online import Arrivals, OnlineLoad, run_online
from octavo.bench.processes import ProcessTree, ServerProcess
from octavo.bench.report import percentile
from octavo.bench.workload import Item
from octavo.errors import EngineError

HOST = str(Path(__file__).with_name("peer_host.py"))
OWN_ENGINE, OWN_SERVER = "octavo", "octavo server"
_SPARE_HTTP_THREADS = 4
_TCMALLOC = (
    "/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4",
    "/usr/lib/aarch64-linux-gnu/libtcmalloc_minimal.so.4",
)


@dataclass(frozen=True, slots=True)
class PeerSetup:
    """Settings that all peers share: threads, request limit, longest request, float weight type, timeout."""

    threads: int
    at_once: int
    max_len: int
    dtype: str = "bfloat16"
    timeout_s: float = 1200.0


@dataclass(slots=True)
class PeerRun:
    """One pass: its duration in seconds; for each request, seconds to the first and last token, and its tokens."""

    seconds: float = 0.0
    requests: list[tuple[float, float, int]] = field(default_factory=list)

    def add(self, other: PeerRun) -> None:
        """Add the times of another group of the same pass."""
        self.seconds += other.seconds
        self.requests += other.requests

    @property
    def num_output_tokens(self) -> int:
        """Return the tokens of all requests."""
        return sum(tokens for _, _, tokens in self.requests)

    def figures(self) -> dict[str, float]:
        """Return the compared figures: throughput, and medians over the requests."""
        token_s = [(last - first) / (tokens - 1) for first, last, tokens in self.requests if tokens > 1]
        return {
            "output_tokens_per_s": self.num_output_tokens / self.seconds if self.seconds else 0.0,
            "ttft_ms": percentile([first for first, _, _ in self.requests], 50) * 1e3,
            "token_ms": percentile(token_s, 50) * 1e3,
        }


class Peer(ABC):
    """An engine in its own processes. Methods raise EngineError if the engine fails or cannot be started."""

    is_server: bool  # True: compared with this engine's server; False: with this engine without a server

    def __init__(
        self, name: str, command: Sequence[str], env: Mapping[str, str] | None = None, timeout_s: float = 1200.0
    ) -> None:
        self.name = name
        self.startup_s = 0.0
        self.facts: dict[str, Any] = {}
        self.command = list(command)
        self.env = env
        self.timeout_s = timeout_s
        self.tree: ProcessTree | None = None

    @abstractmethod
    async def start(self) -> None:
        """Start the engine and wait until it is ready."""

    @abstractmethod
    async def run(self, items: Sequence[Item], at_once: int) -> PeerRun:
        """Run the requests, with up to `at_once` open. Raises EngineError if a request's number of tokens is wrong."""

    def end(self) -> int:
        """End the peer's processes; return their peak memory in bytes, 0 if unknown. Idempotent."""
        return 0 if self.tree is None else self.tree.end()

    def freeze(self) -> None:
        """Pause the peer's processes (SIGSTOP), so that they use no processor time while other peers run."""
        if self.tree is not None:
            self.tree.freeze()

    def thaw(self) -> None:
        """Continue the peer's processes."""
        if self.tree is not None:
            self.tree.thaw()


class EnginePeer(Peer):
    """An engine without a server: a process that speaks peer_host.py's protocol."""

    is_server = False

    async def start(self) -> None:
        """Start the process and wait until it reports that the engine is open."""
        self.tree = ProcessTree(self.command, self.env, has_pipes=True)
        self.facts = (await self._read_answer())["facts"]
        self.startup_s = time.perf_counter() - self.tree.started

    async def run(self, items: Sequence[Item], at_once: int) -> PeerRun:
        """Send the requests as one line, and wait for the line with their times."""
        requests = [
            {"prompt_token_ids": item.prompt_token_ids.tolist(), "max_tokens": item.max_tokens} for item in items
        ]
        assert self.tree is not None and self.tree.process.stdin is not None, "start comes first"
        try:
            self.tree.process.stdin.write(json.dumps({"requests": requests, "at_once": at_once}).encode() + b"\n")
            self.tree.process.stdin.flush()
        except OSError:
            raise EngineError(f"{self.name} ended\n{self.tree.last_lines()}") from None
        answer = await self._read_answer()
        times = [(first, last, tokens) for first, last, tokens in answer["requests"]]
        if len(times) != len(items):
            raise EngineError(f"{self.name} answered {len(times)} requests of {len(items)}")
        counts, requested = sorted(count for _, _, count in times), sorted(item.max_tokens for item in items)
        if counts != requested:  # answers may be in order of completion
            raise EngineError(
                f"{self.name} gave {sum(counts)} tokens of {sum(requested)}, or other lengths than requested"
            )
        return PeerRun(answer["seconds"], times)

    async def _read_answer(self) -> dict[str, Any]:
        assert self.tree is not None and self.tree.process.stdout is not None, "start comes first"
        reading = asyncio.create_task(asyncio.to_thread(self.tree.process.stdout.readline))
        done, _ = await asyncio.wait((reading,), timeout=self.timeout_s)
        if not done:
            last_lines = self.tree.last_lines()
            self.tree.end()  # closes the process's pipe, which ends the reading thread
            await reading
            raise EngineError(f"{self.name} did not answer within {self.timeout_s:g} s\n{last_lines}")
        line = reading.result()
        if not line:
            raise EngineError(f"{self.name} ended\n{self.tree.last_lines()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise EngineError(f"{self.name} failed: {answer['error']}")
        return answer


class ServerPeer(Peer):
    """An HTTP server on loopback. In `command`, `{port}` becomes a free port; `extra` goes into every body."""

    is_server = True
    _client: CompletionClient

    def __init__(
        self, name: str, command: Sequence[str], *, extra: Mapping[str, Any] | None = None, timeout_s: float = 1200.0
    ) -> None:
        super().__init__(name, command, timeout_s=timeout_s)
        self._extra = extra or {}

    async def start(self) -> None:
        """Start the server and fetch the name of its model."""
        self.facts = {"engine": self.name}
        server = await ServerProcess.start(self.command, self.timeout_s)
        self.tree, self.startup_s = server, server.startup_s
        target = Target(server.base_url, extra=self._extra, timeout_s=self.timeout_s)
        model = await first_model(CompletionClient(target))
        self._client = CompletionClient(Target(target.base_url, model, "", self._extra, self.timeout_s))

    async def run(self, items: Sequence[Item], at_once: int) -> PeerRun:
        """Send the requests. Raises EngineError for the first request that failed or has a wrong number of tokens."""
        bodies = [self._client.body(item.prompt_token_ids, item.max_tokens) for item in items]
        run = await run_online(self._client, bodies, OnlineLoad(Arrivals(), max_concurrency=at_once))
        times = []
        for answer, item in zip(run.answers, items, strict=True):
            if answer.has_failed:
                raise EngineError(f"{self.name}: a request failed ({answer.kind}): {answer.error}")
            if answer.usage_tokens is None or not answer.chunk_times:
                raise EngineError(f"{self.name} did not report the usage of a request, or streamed nothing of it")
            if answer.usage_tokens != item.max_tokens:
                raise EngineError(f"{self.name} gave {answer.usage_tokens} tokens of {item.max_tokens}")
            # The chunk of a token that ends inside a character may have no text, so count the requested tokens.
            first, last = answer.chunk_times[0], answer.chunk_times[-1]
            times.append((first - answer.sent, last - answer.sent, item.max_tokens))
        return PeerRun(run.duration_s, times)


# --- the known peers --------------------------------------------------------------------------------


def own_engine(model: str, settings: Mapping[str, object], setup: PeerSetup) -> EnginePeer:
    """Return this engine without a server, for comparison with other engines without a server."""
    options = {"model": model, "at_once": setup.at_once, "settings": {"threads": setup.threads, **settings}}
    return EnginePeer(OWN_ENGINE, _host(sys.executable, "octavo", options), timeout_s=setup.timeout_s)


def own_server(model: str, words: Sequence[str], setup: PeerSetup) -> ServerPeer:
    """Return this engine's server, for comparison with other servers. `words` are extra flags of `octavo serve`."""
    command = [sys.executable, "-m", "octavo", "serve", model, "--host", "127.0.0.1", "--port", "{port}"]
    command += ["--threads", str(setup.threads), "--max-num-seqs", str(setup.at_once), *words]
    return ServerPeer(OWN_SERVER, command, timeout_s=setup.timeout_s)


def vllm(python: str, weights: str, setup: PeerSetup) -> EnginePeer:
    """Return vLLM. `python` is the interpreter of an environment with vLLM; `weights` is a folder of safetensors.

    The libraries that vLLM's CPU build needs are preloaded if they are found.
    """
    environment = Path(python).absolute().parent.parent
    libraries = [path for path in _TCMALLOC if Path(path).exists()][:1]
    libraries += [str(path) for path in sorted(environment.glob("lib/libiomp5.so"))]
    preload = [*libraries, *filter(None, [os.environ.get("LD_PRELOAD")])]
    env = {"LD_PRELOAD": ":".join(preload), "PATH": f"{environment / 'bin'}:{os.environ.get('PATH', '')}"}
    return EnginePeer("vllm", _host(python, "vllm", _options(weights, setup)), env, setup.timeout_s)


def transformers(python: str, weights: str, setup: PeerSetup) -> EnginePeer:
    """Return transformers' continuous batching; `weights` is a folder of safetensors, or a GGUF file."""
    env = {"OMP_NUM_THREADS": str(setup.threads)}
    command = _host(python, "transformers", _options(weights, setup))
    return EnginePeer("transformers", command, env, setup.timeout_s)


def mistralrs(python: str, weights: str, setup: PeerSetup) -> EnginePeer:
    """Return mistral.rs. `python` has the wheel; `weights` is a GGUF file, or a folder of safetensors."""
    command = _host(python, "mistralrs", _options(weights, setup))
    return EnginePeer("mistral.rs", command, timeout_s=setup.timeout_s)


def llama_server(binary: str, gguf: str, setup: PeerSetup) -> ServerPeer:
    """Return llama.cpp's server with `gguf` weights. The server divides its context among its slots."""
    threads, slots = str(setup.threads), setup.at_once
    command = [binary, "-m", gguf, "-t", threads, "-tb", threads, "-np", str(slots), "-c", str(setup.max_len * slots)]
    command += ["-b", "2048", "-ub", "512", "--host", "127.0.0.1", "--port", "{port}"]
    command += ["--threads-http", str(slots + _SPARE_HTTP_THREADS), "--no-webui"]
    return ServerPeer("llama.cpp", command, extra={"top_k": 1, "samplers": ["top_k"]}, timeout_s=setup.timeout_s)


def _host(python: str, engine: str, options: Mapping[str, Any]) -> list[str]:
    return [python, HOST, engine, json.dumps(options)]


def _options(weights: str, setup: PeerSetup) -> dict[str, Any]:
    return {
        "model": str(Path(weights).absolute()),
        "threads": setup.threads,
        "at_once": setup.at_once,
        "max_len": setup.max_len,
        "dtype": setup.dtype,
    }
