"""CostTable: predicts a step's time from operator times measured on the device.

Owns: finding and reading a table's files; interpolation; which operators a step runs, and how often.
Does not: parse rows (rows), or know facts of models and devices (hardware).
A table is FOLDER or FOLDER/PREFIX: [PREFIX]dense.csv, per_sequence.csv and attention.csv, optionally moe.csv,
skew_fit.csv and profile.json, each plain or .gz. docs/simulating.md describes the columns.
A step runs each operator of a layer once per layer for all tokens (layernorm twice), and embedding, the final norm and
the per_sequence operators once. If a step has several chunks, the longest chunk is looked up together with the decode
rows; each other chunk adds its own time minus the smallest chunk's time.
The experts of moe.csv take the tokens of all data-parallel ranks. Each of the `ep` devices with whole experts computes
its share of them: tokens / ep of full choices, over the expected number of its experts that the tokens use. Before,
every rank gathers the other ranks' tokens, and after, it gives their results back (all-gather and reduce-scatter).
"""

from __future__ import annotations

import gzip
import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from octavo.errors import ConfigError
from octavo.simulator.cost_model import CostModel, StepParts, StepShape, TimeFloor, token_floors
from octavo.simulator.costs.hardware import Hardware, expected_experts
from octavo.simulator.rows import FileRow, csv_rows

MAX_ROWS = 1 << 22  # maximum rows of one file
MAX_PROFILE_BYTES = 1 << 20
ONCE = ("embedding", "final_layernorm")
TWICE = ("layernorm",)
ATTENTION_COLUMNS = ("prefill_chunk", "n_decode", "kv_prefill", "kv_decode")
SKEW_LABELS = ("n_label", "skew_rate_label", "kv_big_label", "kp_label")
_LABEL = re.compile(r"[a-zA-Z]+(?P<relation><=|=|>)(?P<bound>\d+)(?P<unit>[k%]?)")
_UNITS = {"": 1.0, "k": 1024.0, "%": 0.01}
Times = Mapping[tuple[int, ...], float]  # sizes -> seconds


@dataclass(frozen=True, slots=True)
class Profile:
    """The fields of a table's profile.json, all optional.

    `num_layers` and `hidden_size` are the model's, and required if the user names no model. `padded_tokens` lists the
    sizes to which steps are padded (captured graphs); larger steps are not padded. One all-reduce of b bytes over `tp`
    devices takes all_reduce_s + b / all_reduce_bandwidth (bytes/s). `step_s` is a step's overhead between operators,
    `host_s` a step's host time. A token uses `active_experts` of `num_experts` experts, which are divided over `ep`
    devices. One exchange, in which a rank gets or gives b bytes of other ranks, takes exchange_s + b /
    exchange_bandwidth.
    """

    num_layers: int = 0
    hidden_size: int = 0
    tp: int = 1
    padded_tokens: tuple[int, ...] = ()
    all_reduce_s: float = 0.0
    all_reduce_bandwidth: float = 0.0
    step_s: float = 0.0
    host_s: float = 0.0
    num_experts: int = 0
    active_experts: int = 0
    ep: int = 1
    exchange_s: float = 0.0
    exchange_bandwidth: float = 0.0


