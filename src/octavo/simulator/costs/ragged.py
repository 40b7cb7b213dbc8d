"""Ragged: linear interpolation in a table whose rows need not form a full grid.

Owns: the tree of axes and the interpolation. Does not: know what is measured.
Each value of an axis has its own next axis, so that sweeps of several densities may be mixed in one table. Below an
axis its first value is used, above it the last two are extrapolated (times grow with sizes).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence


class Ragged:
    """A function known at points of `num_axes` coordinates. Built from {point: value}; at least one point."""

    def __init__(self, points: Mapping[tuple[int, ...], float]) -> None:
        assert points, "a table without points"
        self._root = _tree(sorted(points.items()), 0)

    def at(self, *place: float) -> float:
        """Return the value at a point, never below 0."""
        return max(0.0, _value(self._root, place, 0))


class _Node:
    __slots__ = ("children", "keys")

    def __init__(self, keys: list[int], children: list[_Node | float]) -> None:
        self.keys = keys
        self.children = children


def _tree(points: Sequence[tuple[tuple[int, ...], float]], axis: int) -> _Node:
    """Build the tree of sorted points that agree in all coordinates before `axis`."""
    groups: dict[int, list[tuple[tuple[int, ...], float]]] = {}
    for place, value in points:
        groups.setdefault(place[axis], []).append((place, value))
    is_last = axis + 1 == len(points[0][0])
    return _Node(list(groups), [group[0][1] if is_last else _tree(group, axis + 1) for group in groups.values()])


def _value(node: _Node | float, place: tuple[float, ...], axis: int) -> float:
    if isinstance(node, float):
        return node
    keys, wanted = node.keys, place[axis]
    if len(keys) == 1 or wanted <= keys[0]:
        return _value(node.children[0], place, axis + 1)
    right = min(bisect_right(keys, wanted), len(keys) - 1)
    low, high = keys[right - 1], keys[right]
    left = _value(node.children[right - 1], place, axis + 1)
    if wanted == low:
        return left
    return left + (wanted - low) / (high - low) * (_value(node.children[right], place, axis + 1) - left)
