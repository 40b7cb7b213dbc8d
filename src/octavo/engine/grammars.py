"""The step loop's support for requests with a grammar.

Owns: requests whose grammar is being built outside the loop, before admission; passing masks to a step.
Does not: follow grammars (grammar.bank does) or apply masks (the executor does).
Invariants: each request is admitted or refused once. A request that is cancelled while its grammar is built is admitted
and ended at once, so that it has one end like any other request. Rows with a grammar are never sampled without masks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from octavo.core.plan import StepPlan, StepResult
from octavo.core.request import FinishReason, Request
from octavo.errors import InvalidRequestError, RequestError
from octavo.executors.protocol import Executor, Ticket
from octavo.grammar.bank import DeadEnd, GrammarBank
from octavo.grammar.matcher import Matcher

CHECK_S = 1.0
MAX_BUILD_S = 60.0  # an engine's first build also loads the tokenizer, on a machine that may be slow and busy
Built = Matcher | RequestError | None  # None: the request has no grammar


class GrammarBuilds:
    """The requests whose grammars are being built; `begun_at` has the time of each `begin` call.

    Without a bank, requests with a grammar are refused.
    """

    def __init__(self, bank: GrammarBank | None, wake: Callable[[], object]) -> None:
        """`wake` wakes the loop."""
        self._bank = bank
        self._wake = wake
        self.begun_at: dict[str, float] = {}
        self._ends: dict[str, FinishReason] = {}  # why to end requests that were cancelled during their build

    def begin(self, request: Request, now: float, then: Callable[[Built], None]) -> None:
        """Build a request's grammar, then call `then` with its matcher or error. May be called from any thread.

        A separate thread builds grammars and calls `then`, so that no step waits for a build.
        """
        if self._bank is None:
            then(InvalidRequestError("this engine holds outputs to no grammar; leave it out", "grammar"))
        else:
            self.begun_at[request.request_id] = now
            self._wake()  # an idle loop must wake regularly while a grammar is built
            self._bank.prepare(request, then)

    def cancel(self, request_ids: Iterable[str], reason: FinishReason) -> None:
        """Mark requests whose grammars are being built to end when they are admitted."""
        self._ends.update((name, reason) for name in request_ids if name in self.begun_at)

    def finish(self, request: Request, built: Built) -> FinishReason | None:
        """Forget a request's build; return why the request must end at once, or None. Raises the grammar's error."""
        self.begun_at.pop(request.request_id, None)
        ends_as = self._ends.pop(request.request_id, None)
        if isinstance(built, RequestError):
            raise built
        return ends_as

    def wake_by(self, until: float | None, now: float) -> float | None:
        """Return the time until which an idle loop may wait: `until`, or CHECK_S from now while a grammar is built.

        Waking regularly shows the watchdog that the loop runs. Once a build has taken MAX_BUILD_S the wait is not
        shortened, so that the watchdog replaces the engine: nothing else ends a build that never returns.
        """
        begun_at = min(list(self.begun_at.values()), default=None)
        if begun_at is None or now - begun_at >= MAX_BUILD_S:
            return until
        return now + CHECK_S if until is None else min(until, now + CHECK_S)


class MaskedTicket:
    """The ticket of a step with masked rows, and the (row, error) of each grammar that allows no token."""

    __slots__ = ("failures", "ticket")

    def __init__(self, ticket: Ticket, failures: tuple[DeadEnd, ...]) -> None:
        self.ticket = ticket
        self.failures = failures

    def collect(self, executor: Executor) -> StepResult:
        """Collect the step. Raises the executor's errors."""
        result = executor.collect(self.ticket)
        result.dead_ends = tuple(sorted({**dict(result.dead_ends), **dict(self.failures)}.items()))
        return result


def submit_masked(executor: Executor, plan: StepPlan, bank: GrammarBank) -> Ticket:
    """Submit a plan, and supply its masks before the executor samples. Raises the executor's errors.

    The masks are computed while the executor runs the forward pass.
    """
    masks = bank.begin(plan)
    ticket = executor.submit(plan)
    if masks is None:
        return ticket
    made, failures = masks.result()
    executor.supply(ticket, made)
    return MaskedTicket(ticket, failures) if failures else ticket
