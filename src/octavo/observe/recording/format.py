"""The format of recordings: each call of a scheduler as a record, and which parts are masked.

Owns: encoding and decoding of records, and the masks. Does not: know files (reader), write (recorder), or call a
scheduler (replaying). A record is a tuple of its kind and plain values; fields at their defaults are left out. A record
depends on earlier ones of its segment. Times are seconds on the engine's monotonic clock; durations are nanoseconds.
Masks: a recording without text contains what decisions depend on: how many ids there are, which ids end a sequence, and
which blocks are equal. Keys become digests under a secret that is drawn for each segment and not stored, so that a
guess of the text cannot be verified.
"""

from __future__ import annotations

import os
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from hashlib import blake2b
from operator import add
from typing import Any, NamedTuple, get_type_hints

import msgspec

from octavo.core.limits import Limits
from octavo.core.plan import (
    ROW_SAMPLE,
    EncodeJob,
    NewSequence,
    StepFailure,
    StepPlan,
    StepResult,
    StepTimings,
    TokenLogprobs,
)
from octavo.core.request import FinishError, Request, SamplingParams, Span, Want
from octavo.core.saved_state import SavedBeams, SavedRequest, SavedSequence, SavedState
from octavo.core.tap import (
    AdmitCall,
    Call,
    CancelCall,
    CommitCall,
    ControlCall,
    EndChoiceCall,
    KeyRun,
    KVCall,
    PlanCall,
)
from octavo.errors import OctavoError

VERSION = 3
READABLE = (2, VERSION)  # version 2 had no states
MAX_MESSAGE = 500  # characters of an error kept
ORDINARY = -1  # replaces every id that ends nothing


class RecordingError(OctavoError):
    """A recording cannot be read: it is missing, of another version, or damaged. The message has the remedy."""


@dataclass(frozen=True, slots=True)
class Header:
    """The engine of a segment.

    `began` is in Unix seconds, at `clock` on the engine's clock. `has_text`: token ids are recorded. `settings` are the
    engine's, by flag; names and numbers only. `has_state`: the segment begins in the middle of the engine's life, with
    the scheduler's state at `start` on the engine's clock. `number` counts the segments of a flight recorder.
    """

    model: str
    limits: Limits
    depth: int
    device: str = ""
    began: float = 0.0
    clock: float = 0.0
    has_text: bool = False
    settings: Mapping[str, object] = field(default_factory=dict)
    octavo: str = ""
    version: int = VERSION
    has_state: bool = False
    start: float = 0.0
    number: int = 0

    @property
    def key_tokens(self) -> int:
        """Tokens under each block key."""
        return self.limits.block_size


class StateRecord(NamedTuple):
    """The scheduler's whole state after the calls so far; rows of plans are relative to later plans only from here on.

    The state is absent where it was not written.
    """

    now: float
    saved: SavedState | None = None


class EndMarker(NamedTuple):
    """The recording's own end, with its reason; the last record."""

    now: float
    reason: str


class RecordedCall(NamedTuple):
    """A call, and when it returned.

    A request read back without text has no ids, and its stop ids are placeholders; `has_no_ids`: the engine had
    no ids of it either. A plan read back has columns and names, no events; `digest` is that of the plan as it was made,
    without ids unless the recording has text, b"" for an empty plan.
    """

    call: Call | StateRecord | EndMarker
    done: float = 0.0
    digest: bytes = b""
    has_no_ids: bool = False


ADMIT, PLAN, COMMIT = range(3)  # kinds of records; most others have the fields of their calls
CANCEL, END_CHOICE, CONTROL, END, STATE, KV = range(3, 9)
_PLAIN: dict[int, type[Call | EndMarker]] = {
    CANCEL: CancelCall, END_CHOICE: EndChoiceCall, CONTROL: ControlCall, END: EndMarker, KV: KVCall,
}  # fmt: skip
_KIND_OF = {kind: number for number, kind in _PLAIN.items()}

