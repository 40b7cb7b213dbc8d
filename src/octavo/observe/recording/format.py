"""The format of recordings: the calls of a scheduler, what of them is masked, and each call as a record.

Owns: the masks, and both directions of records: plain tuples, as short as what a reader cannot
foresee. Does not: know files (reader), write (recorder), or call a scheduler (replaying).
Times are seconds on the engine's monotonic clock; in records those beside a call's `now` are nanoseconds after it.
"""

from __future__ import annotations

import os
import re
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from hashlib import blake2b
from operator import add
from typing import Any, NamedTuple

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
from octavo.core.request import FinishError, FinishReason, Request, SamplingParams, Span, Want
from octavo.core.tap import (
    AdmitCall,
    Call,
    CancelCall,
    CommitCall,
    ControlCall,
    EndChoiceCall,
    KeyRun,
    PlanCall,
)
from octavo.errors import ErrorKind, OctavoError

VERSION = 1
MAX_MESSAGE = 500  # characters of an error kept


class RecordingError(OctavoError):
    """A recording cannot be read: it is missing, of another version, or damaged. The message says what to do."""


@dataclass(frozen=True, slots=True)
class Header:
    """The engine that a segment is about.

    `began` is in Unix seconds, at `clock` on the engine's clock. `has_text`: token ids are recorded. `settings` are the
    engine's, by the spelling of their flags; names and numbers only.
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

    @property
    def key_tokens(self) -> int:
        """Tokens under each block key."""
        return self.limits.block_size


class EndMarker(NamedTuple):
    """The recording's own end, with its reason; the last record."""

    now: float
    reason: str


class RecordedCall(NamedTuple):
    """A call, and when it returned.

    Read back without text a request has no ids, and its stop ids are stand-ins (see masks); `is_blind`: the engine had
    no ids of it either. A plan read back has columns and names, no events; `digest` is that of the plan as it was made,
    without ids unless the recording has text, b"" for an empty plan.
    """

    call: Call | EndMarker
    done: float = 0.0
    digest: bytes = b""
    is_blind: bool = False


ADMIT, PLAN, COMMIT, CANCEL, END_CHOICE, CONTROL, END = range(7)  # kinds of record


def short(message: str | None) -> str | None:
    """Cut a message to what is kept of it."""
    return None if message is None else message[:MAX_MESSAGE]


# --- masks: what stands for ids and keys where the text is not recorded --------------------------------------
# What decisions depend on stays: which ids end a sequence, how many there are, which blocks are equal. A guess of the
# text cannot be tried: the digests' secret is drawn for each segment and kept nowhere.

ORDINARY = -1  # stands for every id that ends nothing
_KEY_DIGEST = re.compile("[0-9a-f]{64}")  # a tenant that is named after its API key


class KeyMask:
    """Turns block and media keys into digests that mean nothing outside one segment."""

    def __init__(self) -> None:
        self._secret = os.urandom(32)

    def __call__(self, key: bytes) -> bytes:
        """The same digest for the same key."""
        return blake2b(key, key=self._secret, digest_size=8).digest()


def mask_tenant(name: str, key_mask: KeyMask) -> str:
    """A tenant's name; one that was made of an API key, its SHA-256, gives way to a digest that means nothing."""
    return f"key-{key_mask(name.encode()).hex()[:8]}" if _KEY_DIGEST.fullmatch(name) else name


def stand_ins(request: Request | NewSequence) -> dict[int, int]:
    """The ids that may end a request's sequences, and what stands for each: 0, 1 and so on."""
    every = dict.fromkeys((*request.eos_token_ids, *request.params.stop_token_ids))
    return {token: number for number, token in enumerate(every)}


def mask_ids(ids: Iterable[int], stands: dict[int, int]) -> list[int]:
    """Ids as they are written without text."""
    return [stands.get(token, ORDINARY) for token in ids]


# --- what a record has beside its fixed values: by number, only where it is not empty -------------------------


Mask = Callable[[bytes], bytes]  # of media keys


