"""The journal's folder: what a next life finds, compaction, bounds, disks that fail."""

from __future__ import annotations

import asyncio
import errno
import threading
from array import array
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace as replaced
from tests.frontend.ledgers import Begun

from octavo.core.plan import Event, EventKind, Events, TokenLogprobs
from octavo.core.request import FinishError, FinishReason, Request, SamplingParams
from octavo.engine.client import finished
from octavo.engine.wire import Submit
from octavo.errors import ConfigError, EngineDeadError, EngineError, ErrorKind
from octavo.frontend import journal as journal_module
from octavo.frontend.journal import Journal
from octavo.frontend.journal_files import (
    Began,
    BootClock,
    Disk,
    Head,
    LoggedEvents,
    Opened,
    numbered,
    packed,
    read_records,
)
from octavo.frontend.journal_format1 import EndedChoice, EndedRequest, LoggedEventsV1, StartedRequest
from octavo.frontend.journal_state import JournaledRequest, JournalState, recover

HASH = b"h" * 32


class FailingDisk(Disk):
    """Fails as told: after so many more bytes, at every sync, at every new file."""

    def __init__(self) -> None:
        self.room: int | None = None
        self.sync_error: OSError | None = None
        self.open_error: OSError | None = None
        self.num_writes = self.num_syncs = 0

    def open(self, path: Path) -> int:
        if self.open_error is not None:
            raise self.open_error
        return super().open(path)

    def write(self, fd: int, data: bytes | memoryview) -> int:
        self.num_writes += 1
        if self.room is not None:
            if self.room <= 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            data = memoryview(data)[: self.room]
            self.room -= len(data)
        return super().write(fd, data)

    def sync(self, fd: int) -> None:
        self.num_syncs += 1
        if self.sync_error is not None:
            raise self.sync_error
        super().sync(fd)


def make_request(name: str, *, n: int = 1, logprobs: int | None = None, length: int = 4) -> Request:
    params = SamplingParams(max_tokens=100, seed=5, n=n, logprobs=logprobs, temperature=0.0)
    return Request(name, array("i", range(3, 3 + length)), params, 1.0, block_keys=(b"k" * 32,))


def began(key: str = "key", num_requests: int = 1) -> Began:
    return Began(0, "tenant", key, HASH, b"facts", num_requests, 1.0)


ADMITTED = Event(EventKind.ADMITTED, "a", 1.25, 1, cached_tokens=3)  # it arrived at 1.0


def tokens(
    name: str, *entries: tuple[int, int, int], logprobs: list[Any] | None = None, decisions: tuple[Event, ...] = ()
) -> Events:
    """(choice, position, id) of one request."""
    choices, positions, token_ids = (array("i", column) for column in zip(*entries, strict=True))
    return Events(1, 0.0, [name] * len(entries), choices, positions, token_ids, logprobs, decisions=decisions)


LEDGERS: WeakKeyDictionary[Journal, Begun] = WeakKeyDictionary()


def ledger_of(journal: Journal) -> Begun:
    """The ledger that a journal observes, with what is open in the journal."""
    if journal not in LEDGERS:
        ledger = LEDGERS[journal] = Begun(1, max_unread=10**6, observer=journal)
        for request in tuple(journal.state.open.values()):
            ledger.restore(request.state)
    return LEDGERS[journal]


def accept(journal: Journal, events: Events) -> None:
    """An engine sent this."""
    ledger_of(journal).accept(1, events)


def start(journal: Journal, name: str = "a", key: str = "key", **options: Any) -> int:
    run = journal.begin(began(key), [name])
    ledger_of(journal).add(make_request(name, **options))
    return run


async def renewed(journal: Journal) -> None:
    """Wait until no snapshot is being written."""
    while journal._renewal is not None and not journal._renewal.done():
        await asyncio.sleep(0.001)


def contents(journal: Journal) -> dict[str, Any]:
    """What a next life would know, by the request's id."""
    return state_contents(journal.state)


def state_contents(state: JournalState) -> dict[str, Any]:
    return {
        held.request.request_id: (
            {choice: list(page.ids) for choice, page in held.state.pages.items() if page.ids},
            held.end.finish_reason if held.end is not None else None,
        )
        for held in state.requests.values()
        if state.runs[held.run].is_whole
    }


