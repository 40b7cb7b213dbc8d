"""Says in words where two plans differ.

Owns: the comparison for people. Does not: decide that they differ (digests do).
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from itertools import zip_longest

from octavo.core.plan import StepPlan

MAX_LINES = 12
_FLAT = {
    "edits": ("slot, group, index, block", 4),
    "copies": ("group, source, destination", 3),
    "swap_outs": ("group, device block, host block", 3),
    "host_loads": ("group, host block, device block", 3),
    "freed_slots": ("slot", 1),
    "id_edits": ("slot, position, id", 3),
}
_NAMES = ("finished_ids", "preempted_ids", "encode_jobs", "encoder_frees")


def differences(expected: StepPlan, got: StepPlan, owners: Mapping[int, str]) -> tuple[str, ...]:
    """Lines that say what is otherwise, the rows first; `owners` are the requests in the slots before these plans."""
    lines: list[str] = []
    if expected.step != got.step:
        lines.append(f"step: expected {expected.step}, got {got.step}")
    lines += _new_sequences(expected, got)
    names = {**owners, **{new.slot: new.request_id for new in (*expected.new_sequences, *got.new_sequences)}}
    lines += _rows(expected, got, names)
    for name, (parts, width) in _FLAT.items():
        lines += _flat(f"{name} ({parts})", getattr(expected, name), getattr(got, name), width)
    for name in _NAMES:
        ours, theirs = getattr(got, name), getattr(expected, name)
        if name in ("encode_jobs", "encoder_frees"):
            ours, theirs = len(ours), len(theirs)
        if ours != theirs:
            lines.append(f"{name}: expected {theirs}, got {ours}")
    if not lines:
        lines.append("all columns that are recorded are equal: ids, sampling parameters or media differ")
    if len(lines) > MAX_LINES:
        lines[MAX_LINES:] = [f"... and {len(lines) - MAX_LINES} more"]
    return tuple(lines)


def _new_sequences(expected: StepPlan, got: StepPlan) -> list[str]:
    was = {(new.request_id, new.choice): new.slot for new in expected.new_sequences}
    now = {(new.request_id, new.choice): new.slot for new in got.new_sequences}
    lines = []
    for who in dict.fromkeys((*was, *now)):
        if was.get(who) != now.get(who):
            lines.append(f"{_who(*who)} enters: expected {_in_slot(was.get(who))}, got {_in_slot(now.get(who))}")
    return lines


def _who(name: str, choice: int) -> str:
    return f"{name} choice {choice}" if choice else name


def _in_slot(slot: int | None) -> str:
    return "not" if slot is None else f"slot {slot}"


def _rows(expected: StepPlan, got: StepPlan, names: Mapping[int, str]) -> list[str]:
    was, now = _by_slot(expected), _by_slot(got)
    lines = [
        f"row of {names.get(slot, '?')} (slot {slot}): expected {was.get(slot, 'none')}, got {now.get(slot, 'none')}"
        for slot in dict.fromkeys((*was, *now))
        if was.get(slot) != now.get(slot)
    ]
    if not lines and expected.slots != got.slots:
        lines.append(f"order of rows by slot: expected {expected.slots.tolist()}, got {got.slots.tolist()}")
    return lines


def _by_slot(plan: StepPlan) -> dict[int, str]:
    drafts = plan.num_drafts or array("i", [0]) * len(plan.slots)
    return {
        slot: f"positions {start} to {start + count}, flags {flags}, {num} drafts"
        for slot, start, count, flags, num in zip(plan.slots, plan.starts, plan.counts, plan.flags, drafts, strict=True)
    }


def _flat(what: str, expected: array[int], got: array[int], width: int) -> list[str]:
    def entries(column: array[int]) -> list[list[int]]:
        return [column[at : at + width].tolist() for at in range(0, len(column), width)]

    for number, (was, now) in enumerate(zip_longest(entries(expected), entries(got))):
        if was != now:
            return [f"{what}: entry {number}: expected {was or 'none'}, got {now or 'none'}"]
    return []
