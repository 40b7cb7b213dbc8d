"""What a policy says, with defaults: subclass Policy, give a name and a key, and register it.

Owns: the protocol between scheduler and policy. Does not: check budgets, blocks or progress: the scheduler does,
so that no policy can break them. Whatever a policy returns is checked (see core.policy.PolicyGuard).
"""

from __future__ import annotations

from octavo.core.limits import Limits
from octavo.core.request import RequestState


class Policy:
    """Ranks requests and names victims. Lower keys come first; ties go to the earlier arrival.

    `headroom` is the default share of the pool kept free at admission. With `skip_ahead` up to 64 candidates are
    examined past one that lacks room. With `preempt_on_arrival` a waiting request that lacks room may preempt
    running ones of later victim rank. With `lookahead` > 1 the first so many candidates are admitted in the order
    of `prefer`. With `tracks_service` the scheduler calls `served`. These are read once, after `configure`.
    `rule` says in a few words, for people, what the order is.
    A policy sees the public fields of RequestState and must not write to them. An exception counts as no opinion.
    """

    name = ""
    headroom = 0.01
    skip_ahead = False
    preempt_on_arrival = False
    lookahead = 1
    tracks_service = False
    rule = ""

    def configure(self, limits: Limits) -> None:
        """Called once, before anything else."""

    def key(self, request: RequestState) -> tuple[float, ...]:
        """Order of service. Asked when the request arrives, is admitted, starts decoding, or is preempted."""
        return ()

    def victim_key(self, request: RequestState) -> tuple[float, ...]:
        """Order of preemption, asked when a victim is needed: the greatest goes first, ties to the later arrival."""
        return ()

    def lane(self, request: RequestState) -> str:
        """Name of the line that a request waits in; one line for all by default. Fixed for a request."""
        return ""

    def lane_key(self, lane: str) -> float:
        """Order of lines, read whenever the next candidate is looked for; may only grow while anybody waits in it."""
        return 0.0

    def why(self, request: RequestState) -> str:
        """What gives a request its place in the order of service, in words and numbers, naming nobody: for people."""
        return ""

    def prefer(self, request: RequestState, cached_tokens: int) -> tuple[float, ...]:
        """Order among the first `lookahead` candidates, with the length of each one's cached prefix."""
        return ()

    def arrived(self, request: RequestState) -> None:
        """A request was taken, and waits."""

    def admitted(self, request: RequestState, num_tokens: int) -> None:
        """A request starts or resumes; `num_tokens` of its known tokens are to be computed."""

    def preempted(self, request: RequestState) -> None:
        """A request waits again."""

    def finished(self, request: RequestState) -> None:
        """A request ended, running or waiting."""

    def served(self, request: RequestState, num_tokens: int) -> None:
        """Output tokens were committed for a request."""
