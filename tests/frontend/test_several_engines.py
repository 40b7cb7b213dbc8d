"""The ledger over several engines: one binding for each request, moves, losses, suspects, frames of old bindings."""

from __future__ import annotations

import asyncio
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.engine.fakes import make_request
from tests.frontend.ledgers import SilentLink, has_engine, is_holding
from tests.frontend.test_open_requests import tokens

from octavo.core.plan import Events
from octavo.core.request import FinishReason, Request
from octavo.engine.client import Accepted, finished
from octavo.errors import InvalidRequestError
from octavo.executors.protocol import Fingerprint
from octavo.frontend.open_request import BoundEngine, OpenRequest
from octavo.frontend.open_requests import ALONE_AFTER, MAX_CRASHES, SUSPECT_WAIT_S, OpenRequests


class InTurn:
    """An EngineRouter that takes the engines in turn, and notes what it is called with."""

    def __init__(self) -> None:
        self.num_chosen = 0
        self.ended_ids: list[tuple[str, int]] = []

    def choose(self, request: Request, targets: Sequence[BoundEngine]) -> BoundEngine:
        assert targets and all(target.is_open for target in targets)
        self.num_chosen += 1
        return targets[self.num_chosen % len(targets)]

    def ended(self, request_id: str, num_output_tokens: int, first_at: float | None) -> None:
        self.ended_ids.append((request_id, num_output_tokens))


def ledger_of(num_engines: int, *names: str) -> tuple[OpenRequests, list[SilentLink]]:
    ledger = OpenRequests(router=InTurn())
    links = [SilentLink(epoch) for epoch in range(1, num_engines + 1)]
    for link in links:
        ledger.begin_epoch(link, link.epoch)
    for name in names:
        ledger.restore(OpenRequest(make_request(name, max_tokens=90)))
    return ledger, links


def sent(link: SilentLink) -> list[str]:
    return [request.request_id for request in link.sent]


def ids_of(ledger: OpenRequests, name: str) -> list[int]:
    state = ledger.get(name)
    assert state is not None
    return list(state.pages[0].ids)


def test_a_lost_engines_requests_are_sent_to_the_others_at_once_with_what_was_emitted() -> None:
    ledger, (first, second) = ledger_of(2, "a", "b", "c", "d")
    assert (sent(first), sent(second)) == (["b", "d"], ["a", "c"])
    ledger.accept(2, tokens("a", 0, 5, 6))
    assert [state.request.request_id for state in ledger.lose_engine((), 2)] == ["a", "c"]
    assert sent(first) == ["b", "d", "a", "c"] and list(first.sent[2].emitted_token_ids or ()) == [5, 6]
    assert ledger.num_resumed == 2 and ledger.num_held == 0
    ledger.accept(2, tokens("a", 2, 9))
    assert ids_of(ledger, "a") == [5, 6] and ledger.rejections.stale_epochs == 1
    ledger.accept(1, tokens("a", 2, 7))
    assert ids_of(ledger, "a") == [5, 6, 7]


def test_frames_of_an_old_binding_are_dropped() -> None:
    """Whatever the former engine still sends, although it is current: ids, scores, ends, in its epoch."""
    ledger, (first, second) = ledger_of(2, "a", "b")
    ledger.accept(2, tokens("a", 0, 5))
    ledger.move_requests(ledger.engines[1])
    assert second.cancelled == ["a"] and sent(first) == ["b", "a"] and ledger.num_moved == 1
    ledger.accept(2, tokens("a", 1, 99))
    ledger.accept(2, tokens("a", 2, 98, end=FinishReason.LENGTH))
    ledger.accept(2, tokens("a", 1, end=FinishReason.CANCELLED))
    assert ids_of(ledger, "a") == [5] and ledger.get_open("a") is not None
    assert ledger.rejections.moved == 4 and ledger.rejections.unknown == 0
    ledger.accept(1, tokens("a", 1, 6, end=FinishReason.LENGTH))
    assert ids_of(ledger, "a") == [5, 6] and ledger.get_open("a") is None
    router = ledger._router
    assert isinstance(router, InTurn) and router.ended_ids == [("a", 2)]


def test_a_moved_request_returns_to_an_engine_only_after_that_has_ended_it() -> None:
    ledger, (first, second) = ledger_of(2, "a")
    ledger.move_requests(ledger.engines[1])
    assert sent(first) == ["a"]
    ledger.lose_engine((), 1)
    assert sent(second) == ["a"] and ledger.num_held == 1, "its cancel is not confirmed"
    ledger.accept(2, tokens("a", 0, 77))
    assert ids_of(ledger, "a") == []
    ledger.accept(2, tokens("a", 0, end=FinishReason.CANCELLED))
    assert sent(second) == ["a", "a"] and ledger.num_held == 0
    ledger.accept(2, tokens("a", 0, 5))
    assert ids_of(ledger, "a") == [5]