@dataclass(frozen=True, slots=True)
class TableFiles:
    """The contents of a table's files: operator times by name and size, and attention times by four sizes.

    `experts` has one layer's times by tokens and activated experts; empty for a dense model.
    """

    name: str
    dense: Mapping[str, Times]
    per_sequence: Mapping[str, Times]
    attention: Times
    experts: Times = field(default_factory=dict)
    skew: Sequence[FileRow] = ()
    profile: Profile = field(default_factory=Profile)

    def completed(self, hardware: Hardware) -> TableFiles:
        """Return a copy with missing profile fields (the model's sizes, the device's links) filled in."""
        known, device, tp, model = self.profile, hardware.device, hardware.tp, hardware.model
        if model.num_experts and not self.experts:
            raise ConfigError(
                f"cost table {self.name!r} has no moe.csv, and {model.name} has {model.num_experts} experts; give the "
                "profile of this model"
            )
        if self.experts and hardware.dp > 1 and not hardware.is_expert_parallel:
            raise ConfigError(
                f"cost table {self.name!r} has times of whole experts, and {hardware.dp} ranks hold slices of them; "
                "give --enable-expert-parallel"
            )
        moved = 2 * (tp - 1) / tp if tp > 1 else 1  # transfers per byte of a ring all-reduce
        profile = replace(
            known,
            num_layers=known.num_layers or model.num_layers,
            hidden_size=known.hidden_size or model.hidden_size,
            tp=known.tp if known.tp > 1 else tp,
            all_reduce_s=known.all_reduce_s or device.link_s,
            all_reduce_bandwidth=known.all_reduce_bandwidth or device.link_bandwidth / moved,
            num_experts=known.num_experts or model.num_experts,
            active_experts=known.active_experts or model.active_experts,
            ep=known.ep if known.ep > 1 else hardware.expert_ranks,
            exchange_s=known.exchange_s or device.link_s,
            exchange_bandwidth=known.exchange_bandwidth or device.link_bandwidth,
        )
        return replace(self, profile=profile)


def read_table(path: str) -> TableFiles:
    """Read a table. Raises ConfigError naming the file, the line and the fault."""
    attention = {
        tuple(map(row.count, ATTENTION_COLUMNS)): _seconds(row)
        for row in _rows(path, "attention.csv", (*ATTENTION_COLUMNS, "time_us"))
    }
    if not any(decodes for _, decodes, _, _ in attention):
        raise ConfigError(f"cost table {path!r}: attention.csv has no row with n_decode of 1 or more")
    if not any(chunk for chunk, _, _, _ in attention):
        raise ConfigError(f"cost table {path!r}: attention.csv has no row with a prefill_chunk of 1 or more")
    experts: dict[tuple[int, ...], float] = {}
    if _find(path, "moe.csv") is not None:
        experts = {
            (row.count("tokens"), row.count("activated_experts")): _seconds(row)
            for row in _rows(path, "moe.csv", ("tokens", "activated_experts", "time_us"))
        }
        if not experts:
            raise ConfigError(f"cost table {path!r}: moe.csv has no rows")
    has_skew = _find(path, "skew_fit.csv") is not None
    return TableFiles(
        Path(path).name,
        _by_layer(path, "dense.csv", "tokens"),
        _by_layer(path, "per_sequence.csv", "sequences"),
        attention,
        experts,
        _rows(path, "skew_fit.csv", ("pc", *SKEW_LABELS, "alpha", "n_samples")) if has_skew else (),
        _read_profile(path),
    )


def _find(path: str, file: str) -> Path | None:
    for candidate in (Path(path) / file, Path(f"{path}{file}"), Path(f"{path}__{file}")):
        for file_path in (candidate, candidate.with_name(f"{candidate.name}.gz")):
            if file_path.is_file():
                return file_path
    return None


def _rows(path: str, file: str, columns: Sequence[str]) -> list[FileRow]:
    file_path = _find(path, file)
    if file_path is None:
        raise ConfigError(f"cost table {path!r}: no {file} or {file}.gz there, in the folder or after the prefix")
    rows: list[FileRow] = []
    for row in csv_rows(file_path, columns):
        if len(rows) == MAX_ROWS:
            raise ConfigError(f"{file_path}: more than {MAX_ROWS} rows; a table of operators is smaller")
        rows.append(row)
    return rows


def _by_layer(path: str, file: str, size: str) -> dict[str, dict[tuple[int, ...], float]]:
    layers: dict[str, dict[tuple[int, ...], float]] = {}
    for row in _rows(path, file, ("layer", size, "time_us")):
        layers.setdefault(row.text("layer"), {})[(row.count(size),)] = _seconds(row)
    if not layers:
        raise ConfigError(f"cost table {path!r}: {file} has no rows")
    return layers


def _seconds(row: FileRow) -> float:
    return row.number("time_us", min_value=0.0, max_value=1e12) * 1e-6


