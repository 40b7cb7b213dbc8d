"""One request of the front end: as submitted, a page of ids per choice, its end, and the request that resumes it.

Owns: the pages, the reader's position in them, the prompt scores received, the request for a later engine.
Does not: check epochs (see open_requests).
Invariants: a choice has one end and accepts nothing after it; a prompt score is kept once; the figures of the first
admission (queue time, cached tokens) do not change under later engines.
"""

from __future__ import annotations

import sys
from array import array
from asyncio import Future, get_running_loop
from dataclasses import dataclass, field, replace

from octavo.core.plan import Event, EventKind, TokenLogprobs
from octavo.core.request import FinishReason, Request, SamplingParams, Want
from octavo.engine.client import Accepted, TokenOutput
from octavo.engine.outbox import finished

MAX_PREEMPTIONS = 32  # of one request that are kept, with their times


def num_choices(params: SamplingParams) -> int:
    """Return the number of choices that the engine outputs: of a beam search `n`, else all that are generated."""
    return params.n if params.beam_width else params.num_sequences


@dataclass(slots=True, eq=False)
class Page:
    """One choice: its ids, how many were read, and its end. `logprobs` are those of the unread ids."""

    ids: array[int] = field(default_factory=lambda: array("i"))
    num_read: int = 0
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    end: Event | None = None
    is_end_read: bool = False

    @property
    def has_news(self) -> bool:
        """True if the reader has not read all ids and the end."""
        return self.num_read < len(self.ids) or (self.end is not None and not self.is_end_read)


