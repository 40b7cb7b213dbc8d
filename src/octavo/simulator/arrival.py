"""Arrival: one request of a workload, known by its lengths and by the keys of its prompt's blocks.

Owns: the fields. Does not: read a trace (workloads do), or become a core Request (replica does).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request of a workload. `time` is in seconds from the workload's start, tokens are counts.

    `output_tokens` is how many it will generate; with several `choices` (the tokens of each) the longest's. `keys` name
    the prompt's content, one for each full `key_tokens` tokens: equal keys at equal places mean equal prefixes (a
    public trace's block ids, or a recording's block keys). `output_keys` continue them over prompt and output.
    `follows`: index in the workload of the request after whose end this one arrives, `time` seconds later (a
    conversation's next turn); None: it arrives at `time` itself.
    """

    time: float
    prompt_tokens: int
    output_tokens: int
    tenant: str = ""
    session: str = ""
    priority: int = 0
    keys: Sequence[int] | Sequence[bytes] = ()
    key_tokens: int = 0
    output_keys: Sequence[int] | Sequence[bytes] = ()
    choices: tuple[int, ...] = ()
    follows: int | None = None
    ttft_objective: float | None = None
    tpot_objective: float | None = None


def choice_lengths(counts: Sequence[int]) -> tuple[int, ...]:
    """Return an arrival's `choices`: the tokens of each, at least 1; empty for a single choice."""
    return tuple(max(1, count) for count in counts) if len(counts) > 1 else ()
