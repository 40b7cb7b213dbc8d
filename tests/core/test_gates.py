"""Gates: the example of docs/extending.md holds in a running scheduler; adapter slots against a list of requests."""

from __future__ import annotations

import random
import re
from array import array
from pathlib import Path
from typing import Any

import pytest
from tests.core.harness import Run, limits, prompt

from octavo.core.gates import AdapterSlots
from octavo.core.plan import EventKind, WaitReason
from octavo.core.policy import POLICIES
from octavo.core.request import Request
from octavo.core.request_state import RequestState
from octavo.errors import InvariantError

PAGE = Path(__file__).resolve().parents[2] / "docs" / "extending.md"


def tenant_gate() -> Any:
    """The class of the page."""
    code = re.search(r"```python\n(class TenantGate.*?)```", PAGE.read_text(), re.DOTALL)
    assert code is not None
    names: dict[str, Any] = {"WaitReason": WaitReason, "RequestState": RequestState}
    exec(code[1], names)
    return names["TenantGate"]


def test_S03_a_gate_of_ones_own_bounds_what_runs_and_gives_back() -> None:
    run = Run(limits(num_blocks=40, policy="fifo"))
    state = run.scheduler._state
    gate = tenant_gate()(1)
    state.gates = (*state.gates, gate)
    first = run.admit(prompt(5, 1), 4, tenant="a")
    second = run.admit(prompt(5, 2), 4, tenant="a")
    other = run.admit(prompt(5, 3), 4, tenant="b")
    run.step()
    assert [entry.name for entry in state.running.requests] == ["r0", "r2"]
    assert second.of_kind(EventKind.DEFERRED)[0].reason == WaitReason.SEQUENCE_CAP
    run.finish()
    assert all(record.finished for record in (first, second, other)) and not any(gate._running.values())


@pytest.mark.parametrize("policy", POLICIES)
def test_S10_a_tenant_at_its_limit_blocks_no_other_and_has_its_turn(policy: str) -> None:
    run = Run(limits(num_blocks=60, policy=policy, max_bypass=2, max_sequences=4))
    state = run.scheduler._state
    state.gates = (tenant_gate()(1),)
    run.is_ordered = run.checks.has_fixed_order = False  # requests at the gate are passed without a bound
    long = run.admit(prompt(5, 1), 50, tenant="a")
    run.steps(2)
    held = [run.admit(prompt(5, 100 + number), 2, tenant="a") for number in range(70)]  # more than are looked past
    for number in range(12):
        other = run.admit(prompt(5, 2 + number), 3, tenant=f"b{number}")
        run.steps(3)
        assert other.of_kind(EventKind.ADMITTED), f"request {number} of another tenant waits"
        if number == 0 and not long.finished:
            state.requests[held[0].request.request_id].num_bypassed = 2  # as after bypasses for another reason: overdue
            state.overdue.append(state.requests[held[0].request.request_id])
    assert not long.finished and not any(one.of_kind(EventKind.ADMITTED) for one in held)
    assert run.scheduler._state.totals.num_bypasses == 0
    explained = run.scheduler.explain(held[1].request.request_id)
    assert explained is not None and explained.reason == WaitReason.SEQUENCE_CAP
    run.finish_all()
    assert all(one.finished for one in (long, *held))


def test_S10_a_gate_that_is_not_passable_holds_back_all_after_max_bypass() -> None:
    run = Run(limits(num_blocks=60, max_bypass=2, adapter_slots=1))
    run.is_ordered = False
    first = run.admit(prompt(5, 1), 40, adapter_id=1)
    run.step()
    second = run.admit(prompt(5, 2), 4, adapter_id=2)
    others = []
    for number in range(4):
        others.append(run.admit(prompt(5, 3 + number), 2))
        run.steps(2)
    admitted = [bool(one.of_kind(EventKind.ADMITTED)) for one in others]
    assert admitted == [True, True, False, False] and not second.of_kind(EventKind.ADMITTED) and not first.finished
    run.finish_all()


def using(adapter_id: int) -> RequestState:
    """A request that uses an adapter."""
    return RequestState(Request("r", array("i", [1]), adapter_id=adapter_id), 0)


def fits(slots: AdapterSlots, adapter_id: int) -> bool:
    return slots.lack(using(adapter_id)) is None


def test_the_base_model_takes_no_slot() -> None:
    slots = AdapterSlots(0)
    assert fits(slots, 0)
    slots.take(using(0))
    slots.give_back(using(0))
    assert slots.num_used == 0


def test_X05_requests_of_one_adapter_share_its_slot_until_the_last_leaves() -> None:
    slots = AdapterSlots(1)
    slots.take(using(7))
    assert fits(slots, 7) and not fits(slots, 8)
    slots.take(using(7))
    slots.give_back(using(7))
    assert not fits(slots, 8)
    slots.give_back(using(7))
    assert fits(slots, 8) and slots.num_used == 0


def test_no_adapter_fits_an_engine_without_slots() -> None:
    assert not fits(AdapterSlots(0), 1)


def test_taking_beyond_the_limit_and_giving_back_twice_raise_and_change_nothing() -> None:
    slots = AdapterSlots(1)
    slots.take(using(3))
    with pytest.raises(InvariantError, match="adapter 4"):
        slots.take(using(4))
    with pytest.raises(InvariantError, match="adapter 4"):
        slots.give_back(using(4))
    assert slots.num_used == 1
    slots.give_back(using(3))
    with pytest.raises(InvariantError, match="adapter 3"):
        slots.give_back(using(3))


@pytest.mark.parametrize("seed", range(10))
def test_slots_agree_with_a_list_of_those_who_run(seed: int) -> None:
    rng = random.Random(seed)
    slots, running = AdapterSlots(rng.randrange(4)), []
    for _ in range(500):
        adapter = rng.randrange(6)
        in_use = {other for other in running if other}
        assert slots.num_used == len(in_use)
        assert fits(slots, adapter) == (adapter == 0 or adapter in in_use or len(in_use) < slots.limit)
        if running and rng.random() < 0.5:
            slots.give_back(using(running.pop(rng.randrange(len(running)))))
        elif fits(slots, adapter):
            slots.take(using(adapter))
            running.append(adapter)
