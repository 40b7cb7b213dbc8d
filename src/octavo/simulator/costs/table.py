"""Table: a step's time from operators measured on the device.

Owns: which operators a step runs and how often, and at which sizes. Does not: read files (table_files), or interpolate
(ragged). Each of a layer's operators runs once for all the step's tokens, layernorm twice; embedding and the final norm
once a step; those of per_sequence once a step for all its rows. With several chunks in a step, the longest is looked up
together with the decode rows; each other one adds its own time less that of the smallest chunk.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace

from octavo.errors import ConfigError
from octavo.simulator.cost_model import StepShape
from octavo.simulator.costs.devices import DeviceFacts
from octavo.simulator.costs.models import ModelFacts
from octavo.simulator.costs.ragged import Ragged
from octavo.simulator.costs.skew import Skew
from octavo.simulator.costs.table_files import TableFiles

ONCE = ("embedding", "final_layernorm")
TWICE = ("layernorm",)


class CostTable:
    """A CostModel of measured operators (tensors shared by `profile.tp` devices, as they were measured).

    `decode_s` is as Roofline's; None with skew_fit.csv.
    """

    def __init__(self, files: TableFiles) -> None:
        profile = files.profile
        if not profile.num_layers or (profile.tp > 1 and not profile.hidden_size):
            raise ConfigError(
                f"cost table {files.name!r} does not say num_layers and hidden_size; name a model, or add profile.json"
            )
        if profile.tp > 1 and not profile.all_reduce_bandwidth:
            raise ConfigError(
                f"cost table {files.name!r} is for {profile.tp} devices and does not say what an all-reduce takes; "
                "name a device, or add all_reduce_s and all_reduce_bandwidth to profile.json"
            )
        self.name = f"table:{files.name}"
        self._profile = profile
        self._dense = [(_times(name, profile.num_layers), Ragged(points)) for name, points in files.dense.items()]
        self._per_sequence = [Ragged(points) for points in files.per_sequence.values()]
        points = files.attention
        self._decodes = Ragged({point: time for point, time in points.items() if point[1] and not point[0]})
        self._chunks = Ragged({point: time for point, time in points.items() if point[0] and not point[1]})
        mixed = {point: time for point, time in points.items() if point[0] and point[1]}
        self._mixed = Ragged(mixed) if mixed else None
        self._least_chunk_s = self._chunks.at(1, 0, 0, 0)
        self._skew = Skew(files.skew)
        self._linear: dict[int, float] = {}
        # With shares of skew a step depends on its least length too, which decode_s does not take.
        self.decode_s: Callable[[int, int, int], float] | None = None if files.skew else self._decode_s

    def step_s(self, shape: StepShape) -> float:
        """Return seconds on the device."""
        rows = len(shape.decode_kv) + len(shape.prefills)
        if not rows:
            return self._profile.step_s
        per_row = sum(times.at(rows) for times in self._per_sequence)
        attention = self._profile.num_layers * self._attention_s(shape)
        return self._linear_s(shape.num_tokens) + attention + per_row + self._profile.step_s

    def host_s(self, shape: StepShape) -> float:
        """Return seconds of the host, from the profile."""
        del shape
        return self._profile.host_s

    def _decode_s(self, num_rows: int, kv_sum: int, kv_max: int) -> float:
        del kv_max
        per_row = sum(times.at(num_rows) for times in self._per_sequence)
        attention = self._profile.num_layers * self._decodes.at(0, num_rows, 0, kv_sum / num_rows)
        return self._linear_s(num_rows) + attention + per_row + self._profile.step_s

    def _linear_s(self, tokens: int) -> float:
        """Return seconds of all operators whose time depends on the step's tokens, and of all-reduces."""
        sizes = self._profile.padded_tokens
        if sizes and tokens <= sizes[-1]:
            tokens = sizes[bisect_left(sizes, tokens)]
        time_s = self._linear.get(tokens)
        if time_s is None:
            time_s = sum(count * times.at(tokens) for count, times in self._dense)
            time_s += 2 * self._profile.num_layers * self._reduce_s(tokens)
            self._linear[tokens] = time_s
        return time_s

    def _reduce_s(self, tokens: int) -> float:
        profile = self._profile
        if profile.tp == 1:
            return 0.0
        return profile.all_reduce_s + tokens * profile.hidden_size * 2 / profile.all_reduce_bandwidth

    def _attention_s(self, shape: StepShape) -> float:
        """Return seconds of one layer's attention."""
        chunks = sorted(shape.prefills, reverse=True)
        more_s = sum(max(0.0, self._chunks.at(*_alone(chunk)) - self._least_chunk_s) for chunk in chunks[1:])
        if not shape.decode_kv:
            return self._chunks.at(*_alone(chunks[0])) + more_s
        kv, rows = shape.decode_kv, len(shape.decode_kv)
        count, history = chunks[0] if chunks else (0, 0)
        mean, greatest = sum(kv) / rows, max(kv)
        share = self._skew.share(count, rows, (mean, min(kv), greatest), history)
        time_s = self._met_s(rows, mean, count, history)
        if share:
            time_s += share * max(0.0, self._met_s(rows, greatest, count, history) - time_s)
        return time_s + more_s

    def _met_s(self, rows: int, length: float, count: int, history: int) -> float:
        """Return seconds of decode rows of one length, with a chunk or without."""
        if not count:
            return self._decodes.at(0, rows, 0, length)
        if self._mixed is None:
            return self._decodes.at(0, rows, 0, length) + self._chunks.at(count, 0, history, 0)
        return self._mixed.at(count, rows, history, length)


def _alone(chunk: tuple[int, int]) -> tuple[int, int, int, int]:
    count, history = chunk
    return count, 0, history, 0


def _times(layer: str, num_layers: int) -> int:
    """Return how often an operator runs in a step."""
    if layer in ONCE:
        return 1
    return num_layers * (2 if layer in TWICE else 1)


def completed(files: TableFiles, model: ModelFacts, device: DeviceFacts, tp: int) -> TableFiles:
    """Fill in from facts what a table's profile lacks: the model's sizes, and the device's links for `tp`."""
    known = files.profile
    profile = replace(
        known,
        num_layers=known.num_layers or model.num_layers,
        hidden_size=known.hidden_size or model.hidden_size,
        tp=known.tp if known.tp > 1 else tp,
        all_reduce_s=known.all_reduce_s or device.link_s,
        all_reduce_bandwidth=known.all_reduce_bandwidth or device.link_bandwidth / (2 * (tp - 1) / tp if tp > 1 else 1),
    )
    return replace(files, profile=profile)