_ints: Callable[[Any], array[int]] = partial(array, "i")
_INT_COLUMNS = (
    "edits", "copies", "swap_outs", "host_loads", "freed_slots", "id_edits", "num_drafts", "draft_token_ids",
)  # fmt: skip
_PLAN_FIELDS = (
    *_INT_COLUMNS, "encode_jobs", "encoder_frees", "finished_ids", "preempted_ids", "num_query_tokens", "num_kv_read",
    "is_fast_path",
)  # fmt: skip
_RESULT_FIELDS = ("token_ids", "num_token_ids", "logprobs", "scores", "pooled", "errors", "dead_ends")
_NOT_RECORDED = ("block_keys", "cache_salt", "session")
_REQUEST_DEFAULTS = {
    **{each.name: each.default for each in fields(Request) if each.name not in _NOT_RECORDED},
    "prompt_token_ids": None,
}
_TEXT_PARAMS = (
    "seed", "stop", "logit_bias", "bad_words_ids", "allowed_token_ids", "dry_breaker_ids", "shown_special_ids",
)  # fmt: skip
_NO_TEXT = {name: getattr(SamplingParams(), name) for name in _TEXT_PARAMS}
_TYPES: dict[str, Any] = {
    "params": SamplingParams,
    "spans": tuple[Span, ...],
    "eos_token_ids": tuple[int, ...],
    "encode_jobs": tuple[EncodeJob, ...],
    "encoder_frees": tuple[bytes, ...],
    "finished_ids": tuple[str, ...],
    "preempted_ids": tuple[str, ...],
    "logprobs": list[TokenLogprobs | None],
    "scores": tuple[tuple[int, int, tuple[TokenLogprobs, ...]], ...],
    "pooled": tuple[tuple[int, bytes], ...],
    "errors": tuple[tuple[int, str], ...],
    "dead_ends": tuple[tuple[int, FinishError], ...],
}
_DECODERS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys((*_INT_COLUMNS, "token_ids", "num_token_ids", "prompt_token_ids", "emitted_token_ids"), _ints),
    **{name: partial(msgspec.convert, type=kind) for name, kind in _TYPES.items()},
    "wants": Want,
}
DAMAGE = (
    AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError, OctavoError, msgspec.MsgspecError,
)  # fmt: skip
_UNKNOWN = TokenLogprobs(ORDINARY, 0.0, 1)
_STATE_TYPES = get_type_hints(SavedState)
_KEY_RUNS = tuple[KeyRun, ...]


def _restored(values: dict[str, Any]) -> dict[str, Any]:
    """Give a record's fields by name their types, and return them."""
    for name, value in values.items():
        if (decoder := _DECODERS.get(name)) is not None:
            values[name] = decoder(value)
    return values


# --- masks ---------------------------------------------------------------------------------------------------

_KEY_DIGEST = re.compile("[0-9a-f]{64}")  # a tenant that is named after its API key


class KeyMask:
    """Mask of block and media keys: digests that are meaningless outside one segment."""

    def __init__(self) -> None:
        self._secret = os.urandom(32)

    def __call__(self, key: bytes) -> bytes:
        """Return the same digest for the same key."""
        return blake2b(key, key=self._secret, digest_size=8).digest()

    def tenant(self, name: str) -> str:
        """Return a tenant's name; one that is the SHA-256 of an API key is replaced by a digest."""
        return f"key-{self(name.encode()).hex()[:8]}" if _KEY_DIGEST.fullmatch(name) else name


def _placeholders(request: Request | NewSequence) -> dict[int, int]:
    """Return the replacement of each id that may end a request's sequences: 0, 1 and so on."""
    every = dict.fromkeys((*request.eos_token_ids, *request.params.stop_token_ids))
    return {token: number for number, token in enumerate(every)}