def _read_profile(path: str) -> Profile:
    file_path = _find(path, "profile.json")
    if file_path is None:
        return Profile()
    try:
        with gzip.open(file_path) if file_path.suffix == ".gz" else file_path.open("rb") as file:
            values = json.loads(file.read(MAX_PROFILE_BYTES))
    except (OSError, EOFError, ValueError) as error:
        raise ConfigError(f"{file_path}: {error}") from error
    known = {entry.name for entry in fields(Profile)}
    if not isinstance(values, dict) or not known >= set(values):
        raise ConfigError(f"{file_path}: give an object of {', '.join(sorted(known))}")
    padded = values.pop("padded_tokens", [])
    numbers = [*values.values(), *(padded if isinstance(padded, list) else [None])]
    if not all(isinstance(number, (int, float)) and not isinstance(number, bool) and number >= 0 for number in numbers):
        raise ConfigError(f"{file_path}: every value is a number of 0 or more, padded_tokens a list of them")
    return Profile(**values, padded_tokens=tuple(sorted(int(size) for size in padded)))


class Interpolator:
    """A piecewise linear function of several coordinates, built from {point: value}.

    The points need not form a full grid: each value on one axis has its own values on the next axis, so sweeps of
    different densities may be mixed. Below an axis, the first value is used; above it, the last two are extrapolated.
    """

    def __init__(self, points: Times) -> None:
        assert points, "a table without points"
        self._root = _tree(sorted(points.items()), 0)

    def at(self, *point: float) -> float:
        """Return the function's value at a point, never below 0."""
        return max(0.0, _value(self._root, point, 0))


class _Node:
    __slots__ = ("children", "keys")

    def __init__(self, keys: list[int], children: list[_Node | float]) -> None:
        self.keys = keys
        self.children = children


def _tree(points: Sequence[tuple[tuple[int, ...], float]], axis: int) -> _Node:
    """Build the tree of sorted points that agree in all coordinates before `axis`."""
    groups: dict[int, list[tuple[tuple[int, ...], float]]] = {}
    for point, value in points:
        groups.setdefault(point[axis], []).append((point, value))
    is_last = axis + 1 == len(points[0][0])
    return _Node(list(groups), [group[0][1] if is_last else _tree(group, axis + 1) for group in groups.values()])


def _value(node: _Node | float, point: tuple[float, ...], axis: int) -> float:
    if isinstance(node, float):
        return node
    keys, wanted = node.keys, point[axis]
    if len(keys) == 1 or wanted <= keys[0]:
        return _value(node.children[0], point, axis + 1)
    right = min(bisect_right(keys, wanted), len(keys) - 1)
    low, high = keys[right - 1], keys[right]
    left = _value(node.children[right - 1], point, axis + 1)
    if wanted == low:
        return left
    return left + (wanted - low) / (high - low) * (_value(node.children[right], point, axis + 1) - left)


class Skew:
    """The extra cost of decode rows with unequal lengths.

    The time is t_mean + a (t_max - t_mean), where t_mean and t_max are the times if all rows had the mean or the
    greatest length, and a is between 0 and 1. LLMServingSim's profiler (Cho et al., IISWC 2024; docs on skew) fits a
    for buckets of: the chunk's tokens, the number of rows, (mean - least) / (greatest - least), the greatest length,
    and the chunk's history. Without rows in skew_fit.csv there is no correction.
    """

    def __init__(self, rows: Iterable[FileRow]) -> None:
        self._shares: dict[tuple[float, ...], float] = {}
        bounds: list[set[float]] = [set() for _ in range(len(SKEW_LABELS) + 1)]
        total = weight = 0.0
        for row in rows:
            key = (row.number("pc"), *(_read_label(row, name) for name in SKEW_LABELS))
            share = min(1.0, max(0.0, row.number("alpha")))
            self._shares[key] = share
            for known, bound in zip(bounds, key, strict=True):
                known.add(bound)
            total += share * row.count("n_samples")
            weight += row.count("n_samples")
        self._bounds = [sorted(known) for known in bounds]
        self._default = total / weight if weight else 0.0

    def share(self, chunk: int, rows: int, kv: tuple[float, int, int], history: float) -> float:
        """Return a for a step. `kv` has the decode rows' mean, shortest and longest length."""
        mean, shortest, longest = kv
        if not self._shares or rows < 2 or shortest == longest:
            return 0.0
        rate = (mean - shortest) / (longest - shortest)
        key = tuple(map(_bucket, self._bounds, (chunk, rows, rate, longest, history)))
        return self._shares.get(key, self._default)


