"""A recording of one's own server as a workload: its arrivals, lengths, block keys, tenants and objectives.

Owns: which fields of a recorded request an arrival keeps. Does not: read recordings (octavo.observe.recording does).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

from octavo.observe.recording.arrivals import RecordedRequest, arrivals
from octavo.observe.recording.reader import open_recording
from octavo.simulator.arrival import Arrival, choice_lengths
from octavo.simulator.workloads.source import Notes, Source, Surroundings
from octavo.simulator.workloads.spec import Spec


def recording(spec: Spec, around: Surroundings) -> Source:
    """Return the requests of a folder that `octavo serve --record` wrote, open loop, with their recorded lengths."""
    path = Path(spec.path)

    def source(notes: Notes) -> Iterator[Arrival]:
        requests = arrivals(open_recording(path))
        given: dict[str, tuple[int, ...]] = {}
        for one in requests:  # if a request continued after a crash, its last life has the whole answer
            before = given.get(one.name, ())
            given[one.name] = tuple(map(max, zip_longest(before, one.output_tokens, fillvalue=0)))
        first = requests[0].arrival if requests else 0.0
        for one in requests:
            if one.is_resumed:
                continue
            notes.add("not ended when the recording was, taken as far as they came", one.end is None)
            notes.add("answers of no token, taken as one", not max(given[one.name]))
            yield _arrival(one, given[one.name], one.arrival - first)

    return source


def _arrival(one: RecordedRequest, counts: tuple[int, ...], time: float) -> Arrival:
    return Arrival(
        time, one.prompt_tokens, max(1, *counts), tenant=one.tenant, priority=one.priority, keys=one.keys,
        key_tokens=one.key_tokens, output_keys=one.output_keys, choices=choice_lengths(counts),
        ttft_objective=one.ttft_objective, tpot_objective=one.tpot_objective,
    )  # fmt: skip
