"""The scheduler's time by function.

Owns: the profiler and its figures. Does not: time steps (the profiler slows calls down, so it makes separate steps).
"""

from __future__ import annotations

import cProfile
import pstats
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from octavo.bench.scheduler_cost import WARM_UP
from octavo.bench.scheduler_loads import LoadSetting, Trial

PACKAGE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class Spent:
    """One function's own time: microseconds and calls per step, and its share of the whole."""

    function: str
    calls: float
    own_us: float
    share: float

    def as_dict(self) -> dict[str, object]:
        """Return plain values, for JSON."""
        return asdict(self)


def profile(setting: LoadSetting, most: int = 12) -> list[Spent]:
    """Profile a new scheduler under this setting; return the `most` costly functions, the costliest first."""
    trial = Trial(setting)
    for _ in range(WARM_UP):
        trial.step()
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(setting.steps):
        trial.step()
    profiler.disable()
    entries: dict[tuple[str, int, str], Any] = vars(pstats.Stats(profiler))["stats"]
    total = sum(entry[2] for entry in entries.values())
    dearest = sorted(entries.items(), key=lambda item: (-item[1][2], item[0]))[:most]
    return [
        Spent(
            function=_name(place),
            calls=round(entry[1] / setting.steps, 1),
            own_us=round(entry[2] / setting.steps * 1e6, 1),
            share=round(entry[2] / total, 3),
        )
        for place, entry in dearest
    ]


def _name(place: tuple[str, int, str]) -> str:
    file, _, function = place
    if file == "~":  # built in
        return function.removeprefix("<").removesuffix(">")
    path = Path(file)
    return f"{path.relative_to(PACKAGE) if path.is_relative_to(PACKAGE) else path.name}:{function}"
