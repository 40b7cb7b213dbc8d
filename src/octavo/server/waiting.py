"""WaitingRoom: bounds the requests that have no token yet, so that overload is refused early and cheaply.

Owns: the count. Does not: order anything (the scheduler does).
Invariant: each seat is given back exactly once, at the request's first token or its end.
"""

from __future__ import annotations

from octavo.errors import QueueFullError


class Seat:
    """Room for some requests."""

    __slots__ = ("_num", "_room")

    def __init__(self, room: WaitingRoom, num: int) -> None:
        self._room: WaitingRoom | None = room
        self._num = num

    def leave(self) -> None:
        """Give the seat back. Idempotent."""
        if self._room is not None:
            self._room.num_waiting -= self._num
            self._room = None


class WaitingRoom:
    """Counts requests between arrival and first token; the bound allows for those that run at once."""

    def __init__(self, max_waiting: int, max_running: int) -> None:
        self._bound = max_waiting + max_running
        self.num_waiting = 0

    def enter(self, num: int = 1) -> Seat:
        """Take a seat. Raises QueueFullError at the bound."""
        if self.num_waiting and self.num_waiting + num > self._bound:
            raise QueueFullError(
                f"{self.num_waiting} requests wait, this server lets {self._bound} wait; try again later"
            )
        self.num_waiting += num
        return Seat(self, num)
