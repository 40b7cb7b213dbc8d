"""Decides how many drafts to make, from measured times and the share of drafts that were accepted.

Owns: the times of plain steps, drafting passes and verified drafts; the acceptance; the loss against plain steps.
Does not: run a model. Times depend on the machine, so the decision is an input of the scheduler (recordings have it).
With acceptance a and k drafts a step yields 1 + a + ... + a**k tokens (Leviathan et al., "Fast Inference from
Transformers via Speculative Decoding", 2023); k maximises tokens per second. If no k gains MIN_GAIN, drafts are made
only in short trials, whose loss stays below LOSS_SHARE of the time of all steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from octavo.core.plan import ROW_SAMPLE, StepPlan, StepResult
from octavo.core.proposals import DraftRow

FIRST_ACCEPTANCE = 0.7
MIN_GAIN = 1.03
LOSS_SHARE = 0.01
FIRST_LOSS = 8.0  # plain steps that the first trial may lose
FIRST_PASS = 0.5  # of a plain step: a drafting pass before one was measured
TRIAL_STEPS = 4
TRIAL_LENGTH = 2
REMEASURE = 64  # steps with drafts until a plain step is measured again
LEARNING = 0.2  # weight of the latest time
LEARNING_ACCEPTANCE = 0.05  # weight of the latest draft, after the first ones
FIRST_DRAFTS = 2  # drafts that FIRST_ACCEPTANCE counts for
MIN_PREFILL = 16  # tokens of a pass whose time counts as a prompt's


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
        self._verify_s: dict[int, float] = {}  # of one draft
        self._prefill_s: float | None = None  # of one token of the draft model's prompts
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
        prefill_s = plain_s / MIN_PREFILL if self._prefill_s is None else self._prefill_s
        if pass_s is not None:
            draft_s = pass_s + size * (_nearest(self._verify_s, size) or 0.0)
            gains = [self._tokens(k) * plain_s / (plain_s + k * draft_s) for k in range(1, most + 1)]
            self._gain = max(gains, default=0.0)
            if self._gain >= MIN_GAIN:
                self._trial_left = 0
                saved_s = sum(row.num_left for row in rows) / size * plain_s * (1 - 1 / self._gain)
                return 1 + gains.index(self._gain) if count_behind() * prefill_s < saved_s else 0
        if not self._trial_left:
            left_s = FIRST_LOSS * plain_s + LOSS_SHARE * self._total_s - self._lost_s
            left_s -= TRIAL_STEPS * TRIAL_LENGTH * (pass_s or FIRST_PASS * plain_s)
            if left_s < 0 or count_behind() * prefill_s > left_s:
                return 0
            self._trial_left = TRIAL_STEPS
        self._trial_left -= 1
        return min(TRIAL_LENGTH, most)

    def _tokens(self, length: int) -> float:
        """Return the expected tokens of a step with this many drafts."""
        return sum(self.acceptance**index for index in range(length + 1))

    def drafted(self, num_rows: int, passes: list[tuple[int, float]]) -> None:
        """Learn the times of passes of the draft model: tokens and seconds of each."""
        for tokens, seconds in passes:
            self._spent_s += seconds
            self.draft_s += seconds
            if tokens <= 2 * num_rows:
                _learn(self._pass_s, num_rows, seconds)
            elif tokens >= MIN_PREFILL:
                each = seconds / tokens
                self._prefill_s = each if self._prefill_s is None else self._prefill_s + LEARNING * (
                    each - self._prefill_s
                )  # fmt: skip

    def stepped(self, plan: StepPlan, result: StepResult, slots: frozenset[int]) -> None:
        """Learn the time and the result of a step of the target; `slots` had the draft model's drafts."""
        parts, size = result.timings, len(plan.slots)
        seconds = parts.prepare_s + parts.forward_s + parts.sample_s
        self._total_s += seconds
        if not plan.num_drafts:
            self.num_plain_steps += 1
            if size and max(plan.counts) == 1:
                _learn(self._plain_s, size, seconds)
            return
        num_tokens = self._learn_acceptance(plan, result, slots)
        plain_s = _nearest(self._plain_s, size)
        num_drafts = sum(plan.num_drafts)
        if plain_s is None or plan.num_query_tokens != size + num_drafts:
            return  # some row computes a prompt
        self.num_drafting_steps += 1
        self._since_plain += 1
        _learn(self._verify_s, size, max(0.0, seconds - plain_s) / num_drafts)
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
        }


def _nearest(times: dict[int, float], size: int) -> float | None:
    """Return the time of the nearest number of rows; None if there is none."""
    return times[min(times, key=lambda known: (abs(known - size), known))] if times else None


def _learn(times: dict[int, float], size: int, seconds: float) -> None:
    old = times.get(size)
    times[size] = seconds if old is None else old + LEARNING * (seconds - old)
