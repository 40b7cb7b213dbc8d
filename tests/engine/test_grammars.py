"""Requests held to grammars in the step loop: their way in, steps and rows that fail, ends."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.engine.fakes import GatedExecutor, Harness, is_cancelled, make_request
from tests.exactness import limits_of
from tests.executors.driver import SPEC, make_prompt
from tests.executors.test_torch_executor import make
from tests.tiny_models import EOS_ID, VOCAB_SIZE, make_tiny_model

from octavo.core.plan import EventKind, Events, StepPlan, StepResult
from octavo.core.request import FinishReason, Request, SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.engine.client import Accepted
from octavo.engine.grammars import CHECK_S, MAX_BUILD_S, GrammarBuilds
from octavo.engine.heartbeat import HeartbeatWriter
from octavo.engine.loop import EngineLoop
from octavo.errors import EngineDeadError, InvalidRequestError, RequestError
from octavo.executors.protocol import Executor, Ticket
from octavo.grammar.bank import GrammarBank
from octavo.grammar.compile import compile_grammar
from octavo.grammar.matcher import Matcher
from octavo.grammar.vocabulary import Vocabulary
from octavo.text.tokenizer import Tokenizer

GRAMMAR = compile_grammar("regex", r"(the cat|a hat) [0-9]{3,6} (sat|slept)")
WAIT_S = 60.0


class Faulty:
    """An executor that fails as told: at the n-th call of a verb, or with a row that is unusable."""

    def __init__(self, inner: Executor) -> None:
        self.inner = inner
        self.fails_at: dict[str, int] = {}
        self.bad_row_at = -1
        self.calls: dict[str, int] = {}
        self.num_failures = 0

    def _call(self, verb: str) -> int:
        number = self.calls[verb] = self.calls.get(verb, 0) + 1
        if self.fails_at.get(verb) == number:
            self.num_failures += 1
            raise RuntimeError(f"injected: {verb}")
        return number

    def submit(self, plan: StepPlan) -> Ticket:
        self._call("submit")
        return self.inner.submit(plan)

    def supply(self, ticket: Ticket, masks: object) -> None:
        self._call("supply")
        self.inner.supply(ticket, masks)

    def collect(self, ticket: Ticket) -> StepResult:
        result = self.inner.collect(ticket)
        if self._call("collect") == self.bad_row_at:
            self.num_failures += 1
            result.errors = ((0, "injected: not finite"),)
        return result

    def close(self) -> None:
        """The executor is used again."""


class GatedBank(GrammarBank):
    """Builds when it is let."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary)
        self.gate = threading.Event()
        self.gate.set()
        self.reached = threading.Event()

    def _prepare(self, request: Request, done: Callable[[Matcher | RequestError], None]) -> None:
        self.reached.set()
        assert self.gate.wait(WAIT_S)
        super()._prepare(request, done)


