"""Cost models predict a step's time: from data sheets (roofline), operator profiles (table) or a recording (fitted).

Owns: the choice of a cost model by name. Does not: simulate.
"""

from __future__ import annotations

from octavo.config.spelling import unknown
from octavo.errors import ConfigError
from octavo.observe.recording.reader import open_recording
from octavo.simulator.cost_model import CostModel, ScaledCosts
from octavo.simulator.costs.corrected import CorrectedCosts, load_correction
from octavo.simulator.costs.fitted import Fitted, fit_recording, load_fit
from octavo.simulator.costs.hardware import Hardware
from octavo.simulator.costs.roofline import Roofline
from octavo.simulator.costs.table import CostTable, read_table

__all__ = ["Hardware", "cost_model"]

KINDS = ("roofline", "table:DIR", "fitted:FILE.json", "fitted:RECORDING")


def cost_model(name: str = "roofline", hardware: Hardware | None = None) -> CostModel:
    """Return the cost model with this name: one of KINDS. An appended *FACTOR multiplies the step times.

    An appended *FILE.json corrects them: a file of octavo simulate --fit-requests.

    Only the roofline, and a table without a complete profile.json, need `hardware`. Raises ConfigError, RecordingError.
    """
    stem, star, factor = name.rpartition("*")
    if star and factor.endswith(".json"):
        return CorrectedCosts(cost_model(stem, hardware), load_correction(factor))
    if star:
        return ScaledCosts(cost_model(stem, hardware), _read_factor(factor, name))
    kind, _, path = name.partition(":")
    if kind == "roofline" and not path:
        if hardware is None:
            raise ConfigError("cost is 'roofline', which predicts from facts; give a model and a device")
        return Roofline(hardware)
    if kind == "table" and path:
        files = read_table(path)
        return CostTable(files if hardware is None else files.completed(hardware))
    if kind == "fitted" and path:
        return Fitted(load_fit(path) if path.endswith(".json") else fit_recording(open_recording(path)))
    raise ConfigError(unknown("cost", name, KINDS))


def _read_factor(text: str, name: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(
            f"cost is {name!r}: {text!r} is no factor; give a number or a correction's file, as in roofline*1.3"
        ) from None
