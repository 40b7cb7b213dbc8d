"""Pieces of an answer: TextDelta and Usage, how pieces of one choice join, and which choices best_of keeps.

Owns: the records. Does not: make text or wait.
Invariant: of best_of choices the n of highest mean log-probability are kept, ties to the lower one.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from octavo.core.plan import TokenLogprobs
from octavo.core.request import FinishError, FinishReason


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request used: tokens (of all choices that were made), and seconds from its submission.

    `preempted`: when it was out of the batch, from and to.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    queue_s: float
    ttft_s: float
    e2e_s: float
    preempted: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text and ids of one choice. `finish_reason`, stop_reason and error come with the choice's last only.

    Text lags behind the ids while a character or a possible stop string is incomplete. `logprobs` is None or
    aligned with token_ids. `error` says what went wrong, for reasons other than STOP and LENGTH. `usage` comes with
    the last delta of the whole request. `cumulative_logprob`, with a choice's last delta, is the sum over all its ids
    where each one's log-probability is known. `prompt_logprobs` are some of the prompt's (first position, entries),
    before any of the answer; `pooled`, with the last delta of a request that wants it, is the state behind the prompt
    (float32).
    """

    choice: int
    text: str
    token_ids: array[int]
    logprobs: tuple[TokenLogprobs | None, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    usage: Usage | None = None
    error: FinishError | None = None
    cumulative_logprob: float | None = None
    prompt_logprobs: tuple[int, tuple[TokenLogprobs, ...]] | None = None
    pooled: bytes | None = None

    @property
    def message(self) -> str | None:
        """The text of its error."""
        return None if self.error is None else self.error.message


def by_choice(deltas: Iterable[TextDelta]) -> list[list[TextDelta]]:
    """The deltas of each choice, lowest choice first."""
    found: dict[int, list[TextDelta]] = {}
    for delta in deltas:
        found.setdefault(delta.choice, []).append(delta)
    return [found[choice] for choice in sorted(found)]


def joined(deltas: Sequence[TextDelta]) -> TextDelta:
    """All deltas of one choice as one."""
    if len(deltas) == 1:
        return deltas[0]
    has_logprobs = any(delta.logprobs is not None for delta in deltas)
    return replace(
        deltas[-1],
        text="".join(delta.text for delta in deltas),
        token_ids=array("i", [token_id for delta in deltas for token_id in delta.token_ids]),
        logprobs=tuple(entry for delta in deltas for entry in delta.logprobs or ()) if has_logprobs else None,
    )


def best_choices(deltas: Iterable[TextDelta], count: int) -> list[TextDelta]:
    """Keep the best choices of an ended request, best first, numbered from 0; the last one carries the usage."""
    whole = [joined(each) for each in by_choice(deltas)]
    usage = next((delta.usage for delta in whole if delta.usage is not None), None)
    kept = sorted(whole, key=_rank)[:count]
    is_last = len(kept) - 1
    return [replace(delta, choice=i, usage=usage if i == is_last else None) for i, delta in enumerate(kept)]


def _rank(delta: TextDelta) -> tuple[bool, float, int]:
    """Choices that failed come last."""
    mean = -math.inf
    if delta.cumulative_logprob is not None and delta.token_ids:
        mean = delta.cumulative_logprob / len(delta.token_ids)
    return delta.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH), -mean, delta.choice
