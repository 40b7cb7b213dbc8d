"""Decides how many drafts to make, from measured times and the share of drafts that were accepted.

Owns: the times of plain steps, drafting passes and verified drafts; the acceptance; the loss against plain steps.
Does not: run a model, or look up. Times depend on the machine, so the decision is an input of the scheduler (recordings
have it).
With acceptance a and k drafts a step yields 1 + a + ... + a**k tokens (Leviathan et al., "Fast Inference from
Transformers via Speculative Decoding", 2023); k maximises tokens per second. If no k gains MIN_GAIN, drafts are made
only in short trials, whose loss stays below LOSS_SHARE of the time of all steps. Lookups need no trials: whether they
were right is seen without verifying them.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import TypeVar

from octavo.core.plan import ROW_SAMPLE, Events, StepFailure, StepPlan, StepResult
from octavo.core.proposals import ANY_LOOKUP, DraftRow
from octavo.core.request import Request

FIRST_ACCEPTANCE = 0.7
MIN_GAIN = 1.03
LOSS_SHARE = 0.01
FIRST_LOSS = 8.0  # plain steps that the first trial may lose
FIRST_PASS = 0.5  # of a plain step: a drafting pass before one was measured
TRIAL_STEPS = 4
TRIAL_LENGTH = 2
REMEASURE = 64  # steps with drafts until a plain step is measured again
FALLING, RISING = 0.15, 0.1  # weight of the latest time, if it is shorter or longer than those before
MAX_RISE = 1.5  # a longer time counts as this much longer: most are caused by something else on the machine
COLD = 0.5  # a time below this share of those before replaces them: they were measured cold
FIRST_VERIFY = 0.05  # of a plain step: a verified draft before one was measured
MIN_VERIFY = 0.01  # of a plain step: measured times of drafts are differences, which may be negative
FORGETTING = 0.98  # of a verified draft's time, for each step whose lookups do not pay: it may have changed
LEARNING_ACCEPTANCE = 0.05  # weight of the latest draft, after the first ones
LOOKUP_RATES = (0.0, 0.0, 0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8)  # first acceptance of a lookup, by ids that matched
FIRST_DRAFTS = 2  # drafts that FIRST_ACCEPTANCE counts for
MIN_PREFILL = 16  # tokens of a pass whose time counts as a prompt's
Times = TypeVar("Times")


class DraftPace:
    """See the module. Times are in seconds; those of plain steps and passes are kept by number of rows."""

    def __init__(self) -> None:
        self.acceptance = FIRST_ACCEPTANCE
        self.num_drafting_steps = 0
        self.num_plain_steps = 0
        self.draft_s = 0.0  # of all passes
        self._num_outcomes = 0  # drafts from which the acceptance was learned
        self._plain_s: dict[int, float] = {}
        self._pass_s: dict[int, float] = {}
        self._verify: dict[int, float] = {}  # the time of one draft, in plain steps of as many rows
        self._lookup_rates = list(LOOKUP_RATES)
        self._lookups: dict[int, tuple[DraftRow, int]] = {}  # slot -> its row's latest lookup, after how many ids
        self._prefill_s: dict[int, float] = {}  # 0 -> of one token of the draft model's prompts
        self._since_plain = 0
        self._trial_left = 0
        self._spent_s = 0.0  # drafting since the last step with drafts
        self._lost_s = 0.0
        self._total_s = 0.0
        self._gain = 0.0

    def length(self, rows: Sequence[DraftRow], count_behind: Callable[[], int]) -> int:
        """Return the most drafts of each row now; `count_behind` returns how many ids must be computed first."""
        size = len(rows)
        plain_s = _nearest(self._plain_s, size)
        if not plain_s or self._since_plain >= REMEASURE:
            self._since_plain = 0
            return 0  # measures a plain step
        most = max(row.most for row in rows)
        pass_s = _nearest(self._pass_s, size)
        prefill_s = self._prefill_s.get(0, plain_s / MIN_PREFILL)
        if pass_s is not None:
            draft_s = pass_s + size * plain_s * (_nearest(self._verify, size) or 0.0)
            gains = [self._tokens(k) * plain_s / (plain_s + k * draft_s) for k in range(1, most + 1)]
            self._gain = max(gains, default=0.0)
            if self._gain >= MIN_GAIN:
                self._trial_left = 0
                saved_s = sum(row.num_left for row in rows) / size * plain_s * (1 - 1 / self._gain)
                return 1 + gains.index(self._gain) if count_behind() * prefill_s < saved_s else 0
        if not self._trial_left:
            left_s = self._left_s(plain_s) - TRIAL_STEPS * TRIAL_LENGTH * (pass_s or FIRST_PASS * plain_s)
            if left_s < 0 or count_behind() * prefill_s > left_s:
                return 0
            self._trial_left = TRIAL_STEPS
        self._trial_left -= 1
        return min(TRIAL_LENGTH, most)

    def choose(self, rows: Sequence[DraftRow], num_rows: int) -> list[int]:
        """Return how many ids of each row's lookup to verify in a plan of `num_rows` rows.

        They are chosen by their chance to be accepted, the likeliest first, as long as tokens per second rise.
        """
        self._learn_lookups(rows)
        chosen = [0] * len(rows)
        chances = []
        for index, row in enumerate(rows):
            chance = 1.0
            for offset in range(len(row.lookup.ids)):
                chance *= self._lookup_rates[min(row.lookup.num_matched + offset, len(LOOKUP_RATES) - 1)]
                chances.append((chance, index))
        plain_s = _nearest(self._plain_s, num_rows)
        if not chances or not plain_s or self._since_plain >= REMEASURE or self._left_s(plain_s) < 0:
            return chosen
        verify = _nearest(self._verify, num_rows)
        verify = FIRST_VERIFY if verify is None else verify
        chances.sort(reverse=True)
        if num_rows not in self._verify:
            del chances[TRIAL_LENGTH:]
        tokens, gain, best = float(num_rows), 1.0, 0
        for count, (chance, _) in enumerate(chances, 1):
            tokens += chance
            if tokens / num_rows / (1 + count * verify) > gain:
                gain, best = tokens / num_rows / (1 + count * verify), count
        self._gain = gain
        if gain < MIN_GAIN:
            if num_rows in self._verify:
                self._verify[num_rows] *= FORGETTING
            return chosen
        for _, index in chances[:best]:
            chosen[index] += 1
        return chosen

    def _learn_lookups(self, rows: Sequence[DraftRow]) -> None:
        """Compare each row's latest lookup, verified or not, with the ids that followed; keep the new ones."""
        for row in rows:
            before, at = self._lookups.pop(row.slot, (row, len(row.token_ids)))
            if before.request is row.request and before.choice == row.choice:
                followed = row.token_ids[at:]
                for offset, (expected, token) in enumerate(zip(before.lookup.ids, followed, strict=False)):
                    matched = min(before.lookup.num_matched + offset, len(LOOKUP_RATES) - 1)
                    self._lookup_rates[matched] += LEARNING_ACCEPTANCE * (
                        (expected == token) - self._lookup_rates[matched]
                    )
                    if expected != token:
                        break
            if row.lookup.ids:
                self._lookups[row.slot] = row, len(row.token_ids)

    def _left_s(self, plain_s: float) -> float:
        """Return the seconds that drafts may still lose against plain steps."""
        return FIRST_LOSS * plain_s + LOSS_SHARE * self._total_s - self._lost_s

    def _tokens(self, length: int) -> float:
        """Return the expected tokens of a step with this many drafts."""
        return sum(self.acceptance**index for index in range(length + 1))

    def drafted(self, num_rows: int, passes: list[tuple[int, float]]) -> None:
        """Learn the times of passes of the draft model: tokens and seconds of each."""
        is_first = not self.draft_s  # cold: weights are paged in and kernels chosen, which no later pass does
        for tokens, seconds in passes:
            self.draft_s += seconds
            if is_first:
                continue
            self._spent_s += seconds
            if tokens <= 2 * num_rows:
                _learn(self._pass_s, num_rows, seconds)
            elif tokens >= MIN_PREFILL:
                _learn(self._prefill_s, 0, seconds / tokens)

    def stepped(self, plan: StepPlan, result: StepResult, slots: frozenset[int]) -> None:
        """Learn the time and the result of a step of the target; `slots` had the draft model's drafts."""
        parts, size = result.timings, len(plan.slots)
        seconds = parts.prepare_s + parts.forward_s + parts.sample_s
        self._total_s += seconds
        if not plan.num_drafts:
            self.num_plain_steps += 1
            self._since_plain = 0
            if size and max(plan.counts) == 1:
                _learn(self._plain_s, size, seconds)
            return
        num_tokens = self._learn_acceptance(plan, result, slots)
        num_drafts = sum(plan.num_drafts)
        if plan.num_query_tokens != size + num_drafts:
            return  # some row computes a prompt
        self.num_drafting_steps += 1
        plain_s = self._plain_s.get(size)
        if plain_s is None:
            self._since_plain = REMEASURE
            return
        self._since_plain += 1
        if seconds < COLD * plain_s:
            self._plain_s[size] = plain_s = seconds
        is_cold = size not in self._verify
        _learn(self._verify, size, max(MIN_VERIFY, (seconds / plain_s - 1) / num_drafts))
        if not is_cold:
            seconds = min(seconds, plain_s * (1 + num_drafts))  # more is not the drafts' doing
            self._lost_s = max(0.0, self._lost_s + self._spent_s + seconds - plain_s * num_tokens / size)
        self._spent_s = 0.0

    def _learn_acceptance(self, plan: StepPlan, result: StepResult, slots: frozenset[int]) -> int:
        """Learn from each draft up to the first that was rejected; return the tokens of all rows."""
        sampling = [row for row, flags in enumerate(plan.flags) if flags & ROW_SAMPLE]
        counts = result.num_token_ids or [1] * len(sampling)
        for row, count in zip(sampling, counts, strict=True):
            if plan.slots[row] in slots and plan.num_drafts[row] and count:
                outcomes = [1.0] * (count - 1) + [0.0] * (count <= plan.num_drafts[row])
                for outcome in outcomes:
                    self._num_outcomes += 1
                    weight = max(LEARNING_ACCEPTANCE, 1 / (FIRST_DRAFTS + self._num_outcomes))
                    self.acceptance += weight * (outcome - self.acceptance)
        return sum(counts)

    def report(self) -> dict[str, object]:
        """Return what was learned, for statistics."""
        return {
            "acceptance": round(self.acceptance, 4),
            "expected_gain": round(self._gain, 4),
            "is_drafting": self._gain >= MIN_GAIN,
            "num_drafting_steps": self.num_drafting_steps,
            "num_plain_steps": self.num_plain_steps,
            "draft_s": self.draft_s,
            "draft_pass_s": dict(sorted(self._pass_s.items())),
            "plain_step_s": dict(sorted(self._plain_s.items())),
            "verified_draft": dict(sorted(self._verify.items())),
            "lookup_acceptance": dict(enumerate(self._lookup_rates[ANY_LOOKUP:], ANY_LOOKUP)),
        }


