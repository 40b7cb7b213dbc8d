"""Cost models: how long a step takes, from facts (roofline), from operator profiles (table), from a recording (fitted).

Owns: choosing one by its name. Does not: simulate.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from octavo.config.spelling import unknown
from octavo.errors import ConfigError
from octavo.simulator.cost_model import CostModel
from octavo.simulator.costs.devices import DeviceFacts, device_facts
from octavo.simulator.costs.fitted import Fitted, fit_recording, load_fit
from octavo.simulator.costs.memory import pool_blocks
from octavo.simulator.costs.models import ModelFacts, model_facts
from octavo.simulator.costs.roofline import Roofline
from octavo.simulator.costs.scaled import Scaled
from octavo.simulator.costs.table import CostTable, completed
from octavo.simulator.costs.table_files import read_table

__all__ = ["DeviceFacts", "Hardware", "ModelFacts", "cost_model", "device_facts", "model_facts", "pool_blocks"]

KINDS = ("roofline", "table:DIR", "fitted:FILE.json", "fitted:RECORDING")


@dataclass(frozen=True, slots=True)
class Hardware:
    """The hardware of a replica: a model on `tp` devices, with blocks of `block_size` tokens."""

    model: ModelFacts
    device: DeviceFacts
    tp: int = 1
    block_size: int = 16

    @staticmethod
    def of(model: str, device: str, tp: int = 1, block_size: int = 16) -> Hardware:
        """Look both up by name. Raises ConfigError naming the known ones."""
        return Hardware(model_facts(model), device_facts(device), tp, block_size)

    def pool_blocks(self, max_batch_tokens: int = 2048, memory_share: float = 0.9) -> int:
        """Return the number of KV blocks that fit (see memory.pool_blocks)."""
        return pool_blocks(
            self.model, self.device, self.tp,
            block_size=self.block_size, max_batch_tokens=max_batch_tokens, memory_share=memory_share,
        )  # fmt: skip


def cost_model(spec: str = "roofline", hardware: Hardware | None = None) -> CostModel:
    """Return the cost model that `spec` names: one of KINDS, with *FACTOR appended for slower or faster steps.

    Raises ConfigError, RecordingError.
    Only the roofline and a table need hardware; a table with a complete profile.json does not.
    """
    stem, star, factor = spec.rpartition("*")
    if star:
        return Scaled(cost_model(stem, hardware), _factor(factor, spec))
    kind, _, where = spec.partition(":")
    if kind == "roofline" and not where:
        if hardware is None:
            raise ConfigError("cost is 'roofline', which predicts from facts; give a model and a device")
        return Roofline(hardware.model, hardware.device, hardware.tp, block_size=hardware.block_size)
    if kind == "table" and where:
        files = read_table(where)
        known = hardware
        return CostTable(completed(files, known.model, known.device, known.tp) if known is not None else files)
    if kind == "fitted" and where:
        path = Path(where)
        return Fitted(load_fit(path) if path.suffix == ".json" else fit_recording(path))
    raise ConfigError(unknown("cost", spec, KINDS))


def _factor(text: str, spec: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"cost is {spec!r}: {text!r} is no factor; give a number, as in roofline*1.3") from None