class CallEncoder:
    """Encoder of one segment's calls, in order."""

    def __init__(self, has_text: bool) -> None:
        self._has_text = has_text
        self._key_mask = KeyMask()
        self._media_mask: Callable[[bytes], bytes] = bytes if has_text else self._key_mask
        self._rows = RowDeltas()
        self._owners: dict[int, NewSequence] = {}  # by slot; replaced, never changed
        self._flight: dict[int, tuple[StepPlan, dict[int, NewSequence]]] = {}  # by step, with its owners
        self._stops: set[int] = set()  # every id that may end a sequence of any request so far

    def masked(self, limits: Limits) -> Limits:
        """Return the limits with tenants masked as in the records."""
        weights = tuple((self._key_mask.tenant(name), weight) for name, weight in limits.tenant_weights)
        return replace(limits, tenant_weights=weights)

    def encode(self, recorded: RecordedCall) -> bytes:
        """Return the record of one call as MessagePack; arrays are lists in it."""
        return msgspec.msgpack.encode(self._record(recorded.call, recorded.done), enc_hook=array.tolist)

    def _record(self, call: Call | StateRecord | EndMarker, done: float) -> tuple[Any, ...]:
        if isinstance(call, StateRecord):
            self._rows = RowDeltas()
            return STATE, call.now, None if call.saved is None else self._state(call.saved)
        if isinstance(call, AdmitCall):
            has_no_ids = call.request.prompt_token_ids is None
            return ADMIT, call.now, self._request(call.request), has_no_ids, self._keys(call.keys)
        if isinstance(call, PlanCall):
            return self._plan(call, int(1e9 * (done - call.now)))
        if isinstance(call, CommitCall):
            return self._commit(call, int(1e9 * (done - call.now)))
        if isinstance(call, CancelCall):
            call = call._replace(error=call.error and _short(call.error))
        return _KIND_OF[type(call)], *call

    def _keys(self, runs: tuple[KeyRun, ...]) -> list[KeyRun]:
        """Return runs of keys, masked even with text, since their salts are not text."""
        return [run._replace(keys=tuple(map(self._key_mask, run.keys))) for run in runs]

    def _masked_ids(self, ids: Iterable[int], owner: Request | NewSequence) -> list[int]:
        """Return a request's ids in their recorded form."""
        placeholders = _placeholders(owner)
        return list(ids) if self._has_text else [placeholders.get(token, ORDINARY) for token in ids]

    def _request(self, request: Request) -> dict[str, Any]:
        params, emitted = request.params, request.emitted_token_ids
        self._stops.update(request.eos_token_ids, params.stop_token_ids)
        masked = replace(
            request,
            tenant=self._key_mask.tenant(request.tenant),
            spans=tuple(replace(span, key=self._media_mask(span.key)) for span in request.spans),
        )
        if not self._has_text:
            stops = tuple(self._masked_ids(params.stop_token_ids, request))
            grammar = params.grammar and "-"  # that there is one
            masked = replace(
                masked,
                params=replace(params, **_NO_TEXT, stop_token_ids=stops, grammar=grammar),
                prompt_token_ids=None,
                emitted_token_ids=emitted and _ints(bytes(4 * len(emitted))),
                eos_token_ids=tuple(self._masked_ids(request.eos_token_ids, request)),
            )
        values = {name: getattr(masked, name) for name in _REQUEST_DEFAULTS}
        return {name: value for name, value in values.items() if value != _REQUEST_DEFAULTS[name]}

    def _plan(self, call: PlanCall, took_ns: int) -> tuple[Any, ...]:
        plan, digest, rows, values, entering = call.plan, b"", None, {}, []
        if not plan.is_empty:
            for new in plan.new_sequences:
                self._owners = self._owners | {new.slot: new}
            self._flight[plan.step] = plan, self._owners
            digest, rows = plan.digest(self._has_text), self._rows.encode(plan)
            values, entering = self._columns(plan, self._owners), _entering(plan)
        only = None if call.only is None else sorted(call.only)
        return PLAN, call.now, took_ns, plan.step, digest, rows, values, entering, only, self._keys(call.keys)

    def _columns(self, plan: StepPlan, owners: Mapping[int, NewSequence]) -> dict[str, Any]:
        """Return a plan's columns apart from its rows, by name."""
        values = {name: value for name in _PLAN_FIELDS if (value := getattr(plan, name))}
        if plan.encode_jobs or plan.encoder_frees:
            values["encode_jobs"] = [replace(job, key=self._media_mask(job.key)) for job in plan.encode_jobs]
            values["encoder_frees"] = [self._media_mask(key) for key in plan.encoder_frees]
        if not self._has_text and (plan.id_edits or plan.num_drafts):
            values["id_edits"] = _without_ids(plan.id_edits)
            values["draft_token_ids"] = self._masked_drafts(plan, owners)
        return values

    def _masked_drafts(self, plan: StepPlan, owners: Mapping[int, NewSequence]) -> list[int]:
        masked: list[int] = []
        for slot, count in zip(plan.slots, plan.num_drafts, strict=False):
            masked += self._masked_ids(plan.draft_token_ids[len(masked) : len(masked) + count], owners[slot])
        return masked

    # --- states: ids, keys and names are masked wherever they are; numbers stay -------------------------------------

    def _state(self, saved: SavedState) -> dict[str, Any]:
        """Return a state's fields by name."""
        masked = replace(
            saved,
            requests=[],
            plans=[],
            progress=[self._progress(one, owner) for one, owner in zip(saved.progress, saved.requests, strict=True)],
            sequences=[self._sequence(one, saved.requests[one.request]) for one in saved.sequences],
            lines=[replace(line, name=self._key_mask.tenant(line.name)) for line in saved.lines],
            pools=[replace(pool, keys=self._masked_keys(pool.keys)) for pool in saved.pools],
            host_pools=[replace(pool, keys=self._masked_keys(pool.keys)) for pool in saved.host_pools],
            encoder=replace(
                saved.encoder,
                outputs=[(self._media_mask(key), size, needs) for key, size, needs in saved.encoder.outputs],
                needs=[
                    (name, span, self._media_mask(key), end, slot) for name, span, key, end, slot in saved.encoder.needs
                ],
                lost=[self._media_mask(key) for key in saved.encoder.lost],
            ),
            policy=self._named(saved.policy),
            policy_errors=(saved.policy_errors[0], ""),  # a user's text
        )
        if not self._has_text:
            masked.updates = {**saved.updates, "id_edits": _without_ids(saved.updates["id_edits"])}
        values = {one.name: getattr(masked, one.name) for one in fields(masked)}
        values["requests"] = [self._request(request) for request in saved.requests]
        values["plans"] = [
            (plan.step, plan.now, RowDeltas().encode(plan), self._columns(plan, self._flight[plan.step][1]),
             _entering(plan))
            for plan in saved.plans
        ]  # fmt: skip
        return values

    def _masked_keys(self, keys: Iterable[bytes]) -> list[bytes]:
        return list(map(self._key_mask, keys))

    def _sequence(self, one: SavedSequence, owner: Request) -> SavedSequence:
        found = one.candidates
        return replace(
            one,
            token_ids=one.token_ids if self._has_text else None,
            keys=self._masked_keys(one.keys),
            candidates=None if found is None else (tuple(self._masked_ids(found[0], owner)), found[1]),
        )

    def _progress(self, one: SavedRequest, owner: Request) -> SavedRequest:
        seen, beams = one.seen, one.beams
        if seen is not None and seen.missing is not None:
            seen = seen._replace(missing=self._key_mask(seen.missing))
        lane = self._key_mask.tenant(str(one.values["lane"]))
        return replace(
            one,
            values={**one.values, "lane": lane},
            seen=seen,
            beams=beams if beams is None or self._has_text else self._beams(beams, owner),
        )

    def _beams(self, beams: SavedBeams, owner: Request) -> SavedBeams:
        placeholders = _placeholders(owner)
        pool = [
            (
                _ints(self._masked_ids(_ints(ids), owner)).tobytes(),
                score,
                total,
                None if stop_id is None else placeholders[stop_id],
            )
            for ids, score, total, stop_id in beams.pool
        ]
        return replace(beams, pool=pool)

    def _named(self, value: Any) -> Any:
        """Return plain data with every text masked as the name of a tenant."""
        if isinstance(value, list):
            return [self._named(each) for each in value]
        if isinstance(value, dict):
            return {self._key_mask.tenant(key): self._named(each) for key, each in value.items()}
        return self._key_mask.tenant(value) if isinstance(value, str) else value

    def _commit(self, call: CommitCall, took_ns: int) -> tuple[Any, ...]:
        plan, owners = self._flight.pop(call.step)
        outcome, times, values, failure = call.outcome, (0, 0, 0), {}, None
        if isinstance(outcome, StepFailure):
            self._flight.clear()
            failure = replace(outcome, message=outcome.message[:MAX_MESSAGE])
        else:
            parts = outcome.timings
            times = int(1e9 * parts.prepare_s), int(1e9 * parts.forward_s), int(1e9 * parts.sample_s)
            shown = replace(
                outcome,
                scores=tuple((row, first, (_UNKNOWN,) * len(entries)) for row, first, entries in outcome.scores),
                pooled=tuple((row, b"") for row, _ in outcome.pooled),
                errors=tuple((row, text[:MAX_MESSAGE]) for row, text in outcome.errors),
                dead_ends=tuple((row, _short(error)) for row, error in outcome.dead_ends),
            )
            self._mask_outputs(plan, owners, shown)
            values = {name: value for name in _RESULT_FIELDS if (value := getattr(shown, name)) not in (None, ())}
        return COMMIT, call.now, took_ns, call.step, times, values, failure, self._keys(call.keys)

    def _mask_outputs(self, plan: StepPlan, owners: Mapping[int, NewSequence], shown: StepResult) -> None:
        """Mask a result's ids, and drop log-probabilities except the candidates of beam searches."""
        ids, logprobs = shown.token_ids, shown.logprobs
        if ids is None or (self._has_text and logprobs is None):
            return
        shown.token_ids = ids if self._has_text else _ints([ORDINARY]) * len(ids)
        if logprobs is not None:
            shown.logprobs = [None] * len(logprobs)
        elif self._stops.isdisjoint(ids):
            return
        for owner, begin, end in _sampled(plan, owners, shown.num_token_ids):
            if not self._has_text:
                shown.token_ids[begin:end] = _ints(self._masked_ids(ids[begin:end], owner))
            entry = logprobs[begin] if logprobs is not None and begin < min(end, len(logprobs)) else None
            if entry is not None and shown.logprobs is not None and owner.params.beam_width:
                best, *candidates = self._masked_ids((entry.token_id, *entry.top_ids), owner)
                shown.logprobs[begin] = replace(entry, token_id=best, top_ids=tuple(candidates))