def reopened(folder: Path, **options: Any) -> Journal:
    return Journal(folder, "m", **options)


def test_a_next_life_finds_requests_ids_and_ends(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", "m")
    run = start(journal, "a", "first", n=2, logprobs=1)
    start(journal, "b", "second")
    entry = TokenLogprobs(7, -0.5, 1, (7,), (-0.5,))
    accept(journal, tokens("a", (0, 0, 7), (1, 0, 8), logprobs=[entry, None], decisions=(ADMITTED,)))
    accept(journal, tokens("b", (0, 0, 5)))
    accept(journal, Events(1, 0.0, decisions=(finished("a", FinishReason.STOP, choice=0, stop_token_id=2),)))
    accept(journal, tokens("b", (0, 1, 6), decisions=(replace(finished("b", FinishReason.LENGTH), cached_tokens=4),)))
    accept(journal, tokens("unknown", (0, 0, 1)))
    expected = contents(journal)
    journal.close()
    later = reopened(tmp_path / "j")
    assert contents(later) == expected == {"a": ({0: [7], 1: [8]}, None), "b": ({0: [5, 6]}, FinishReason.LENGTH)}
    held = later.recovered[0].requests[0]
    assert later.recovered[0].began.run == run and later.recovered[0].began.key == "first"
    assert held.request == replace(journal.state.requests[held.number].request, block_keys=None)
    assert held.logprobs == {0: [entry], 1: [None]}
    entry_of = held.state
    assert (entry_of.queue_s, entry_of.cached_tokens) == (0.25, 3) and entry_of.page(0).end.stop_token_id == 2  # type: ignore[union-attr]
    assert [list(output.token_ids) for output in entry_of.take()] == [[7], [8]]
    ended = later.recovered[1].requests[0].state
    assert ended.end == replace(finished("b", FinishReason.LENGTH), cached_tokens=4) and ended.take()[-1].is_final
    assert later.begin(began(), []) > max(run.began.run for run in later.recovered[:2])
    later.close()


def test_the_ledger_tells_it(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "m")
    ledger = Begun(observer=journal)
    journal.begin(began(), ["a"])
    ledger.add(make_request("a"))
    ledger.add(make_request("other"))
    ledger.accept(0, tokens("a", (0, 0, 9)))
    ledger.accept(0, tokens("a", (0, 0, 9), (0, 5, 9), (0, 1, 4)))
    ledger.accept(0, tokens("other", (0, 0, 9)))
    assert contents(journal) == {"a": ({0: [9, 4]}, None)}
    ledger.end_all(FinishReason.ERROR, EngineError("gone"))
    assert contents(journal) == {"a": ({0: [9, 4]}, FinishReason.ERROR)}
    journal.begin(began("unlucky"), ["c"])
    ledger.add(make_request("c"))
    ledger.end_all(FinishReason.ERROR, EngineDeadError("there will be no other"))
    assert contents(journal)["c"] == ({}, None), "it stays open, for a server that has an engine"
    journal.forget(2)
    journal.begin(began("refused"), ["b"])
    ledger.add(make_request("b"))
    ledger.forget("b")
    assert list(contents(journal)) == ["a"] and len(journal.state.runs) == 1
    journal.close()


async def test_an_end_for_lack_of_an_engine_is_read_and_the_request_stays_for_the_next_process(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "m")
    start(journal, "a")
    accept(journal, tokens("a", (0, 0, 5)))
    ledger = ledger_of(journal)
    ledger.end_all(FinishReason.ERROR, EngineDeadError("there will be no other"))
    outputs = [output async for output in ledger.outputs("a")]
    assert outputs[-1].is_final and ledger.get("a") is None
    await journal._renew()
    journal.close()
    later = reopened(tmp_path)
    assert contents(later) == {"a": ({0: [5]}, None)} and later.state.open
    later.close()


def test_what_was_forgotten_or_never_whole_is_not_found(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "m")
    gone = start(journal, "a", "1")
    journal.begin(began("2", num_requests=2), ["b-0", "b-1"])
    ledger_of(journal).add(make_request("b-0"))
    start(journal, "c", "3")
    journal.forget(gone)
    journal.forget(gone)
    accept(journal, tokens("a", (0, 0, 1)))
    journal.close()
    later = reopened(tmp_path)
    assert list(contents(later)) == ["c"] and [run.began.key for run in later.recovered] == ["3"]
    later.close()


def test_files_are_private_and_a_folder_serves_one(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "deep" / "j", "m")
    assert (tmp_path / "deep" / "j").stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in (tmp_path / "deep" / "j").iterdir())
    with pytest.raises(ConfigError, match="in use"):
        reopened(tmp_path / "deep" / "j")
    journal.close()
    journal.close()
    reopened(tmp_path / "deep" / "j").close()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--journal"):
        reopened(tmp_path / "file")


