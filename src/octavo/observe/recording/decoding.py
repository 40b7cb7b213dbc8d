"""From records to calls, the twin of encoding.

Owns: reading the layout, and refusing what cannot be. Does not: read files (segments).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import msgspec

from octavo.core.plan import (
    EncodeJob,
    NewSequence,
    StepFailure,
    StepPlan,
    StepResult,
    StepTimings,
    TokenLogprobs,
)
from octavo.core.request import FinishError, FinishReason, Request, SamplingParams, Span, Want
from octavo.errors import ErrorKind, OctavoError
from octavo.observe.recording import encoding as layout
from octavo.observe.recording.calls import (
    Admit,
    Call,
    Cancel,
    Commit,
    Control,
    EndChoice,
    Ended,
    Header,
    KeyRun,
    Plan,
)
from octavo.observe.recording.errors import DamagedError
from octavo.observe.recording.masks import ORDINARY
from octavo.observe.recording.rows import Rows, ints

_NOTHING = SamplingParams()


class Decoder:
    """Decodes one segment's records, in order."""

    def __init__(self, header: Header) -> None:
        self._header = header
        self._rows = Rows()
        self._kinds: dict[int, Callable[..., Call]] = {
            layout.ADMIT: self._admit,
            layout.PLAN: self._plan,
            layout.COMMIT: self._commit,
            layout.CANCEL: self._cancel,
            layout.END_CHOICE: self._end_choice,
            layout.CONTROL: Control,
            layout.ENDED: Ended,
        }

    def decode(self, record: Any) -> Call:
        """The call of one record. Raises DamagedError."""
        try:
            kind, *values = record
            return self._kinds[kind](*values)
        except DamagedError:
            raise
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, OctavoError) as error:
            raise DamagedError(f"a record that cannot be ({type(error).__name__}: {error})") from None

    @staticmethod
    def _keys(runs: list[Any] | None) -> tuple[KeyRun, ...]:
        return tuple(KeyRun(order, choice, first, tuple(keys)) for order, choice, first, *keys in runs or ())

    def _admit(self, now: float, record: dict[str, Any], keys: list[Any] | None) -> Admit:
        runs, is_blind = self._keys(keys), bool(record.pop("blind", False))
        emitted = record.pop("emitted", None)
        prompt = record.pop("prompt", None)
        spans = record.pop("spans", ())
        params = msgspec.convert({"max_tokens": None, **record.pop("params", {})}, SamplingParams)  # see encoding
        num_blocks = record["num_prompt_tokens"] // self._header.limits.block_size
        request = Request(
            record.pop("request_id"),
            None if prompt is None else ints(prompt),
            params,
            block_keys=runs[0].keys[:num_blocks] if runs else (),
            emitted_token_ids=None if emitted is None else ints(bytes(4 * emitted) if _is_int(emitted) else emitted),
            wants=Want(record.pop("wants")),
            spans=tuple(Span(start, length, key) for start, length, key in spans),
            eos_token_ids=tuple(record.pop("eos_token_ids", ())),
            **record,
        )
        return Admit(now, request, runs, is_blind)

    @staticmethod
    def _cancel(now: float, names: list[str], reason: int, message: str | None) -> Cancel:
        return Cancel(now, tuple(names), FinishReason(reason), message)

    @staticmethod
    def _end_choice(now: float, name: str, choice: int, reason: int, message: str | None) -> EndChoice:
        return EndChoice(now, name, choice, FinishReason(reason), message)

    def _plan(self, now: float, late: int, step: int, digest: bytes, *rest: Any) -> Plan:
        delta, extras, only, keys = rest
        plan = StepPlan(step, now)
        if digest:
            self._rows.decode(delta, plan)
            self._fill(plan, extras or {})
        names = None if only is None else frozenset(only)
        return Plan(now, now + late * 1e-9, plan, digest, names, self._keys(keys))

    @staticmethod
    def _fill(plan: StepPlan, extras: dict[int, Any]) -> None:
        for number, name in enumerate(layout.COLUMNS):
            if number in extras:
                setattr(plan, name, ints(extras[number]))
        plan.encode_jobs = tuple(EncodeJob(*job) for job in extras.get(layout.JOBS, ()))
        plan.encoder_frees = tuple(extras.get(layout.FREES, ()))
        plan.new_sequences = tuple(
            NewSequence(slot, name, choice, num_prompt, None, _NOTHING, (), adapter)
            for slot, name, choice, num_prompt, adapter in extras.get(layout.NEW, ())
        )
        plan.finished_ids = tuple(extras.get(layout.FINISHED, ()))
        plan.preempted_ids = tuple(extras.get(layout.PREEMPTED, ()))
        plan.num_query_tokens = sum(plan.counts)
        plan.num_kv_read = extras.get(layout.READS, sum(plan.starts) + plan.num_query_tokens)
        plan.is_fast_path = bool(plan.counts) and max(plan.counts) == min(plan.counts) == 1

    def _commit(self, now: float, late: int, step: int, *rest: Any) -> Commit:
        prepare, forward, sample, tokens, more, keys = rest
        more = more or {}
        outcome: StepResult | StepFailure
        if layout.FAILURE in more:
            outcome = StepFailure(*more[layout.FAILURE])
        else:
            timings = StepTimings(prepare * 1e-9, forward * 1e-9, sample * 1e-9)
            outcome = StepResult(_tokens(tokens, more.get(layout.STOPS, ())), timings=timings)
            _add_rest(outcome, more)
        return Commit(now, now + late * 1e-9, step, outcome, self._keys(keys))


def _tokens(tokens: list[int] | int | None, stops: list[int] | tuple[int, ...]) -> array[int] | None:
    if tokens is None:
        return None
    if not isinstance(tokens, int):
        return ints(tokens)
    ids = array("i", [ORDINARY]) * tokens
    for place, stand_in in zip(stops[::2], stops[1::2], strict=True):
        ids[place] = stand_in
    return ids


def _add_rest(outcome: StepResult, more: dict[int, Any]) -> None:
    if layout.LENGTHS in more:
        outcome.num_token_ids = ints(more[layout.LENGTHS])
    if layout.LOGPROBS in more:
        outcome.logprobs = [None] * more[layout.LOGPROBS]
        for place, ids, logprobs in more.get(layout.BEAMS, ()):
            first = ids[0] if ids else ORDINARY
            outcome.logprobs[place] = TokenLogprobs(first, logprobs[0] if ids else 0.0, 1, tuple(ids), tuple(logprobs))
    unknown = TokenLogprobs(ORDINARY, 0.0, 1)
    outcome.scores = tuple((row, first, (unknown,) * count) for row, first, count in more.get(layout.SCORES, ()))
    outcome.pooled = tuple((row, b"") for row in more.get(layout.POOLED, ()))
    outcome.errors = tuple((row, reason) for row, reason in more.get(layout.ERRORS, ()))
    outcome.dead_ends = tuple(
        (row, FinishError(ErrorKind.ENGINE, reason)) for row, reason in more.get(layout.DEAD_ENDS, ())
    )


def _is_int(value: object) -> bool:
    return isinstance(value, int)
