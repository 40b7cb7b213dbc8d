"""Measure what recording costs: either thread, bytes, a saved state, and a model's steps with it on and off.

Owns: the loads, the pairs, the clock. The last line is one JSON object. Usage:
python -m tools.recording_cost [--model smollm2] [--rows 32] [--pairs 40]
Pairs: steps of two schedulers in turns, plain and recorded, either first; each thread's own seconds, so that other
programs add little. A model's steps by the wall clock, in blocks of `BLOCK` that are recorded or not, in turns: the
median of the differences of neighbours.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from array import array
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from octavo.assembly import build_local
from octavo.config.sources import config_from_keywords
from octavo.core.limits import Limits
from octavo.core.plan import ROW_SAMPLE, StepResult
from octavo.core.request import Request, SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.core.tap import Call
from octavo.engine.heartbeat import memory_folder
from octavo.frontend.offline import OfflineEngine
from octavo.observe.recording.flight import FlightRecorder
from octavo.observe.recording.format import CallEncoder, Header, RecordedCall, StateRecord
from octavo.observe.recording.reader import pack_records
from octavo.observe.recording.recorder import Recorder

STEPS = 600
BLOCK = 12  # steps of a model that are recorded, or not, in a row


class ListTap:
    """Stores a recorder's calls."""

    def __init__(self) -> None:
        self.items: list[RecordedCall] = []

    def called(self, call: Call) -> None:
        """Keep a call."""
        self.items.append(RecordedCall(call, time.perf_counter()))


def loaded(scheduler: Scheduler, rows: int) -> Scheduler:
    """A scheduler whose sequences all decode."""
    for index in range(rows):
        ids = array("i", [(index * 131 + at * 7) % 30_000 for at in range(100 + index % 16)])
        scheduler.admit(Request(f"r{index}", ids, SamplingParams(max_tokens=4000), eos_token_ids=(2,)), 0.0)
    while scheduler.num_running < rows:
        step(scheduler)
    step(scheduler)  # the rest of a prompt that came in parts
    return scheduler


def step(scheduler: Scheduler) -> float:
    """One step; this thread's own seconds of plan and commit, which other programs do not add to."""
    now, begun = time.perf_counter(), time.thread_time()
    plan = scheduler.plan(now)
    planned = time.thread_time()
    count = sum(1 for flag in plan.flags if flag & ROW_SAMPLE)
    result = StepResult(array("i", [5]) * count)
    again = time.thread_time()
    scheduler.commit(plan, result, now)
    return planned - begun + time.thread_time() - again


def scheduler_cost(rows: int) -> dict[str, float]:
    """Microseconds a step in both threads, and bytes."""
    limits = Limits(
        block_size=16, num_blocks=(rows * 300,), max_model_len=8192, vocab_size=32_000, max_batch_tokens=8192,
        max_sequences=rows,
    )  # fmt: skip
    header = Header("none", limits, 1)
    with tempfile.TemporaryDirectory() as folder:
        writer = Recorder(Path(folder), 1 << 30, header, time.perf_counter)
        plain = loaded(Scheduler(limits), rows)
        taped = loaded(Scheduler(limits, writer), rows)
        tap = ListTap()
        listed, items = loaded(Scheduler(limits, tap), rows), tap.items
        first = len(items)
        times: tuple[list[float], list[float]] = ([], [])
        for number in range(STEPS):
            for which in (number % 2, 1 - number % 2):
                times[which].append(step((plain, taped)[which]))
            step(listed)
            time.sleep(0.002)  # a device computes: the writer has the interpreter
        writer.close()
    encoder = CallEncoder(False)
    for item in items[:first]:
        encoder.encode(item)
    begun = time.thread_time()
    records = [encoder.encode(item) for item in items[first:]]
    packed = pack_records(records)
    writer_s = time.thread_time() - begun
    without = statistics.median(times[0])
    more = [taped_s - plain_s for plain_s, taped_s in zip(*times, strict=True)]
    both = [(first + second) / 2 for first, second in zip(more[::2], more[1::2], strict=True)]  # in either order
    return {
        "rows": rows,
        "step_us": without * 1e6,
        "engine_thread_us": statistics.median(both) * 1e6,
        "writer_thread_us": writer_s / STEPS * 1e6,
        "bytes_a_step": len(packed) / STEPS,
    }


