"""A recording as a workload: who came, when, how long, with which keys, is what was recorded; and it can be served."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.observe.recording.driving import RecordedDriver

from octavo.core.limits import Limits
from octavo.observe.recording import open_recording
from octavo.observe.recording.requests import arrivals
from octavo.simulator.costs import Hardware, cost_model
from octavo.simulator.run import simulate
from octavo.simulator.setup import Setup
from octavo.simulator.workloads import open_workload


@pytest.mark.parametrize("seed", [3, 4, 5])
def test_a_recording_is_a_workload_by_its_folder_alone(tmp_path: Path, seed: int) -> None:
    driver = RecordedDriver(seed, check_every=1000)
    driver.drive(60)
    folder = driver.run.write(tmp_path)
    lives: dict[str, int] = {}
    recorded = []
    for one in arrivals(open_recording(folder)):  # once each, also those whose first engine was not recorded
        lives[one.name] = lives.get(one.name, 0) + 1
        if not (one.is_resumed and lives[one.name] > 1):
            recorded.append(one)
    workload = open_workload(str(folder))
    made = list(workload)
    assert made and len(made) == len(recorded)
    first = recorded[0].arrival
    for one, before in zip(made, recorded, strict=True):
        assert one.time == pytest.approx(before.arrival - first)
        assert (one.prompt_tokens, one.tenant, one.priority) == (before.prompt_tokens, before.tenant, before.priority)
        assert one.output_tokens >= max(1, *before.output_tokens)
        assert (tuple(one.keys), one.key_tokens) == (before.keys, before.key_tokens)
    limits = Limits(block_size=16, num_blocks=(4096,), max_model_len=4096, vocab_size=1000)
    run = simulate(workload.arrivals(), Setup(limits, cost_model("roofline", Hardware.of("smollm2-135m", "l4"))))
    assert len(run.outcomes) == len(made)


def test_a_folder_that_is_no_recording_is_refused(tmp_path: Path) -> None:
    from octavo.errors import OctavoError

    with pytest.raises(OctavoError):
        list(open_workload(str(tmp_path)))