def test_another_model_s_ids_mean_nothing(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "m")
    start(journal)
    journal.close()
    later = Journal(tmp_path, "another")
    assert not later.recovered and any("another" in warning for warning in later.warnings)
    later.close()


def test_times_move_with_the_boot_and_not_with_the_wall_clock() -> None:
    head = Head(1, 1, 0, "boot-1", 100.0, 1_000_000.0, "m")
    assert BootClock("boot-1", 500.0, 1_000_400.0 + 3600).shift_from(head) == 0.0
    assert BootClock("boot-2", 5.0, 1_000_060.0).shift_from(head) == pytest.approx(5.0 - 160.0)


def live_segment(folder: Path) -> Path:
    return numbered(folder)[-1][1]


def make_history(folder: Path) -> tuple[list[int], dict[int, dict[str, Any]]]:
    """A folder of one life, the ends of its records in the live segment, and what was known after each."""
    journal = Journal(folder, "m")
    path = live_segment(folder)
    known = {path.stat().st_size: contents(journal)}

    def note() -> None:
        known[path.stat().st_size] = contents(journal)

    for name in ("a", "b"):
        journal.begin(began(name), [name])
        note()
        ledger_of(journal).add(make_request(name, n=2))
        note()
    for position in range(4):
        accept(journal, tokens("a", (0, position, position + 7), (1, position, position + 9)))
        note()
        accept(journal, tokens("b", (0, position, position + 3)))
        note()
    accept(journal, Events(1, 0.0, decisions=(finished("a", FinishReason.STOP),)))
    note()
    journal.close()
    return list(known), known


