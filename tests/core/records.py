"""What the outside saw of each request, and whether it is what the oracle says.

Owns: Record, Choice, `check_text`. Does not: look into the scheduler.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field, replace
from typing import Any

from tests.beam_reference import beam_reference
from tests.hash_chain import end_ids, oracle

from octavo.core.limits import Limits
from octavo.core.plan import Event, EventKind
from octavo.core.request import FinishReason, Request, Want

ENDED_EARLY = (FinishReason.CANCELLED, FinishReason.TIMEOUT, FinishReason.ERROR)


@dataclass
class Choice:
    """One choice: the ids it gave, the event that ended it alone, and whether somebody outside ended it."""

    token_ids: list[int] = field(default_factory=list)
    finished: Event | None = None
    is_cancelled: bool = False


@dataclass
class Record:
    """What the outside saw of one request. `token_ids` are those of its first choice."""

    request: Request
    order: int
    max_tokens: int
    is_capped: bool
    choices: list[Choice] = field(default_factory=list)
    finished: Event | None = None
    events: list[Event] = field(default_factory=list)
    scores: list[Any] = field(default_factory=list)
    pooled: list[bytes] = field(default_factory=list)
    is_running: bool = False
    is_cancelled: bool = False
    num_bypassed: int = 0  # steps since its last admission in which it lacked room and a later one was let in
    lacks_room: bool = False
    epoch_at: int = 0  # events before this one are of earlier epochs
    starts_anew: bool = False  # an earlier epoch gave some of what comes now

    def __post_init__(self) -> None:
        self.choices = [Choice() for _ in range(self.request.params.num_sequences)]
        for choice in self.choices:
            choice.token_ids.extend(self.request.emitted_token_ids or ())

    @property
    def token_ids(self) -> list[int]:
        return self.choices[0].token_ids

    @property
    def reason(self) -> FinishReason | None:
        return self.finished.finish_reason if self.finished else None

    @property
    def num_outputs(self) -> int:
        """Ids given, over all choices."""
        return sum(len(choice.token_ids) for choice in self.choices)

    def resume(self) -> Request:
        """The request as a new epoch gets it: behind its outputs, or, of several sequences, from the start."""
        self.is_running = self.lacks_room = False
        self.num_bypassed, self.epoch_at = 0, len(self.events)
        self.scores, self.pooled = [], []
        if len(self.choices) > 1 or self.request.params.beam_width:
            self.starts_anew = True
            return self.request
        return replace(self.request, emitted_token_ids=array("i", self.token_ids) if self.token_ids else None)

    def comes_again(self, choice: int, position: int, token_id: int) -> bool:
        """Whether a token was given before, by an earlier epoch; then it is the same."""
        given = self.choices[choice]
        if not self.starts_anew or (position >= len(given.token_ids) and given.finished is None):
            return False
        assert token_id == given.token_ids[position] if position < len(given.token_ids) else given.is_cancelled
        return True

    @property
    def ends(self) -> set[int]:
        return end_ids(self.request.params, self.request.eos_token_ids)

    def of_kind(self, kind: EventKind) -> list[Event]:
        """This request's decisions of one kind, in order."""
        return [event for event in self.events if event.kind == kind]

    def num_allowed(self, sizes: Limits) -> int:
        """Outputs at most: max_tokens, or up to the model's length."""
        return min(self.max_tokens, sizes.max_model_len - self.request.num_prompt_tokens)

    def expected(self, sizes: Limits, choice: int = 0) -> list[int]:
        """The oracle's ids for the whole allowance."""
        asked = self.request
        assert asked.prompt_token_ids is not None
        return oracle(
            asked.prompt_token_ids,
            self.num_allowed(sizes),
            sizes.vocab_size,
            asked.eos_token_ids,
            asked.params,
            asked.adapter_id,
            windows=tuple(group.window for group in sizes.groups),
            choice=choice,
            spans=asked.spans,
        )

    def expected_beams(self, sizes: Limits) -> list[list[int]]:
        """The oracle's beams, best first."""
        asked = self.request
        assert asked.prompt_token_ids is not None
        return beam_reference(
            asked.prompt_token_ids,
            self.num_allowed(sizes),
            sizes.vocab_size,
            asked.eos_token_ids,
            asked.params,
            asked.adapter_id,
            windows=tuple(group.window for group in sizes.groups),
            spans=asked.spans,
        )

    # -- checks

    def end_choice(self, event: Event, sizes: Limits) -> None:
        """One choice ended before its request."""
        choice = self.choices[event.choice]
        if self.starts_anew and choice.finished is not None:
            return
        assert choice.finished is None, f"{event} after {choice.finished}"
        # One that is ended while it comes again has given less than was given.
        is_whole = event.num_tokens == len(choice.token_ids) or (self.starts_anew and choice.is_cancelled)
        assert is_whole, f"{event} after {len(choice.token_ids)} tokens"
        choice.finished = event
        if not self.request.params.beam_width:
            self._check_choice(event, event.choice, sizes)

    def end(self, event: Event, sizes: Limits) -> None:
        """The request ended, and with it every choice that had not."""
        self.finished = event
        assert event.finish_reason is not None
        assert self.starts_anew or event.num_tokens == self.num_outputs, f"{event} after {self.num_outputs} tokens"
        if self.request.params.beam_width:
            self._check_beams(event, sizes)
            return
        for index, choice in enumerate(self.choices):
            if choice.finished is None:
                self._check_choice(event, index, sizes)

    def _check_choice(self, event: Event, index: int, sizes: Limits) -> None:
        """The ids against the oracle's, the reason against the ids."""
        got, reason = self.choices[index].token_ids, event.finish_reason
        ended_early = reason in ENDED_EARLY or self.is_cancelled or self.choices[index].is_cancelled
        if self.request.prompt_token_ids is None:
            assert ended_early or len(got) == self.num_allowed(sizes)
            return
        if not self.request.wants & Want.SAMPLE:
            assert got == []
            return
        expected = self.expected(sizes, index)
        if ended_early:
            assert got == expected[: len(got)], f"{event}: {got} is no beginning of {expected}"
            return
        assert got == expected, f"{event}: choice {index} gave {got}, not {expected}"
        assert (reason == FinishReason.STOP) == (got[-1] in self.ends), event

    def _check_beams(self, event: Event, sizes: Limits) -> None:
        """All at the end, best first; nothing at all when it was ended from outside."""
        got = [choice.token_ids for choice in self.choices if choice.token_ids]
        if event.finish_reason in ENDED_EARLY or self.is_cancelled:
            assert not got, f"{event}: beams gave {got}"
            return
        expected = self.expected_beams(sizes)
        assert got == expected, f"{event}: beams gave {got}, not {expected}"
        for choice, ids in zip(self.choices, got, strict=False):
            ended = choice.finished or event
            assert (ended.finish_reason == FinishReason.STOP) == (ids[-1] in self.ends), ended
