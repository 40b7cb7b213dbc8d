"""Explanations in words and in plain values, from the scheduler's typed facts.

Owns: the sentences, the units of shortages, the JSON form. Does not: read the scheduler (core.explain does), or know
what was before (the histories do). Without `is_named` a sentence can be shown to a stranger: it names no request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from octavo.core.explain import Explanation, Room, Shortage, Standing
from octavo.core.plan import WaitReason

_UNITS = {
    WaitReason.TOKEN_BUDGET: "tokens of a step",
    WaitReason.SEQUENCE_CAP: "sequences",
    WaitReason.KV_BLOCKS: "blocks",
    WaitReason.HEADROOM: "blocks",
    WaitReason.SWAP_SPACE: "blocks",
    WaitReason.FORK_BLOCKS: "blocks",
    WaitReason.KV_READ_BUDGET: "tokens of context to read in a step",
    WaitReason.ENCODER_BUDGET: "media items to encode in a step",
    WaitReason.ADAPTER_SLOTS: "adapter slots",
    WaitReason.PARTIAL_PREFILL_CAP: "partly computed prompts",
    WaitReason.HOST_LOAD: "blocks to load from the host",
    WaitReason.UNCOMMITTED: "rows in flight to be committed",
}


def sentence(one: Explanation, is_named: bool = True) -> str:
    """Return an explanation as a sentence; without `is_named` no request's name is in it, its own neither."""
    said = _running(one) if one.position == 0 else _waiting(one, is_named)
    return f"{one.name} {said}" if is_named else said


def plain_values(one: Explanation) -> dict[str, object]:
    """Return an explanation's values for JSON: enumerations by their names in small letters."""
    values = asdict(one)
    values["state"] = one.state.value
    values["reason"] = reason_name(one.reason)
    if one.shortage is not None:
        shortage = values["shortage"]
        shortage["reason"] = reason_name(one.shortage.reason)
        shortage["unit"] = unit(one.shortage)
    for room, plain in zip(one.room, values["room"], strict=True):
        plain["short"] = room.short
    return values


def reason_name(reason: WaitReason | None) -> str | None:
    """Return a reason as people and metrics read it."""
    return None if reason is None else reason.name.lower()


def unit(shortage: Shortage) -> str:
    """Return what is short, in words; empty for reasons without numbers."""
    return _UNITS.get(shortage.reason, "")


def shortage_text(shortage: Shortage, room: Sequence[Room]) -> str:
    """Return the numbers of a shortage in words; for blocks the present ones, if `room` has them."""
    worst = max(room, key=lambda group: group.short, default=None)
    if worst is not None:
        return _room_text(worst, len(room))
    units = unit(shortage)
    if not units:
        return ""
    limit = f" of {shortage.limit}" if shortage.limit else ""
    units = units.removesuffix("s") if shortage.needed == 1 and not limit else units
    return f"needs {shortage.needed}{limit} {units}, {shortage.available} left"


def times(count: int) -> str:
    """Return "once", or how many times."""
    return "once" if count == 1 else f"{count} times"


def _waiting(one: Explanation, is_named: bool) -> str:
    behind = f", behind {one.behind}" if is_named and one.behind is not None else ""
    again = ""
    if one.state is not Standing.WAITING:
        cause = f"{one.state.value} {times(one.num_preemptions)}"
        again = f" ({cause})" if one.num_preemptions else " (put back after a failure)"
    reason = reason_name(one.reason) or "not looked at yet"
    place = f"waits{again} at position {one.position} of {one.num_waiting}{behind}: {reason}"
    if one.shortage is None:
        return place
    numbers = shortage_text(one.shortage, () if one.is_first_short else one.room)
    if one.is_first_short:
        return f"{place}; the first in line lacks {reason_name(one.shortage.reason)}: {numbers}"
    return f"{place}: {numbers}" if numbers else place


def _running(one: Explanation) -> str:
    work = one.work
    phase = "decoding" if one.state is Standing.DECODE else "prefilling"
    several = f" over {work.num_choices} sequences" if work.num_choices > 1 else ""
    again = f", preempted {times(one.num_preemptions)}" if one.num_preemptions else ""
    lacks = "" if one.shortage is None else f", {reason_name(one.reason)}: {shortage_text(one.shortage, ())}"
    drafted = f", {work.num_accepted} of {work.num_drafted} drafts accepted" if work.num_drafted else ""
    known = f"{work.num_computed} of {work.num_known} known tokens computed"
    blocks = "1 block" if work.num_blocks == 1 else f"{work.num_blocks} blocks"
    return f"is {phase}: {known}{several}, {blocks} held{again}{lacks}{drafted}"


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