def _entering(plan: StepPlan) -> list[tuple[int, str, int, int, int]]:
    return [(new.slot, new.request_id, new.choice, new.num_prompt, new.adapter_id) for new in plan.new_sequences]


def _without_ids(id_edits: array[int]) -> array[int]:
    edits = id_edits[:]
    edits[2::3] = _ints([ORDINARY]) * (len(edits) // 3)
    return edits


def _short(error: FinishError) -> FinishError:
    return replace(error, message=error.message[:MAX_MESSAGE])


def _sampled(
    plan: StepPlan, owners: Mapping[int, NewSequence], lengths: array[int] | None
) -> Iterator[tuple[NewSequence, int, int]]:
    """Yield each sampling row's sequence, and where its ids begin and end in the result."""
    begin = 0
    slots = [slot for slot, flags in zip(plan.slots, plan.flags, strict=True) if flags & ROW_SAMPLE]
    for slot, count in zip(slots, lengths or (1,) * len(slots), strict=False):
        yield owners[slot], begin, begin + count
        begin += count


class CallDecoder:
    """Decoder of one segment's records, in order."""

    def __init__(self, header: Header) -> None:
        self._block_size = header.limits.block_size
        self._rows = RowDeltas()

    def decode(self, record: Any) -> RecordedCall:
        """Return the call of one record. Raises one of DAMAGE for a record that was not written by CallEncoder."""
        kind = record[0]
        if kind == PLAN:
            return self._plan(*record)
        if kind == COMMIT:
            return _commit(*record)
        if kind == ADMIT:
            return self._admit(*record)
        if kind == STATE:
            return self._state(*record[1:])
        return RecordedCall(msgspec.convert(record[1:], _PLAIN[kind]))

    def _admit(self, _: int, now: float, values: dict[str, Any], has_no_ids: bool, keys: Any) -> RecordedCall:
        num_blocks, runs = values["num_prompt_tokens"] // self._block_size, _key_runs(keys)
        request = _request(values, runs[0].keys[:num_blocks] if runs else ())
        return RecordedCall(AdmitCall(now, request, runs), has_no_ids=has_no_ids)

    def _plan(self, _: int, now: float, took_ns: int, step: int, digest: bytes, *rest: Any) -> RecordedCall:
        rows, values, entering, only, keys = rest
        plan = _read_plan(step, now, self._rows.decode(rows) if digest else _NO_ROWS, values, entering)
        call = PlanCall(now, plan, None if only is None else frozenset(only), _key_runs(keys))
        return RecordedCall(call, now + took_ns * 1e-9, digest)

    def _state(self, now: float, values: dict[str, Any] | None) -> RecordedCall:
        self._rows = RowDeltas()
        if values is None:
            return RecordedCall(StateRecord(now))
        plans = []
        for step, planned, rows, columns, entering in values["plans"]:
            plans.append(_read_plan(step, planned, RowDeltas().decode(rows), columns, entering))
        fixed: dict[str, Any] = {"requests": [_request(each, ()) for each in values["requests"]], "plans": plans}
        typed: dict[str, Any] = {
            name: msgspec.convert(values[name], kind) for name, kind in _STATE_TYPES.items() if name not in fixed
        }
        return RecordedCall(StateRecord(now, SavedState(**fixed, **typed)))


def _request(values: dict[str, Any], block_keys: tuple[bytes, ...]) -> Request:
    return Request(**{"prompt_token_ids": None, **_restored(values)}, block_keys=block_keys)


def _key_runs(keys: Any) -> tuple[KeyRun, ...]:
    return msgspec.convert(keys, _KEY_RUNS) if keys else ()


def _read_plan(step: int, now: float, rows: PlanRows, values: dict[str, Any], entering: Iterable[Any]) -> StepPlan:
    plan = StepPlan(step, now, *rows, **_restored(values))
    if entering:
        plan.new_sequences = tuple(
            NewSequence(slot, name, choice, num_prompt, None, SamplingParams(), (), adapter)
            for slot, name, choice, num_prompt, adapter in entering
        )
    return plan


def _commit(_: int, now: float, took_ns: int, step: int, times: Any, *rest: Any) -> RecordedCall:
    values, failure, keys = rest
    if failure is not None:
        outcome: StepResult | StepFailure = msgspec.convert(failure, StepFailure)
    else:
        prepare_ns, forward_ns, sample_ns = times
        timings = StepTimings(prepare_ns * 1e-9, forward_ns * 1e-9, sample_ns * 1e-9)
        outcome = StepResult(_restored(values).pop("token_ids", None), timings=timings, **values)
    return RecordedCall(CommitCall(now, step, outcome, _key_runs(keys)), now + took_ns * 1e-9)


class PlanRows(NamedTuple):
    """The columns of a plan's rows."""

    slots: array[int]
    starts: array[int]
    counts: array[int]
    flags: array[int]

    def ends(self) -> array[int]:
        """Return where each row ends."""
        return _ints(map(add, self.starts, self.counts))


_NO_ROWS = PlanRows(_ints(()), _ints(()), _ints(()), _ints(()))


class RowDeltas:
    """Codec of a plan's rows as a difference to the plan before: usually the same slots, one token further."""

    def __init__(self) -> None:
        self._rows = _NO_ROWS  # of the last plan whose rows were asked for or given
        self._ahead = 0  # plans since then in which every row continued by one token
        self._ones = _ints(())  # the counts of such a plan

    def encode(self, plan: StepPlan) -> list[array[int]] | None:
        """Return a plan's columns, starts relative to the ends before; None if every row continues by one token."""
        before, rows = self._rows, PlanRows(plan.slots, plan.starts, plan.counts, plan.flags)
        self._rows = rows
        ends = before.ends()
        is_same = rows.slots == before.slots and rows.starts == ends and rows.flags == before.flags
        if is_same and rows.counts.count(1) == len(rows.counts):
            return None
        end_of = dict(zip(before.slots, ends, strict=True))
        starts = [start - end_of.get(slot, 0) for slot, start in zip(rows.slots, rows.starts, strict=True)]
        return [rows.slots, _ints(starts), rows.counts, rows.flags]

    def advance(self, columns: Iterable[Iterable[int]] | None) -> None:
        """Go on to the next plan, whose columns `encode` returned. O(1) if its rows continue."""
        if columns is None:
            self._ahead += 1
            return
        before, ahead = self._rows, self._ahead
        ends = [start + count + ahead for start, count in zip(before.starts, before.counts, strict=True)]
        end_of = dict(zip(before.slots, ends, strict=True))
        slots, offsets, counts, flags = columns
        starts = [end_of.get(slot, 0) + offset for slot, offset in zip(slots, offsets, strict=True)]
        self._rows, self._ahead = PlanRows(*map(_ints, (slots, starts, counts, flags))), 0

    def rows(self) -> PlanRows:
        """Return the rows of the last plan. O(rows)."""
        if self._ahead:
            slots, starts, counts, flags = self._rows
            ahead = self._ahead if counts is self._ones else self._ahead - 1
            ends = starts if counts is self._ones else self._rows.ends()
            if len(self._ones) != len(slots):
                self._ones = _ints([1]) * len(slots)
            self._rows = PlanRows(slots, _ints([end + ahead for end in ends]), self._ones, flags)
            self._ahead = 0
        return self._rows

    def decode(self, columns: Iterable[Iterable[int]] | None) -> PlanRows:
        """Return the next plan's rows."""
        self.advance(columns)
        return self.rows()
