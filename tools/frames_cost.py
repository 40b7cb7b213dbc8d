"""Measure the cost of frames in the engine's thread: a step's history, an answer, reads of large pools and long queues.

Owns: the loads and the clock. Does not: run a model. The last line is one JSON object: medians of `REPEATS` runs, in
microseconds of processor time, so that other programs matter less. Usage: python -m tools.frames_cost
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable

from tools.sample_frames import Stream

from octavo.core.limits import Limits
from octavo.core.plan import Events, StepFailure, StepPlan, StepResult
from octavo.core.request import Request, SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.observe.frames import FrameRing, FrameSource, PoolFrames, queue_frame
from octavo.observe.history import History, WaitCounts

REPEATS = 200
STEPS_A_POLL = 25
RUNNING, WAITING = 256, 1000
NUM_BLOCKS, NUM_QUEUED = 100_000, 10_000


class _TimedHistory(History):
    """Measures the time of its `stepped`, readers included."""

    def stepped(self, plan: StepPlan, outcome: StepResult | StepFailure, events: Events) -> None:
        begun = time.thread_time()
        super().stepped(plan, outcome, events)
        SECONDS.append(time.thread_time() - begun)


SECONDS: list[float] = []


def loaded() -> dict[str, float]:
    """Steps of 256 rows with 1,000 waiting, under preemption: the history of each, and an answer after every 25."""
    stream = Stream(RUNNING, WAITING, lambda _: None, 1)
    stream.history = history = _TimedHistory(stream.scheduler, stream.times)
    ring = FrameRing(history, FrameSource("live", stream_id="x"), time.perf_counter)
    history.add_reader(ring.add)
    polls, cursor = [], ""
    for number in range(REPEATS * STEPS_A_POLL):
        stream.step()
        if number % STEPS_A_POLL == STEPS_A_POLL - 1:
            begun = time.thread_time()
            answer = ring.poll(cursor)
            polls.append(time.thread_time() - begun)
            cursor = str(answer["cursor"])
    return {"history": statistics.median(SECONDS), "answer": statistics.median(polls)}


def looks() -> dict[str, float]:
    """A pool of 100,000 blocks that 200 sequences fill, the first look and later ones; a queue of 10,000."""
    limits = Limits(
        block_size=16, num_blocks=(NUM_BLOCKS,), max_model_len=16_384, vocab_size=100, max_batch_tokens=1 << 21,
        max_sequences=256,
    )  # fmt: skip
    scheduler, waiting = Scheduler(limits), WaitCounts()
    for index in range(200 + NUM_QUEUED):
        request = Request(f"r{index}", None, SamplingParams(max_tokens=100), num_prompt_tokens=7500)
        scheduler.admit(request, 0.0)
    waiting.decided(scheduler.plan(0.0).events)
    blocks = PoolFrames(scheduler)
    first = _time(lambda: blocks.frame(0.0), 1)
    for _ in range(20):  # all tables are read
        blocks.frame(0.0)
    return {
        "first_look_at_100000_blocks": first,
        "look_at_100000_blocks": _time(lambda: blocks.frame(0.0), REPEATS),
        "look_at_10000_waiting": _time(lambda: queue_frame(scheduler, waiting, 0.0), REPEATS),
    }


def _time(act: Callable[[], object], repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        begun = time.thread_time()
        act()
        seconds.append(time.thread_time() - begun)
    return statistics.median(seconds)


def main() -> int:
    """Print the figures."""
    looking = _time(lambda: None, 1000)  # at the clock
    figures = {name: round(1e6 * (seconds - looking), 1) for name, seconds in (loaded() | looks()).items()}
    for name, value in figures.items():
        print(f"{name.replace('_', ' '):32} {value:10,.1f} us")
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
