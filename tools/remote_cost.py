"""What an engine behind a link costs against one beside its front: throughput, and the delay of each token.

Owns: two fronts in this process, one over a local engine process and one over an agent (octavo serve --join, loopback),
both with a scripted model of a fixed step time; rounds in alternating order; the medians over the rounds.
Does not: judge, or measure a network. The delay is from the commit of a step in the engine to its events at the
ledger, by the clock that all processes of a machine share.
Usage: python -m tools.remote_cost [--step-ms 10] [--streams 16] [--tokens 64] [--rounds 8]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from octavo.config import Config
from octavo.config.sources import config_from_keywords
from octavo.core.plan import Events
from octavo.core.request import Request, SamplingParams
from octavo.executors.protocol import Fingerprint
from octavo.fleet.remote_engines import RemoteEngines, ServedModel
from octavo.fleet.security import HostPort, LinkSecurity
from octavo.frontend.engine_supervisor import EngineSupervisor
from octavo.server.http.listener import new_event_loop

PROMPT = array("i", range(40, 72))


@dataclass
class Figures:
    """What the rounds of one front measured: tokens a second, and each step's delay in ms."""

    throughput: list[float] = field(default_factory=list)
    delays: list[float] = field(default_factory=list)


class MeasuredSupervisor(EngineSupervisor):
    """Notes how old events are when they arrive."""

    figures: Figures

    def receive(self, epoch: int, events: Events) -> None:
        """Note the delay of a step's tokens."""
        if events.request_ids:
            self.figures.delays.append(1000 * (time.monotonic() - events.time))
        super().receive(epoch, events)


async def run_round(supervisor: MeasuredSupervisor, name: str, args: argparse.Namespace) -> None:
    """Serve the streams once."""
    params = SamplingParams(max_tokens=args.tokens, temperature=0.0, ignore_eos=True, seed=0)

    async def serve(number: int) -> None:
        await supervisor.submit(Request(f"{name}-{number}", PROMPT, params, time.monotonic()))
        async for _ in supervisor.outputs(f"{name}-{number}"):
            pass

    begun = time.monotonic()
    await asyncio.gather(*map(serve, range(args.streams)))
    supervisor.figures.throughput.append(args.streams * args.tokens / (time.monotonic() - begun))


@asynccontextmanager
async def open_local(config: Config) -> AsyncIterator[MeasuredSupervisor]:
    """Run a front over an engine process of its own."""
    supervisor = MeasuredSupervisor()
    supervisor.figures = Figures()
    await supervisor.add(supervisor.spawner(config))
    try:
        yield supervisor
    finally:
        await supervisor.close()


@asynccontextmanager
async def open_remote(script: Path, folder: Path) -> AsyncIterator[MeasuredSupervisor]:
    """Run a front over an agent on this machine."""
    supervisor = MeasuredSupervisor(awaits_replicas=True)
    supervisor.figures = Figures()
    model = ServedModel(supervisor, Fingerprint)
    engines = RemoteEngines(lambda name: model, LinkSecurity(folder))
    address = await engines.listen(HostPort("127.0.0.1", 0))
    words = [sys.executable, "-m", "octavo", "serve", f"scripted:{script}", "--join", str(address), "--quiet"]
    agent = subprocess.Popen(words, env={**os.environ, "OCTAVO_RUN_DIR": str(folder)})
    try:
        async with asyncio.timeout(60.0):
            while not engines.num_engines:
                await asyncio.sleep(0.05)
        yield supervisor
    finally:
        await supervisor.close()
        await engines.close()
        agent.terminate()
        await asyncio.to_thread(agent.wait, 30)


async def measure(args: argparse.Namespace) -> dict[str, object]:
    """Run all rounds; return the figures."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o700)
        script = folder / "script.json"
        script.write_text(json.dumps({"rules": [{"say": "x" * 64, "finish": "length", "delay_ms": args.step_ms}]}))
        async with contextlib.AsyncExitStack() as stack:
            config = config_from_keywords(f"scripted:{script}", {})
            local = await stack.enter_async_context(open_local(config))
            remote = await stack.enter_async_context(open_remote(script, folder))
            fronts = [("local", local), ("remote", remote)]
            for label, front in fronts:
                await run_round(front, f"warm-{label}", args)
                front.figures = Figures()
            for number in range(args.rounds):
                for label, front in fronts if number % 2 else fronts[::-1]:
                    await run_round(front, f"{label}-{number}", args)
    here, there = local.figures, remote.figures
    ratios = [b / a for a, b in zip(here.throughput, there.throughput, strict=True)]
    p50 = statistics.median(here.delays), statistics.median(there.delays)
    return {
        "step_ms": args.step_ms,
        "streams": args.streams,
        "rounds": args.rounds,
        "local_tokens_per_s": round(statistics.median(here.throughput), 1),
        "remote_tokens_per_s": round(statistics.median(there.throughput), 1),
        "throughput_ratio": round(statistics.median(ratios), 4),
        "local_delay_p50_ms": round(p50[0], 3),
        "remote_delay_p50_ms": round(p50[1], 3),
        "added_p50_ms": round(p50[1] - p50[0], 3),
    }


def main() -> int:
    """Measure, and print one line of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--step-ms", type=float, default=10.0, help="time of a step [10]")
    parser.add_argument("--streams", type=int, default=16, help="requests at the same time [16]")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each [64]")
    parser.add_argument("--rounds", type=int, default=8, help="rounds of each front [8]")
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        print(json.dumps(runner.run(measure(parser.parse_args()))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
