"""What engine tests stand on: a tiny text model, a gated executor, a harness around one loop.

The executor and its oracle are tests.fake_model's; here it can be held between submit and collect.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

from tests.core import invariants
from tests.fake_model import FakeExecutor, Slot, oracle
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from octavo.config import StatisticsConfig
from octavo.core.limits import Limits
from octavo.core.plan import Event, EventKind, Events, StepPlan, StepResult
from octavo.core.request import FinishReason, Request, SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.engine.client import Accepted
from octavo.engine.loop import EngineLoop
from octavo.engine.observation import observe_engine
from octavo.executors.pool_use import pool_use
from octavo.executors.protocol import Capacity, ExecutorSpec
from octavo.frontend.local_client import LocalClient
from octavo.frontend.sessions import Sessions
from octavo.text.tokenizer import Tokenizer

VOCAB_SIZE = 97
EOS = 2
WAIT_S = 60.0  # how long a test waits for what must come; it never sleeps that long when all is well


def make_limits(**changes: Any) -> Limits:
    fields = {
        "block_size": 4,
        "num_blocks": (512,),
        "max_model_len": 128,
        "vocab_size": VOCAB_SIZE,
        "max_batch_tokens": 256,
        "max_sequences": 64,
    }
    return Limits(**{**fields, **changes})


class GatedExecutor(FakeExecutor):
    """A FakeExecutor whose collect waits while the gate is shut, and that fails as told."""

    def __init__(self, **options: Any) -> None:
        super().__init__(vocab_size=VOCAB_SIZE, max_model_len=128, **options)
        self.gate = threading.Event()
        self.gate.set()
        self.shut = threading.Event()  # it shut by itself
        self.reached = threading.Event()  # a step came to the gate
        self.fail: Callable[[StepPlan, list[str]], Exception | None] | None = None
        self.num_submits = 0
        self.shut_after = 0  # steps after which the gate shuts by itself; 0 = never
        self.is_closed = False

    def submit(self, plan: StepPlan) -> Any:
        self.num_submits += 1
        owners = {slot: state.request_id for slot, state in self.slots.items()}
        owners.update((new.slot, new.request_id) for new in plan.new_sequences)
        error = self.fail(plan, [owners[slot] for slot in plan.slots]) if self.fail is not None else None
        if error is not None:
            raise self.refuse(plan, error)
        return super().submit(plan)

    def refuse(self, plan: StepPlan, error: Exception) -> Exception:
        """Nothing of the plan was done; those that it would have brought may be freed all the same."""
        self.void_slots |= {new.slot for new in plan.new_sequences}
        return error

    def collect(self, ticket: Any) -> StepResult:
        if self.num_steps == self.shut_after > 0:
            self.gate.clear()
            self.shut.set()
            self.shut_after = 0
        self.reached.set()
        assert self.gate.wait(WAIT_S), "the gate was never opened"
        return super().collect(ticket)

    def close(self) -> None:
        self.is_closed = True
        super().close()


class ScriptedExecutor(GatedExecutor):
    """Says what `script` says: ids of a request by its id, or of a choice by "id/choice"; then end-of-sequence."""

    def __init__(self, script: dict[str, list[int]], **options: Any) -> None:
        super().__init__(**options)
        self.script = script

    def draw_next(self, state: Slot, cell: int) -> int:
        name = f"{state.request_id}/{state.choice}"
        ids = self.script[name if name in self.script else state.request_id]
        index = len(state.ids) - state.num_prompt
        token_id = ids[index] if index < len(ids) else EOS
        state.num_sampled += 1
        state.ids.append(token_id)
        return token_id


def open_fake(executor: FakeExecutor, limits: Limits) -> Capacity:
    return executor.open(
        ExecutorSpec(limits.max_sequences, limits.max_batch_tokens, limits.block_size, num_blocks=limits.num_blocks[0])
    )


def make_request(
    request_id: str, length: int = 6, max_tokens: int = 5, arrival: float = 0.0, **options: Any
) -> Request:
    """A request whose prompt depends on its id, so that answers differ."""
    base = sum(request_id.encode())
    params = options.pop("params", None) or SamplingParams(max_tokens=max_tokens, seed=base, temperature=0.0)
    ids = array("i", [3 + (base * 7 + i * 5) % (VOCAB_SIZE - 3) for i in range(length)])
    return Request(request_id, ids, params, arrival, eos_token_ids=options.pop("eos", ()), **options)


def expected(request: Request, choice: int = 0) -> list[int]:
    assert request.prompt_token_ids is not None and request.params.max_tokens is not None
    params = request.params
    return oracle(request.prompt_token_ids, params.max_tokens, VOCAB_SIZE, request.eos_token_ids, params, choice=choice)


@dataclass
class Inbox:
    """What one choice got; the ends of its request are with choice 0."""

    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    ends: list[Event] = field(default_factory=list)
    choice_ends: list[Event] = field(default_factory=list)


class Harness:
    """A started loop, seen from the outside; leaving it checks that nothing leaked and everyone was answered."""

    def __init__(self, executor: FakeExecutor | None = None, *, limits: Limits | None = None, **options: Any) -> None:
        self.executor = executor or GatedExecutor()
        self.limits = limits or make_limits()
        self.capacity = open_fake(self.executor, self.limits)
        self.scheduler = Scheduler(self.limits)
        statistics = options.pop("statistics", None) or StatisticsConfig()
        self.loop = EngineLoop(self.scheduler, self.executor, **options)
        read_pools = partial(pool_use, self.scheduler) if statistics.memory_analysis else None
        self.observation = observe_engine(self.loop, self.scheduler, statistics, read_pools=read_pools)
        self.loop.attach(self.receive)
        self.requests: dict[str, Request] = {}
        self.inboxes: dict[tuple[str, int], Inbox] = {}
        self.num_deliveries = 0
        self._changed = threading.Condition()

    def __enter__(self) -> Harness:
        self.loop.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        gate = getattr(self.executor, "gate", None)
        if gate is not None:
            gate.set()
        self.loop.stop()
        assert self.loop.join(WAIT_S)
        if kind is None:
            self.check_end()

    def check_end(self) -> None:
        for request_id in self.requests:
            assert len(self.inbox(request_id).ends) == 1, f"{request_id} got {self.inbox(request_id).ends}"
        for key, inbox in self.inboxes.items():
            assert inbox.positions == list(range(len(inbox.ids))), key
            assert len(inbox.choice_ends) <= 1, key
        if self.loop.failure is None:
            invariants.check_no_leaks(self.scheduler)

    def receive(self, events: Events) -> None:
        with self._changed:
            self.num_deliveries += 1
            for request_id, choice, position, token_id in zip(
                events.request_ids, events.choices, events.positions, events.token_ids, strict=True
            ):
                inbox = self.inbox(request_id, choice)
                assert not self.inbox(request_id).ends and not inbox.choice_ends, "a token came after the end"
                inbox.ids.append(token_id)
                inbox.positions.append(position)
            for event in events.decisions:
                if event.kind == EventKind.CHOICE_FINISHED:
                    assert not self.inbox(event.request_id).ends, "a choice ended after its request"
                    self.inbox(event.request_id, event.choice).choice_ends.append(event)
                elif event.kind == EventKind.FINISHED:
                    self.inbox(event.request_id).ends.append(event)
            self._changed.notify_all()

    def inbox(self, request_id: str, choice: int = 0) -> Inbox:
        return self.inboxes.setdefault((request_id, choice), Inbox())

    def wait(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, WAIT_S), "what must come did not come"

    def ask(self, verb: Callable[..., None], *arguments: Any) -> Any:
        answers: SimpleQueue[Any] = SimpleQueue()
        verb(*arguments, answers.put)
        return answers.get(timeout=WAIT_S)

    def submit(self, request: Request) -> Any:
        """Submit and wait for the answer: Accepted or an error."""
        answer = self.ask(self.loop.submit, request)
        if isinstance(answer, Accepted):
            self.requests[request.request_id] = request
        return answer

    def post(self, request: Request) -> None:
        """Submit without waiting; the request must be one that is taken."""
        self.requests[request.request_id] = request
        self.loop.submit(request, lambda _: None)

    def submit_all(self, requests: Iterable[Request]) -> None:
        for request in requests:
            assert isinstance(self.submit(request), Accepted)

    def end(self, request_id: str) -> Event:
        """Wait for a request's end."""
        self.wait(lambda: bool(self.inbox(request_id).ends))
        return self.inbox(request_id).ends[0]

    def ends(self) -> dict[str, Event]:
        """Wait for everyone's end."""
        return {request_id: self.end(request_id) for request_id in self.requests}


