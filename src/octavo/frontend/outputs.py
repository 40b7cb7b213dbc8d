"""Outputs of requests: text deltas, and the whole answers made of them.

Owns: the types TextDelta, Usage, RequestOutput, CompletionOutput and those of vectors, labels and scores; joining
deltas; ranking the choices of best_of. Does not: make text, run anything, or wait.
Invariant: of best_of choices, the n with the highest mean log-probability are kept; of equal ones, the lower index.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from octavo.core.plan import TokenLogprobs
from octavo.core.request import FinishError, FinishReason, SamplingParams
from octavo.errors import EngineError

Scores = tuple[int, tuple[TokenLogprobs, ...]]  # the prompt's log-probabilities: first position, entries


@dataclass(frozen=True, slots=True)
class Usage:
    """The usage of a request: tokens (of all generated choices), and seconds since its submission.

    `preempted` has the begin and the end of each preemption.
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
    """New text and ids of one choice. Only its last delta has `finish_reason`, `stop_reason` and `error`.

    Text is delayed while a character or a possible stop string is incomplete. `logprobs` is None or aligned with
    token_ids. `error` describes the failure if the reason is not STOP or LENGTH. `usage` is set on the last delta of
    the whole request. `cumulative_logprob`, in a choice's last delta, is the sum over all its ids, or None if some are
    not known. A delta with `prompt_logprobs` has a part of the prompt's log-probabilities (first position, entries) and
    precedes the answer. `pooled`, in the last delta if requested, is the state after the prompt (float32).
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
    prompt_logprobs: Scores | None = None
    pooled: bytes | None = None

    @property
    def message(self) -> str | None:
        """The text of the error, or None."""
        return None if self.error is None else self.error.message


def by_choice(deltas: Iterable[TextDelta]) -> list[list[TextDelta]]:
    """Return the deltas of each choice, lowest choice first."""
    found: dict[int, list[TextDelta]] = {}
    for delta in deltas:
        found.setdefault(delta.choice, []).append(delta)
    return [found[choice] for choice in sorted(found)]


def joined(deltas: Sequence[TextDelta]) -> TextDelta:
    """Return all deltas of one choice as one."""
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
    """Return the best choices of an ended request, best first, numbered from 0; the last one has the usage."""
    whole = [joined(each) for each in by_choice(deltas)]
    usage = next((delta.usage for delta in whole if delta.usage is not None), None)
    kept = sorted(whole, key=_rank)[:count]
    is_last = len(kept) - 1
    return [replace(delta, choice=i, usage=usage if i == is_last else None) for i, delta in enumerate(kept)]


def _rank(delta: TextDelta) -> tuple[bool, float, int]:
    """Order by mean log-probability, failed choices last."""
    mean = -math.inf
    if delta.cumulative_logprob is not None and delta.token_ids:
        mean = delta.cumulative_logprob / len(delta.token_ids)
    return delta.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH), -mean, delta.choice


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One choice of an answer. `finish_reason` is "stop", "length", "cancelled", "timeout" or "error".

    `stop_reason` is the stop string or stop id that ended the choice (None for end of sequence). `message` describes
    a failure. `logprobs` is aligned with token_ids, or None if not requested. `cumulative_logprob` is the sum of the
    tokens' log-probabilities, or None if they are not known.
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
    """The answer to one prompt; `outputs` has its choices by index. `prompt` is None for a prompt given as ids.

    `prompt_logprobs` has one entry per prompt token (None for the first token), or is None if not requested.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: Usage | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    @property
    def finished(self) -> bool:
        """True if every choice has ended, for any `finish_reason`."""
        return bool(self.outputs) and all(output.finish_reason is not None for output in self.outputs)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens served from the prefix cache."""
        return self.metrics.cached_tokens if self.metrics is not None else 0


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """One prompt's vector (docs/apis.md): a decoder's state after the last token, or an encoder's pooled output."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    embedding: list[float]
    metrics: Usage | None = None


@dataclass(frozen=True, slots=True)
class ClassificationOutput:
    """One prompt's likeliest label, and the probabilities of all `labels`."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    label: str
    labels: tuple[str, ...]
    probs: list[float]
    metrics: Usage | None = None


@dataclass(frozen=True, slots=True)
class ScoreOutput:
    """The score of a pair of texts; `index` is the pair's, or the document's, in what the caller gave."""

    index: int
    score: float
    text_1: str
    text_2: str


class OutputBuilder:
    """Builds one prompt's answer from its deltas, either one by one or joined by choice at the end."""

    def __init__(self, request_id: str, prompt: str | None, prompt_token_ids: Sequence[int], params: SamplingParams):
        self._request_id = request_id
        self._prompt = prompt
        self._prompt_token_ids = prompt_token_ids
        self._has_logprobs = params.logprobs is not None
        self._usage: Usage | None = None
        self._outputs = [
            CompletionOutput(index, "", [], None, logprobs=[] if self._has_logprobs else None)
            for index in range(params.n)
        ]

    def add(self, delta: TextDelta) -> None:
        """Add the next delta of a choice."""
        known = self._outputs[delta.choice]
        self._outputs[delta.choice] = CompletionOutput(
            index=delta.choice,
            text=known.text + delta.text,
            token_ids=[*known.token_ids, *delta.token_ids],
            finish_reason=None if delta.finish_reason is None else delta.finish_reason.name.lower(),
            stop_reason=delta.stop_reason,
            logprobs=[*(known.logprobs or ()), *(delta.logprobs or ())] if self._has_logprobs else None,
            message=delta.message,
            cumulative_logprob=delta.cumulative_logprob,
        )
        self._usage = delta.usage or self._usage

    def output(self, prompt_logprobs: Scores | None) -> RequestOutput:
        """Return the answer so far; its `metrics` are set once the last delta was added."""
        scores: list[TokenLogprobs | None] | None = None
        if prompt_logprobs is not None:
            first, entries = prompt_logprobs
            scores = [*[None] * first, *entries]
        ids = list(self._prompt_token_ids)
        return RequestOutput(self._request_id, self._prompt, ids, list(self._outputs), self._usage, scores)


def embedding_output(
    request_id: str, prompt: str | None, prompt_token_ids: Sequence[int], last: TextDelta
) -> EmbeddingOutput:
    """Return the vector in the last delta of a request of Want.POOL. Raises EngineError if there is none."""
    if last.pooled is None:
        reason = last.message or (last.finish_reason.name.lower() if last.finish_reason is not None else "no reason")
        raise EngineError(f"there is no embedding of request {request_id} ({reason})")
    vector = array("f", last.pooled)
    return EmbeddingOutput(request_id, prompt, list(prompt_token_ids), vector.tolist(), last.usage)