def test_a_crash_at_any_byte_loses_what_was_being_written_and_nothing_else(tmp_path: Path) -> None:
    ends, known = make_history(tmp_path / "whole")
    name, data = live_segment(tmp_path / "whole").name, live_segment(tmp_path / "whole").read_bytes()
    snapshot = numbered(tmp_path / "whole")[0][1]
    for cut in range(ends[0], len(data)):
        folder = tmp_path / str(cut)
        folder.mkdir()
        (folder / snapshot.name).write_bytes(snapshot.read_bytes())
        (folder / name).write_bytes(data[:cut])
        later = recover(folder, "m", BootClock.now())
        whole = max(end for end in ends if end <= cut)
        assert state_contents(later.state) == known[whole], cut
        assert bool(later.warnings) == (cut not in ends)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_damage_in_the_middle_never_makes_a_wrong_answer(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Behind damage only what was told before it counts; an end that came later is not believed."""
    folder = tmp_path_factory.mktemp("damaged")
    ends, known = make_history(folder)
    path = live_segment(folder)
    content = bytearray(path.read_bytes())
    at = data.draw(st.integers(ends[0], len(content) - 1))
    content[at] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    later = recover(folder, "m", BootClock.now())
    assert state_contents(later.state) == known[max(end for end in ends if end <= at)]
    assert later.warnings and str(path.name) in later.warnings[0]


def test_a_hole_between_segments_leaves_requests_open_with_what_came_before(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "m")
    start(journal)
    accept(journal, tokens("a", (0, 0, 5)))
    path = live_segment(tmp_path)
    whole = path.read_bytes()
    accept(journal, tokens("a", (0, 1, 6)))
    asyncio.run(journal._renew())
    accept(journal, tokens("a", (0, 2, 7), decisions=(finished("a", FinishReason.LENGTH),)))
    journal.close()
    numbered(tmp_path)[0][1].unlink()  # the snapshot is lost, and an old segment with less is back
    path.write_bytes(whole)
    later = reopened(tmp_path)
    assert contents(later) == {"a": ({0: [5]}, None)}
    accept(later, tokens("a", (0, 1, 6)))
    assert contents(later) == {"a": ({0: [5, 6]}, None)}, "it is resumed, and takes ids again"
    later.close()


def test_records_that_fit_nothing_are_counted_and_told_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = reopened(tmp_path)
    start(journal)
    journal.close()
    clean = reopened(tmp_path)
    assert not clean.warnings
    clean.close()
    one = array("i", [0]).tobytes()
    stray = [
        Opened(77, 0, 9, Submit.of(0, replace(make_request("stray"), block_keys=None))),  # of a run that never began
        LoggedEvents(1.0, one + one, one, one, one, None),  # columns of unequal lengths
    ]
    with live_segment(tmp_path).open("ab") as file:
        file.write(b"".join(packed(record) for record in stray))
    later = reopened(tmp_path)
    assert later.state.num_faults == 2
    assert any(warning.startswith("2 records do not fit") for warning in later.warnings)
    assert "2 records do not fit" in caplog.text
    later.close()


def test_a_superseded_segment_that_was_not_deleted_does_not_count(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "m")
    run = start(journal)
    old = live_segment(tmp_path)
    data = old.read_bytes()
    journal.forget(run)
    journal.close()
    reopened(tmp_path).close()
    assert not old.exists()
    old.write_bytes(data)
    found = recover(tmp_path, "m", BootClock.now())
    assert not found.state.runs and not found.warnings


def test_a_request_that_ends_every_life_is_given_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    journal = Journal(tmp_path, "m")
    start(journal, "bad", "bad")
    start(journal, "good", "good")
    start(journal, "done", "done")
    accept(journal, tokens("done", (0, 0, 1), decisions=(finished("done", FinishReason.STOP),)))
    for life in range(1, 6):
        journal.close()
        journal = reopened(tmp_path)
        accept(journal, tokens("good", (0, life - 1, 1)))
        lives = {run.began.key: run.began.num_restarts for run in journal.recovered}
        assert lives == {"good": int(life == 1), "done": 0} | ({"bad": life} if life <= 3 else {})
    journal.close()
    assert "given up" in caplog.text


async def test_compaction_keeps_what_is_held_and_frees_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "COMPACT_BYTES", 20_000)
    journal = Journal(tmp_path, "m")
    start(journal, "kept", "kept", logprobs=1)
    for number in range(300):
        run = start(journal, f"r{number}", f"k{number}", length=200)
        entry = TokenLogprobs(7, -0.5, 1, (7,), (-0.5,))
        accept(journal, tokens("kept", (0, number, 7), logprobs=[entry]))
        accept(journal, tokens(f"r{number}", (0, 0, 1), decisions=(finished(f"r{number}", FinishReason.STOP),)))
        if number < 290:
            journal.forget(run)
        journal.tick()
        await asyncio.sleep(0)
    for _ in range(2):
        await renewed(journal)
        journal.tick()
    assert journal.num_compactions >= 2 and not journal.trouble
    size = sum(path.stat().st_size for _, path in numbered(tmp_path))
    assert size < 2 * journal.state.num_bytes + 40_000 and len(numbered(tmp_path)) <= 2
    expected = contents(journal)
    journal.close()
    later = reopened(tmp_path)
    assert contents(later) == expected and len(expected) == 11 and len(expected["kept"][0][0]) == 300
    assert all(entry is not None for entry in later.recovered[0].requests[0].logprobs[0])
    later.close()


async def test_R21_a_full_disk_suspends_it_and_room_brings_it_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(journal_module, "RETRY_S", 0.0)
    disk = FailingDisk()
    journal = Journal(tmp_path, "m", disk=disk)
    start(journal, "a", "1")
    accept(journal, tokens("a", (0, 0, 5)))
    disk.room = 10  # the next record fits in part
    accept(journal, tokens("a", (0, 1, 6)))
    assert journal.trouble == "No space left on device" and journal.report()["state"] == "suspended"
    start(journal, "b", "2")
    accept(journal, tokens("b", (0, 0, 8), decisions=(finished("b", FinishReason.STOP),)))
    journal.tick()
    await renewed(journal)
    assert journal.trouble is not None, "still full"
    assert not list(tmp_path.glob("*.tmp"))
    later = recover(tmp_path, "m", BootClock.now())
    assert list(later.state.requests[1].state.pages[0].ids) == [5] and not later.warnings, "what was there is whole"
    disk.room = None
    journal.tick()
    await renewed(journal)
    assert not journal.trouble and journal.num_suspensions == 1
    accept(journal, tokens("a", (0, 2, 7)))
    expected = contents(journal)
    assert expected == {"a": ({0: [5, 6, 7]}, None), "b": ({0: [8]}, FinishReason.STOP)}
    journal.close()
    assert "suspended" in caplog.text and "taken up again" in caplog.text
    after = reopened(tmp_path)
    assert contents(after) == expected
    after.close()


async def test_R21_no_descriptor_for_a_compaction_is_no_trouble(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "COMPACT_BYTES", 1)
    disk = FailingDisk()
    journal = Journal(tmp_path, "m", disk=disk)
    for number in range(40):
        journal.forget(start(journal, f"r{number}", length=100))
    disk.open_error = OSError(errno.EMFILE, "Too many open files")
    journal.tick()
    await renewed(journal)
    assert journal.trouble is None
    start(journal, "a")
    journal.close()
    later = reopened(tmp_path)
    assert list(contents(later)) == ["a"]
    later.close()


def test_R21_a_disk_that_is_full_at_the_start_is_no_reason_not_to_serve(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "m")
    start(journal)
    journal.close()
    disk = FailingDisk()
    disk.room = 0
    later = Journal(tmp_path, "m", disk=disk)
    assert later.trouble is not None and list(contents(later)) == ["a"]
    start(later, "b")
    later.close()
    last = reopened(tmp_path)
    assert list(contents(last)) == ["a"], "the segments of the life before are still there"
    last.close()


async def test_who_comes_while_a_sync_runs_waits_for_it(tmp_path: Path) -> None:
    """What it holds may have been written before that sync began, and is not durable before it ended."""

    class SlowDisk(FailingDisk):
        def sync(self, fd: int) -> None:
            running.set()
            assert go.wait(60)
            super().sync(fd)

    running, go = threading.Event(), threading.Event()
    go.set()
    journal = Journal(tmp_path, "m", is_synced=True, disk=SlowDisk())
    go.clear()
    running.clear()
    start(journal, "a", "1")
    start(journal, "b", "2")
    first = asyncio.create_task(journal.synced())
    while not running.is_set():
        await asyncio.sleep(0.001)
    second = asyncio.create_task(journal.synced())
    start(journal, "c", "3")
    third = asyncio.create_task(journal.synced())
    await asyncio.sleep(0.02)
    assert not first.done() and not second.done() and not third.done()
    go.set()
    await asyncio.wait_for(asyncio.gather(first, second, third), 60)
    assert journal._num_durable == journal._num_written
    journal.close()


async def test_group_sync_makes_all_who_wait_durable_with_few_syncs(tmp_path: Path) -> None:
    disk = FailingDisk()
    journal = Journal(tmp_path, "m", is_synced=True, disk=disk)
    before = disk.num_syncs

    async def one(number: int) -> None:
        start(journal, f"r{number}", f"k{number}")
        await journal.synced()

    await asyncio.gather(*(one(number) for number in range(50)))
    assert 1 <= disk.num_syncs - before <= 3
    await journal.synced()
    assert disk.num_syncs - before <= 3, "nothing new to sync"
    disk.sync_error = OSError(errno.EIO, "Input/output error")
    await one(99)
    assert journal.trouble == "Input/output error", "and nobody was held up"
    journal.close()
    unsynced = Journal(tmp_path / "other", "m", disk=disk)
    disk.num_syncs = 0
    start(unsynced)
    await unsynced.synced()
    assert disk.num_syncs == 0
    unsynced.close()


def test_one_delivery_is_one_write(tmp_path: Path) -> None:
    disk = FailingDisk()
    journal = Journal(tmp_path, "m", disk=disk)
    for number in range(8):
        start(journal, f"r{number}", f"k{number}")
    before = disk.num_writes
    names = [f"r{number}" for number in range(8)]
    zeros = array("i", [0] * 8)
    accept(
        journal,
        Events(
            1, 0.0, names, zeros, zeros, zeros, decisions=tuple(finished(name, FinishReason.STOP) for name in names)
        ),
    )
    assert disk.num_writes == before + 1
    accept(journal, Events(1, 0.0, names, zeros, zeros, zeros))
    assert disk.num_writes == before + 1, "nobody of them is open"
    journal.close()


@pytest.mark.parametrize("number", [1, 4, "a"])
@pytest.mark.parametrize("kind", ["seg", "tmp"])
def test_a_file_that_is_no_segment_stays(tmp_path: Path, number: int | str, kind: str) -> None:
    name = f"journal-{number:0>8}.{kind}"
    (tmp_path / name).write_text("my thesis, chapter one\n")
    for _ in range(2):
        journal = Journal(tmp_path, "model")
        assert sum(name in warning for warning in journal.warnings) == (kind == "seg" and number != "a")
        journal.close()
    assert (tmp_path / name).read_text() == "my thesis, chapter one\n"


@pytest.mark.parametrize("kind", ["seg", "tmp"])
@pytest.mark.parametrize(("length", "zeros"), [(0, 0), (0, 4096), (11, 0), (30, 0)])
def test_a_segment_that_was_cut_or_never_written_is_cleared(tmp_path: Path, kind: str, length: int, zeros: int) -> None:
    left = tmp_path / f"journal-00000001.{kind}"
    left.write_bytes(packed(Head(1, 1, 0, "", 0.0, 0.0, "model"))[:length] + bytes(zeros))
    Journal(tmp_path, "model").close()
    assert not left.exists()


@pytest.mark.parametrize("is_same_boot", [True, False])
def test_a_journal_of_format_1_is_read_and_written_anew(tmp_path: Path, is_same_boot: bool) -> None:
    clock = BootClock.now()
    mono, shift_s = (clock.mono, 0.0) if is_same_boot else (clock.mono - 500.0, 500.0)
    entry = TokenLogprobs(7, -0.5, 1, (7,), (-0.5,))

    def column(*values: int) -> bytes:
        return array("i", values).tobytes()

    records: list[Any] = [Head(1, 1, 0, clock.boot if is_same_boot else "another boot", mono, clock.wall, "m")]
    for number, name in enumerate(("a", "b", "c"), 1):
        request = replace(make_request(name, n=1 + (name == "a"), logprobs=1), block_keys=None)
        records += [replaced(began(name), run=number), Opened(number, 0, number, Submit.of(0, request))]
    logged = [(7, -0.5, 1, (7,), (-0.5,)), None, None]
    records += [
        LoggedEventsV1(
            2.0, column(1, 1, 2), column(0, 1, 0), column(0, 0, 0), column(7, 8, 9), tuple(logged),
            starts=(StartedRequest(1, 0.25, 3),),
        ),
        LoggedEventsV1(
            3.0, b"", b"", b"", b"", None, (EndedChoice(1, 1, FinishReason.STOP, 2, None),),
            (
                EndedRequest(2, FinishReason.LENGTH, None, 4, 0, 0.0, None),
                EndedRequest(3, FinishReason.ERROR, None, 0, 0, 0.0, "step failed", ErrorKind.STEP_FAILED),
                EndedRequest(9, FinishReason.STOP, None, 0, 0, 0.0, None),
            ),
        ),
    ]  # fmt: skip
    (tmp_path / "journal-00000001.seg").write_bytes(b"".join(packed(record) for record in records))
    for _ in range(2):  # as it was, then as this version wrote it
        journal = reopened(tmp_path)
        assert not journal.warnings
        assert contents(journal) == {
            "a": ({0: [7], 1: [8]}, None),
            "b": ({0: [9]}, FinishReason.LENGTH),
            "c": ({}, FinishReason.ERROR),
        }
        a, b, c = (run.requests[0] for run in journal.recovered)
        assert a.logprobs == {0: [entry], 1: [None]} and a.state.first_at == pytest.approx(2.0 + shift_s)
        assert (a.state.queue_s, a.state.cached_tokens) == (pytest.approx(0.25), 3)
        assert a.state.pages[1].end is not None and a.state.pages[1].end.stop_token_id == 2
        assert b.end is not None and b.end.cached_tokens == 4 and b.ended_at == pytest.approx(3.0 + shift_s)
        assert c.end is not None and c.end.error == FinishError(ErrorKind.STEP_FAILED, "step failed")
        journal.close()
    heads = [read_records(path.read_bytes()).head for _, path in numbered(tmp_path)]
    assert all(head is not None and head.version == 2 for head in heads)


def test_another_format_is_left_out_by_its_number(tmp_path: Path) -> None:
    head = Head(3, 1, 0, "", 0.0, 0.0, "m")
    (tmp_path / "journal-00000001.seg").write_bytes(packed(head) + packed(replaced(began(), run=1)))
    journal = reopened(tmp_path)
    assert not journal.recovered and any("is of version 3" in warning for warning in journal.warnings)
    journal.close()


def known(requests: Iterable[JournaledRequest]) -> dict[str, Any]:
    """All that a restart must find of requests, by their ids; choices without an id and an end count as absent."""
    return {
        each.request.request_id: (
            {
                choice: (list(page.ids), each.logprobs.get(choice, []), page.end and page.end.finish_reason)
                for choice, page in each.state.pages.items()
                if page.ids or (page.end is not None and page.end.kind is EventKind.CHOICE_FINISHED)
            },
            each.end and (each.end.finish_reason, each.end.error, each.ended_at),
            (
                each.state.queue_s,
                each.state.cached_tokens,
                each.state.first_at is None,
            ),  # by another reading of the clock
        )
        for each in requests
    }


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_restart_finds_what_the_ledger_had_whatever_came_before(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Random histories with choices, log-probabilities, ends, runs that are forgotten, snapshots and failing disks."""

    async def history() -> None:
        disk = FailingDisk()
        clock = iter(range(1, 10**6))
        journal = Journal(tmp_path_factory.mktemp("j"), "m", disk=disk, now=lambda: float(next(clock)))
        ledger = ledger_of(journal)
        runs: dict[str, int] = {}
        for number in range(data.draw(st.integers(1, 40))):
            names = sorted(runs)
            action = data.draw(st.sampled_from(["start", *["step"] * 6, "end", "forget", "renew", "fail"]))
            if action == "start":
                options = {"n": data.draw(st.integers(1, 2)), "logprobs": data.draw(st.sampled_from([None, 1]))}
                runs[f"r{number}"] = start(journal, f"r{number}", f"k{number}", **options)
                ledger.add(make_request(f"without a key {number}"))
            elif action == "renew":
                disk.room = None
                await journal._renew()
                assert journal.trouble is None
            elif action == "fail":
                disk.room = data.draw(st.integers(0, 200))
            elif names and action == "forget":
                journal.forget(runs.pop(data.draw(st.sampled_from(names))))
            elif names:
                ledger.accept(1, data.draw(next_events(ledger, may_end=action == "end")))
        disk.room = None
        if journal.trouble is not None:
            await journal._renew()
        expected = known(journal.state.requests.values())
        journal.close()
        later = recover(journal.folder, "m", BootClock.now())
        assert not later.warnings and known(later.state.requests.values()) == expected
        assert set(later.state.open) == {name for name, (_, end, _) in expected.items() if end is None}

    asyncio.run(history())


@st.composite
def next_events(draw: st.DrawFn, ledger: Begun, may_end: bool) -> Events:
    """What an engine may send next of some open requests: admissions, a token for some choices, ends."""
    names: list[str] = []
    columns = [array("i"), array("i"), array("i")]
    logprobs: list[TokenLogprobs | None] = []
    decisions: list[Event] = []
    for state in draw(st.lists(st.sampled_from(list(ledger)), unique=True)) if len(ledger) else ():
        name = state.request.request_id
        if state.queue_s is None:
            decisions.append(Event(EventKind.ADMITTED, name, 1.25, 1, cached_tokens=draw(st.integers(0, 4))))
        for choice in range(state.request.params.n):
            page = state.page(choice)
            if page is not None and page.end is None and draw(st.booleans()):
                names.append(name)
                for column, value in zip(columns, (choice, len(page.ids), draw(st.integers(0, 99))), strict=True):
                    column.append(value)
                logprobs.append(TokenLogprobs(columns[2][-1], -0.5, 1) if state.has_logprobs else None)
        if may_end and draw(st.booleans()):
            choice_end = 0 if state.request.params.n > 1 and not state.ended_choices else None
            reason = draw(st.sampled_from([FinishReason.STOP, FinishReason.ERROR]))
            error = FinishError(ErrorKind.STEP_FAILED, "m") if reason is FinishReason.ERROR else None
            decisions.append(finished(name, reason, error, choice=choice_end))
    return Events(1, 0.0, names, *columns, logprobs if any(logprobs) else None, decisions=tuple(decisions))
