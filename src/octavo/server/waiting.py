"""WaitingRoom: bounds the requests that have no token yet, so that overload is refused early and cheaply.

Owns: the count. Does not: order anything (the scheduler does).
Invariant: each seat is given back exactly once, at its choice's first token or at the request's end.
"""

from __future__ import annotations

from octavo.errors import QueueFullError


class Seat:
    """Room for the choices of one request."""

    __slots__ = ("_num", "_room")

    def __init__(self, room: WaitingRoom, num: int) -> None:
        self._room = room
        self._num = num

    def leave(self) -> None:
        """Give back all that is left of it. Idempotent."""
        self._room.num_waiting -= self._num
        self._num = 0

    def leave_one(self) -> None:
        """Give back one choice's; nothing when none is left."""
        if self._num:
            self._room.num_waiting -= 1
            self._num -= 1


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
