"""Skew: the extra cost of decode rows of unequal lengths over rows that all have their mean length.

Owns: the table of shares and its buckets. Does not: know attention times (table does).
A share a of 0 to 1 puts a step between the times at the mean and at the greatest length: t_mean + a (t_max - t_mean).
The shares are fitted per bucket by LLMServingSim's profiler (Cho et al., IISWC 2024; its docs on skew): the chunk as it
is, the number of rows, (mean - least) / (greatest - least), the greatest length, and the chunk's history.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping

from octavo.errors import ConfigError

AXES = ("n_label", "skew_rate_label", "kv_big_label", "kp_label")
_LABEL = re.compile(r"[a-zA-Z]+(?P<relation><=|=|>)(?P<bound>\d+)(?P<unit>[k%]?)")
_UNITS = {"": 1.0, "k": 1024.0, "%": 0.01}


class Skew:
    """Shares by bucket. `rows` have the columns pc, AXES, alpha and n_samples; no rows: no correction."""

    def __init__(self, rows: Iterable[Mapping[str, str]]) -> None:
        self._shares: dict[tuple[float, ...], float] = {}
        bounds: list[set[float]] = [set() for _ in range(len(AXES) + 1)]
        total = weight = 0.0
        for row in rows:
            key = (float(row["pc"]), *(_bound(row[axis]) for axis in AXES))
            share = min(1.0, max(0.0, float(row["alpha"])))
            self._shares[key] = share
            for known, bound in zip(bounds, key, strict=True):
                known.add(bound)
            total += share * int(row["n_samples"])
            weight += int(row["n_samples"])
        self._bounds = [sorted(known) for known in bounds]
        self._default = total / weight if weight else 0.0

    def share(self, chunk: int, rows: int, kv: tuple[float, int, int], history: float) -> float:
        """Return the share for a step with that chunk and history; `kv`: the decode rows' mean, least, greatest."""
        mean, least, greatest = kv
        if not self._shares or rows < 2 or least == greatest:
            return 0.0
        rate = (mean - least) / (greatest - least)
        key = tuple(map(_bucket, self._bounds, (chunk, rows, rate, greatest, history)))
        return self._shares.get(key, self._default)


def _bound(label: str) -> float:
    """Return the upper bound that a label gives, infinity for its overflow."""
    match = _LABEL.fullmatch(label)
    if match is None:
        raise ConfigError(f"skew_fit has the label {label!r}; labels are as n<=128, sr>70%, kvB<=16k or kp=0")
    return float("inf") if match["relation"] == ">" else int(match["bound"]) * _UNITS[match["unit"]]


def _bucket(bounds: list[float], value: float) -> float:
    return bounds[min(bisect_left(bounds, value), len(bounds) - 1)]
