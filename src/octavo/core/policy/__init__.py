"""Policies: an order of requests and a choice of victims, by name.

Owns: the protocol and the registry. Does not: check budgets, blocks or progress: the scheduler does, so
that no policy can break them.
"""

from __future__ import annotations

from typing import Protocol

from octavo.core.policy.fcfs import Fcfs
from octavo.core.policy.fifo import Fifo
from octavo.core.request import RequestState
from octavo.errors import ConfigError


class Policy(Protocol):
    """What a policy says. Lower keys come first; ties go to the earlier arrival.

    `headroom` is the policy's default share of the pool kept free at admission; with `skip_ahead` up to 64
    candidates are examined past one that lacks room.
    """

    name: str
    headroom: float
    skip_ahead: bool

    def key(self, request: RequestState) -> tuple[float, ...]:
        """Order of service. Asked again when the request is admitted, starts decoding, or is preempted."""
        ...

    def victim_key(self, request: RequestState) -> tuple[float, ...]:
        """Order of preemption: the greatest goes first, ties to the later arrival."""
        ...


POLICIES: dict[str, type[Policy]] = {Fcfs.name: Fcfs, Fifo.name: Fifo}


def create_policy(name: str) -> Policy:
    """Make the policy of that name. Raises ConfigError with the known names."""
    if name not in POLICIES:
        raise ConfigError(f"policy is {name!r}; choose one of {', '.join(sorted(POLICIES))}")
    return POLICIES[name]()
