"""A fleet of engine processes, recorded while replicas are killed and added: its choices are made again."""

from __future__ import annotations

import os
import random
import signal
from array import array
from dataclasses import replace
from pathlib import Path

import pytest
from tests.engine.fakes import make_request
from tests.fleet.test_replicas import check
from tests.reliability.deaths import FAKE, Load, config, start_fleet, until
from tests.settings import load_config

from octavo.cli import main
from octavo.core.request import Request
from octavo.fleet.fleet_router import FleetRouter
from octavo.fleet.routing_log import replay_routing, routing_logs
from octavo.frontend.engine_supervisor import EngineSupervisor


@pytest.mark.parametrize("name", ["prefix_affinity", "power_of_two"])
async def test_every_choice_of_a_recorded_fleet_is_made_again(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = random.Random(2)

    def arriving(number: int) -> Request:
        ids = array("i", [3 + number % 7, 3, 4, 5, 6][: rng.randrange(2, 6)])  # seven prefixes
        return replace(make_request(f"r{number}", max_tokens=8), prompt_token_ids=ids, session=f"talk{number % 5}")

    router = FleetRouter.from_config(load_config({"record": str(tmp_path), "block_size": 2}), name)
    supervisor = EngineSupervisor(router=router)
    local = await start_fleet(supervisor, config("slow"), 2, FAKE)
    try:
        load = Load(supervisor, arriving, 16)
        await until(lambda: len(load.streams) >= 40)
        victim = supervisor.replicas[rng.randrange(2)]
        assert victim.engine is not None
        os.kill(victim.engine.pid, signal.SIGKILL)
        await until(lambda: len(load.streams) >= 90)
        await local.scale(3)
        await until(lambda: len(load.streams) >= 140)
        await load.stop()
        check(load.streams, load.errors)
    finally:
        await supervisor.close()
        router.close()
    (path,) = routing_logs(tmp_path)
    replay = replay_routing(path)
    assert replay.is_equal and replay.num_choices > replay.num_requests >= 140, replay.difference
    assert main(["replay", str(tmp_path)]) == 0
    assert f"{replay.num_choices:,} of {replay.num_choices:,} choices equal" in capsys.readouterr().out