def test_a_closed_engine_finishes_its_requests_and_gets_no_other() -> None:
    ledger, (first, second) = ledger_of(2, "a")
    ledger.set_open(ledger.engines[0], False)
    for name in ("b", "c"):
        ledger.restore(OpenRequest(make_request(name)))
    assert (sent(first), sent(second)) == ([], ["a", "b", "c"])
    ledger.set_open(ledger.engines[1], False)
    ledger.restore(OpenRequest(make_request("d")))
    assert ledger.num_held == 1
    ledger.set_open(ledger.engines[0], True)
    assert sent(first) == ["d"]


def test_the_load_of_an_engine_is_that_of_its_requests() -> None:
    ledger, _ = ledger_of(2, "a", "b", "c")
    assert [(engine.num_open, engine.load) for engine in ledger.engines] == [(1, 6), (2, 12)]
    ledger.move_requests(ledger.engines[1])
    assert [(engine.num_open, engine.load) for engine in ledger.engines] == [(3, 18), (0, 0)]
    ledger.cancel(["a"])
    ledger.accept(1, tokens("a", 0, end=FinishReason.CANCELLED))
    assert [(engine.num_open, engine.load) for engine in ledger.engines] == [(2, 12), (0, 0)]


def test_a_suspect_waits_for_a_new_engine_while_the_others_get_requests() -> None:
    ledger, _ = ledger_of(3, "x", "y", "bad")
    for epoch in (1, 2, 3):
        for name in ("x", "y"):
            ledger.accept(epoch, tokens(name, 0, 5))
    state = ledger.get_open("bad")
    assert state is not None and state.engine is not None
    for _ in range(ALONE_AFTER):
        assert state.engine is not None
        ledger.lose_engine(["bad"], state.engine.epoch)
    assert state.engine is None and ledger.num_held == 1
    fourth = SilentLink(4)
    ledger.begin_epoch(fourth, 4)
    assert sent(fourth) == ["bad"] and is_holding(ledger)
    ledger.restore(OpenRequest(make_request("new")))
    assert sent(fourth) == ["bad"], "it runs alone"
    ledger.lose_engine(["bad"], 4)
    assert state.end is not None and state.num_crashes == MAX_CRASHES
    assert {name for name in ("x", "y", "new") if has_engine(ledger, name)} == {"x", "y", "new"}


def test_an_engine_is_emptied_for_a_suspect_that_has_waited() -> None:
    ledger, links = ledger_of(3, "x", "y", "bad")
    state = ledger.get_open("bad")
    for name in ("x", "y"):
        other = ledger.get_open(name)
        assert other is not None and other.engine is not None
        ledger.accept(other.engine.epoch, tokens(name, 0, 5))
    assert state is not None
    for _ in range(ALONE_AFTER):
        assert state.engine is not None
        ledger.lose_engine(["bad"], state.engine.epoch)
    (last,) = ledger.engines
    ledger.place_suspects(10.0)
    ledger.place_suspects(10.0 + SUSPECT_WAIT_S / 2)
    assert state.engine is None
    ledger.place_suspects(10.1 + SUSPECT_WAIT_S)
    assert state.engine is last and list(last.requests) == ["bad"] and ledger.num_held == 2
    link = links[last.epoch - 1]
    assert set(link.cancelled) >= {"x", "y"}
    ledger.accept(last.epoch, tokens("bad", 0, 5))
    assert ledger.num_held == 2, "they left this engine, and it has not ended them"
    for name in ("x", "y"):
        ledger.accept(last.epoch, tokens(name, 1, end=FinishReason.CANCELLED))
    assert ledger.num_held == 0 and last.num_open == 3


def test_a_begun_request_stays_with_its_version() -> None:
    ledger = OpenRequests(router=InTurn())
    old, new = Fingerprint("old"), Fingerprint("new")
    links = [SilentLink(epoch) for epoch in (1, 2, 3)]
    for link, fingerprint in zip(links, (old, old, new), strict=True):
        ledger.begin_epoch(link, link.epoch, fingerprint)
    ledger.set_open(ledger.engines[1], False)
    ledger.set_open(ledger.engines[2], False)
    for name in ("a", "b"):
        ledger.restore(OpenRequest(make_request(name)))
    ledger.set_open(ledger.engines[1], True)
    ledger.set_open(ledger.engines[2], True)
    ledger.accept(1, tokens("a", 0, 5))
    ledger.lose_engine((), 1)
    assert "a" in sent(links[1]), "there is another engine of its version"
    a = ledger.get_open("a")
    assert a is not None and a.is_exact and ledger.num_inexact == 0
    ledger.lose_engine((), 2)
    assert "a" in sent(links[2]) and not a.is_exact and ledger.num_inexact == 1
    b = ledger.get_open("b")
    assert b is not None and b.is_exact, "it had no id"