class Recorder:
    """An EventSink that keeps everything."""

    def __init__(self) -> None:
        self.decisions: list[Event] = []
        self.admissions: list[str] = []
        self.num_steps = 0

    def admitted(self, request: Request) -> None:
        self.admissions.append(request.request_id)

    def decided(self, decisions: tuple[Event, ...]) -> None:
        self.decisions.extend(decisions)

    def stepped(self, plan: object, outcome: object, events: object) -> None:
        self.num_steps += 1


def make_tokenizer() -> Tokenizer:
    """97 byte-level pieces: three special ones, printable ASCII without some, and bytes of 'é' and '中'."""
    alphabet = {byte: chr(byte) for byte in range(0x21, 0x7F)}
    alphabet |= {0x20: "Ġ", 0xC3: "Ã", 0xA9: "©", 0xE4: "ä", 0xB8: "¸", 0xAD: "Ń"}
    pieces = ["<unk>", "<s>", "</s>", *(alphabet[byte] for byte in sorted(alphabet) if byte not in b"`~^|\\_")]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    assert len(vocab) == VOCAB_SIZE, len(vocab)
    backend = Backend(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    from tokenizers import pre_tokenizers

    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer(backend, {"eos_token": "</s>"}, [EOS], Path("fake"))


def make_text() -> Any:
    """What Sessions needs of a TextModel."""
    tokenizer = make_tokenizer()
    spec = SimpleNamespace(
        vocab_size=VOCAB_SIZE,
        max_model_len=256,
        eos_token_ids=(EOS,),
        generation={"temperature": 0.0, "top_k": 3.0},
        encoder=None,
        vision=None,
    )

    def prompt_ids(messages: list[dict[str, str]], **_: Any) -> list[int]:
        return tokenizer.encode("".join(f"{m['role']}:{m['content']};" for m in messages))

    return SimpleNamespace(
        name="fake",
        tokenizer=tokenizer,
        spec=spec,
        prompt_ids_from_messages=prompt_ids,
        encode_input=tokenizer.encode,
        check_generates=lambda: None,
        check_output=lambda wanted: None,
    )


def is_cancelled(end: Event) -> bool:
    return end.finish_reason is FinishReason.CANCELLED


def make_sessions(executor: FakeExecutor | None = None, limits: Limits | None = None, depth: int = 1) -> Sessions:
    """Sessions over a fake engine in this process; close its client when done."""
    executor, limits = executor or GatedExecutor(), limits or make_limits()
    capacity = open_fake(executor, limits)
    return Sessions(LocalClient(EngineLoop(Scheduler(limits), executor, depth=depth)), make_text(), capacity=capacity)


@asynccontextmanager
async def running(executor: FakeExecutor | None = None, **options: Any) -> AsyncIterator[Sessions]:
    """The same, closed at the end."""
    sessions = make_sessions(executor, **options)
    try:
        yield sessions
    finally:
        await sessions.client.close()
