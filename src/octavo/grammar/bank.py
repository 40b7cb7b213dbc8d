"""The grammars of an engine's open requests, and the masks of its steps.

Owns: a matcher per choice, the executor slot of each choice, and two threads: one builds matchers, the other makes
masks while the model runs. Does not: decide what runs, or apply masks.
Invariants: `prepare` may be called from any thread, all other methods only from the step loop's. The masks thread uses
a matcher only between begin() and the result. Matchers consume committed ids when the next mask is made, so a failed
step advances no matcher. A resumed request (preempted, or in a new engine process) replays its ids.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from octavo.core.plan import ROW_SAMPLE, Event, EventKind, Events, StepPlan
from octavo.core.request import FinishError, Request
from octavo.errors import InvalidRequestError, OctavoError, RequestError, kind_of
from octavo.grammar.matcher import NO_FURTHER, Masks, Matcher
from octavo.grammar.vocabulary import Vocabulary

MAX_KEPT = 32  # built matchers that are cached for later requests
Choice = tuple[str, int]  # request id, choice
DeadEnd = tuple[int, FinishError]  # a row of the plan, and the error of the row's grammar


class GrammarBank:
    """Matchers by request and choice. `close` ends the threads."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._builder = ThreadPoolExecutor(1, "octavo-grammar")
        self._masker = ThreadPoolExecutor(1, "octavo-masks")
        self._built: OrderedDict[tuple[str, tuple[int, ...]], Matcher] = OrderedDict()  # used by the builder only
        self._roots: dict[str, Matcher] = {}
        self._matchers: dict[Choice, Matcher] = {}
        self._slots: dict[int, Choice] = {}
        self._is_closed = False

    def prepare(self, request: Request, done: Callable[[Matcher | RequestError], None]) -> None:
        """Build a request's matcher, advance it past the emitted ids, and pass it to `done` in the builder's thread."""
        try:
            self._builder.submit(self._prepare, request, done)
        except RuntimeError:  # closed
            done(InvalidRequestError("the engine has ended", "grammar"))

    def _prepare(self, request: Request, done: Callable[[Matcher | RequestError], None]) -> None:
        outcome: Matcher | RequestError
        try:
            if self._is_closed:
                raise InvalidRequestError("the engine has ended", "grammar")
            outcome = self._build(request.params.grammar, request.eos_token_ids).fork()
            outcome.replay(request.emitted_token_ids or array("i"))
            if outcome.failure is not None:
                raise outcome.failure
        except OctavoError as error:
            outcome = error if isinstance(error, RequestError) else InvalidRequestError(str(error), "grammar")
        except BaseException as error:  # a shell: every failure must be answered; a Rust panic is not an Exception
            outcome = InvalidRequestError(f"the grammar cannot be followed: {type(error).__name__}: {error}", "grammar")
        done(outcome)

    def _build(self, grammar: str, eos_token_ids: tuple[int, ...]) -> Matcher:
        key = grammar, eos_token_ids
        matcher = self._built.get(key)
        if matcher is None:
            matcher = self._built[key] = Matcher.of(grammar, self._vocabulary, eos_token_ids)
            if len(self._built) > MAX_KEPT:
                self._built.popitem(last=False)
        self._built.move_to_end(key)
        return matcher

    def open(self, request_id: str, matcher: Matcher) -> None:
        """Constrain an admitted request by the matcher that was prepared for it."""
        self._roots[request_id] = matcher

    @property
    def is_empty(self) -> bool:
        """True if no open request has a grammar."""
        return not self._roots

    def begin(self, plan: StepPlan) -> Future[tuple[Masks, tuple[DeadEnd, ...]]] | None:
        """Start to compute the masks of a plan that is about to be submitted; return None if no row has a grammar.

        The result also lists the rows whose grammar failed; these rows may sample any id.
        """
        for new in plan.new_sequences:
            if new.request_id in self._roots:
                self._slots[new.slot] = new.request_id, new.choice
            else:
                self._slots.pop(new.slot, None)
        work, index, drafted = [], 0, 0
        for row, (slot, flags) in enumerate(zip(plan.slots, plan.flags, strict=True)):
            num_drafts = plan.num_drafts[row] if plan.num_drafts else 0
            if flags & ROW_SAMPLE:
                choice = self._slots.get(slot)
                if choice is not None and choice[0] in self._roots:
                    drafts = plan.draft_token_ids[drafted : drafted + num_drafts]
                    work.append((row, self._matcher(choice), index, drafts))
                index += 1 + num_drafts
            drafted += num_drafts
        return self._masker.submit(self._fill, work) if work else None

    def _matcher(self, choice: Choice) -> Matcher:
        """Return the matcher of a choice, forked from the request's matcher on first use."""
        matcher = self._matchers.get(choice)
        if matcher is None:
            matcher = self._matchers[choice] = self._roots[choice[0]].fork()
        return matcher

    def _fill(self, work: list[tuple[int, Matcher, int, array[int]]]) -> tuple[Masks, tuple[DeadEnd, ...]]:
        sizes = [1 + len(drafts) for *_, drafts in work]
        ends = np.cumsum(sizes)
        bits_MW = np.full((ends[-1], self._vocabulary.num_words), -1, dtype=np.int32)
        failures = []
        for (row, matcher, _, drafts), end, size in zip(work, ends.tolist(), sizes, strict=True):
            try:
                matcher.fill(bits_MW[end - size : end], drafts)
            except BaseException as error:  # a shell: a panic in the library ends this output, not the step
                matcher.failure = InvalidRequestError(f"{NO_FURTHER}: {type(error).__name__}", "grammar")
            if matcher.failure is not None:
                failures.append((row, FinishError(kind_of(matcher.failure), str(matcher.failure))))
        first = np.asarray([index for _, _, index, _ in work], dtype=np.int64)
        within = np.arange(ends[-1]) - np.repeat(ends - sizes, sizes)
        return Masks(np.repeat(first, sizes) + within, bits_MW), tuple(failures)

    def committed(self, events: Events) -> None:
        """Record the ids of a committed step."""
        if self._roots:
            columns = zip(events.request_ids, events.choices, events.positions, events.token_ids, strict=True)
            for name, choice, position, token in columns:
                if name in self._roots:
                    self._matcher((name, choice)).commit(position, token)

    def ended(self, decisions: Iterable[Event]) -> None:
        """Drop the matchers of finished requests."""
        if self._roots:
            for event in decisions:
                if event.kind == EventKind.FINISHED and self._roots.pop(event.request_id, None) is not None:
                    for choice in [choice for choice in self._matchers if choice[0] == event.request_id]:
                        del self._matchers[choice]
            if not self._roots:
                self._slots.clear()

    def close(self) -> None:
        """End the threads, and refuse requests that wait for a grammar. Idempotent."""
        self._is_closed = True
        self._builder.shutdown(wait=False)
        self._masker.shutdown(wait=False)
