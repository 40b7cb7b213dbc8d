"""Forecast: when requests that have no token yet will get their first, from what the last steps and answers were like.

Owns: the pace of the last steps, the lengths of the last answers, the forecast. Does not: decide, or read a clock.
Method: a step of k tokens is taken to last a + b k seconds, by least squares over the last steps with prompts and the
last without. With that the queue as it stands is played forward in jumps from one event (a prompt is done, an answer
ends) to the next: slots, blocks and a step's tokens are shared out as admission does. Where lengths of answers are not
known, it is played several times, each answer of x tokens getting the length of one of the last that were longer than x
(a bootstrap): the median is told, and the least and greatest. Who comes later is not known, and left out.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from itertools import chain
from math import inf

from octavo.core import room
from octavo.core.plan import Event, StepPlan
from octavo.core.request import FinishReason, RequestState, Status
from octavo.core.state import State

NUM_STEPS = 64  # kept of each kind
NUM_RECENT = 16  # by which the pace of now is told
MIN_STEPS = 4
NUM_ANSWERS = 256
NUM_PLAYS = 9  # four of five times what happens lies between the least and the greatest of nine draws
MAX_PLAYED = 256  # requests beyond which one play must do, for it runs between two steps
MAX_JUMPS = 20_000
LEAST_AGE_S = 0.1  # a forecast is good for so long,
MAX_SHARE = 0.02  # and so long that making them takes at most this share of the time
NEW = ""  # a request that would come now, behind all that wait; no request has this name
_SAME_RUN = 0.1  # a pause before a step of up to this share of it belongs to it


class Pace:
    """Seconds of the last steps by their tokens."""

    def __init__(self) -> None:
        self._prompts: deque[tuple[int, float]] = deque(maxlen=NUM_STEPS)
        self._others: deque[tuple[int, float]] = deque(maxlen=NUM_STEPS)
        self._recent: deque[tuple[int, float]] = deque(maxlen=NUM_RECENT)
        self._last = -inf

    def add(self, plan: StepPlan, committed: float) -> None:
        """Note a step that gave a result. With several plans in flight its time begins at the end of the one before."""
        seconds, begun = committed - plan.now, plan.now
        if begun - self._last <= _SAME_RUN * seconds:
            begun = self._last
        self._last = committed
        kept = self._prompts if plan.num_query_tokens > len(plan.slots) else self._others
        kept.append((plan.num_query_tokens, committed - begun))
        self._recent.append(kept[-1])

    def fit(self) -> tuple[float, float] | None:
        """(seconds of a step, seconds more for each of its tokens); None before there were enough steps.

        Steps with prompts may be old, and a machine's pace changes: so the first is that of the most recent steps.
        """
        points = (*self._prompts, *self._others)
        if len(points) < MIN_STEPS:
            return None
        count = len(points)
        mean_k = sum(k for k, _ in points) / count
        mean_s = sum(s for _, s in points) / count
        spread = sum((k - mean_k) ** 2 for k, _ in points)
        slope = sum((k - mean_k) * (s - mean_s) for k, s in points) / spread if spread else 0.0
        recent = len(self._recent)
        mean_k = sum(k for k, _ in self._recent) / recent
        mean_s = sum(s for _, s in self._recent) / recent
        slope = min(max(slope, 0.0), mean_s / mean_k)  # neither a step nor a token takes less than nothing
        return mean_s - slope * mean_k, slope


class Lengths:
    """Tokens of the last answers that came to their own end."""

    def __init__(self) -> None:
        self._last: deque[int] = deque(maxlen=NUM_ANSWERS)

    def note(self, decisions: Iterable[Event]) -> None:
        """Follow decisions."""
        for event in decisions:
            if event.num_tokens > 0 and event.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                self._last.append(event.num_tokens)

    @property
    def is_known(self) -> bool:
        """Whether any answer came to its own end."""
        return bool(self._last)

    def sorted(self) -> list[int]:
        """All that are kept, shortest first."""
        return sorted(self._last)


@dataclass(slots=True)
class _Piece:
    """One request in the forecast: tokens to compute, tokens to come (inf: unknown), slots, blocks."""

    name: str
    prompt: float
    answer: float
    slots: int
    blocks: float
    is_asked: bool  # whether its next token is what is asked for


@dataclass(frozen=True, slots=True)
class Forecast:
    """Seconds from now to the next token: in the middle, and the least and most of all plays."""

    seconds: float
    least: float
    most: float

    def after(self, age: float) -> Forecast:
        """The same, told so many seconds later."""
        return Forecast(max(0.0, self.seconds - age), max(0.0, self.least - age), max(0.0, self.most - age))


def forecast(state: State, pace: Pace, lengths: Lengths) -> dict[str, Forecast]:
    """When each request that waits or prefills gets its next token; those not known are left out.

    Under NEW: when a request that came now would be let in.
    Equal states get equal forecasts. O(requests log requests) a play: for people, see Oracle.
    """
    fit = pace.fit()
    if fit is None or state.is_paused:
        return {}
    answers, rng = lengths.sorted(), random.Random(0)
    num_plays = NUM_PLAYS if len(state.requests) <= MAX_PLAYED else 1
    plays = [_Play(state, fit, answers, rng).run() for _ in range(num_plays)]
    found = {}
    for name in plays[0]:
        times = sorted(play.get(name, inf) for play in plays)
        if times[-1] < inf:
            found[name] = Forecast(times[len(times) // 2], times[0], times[-1])
    return found


class Oracle:
    """Forecasts for many who ask: made anew not so often that making them would slow the steps.

    `now` is the scheduler's clock. A forecast that is not new is told less the time since.
    """

    def __init__(self, state: State, pace: Pace, lengths: Lengths, now: Callable[[], float]) -> None:
        self._state, self._pace, self._lengths, self._now = state, pace, lengths, now
        self._found: dict[str, Forecast] = {}
        self._made_at = -inf
        self._until = -inf

    def ask(self) -> dict[str, Forecast]:
        """What is foretold now, by name."""
        if self._state.is_paused:
            return {}
        now = self._now()
        if now >= self._until:
            self._found = forecast(self._state, self._pace, self._lengths)
            self._made_at = now
            self._until = now + max(LEAST_AGE_S, (self._now() - now) / MAX_SHARE)
        age = now - self._made_at
        return {name: told.after(age) for name, told in self._found.items()} if age else self._found


class _Play:
    """The queue, played forward."""

    def __init__(self, state: State, fit: tuple[float, float], answers: list[int], rng: random.Random) -> None:
        self._step_s, self._token_s = fit
        self._answers = answers
        self._rng = rng
        self._group = min(range(len(state.cache.pools)), key=lambda group: state.cache.pools[group].num_blocks)
        self._budget = state.token_budget.limit
        self._block_size = state.cache.block_size
        self._slots = state.sequence_budget.left
        self._time = 0.0
        self._steps = 0.0
        self._prefills: deque[_Piece] = deque()
        self._decodes: list[tuple[float, int, _Piece]] = []  # (the step at which it ends, number, who)
        self._num_rows = 0
        self._number = 0
        self.found: dict[str, float] = {}
        promised = 0.0
        for entry in state.running.requests:
            piece = self._piece(state, entry)
            if entry.is_decoding:
                self._decode(piece)
                continue
            promised += piece.prompt / self._block_size
            piece.blocks += piece.prompt / self._block_size
            self._prefills.append(piece)
        pool = state.cache.pools[self._group]
        self._free = pool.num_free - promised - state.headroom.floors[self._group]
        waiting = map(partial(self._piece, state), state.waiting.in_order())  # made as they are let in
        self._waiting = chain(waiting, (_Piece(NEW, 1.0, 1.0, 1, 1.0, False),))
        self._first = next(self._waiting, None)

    def run(self) -> dict[str, float]:
        """Play until everybody is known, or nothing more can be."""
        for _ in range(MAX_JUMPS):
            self._admit()
            if not (self._prefills or self._first) or not self._jump():
                break
        return self.found

    def _piece(self, state: State, entry: RequestState) -> _Piece:
        asked, sequences = entry.request, entry.sequences
        known = sum(one.num_known for one in sequences)
        todo = known - sum(one.num_scheduled for one in sequences)
        is_waiting = entry.status == Status.WAITING
        if is_waiting:
            todo = sequences[0].num_known - (entry.seen[0] if entry.seen is not None else 0)
            if entry.is_swapped:
                todo = len(sequences)
        held = sum(len(one.tables[self._group]) for one in sequences)
        needed = room.num_blocks(state.cache, entry)[self._group] if is_waiting else held
        outputs = max(one.num_outputs for one in sequences)
        answer = self._answer(outputs, entry.max_tokens, asked.params.ignore_eos) if entry.samples else 0.0
        return _Piece(entry.name, todo, answer, entry.num_slots, needed, is_waiting or not entry.is_decoding)

    def _answer(self, outputs: int, most: int, is_exact: bool) -> float:
        """Tokens that an answer of so many will still get."""
        left = max(1, most - outputs)
        if is_exact:
            return left
        first = bisect_right(self._answers, outputs)
        if first == len(self._answers):
            return left if self._answers else inf
        return min(left, self._answers[self._rng.randrange(first, len(self._answers))] - outputs)

    def _admit(self) -> None:
        """Let in whoever is first while there is room."""
        while (first := self._first) is not None:
            has_company = bool(self._prefills or self._decodes)
            if has_company and (first.slots > self._slots or first.blocks > self._free):
                return
            if first.name == NEW:
                self.found[NEW] = self._time
                self._first = None
                return
            self._slots -= first.slots
            self._free -= first.blocks
            self._prefills.append(first)
            self._first = next(self._waiting, None)

    def _decode(self, piece: _Piece) -> None:
        self._number += 1
        self._num_rows += piece.slots
        piece.blocks += piece.slots * piece.answer / self._block_size  # by which it will have grown
        heappush(self._decodes, (self._steps + piece.answer, self._number, piece))

    def _jump(self) -> bool:
        """Go on to the next event; False where none is known to come."""
        chunk = max(1.0, self._budget - self._num_rows)
        end = self._decodes[0][0] - self._steps if self._decodes else inf
        first = -(-self._prefills[0].prompt // chunk) if self._prefills else inf
        steps = min(end, max(1.0, first))
        if steps == inf:
            return False
        steps = max(steps, 0.0)
        tokens = self._prefill(steps * chunk) + steps * self._num_rows
        self._time += steps * self._step_s + tokens * self._token_s
        self._steps += steps
        self._free -= steps * self._num_rows / self._block_size
        self._settle()
        return True

    def _prefill(self, room: float) -> float:
        """Compute up to so many prompt tokens; give how many there were."""
        done = 0.0
        for piece in self._prefills:
            part = min(piece.prompt, room - done)
            piece.prompt -= part
            done += part
            if done >= room:
                break
        return done

    def _settle(self) -> None:
        """Prompts that are done give a token; answers that are done give back what they held."""
        while self._decodes and self._decodes[0][0] <= self._steps:
            _, _, piece = heappop(self._decodes)
            self._num_rows -= piece.slots
            self._leave(piece)
        while self._prefills and self._prefills[0].prompt <= 0:
            piece = self._prefills.popleft()
            if piece.is_asked:
                self.found[piece.name] = self._time
            if piece.answer > 1:
                piece.answer -= 1
                self._decode(piece)
            else:
                self._leave(piece)

    def _leave(self, piece: _Piece) -> None:
        self._slots += piece.slots
        self._free += piece.blocks
