"""CorrectedCosts: another cost model's step times, corrected by factors and constants that measured requests gave.

Owns: a correction's terms, its file, its use as a CostModel. Does not: fit one (simulator.correction does).
A step's corrected time is its time times the factor of its kind, and constants. A step's kind is its band of batch size
(BANDS) and whether it has chunks of prompts. One constant is added to every step, one to each step of more than
`large_tokens` tokens: no captured graph has these, so that the launches of their kernels may count.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError
from octavo.simulator.cost_model import CostModel, StepParts, StepShape, TimeFloor
from octavo.simulator.costs.fitted import VERSION, load_json

BANDS = (16, 64)  # the largest number of rows in each band of batch size; the last band has no end
NUM_KINDS = 2 * (len(BANDS) + 1)  # of steps: for each band, decode rows only, then with chunks
NUM_TERMS = NUM_KINDS + 2
UNTOUCHED = (1.0,) * NUM_KINDS


@dataclass(frozen=True, slots=True)
class Correction:
    """A correction of the cost model named `costs`. `form` says which terms were fitted; "none" changes nothing.

    `factors` has one factor for each kind of step, `step_s` and `large_step_s` are seconds. `source` names the measured
    requests, of which `num_requests` were used. `reason` says why this form was chosen.
    """

    costs: str
    source: str
    num_requests: int
    form: str
    reason: str
    factors: tuple[float, ...] = UNTOUCHED
    step_s: float = 0.0
    large_step_s: float = 0.0
    large_tokens: int = 0

    @property
    def is_used(self) -> bool:
        """Return True if the correction changes step times."""
        return self.form != "none"

    @property
    def terms(self) -> tuple[float, ...]:
        """Return the prices of a step's features."""
        return (*self.factors, self.step_s, self.large_step_s)

    def as_json(self) -> str:
        """Return the correction as JSON text."""
        return json.dumps({"version": VERSION, **asdict(self)}, indent=1)


def load_correction(path: Path | str) -> Correction:
    """Read a correction's JSON. Raises ConfigError naming the file and the fault."""
    return load_json(path, _correction_of, "correction", "--fit-requests")


def _correction_of(values: dict[str, Any]) -> Correction:
    correction = Correction(**values | {"factors": tuple(map(float, values["factors"]))})
    if len(correction.factors) != NUM_KINDS or min(map(float, correction.terms)) < 0:
        raise ValueError(f"give {NUM_KINDS} factors, and no value below 0")
    return correction


def features(shape: StepShape, step_s: float, large_tokens: int) -> list[float]:
    """Return a step's features: its time at its kind's place, then 1, then 1 if it is large."""
    values = [0.0] * NUM_TERMS
    decodes, chunks = len(shape.decode_kv), len(shape.prefills)
    if decodes + chunks:
        values[_kind(decodes, chunks)] = step_s
        values[NUM_KINDS:] = [1.0, float(0 < large_tokens < _most_tokens(shape))]
    return values


def _kind(decodes: int, chunks: int) -> int:
    return 2 * bisect_left(BANDS, decodes + chunks) + (chunks > 0)


def _most_tokens(shape: StepShape) -> int:
    """Return the most tokens that a rank of the step has: all are padded to one captured size, or none is."""
    return max(shape.num_tokens, *shape.peer_tokens) if shape.peer_tokens else shape.num_tokens


class CorrectedCosts(CostModel):
    """A CostModel: another one's device times, corrected. Steps without rows, and host times, are the other model's."""

    def __init__(self, costs: CostModel, correction: Correction) -> None:
        if costs.name != correction.costs:
            raise ConfigError(
                f"the correction by {correction.source} is of {correction.costs}, and the cost model is {costs.name}; "
                "make another with octavo simulate --fit-requests"
            )
        self.name = f"{costs.name} {'corrected' if correction.is_used else 'not corrected'} by {correction.source}"
        self.correction = correction
        self._costs = costs
        self.decode_s = None if costs.decode_s is None else self._decode_s

    def step_s(self, shape: StepShape) -> float:
        """Return seconds on the device."""
        step_s = self._costs.step_s(shape)
        decodes, chunks = len(shape.decode_kv), len(shape.prefills)
        return self._corrected(step_s, decodes, chunks, _most_tokens(shape)) if decodes + chunks else step_s

    def host_s(self, shape: StepShape) -> float:
        """Return the other model's seconds."""
        return self._costs.host_s(shape)

    def parts(self, shape: StepShape) -> StepParts:
        """Return the other model's parts times the factor, and the constants; the FLOP of a step stay the same."""
        parts, correction = self._costs.parts(shape), self.correction
        decodes, chunks = len(shape.decode_kv), len(shape.prefills)
        factor = correction.factors[_kind(decodes, chunks)] if decodes + chunks else 1.0
        seconds = {name: time_s * factor for name, time_s in parts.seconds.items()}
        if correction.step_s or correction.large_step_s:
            constant = self._corrected(0.0, decodes, chunks, _most_tokens(shape)) if decodes + chunks else 0.0
            seconds["correction"] = constant
        return StepParts(seconds, parts.compute_s)

    def floors(self, max_tokens: int) -> tuple[TimeFloor, ...]:
        """Return the other model's floors times the least factor, with the constant of every step."""
        factor, step_s = min(self.correction.factors), self.correction.step_s
        scaled = (TimeFloor(*(factor * time_s for time_s in one)) for one in self._costs.floors(max_tokens))
        return tuple(one._replace(fixed_s=one.fixed_s + step_s) for one in scaled)

    def _corrected(self, step_s: float, decodes: int, chunks: int, tokens: int) -> float:
        correction = self.correction
        time_s = step_s * correction.factors[_kind(decodes, chunks)] + correction.step_s
        return time_s + correction.large_step_s if 0 < correction.large_tokens < tokens else time_s

    def _decode_s(self, num_rows: int, kv_sum: int) -> float:
        assert self._costs.decode_s is not None
        return self._corrected(self._costs.decode_s(num_rows, kv_sum), num_rows, 0, num_rows)
