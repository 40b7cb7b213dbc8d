"""From calls to records: plain tuples, as short as what a reader cannot foresee.

Owns: the layout of records (decoding is its twin). Does not: compress, check or write (segments).
Times but a call's own `now` are nanoseconds after it. Without text ids are masked (see masks).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from typing import Any

from octavo.core.limits import Limits
from octavo.core.plan import ROW_SAMPLE, NewSequence, StepFailure, StepPlan, StepResult
from octavo.core.request import Request, SamplingParams
from octavo.observe.recording.calls import Cancel, Control, EndChoice, Ended
from octavo.observe.recording.items import Admitted, Committed, Item, Keys, Planned
from octavo.observe.recording.masks import ORDINARY, KeyMask, mask_ids, mask_request, mask_tenant, stand_ins
from octavo.observe.recording.rows import Rows

# Kinds of record, first in each.
ADMIT, PLAN, COMMIT, CANCEL, END_CHOICE, CONTROL, ENDED = range(7)
# Columns of a plan beside its rows, by number in a record.
COLUMNS = ("edits", "copies", "swap_outs", "host_loads", "freed_slots", "id_edits", "num_drafts", "draft_token_ids")
JOBS, FREES, NEW, FINISHED, PREEMPTED, READS = range(len(COLUMNS), len(COLUMNS) + 6)
# What a result has that most have not, by number in a record.
FAILURE, LENGTHS, STOPS, LOGPROBS, BEAMS, SCORES, POOLED, ERRORS, DEAD_ENDS = range(9)

_REQUEST = (
    "request_id", "num_prompt_tokens", "arrival", "priority", "adapter_id", "score_from", "deadline",
    "queue_timeout", "ttft_objective", "tpot_objective", "eos_token_ids",
)  # fmt: skip
_REQUEST_DEFAULTS = {field.name: field.default for field in fields(Request)}
# What a record leaves out. The format's default of max_tokens is older than that of SamplingParams.
_PARAMS_DEFAULTS = {field.name: field.default for field in fields(SamplingParams)} | {"max_tokens": None}
MAX_MESSAGE = 500  # characters of an error kept


class Encoder:
    """Encodes one segment's calls, in order; each record counts on those before it."""

    def __init__(self, has_text: bool) -> None:
        self._has_text = has_text
        self._key_mask = KeyMask()
        self._media: Callable[[bytes], bytes] = _as_it_is if has_text else self._key_mask
        self._rows = Rows()
        self._owners: dict[int, NewSequence] = {}  # by slot; a new one where it changes
        self._flight: dict[int, dict[int, NewSequence]] = {}  # the owners of each plan in flight, by step
        self._stops: set[int] = set()  # every id that ended or may end a sequence of any request so far

    def encode(self, item: Item) -> tuple[Any, ...]:
        """The record of one call."""
        if isinstance(item, Committed):
            return self._commit(item)
        if isinstance(item, Planned):
            return self._plan(item)
        if isinstance(item, Admitted):
            return ADMIT, item.now, self._request(item.request), self._keys(item.keys)
        if isinstance(item, Cancel):
            return CANCEL, item.now, item.request_ids, int(item.reason), _short(item.message)
        if isinstance(item, EndChoice):
            return END_CHOICE, item.now, item.request_id, item.choice, int(item.reason), _short(item.message)
        if isinstance(item, Control):
            return CONTROL, item.verb, item.num_tokens
        assert isinstance(item, Ended)
        return ENDED, item.now, item.reason

    def masked(self, limits: Limits) -> Limits:
        """Limits with tenants named as in the records."""
        weights = tuple((mask_tenant(name, self._key_mask), weight) for name, weight in limits.tenant_weights)
        return replace(limits, tenant_weights=weights)

    def _keys(self, keys: Keys) -> list[Any] | None:
        """Runs of keys, masked; with text too, for they are salted with what is no text."""
        return [[order, choice, first, *map(self._key_mask, run)] for order, choice, first, run in keys] or None

    def _request(self, request: Request) -> dict[str, Any]:
        self._stops.update(request.eos_token_ids, request.params.stop_token_ids)
        is_blind = request.prompt_token_ids is None
        prompt, emitted = request.prompt_token_ids, request.emitted_token_ids
        kept = request if self._has_text else mask_request(request, self._key_mask)
        record = {name: getattr(kept, name) for name in _REQUEST if getattr(kept, name) != _REQUEST_DEFAULTS[name]}
        record["params"] = {
            name: value
            for name, default in _PARAMS_DEFAULTS.items()
            if (value := getattr(kept.params, name)) != default
        }
        if request.tenant:
            record["tenant"] = mask_tenant(request.tenant, self._key_mask)
        record["wants"] = int(request.wants)
        if is_blind:
            record["blind"] = True
        if request.spans:
            record["spans"] = [(span.start, span.length, self._media(span.key)) for span in request.spans]
        if emitted is not None:
            record["emitted"] = emitted.tolist() if self._has_text else len(emitted)
        if self._has_text and prompt is not None:
            record["prompt"] = prompt.tolist()
        return record

    # --- plans ---------------------------------------------------------------------------------------

    def _plan(self, item: Planned) -> tuple[Any, ...]:
        plan, late = item.plan, _ns(item.planned - item.now)
        only = None if item.only is None else sorted(item.only)
        if plan.is_empty:
            return PLAN, item.now, late, plan.step, b"", None, None, only, self._keys(item.keys)
        digest = plan.digest(self._has_text)
        delta = self._rows.encode(plan)
        if plan.new_sequences:
            self._owners = self._owners | {new.slot: new for new in plan.new_sequences}
        self._flight[plan.step] = self._owners
        return PLAN, item.now, late, plan.step, digest, delta, self._extras(item), only, self._keys(item.keys)

    def _extras(self, item: Planned) -> dict[int, Any] | None:
        plan = item.plan
        extras: dict[int, Any] = {
            number: column.tolist() for number, name in enumerate(COLUMNS) if (column := getattr(plan, name))
        }
        if not self._has_text:
            if plan.id_edits:
                extras[COLUMNS.index("id_edits")][2::3] = [ORDINARY] * (len(plan.id_edits) // 3)
            if plan.num_drafts:
                extras[COLUMNS.index("draft_token_ids")] = self._masked_drafts(plan)
        if plan.encode_jobs:
            extras[JOBS] = [(job.slot, job.span, self._media(job.key), job.num_tokens) for job in plan.encode_jobs]
        if plan.encoder_frees:
            extras[FREES] = [self._media(key) for key in plan.encoder_frees]
        if plan.new_sequences:
            extras[NEW] = [
                (new.slot, new.request_id, new.choice, new.num_prompt, new.adapter_id) for new in plan.new_sequences
            ]
        if plan.finished_ids:
            extras[FINISHED] = plan.finished_ids
        if plan.preempted_ids:
            extras[PREEMPTED] = plan.preempted_ids
        if plan.num_kv_read != sum(plan.starts) + plan.num_query_tokens:
            extras[READS] = plan.num_kv_read
        return extras or None

    def _masked_drafts(self, plan: StepPlan) -> list[int]:
        masked: list[int] = []
        for slot, count in zip(plan.slots, plan.num_drafts, strict=True):
            if count:
                drafts = plan.draft_token_ids[len(masked) : len(masked) + count]
                masked += mask_ids(drafts, stand_ins(self._owners[slot]))
        return masked

    # --- results -------------------------------------------------------------------------------------

    def _commit(self, item: Committed) -> tuple[Any, ...]:
        late, outcome = _ns(item.committed - item.now), item.outcome
        keys, owners = self._keys(item.keys), self._flight.pop(item.plan.step, self._owners)
        if isinstance(outcome, StepFailure):
            self._flight.clear()
            extras = {FAILURE: (_short(outcome.message), outcome.is_memory)}
            return COMMIT, item.now, late, item.plan.step, 0, 0, 0, None, extras, keys
        times = outcome.timings
        tokens: list[int] | int | None = None
        more = self._results(outcome)
        if outcome.token_ids is not None:
            tokens = outcome.token_ids.tolist() if self._has_text else len(outcome.token_ids)
            if not self._has_text and not self._stops.isdisjoint(outcome.token_ids):
                stops = self._marked_stops(item, owners, outcome.token_ids)
                if stops:
                    more[STOPS] = stops
        if outcome.logprobs is not None:
            more[LOGPROBS] = len(outcome.logprobs)
            beams = self._beams(item, owners, outcome)
            if beams:
                more[BEAMS] = beams
        parts = _ns(times.prepare_s), _ns(times.forward_s), _ns(times.sample_s)
        return COMMIT, item.now, late, item.plan.step, *parts, tokens, more or None, keys

    @staticmethod
    def _results(outcome: StepResult) -> dict[int, Any]:
        more: dict[int, Any] = {}
        if outcome.num_token_ids is not None:
            more[LENGTHS] = outcome.num_token_ids.tolist()
        if outcome.scores:
            more[SCORES] = [(row, first, len(entries)) for row, first, entries in outcome.scores]
        if outcome.pooled:
            more[POOLED] = [row for row, _ in outcome.pooled]
        if outcome.errors:
            more[ERRORS] = [(row, _short(reason)) for row, reason in outcome.errors]
        if outcome.dead_ends:
            more[DEAD_ENDS] = [(row, _short(error.message)) for row, error in outcome.dead_ends]
        return more

    def _marked_stops(self, item: Committed, owners: dict[int, NewSequence], ids: array[int]) -> list[int]:
        """(place in the ids, stand-in) of each id that may end its own request's sequences, flat."""
        marked: list[int] = []
        for slot, begin, end in _spans(item):
            if end > begin and not self._stops.isdisjoint(ids[begin:end]):
                stands = stand_ins(owners[slot])
                for place in range(begin, min(end, len(ids))):
                    if ids[place] in stands:
                        marked += (place, stands[ids[place]])
        return marked

    def _beams(self, item: Committed, owners: dict[int, NewSequence], outcome: StepResult) -> list[Any]:
        """(place, candidates, their log-probabilities) of the rows of beam searches."""
        assert outcome.logprobs is not None
        found = []
        for slot, begin, end in _spans(item):
            entry = outcome.logprobs[begin] if end > begin and begin < len(outcome.logprobs) else None
            if entry is not None and owners[slot].params.beam_width:
                ids = entry.top_ids
                kept = list(ids) if self._has_text else mask_ids(ids, stand_ins(owners[slot]))
                found.append((begin, kept, entry.top_logprobs))
        return found


def _spans(item: Committed) -> Iterable[tuple[int, int, int]]:
    """Each sampling row's slot, and where its ids begin and end in the result."""
    assert isinstance(item.outcome, StepResult)
    lengths, at, sampling = item.outcome.num_token_ids, 0, 0
    for slot, flags in zip(item.plan.slots, item.plan.flags, strict=True):
        if flags & ROW_SAMPLE:
            count = 1 if lengths is None else lengths[sampling]
            sampling += 1
            yield slot, at, at + count
            at += count


def _as_it_is(key: bytes) -> bytes:
    return key


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


def _short(message: str | None) -> str | None:
    return None if message is None else message[:MAX_MESSAGE]