def _read_label(row: FileRow, name: str) -> float:
    """Return the upper bound of a bucket's label; infinity for the overflow bucket."""
    match = _LABEL.fullmatch(row.text(name))
    if match is None:
        raise row.fault(name, "give a label such as n<=128, sr>70%, kvB<=16k or kp=0")
    return float("inf") if match["relation"] == ">" else int(match["bound"]) * _UNITS[match["unit"]]


def _bucket(bounds: list[float], value: float) -> float:
    return bounds[min(bisect_left(bounds, value), len(bounds) - 1)]


class CostTable(CostModel):
    """A CostModel from measured operators. The measurements are for tensors split over `profile.tp` devices.

    `decode_s` is None with skew_fit.csv, because a step's time then depends on the least length too.
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
        self._dense = [(_runs(name, profile.num_layers), Interpolator(points)) for name, points in files.dense.items()]
        self._per_sequence = [Interpolator(points) for points in files.per_sequence.values()]
        points = files.attention
        self._decodes = Interpolator({point: time for point, time in points.items() if point[1] and not point[0]})
        self._chunks = Interpolator({point: time for point, time in points.items() if point[0] and not point[1]})
        mixed = {point: time for point, time in points.items() if point[0] and point[1]}
        self._mixed = Interpolator(mixed) if mixed else None
        self._min_chunk_s = self._chunks.at(1, 0, 0, 0)
        self._skew = Skew(files.skew)
        self._experts = Interpolator(files.experts) if files.experts else None
        if self._experts is not None and not 0 < profile.active_experts <= profile.num_experts:
            raise ConfigError(
                f"cost table {files.name!r} has moe.csv and does not say num_experts and active_experts; name a model "
                "with experts, or add them to profile.json"
            )
        self._linear: dict[tuple[int, ...], float] = {}
        self.decode_s = None if files.skew else self._decode_s

    @property
    def captured_tokens(self) -> int:
        """Return the most tokens of a step that has a captured graph; 0 if the profile does not say it."""
        return self._profile.padded_tokens[-1] if self._profile.padded_tokens else 0

    def step_s(self, shape: StepShape) -> float:
        """Return seconds on the device."""
        rows = len(shape.decode_kv) + len(shape.prefills)
        if not rows:
            return self._profile.step_s
        per_row = sum(times.at(rows) for times in self._per_sequence)
        attention = self._profile.num_layers * self._attention_s(shape)
        return self._linear_s(shape.num_tokens, shape.peer_tokens) + attention + per_row + self._profile.step_s

    def host_s(self, shape: StepShape) -> float:
        """Return the host's seconds from the profile."""
        return self._profile.host_s

    def parts(self, shape: StepShape) -> StepParts:
        """Return the seconds of each kind of operator."""
        rows, layers = len(shape.decode_kv) + len(shape.prefills), self._profile.num_layers
        ranks = self._padded(shape.num_tokens, shape.peer_tokens)
        links_s = layers * self._links_s(ranks) if rows else 0.0
        return StepParts({
            "linear layers": self._linear_s(shape.num_tokens, shape.peer_tokens) - links_s if rows else 0.0,
            "attention": layers * self._attention_s(shape) if rows else 0.0,
            "sampling": sum(times.at(rows) for times in self._per_sequence) if rows else 0.0,
            "links": links_s,
            "fixed costs": self._profile.step_s,
        })  # fmt: skip

    def floors(self, max_tokens: int) -> tuple[TimeFloor, ...]:
        """Return floors from the times of every number of tokens; attention and sampling count as nothing.

        None for experts on several devices: a rank's time then depends on what other ranks compute.
        """
        if self._experts is not None and self._profile.ep > 1:
            return ()
        return token_floors(lambda count: self._linear_s(count) + self._profile.step_s, max_tokens)

    def _decode_s(self, num_rows: int, kv_sum: int) -> float:
        per_row = sum(times.at(num_rows) for times in self._per_sequence)
        attention = self._profile.num_layers * self._decodes.at(0, num_rows, 0, kv_sum / num_rows)
        return self._linear_s(num_rows) + attention + per_row + self._profile.step_s

    def _linear_s(self, tokens: int, peers: tuple[int, ...] = ()) -> float:
        """Return the seconds of what depends on the number of tokens: operators, experts, and their communication."""
        ranks = self._padded(tokens, peers)
        time_s = self._linear.get(ranks)
        if time_s is None:
            time_s = sum(count * times.at(ranks[0]) for count, times in self._dense)
            layer_s = self._links_s(ranks)
            if self._experts is not None:
                layer_s += self._experts_s(self._experts, sum(ranks))
            time_s += self._profile.num_layers * layer_s
            self._linear[ranks] = time_s
        return time_s

    def _padded(self, tokens: int, peers: tuple[int, ...]) -> tuple[int, ...]:
        """Return the tokens of all ranks. All are padded to the same size, or none is, as in vLLM."""
        sizes, ranks = self._profile.padded_tokens, (tokens, *peers)
        largest = max(ranks)
        if not sizes or largest > sizes[-1]:
            return ranks
        return (sizes[bisect_left(sizes, largest)],) * len(ranks)

    def _links_s(self, ranks: tuple[int, ...]) -> float:
        """Return the seconds of one layer's all-reduces and exchanges."""
        return 2 * self._reduce_s(ranks[0]) + 2 * self._exchange_s(sum(ranks[1:]))

    def _experts_s(self, times: Interpolator, tokens: int) -> float:
        """Return the seconds of one layer's experts on one of `ep` devices, for the tokens of all ranks."""
        profile = self._profile
        used = expected_experts(profile.num_experts, profile.active_experts, tokens) / profile.ep
        return times.at(tokens / profile.ep, used)

    def _exchange_s(self, tokens: int) -> float:
        """Return the seconds in which a rank gets, or gives, the activations of other ranks' tokens."""
        profile = self._profile
        if not tokens:
            return 0.0
        return profile.exchange_s + tokens * profile.hidden_size * 2 / profile.exchange_bandwidth

    def _reduce_s(self, tokens: int) -> float:
        profile = self._profile
        if profile.tp == 1:
            return 0.0
        return profile.all_reduce_s + tokens * profile.hidden_size * 2 / profile.all_reduce_bandwidth

    def _attention_s(self, shape: StepShape) -> float:
        """Return seconds of one layer's attention."""
        chunks = sorted(shape.prefills, reverse=True)
        times = [self._chunks.at(count, 0, history, 0) for count, history in chunks]
        others_s = sum(max(0.0, time_s - self._min_chunk_s) for time_s in times[1:])
        if not shape.decode_kv:
            return times[0] + others_s
        kv, rows = shape.decode_kv, len(shape.decode_kv)
        count, history = chunks[0] if chunks else (0, 0)
        mean, longest = sum(kv) / rows, max(kv)
        share = self._skew.share(count, rows, (mean, min(kv), longest), history)
        time_s = self._even_s(rows, mean, count, history)
        if share:
            time_s += share * max(0.0, self._even_s(rows, longest, count, history) - time_s)
        return time_s + others_s

    def _even_s(self, rows: int, length: float, count: int, history: int) -> float:
        """Return the seconds of decode rows with equal lengths, with a chunk or without one."""
        if not count:
            return self._decodes.at(0, rows, 0, length)
        if self._mixed is None:
            return self._decodes.at(0, rows, 0, length) + self._chunks.at(count, 0, history, 0)
        return self._mixed.at(count, rows, history, length)


def _runs(layer: str, num_layers: int) -> int:
    """Return how often an operator runs in a step."""
    if layer in ONCE:
        return 1
    return num_layers * (2 if layer in TWICE else 1)