class _Field(NamedTuple):
    """One attribute of a plan or a result: to plain values (given what masks media keys) and back."""

    name: str
    pack: Callable[[Any, Mask], Any]
    unpack: Callable[[Any], Any]


_ints: Callable[[Any], array[int]] = partial(array, "i")
_INT_COLUMNS = (
    "edits", "copies", "swap_outs", "host_loads", "freed_slots", "id_edits", "num_drafts", "draft_token_ids",
)  # fmt: skip
_ID_EDITS, _DRAFT_IDS = _INT_COLUMNS.index("id_edits"), _INT_COLUMNS.index("draft_token_ids")
_PLAN_FIELDS: dict[int, _Field] = {
    **{number: _Field(name, lambda column, _: column.tolist(), _ints) for number, name in enumerate(_INT_COLUMNS)},
    8: _Field(
        "encode_jobs",
        lambda jobs, mask: [(job.slot, job.span, mask(job.key), job.num_tokens) for job in jobs],
        lambda jobs: tuple(EncodeJob(*job) for job in jobs),
    ),
    9: _Field("encoder_frees", lambda keys, mask: [mask(key) for key in keys], tuple),
    10: _Field(
        "new_sequences",
        lambda entering, _: [
            (new.slot, new.request_id, new.choice, new.num_prompt, new.adapter_id) for new in entering
        ],
        lambda entering: tuple(
            NewSequence(slot, name, choice, num_prompt, None, SamplingParams(), (), adapter)
            for slot, name, choice, num_prompt, adapter in entering
        ),
    ),
    11: _Field("finished_ids", lambda names, _: names, tuple),
    12: _Field("preempted_ids", lambda names, _: names, tuple),
}
_READS = 13  # num_kv_read, where it is not the sum of the rows' contexts

_UNKNOWN = TokenLogprobs(ORDINARY, 0.0, 1)
_RESULT_FIELDS: dict[int, _Field] = {
    1: _Field("num_token_ids", lambda column, _: column.tolist(), _ints),
    5: _Field(
        "scores",
        lambda scores, _: [(row, first, len(entries)) for row, first, entries in scores],
        lambda scores: tuple((row, first, (_UNKNOWN,) * count) for row, first, count in scores),
    ),
    6: _Field(
        "pooled", lambda pooled, _: [row for row, _ in pooled], lambda pooled: tuple((row, b"") for row in pooled)
    ),
    7: _Field("errors", lambda errors, _: [(row, short(text)) for row, text in errors], lambda v: tuple(map(tuple, v))),
    8: _Field(
        "dead_ends",
        lambda ends, _: [(row, short(error.message)) for row, error in ends],
        lambda ends: tuple((row, FinishError(ErrorKind.ENGINE, text)) for row, text in ends),
    ),
}
_FAILURE, _STOPS, _LOGPROBS, _BEAMS = 0, 2, 3, 4


def _pack(value: object, table: Mapping[int, _Field], mask: Mask) -> dict[int, Any]:
    return {
        number: each.pack(found, mask)
        for number, each in table.items()
        if (found := getattr(value, each.name)) is not None and len(found)
    }


def _unpack(value: object, table: Mapping[int, _Field], extras: Mapping[int, Any]) -> None:
    for number, each in table.items():
        if number in extras:
            setattr(value, each.name, each.unpack(extras[number]))


_REQUEST_NAMES = (
    "request_id", "num_prompt_tokens", "arrival", "priority", "adapter_id", "score_from", "deadline",
    "queue_timeout", "ttft_objective", "tpot_objective", "eos_token_ids",
)  # fmt: skip
_REQUEST_DEFAULTS = {each.name: each.default for each in fields(Request) if each.name in _REQUEST_NAMES}
# What a record leaves out. The format's default of max_tokens is older than that of SamplingParams.
_PARAMS_DEFAULTS = {each.name: each.default for each in fields(SamplingParams)} | {"max_tokens": None}


_TEXT_PARAMS = (
    "seed", "stop", "logit_bias", "bad_words_ids", "allowed_token_ids", "dry_breaker_ids", "shown_special_ids",
)  # fmt: skip


