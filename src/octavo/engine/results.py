"""Whole answers, as LLM and AsyncLLM return them.

Owns: RequestOutput, CompletionOutput, and how deltas add up to them. Does not: run anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.core.plan import TokenLogprobs
from octavo.engine.sessions import Session, TextDelta, Usage


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One choice of an answer. `finish_reason` is "stop", "length", "cancelled", "timeout" or "error".

    `stop_reason` is the stop string or stop id that ended it (None for end of sequence); `message` says what
    went wrong, if something did. `logprobs` is aligned with token_ids, or None when not asked for.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprobs | None] | None = None
    message: str | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the tokens' log-probabilities; None when not asked for."""
        if self.logprobs is None:
            return None
        return sum(entry.logprob for entry in self.logprobs if entry is not None)


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The answer to one prompt. `prompt` is None for a prompt given as ids.

    `prompt_logprobs` has one entry per prompt token, None for the first, or is None when not asked for.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: Usage | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    @property
    def finished(self) -> bool:
        """Whether the answer ended by itself: at its end, a stop, or its length."""
        return all(output.finish_reason in ("stop", "length") for output in self.outputs)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens served from the prefix cache."""
        return self.metrics.cached_tokens if self.metrics is not None else 0


def whole(session: Session, prompt: str | None, deltas: Sequence[TextDelta]) -> RequestOutput:
    """Add up all deltas of a session."""
    last = deltas[-1]
    logprobs = [entry for delta in deltas for entry in delta.logprobs or ()]
    output = CompletionOutput(
        index=last.choice,
        text="".join(delta.text for delta in deltas),
        token_ids=[token_id for delta in deltas for token_id in delta.token_ids],
        finish_reason=None if last.finish_reason is None else last.finish_reason.name.lower(),
        stop_reason=last.stop_reason,
        logprobs=logprobs if session.params.logprobs is not None else None,
        message=last.message,
    )
    return RequestOutput(
        session.request_id, prompt, list(session.prompt_token_ids), [output], last.usage, _prompt_logprobs(session)
    )


def _prompt_logprobs(session: Session) -> list[TokenLogprobs | None] | None:
    if session.prompt_logprobs is None:
        return None
    first, entries = session.prompt_logprobs
    return [None] * first + list(entries)