async def test_a_late_answer_of_a_former_engine_is_ignored() -> None:
    """The submit waits for the answer of the engine that has the request now."""
    answers: list[asyncio.Future[Accepted]] = []

    def send(request: Request, media: object = ()) -> asyncio.Future[Accepted]:
        answers.append(asyncio.get_running_loop().create_future())
        return answers[-1]

    ledger = OpenRequests()
    for epoch in (1, 2):
        link = SimpleNamespace(epoch=epoch, send=send, post_cancel=lambda *_: None)
        ledger.begin_epoch(link, epoch)  # type: ignore[arg-type]
    submit = asyncio.create_task(ledger.submit(make_request("a")))
    await asyncio.sleep(0)
    ledger.move_requests(ledger.engines[0])
    answers[0].set_exception(InvalidRequestError("it was cancelled before it was admitted"))
    await asyncio.sleep(0)
    assert not submit.done()
    answers[1].set_result(Accepted("a", 5, capped=False))
    assert (await submit).max_tokens == 5


def test_an_epoch_begins_once() -> None:
    ledger, links = ledger_of(2)
    with pytest.raises(ValueError, match="does not follow"):
        ledger.begin_epoch(links[0], 7)


# --- any order of events


def right_id(name: str, position: int) -> int:
    return (sum(name.encode()) * 31 + position * 7) % 97


