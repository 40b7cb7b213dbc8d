"""Forecaster: predicts when waiting and prefilling requests get their next token, from recent steps and answers.

Owns: the forecast, and the WaitModel with which another process estimates waits.
Does not: decide, or read a clock.
Method: a step of k tokens takes a + b k seconds, by least squares over the last steps with and without prompts. The
queue is simulated in jumps from one event (a prompt is done, an answer ends) to the next; slots, blocks and a step's
tokens are allocated as in admission. There are NUM_RUNS runs, or one if many requests are open. In each run an answer
of x tokens gets the length of a random recent answer longer than x (a bootstrap). The result is the median, the least
and the greatest of the runs. Requests that arrive later are left out.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from heapq import heappop, heappush
from itertools import chain
from math import inf

from octavo.core.scheduler import Scheduler
from octavo.core.snapshots import OpenWork, RequestView
from octavo.observe.series import StepTimeModel

NUM_RUNS = 9  # with nine draws, the true value is between the least and the greatest four times in five
MAX_REPEATED = 256  # open requests beyond which there is only one run, as it delays the next step
MAX_JUMPS = 20_000
LEAST_AGE_S = 0.1  # a forecast is used for at least this long
MAX_SHARE = 0.02  # a forecast is used for so long that forecasts take at most this share of the time
NEW_REQUEST = ""  # a request that would arrive now, after all waiting ones; no request has this name


@dataclass(frozen=True, slots=True)
class WaitModel:
    """The figures with which any process can estimate waits; the engine's verb `forecast` returns them.

    A step takes `step_s` and `token_s` for each of its tokens; an answer has `answer_tokens` on average.
    """

    step_s: float
    token_s: float
    answer_tokens: float

    def steps_s(self, num_steps: float, num_tokens: float) -> float:
        """Return the seconds of `num_steps` steps that compute `num_tokens` tokens in total."""
        return num_steps * self.step_s + num_tokens * self.token_s

    def expected_wait_s(self, prompt_tokens: float, output_tokens: float, num_running: int) -> float:
        """Return the seconds until a request starts if all slots are taken.

        `prompt_tokens` and `output_tokens` are those of the requests before it in the queue, `num_running` the
        sequences in the batch: each step gives them a token each, and prompts are computed beside them.
        """
        num_rows = max(1, num_running)
        num_steps = (output_tokens + self.answer_tokens) / num_rows  # a running request has to end first
        return self.steps_s(num_steps, num_steps * num_rows + prompt_tokens)


@dataclass(frozen=True, slots=True)
class Forecast:
    """Seconds from now to the next token: the median, and the least and most of all runs."""

    seconds: float
    least: float
    most: float


def forecast(scheduler: Scheduler, step_times: StepTimeModel, answers: Collection[int]) -> dict[str, Forecast]:
    """Return when each waiting or prefilling request gets its next token; requests without a forecast are left out.

    The entry NEW_REQUEST says when a request that arrived now would be admitted. `answers`: tokens of recent answers.
    Equal states get equal forecasts. A run costs O(requests log requests); Forecaster bounds how often runs are made.
    """
    fit = step_times.fit()
    if fit is None or scheduler.is_paused:
        return {}
    model, lengths, rng = WaitModel(*fit, 0.0), sorted(answers), random.Random(0)
    work = scheduler.open_work()
    num_runs = NUM_RUNS if len(work.running) + len(work.waiting) <= MAX_REPEATED else 1
    runs = [_QueueRun(work, model, lengths, rng).run() for _ in range(num_runs)]
    found = {}
    for name in runs[0]:
        times = sorted(run.get(name, inf) for run in runs)
        if times[-1] < inf:
            found[name] = Forecast(times[len(times) // 2], times[0], times[-1])
    return found


class Forecaster:
    """Caches forecasts and limits how often they are made, so that they do not slow the steps.

    `now` is the scheduler's clock. The age of a cached forecast is subtracted from its seconds.
    """

    def __init__(
        self, scheduler: Scheduler, step_times: StepTimeModel, answers: Collection[int], now: Callable[[], float]
    ) -> None:
        self._scheduler, self._step_times, self._answers, self._now = scheduler, step_times, answers, now
        self._found: dict[str, Forecast] = {}
        self._made_at = self._until = -inf

    def next_tokens(self) -> dict[str, Forecast]:
        """Return the forecasts as of now, by request id (and NEW_REQUEST)."""
        if self._scheduler.is_paused:
            return {}
        now = self._now()
        if now >= self._until:
            self._found = forecast(self._scheduler, self._step_times, self._answers)
            self._made_at = now
            self._until = now + max(LEAST_AGE_S, (self._now() - now) / MAX_SHARE)
        age = now - self._made_at
        if not age:
            return self._found
        return {
            name: Forecast(max(0.0, was.seconds - age), max(0.0, was.least - age), max(0.0, was.most - age))
            for name, was in self._found.items()
        }

    def wait_model(self) -> WaitModel | None:
        """Return the current figures; None until there have been enough steps and an answer."""
        fit, answers = self._step_times.fit(), self._answers
        return WaitModel(*fit, sum(answers) / len(answers)) if fit is not None and answers else None

    def new_request(self, is_model_only: bool = False) -> dict[str, object]:
        """Return the wait of a request that would arrive now, and the WaitModel, as plain values for admission."""
        found, model = None if is_model_only else self.next_tokens().get(NEW_REQUEST), self.wait_model()
        return {
            "new_request_s": None if found is None else found.seconds,
            "model": None if model is None else asdict(model),
        }


@dataclass(slots=True)
class _Job:
    """One request in a run: the remaining tokens of its prompt and answer (inf: unknown), slots, blocks."""

    name: str
    prompt: float
    answer: float
    slots: int
    blocks: float
    has_question: bool  # its next token is what the forecast is about


class _QueueRun:
    """One simulation of the queue."""

    def __init__(self, work: OpenWork, model: WaitModel, answers: list[int], rng: random.Random) -> None:
        self._model = model
        self._answers = answers
        self._rng = rng
        self._budget = work.max_step_tokens
        self._block_size = work.block_size
        self._slots = work.num_free_slots
        self._time = 0.0
        self._steps = 0.0
        self._prefills: deque[_Job] = deque()
        self._decodes: list[tuple[float, int, _Job]] = []  # (the step at which it ends, number, job)
        self._num_rows = 0
        self._number = 0
        self.found: dict[str, float] = {}
        promised = 0.0
        for entry in work.running:
            job = self._job(entry)
            if entry.is_decoding:
                self._decode(job)
                continue
            promised += job.prompt / self._block_size
            job.blocks += job.prompt / self._block_size
            self._prefills.append(job)
        self._free = work.num_free_blocks - promised
        waiting = map(self._job, work.waiting)  # each job is made when it becomes the first of the queue
        self._waiting = chain(waiting, (_Job(NEW_REQUEST, 1.0, 1.0, 1, 1.0, False),))
        self._first = next(self._waiting, None)

    def run(self) -> dict[str, float]:
        """Run until every request has its token, or no further event is known."""
        for _ in range(MAX_JUMPS):
            self._admit()
            if not (self._prefills or self._first) or not self._jump():
                break
        return self.found

    def _job(self, entry: RequestView) -> _Job:
        answer = self._answer(entry.num_outputs, entry.max_tokens, entry.ignores_eos) if entry.max_tokens else 0.0
        has_question = entry.reason is not None or not entry.is_decoding
        return _Job(entry.name, entry.num_todo, answer, entry.num_slots, entry.num_blocks, has_question)

    def _answer(self, outputs: int, most: int, is_exact: bool) -> float:
        """Return the tokens that an answer of `outputs` tokens will still get."""
        left = max(1, most - outputs)
        if is_exact:
            return left
        first = bisect_right(self._answers, outputs)
        if first == len(self._answers):
            return left if self._answers else inf
        return min(left, self._answers[self._rng.randrange(first, len(self._answers))] - outputs)

    def _admit(self) -> None:
        """Admit from the front of the queue while there is room."""
        while (first := self._first) is not None:
            has_company = bool(self._prefills or self._decodes)
            if has_company and (first.slots > self._slots or first.blocks > self._free):
                return
            if first.name == NEW_REQUEST:
                self.found[NEW_REQUEST] = self._time
                self._first = None
                return
            self._slots -= first.slots
            self._free -= first.blocks
            self._prefills.append(first)
            self._first = next(self._waiting, None)

    def _decode(self, job: _Job) -> None:
        self._number += 1
        self._num_rows += job.slots
        job.blocks += job.slots * job.answer / self._block_size  # the blocks of its growth
        heappush(self._decodes, (self._steps + job.answer, self._number, job))

    def _jump(self) -> bool:
        """Advance to the next event; return False if none is known."""
        chunk = max(1.0, self._budget - self._num_rows)
        end = self._decodes[0][0] - self._steps if self._decodes else inf
        first = -(-self._prefills[0].prompt // chunk) if self._prefills else inf
        steps = min(end, max(1.0, first))
        if steps == inf:
            return False
        steps = max(steps, 0.0)
        tokens = self._prefill(steps * chunk) + steps * self._num_rows
        self._time += self._model.steps_s(steps, tokens)
        self._steps += steps
        self._free -= steps * self._num_rows / self._block_size
        self._settle()
        return True

    def _prefill(self, budget: float) -> float:
        """Compute up to `budget` prompt tokens; return how many there were."""
        done = 0.0
        for job in self._prefills:
            part = min(job.prompt, budget - done)
            job.prompt -= part
            done += part
            if done >= budget:
                break
        return done

    def _settle(self) -> None:
        """Record the first token of finished prompts, and free the slots and blocks of finished answers."""
        while self._decodes and self._decodes[0][0] <= self._steps:
            _, _, job = heappop(self._decodes)
            self._num_rows -= job.slots
            self._leave(job)
        while self._prefills and self._prefills[0].prompt <= 0:
            job = self._prefills.popleft()
            if job.has_question:
                self.found[job.name] = self._time
            if job.answer > 1:
                job.answer -= 1
                self._decode(job)
            else:
                self._leave(job)

    def _leave(self, job: _Job) -> None:
        self._slots += job.slots
        self._free += job.blocks