class SilentBank(GrammarBank):
    """Is asked, and never answers."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def prepare(self, request: Request, done: Callable[[Matcher | RequestError], None]) -> None:
        self.asked.append(request.request_id)


class IdleCounter(HeartbeatWriter):
    """Writes no page; says when the loop has been idle three times."""

    def __init__(self) -> None:
        self.num_rests = 0
        self.rested = threading.Event()

    def step_begins(self, plan: StepPlan) -> None:
        pass

    def step_ended(self, is_committed: bool) -> None:
        pass

    def commands_begin(self) -> None:
        pass

    def idle(self) -> None:
        self.num_rests += 1
        if self.num_rests >= 3:
            self.rested.set()


class Engine:
    """A loop over the tiny model, and what it told."""

    def __init__(self, executor: Executor, limits: Any, vocabulary: Vocabulary, depth: int = 1) -> None:
        self.executor = Faulty(executor)
        self.bank = GatedBank(vocabulary)
        self.loop = EngineLoop(Scheduler(limits), self.executor, depth=depth, bank=self.bank)
        self.answers: dict[str, list[object]] = {}
        self.ids: dict[str, list[int]] = {}
        self.ends: dict[str, Any] = {}
        self._changed = threading.Condition()
        self.loop.attach(self._receive)
        self.loop.start()

    def _receive(self, events: Events) -> None:
        with self._changed:
            for name, token in zip(events.request_ids, events.token_ids, strict=True):
                self.ids.setdefault(name, []).append(token)
            for end in (event for event in events.decisions if event.kind == EventKind.FINISHED):
                assert end.request_id not in self.ends
                self.ends[end.request_id] = end
            self._changed.notify_all()

    def submit(self, *requests: Request) -> None:
        for request in requests:
            answers = self.answers.setdefault(request.request_id, [])
            self.loop.submit(request, lambda answer, into=answers: self._answered(into, answer))

    def _answered(self, into: list[object], answer: object) -> None:
        with self._changed:
            into.append(answer)
            self._changed.notify_all()

    def wait(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, WAIT_S)

    def answer(self, name: str) -> object:
        self.wait(lambda: bool(self.answers[name]))
        return self.answers[name][0]

    def end(self, name: str) -> Any:
        self.wait(lambda: name in self.ends)
        return self.ends[name]

    def stop(self) -> None:
        self.bank.gate.set()
        self.loop.stop()
        assert self.loop.join(WAIT_S)
        assert all(len(answers) == 1 for answers in self.answers.values())


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Executor, Any, Vocabulary]]:
    folder: Path = make_tiny_model("llama3", tmp_path_factory.mktemp("loop") / "llama3")
    executor, tokenizer = make(folder, "auto"), Tokenizer.from_folder(folder)
    yield executor, limits_of(executor.open(SPEC)), Vocabulary(lambda: tokenizer, VOCAB_SIZE)
    executor.close()


@pytest.fixture
def engine(opened: tuple[Executor, Any, Vocabulary]) -> Iterator[Engine]:
    made = Engine(*opened)
    yield made
    made.stop()


def held(name: str, seed: int = 1, **options: Any) -> Request:
    params = SamplingParams(**{"temperature": 1.5, "max_tokens": 90, "seed": seed, "grammar": GRAMMAR, **options})
    return Request(name, array("i", make_prompt(7, seed=seed)), params, eos_token_ids=(EOS_ID,))


def free(name: str) -> Request:
    return replace(held(name, grammar="", max_tokens=12), request_id=name)


def test_P06_an_engine_without_grammars_refuses_them_and_nobody_else() -> None:
    with Harness(GatedExecutor()) as harness:
        answers: list[object] = []
        harness.loop.submit(held("a"), answers.append)
        harness.submit(make_request("b", max_tokens=3))
        assert harness.end("b").finish_reason is FinishReason.LENGTH
        assert isinstance(answers[0], InvalidRequestError) and answers[0].param == "grammar"


@pytest.mark.parametrize("verb", ["submit", "supply", "collect", "row"])
@pytest.mark.parametrize("at", [1, 2, 9])
def test_P06_a_step_or_row_that_failed_moved_nobody(
    opened: tuple[Executor, Any, Vocabulary], verb: str, at: int
) -> None:
    outcomes = []
    for has_fault in (False, True):
        engine = Engine(*opened)
        if has_fault and verb == "row":
            engine.executor.bad_row_at = at
        elif has_fault:
            engine.executor.fails_at[verb] = at
        requests = [held("a", 1), free("b"), held("c", 3, n=2)]
        engine.submit(*requests)
        ends = [engine.end(request.request_id).finish_reason for request in requests]
        assert engine.executor.num_failures == has_fault
        engine.stop()
        outcomes.append((ends, engine.ids["a"], engine.ids["b"], sorted(engine.ids["c"])))
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][0] == [FinishReason.STOP, FinishReason.LENGTH, FinishReason.STOP]


@pytest.mark.parametrize(
    "options",
    [{"allowed_token_ids": (EOS_ID,)}, {"logit_bias": (), "bad_words_ids": tuple((i,) for i in range(3, VOCAB_SIZE))}],
)
def test_P06_where_nothing_is_left_to_sample_that_request_ends_and_says_why(
    engine: Engine, options: dict[str, Any]
) -> None:
    engine.submit(held("a", **options), held("b", 2), free("c"))
    end = engine.end("a")
    assert end.finish_reason is FinishReason.ERROR and "no token may follow" in end.message
    assert engine.end("b").finish_reason is FinishReason.STOP
    assert engine.end("c").finish_reason is FinishReason.LENGTH


def test_P06_an_output_cut_by_length_says_so(engine: Engine) -> None:
    engine.submit(held("a", max_tokens=2))
    assert engine.end("a").finish_reason is FinishReason.LENGTH
    assert len(engine.ids["a"]) == 2


def test_P06_a_grammar_that_cannot_be_built_fails_its_request_alone(engine: Engine) -> None:
    engine.submit(held("a", grammar=compile_grammar("lark", "start: <|nope|>")), held("b", 2))
    assert isinstance(engine.answer("a"), InvalidRequestError)
    assert engine.end("b").finish_reason is FinishReason.STOP
    engine.submit(held("c", 2))
    assert engine.end("c").finish_reason is FinishReason.STOP
    assert engine.ids["c"] == engine.ids["b"]


def test_P06_nobody_waits_for_a_grammar_that_is_built(engine: Engine) -> None:
    engine.bank.gate.clear()
    engine.submit(held("a"), free("b"))
    assert engine.end("b").finish_reason is FinishReason.LENGTH
    assert not engine.answers["a"]
    engine.bank.gate.set()
    assert engine.end("a").finish_reason is FinishReason.STOP


def test_P06_a_request_cancelled_while_its_grammar_is_built_ends(engine: Engine) -> None:
    engine.bank.gate.clear()
    engine.submit(held("a"))
    assert engine.bank.reached.wait(WAIT_S)
    engine.loop.cancel(["a"])
    seen = threading.Event()
    engine.loop.control("statistics", "", lambda _: seen.set())  # the loop has taken the cancellation
    assert seen.wait(WAIT_S)
    engine.bank.gate.set()
    assert isinstance(engine.answer("a"), Accepted)
    assert is_cancelled(engine.end("a"))
    assert "a" not in engine.ids


def test_P06_an_idle_engine_stirs_while_a_grammar_is_built_but_not_for_ever() -> None:
    stirred: list[int] = []
    grammars = GrammarBuilds(bank := SilentBank(), lambda: stirred.append(1))
    assert grammars.wake_by(None, 5.0) is None and grammars.wake_by(9.0, 5.0) == 9.0
    grammars.begin(held("a"), 9.5, lambda built: None)
    assert bank.asked == ["a"] and stirred == [1]
    assert grammars.wake_by(None, 10.0) == 10.0 + CHECK_S
    assert grammars.wake_by(10.0 + CHECK_S / 2, 10.0) == 10.0 + CHECK_S / 2
    assert grammars.wake_by(None, 9.0 + MAX_BUILD_S) == 9.0 + MAX_BUILD_S + CHECK_S
    assert grammars.wake_by(None, 10.0 + MAX_BUILD_S) is None
    grammars.finish(held("a"), None)
    grammars.begin(held("b"), 199.0, lambda built: None)
    assert grammars.wake_by(None, 200.0) == 200.0 + CHECK_S


def test_P06_a_resting_loop_is_woken_to_be_seen_while_a_grammar_is_built(engine: Engine) -> None:
    heart = IdleCounter()
    engine.loop.heartbeat = heart
    engine.bank.gate.clear()
    engine.submit(held("a"))
    assert engine.bank.reached.wait(WAIT_S)
    assert heart.rested.wait(WAIT_S), "it rests, wakes, and rests again"
    engine.bank.gate.set()
    assert engine.end("a").finish_reason is FinishReason.STOP


def test_P06_an_engine_that_stops_answers_those_whose_grammar_is_built(engine: Engine) -> None:
    engine.bank.gate.clear()
    engine.submit(held("a"), held("b"))
    assert engine.bank.reached.wait(WAIT_S)
    engine.loop.stop()
    assert engine.loop.join(WAIT_S)
    engine.bank.gate.set()
    assert isinstance(engine.answer("a"), EngineDeadError | RequestError)
    assert isinstance(engine.answer("b"), EngineDeadError | RequestError)


@pytest.mark.parametrize("depth", [1, 3])
def test_P06_deadlines_and_cancellations_in_mid_output(opened: tuple[Executor, Any, Vocabulary], depth: int) -> None:
    engine = Engine(*opened, depth=depth)
    endless = compile_grammar("regex", "(the cat sat )*")
    engine.submit(*(held(f"r{i}", i, grammar=endless, max_tokens=200, n=1 + i % 2) for i in range(6)))
    engine.submit(*(held(f"s{i}", i) for i in range(3)))
    engine.wait(lambda: len(engine.ids.get("r0", [])) + len(engine.ids.get("r1", [])) > 2 or "r0" in engine.ends)
    engine.loop.cancel(["r1", "r4"])
    for i in range(6):
        engine.end(f"r{i}")
    assert all(engine.end(f"s{i}").finish_reason is FinishReason.STOP for i in range(3))
    engine.stop()
    assert engine.bank.is_empty and not engine.bank._matchers and not engine.bank._slots
