"""Grants rows to running requests, in the policy's order.

Owns: the pass over the running requests of one step. Does not: start waiting requests (start), or build the plan's
columns (step).
Invariant: a preemption covers all sequences of a request and removes their rows from this plan.
"""

from __future__ import annotations

from octavo.core import branching, drafts
from octavo.core.encoder import whole_chunk
from octavo.core.plan import ROW_CARRY, ROW_SAMPLE, WaitReason
from octavo.core.request_state import RequestState, Sequence, Status
from octavo.core.step import Step

_DECODE_AHEAD = ROW_SAMPLE | ROW_CARRY


def grant_running(step: Step, first: int = 0) -> None:
    """Grant rows to the running requests, in rank order, from the one with index `first` on.

    The hot path: this function itself adds a row that decodes inside its last block, because a call per row would cost
    more than the rest of the step. `grant_row` grants all other rows.
    """
    state, has_read_limit = step.state, step.has_read_limit
    has_drafts_in_flight = bool(state.limits.max_draft_tokens and state.flight)
    may_skip = step.only is not None or step.turn is not None or has_drafts_in_flight or state.limits.num_stages > 1
    rows, starts, counts, flags = step.rows, step.starts, step.counts, step.flags
    left = step.tokens_left
    for request in _in_order(step) if has_read_limit else state.running.requests[first:]:
        if not left:
            break
        if may_skip and _skips(step, request):
            continue
        sequences = request.sequences
        if request.has_several:
            step.tokens_left = left
            sequences = branching.ready_choices(step, request)
            left = step.tokens_left
        for sequence in sequences:
            start = sequence.num_scheduled
            pending = sequence.num_pending
            todo = sequence.num_committed + pending - start
            if (
                todo == 1
                and left
                and start < sequence.in_place_end
                and request.is_decoding
                and (not pending or request.can_run_ahead)
                and (not has_read_limit or _take_read(step, request, start))
            ):
                sequence.num_scheduled = start + 1
                sequence.num_pending = pending + 1
                sequence.in_flight += 1
                rows.append(sequence)
                starts.append(start)
                counts.append(1)
                flags.append(_DECODE_AHEAD if pending else ROW_SAMPLE)
                left -= 1
            elif todo > 0:
                step.tokens_left = left
                has_forked = grant_row(step, request, sequence)
                left = step.tokens_left
                if has_forked:
                    break  # the other choices have their rows
    step.tokens_left = left


def _in_order(step: Step) -> list[RequestState]:
    """Return the running requests by rank, but requests that were bypassed `max_bypass` times first."""
    bound = step.state.limits.max_bypass
    return sorted(step.state.running.requests, key=lambda request: request.num_bypassed < bound)


def _skips(step: Step, request: RequestState) -> bool:
    """Return True if this step must not have a row of a request.

    A request that still prefills is not skipped here, so that `grant_row` reserves its blocks.
    """
    stages = step.state.limits.num_stages
    has_share = stages > 1 and request.is_decoding and len(step.rows) * stages >= len(step.state.running.requests)
    if has_share or (step.only is not None and request.name not in step.only):
        return True
    reason = step.refusal(request, request.is_decoding)
    if request.may_draft and drafts.must_wait(step.state, request):
        reason = WaitReason.UNCOMMITTED
    elif not request.is_decoding:
        return False
    if reason is not None:
        step.skip(reason)
    return reason is not None


def _take_read(step: Step, request: RequestState, start: int) -> bool:
    """Take the KV reads of a row's next token from the step's budget; return False if the budget is too small."""
    cost = step.read_cost(start, 1)
    if not step.may_read(cost):
        return False
    step.take_reads(cost)
    request.num_bypassed = 0
    return True


def grant_row(step: Step, request: RequestState, sequence: Sequence) -> bool:
    """Grant a row that is not on the hot path: it needs a block, has several tokens, or is bound by other limits.

    Return True if other choices forked from the row.
    """
    if request.status != Status.RUNNING or not step.tokens_left or request.awaits_id(sequence):
        return False
    if request.is_receiving:
        step.defer(request, WaitReason.KV_TRANSFER, 1)
        return False
    if not sequence.is_entered and (step.refusal(request, False) or not branching.enter_late(step, request, sequence)):
        return False
    count, todo = 1, sequence.num_known - sequence.num_scheduled
    if todo > 1 or step.has_read_limit or step.turn is not None or request.request.spans:
        count, reason = _fit_chunk(step, request, sequence, todo)
        if reason is not None:
            step.skip(reason)
            step.reserve_rest(sequence)
            return False
    if not step.make_room(sequence, sequence.num_scheduled + count):
        if request.status == Status.RUNNING:
            step.reserve_rest(sequence)
        return False
    has_forked = step.add_row(sequence, count) and branching.fork_choices(step, request, sequence)
    request.num_bypassed = 0
    if sequence.num_scheduled < sequence.num_committed:
        step.note_rest(request, sequence, count)
    return has_forked


def _fit_chunk(step: Step, request: RequestState, sequence: Sequence, todo: int) -> tuple[int, WaitReason | None]:
    """Return how many of `todo` tokens may run in this step, and None; or 0 and the reason why none may."""
    start = sequence.num_scheduled
    reason = step.refusal(request, request.is_decoding or (todo == 1 and sequence.num_known > sequence.num_prompt))
    if reason is not None:
        return 0, reason
    count, shortage = step.fit_chunk(start, todo)
    if shortage is not None:
        request.num_bypassed += shortage[0] == WaitReason.KV_READ_BUDGET
        return 0, shortage[0]
    if request.request.spans:
        if step.state.limits.whole_span_tokens:
            count = whole_chunk(request.request.spans, start, count, step.tokens_left)
            if not count:
                return 0, WaitReason.TOKEN_BUDGET
        count = step.state.encoder.grant(request.name, sequence.slot, request.request.spans, start, count)
    return count, None if count else WaitReason.ENCODER_BUDGET