def flight_cost(rows: int) -> dict[str, float]:
    """Microseconds a step of the flight recorder in both threads, bytes a step, and what a saved state takes."""
    limits = Limits(
        block_size=16, num_blocks=(rows * 300,), max_model_len=8192, vocab_size=32_000, max_batch_tokens=8192,
        max_sequences=rows,
    )  # fmt: skip
    files = [TemporaryFile(dir=memory_folder(), buffering=0) for _ in range(3)]  # noqa: SIM115
    recorder = FlightRecorder(Header("none", limits, 1), time.perf_counter, 3600.0, 1 << 30)
    recorder.attach([file.fileno() for file in files])
    plain, flown = loaded(Scheduler(limits), rows), loaded(Scheduler(limits, recorder), rows)
    times: tuple[list[float], list[float]] = ([], [])
    time.sleep(0.3)
    thread: Any = recorder._thread
    clock = time.pthread_getcpuclockid(thread.ident)
    writer_s, first = time.clock_gettime(clock), recorder.status()["bytes"]
    for number in range(STEPS):
        for which in (number % 2, 1 - number % 2):
            times[which].append(step((plain, flown)[which]))
        time.sleep(0.002)  # a device computes: the writer has the interpreter
    time.sleep(0.3)
    writer_s, last = time.clock_gettime(clock) - writer_s, recorder.status()["bytes"]
    saving = []
    for _ in range(9):
        begun = time.thread_time()
        state = flown.save()
        saving.append(time.thread_time() - begun)
    begun = time.thread_time()
    encoder = CallEncoder(False)
    packed = pack_records([encoder.encode(RecordedCall(StateRecord(0.0, state)))])
    encoding_s = time.thread_time() - begun
    recorder.close()
    for file in files:
        file.close()
    more = [flown_s - plain_s for plain_s, flown_s in zip(*times, strict=True)]
    both = [(one + other) / 2 for one, other in zip(more[::2], more[1::2], strict=True)]  # in either order
    return {
        "rows": rows,
        "engine_thread_us": statistics.median(both) * 1e6,
        "writer_thread_us": writer_s / STEPS * 1e6,
        "bytes_a_step": (int(str(last)) - int(str(first))) / STEPS,
        "blocks": limits.num_blocks[0],
        "save_ms": statistics.median(saving) * 1e3,
        "encode_state_ms": encoding_s * 1e3,
        "state_bytes": len(packed),
    }


def model_cost(model: str, rows: int, pairs: int) -> dict[str, Any]:
    """Time steps of a model that decodes `rows` sequences, alternately recorded and not recorded."""
    with tempfile.TemporaryDirectory() as folder:
        settings = {"record": folder, "max_num_seqs": rows, "max_model_len": 2048}
        engine = build_local(config_from_keywords(model, settings))
        scheduler: Any = engine.loop._scheduler
        watch = _Turns(scheduler)
        engine.loop.watch(watch)
        sampling = SamplingParams(max_tokens=2 * pairs * BLOCK + 40, temperature=0.0, ignore_eos=True)
        with OfflineEngine(engine.sessions) as offline:
            offline.generate([f"Tell me about {n}" for n in range(rows)], sampling)
    return watch.summary()


class _Turns:
    """Switches recording on and off between blocks of steps, and takes their times."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.tap = scheduler._tap
        self.blocks: list[tuple[bool, float]] = []
        self.num_steps = 0
        self.begun = 0.0

    def admitted(self, request: Request) -> None:
        """Do nothing."""

    def decided(self, decisions: object) -> None:
        """Do nothing."""

    def stepped(self, plan: Any, outcome: object, events: object) -> None:
        """Record the time of one step."""
        self.num_steps += 1
        if self.num_steps < 20 or self.num_steps % BLOCK:
            return
        now = time.perf_counter()
        is_on = self.scheduler._tap is self.tap
        if self.begun:
            self.blocks.append((is_on, (now - self.begun) / BLOCK))
        self.scheduler._tap = None if is_on else self.tap
        self.begun = time.perf_counter()

    def summary(self) -> dict[str, Any]:
        """Milliseconds a step, and the difference of neighbours in per cent."""
        ratios = []
        for (first_on, first), (_, second) in zip(self.blocks, self.blocks[1:], strict=False):
            on, off = (first, second) if first_on else (second, first)
            ratios.append(on / off - 1)
        on, off = ([s for is_on, s in self.blocks if is_on is which] for which in (True, False))
        return {
            "blocks": len(self.blocks),
            "recorded_step_ms": statistics.median(on) * 1e3,
            "plain_step_ms": statistics.median(off) * 1e3,
            "more_percent": statistics.median(ratios) * 100,
        }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--pairs", type=int, default=40)
    args = parser.parse_args()
    found: dict[str, Any] = {"scheduler": [scheduler_cost(rows) for rows in (1, 32, 256)]}
    found["flight"] = [flight_cost(rows) for rows in (1, 32, 256)]
    for each in (*found["scheduler"], *found["flight"]):
        print({name: round(value, 2) for name, value in each.items()})
    if args.model:
        found["model"] = {"model": args.model, "rows": args.rows, **model_cost(args.model, args.rows, args.pairs)}
        print(found["model"])
    print(json.dumps(found))


if __name__ == "__main__":
    main()
