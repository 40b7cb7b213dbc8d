"""A front with replicas on Ray, for row 32: it runs in the network namespace of the cluster's head.

Usage: ray_front.py FAULT FOLDER HOST. Owns: the replicas, the load, the moment of the fault; figures as a line of JSON.
Does not: make namespaces or start Ray. The fault itself is a command on stdin's first line, run by a shell.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from array import array
from pathlib import Path

from octavo.config.sources import config_from_keywords
from octavo.core.request import FinishReason, Request, SamplingParams
from octavo.executors.protocol import Fingerprint
from octavo.fleet.fleet_router import FleetRouter
from octavo.fleet.providers.ray import RayProvider
from octavo.fleet.providers.ray_replicas import RayReplicas, replica_spec
from octavo.fleet.remote_engines import FrontModel, RemoteEngines
from octavo.fleet.security import HostPort, LinkSecurity
from octavo.frontend.engine_supervisor import EngineSupervisor
from tests.reliability.deaths import Stream, follow, quantile, until

TOKEN = "a token of row 32, long enough"
NUM_PROMPTS = 25


def make_request(number: int) -> Request:
    """A request whose answer depends on its prompt: without a rule that matches, a script echoes it.

    Their lengths differ, so that streams do not begin and end together.
    """
    text = f"request {number % NUM_PROMPTS} " * 8
    prompt = array("i", [3 + byte for byte in text.encode()])
    params = SamplingParams(max_tokens=40 + 2 * (number % NUM_PROMPTS), temperature=0.0, seed=1, ignore_eos=True)
    return Request(f"r{number}", prompt, params, arrival=asyncio.get_running_loop().time())


async def main(folder: Path, host: str, commands: dict[str, str], num_requests: int, width: int) -> dict[str, object]:
    """Serve the requests, with the fault when a third has ended; return what happened to them."""
    supervisor = EngineSupervisor(awaits_replicas=True, router=FleetRouter("least_requests"))
    security = LinkSecurity(folder, TOKEN.encode())

    def fingerprint() -> Fingerprint:
        capacity = getattr(supervisor, "capacity", None)
        return Fingerprint() if capacity is None else capacity.fingerprint

    engines = RemoteEngines(lambda model: FrontModel(supervisor, fingerprint), security)
    address = await engines.listen(HostPort(host, 0))
    notices: list[str] = []
    provider = await RayProvider.connect("row32", f"{host}:6399", notices.append)
    config = config_from_keywords(f"scripted:{folder / 'script.yaml'}", {"max_num_seqs": 32})
    replicas = RayReplicas(supervisor, provider, replica_spec(config, str(address), TOKEN))
    try:
        await replicas.scale(2)
        whole = [await follow(supervisor, make_request(number)) for number in range(NUM_PROMPTS, 2 * NUM_PROMPTS)]
        streams: list[Stream] = []
        errors: list[str] = []
        numbers = iter(range(1000, 1000 + num_requests))

        async def work() -> None:
            for number in numbers:
                try:
                    streams.append(await follow(supervisor, make_request(number)))
                except Exception as error:
                    errors.append(f"{type(error).__name__}: {error}")

        workers = [asyncio.create_task(work()) for _ in range(width)]
        await until(lambda: len(streams) + len(errors) >= num_requests // 3, 300.0)
        at = time.monotonic()
        await asyncio.to_thread(subprocess.run, ["sh", "-c", commands["fault"]], check=True)
        await until(lambda: len(supervisor.replicas) < 2 or engines.num_engines < 2, 60.0)
        noticed_s = time.monotonic() - at
        await asyncio.gather(*workers)
        rejoined_s = None
        if commands["heal"]:
            healed_at = time.monotonic()
            await asyncio.to_thread(subprocess.run, ["sh", "-c", commands["heal"]], check=True)
            await until(lambda: engines.num_engines == 2, 120.0)
            rejoined_s = time.monotonic() - healed_at
        gaps = [gap for stream in streams if (gap := stream.longest_gap(at)) is not None]
        right = {bytes(stream.request.prompt_token_ids or b""): stream.ids for stream in whole}
        return {
            "requests": num_requests,
            "lost": len(errors) + sum(stream.reason is not FinishReason.LENGTH for stream in streams),
            "misplaced": sum(stream.num_misplaced for stream in streams),
            "equal": sum(right[bytes(s.request.prompt_token_ids or b"")] == s.ids for s in streams),
            "resumed": supervisor.report()["resumed_requests"],
            "open_at_fault": len(gaps),
            "gap_p99_s": quantile(gaps, 0.99),
            "noticed_s": noticed_s,
            "rejoined_s": rejoined_s,
            "errors": errors[:3],
            "notices": notices,
        }
    finally:
        await provider.close()
        await supervisor.close()
        await engines.close()


if __name__ == "__main__":
    line = json.loads(sys.stdin.readline())
    figures = asyncio.run(main(Path(line["folder"]), line["host"], line, line["requests"], line["width"]))
    print(json.dumps(figures), flush=True)
