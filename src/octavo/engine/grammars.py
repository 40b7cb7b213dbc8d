"""What the step loop does for requests that are held to a grammar.

Owns: their way in (the grammar is built before they are admitted, off the loop), and masks on their way into a step.
Does not: follow grammars (grammar.bank does) or apply masks (the executor does).
Invariants: a request is passed on once, to be admitted or refused; one that is cancelled while its grammar is built is
admitted and ended at once, so that it has its end like any other; rows of a grammar are never sampled without masks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future

from octavo.core.plan import Event, Events, StepPlan, StepResult
from octavo.core.request import FinishReason, Request
from octavo.errors import InvalidRequestError, RequestError
from octavo.executors.protocol import Executor, Ticket
from octavo.grammar.bank import DeadEnd, GrammarBank
from octavo.grammar.masks import Masks
from octavo.grammar.matcher import Matcher

STIR_S = 1.0
MAX_BUILD_S = 60.0  # the first one of an engine loads the tokenizer, on a machine that may be slow and busy
Job = Future[tuple[Masks, tuple[DeadEnd, ...]]]
Built = Matcher | RequestError | None
Prepared = Callable[[Built], None]


class Grammars:
    """The grammars of one loop; without a bank, an engine that follows none and refuses them."""

    def __init__(self, bank: GrammarBank | None = None) -> None:
        self._bank = bank
        self._preparing: dict[str, FinishReason | None] = {}  # and why it is to end at once
        self._since: dict[str, float] = {}  # when the loop first saw these
        self.stir: Callable[[], object] = bool  # wakes the loop; set by it

    def prepare(self, request: Request, then: Prepared) -> None:
        """Call `then` with a request's matcher, None if it has no grammar. From any thread.

        A grammar is built by a thread of its own, which calls: so no step waits for it.
        """
        if not request.params.grammar:
            then(None)
        elif self._bank is None:
            then(InvalidRequestError("this engine holds outputs to no grammar; leave it out", "grammar"))
        else:
            self._preparing[request.request_id] = None
            self.stir()  # it may rest, and would not see that it is to wake
            self._bank.prepare(request, then)

    def cancel(self, request_ids: Iterable[str], reason: FinishReason) -> None:
        """Have requests that are still on their way in end when they are."""
        for name in request_ids:
            if name in self._preparing:
                self._preparing[name] = reason

    def arrived(self, request: Request, built: Built) -> FinishReason | None:
        """A request may be admitted: why it is to end at once, or None. Raises what its grammar met with."""
        ends_as = self._preparing.pop(request.request_id, None) if request.params.grammar else None
        if isinstance(built, RequestError):
            raise built
        return ends_as

    def wake_by(self, until: float | None, now: float) -> float | None:
        """Return until when an idle loop may rest, given until when it would: the watchdog must see that it works.

        Not shortened once a grammar has taken MAX_BUILD_S: only a new engine ends a thread that never comes back.
        """
        if not self._preparing:
            self._since.clear()
            return until
        self._since = {name: self._since.get(name, now) for name in list(self._preparing)}
        if now - min(self._since.values(), default=now) >= MAX_BUILD_S:
            return until
        return now + STIR_S if until is None else min(until, now + STIR_S)

    def open(self, request: Request, built: Built) -> None:
        """Hold an admitted request to its grammar, if it has one."""
        if isinstance(built, Matcher):
            assert self._bank is not None
            self._bank.open(request.request_id, built)

    def begin(self, plan: StepPlan) -> Job | None:
        """Start the masks of a plan about to be submitted, if any of its rows has a grammar."""
        return None if self._bank is None or self._bank.is_empty else self._bank.begin(plan)

    def committed(self, events: Events) -> None:
        """Take note of new ids."""
        if self._bank is not None:
            self._bank.committed(events)

    def ended(self, decisions: Iterable[Event]) -> None:
        """Let go of requests that ended."""
        if self._bank is not None:
            self._bank.ended(decisions)

    def close(self) -> None:
        """End the threads. Idempotent."""
        if self._bank is not None:
            self._bank.close()


class MaskedTicket:
    """A ticket of a step with masked rows, and which of these can follow their grammar no further, by row."""

    __slots__ = ("failures", "ticket")

    def __init__(self, ticket: Ticket, failures: tuple[DeadEnd, ...]) -> None:
        self.ticket = ticket
        self.failures = failures


def submit(executor: Executor, plan: StepPlan, grammars: Grammars) -> Ticket:
    """Submit a plan, its masks made meanwhile and supplied before it samples. Raises what the executor does."""
    masks = grammars.begin(plan)
    ticket = executor.submit(plan)
    if masks is None:
        return ticket
    made, failures = masks.result()
    executor.supply(ticket, made)
    return MaskedTicket(ticket, failures) if failures else ticket


def collect(executor: Executor, ticket: Ticket) -> StepResult:
    """Collect a ticket of `submit`. Raises what the executor does."""
    if not isinstance(ticket, MaskedTicket):
        return executor.collect(ticket)
    result = executor.collect(ticket.ticket)
    result.dead_ends = tuple(sorted({**dict(result.dead_ends), **dict(ticket.failures)}.items()))
    return result
