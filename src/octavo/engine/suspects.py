"""Suspects: finds the one request that makes steps fail, by a retry and then by halves.

Owns: the groups on trial. A trial runs a group alone until each member has made progress (a committed
token, or its end) or a step fails again. Does not: plan, cancel or talk to an executor.
Invariant: a member with progress is cleared; a group only gets smaller, so a trial ends.
"""

from __future__ import annotations

from collections.abc import Iterable

MAX_FAILURES = 64  # steps failed in a row, by anyone, after which all of the failing plan are ended
MAX_CULPRITS = 32  # requests ended in a row without one committed token: then the executor is at fault


class Suspects:
    """The state of the search. `only` is what the next plan may contain; None means no trial."""

    def __init__(self) -> None:
        self._groups: list[list[str]] = []  # the last one is on trial
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

    def failed(self, ids: Iterable[str]) -> tuple[str, ...]:
        """Note a failed step with rows of `ids`; return those to end (mostly none, or one)."""
        group = list(dict.fromkeys(ids))
        self._num_failures += 1
        if self._num_failures > MAX_FAILURES:
            self._groups.clear()
            return self._convicted(group)
        if not self._groups:  # the first failure: the same requests try again
            self._groups = [group] if group else []
            return ()
        self._groups.pop()
        if len(group) == 1:
            return self._convicted(group)
        middle = (len(group) + 1) // 2
        self._groups += [half for half in (group[middle:], group[:middle]) if half]
        return ()

    def progressed(self, ids: Iterable[str]) -> None:
        """Clear requests that committed a token."""
        self._num_failures = 0
        self._num_culprits = 0
        self.cleared(ids)

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
