"""The scheduler's statistics against what was submitted."""

from __future__ import annotations

import json
from array import array
from dataclasses import asdict

from tests.core.harness import limits

from octavo.core.plan import WaitReason
from octavo.core.request import Request, SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.core.snapshots import read_statistics
from octavo.core.state import Totals


def test_T06_a_snapshot_tells_totals_and_who_waits_for_what() -> None:
    scheduler = Scheduler(limits())
    for index in range(3):
        scheduler.admit(Request(f"r{index}", array("i", [5, 6, 7, 8 + index]), SamplingParams(max_tokens=2)), 0.0)
    before = read_statistics(scheduler._state)
    assert (before.num_requests, before.num_waiting, before.num_running) == (3, 3, 0)
    assert before.waiting_by_reason == {"behind": 3}, "nobody was told a reason yet"
    values = json.loads(json.dumps(asdict(before)))
    assert {"num_swapped", "num_host_blocks", "num_host_blocks_used", "num_policy_errors", "finished"} <= set(values)
    entries = list(scheduler._state.requests.values())
    entries[0].wait_reason = WaitReason.KV_BLOCKS
    entries[1].wait_reason = WaitReason.SEQUENCE_CAP
    assert read_statistics(scheduler._state).waiting_by_reason == {"sequence_cap": 1, "kv_blocks": 1, "behind": 1}
    scheduler.cancel(["r0", "r1"], 1.0)
    after = read_statistics(scheduler._state)
    assert (after.num_requests, after.num_waiting, after.finished["cancelled"]) == (3, 1, 2)


def test_T06_every_total_of_the_state_is_in_the_snapshot() -> None:
    scheduler = Scheduler(limits())
    names = [name for name in Totals.__slots__ if name != "finished"]
    for value, name in enumerate(names, 1):
        setattr(scheduler._state.totals, name, value)
    found = read_statistics(scheduler._state)
    assert {name: getattr(found, name) for name in names} == dict(zip(names, range(1, len(names) + 1), strict=True))


def test_T06_a_policy_that_fails_is_counted() -> None:
    scheduler = Scheduler(limits())
    policy = scheduler._state.policy
    policy.num_errors, policy.first_error = 2, "ValueError: no"
    found = read_statistics(scheduler._state)
    assert (found.num_policy_errors, found.first_policy_error) == (2, "ValueError: no")
