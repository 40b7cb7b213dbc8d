"""Recorded fleets, predicted by the tool that docs name: one in virtual time, whose choices and times are known, one
of processes that run a script."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
from tests.fleet.live_fleet import LiveFleet, live_request
from tests.quick import one_in
from tests.simulator.fakes import ConstantCosts, limits
from tools.fidelity import fleet_runs
from tools.fidelity.fleet_runs import FleetSpec

from octavo.fleet.fleet_router import FleetRouter
from octavo.fleet.routing_log import RoutingHeader, RoutingLog, routing_logs
from octavo.observe.recording.format import Header, RecordingError
from octavo.observe.recording.recorder import Recorder
from octavo.simulator.setup import Setup
from octavo.simulator.workloads import Shaping, open_workload

STEP_S = 0.013
SHARED = "poisson:rate=30,prompt=uniform(8,40),output=uniform(4,20),prefix=24,groups=8,group_zipf=1,requests=150"


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """Return what a fleet of two engines recorded in virtual time. Steps take STEP_S; clocks are 3.5 s apart."""
    setup = Setup(limits(), ConstantCosts(STEP_S), replicas=2, router="prefix_affinity")
    fleets: list[LiveFleet] = []
    recorders: list[Recorder] = []

    def clock() -> float:
        return fleets[0].now if fleets else 0.0

    def make_tap(number: int) -> Recorder:
        folder = tmp_path / f"machine-{number}"
        folder.mkdir()
        recorders.append(Recorder(folder, 1 << 24, Header("m", setup.limits, 1, began=3.5 * number), clock))
        return recorders[-1]

    log = RoutingLog(tmp_path / "front", 1 << 20, RoutingHeader("prefix_affinity", 0, 4, 0.0), clock)
    fleet = LiveFleet(setup, FleetRouter("prefix_affinity", 4, 0, log), 0.0, make_tap)
    fleets.append(fleet)
    arrivals = open_workload(SHARED, Shaping(seed=3))
    asyncio.run(fleet.serve([live_request(index, one, 4, 97) for index, one in enumerate(arrivals)]))
    log.close()
    for recorder in recorders:
        recorder.close()
    return tmp_path


def test_a_fleet_whose_step_times_are_known_is_predicted_exactly(recorded: Path) -> None:
    found = fleet_runs.predict_fleet(recorded, warm_up_s=0.0)
    assert len(found.served.replicas) == 150 and found.rest.sum() == 100
    assert (found.served.replicas == found.simulated.replicas).all()
    assert (found.served.replicas == found.asked).all()
    assert (found.served.cached == found.simulated.cached).all() and found.served.cached.sum() > 1000
    assert found.hop.latency_s == pytest.approx(0.0, abs=1e-6)
    for predicted in (found.times.predicted, found.routed, found.direct):
        for name in ("ttft", "tpot", "e2e"):
            assert getattr(predicted, name) == pytest.approx(getattr(found.times.measured, name), abs=1e-4)
    assert found.times.measured.tpot == pytest.approx(STEP_S)
    text = fleet_runs.fleet_verdict({"virtual": found})
    assert "| virtual | 0 ms, spread 0 ms (0 ms) | 74 + 76, 74 + 76 |" in text and "| 100.0 %, 100.0 % |" in text
    assert text.count("+0.0 %, +0.0 %, +0.0 %") == 2


def test_recordings_of_a_part_of_a_fleet_are_refused(recorded: Path) -> None:
    file = next((recorded / "machine-1").glob("*.octrec"))
    file.rename(file.with_suffix(".away"))
    with pytest.raises(RecordingError, match="no recording of a request that replica 1 served"):
        fleet_runs.read_fleet(recorded)
    routing_logs(recorded / "front")[0].unlink()
    with pytest.raises(RecordingError, match="no routing log"):
        fleet_runs.read_fleet(recorded)


@pytest.mark.parametrize("kind", one_in(2, fleet_runs.KINDS_OF_FLEET))
def test_a_fleet_of_processes_is_recorded_and_predicted(kind: str, tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"step_ms": 4, "rules": [{"say": "abc", "finish": "length"}]}))
    spec = FleetSpec(60, 20.0, router="round_robin")  # whose choices depend on no time
    path = fleet_runs.record_fleet(tmp_path, kind, 0, [f"scripted:{script}"], spec)
    assert json.loads((tmp_path / f"{kind}-0.json").read_text())["requests_done"] == 60
    found = fleet_runs.predict_fleet(path, warm_up_s=0.0)
    expected = np.arange(61) % 2  # one was sent to warm up
    for replicas in (found.served.replicas, found.simulated.replicas, found.asked):
        assert replicas.tolist() == expected.tolist()
    assert found.served.cached.sum() > 0
    for times in (found.times.measured, found.times.predicted, found.routed):
        assert len(times.e2e) == 41
        num_tokens = 1 + (times.e2e - times.ttft) / times.tpot  # each is a step; a late first token makes tpot shorter
        assert (times.e2e / num_tokens).min() > 0.004 and times.ttft.min() > 0.004 and (times.e2e > times.ttft).all()
    assert found.hop.latency_s > 0 and found.direct.ttft.mean() < found.times.predicted.ttft.mean()
    assert len(found.times.noises) == 2
