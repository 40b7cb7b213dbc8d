"""The heartbeat page: what is read is what was written, whole, or the beat before it."""

from __future__ import annotations

import os
import random
from array import array
from pathlib import Path

import pytest

from octavo.core.plan import NewSequence, StepPlan
from octavo.core.request import SamplingParams
from octavo.engine import heartbeat
from octavo.engine.heartbeat import (
    LONG_CONTEXT,
    MIN_STEP_S,
    HeartbeatPage,
    HeartbeatWriter,
    Phase,
    StepLimits,
    page_file,
)


@pytest.fixture
def page() -> HeartbeatPage:
    with page_file() as descriptor:
        return HeartbeatPage(descriptor)


def page_at(path: Path) -> HeartbeatPage:
    """The page in a file with a name, as large as a page is."""
    with open(path, "a+b") as file:
        file.truncate(heartbeat.PAGE_BYTES)
        return HeartbeatPage(file.fileno())


class Hand:
    """A clock turned by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def plan_of(step: int, slots: list[int], new: dict[int, str] | None = None, tokens: int = 0) -> StepPlan:
    fresh = tuple(NewSequence(slot, name, 0, 1, None, SamplingParams()) for slot, name in (new or {}).items())
    return StepPlan(step, 0.0, slots=array("i", slots), num_query_tokens=tokens or len(slots), new_sequences=fresh)


def ids_on(page: HeartbeatPage) -> list[str]:
    beat = page.beat()
    assert beat is not None
    batch = page.batch(beat.batch)
    assert batch is not None
    return list(batch)


def test_an_empty_page_has_no_beat(page: HeartbeatPage) -> None:
    assert page.beat() is None and page.batch(1) is None


def test_another_process_sees_what_the_loop_does(tmp_path: Path) -> None:
    page, clock = page_at(tmp_path / "page"), Hand()
    heart = HeartbeatWriter(page_at(tmp_path / "page"), epoch=3, now=clock)
    heart.idle()
    beat = page.beat()
    assert beat is not None and (beat.phase, beat.epoch, beat.deadline) == (Phase.IDLE, 3, None)
    heart.commands_begin()
    heart.step_begins(plan_of(8, [0, 1], {0: "a", 1: "b"}))
    beat = page.beat()
    assert beat is not None and (beat.phase, beat.step, beat.num_committed) == (Phase.STEP, 8, 0)
    assert beat.deadline == clock.now + MIN_STEP_S and ids_on(page) == ["a", "b"]
    clock.now += 0.5
    heart.step_ended(True)
    heart.step_begins(plan_of(9, [0, 1]))
    beat = page.beat()
    assert beat is not None and (beat.step, beat.num_committed, beat.deadline) == (9, 1, clock.now + 5.0)
    heart.step_ended(False)
    beat = page.beat()
    assert beat is not None and beat.num_committed == 1


def test_the_batch_names_everybody_in_flight(page: HeartbeatPage) -> None:
    heart = HeartbeatWriter(page, 1)
    heart.step_begins(plan_of(1, [0, 1], {0: "a", 1: "b"}))
    heart.step_begins(plan_of(2, [0]))
    assert ids_on(page) == ["a", "b"]
    heart.step_ended(True)
    heart.step_begins(plan_of(3, [0]))
    assert ids_on(page) == ["a"]
    heart.step_ended(True)
    heart.step_ended(True)
    heart.step_begins(plan_of(4, [0], {0: "c"}))  # the same slots, another request
    assert ids_on(page) == ["c"]


def test_torn_writes_are_never_believed(tmp_path: Path) -> None:
    """The writer dies after any number of bytes of a beat or a batch: the one before it is read."""
    rng = random.Random(5)
    path = tmp_path / "page"
    page = page_at(path)
    names = {0: ("x", "y"), 1: tuple(f"r{i}" for i in range(50))}
    for number in (1, 2):
        page.write_batch(number, names[number % 2])
        page.write_beat(number, (1, 2, number, number, 1.5, number))
    whole = path.read_bytes()
    page.write_batch(3, names[1][::-1])
    page.write_beat(3, (1, 2, 3, 3, 1.5, 3))
    after = path.read_bytes()
    changed = [i for i in range(len(whole)) if whole[i] != after[i]]
    for _ in range(300):
        torn = bytearray(whole)
        for i in rng.sample(changed, rng.randrange(len(changed))):  # stores may come in any order
            torn[i] = after[i]
        path.write_bytes(torn)
        beat = page_at(path).beat()
        assert beat is not None and beat.step == beat.num_committed and beat.step in (2, 3)
        assert page.batch(3) in (None, names[1][::-1]) and page.batch(2) == names[0]
    page.close()


def test_garbage_is_no_beat(tmp_path: Path) -> None:
    rng, path = random.Random(6), tmp_path / "page"
    page_at(path).close()
    for _ in range(50):
        path.write_bytes(rng.randbytes(heartbeat.PAGE_BYTES))
        page = page_at(path)
        assert page.beat() is None and page.batch(rng.randrange(2**62)) is None
        page.close()


def test_the_file_of_a_page_has_no_name() -> None:
    with page_file() as descriptor:
        status = os.fstat(descriptor)
        assert (status.st_nlink, status.st_size, status.st_mode & 0o777) == (0, heartbeat.PAGE_BYTES, 0o600)


def test_ids_that_do_not_fit_are_left_out(page: HeartbeatPage) -> None:
    page.write_batch(1, [f"{i:0200}" for i in range(2000)])
    found = page.batch(1)
    assert found is not None and 400 < len(found) < 2000


def test_limits_follow_what_steps_of_a_size_took() -> None:
    limits = StepLimits()
    limits.note(1, 0.02)
    assert limits.limit(1) == MIN_STEP_S
    limits.note(512, 3.0)
    assert limits.limit(512) == 30.0 and limits.limit(768) == 45.0
    for _ in range(200):
        limits.note(512, 1.0)
    assert limits.limit(512) == pytest.approx(10.0, rel=0.01)


def test_no_step_has_longer_than_five_seconds_or_ten_times_its_prediction() -> None:
    """Also the first of all, and the first of a size that was never seen."""
    assert StepLimits().limit(1) == StepLimits().limit(100_000) == MIN_STEP_S
    limits = StepLimits({1: 0.02, 64: 0.1})
    assert limits.limit(1) == limits.limit(20) == limits.limit(64) == limits.limit(256) == MIN_STEP_S
    assert limits.limit(512) == pytest.approx(10 * 0.1 * 8), "eight times the tokens that were measured"
    slow = StepLimits({1: 3.0, 16: 8.0})  # a large model on a small machine
    assert slow.limit(2) == 60.0 and slow.limit(3) == 80.0, "not longer than 16 tokens took"
    assert slow.limit(2048) == pytest.approx(10 * 8.0 * 128)
    assert StepLimits({16: 8.0}).limit(1) == 80.0, "a smaller step takes no longer than a larger one"


def test_a_long_context_has_longer() -> None:
    limits = StepLimits({64: 1.0})
    assert limits.limit(64, LONG_CONTEXT) == 10.0 and limits.limit(64, 4 * LONG_CONTEXT) == 40.0
    limits.note(64, 3.0, 4 * LONG_CONTEXT)
    assert limits.limit(64, 4 * LONG_CONTEXT) == limits.limit(64, 10) == 30.0
    assert limits.limit(64, 8 * LONG_CONTEXT) == 60.0


def test_the_first_step_is_bounded_by_what_was_measured_before(page: HeartbeatPage) -> None:
    clock = Hand()
    heart = HeartbeatWriter(page, 1, now=clock)
    heart.warmed_up({1: 0.7, 64: 2.0})
    heart.step_begins(plan_of(1, [0], {0: "a"}, tokens=128))
    beat = page.beat()
    assert beat is not None and beat.deadline == clock.now + 40.0
    heart.step_ended(True)
    long = StepPlan(2, 0.0, slots=array("i", [0]), starts=array("i", [40_960]), num_query_tokens=1, num_kv_read=40_961)
    heart.step_begins(long)
    beat = page.beat()
    assert beat is not None and beat.deadline == clock.now + 70.0
