"""Encoder outputs by content: single cases, and random steps beside a slow twin and a device that runs the plans."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from tests.core.invariants import check_encoder

from octavo.core.encoder import EncoderCache, whole_chunk
from octavo.core.plan import EncodeJob
from octavo.core.request import Span


def spans(*items: tuple[int, int, str]) -> tuple[Span, ...]:
    return tuple(Span(start, length, key.encode()) for start, length, key in items)


def plan(cache: EncoderCache) -> tuple[list[bytes], list[bytes]]:
    """End a plan: keys encoded and keys freed."""
    jobs, frees = cache.end_plan()
    check_encoder(cache)
    cache.begin_plan()
    return [job.key for job in jobs], list(frees)


# -- E01


@pytest.mark.parametrize(
    ("start", "count", "granted", "jobs"),
    [
        (0, 4, 4, []),  # ends where the item starts
        (0, 5, 5, [b"a"]),  # touches its first position
        (5, 1, 1, [b"a"]),
        (7, 1, 1, [b"a"]),  # touches its last position
        (8, 9, 9, []),  # begins behind it
    ],
)
def test_E01_X06_an_item_is_encoded_whole_by_the_first_range_that_touches_it(
    start: int, count: int, granted: int, jobs: list[bytes]
) -> None:
    cache = EncoderCache(10, 10)
    assert cache.grant("r", 0, spans((4, 4, "a")), start, count) == granted
    assert plan(cache)[0] == jobs


def test_E01_a_job_names_slot_span_key_and_size() -> None:
    cache = EncoderCache(10, 10)
    assert cache.grant("r", 3, spans((0, 2, "a"), (5, 4, "b")), 2, 5) == 5
    assert cache.end_plan()[0] == (EncodeJob(3, 1, b"b", 4),)


def test_E01_a_later_chunk_of_the_same_item_encodes_nothing() -> None:
    cache = EncoderCache(10, 10)
    for start in (0, 3, 6):
        assert cache.grant("r", 0, spans((2, 7, "a")), start, 3) == 3
        assert plan(cache)[0] == ([b"a"] if start == 0 else [])


def test_E01_without_compute_budget_the_grant_ends_at_the_items_start() -> None:
    cache, items = EncoderCache(5, 100), spans((2, 3, "a"), (6, 3, "b"))
    assert cache.grant("r", 0, items, 0, 10) == 6
    assert plan(cache) == ([b"a"], [])
    assert cache.grant("r", 0, items, 6, 4) == 4
    assert plan(cache) == ([b"b"], [])


def test_bug_13_an_exhausted_budget_grants_nothing_and_changes_nothing() -> None:
    cache = EncoderCache(5, 100)
    assert cache.grant("x", 0, spans((0, 4, "a")), 0, 4) == 4
    assert cache.grant("y", 1, spans((0, 2, "b")), 0, 4) == 0
    assert cache.num_needs == 1
    assert cache.grant("z", 2, spans((0, 1, "c")), 0, 4) == 4  # what is left is still given
    assert plan(cache) == ([b"a", b"c"], [])
    assert cache.grant("y", 1, spans((0, 2, "b")), 0, 4) == 4


def test_E01_without_space_the_grant_ends_at_the_items_start() -> None:
    cache, items = EncoderCache(100, 5), spans((1, 3, "a"), (6, 3, "b"))
    assert cache.grant("r", 0, items, 0, 10) == 6
    assert plan(cache) == ([b"a"], [])
    assert cache.grant("r", 0, items, 6, 4) == 0
    cache.commit("r", 6)
    assert cache.grant("r", 0, items, 6, 4) == 4
    assert plan(cache) == ([b"b"], [b"a"])


def test_E01_an_item_that_does_not_fit_evicts_nothing() -> None:
    cache = EncoderCache(100, 10)
    cache.grant("x", 0, spans((0, 4, "idle")), 0, 4)
    cache.grant("y", 1, spans((0, 4, "held")), 0, 4)
    plan(cache)
    cache.commit("x", 4)
    assert cache.grant("z", 2, spans((0, 7, "big")), 0, 7) == 0
    assert plan(cache) == ([], [])
    assert cache.grant("x", 0, spans((0, 4, "idle")), 0, 4) == 4
    assert plan(cache) == ([], [])


# -- E02


def test_E02_an_output_is_found_by_content_by_other_requests_and_other_spans() -> None:
    cache = EncoderCache(4, 10)
    assert cache.grant("x", 0, spans((0, 3, "a"), (4, 3, "a")), 0, 7) == 7
    assert cache.grant("y", 1, spans((2, 3, "a")), 0, 7) == 7
    assert plan(cache) == ([b"a"], [])
    assert cache.num_needs == 3
    cache.release("x")
    cache.release("y")
    assert cache.grant("z", 2, spans((0, 3, "a")), 0, 3) == 3
    assert plan(cache) == ([], [])


def test_E02_the_reference_goes_at_the_commit_of_the_last_position() -> None:
    cache, items = EncoderCache(10, 4), spans((0, 4, "a"), (4, 4, "b"))
    assert cache.grant("r", 0, items, 0, 3) == 3
    assert plan(cache) == ([b"a"], [])
    cache.commit("r", 3)
    assert (cache.num_needs, cache.grant("r", 0, items, 3, 2)) == (1, 1)
    assert plan(cache) == ([], [])
    cache.commit("r", 4)
    assert (cache.num_needs, cache.grant("r", 0, items, 4, 4)) == (0, 4)
    assert plan(cache) == ([b"b"], [b"a"])


def test_E02_the_least_recently_used_outputs_go_first_and_only_then_are_they_freed() -> None:
    cache = EncoderCache(100, 9)
    for name in "abc":
        cache.grant(name, 0, spans((0, 3, name)), 0, 3)
        assert plan(cache) == ([name.encode()], [])
    for name in "bac":
        cache.commit(name, 3)
    assert plan(cache) == ([], [])
    cache.grant("again", 0, spans((0, 3, "b")), 0, 3)
    cache.release("again")
    assert cache.grant("d", 1, spans((0, 4, "d")), 0, 4) == 4
    assert plan(cache) == ([b"d"], [b"a", b"c"])


def test_E02_a_key_freed_and_needed_in_one_plan_is_neither_freed_nor_encoded() -> None:
    cache = EncoderCache(10, 6)
    cache.grant("x", 0, spans((0, 3, "a")), 0, 3)
    plan(cache)
    cache.commit("x", 3)
    cache.grant("y", 1, spans((0, 6, "b")), 0, 6)
    cache.release("y")  # its row is taken back: its job goes, what it evicted is still there
    assert cache.grant("z", 2, spans((0, 3, "a")), 0, 3) == 3
    assert plan(cache) == ([], [])


def test_E02_a_job_of_a_row_taken_back_gives_back_budget_and_space() -> None:
    cache = EncoderCache(5, 5)
    assert cache.grant("x", 0, spans((0, 5, "a")), 0, 5) == 5
    assert cache.grant("y", 1, spans((0, 5, "b")), 0, 5) == 0
    cache.release("x")
    assert cache.grant("y", 1, spans((0, 5, "b")), 0, 5) == 5
    assert plan(cache) == ([b"b"], [])


def test_E02_a_job_that_another_row_of_the_plan_needs_stays_and_names_that_row() -> None:
    cache = EncoderCache(5, 5)
    cache.grant("x", 0, spans((0, 5, "a")), 0, 5)
    cache.grant("y", 1, spans((0, 1, "b"), (1, 5, "a")), 1, 5)
    cache.release("x")
    assert cache.end_plan()[0] == (EncodeJob(1, 1, b"a", 5),)


def test_E02_after_a_failed_step_its_outputs_are_encoded_anew() -> None:
    cache = EncoderCache(10, 10)
    cache.grant("x", 0, spans((0, 3, "a")), 0, 3)
    plan(cache)
    cache.grant("y", 1, spans((0, 3, "a"), (3, 3, "b")), 0, 6)
    jobs, frees = cache.end_plan()
    cache.undo(jobs, frees)
    assert cache.num_needs == 2  # both of a, which an earlier plan made
    cache.release("y")
    cache.begin_plan()
    assert cache.grant("y", 1, spans((0, 3, "a"), (3, 3, "b")), 0, 6) == 6
    assert plan(cache) == ([b"b"], [])


def test_E02_what_a_failed_step_was_to_drop_counts_as_dropped() -> None:
    cache = EncoderCache(10, 4)
    cache.grant("x", 0, spans((0, 4, "a")), 0, 4)
    plan(cache)
    cache.release("x")
    cache.grant("y", 1, spans((0, 4, "b")), 0, 4)
    jobs, frees = cache.end_plan()
    assert frees == (b"a",)
    cache.undo(jobs, frees)  # it may have come as far as dropping a, or encoding b
    cache.release("y")
    cache.begin_plan()
    assert cache.grant("x", 0, spans((0, 4, "a")), 0, 4) == 4
    assert plan(cache) == ([b"a"], [b"b"])
    assert plan(cache) == ([], [])


# -- random steps


class SlowCache:
    """What EncoderCache promises, looked up in plain lists each time."""

    def __init__(self, budget: int, capacity: int) -> None:
        self.budget, self.capacity, self.clock = budget, capacity, 0
        self.outputs: list[tuple[bytes, int]] = []
        self.needs: list[tuple[str, int, bytes, int]] = []
        self.idle_since: dict[bytes, int] = {}
        self.jobs: list[tuple[str, bytes, int]] = []
        self.evicted: list[bytes] = []

    def size(self, key: bytes) -> int:
        return dict(self.outputs).get(key, 0)

    def needed(self, key: bytes) -> bool:
        return any(need[2] == key for need in self.needs)

    def grant(self, name: str, items: tuple[Span, ...], start: int, count: int) -> int:
        for index, span in enumerate(items):
            touches = span.start < start + count and start < span.start + span.length
            if not touches or any(need[:2] == (name, index) for need in self.needs):
                continue
            if not self.size(span.key) and not self.provide(name, span):
                return max(0, span.start - start)
            self.needs.append((name, index, span.key, span.start + span.length))
        return count

    def provide(self, name: str, span: Span) -> bool:
        is_free = span.key in self.evicted
        if not is_free and sum(job[2] for job in self.jobs) + span.length > self.budget:
            return False
        kept = list(self.outputs)
        idle = sorted((key for key, _ in kept if not self.needed(key)), key=self.idle_since.__getitem__)
        gone = []
        while sum(size for _, size in kept) + span.length > self.capacity:
            if not idle:
                return False
            gone.append(idle.pop(0))
            kept = [entry for entry in kept if entry[0] != gone[-1]]
        self.outputs = [*kept, (span.key, span.length)]
        self.evicted += gone
        if is_free:
            self.evicted.remove(span.key)
        else:
            self.jobs.append((name, span.key, span.length))
        return True

    def drop(self, name: str, end: int | None) -> None:
        for need in list(self.needs):
            if need[0] == name and (end is None or need[3] <= end):
                self.needs.remove(need)
                self.clock += 1
                self.idle_since[need[2]] = self.clock

    def leave(self, name: str) -> None:
        self.drop(name, None)
        for job in list(self.jobs):
            if not self.needed(job[1]):  # it was the one that left who asked for it
                self.jobs.remove(job)
                self.outputs = [entry for entry in self.outputs if entry[0] != job[1]]

    def void(self, keys: list[bytes]) -> None:
        self.outputs = [entry for entry in self.outputs if entry[0] not in keys]
        self.needs = [need for need in self.needs if need[2] not in keys]

    def end_plan(self) -> tuple[list[bytes], list[bytes]]:
        made, gone = [job[1] for job in self.jobs], self.evicted
        self.jobs, self.evicted = [], []
        return made, gone


@dataclass
class Life:
    """One request: its items, how far it is granted, and its slot while it runs."""

    name: str
    items: tuple[Span, ...]
    length: int
    slot: int = -1
    granted: int = 0


@dataclass
class Made:
    """One plan in flight."""

    rows: list[tuple[Life, int, int]]
    jobs: tuple[EncodeJob, ...]
    frees: tuple[bytes, ...]


@dataclass
class World:
    """Requests in random steps, up to two plans in flight, rows taken back and steps that fail anywhere."""

    rng: random.Random
    cache: EncoderCache = field(init=False)
    slow: SlowCache = field(init=False)
    lives: list[Life] = field(init=False)
    device: dict[bytes, int] = field(default_factory=dict)
    flight: list[Made] = field(default_factory=list)
    lost: list[bytes] = field(default_factory=list)
    num_cut: int = 0
    num_taken_back: int = 0
    num_failed: int = 0
    num_reused: int = 0

    def __post_init__(self) -> None:
        self.capacity = self.rng.randrange(6, 20)
        self.budget = self.rng.randrange(4, 16)
        self.cache, self.slow = EncoderCache(self.budget, self.capacity), SlowCache(self.budget, self.capacity)
        self.lives = [self.make_life(index) for index in range(5)]

    def make_life(self, index: int) -> Life:
        position, items = self.rng.randrange(3), []
        for _ in range(self.rng.randrange(4)):
            size = self.rng.randrange(1, min(self.budget, self.capacity) + 1)
            items.append(Span(position, size, b"%d of %d" % (self.rng.randrange(4), size)))
            position += size + self.rng.randrange(3)
        return Life(f"r{index}", tuple(items), position + 1)

    def plan(self) -> None:
        self.cache.begin_plan()
        rows: list[tuple[Life, int, int]] = []
        for life in self.lives:
            if life.granted == life.length or self.rng.random() < 0.3:
                continue
            if life.slot < 0:
                life.slot = min(slot for slot in range(9) if all(other.slot != slot for other in self.lives))
            wanted = self.rng.randrange(1, life.length - life.granted + 1)
            count = self.cache.grant(life.name, life.slot, life.items, life.granted, wanted)
            assert count == self.slow.grant(life.name, life.items, life.granted, wanted)
            self.num_cut += count < wanted
            if count:
                rows.append((life, life.granted, life.granted + count))
                life.granted += count
            if self.rng.random() < 0.15:
                victim = self.rng.choice(self.lives)
                rows = [row for row in rows if row[0] is not victim]
                self.num_taken_back += 1
                self.leave(victim)
        self.end_plan(rows)

    def leave(self, life: Life) -> None:
        self.cache.release(life.name)
        self.slow.leave(life.name)
        life.slot, life.granted = -1, 0
        for made in self.flight:
            made.rows = [row for row in made.rows if row[0] is not life]

    def end_plan(self, rows: list[tuple[Life, int, int]]) -> None:
        made = Made(rows, *self.cache.end_plan())
        encoded, freed = self.slow.end_plan()
        lost = [key for key in dict.fromkeys(self.lost) if not self.slow.size(key)]
        self.lost = []
        assert [job.key for job in made.jobs] == encoded
        assert list(made.frees) == freed + lost
        assert not set(made.frees) & set(encoded)
        for job in made.jobs:
            owner = next(life for life in self.lives if life.slot == job.slot)
            assert (owner.items[job.span].key, owner.items[job.span].length) == (job.key, job.num_tokens)
        check_encoder(self.cache)
        assert self.cache.num_needs == len(self.slow.needs)
        self.flight.append(made)

    def run(self, made: Made) -> None:
        """The device's part, in the order that plans promise."""
        for key in made.frees:
            self.device.pop(key, None)
        for job in made.jobs:
            self.device[job.key] = job.num_tokens
        assert sum(job.num_tokens for job in made.jobs) <= self.budget
        assert sum(self.device.values()) <= self.capacity
        for life, start, end in made.rows:
            for item in life.items:
                if start < item.start + item.length and item.start < end:
                    assert item.key in self.device, f"{life} needs {item} for [{start}, {end})"
                    self.num_reused += all(job.key != item.key for job in made.jobs)

    def commit(self) -> None:
        made = self.flight.pop(0)
        self.run(made)
        for life, _, end in made.rows:
            self.cache.commit(life.name, end)
            self.slow.drop(life.name, end)
            if end == life.length:
                self.leave(life)
                self.lives[self.lives.index(life)] = self.make_life(int(life.name[1:]) + 10)

    def fail(self) -> None:
        self.num_failed += 1
        for key in self.flight[0].frees:  # it got this far, or not
            if self.rng.random() < 0.5:
                self.device.pop(key, None)
        for job in self.flight[0].jobs:
            if self.rng.random() < 0.5:
                self.device[job.key] = job.num_tokens
        for made in reversed(self.flight):
            self.cache.undo(made.jobs, made.frees)
            keys = [job.key for job in made.jobs]
            self.slow.void(keys)
            self.lost += [*keys, *made.frees]
        touched = [life for life in self.lives if any(row[0] is life for made in self.flight for row in made.rows)]
        self.flight.clear()
        for life in touched:
            self.leave(life)
        check_encoder(self.cache)


