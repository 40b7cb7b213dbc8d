"""Whole answers, as LLM and AsyncLLM return them.

Owns: RequestOutput, CompletionOutput, EmbeddingOutput, and how deltas add up to them, at the end or step by step.
Does not: run anything.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

from octavo.core.plan import TokenLogprobs
from octavo.errors import EngineError
from octavo.frontend.deltas import TextDelta, Usage, by_choice, joined
from octavo.frontend.sessions import Session


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One choice of an answer. `finish_reason` is "stop", "length", "cancelled", "timeout" or "error".

    `stop_reason` is the stop string or stop id that ended it (None for end of sequence); `message` says what
    went wrong, if something did. `logprobs` is aligned with token_ids, or None when not asked for.
    `cumulative_logprob` is the sum of the tokens' log-probabilities, None where they are not known.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprobs | None] | None = None
    message: str | None = None
    cumulative_logprob: float | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The answer to one prompt, its choices in order of their index. `prompt` is None for a prompt given as ids.

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
        """Return True if every choice has ended, for whatever reason; `finish_reason` says which."""
        return bool(self.outputs) and all(output.finish_reason is not None for output in self.outputs)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens served from the prefix cache."""
        return self.metrics.cached_tokens if self.metrics is not None else 0


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """One prompt's vector: the state behind its last token, scaled to length 1 (docs/embeddings.md)."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    embedding: list[float]
    metrics: Usage | None = None


def embedded(session: Session, prompt: str | None, deltas: Sequence[TextDelta]) -> EmbeddingOutput:
    """The vector that a session of Want.POOL ends with. Raises EngineError when there is none."""
    last = deltas[-1]
    if last.pooled is None:
        reason = last.message or (last.finish_reason.name.lower() if last.finish_reason is not None else "no reason")
        raise EngineError(f"there is no embedding of request {session.request_id} ({reason})")
    vector = array("f", last.pooled)
    return EmbeddingOutput(session.request_id, prompt, list(session.prompt_token_ids), vector.tolist(), last.usage)


def whole(session: Session, prompt: str | None, deltas: Sequence[TextDelta]) -> RequestOutput:
    """Add up all deltas of a session."""
    outputs = [_completion(joined(each), session.params.logprobs is not None) for each in by_choice(deltas)]
    usage = next((delta.usage for delta in reversed(deltas) if delta.usage is not None), None)
    return RequestOutput(
        session.request_id, prompt, list(session.prompt_token_ids), outputs, usage, _prompt_logprobs(session)
    )


class GrowingOutput:
    """The answer to one prompt while it grows: add its deltas, and ask for the answer so far."""

    def __init__(self, session: Session, prompt: str | None) -> None:
        self._session = session
        self._prompt = prompt
        self._usage: Usage | None = None
        has_logprobs = session.params.logprobs is not None
        self._has_logprobs = has_logprobs
        self._outputs = [
            CompletionOutput(index, "", [], None, logprobs=[] if has_logprobs else None)
            for index in range(session.params.n)
        ]

    def add(self, delta: TextDelta) -> bool:
        """Take the next delta; return False if it holds only log-probabilities of the prompt."""
        if delta.prompt_logprobs is not None:
            return False
        known, new = self._outputs[delta.choice], _completion(delta, self._has_logprobs)
        logprobs = [*(known.logprobs or ()), *(new.logprobs or ())] if self._has_logprobs else None
        self._outputs[delta.choice] = replace(
            new, text=known.text + new.text, token_ids=known.token_ids + new.token_ids, logprobs=logprobs
        )
        self._usage = delta.usage or self._usage
        return True

    def output(self) -> RequestOutput:
        """Return the answer so far; `metrics` come with the last one."""
        ids = list(self._session.prompt_token_ids)
        scores = _prompt_logprobs(self._session)
        return RequestOutput(self._session.request_id, self._prompt, ids, list(self._outputs), self._usage, scores)


def _completion(choice: TextDelta, has_logprobs: bool) -> CompletionOutput:
    return CompletionOutput(
        index=choice.choice,
        text=choice.text,
        token_ids=list(choice.token_ids),
        finish_reason=None if choice.finish_reason is None else choice.finish_reason.name.lower(),
        stop_reason=choice.stop_reason,
        logprobs=list(choice.logprobs or ()) if has_logprobs else None,
        message=choice.message,
        cumulative_logprob=choice.cumulative_logprob,
    )


def _prompt_logprobs(session: Session) -> list[TokenLogprobs | None] | None:
    if session.prompt_logprobs is None:
        return None
    first, entries = session.prompt_logprobs
    return [None] * first + list(entries)
