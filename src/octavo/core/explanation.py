"""Explanation: where a request stands and why, in numbers and in a sentence made of them.

Owns: the record, its words and its plain values. Does not: read the scheduler's state (see explaining), or know what
came before (observe.history does). Nobody's name is in it but in `name`, `tenant`, `behind` and `ahead`, so that
it can be shown to a stranger without those.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum

from octavo.core.plan import WaitReason


class Standing(Enum):
    """What a request is doing."""

    WAITING = "waiting"  # never ran
    PREEMPTED = "preempted"  # waits again, and will be computed anew
    SWAPPED = "swapped"  # waits again, its KV on the host
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class Shortage:
    """What a request was refused for when it was looked at last, in step `step`: `needed` and `available`, in `unit`.

    `limit` is how much of it there is in all; 0 where that means nothing.
    """

    reason: WaitReason
    needed: int = 0
    available: int = 0
    limit: int = 0
    unit: str = ""
    step: int = 0


@dataclass(frozen=True, slots=True)
class Room:
    """One group of the KV pool as a waiting request meets it now, in blocks.

    It needs `needed` beside the `found` that it would share. Of the pool's `total`, `free` hold nothing and `evictable`
    a prefix that nobody uses (and not this one). Of these `promised` are for prompts under way, and `headroom` and
    `growth` stay free for what runs.
    """

    group: int
    total: int
    needed: int
    found: int
    free: int
    evictable: int
    promised: int
    headroom: int
    growth: int

    @property
    def short(self) -> int:
        """Blocks that are lacking; 0 or less where it would fit."""
        return self.needed + self.promised + self.headroom + self.growth - self.free - self.evictable


@dataclass(frozen=True, slots=True)
class Ahead:
    """Somebody before it in the queue, and what gives it that place."""

    name: str
    tenant: str
    why: str


@dataclass(frozen=True, slots=True)
class Work:
    """How much there is of a request: of all its sequences together; blocks that they share count once.

    `num_computed` of `num_known` tokens (prompt and outputs) are in the KV pool; `cached_tokens` were found there at
    its first admission. `num_outputs` of at most `max_tokens` are out, for each choice.
    """

    num_prompt_tokens: int = 0
    num_known: int = 0
    num_computed: int = 0
    num_outputs: int = 0
    max_tokens: int = 0
    cached_tokens: int = 0
    num_blocks: int = 0
    num_host_blocks: int = 0
    num_choices: int = 1
    num_drafted: int = 0
    num_accepted: int = 0


@dataclass(frozen=True, slots=True)
class Explanation:
    """Where one request stands at `now`. Times are on the scheduler's clock, in seconds.

    `position` counts from 1 among `num_waiting`; 0 where it does not wait. `reason` is why it waits, `shortage` the
    numbers of that: of its own when it was looked at, else of the first in line (`is_first_short`). `behind` is who
    stands right before it, or the barrier that nobody passes; `ahead` are the first few in the queue. `why` is its
    own place in the policy's order, `rule` the order. `num_bypassed`: steps in which somebody later was let in past
    it; at `max_bypass` nobody is. `reason` is None where it runs, or was not looked at yet.
    """

    name: str
    tenant: str
    state: Standing
    now: float
    arrival: float
    position: int = 0
    num_waiting: int = 0
    num_running: int = 0
    reason: WaitReason | None = None
    shortage: Shortage | None = None
    is_first_short: bool = False
    room: tuple[Room, ...] = ()
    behind: str | None = None
    ahead: tuple[Ahead, ...] = ()
    policy: str = ""
    rule: str = ""
    why: str = ""
    num_bypassed: int = 0
    max_bypass: int = 0
    work: Work = field(default_factory=Work)
    num_preemptions: int = 0
    deadline: float | None = None
    queue_until: float | None = None

    def text(self, is_named: bool = True) -> str:
        """Say it in a sentence; without `is_named`, nobody's name is in it, its own neither."""
        said = self._running() if self.position == 0 else self._waiting(is_named)
        return f"{self.name} {said}" if is_named else said

    def values(self) -> dict[str, object]:
        """Plain values, for JSON: enumerations by their names in small letters."""
        plain = asdict(self)
        plain["state"] = self.state.value
        plain["reason"] = word(self.reason)
        if self.shortage is not None:
            plain["shortage"]["reason"] = word(self.shortage.reason)
        for room, values in zip(self.room, plain["room"], strict=True):
            values["short"] = room.short
        return plain

    def _waiting(self, is_named: bool) -> str:
        behind = f", behind {self.behind}" if is_named and self.behind is not None else ""
        again = ""
        if self.state is not Standing.WAITING:
            cause = f"{self.state.value} {times(self.num_preemptions)}"
            again = f" ({cause})" if self.num_preemptions else " (put back after a failure)"
        reason = word(self.reason) or "not looked at yet"
        place = f"waits{again} at position {self.position} of {self.num_waiting}{behind}: {reason}"
        if self.shortage is None:
            return place
        words = shortage_text(self.shortage, self.room if not self.is_first_short else ())
        if self.is_first_short:
            return f"{place}; the first in line lacks {word(self.shortage.reason)}: {words}"
        return f"{place}: {words}" if words else place

    def _running(self) -> str:
        work = self.work
        phase = "decoding" if self.state is Standing.DECODE else "prefilling"
        several = f" over {work.num_choices} sequences" if work.num_choices > 1 else ""
        again = f", preempted {times(self.num_preemptions)}" if self.num_preemptions else ""
        lacks = "" if self.shortage is None else f", {word(self.reason)}: {shortage_text(self.shortage, ())}"
        drafted = f", {work.num_accepted} of {work.num_drafted} drafts accepted" if work.num_drafted else ""
        known = f"{work.num_computed} of {work.num_known} known tokens computed"
        blocks = "1 block" if work.num_blocks == 1 else f"{work.num_blocks} blocks"
        return f"is {phase}: {known}{several}, {blocks} held{again}{lacks}{drafted}"


def word(reason: WaitReason | None) -> str | None:
    """A reason as people and metrics have it."""
    return None if reason is None else reason.name.lower()


def shortage_text(shortage: Shortage, room: Sequence[Room]) -> str:
    """The numbers of a shortage in words; of blocks those of now, where `room` has them."""
    worst = max(room, key=lambda group: group.short, default=None)
    if worst is not None:
        return _room_text(worst, len(room))
    if not shortage.unit:
        return ""
    limit = f" of {shortage.limit}" if shortage.limit else ""
    unit = shortage.unit.removesuffix("s") if shortage.needed == 1 and not limit else shortage.unit
    return f"needs {shortage.needed}{limit} {unit}, {shortage.available} left"


def _room_text(room: Room, num_groups: int) -> str:
    where = f" of group {room.group}" if num_groups > 1 else ""
    shared = f" beside {room.found} that it finds" if room.found else ""
    kept = [
        f"{count} {what}"
        for count, what in (
            (room.promised, "promised to what runs"),
            (room.headroom, "kept as headroom"),
            (room.growth, "kept so that what runs can grow"),
        )
        if count
    ]
    parts = [f"needs {room.needed} blocks{where}{shared}", f"{room.free} free", f"{room.evictable} evictable", *kept]
    end = "" if room.short > 0 else "; there is room by now, and the next step looks again"
    return ", ".join(parts) + end


def times(count: int) -> str:
    """Once, or how many times."""
    return "once" if count == 1 else f"{count} times"