def test_E01_E02_random_steps_agree_with_the_slow_twin_and_the_device_has_what_each_row_needs() -> None:
    totals = [0, 0, 0, 0]
    for seed in range(30):
        world = World(random.Random(seed))
        for _ in range(150):
            draw = world.rng.random()
            if world.flight and draw < 0.05:
                world.fail()
            elif len(world.flight) == 2 or (world.flight and draw < 0.4):
                world.commit()
            else:
                world.plan()
        for life in world.lives:
            world.leave(life)
        assert world.cache.num_needs == 0
        check_encoder(world.cache)
        counts = (world.num_cut, world.num_taken_back, world.num_failed, world.num_reused)
        totals = [total + count for total, count in zip(totals, counts, strict=True)]
    assert all(total > 100 for total in totals), totals


def test_E01_chunks_end_outside_items_that_are_computed_whole() -> None:
    spans = (Span(4, 6, b"a"), Span(10, 3, b"b"))
    assert whole_chunk(spans, 0, 4, 100) == 4
    assert whole_chunk(spans, 0, 5, 100) == 4  # up to the item
    assert whole_chunk(spans, 4, 2, 100) == 6  # the whole item
    assert whole_chunk(spans, 4, 2, 5) == 0  # it does not fit
    assert whole_chunk(spans, 4, 7, 100) == 6  # not into the next item
    assert whole_chunk(spans, 7, 1, 100) == 3  # its rest, after a cached prefix
    assert whole_chunk(spans, 13, 9, 9) == 9
