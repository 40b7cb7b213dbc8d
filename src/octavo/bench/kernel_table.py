"""The form of the kernel benches' tables, and how one time is measured.

Owns: KernelTable, the requested sizes, best_s. Does not: know a kernel.
`octavo bench kernel` turns the results of kernel_rows, kernel_linear and kernel_attention into these tables.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Sizes:
    """Numbers of rows to measure with, threads, and the seconds that one time may take."""

    rows: Sequence[int]
    threads: int
    budget_s: float


@dataclass(frozen=True, slots=True)
class KernelTable:
    """A title, column names, and rows of values that JSON can hold."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]

    def as_dict(self) -> dict[str, Any]:
        """Return rows by column names, for JSON."""
        return {"title": self.title, "rows": [dict(zip(self.columns, row, strict=True)) for row in self.rows]}


def best_s(works: Sequence[Callable[[], object]], budget_s: float) -> list[float]:
    """Return the shortest time of each work, in turn A B A B until the budget is spent, without the first round."""
    for work in works:
        work()
    best = [float("inf")] * len(works)
    end = time.perf_counter() + budget_s * len(works)
    while best[-1] == float("inf") or time.perf_counter() < end:
        for index, work in enumerate(works):
            begun = time.perf_counter()
            work()
            best[index] = min(best[index], time.perf_counter() - begun)
    return best