class OpenRequest:
    """One request: as submitted (with a seed), a page per choice, made at the choice's first event, and its end.

    `has_several`: the engine runs several sequences for it, so it starts over in a later epoch.
    `epoch` is that of its arrival, 0 if an earlier front end accepted it. `has_progress`: it got a token in this epoch,
    even one that was already held; `num_crashes` are the engines that died with it in their batch since its last
    token. `requested_ends` are cancellations, by choice (None = the whole request), which an engine that died may not
    have received. `queue_s` and `cached_tokens` are those of its first admission, None and 0 before it. `max_tokens` is
    the engine's decision, 0 before it accepted the request. `answer` is the future of its submit, `waiter` that of
    its reader, for any output or (`final_only`) for the end.
    """

    __slots__ = (
        "_num_choices", "_num_ended", "_out_since", "_scores", "_scores_from", "answer", "cached_tokens", "end",
        "epoch", "final_only", "first_at", "has_logprobs", "has_progress", "has_several", "is_abandoned",
        "is_read", "max_tokens", "next_score", "num_crashes", "pages", "pooled", "preempted", "queue_s", "request",
        "requested_ends", "waiter",
    )  # fmt: skip

    def __init__(self, request: Request) -> None:
        emitted = array("i", request.emitted_token_ids or ())
        self.request = request
        self.epoch = 0
        self.pages: dict[int, Page] = {0: Page(emitted, len(emitted))}
        self.queue_s: float | None = None
        self.cached_tokens = 0
        self.preempted: tuple[tuple[float, float], ...] = ()
        self.end: Event | None = None
        self.is_read = False
        self.is_abandoned = False  # it no longer has a reader
        self.answer: Future[Accepted] | None = None
        self.waiter: Future[None] | None = None
        self.final_only = False
        self.first_at: float | None = None
        self.has_progress = False
        self.num_crashes = 0
        self.max_tokens = 0
        self.requested_ends: dict[int | None, FinishReason] = {}
        self.next_score = request.score_from
        self.pooled: bytes | None = None
        self.has_logprobs = request.params.num_logprobs is not None
        self.has_several = request.params.num_sequences > 1 or request.params.beam_width > 0
        self._num_choices = num_choices(request.params)
        self._num_ended = 0  # choices
        self._out_since: float | None = None
        self._scores: list[TokenLogprobs] = []
        self._scores_from = 0

    @property
    def ended_choices(self) -> list[int]:
        """Choices that have ended."""
        return [choice for choice, page in self.pages.items() if page.end is not None]

    @property
    def num_unread(self) -> int:
        """Number of tokens that its reader has not read."""
        return sum(len(page.ids) - page.num_read for page in self.pages.values())

    def page(self, choice: int) -> Page | None:
        """Return the page of a choice; None if the request has no such choice."""
        if choice not in self.pages and 0 <= choice < self._num_choices:
            self.pages[choice] = Page()
        return self.pages.get(choice)

    def note(self, event: Event) -> None:
        """Apply a decision other than an end: the request was admitted, preempted, or resumed."""
        if event.kind == EventKind.ADMITTED and self.queue_s is None:
            self.queue_s = max(0.0, event.time - self.request.arrival)
            self.cached_tokens = event.cached_tokens
        elif event.kind == EventKind.PREEMPTED:
            self._out_since = event.time
        elif event.kind == EventKind.RESUMED:
            self._note_return(event.time)

    def _note_return(self, time: float) -> None:
        if self._out_since is not None and len(self.preempted) < MAX_PREEMPTIONS:
            arrival = self.request.arrival
            self.preempted += ((self._out_since - arrival, time - arrival),)
        self._out_since = None

    def end_choice(self, end: Event) -> bool:
        """End one choice; return False if it has ended, or is unknown.

        The engine ends the last choice with its request. An engine that starts the request over does not know which
        choices have ended, and may end the last one first: its reader gets that end together with the request's.
        """
        page = self.page(end.choice)
        if page is None or page.end is not None:
            return False
        page.end = end
        self._num_ended += 1
        return True

    def is_last(self, choice: int) -> bool:
        """Return True if this choice is open and all others have ended."""
        page = self.page(choice)
        return page is not None and page.end is None and self._num_ended + 1 >= self._num_choices

    def finish(self, end: Event) -> None:
        """End the request, and with it every choice that has not ended."""
        self.end = end
        if self._out_since is not None:
            self._note_return(end.time)
        for choice in range(self._num_choices):
            page = self.pages.setdefault(choice, Page())
            page.end = page.end or end

    def add_scores(self, first: int, entries: tuple[TokenLogprobs, ...]) -> bool:
        """Add log-probabilities of prompt positions from `first` on, in order; return False if none was new.

        Those received in an earlier epoch are left out, and so are chunks after a gap.
        """
        known = self.next_score - first
        if known < 0 or known >= len(entries):
            return False
        if not self._scores:
            self._scores_from = self.next_score
        self._scores.extend(entries[known:])
        self.next_score = first + len(entries)
        return True

    def begin_epoch(self) -> None:
        """Reset the state that belongs to one engine: progress and preemptions."""
        self.has_progress = False
        self.preempted, self._out_since = (), None

    def resumed(self) -> Request:
        """Return the request for the next engine, with the ids emitted so far, and without work that is done.

        A request of several sequences starts over: the engine generates the ids held here again.
        """
        request = self.request
        if self.queue_s is None and not self.pages[0].ids and self.next_score == request.score_from:
            return request
        emitted = request.emitted_token_ids if self.has_several else self.pages[0].ids[:] or None
        wants, score_from = request.wants, request.score_from
        if wants & Want.SCORE and self.next_score > score_from:
            score_from = self.next_score
            if score_from >= request.num_prompt_tokens and wants != Want.SCORE:
                wants &= ~Want.SCORE
        return replace(
            request,
            emitted_token_ids=emitted,
            wants=wants,
            score_from=score_from,
            queue_timeout=request.queue_timeout if self.queue_s is None else None,
        )

    def implied_end(self) -> Event | None:
        """Return the end implied by the ids held here, None if there is none: an engine would refuse to resume it."""
        request, params, ids = self.request, self.request.params, self.pages[0].ids
        if self.has_several or not ids:
            return None
        last, eos = ids[-1], () if params.ignore_eos else request.eos_token_ids
        if len(ids) > params.min_tokens and (last in eos or last in params.stop_token_ids):
            stop_id = last if last in params.stop_token_ids else None
            return finished(request.request_id, FinishReason.STOP, stop_token_id=stop_id)
        if len(ids) >= (params.max_tokens or self.max_tokens or len(ids) + 1):
            return finished(request.request_id, FinishReason.LENGTH)
        return None

    def take(self, max_ids: int = sys.maxsize) -> list[TokenOutput]:
        """Return the unread outputs, one per choice, of at most `max_ids` new ids. The request's last one is final."""
        end, pages = self.end, self.pages
        if end is None and self._num_ended == self._num_choices:
            return []  # the last choice ends with its request, so that one output is left to be final
        outputs, is_all_read = list[TokenOutput](), True
        for choice in sorted(pages):
            if pages[choice].has_news:
                outputs.append(self._take_page(choice, max_ids))
                is_all_read = is_all_read and not pages[choice].has_news
        if outputs and self._scores:
            outputs[0] = replace(outputs[0], prompt_logprobs=(self._scores_from, tuple(self._scores)))
            self._scores = []
        if end is not None and outputs and is_all_read:
            cached_tokens = end.cached_tokens if self.queue_s is None else self.cached_tokens
            outputs[-1] = replace(
                outputs[-1],
                is_final=True,
                cached_tokens=min(cached_tokens, self.request.num_prompt_tokens),
                queue_s=self.queue_s or 0.0,
                preempted=self.preempted,
                pooled=self.pooled,
            )
            self.is_read = True
        return outputs

    def wait(self, final_only: bool) -> Future[None]:
        """Return a future that is done when there are outputs to take, or with `final_only` at the end."""
        assert self.waiter is None or self.waiter.done(), "a request has one reader"
        self.final_only = final_only
        self.waiter = get_running_loop().create_future()
        return self.waiter

    def wake(self) -> None:
        """Wake the reader; with `final_only` only if the request has ended."""
        waiter = self.waiter
        if waiter is not None and not waiter.done() and (self.end is not None or not self.final_only):
            waiter.set_result(None)

    def _take_page(self, choice: int, max_ids: int) -> TokenOutput:
        page = self.pages[choice]
        start = page.num_read
        page.num_read = min(start + max_ids, len(page.ids))
        end = page.end if page.num_read == len(page.ids) else None
        page.is_end_read = end is not None
        ids, logprobs = page.ids[start : page.num_read], None
        if page.logprobs and ids:
            logprobs = tuple(page.logprobs[: len(ids)])
            del page.logprobs[: len(ids)]
        return TokenOutput(
            self.request.request_id,
            choice,
            start,
            ids,
            logprobs,
            finish_reason=None if end is None else end.finish_reason,
            error=None if end is None else end.error,
            first_at=self.first_at,
        )