def _mask_request(record: dict[str, Any], stands: dict[int, int]) -> None:
    """Remove from a request's record what reveals its text; stop ids are replaced by stand-ins."""
    params = record["params"]
    for name in _TEXT_PARAMS:
        params.pop(name, None)
    if "grammar" in params:
        params["grammar"] = "-"  # that there is one
    for ids_of, name in ((record, "eos_token_ids"), (params, "stop_token_ids")):
        if name in ids_of:
            ids_of[name] = mask_ids(ids_of[name], stands)


def _changed(value: object, defaults: Mapping[str, Any]) -> dict[str, Any]:
    return {name: found for name, default in defaults.items() if (found := getattr(value, name)) != default}


Sampled = Iterator[tuple[NewSequence, int, int]]  # a row's sequence, and where its ids begin and end in the result


class CallEncoder:
    """Encodes one segment's calls, in order; each record depends on those before it. Without text ids are masked."""

    def __init__(self, has_text: bool) -> None:
        self._has_text = has_text
        self._key_mask = KeyMask()
        self._media_mask: Mask = bytes if has_text else self._key_mask
        self._rows = RowDeltas()
        self._owners: dict[int, NewSequence] = {}  # by slot; replaced, never changed
        self._flight: dict[int, tuple[StepPlan, dict[int, NewSequence]]] = {}  # by step, with its owners
        self._stops: set[int] = set()  # every id that may end a sequence of any request so far

    def encode(self, recorded: RecordedCall) -> tuple[Any, ...]:
        """Return the record of one call."""
        call, done = recorded.call, recorded.done
        if isinstance(call, CommitCall):
            return self._commit(call, done)
        if isinstance(call, PlanCall):
            return self._plan(call, done)
        if isinstance(call, AdmitCall):
            return ADMIT, call.now, self._request(call.request), self._keys(call.keys)
        if isinstance(call, CancelCall):
            message = None if call.error is None else short(call.error.message)
            return CANCEL, call.now, call.request_ids, call.reason, message
        if isinstance(call, EndChoiceCall):
            return END_CHOICE, *call, None
        return CONTROL if isinstance(call, ControlCall) else END, *call

    def masked(self, limits: Limits) -> Limits:
        """Return limits with tenants named as in the records."""
        weights = tuple((mask_tenant(name, self._key_mask), weight) for name, weight in limits.tenant_weights)
        return replace(limits, tenant_weights=weights)

    def _keys(self, runs: tuple[KeyRun, ...]) -> list[Any] | None:
        """Runs of keys, masked; with text too, for they are salted with what is no text."""
        return [[order, choice, first, *map(self._key_mask, keys)] for order, choice, first, keys in runs] or None

    def _request(self, request: Request) -> dict[str, Any]:
        self._stops.update(request.eos_token_ids, request.params.stop_token_ids)
        prompt, emitted = request.prompt_token_ids, request.emitted_token_ids
        record = _changed(request, _REQUEST_DEFAULTS)
        record["params"] = _changed(request.params, _PARAMS_DEFAULTS)
        if self._has_text:
            if prompt is not None:
                record["prompt"] = prompt.tolist()
        else:
            _mask_request(record, stand_ins(request))
        record["wants"] = int(request.wants)
        if request.tenant:
            record["tenant"] = mask_tenant(request.tenant, self._key_mask)
        if prompt is None:
            record["blind"] = True
        if request.spans:
            record["spans"] = [(span.start, span.length, self._media_mask(span.key)) for span in request.spans]
        if emitted is not None:
            record["emitted"] = emitted.tolist() if self._has_text else len(emitted)
        return record

    def _plan(self, call: PlanCall, done: float) -> tuple[Any, ...]:
        plan, digest, delta, extras = call.plan, b"", None, None
        if not plan.is_empty:
            if plan.new_sequences:
                self._owners = self._owners | {new.slot: new for new in plan.new_sequences}
            self._flight[plan.step] = plan, self._owners
            digest, delta, extras = plan.digest(self._has_text), self._rows.encode(plan), self._extras(plan) or None
        only = None if call.only is None else sorted(call.only)
        late = int(1e9 * (done - call.now))
        return PLAN, call.now, late, plan.step, digest, delta, extras, only, self._keys(call.keys)

    def _extras(self, plan: StepPlan) -> dict[int, Any]:
        extras = _pack(plan, _PLAN_FIELDS, self._media_mask)
        if not self._has_text:
            if plan.id_edits:
                extras[_ID_EDITS][2::3] = [ORDINARY] * (len(plan.id_edits) // 3)
            if plan.num_drafts:
                extras[_DRAFT_IDS] = self._masked_drafts(plan)
        if plan.num_kv_read != sum(plan.starts) + plan.num_query_tokens:
            extras[_READS] = plan.num_kv_read
        return extras

    def _masked_drafts(self, plan: StepPlan) -> list[int]:
        masked: list[int] = []
        for slot, count in zip(plan.slots, plan.num_drafts, strict=True):
            if count:
                drafts = plan.draft_token_ids[len(masked) : len(masked) + count]
                masked += mask_ids(drafts, stand_ins(self._owners[slot]))
        return masked

    def _commit(self, call: CommitCall, done: float) -> tuple[Any, ...]:
        plan, owners = self._flight.pop(call.step)
        outcome, late, keys = call.outcome, int(1e9 * (done - call.now)), self._keys(call.keys)
        if isinstance(outcome, StepFailure):
            self._flight.clear()
            extras: dict[int, Any] = {_FAILURE: (short(outcome.message), outcome.is_memory)}
            return COMMIT, call.now, late, call.step, 0, 0, 0, None, extras, keys
        extras, ids = _pack(outcome, _RESULT_FIELDS, self._media_mask), outcome.token_ids
        tokens = ids.tolist() if ids is not None and self._has_text else None if ids is None else len(ids)
        if ids is not None and not self._has_text and not self._stops.isdisjoint(ids):
            extras |= self._mark_stops(_sampled(plan, owners, outcome), ids)
        if outcome.logprobs is not None:
            extras[_LOGPROBS] = len(outcome.logprobs)
            extras |= self._beams(_sampled(plan, owners, outcome), outcome.logprobs)
        times = outcome.timings
        parts = (int(1e9 * part) for part in (times.prepare_s, times.forward_s, times.sample_s))
        return COMMIT, call.now, late, call.step, *parts, tokens, extras or None, keys

    def _mark_stops(self, sampled: Sampled, ids: array[int]) -> dict[int, Any]:
        """(place in the ids, stand-in) of each id that may end its own request's sequences, flat."""
        marked: list[int] = []
        for owner, begin, end in sampled:
            if end > begin and not self._stops.isdisjoint(ids[begin:end]):
                stands = stand_ins(owner)
                for place in range(begin, min(end, len(ids))):
                    if ids[place] in stands:
                        marked += (place, stands[ids[place]])
        return {_STOPS: marked} if marked else {}

    def _beams(self, sampled: Sampled, logprobs: Sequence[TokenLogprobs | None]) -> dict[int, Any]:
        """(place, candidates, their log-probabilities) of the rows of beam searches."""
        found = []
        for owner, begin, end in sampled:
            entry = logprobs[begin] if end > begin and begin < len(logprobs) else None
            if entry is not None and owner.params.beam_width:
                ids = list(entry.top_ids) if self._has_text else mask_ids(entry.top_ids, stand_ins(owner))
                found.append((begin, ids, entry.top_logprobs))
        return {_BEAMS: found} if found else {}


def _sampled(plan: StepPlan, owners: Mapping[int, NewSequence], outcome: StepResult) -> Sampled:
    """Each sampling row's sequence, and where its ids begin and end in the result."""
    lengths, at, sampling = outcome.num_token_ids, 0, 0
    for slot, flags in zip(plan.slots, plan.flags, strict=True):
        if flags & ROW_SAMPLE:
            count = 1 if lengths is None else lengths[sampling]
            sampling += 1
            yield owners[slot], at, at + count
            at += count


_DAMAGE = (
    AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError, OctavoError, msgspec.MsgspecError,
)  # fmt: skip


class CallDecoder:
    """Decodes one segment's records, in order."""

    def __init__(self, header: Header) -> None:
        self._block_size = header.limits.block_size
        self._rows = RowDeltas()

    def decode(self, record: Any) -> RecordedCall:
        """Return the call of one record. Raises RecordingError."""
        try:
            kind, *values = record
            if kind == PLAN:
                return self._plan(*values)
            if kind == COMMIT:
                return self._commit(*values)
            if kind == ADMIT:
                return self._admit(*values)
            return RecordedCall(_decode_plain(kind, values))
        except _DAMAGE as error:
            raise RecordingError(f"a record that cannot be ({type(error).__name__}: {error})") from None

    def _admit(self, now: float, record: dict[str, Any], keys: list[Any] | None) -> RecordedCall:
        runs, is_blind = _key_runs(keys), bool(record.pop("blind", False))
        prompt, emitted = record.pop("prompt", None), record.pop("emitted", None)
        if isinstance(emitted, int):
            emitted = bytes(4 * emitted)
        num_blocks = record["num_prompt_tokens"] // self._block_size
        request = Request(
            record.pop("request_id"),
            None if prompt is None else _ints(prompt),
            msgspec.convert({"max_tokens": None, **record.pop("params", {})}, SamplingParams),
            block_keys=runs[0].keys[:num_blocks] if runs else (),
            emitted_token_ids=None if emitted is None else _ints(emitted),
            wants=Want(record.pop("wants")),
            spans=tuple(Span(start, length, key) for start, length, key in record.pop("spans", ())),
            eos_token_ids=tuple(record.pop("eos_token_ids", ())),
            **record,
        )
        return RecordedCall(AdmitCall(now, request, runs), is_blind=is_blind)

    def _plan(self, now: float, late: int, step: int, digest: bytes, *rest: Any) -> RecordedCall:
        delta, extras, only, keys = rest
        plan = StepPlan(step, now)
        if digest:
            self._rows.decode(delta, plan)
            _unpack(plan, _PLAN_FIELDS, extras or {})
            plan.num_query_tokens = sum(plan.counts)
            plan.num_kv_read = (extras or {}).get(_READS, sum(plan.starts) + plan.num_query_tokens)
            plan.is_fast_path = bool(plan.counts) and max(plan.counts) == min(plan.counts) == 1
        call = PlanCall(now, plan, None if only is None else frozenset(only), _key_runs(keys))
        return RecordedCall(call, now + late * 1e-9, digest)

    @staticmethod
    def _commit(now: float, late: int, step: int, *rest: Any) -> RecordedCall:
        prepare, forward, sample, tokens, extras, keys = rest
        extras = extras or {}
        outcome: StepResult | StepFailure
        if _FAILURE in extras:
            outcome = StepFailure(*extras[_FAILURE])
        else:
            timings = StepTimings(prepare * 1e-9, forward * 1e-9, sample * 1e-9)
            outcome = StepResult(_tokens(tokens, extras.get(_STOPS, ())), timings=timings)
            _unpack(outcome, _RESULT_FIELDS, extras)
            if _LOGPROBS in extras:
                outcome.logprobs = [None] * extras[_LOGPROBS]
                for place, ids, logprobs in extras.get(_BEAMS, ()):
                    best, logprob = (ids[0], logprobs[0]) if ids else (ORDINARY, 0.0)
                    outcome.logprobs[place] = TokenLogprobs(best, logprob, 1, tuple(ids), tuple(logprobs))
        return RecordedCall(CommitCall(now, step, outcome, _key_runs(keys)), now + late * 1e-9)


def _decode_plain(kind: int, values: list[Any]) -> Call | EndMarker:
    """Return the call of a record that has its fields as they are, or with a message at the end."""
    if kind == CANCEL:
        now, request_ids, reason, message = values
        error = None if message is None else FinishError(ErrorKind.ENGINE, message)  # kinds are not kept
        return CancelCall(now, tuple(request_ids), FinishReason(reason), error)
    if kind == END_CHOICE:
        return msgspec.convert(values[:-1], EndChoiceCall)
    return msgspec.convert(values, {CONTROL: ControlCall, END: EndMarker}[kind])


def _key_runs(runs: list[Any] | None) -> tuple[KeyRun, ...]:
    return tuple(KeyRun(order, choice, first, tuple(keys)) for order, choice, first, *keys in runs or ())


def _tokens(tokens: list[int] | int | None, stops: Sequence[int]) -> array[int] | None:
    if tokens is None:
        return None
    if not isinstance(tokens, int):
        return _ints(tokens)
    ids = array("i", [ORDINARY]) * tokens
    for place, stand_in in zip(stops[::2], stops[1::2], strict=True):
        ids[place] = stand_in
    return ids


Delta = Sequence[Sequence[int]] | None  # None: as expected; else rows gone, rows that changed, rows that came


class RowDeltas:
    """Rows of a plan as what differs from what the plan before lets one expect: the same slots, one token further."""

    def __init__(self) -> None:
        self._slots, self._starts, self._flags = array("i"), array("i"), array("i")
        self._ones = array("i")
        self._one_each = 0

    def encode(self, plan: StepPlan) -> Delta:
        """Return how a plan's rows differ from what was expected, and expect the next."""
        is_expected = (
            plan.slots == self._slots
            and plan.starts == self._starts
            and plan.flags == self._flags
            and plan.counts == self._ones
        )
        delta = None if is_expected else self._differ(plan)
        self._expect(plan)
        return delta

    def _differ(self, plan: StepPlan) -> Delta:
        here = frozenset(plan.slots)
        kept = [index for index, slot in enumerate(self._slots) if slot in here]
        if [self._slots[index] for index in kept] != plan.slots[: len(kept)].tolist():
            kept = []
        stays = frozenset(kept)
        gone = [index for index in range(len(self._slots)) if index not in stays]
        changed: list[int] = []
        for row, index in enumerate(kept):
            start, count, flags = plan.starts[row], plan.counts[row], plan.flags[row]
            if start != self._starts[index] or count != 1 or flags != self._flags[index]:
                changed += (row, start - self._starts[index], count, flags)
        came: list[int] = []
        for row in range(len(kept), len(plan.slots)):
            came += (plan.slots[row], plan.starts[row], plan.counts[row], plan.flags[row])
        return gone, changed, came

    def decode(self, delta: Delta, plan: StepPlan) -> None:
        """Fill in the rows of a plan, and expect the next."""
        slots, starts, flags = self._slots[:], self._starts[:], self._flags[:]
        counts = array("i", [1]) * len(slots)
        if delta is not None:
            gone, changed, came = delta
            columns = (slots, starts, counts, flags)
            for index in reversed(gone):
                for column in columns:
                    del column[index]
            for row, ahead, count, flag in zip(*[iter(changed)] * 4, strict=True):
                starts[row], counts[row], flags[row] = starts[row] + ahead, count, flag
            for offset, column in enumerate(columns):
                column.extend(came[offset::4])
        plan.slots, plan.starts, plan.counts, plan.flags = slots, starts, counts, flags
        self._expect(plan)

    def _expect(self, plan: StepPlan) -> None:
        self._slots, self._flags = plan.slots, plan.flags
        if len(self._ones) != len(plan.slots):
            self._ones = array("i", [1]) * len(plan.slots)
            self._one_each = int.from_bytes(self._ones.tobytes(), sys.byteorder)
        if plan.counts == self._ones:  # one sum of long numbers: lanes of 32 bits that never carry
            total = int.from_bytes(plan.starts.tobytes(), sys.byteorder) + self._one_each
            self._starts = array("i", total.to_bytes(plan.starts.itemsize * len(plan.starts), sys.byteorder))
        else:
            self._starts = array("i", map(add, plan.starts, plan.counts))
