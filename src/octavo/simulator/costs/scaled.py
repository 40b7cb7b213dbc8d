"""Scaled: another cost model's times, multiplied and shifted.

Owns: that. Does not: find the numbers (the caller compares with measurements).
"""

from __future__ import annotations

from collections.abc import Callable

from octavo.errors import ConfigError
from octavo.simulator.cost_model import CostModel, StepShape


class Scaled:
    """A CostModel whose steps take `factor` times the other's and `step_s` seconds more."""

    def __init__(self, costs: CostModel, factor: float, step_s: float = 0.0) -> None:
        if not 0 < factor < 1e6:
            raise ConfigError(f"cost factor is {factor}; give a number above 0, such as 1.05")
        self.name = f"{costs.name}*{factor:g}"
        self._costs = costs
        self._factor = factor
        self._added = step_s
        self._inner: Callable[[int, int, int], float] | None = getattr(costs, "decode_s", None)
        self.decode_s: Callable[[int, int, int], float] | None = self._decode_s if self._inner is not None else None

    def step_s(self, shape: StepShape) -> float:
        """Return seconds on the device."""
        return max(0.0, self._costs.step_s(shape) * self._factor + self._added)

    def host_s(self, shape: StepShape) -> float:
        """Return seconds of the host, which are the other model's."""
        return self._costs.host_s(shape)

    def _decode_s(self, num_rows: int, kv_sum: int, kv_max: int) -> float:
        assert self._inner is not None
        return max(0.0, self._inner(num_rows, kv_sum, kv_max) * self._factor + self._added)
