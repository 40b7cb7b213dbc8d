"""Gates: the example of docs/extending.md, as it stands there, holds in a running scheduler."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tests.core.harness import Run, limits, prompt

from octavo.core.plan import EventKind, WaitReason
from octavo.core.request import RequestState

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
