"""The instruction sets of the C++ kernels that this machine has, and a fixture that runs a test with each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from octavo.ops import cpu

BEST = cpu.status().isa  # "" without the kernels
ISAS = cpu.ISA_NAMES[: cpu.ISA_NAMES.index(BEST) + 1] if BEST else ()


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Kernels of this instruction set, for a test."""
    assert cpu.use_isa(request.param) == request.param
    yield request.param
    cpu.use_isa(BEST)
