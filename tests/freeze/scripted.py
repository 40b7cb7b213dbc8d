"""An executor for the frozen decisions that computes nothing: what a row gives depends on its request and position.

Owns: Mirror (which sequence is in which slot, with which tables, as the plans say) and `execute`.
Does not: check plans (tests/core does), or know what ids its rows read.
"""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

from tests.freeze.core_names import (
    DROPPED,
    Request,
    StepPlan,
    StepResult,
    TokenLogprobs,
    quads,
    rows,
)

HABIT = 1000  # seeds from here on: seven times in eight the next id follows from the position alone, so drafts hit


def number(*parts: object) -> int:
    """A reproducible number of 32 bits."""
    return crc32(repr(parts).encode())


def draw(request: Request, choice: int, position: int, vocab_size: int) -> int:
    """The id at a position of one choice. Requests of one seed say the same, so blocks turn out equal."""
    seed = request.params.seed or 0
    mix = number(seed, choice, position)
    if seed >= HABIT and mix % 8:
        return 3 + (position % (3 + seed % 3)) % (vocab_size - 3)
    return (mix >> 4) % vocab_size


@dataclass
class SlotState:
    """One sequence that has a slot."""

    request_id: str
    choice: int
    tables: dict[int, list[int]] = field(default_factory=dict)

    def shown(self) -> list[list[int]]:
        """Its tables by group, without what was dropped at the end."""
        found = []
        for group in sorted(self.tables):
            table = list(self.tables[group])
            while table and table[-1] == DROPPED:
                table.pop()
            found.append([group, *table])
        return [table for table in found if len(table) > 1]


class Mirror:
    """Slots and tables after the plans made so far."""

    def __init__(self) -> None:
        self.slots: dict[int, SlotState] = {}

    def apply(self, plan: StepPlan) -> dict[str, Any]:
        """Take in a plan's effects; return what it freed, what entered and which tables changed."""
        before = {(state.request_id, state.choice): state.shown() for state in self.slots.values()}
        freed = [self.slots.pop(slot) for slot in plan.freed_slots if slot in self.slots]
        entered = []
        for new in plan.new_sequences:
            self.slots[new.slot] = SlotState(new.request_id, new.choice)
            ids = None if new.token_ids is None else [len(new.token_ids), crc32(new.token_ids.tobytes())]
            eos = list(new.eos_token_ids)
            entered.append([new.request_id, new.choice, new.num_prompt, ids, eos, new.adapter_id])
        for slot, group, index, block in quads(plan.edits):
            if slot in self.slots:
                table = self.slots[slot].tables.setdefault(group, [])
                table.extend([DROPPED] * (index - len(table)))
                table[index : index + 1] = [block]
        changed = []
        for state in self.slots.values():
            shown = state.shown()
            if shown != before.get((state.request_id, state.choice), []):
                changed.append([state.request_id, state.choice, shown])
        return {
            "freed": sorted([state.request_id, state.choice] for state in freed),
            "new": sorted(entered, key=lambda entry: entry[:2]),
            "tables": sorted(changed, key=lambda entry: entry[:2]),
        }

    def name(self, slot: int) -> list[Any]:
        """Request and choice of a slot."""
        state = self.slots[slot]
        return [state.request_id, state.choice]


@dataclass
class Faults:
    """Chances of a row without a usable result, one that gives nothing, and one that has nothing left to sample."""

    rng: random.Random
    error: float = 0.0
    nothing: float = 0.0
    dead_end: float = 0.0
    gives_ids: bool = True  # else the executor knows durations only

    def strikes(self, chance: float) -> bool:
        return chance > 0 and self.rng.random() < chance


class Maker:
    """The result of one plan."""

    def __init__(
        self, plan: StepPlan, owners: dict[int, SlotState], requests: dict[str, Request], vocab_size: int
    ) -> None:
        self.plan, self.owners, self.requests, self.vocab_size = plan, owners, requests, vocab_size
        self.ids, self.lengths = array("i"), array("i")
        self.logprobs: list[TokenLogprobs | None] = []
        self.ordinals: dict[str, int] = {}

    def make(self, faults: Faults) -> StepResult:
        """Draw for each row that samples; score and pool those that want it."""
        errors, dead_ends, scores, pooled = [], [], [], []
        for index, (slot, start, count, flags, drafts) in enumerate(rows(self.plan)):
            state = self.owners[slot]
            request = self.requests[state.request_id]
            end = start + count
            if faults.strikes(faults.error):
                errors.append((index, "not finite"))
            elif "sample" in flags and faults.strikes(faults.dead_end):
                dead_ends.append((index, "nothing may follow"))
            if "score" in flags:
                last = min(end + 1, request.num_prompt_tokens)
                made = tuple(TokenLogprobs(1, -(number(p) % 100) / 8, 1) for p in range(start + 1, last))
                scores.append((index, start + 1, made))
            if "pool" in flags:
                pooled.append((index, number(state.request_id, end).to_bytes(4, "little")))
            if "sample" in flags:
                self._sample(state, end - len(drafts), "beam" in flags, drafts, faults)
        result = StepResult(self.ids if faults.gives_ids else None)
        if any(length != 1 for length in self.lengths):
            result.num_token_ids = self.lengths
        if any(entry is not None for entry in self.logprobs):
            result.logprobs = self.logprobs
        result.scores, result.pooled = tuple(scores), tuple(pooled)
        result.errors, result.dead_ends = tuple(errors), tuple(dead_ends)
        return result

    def _sample(self, state: SlotState, position: int, is_beam: bool, drafts: list[int], faults: Faults) -> None:
        """One row: its ids, or its candidates, or, by a fault, nothing."""
        request = self.requests[state.request_id]
        if faults.strikes(faults.nothing):
            self.lengths.append(0)
        elif is_beam:
            self._give_candidates(state, request, position)
        else:
            self._give_ids(state, request, position, drafts)

    def _give_ids(self, state: SlotState, request: Request, position: int, drafts: list[int]) -> None:
        """The accepted drafts, and one id more."""
        length = 0
        for draft in (*drafts, None):
            token_id = draw(request, state.choice, position + length, self.vocab_size)
            self.ids.append(token_id)
            entry = None
            if request.params.best_of is not None:
                entry = TokenLogprobs(token_id, -(number(state.choice, position, token_id) % 64) / 8, 1)
            self.logprobs.append(entry)
            length += 1
            if token_id != draft:
                break
        self.lengths.append(length)

    def _give_candidates(self, state: SlotState, request: Request, position: int) -> None:
        """Candidates of a beam, best first; all ids are given, so that there are always enough."""
        ordinal = self.ordinals[state.request_id] = self.ordinals.get(state.request_id, -1) + 1
        mixed = (state.request_id, request.params.seed, position, ordinal)
        scored = [(-(number(*mixed, token_id) % 4096) / 512, token_id) for token_id in range(self.vocab_size)]
        scored.sort(key=lambda pair: (-pair[0], pair[1]))
        top_ids = tuple(token_id for _, token_id in scored)
        self.ids.append(top_ids[0])
        self.logprobs.append(TokenLogprobs(top_ids[0], scored[0][0], 1, top_ids, tuple(score for score, _ in scored)))
        self.lengths.append(1)
