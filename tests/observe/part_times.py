"""The seconds of one part of the last steps."""

from __future__ import annotations

from octavo.observe.series import PARTS, StepTimes


def recent(times: StepTimes, part: str) -> list[float]:
    """Return the seconds of the steps that are kept, oldest first."""
    kept = (times.get(number) for number in range(times.num_steps))
    return [seconds[PARTS.index(part)] for seconds in kept if seconds is not None]
