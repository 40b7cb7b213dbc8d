"""Suspects: finds the one request that makes steps fail, by a retry and then by halves.

A request is ended when it failed alone twice in a row, so a fault that passes ends nobody; for want of memory, when it
did so MEMORY_TRIES times, and steps that could be smaller are made smaller first (see step_limit).

Owns: the groups on trial. A trial runs a group alone until each member has made progress (a committed
token, or its end) or a step fails again. Does not: plan, cancel or talk to an executor.
Invariant: a member with progress is cleared; a group only gets smaller, so a trial ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from octavo.core.plan import ROW_BEAM, StepPlan
from octavo.engine.step_limit import StepLimit

MAX_FAILURES = 128  # steps failed in a row, by anyone, after which all of the failing plan are ended
MEMORY_TRIES = 8
MAX_CULPRITS = 32  # requests ended in a row without one committed token: then the executor is at fault


class Suspects:
    """The state of the search. `only` is what the next plan may contain; None means no trial.

    `limit_step` is told how many tokens a step may have after one ran out of memory.
    """

    def __init__(self, limit_step: Callable[[int | None], object] = lambda _: None) -> None:
        self.step_limit = StepLimit(limit_step)
        self._groups: list[list[str]] = []  # the last one is on trial
        self._failed_alone: str | None = None  # by the last failed step
        self._num_alone = 0  # steps in a row in which it did
        self._num_failures = 0
        self._num_culprits = 0

    @property
    def only(self) -> frozenset[str] | None:
        """Ids of the group on trial, or None."""
        return frozenset(self._groups[-1]) if self._groups else None

    @property
    def is_executor_broken(self) -> bool:
        """Whether so much failed without a single token that no request can be at fault."""
        return self._num_culprits >= MAX_CULPRITS or self._num_failures > 2 * MAX_FAILURES

    def failed(self, ids: Iterable[str], memory_tokens: int = 0) -> tuple[str, ...]:
        """Note a failed step with rows of `ids`; return those to end (mostly none, or one).

        `memory_tokens`: it ran out of memory with so many tokens.
        """
        if self.step_limit.shrink(memory_tokens):
            return ()
        group = list(dict.fromkeys(ids))
        self._num_failures += 1
        if self._num_failures > MAX_FAILURES:
            self._groups.clear()
            return self._convicted(group)
        is_first = not self._groups
        if not is_first:
            self._groups.pop()
        alone = group[0] if len(group) == 1 else None
        self._num_alone = self._num_alone + 1 if alone == self._failed_alone and not is_first else 1
        self._failed_alone = alone
        if alone is not None and self._num_alone >= (MEMORY_TRIES if memory_tokens else 2):
            return self._convicted(group)
        if is_first or alone is not None:  # the same requests, or the one, try again
            self._groups += [group] if group else []
        else:
            middle = (len(group) + 1) // 2
            self._groups += [half for half in (group[middle:], group[:middle]) if half]
        return ()

    def progressed(self, ids: Iterable[str]) -> None:
        """Clear requests that committed a token."""
        self._num_failures = 0
        self._num_culprits = 0
        self.cleared(ids)

    def stepped(self, plan: StepPlan, owners: Mapping[int, str]) -> None:
        """A step succeeded. A beam search gives its tokens at its end: until then, this is its progress."""
        self.step_limit.stepped()
        if self._groups or self._num_failures or self._num_culprits:
            beams = [owners[slot] for slot, flags in zip(plan.slots, plan.flags, strict=True) if flags & ROW_BEAM]
            if beams:
                self.progressed(beams)

    def cleared(self, ids: Iterable[str]) -> None:
        """Take requests off trial, as when they ended."""
        if self._groups:
            cleared = set(ids)
            groups = ([i for i in group if i not in cleared] for group in self._groups)
            self._groups = [group for group in groups if group]

    def set_aside(self, only: frozenset[str]) -> None:
        """The group on trial cannot run now (its plan was empty): give it up; the next failure starts again."""
        if self._groups and frozenset(self._groups[-1]) == only:
            self._groups.pop()

    def _convicted(self, group: list[str]) -> tuple[str, ...]:
        self._num_culprits += len(group)
        return tuple(group)
