"""A policy that answers nonsense: for tests that nothing it says can break the scheduler.

Owns: Hostile, seeded by class attribute, so that a run replays. Does not: write to requests, or never return.
"""

from __future__ import annotations

import random
from typing import Any

from octavo.core.policy.base import Policy


class BadTuple(tuple):  # type: ignore[type-arg]
    """A tuple that fails whenever it is looked at."""

    def __iter__(self) -> Any:
        raise ValueError("no parts")

    def __eq__(self, other: object) -> bool:
        raise ValueError("not comparable")

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        raise ValueError("no words")


class BadInt(int):
    """A number that cannot be converted or compared."""

    def __float__(self) -> float:
        raise OverflowError("no number")

    def __lt__(self, other: object) -> bool:
        raise TypeError("no order")


class BadText(str):
    """A string whose hash and equality are random."""

    def __hash__(self) -> int:
        return random.randrange(100)

    def __eq__(self, other: object) -> bool:
        return False

    def __str__(self) -> str:
        raise ValueError("no words")


class Hostile(Policy):
    """Garbage, exceptions and changing minds, in every method and hook."""

    name = "hostile"
    is_sane = False  # for the checks of plans: its order says nothing
    seed = 0
    skip_ahead = True
    preempt_on_arrival = True
    lookahead = 9
    tracks_service = True

    def __init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.shared = [1.0, 2.0]
        self.num_asked = 0

    def garbage(self) -> Any:
        """Anything, or an exception."""
        self.num_asked += 1
        rng = self.rng
        if rng.random() < 0.2:
            raise rng.choice((ValueError("no"), KeyError(1), RecursionError(), StopIteration()))
        self.shared[0] = rng.random()
        if rng.random() < 0.05:
            self.change()
        kinds: tuple[Any, ...] = (
            None, (), (None,), (float("nan"),), (float("inf"),), (-float("inf"), 1), ("a", 1), (1, "a"), [3], {},
            "text", (10**400,), (1j,), object(), (rng.random(),), (rng.randrange(3),), (rng.random(), rng.random(), 3),
            7, (BadInt(3),), BadTuple((1, 2)), BadText("lane"), self.shared, (self.shared,), (True, False), b"x",
            rng.choice("abc"), rng.choice("abc"), float("nan"), -float("inf"), rng.random(), -rng.random() * 1e300,
        )  # fmt: skip
        return rng.choice(kinds)

    def change(self) -> None:
        """Change what a policy is."""
        names = ("headroom", "skip_ahead", "preempt_on_arrival", "lookahead", "tracks_service", "served", "finished")
        setattr(self, self.rng.choice(names), self.rng.choice((None, -1, float("nan"), "x", 10**9)))

    def key(self, request: Any) -> Any:
        """Garbage."""
        return self.garbage()

    def victim_key(self, request: Any) -> Any:
        """Garbage."""
        return self.garbage()

    def lane(self, request: Any) -> Any:
        """Garbage."""
        return self.garbage()

    def lane_key(self, lane: Any) -> Any:
        """Garbage."""
        return self.garbage()

    def prefer(self, request: Any, cached_tokens: Any) -> Any:
        """Garbage."""
        return self.garbage()

    def arrived(self, request: Any) -> Any:
        """Garbage."""
        return self.garbage()

    def admitted(self, request: Any, num_tokens: Any) -> Any:
        """Garbage."""
        return self.garbage()

    def preempted(self, request: Any) -> Any:
        """Garbage."""
        return self.garbage()

    def finished(self, request: Any) -> Any:
        """Garbage."""
        return self.garbage()

    def served(self, request: Any, num_tokens: Any) -> Any:
        """Garbage."""
        return self.garbage()