class Engine:
    """An EngineLink whose commands run, and whose frames are delivered, when the test says so."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.commands: deque[tuple[str, Any]] = deque()
        self.running: dict[str, int] = {}  # request -> its next position
        self.frames: deque[Events] = deque()

    def send(self, request: Request, media: object = ()) -> Any:
        self.commands.append(("submit", request))
        return SimpleNamespace(add_done_callback=lambda callback: None)

    def post_cancel(
        self, request_ids: Iterable[str], reason: FinishReason = FinishReason.CANCELLED, choice: int | None = None
    ) -> None:
        self.commands.append(("cancel", tuple(request_ids)))

    def run_command(self) -> None:
        verb, value = self.commands.popleft()
        if verb == "submit":
            assert value.request_id not in self.running, "an id is in use once at one engine"
            self.running[value.request_id] = len(value.emitted_token_ids or ())
            return
        for name in value:
            if self.running.pop(name, None) is not None:
                self.frames.append(Events(1, 0.0, decisions=(finished(name, FinishReason.CANCELLED),)))

    def step(self, last: int) -> None:
        """A token for every running request; those with `last` tokens end."""
        names = list(self.running)
        positions = [self.running[name] for name in names]
        ends = []
        for name in names:
            self.running[name] += 1
            if self.running[name] >= last:
                del self.running[name]
                ends.append(finished(name, FinishReason.LENGTH))
        ids = array("i", [right_id(name, position) for name, position in zip(names, positions, strict=True)])
        choices, places = array("i", [0] * len(names)), array("i", positions)
        self.frames.append(Events(1, 0.0, names, choices, places, ids, decisions=tuple(ends)))


class LedgerMachine(RuleBasedStateMachine):
    """Engines begin, step, are lost, closed and emptied while requests are submitted and cancelled."""

    LAST = 6  # tokens of each answer

    @initialize()
    def begin(self) -> None:
        self.ledger = OpenRequests(router=InTurn())
        self.engines: dict[int, Engine] = {}  # current
        self.lost: list[Engine] = []
        self.states: list[OpenRequest] = []
        self.cancelled: set[str] = set()
        self.num_epochs = 0
        self.now = 0.0

    def engine(self, index: int) -> Engine:
        return list(self.engines.values())[index % len(self.engines)]

    @rule()
    def submit(self) -> None:
        state = OpenRequest(make_request(f"r{len(self.states)}", max_tokens=self.LAST))
        self.states.append(state)
        self.ledger.restore(state)

    @precondition(lambda self: len(self.engines) < 4)
    @rule()
    def engine_begins(self) -> None:
        self.num_epochs += 1
        engine = self.engines[self.num_epochs] = Engine(self.num_epochs)
        self.ledger.begin_epoch(engine, self.num_epochs % 4)

    @precondition(lambda self: self.engines)
    @rule(index=st.integers(0, 3), steps=st.integers(1, 3))
    def engine_runs(self, index: int, steps: int) -> None:
        engine = self.engine(index)
        while engine.commands:
            engine.run_command()
        for _ in range(steps):
            engine.step(self.LAST)

    @precondition(lambda self: self.engines)
    @rule(index=st.integers(0, 3), count=st.integers(1, 4))
    def frames_arrive(self, index: int, count: int) -> None:
        engine = self.engine(index)
        for _ in range(min(count, len(engine.frames))):
            self.ledger.accept(engine.epoch, engine.frames.popleft())

    @precondition(lambda self: self.engines)
    @rule(index=st.integers(0, 3), is_batch=st.booleans())
    def engine_is_lost(self, index: int, is_batch: bool) -> None:
        engine = self.engine(index)
        del self.engines[engine.epoch]
        self.lost.append(engine)
        sent = (value.request_id for verb, value in engine.commands if verb == "submit")
        self.ledger.lose_engine((*engine.running, *sent) if is_batch else (), engine.epoch)

    @precondition(lambda self: self.lost)
    @rule(index=st.integers(0, 9))
    def a_lost_engine_sends(self, index: int) -> None:
        engine = self.lost[index % len(self.lost)]
        engine.step(self.LAST)
        self.ledger.accept(engine.epoch, engine.frames.popleft())

    @precondition(lambda self: self.engines)
    @rule(index=st.integers(0, 3))
    def requests_are_moved(self, index: int) -> None:
        epoch = self.engine(index).epoch
        self.ledger.move_requests(next(one for one in self.ledger.engines if one.epoch == epoch))

    @precondition(lambda self: self.engines)
    @rule(index=st.integers(0, 3), is_open=st.booleans())
    def engine_is_opened_or_closed(self, index: int, is_open: bool) -> None:
        epoch = self.engine(index).epoch
        self.ledger.set_open(next(one for one in self.ledger.engines if one.epoch == epoch), is_open)

    @rule(seconds=st.sampled_from((0.1, 5.0)))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.ledger.place_suspects(self.now)

    @precondition(lambda self: self.states)
    @rule(index=st.integers(0, 99))
    def request_is_cancelled(self, index: int) -> None:
        name = self.states[index % len(self.states)].request.request_id
        self.ledger.cancel([name])
        self.cancelled.add(name)

    @invariant()
    def every_open_request_has_one_place(self) -> None:
        if not hasattr(self, "ledger"):
            return
        bound = [name for engine in self.ledger.engines for name in engine.requests]
        held = [state.request.request_id for state in self.ledger if state.engine is None]
        assert sorted(bound + held) == sorted(state.request.request_id for state in self.ledger)
        assert len(held) == self.ledger.num_held
        for engine in self.ledger.engines:
            assert engine.load == sum(state.request.num_prompt_tokens for state in engine.requests.values())
            assert all(state.engine is engine for state in engine.requests.values())
            assert not engine.leaving & engine.requests.keys()
            if engine.suspect is not None and not engine.suspect.has_progress:
                others = [state for state in engine.requests.values() if state is not engine.suspect]
                assert all(state.has_progress for state in others), "a suspect runs alone"

    @invariant()
    def ids_are_right(self) -> None:
        for state in getattr(self, "states", ()):
            name, ids = state.request.request_id, list(state.pages[0].ids)
            assert ids == [right_id(name, position) for position in range(len(ids))]
            assert len(ids) <= self.LAST
            if state.end is not None and state.end.finish_reason is FinishReason.LENGTH:
                assert len(ids) == self.LAST
            elif state.end is not None:
                assert name in self.cancelled or state.num_crashes == MAX_CRASHES

    def teardown(self) -> None:
        """Without further faults every request ends."""
        if not hasattr(self, "ledger"):
            return
        self.engine_begins()
        for engine in self.ledger.engines:
            self.ledger.set_open(engine, True)
        for _ in range(12 + 12 * len(self.states)):
            for engine in tuple(self.engines.values()):
                while engine.commands:
                    engine.run_command()
                engine.step(self.LAST)
                while engine.frames:
                    self.ledger.accept(engine.epoch, engine.frames.popleft())
            self.now += 5.0
            self.ledger.place_suspects(self.now)
        assert not len(self.ledger) and not self.ledger.num_held
        self.ids_are_right()
        router = self.ledger._router
        assert isinstance(router, InTurn)
        assert sorted(name for name, _ in router.ended_ids) == sorted(s.request.request_id for s in self.states)


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
