"""The warm-up with a real executor: masked rows too, and what comes after is what it would be without."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.engine.warm_up import MAX_PROMPT, warm_up
from tests.reliability.real_engine import DECODERS, RealHarness, make_requests, num_equal, open_executor
from tests.tiny_models import make_tiny_model


@pytest.mark.parametrize("decoder", DECODERS)
def test_requests_after_a_warm_up_say_what_they_would_without(tmp_path: Path, decoder: str) -> None:
    folder = make_tiny_model("llama3", tmp_path / "model", head_dim=32)
    requests = make_requests()
    with RealHarness(open_executor(folder, decoder)) as harness:
        plain = harness.serve(requests)
    harness = RealHarness(open_executor(folder, decoder))
    measured: dict[int, float] = {}

    def measure() -> dict[int, float]:
        measured.update(warm_up(harness.limits, harness.executor, harness.capacity.has_masks, harness.loop.clock.now))
        return measured

    harness.loop.warm_up = measure
    with harness:
        assert harness.capacity.has_masks and harness.loop.wait_warm()
        assert num_equal(plain, harness.serve(requests), with_bits=decoder == "native") == len(requests)
    assert 1 in measured and max(measured) == MAX_PROMPT