class PacedLookups:
    """A DraftSource: as many ids of the rows' lookups as pay. Also an EventSink, from which the pace learns."""

    min_match = ANY_LOOKUP
    knows_lengths = False

    def __init__(self, pace: DraftPace) -> None:
        self._pace = pace

    def propose(self, rows: list[DraftRow], num_rows: int) -> list[array[int]]:
        """Return the beginning of each row's lookup, maybe nothing."""
        counts = self._pace.choose(rows, num_rows)
        return [row.lookup.ids[:count] for row, count in zip(rows, counts, strict=True)]

    def admitted(self, request: Request) -> None:
        """Do nothing."""

    def decided(self, decisions: tuple[object, ...]) -> None:
        """Do nothing."""

    def stepped(self, plan: StepPlan, outcome: StepResult | StepFailure, events: Events) -> None:
        """Learn the time of a step."""
        if isinstance(outcome, StepResult):
            self._pace.stepped(plan, outcome, frozenset())

    def report(self) -> dict[str, object]:
        """Return what the pace learned, without what is about draft models."""
        found = self._pace.report()
        return {name: value for name, value in found.items() if not name.startswith(("acceptance", "draft"))}


def _nearest(times: dict[int, Times], size: int) -> Times | None:
    """Return the time of the nearest number of rows; None if there is none."""
    return times[min(times, key=lambda known: (abs(known - size), known))] if times else None


def _learn(times: dict[int, float], size: int, seconds: float) -> None:
    """Average with the times before. Falling times are learned faster than rising ones, which are mostly noise."""
    old = times.get(size)
    if old is None or seconds < COLD * old:
        times[size] = seconds
    elif seconds < old:
        times[size] = old + FALLING * (seconds - old)
    else:
        times[size] = old + RISING * (min(seconds, MAX_RISE * old) - old)
