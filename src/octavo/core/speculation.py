"""Speculation by prompt lookup: which rows of a plan carry drafts, how many, and what became of them.

Owns: the pass that adds drafts to a finished choice of rows, the result of a row with drafts, and each sequence's
record of success. Does not: sample, or accept (the executor does: a draft is accepted iff it is P02's own draw).
Invariants: drafts take only what a plan has left (tokens, reads, blocks beyond the headroom and one for each
running sequence), and nobody goes for them; their positions are held, not scheduled: num_scheduled and num_known count
what is sure, tables reach ceil((num_scheduled + num_drafts) / block size); behind a rejected draft nothing is held.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from octavo.core.ngrams import DraftHistory
from octavo.core.plan import DROP_BLOCK, ROW_SAMPLE
from octavo.core.request import Request, RequestState, Sequence, Status

if TYPE_CHECKING:
    from octavo.core.planning import Planner
    from octavo.core.state import State

CATCH_UP = 1024  # ids indexed in one plan: a long prompt is taken in over several


class Drafter:
    """Where drafts come from: what followed the same ids earlier in the sequence."""

    __slots__ = ()

    def knows(self, request: Request) -> bool:
        """Whether it can draft for a request: not for one known by length only."""
        return request.prompt_token_ids is not None

    def propose(self, sequence: Sequence, count: int) -> array[int]:
        """At most `count` ids (it may be none, or less than that) that may follow a sequence's committed ids."""
        track, ids = sequence.track, sequence.token_ids
        assert track is not None and ids is not None
        assert len(ids) == sequence.num_scheduled, "drafts continue ids that the host knows"
        if not track.index.take_in(ids, CATCH_UP) or count < 1:
            return array("i")
        return track.index.draft(ids, count)


def allows(request: Request) -> bool:
    """Whether a request may be drafted for at all.

    Not a beam search; nor one whose draws depend on counts of ids that a draft would have to join: penalties and DRY.
    What depends on the ids themselves (bad words) sees the drafts before it.
    """
    params = request.params
    return (
        not params.beam_width
        and params.presence_penalty == params.frequency_penalty == 0
        and params.repetition_penalty == 1
        and not params.dry_multiplier
    )


def must_wait(state: State, request: RequestState) -> bool:
    """Whether a request's next row waits for a commit: of its drafts in flight, or of the id that drafts go on from."""
    is_quiet = state.sequence_budget.used <= state.limits.max_draft_rows
    for sequence in request.sequences:
        if sequence.num_drafts:
            return True
        if is_quiet and sequence.num_pending and request.is_decoding and _is_due(sequence):
            return True
    return False


def _is_due(sequence: Sequence) -> bool:
    return sequence.track is None or sequence.num_known >= sequence.track.resume_at


def add_drafts(planner: Planner) -> None:
    """Give drafts to the rows that decode from ids the host knows, out of what the plan has left."""
    rows, most = planner.rows, planner.state.limits.max_draft_rows
    if not 0 < len(rows) <= most:
        return
    num_drafts, ids = [0] * len(rows), array("i")
    for index, sequence in enumerate(rows):
        request = sequence.request
        is_plain = planner.counts[index] == 1 and planner.flags[index] == ROW_SAMPLE and request.is_decoding
        if not (is_plain and request.may_draft and sequence.num_outputs and _is_due(sequence)):
            continue
        drafts = _propose(planner, sequence)
        if drafts:
            num_drafts[index] = len(drafts)
            ids.extend(drafts)
            planner.counts[index] += len(drafts)
            _hold(planner, sequence, len(drafts))
    if ids:
        planner.num_drafts, planner.draft_ids = array("i", num_drafts), ids


def _propose(planner: Planner, sequence: Sequence) -> array[int]:
    """Drafts for a row that has just been granted its one token."""
    if sequence.track is None:
        sequence.track = DraftHistory()
    wanted = sequence.track.num_wanted(planner.state.limits.max_draft_tokens)
    drafts = planner.state.drafter.propose(sequence, min(wanted, _num_that_fit(planner, sequence)))
    for index, token in enumerate(drafts):
        if token in sequence.request.stop_ids:
            return drafts[: index + 1]  # nothing comes behind a stop
    return drafts


def _num_that_fit(planner: Planner, sequence: Sequence) -> int:
    """Drafts for which there are tokens, reads, positions and blocks."""
    cache, end = planner.state.cache, sequence.num_scheduled
    count = min(planner.tokens.left, sequence.limit - sequence.num_known)
    if planner.is_careful:
        count = min(count, planner.reads.left)
    for pool, kept, floor in zip(cache.pools, planner.outstanding, planner.state.headroom.floors, strict=True):
        spare = pool.num_free - kept - floor - planner.state.sequence_budget.used
        count = min(count, sequence.capacity - end + max(0, spare) * cache.block_size)
    return count


def _hold(planner: Planner, sequence: Sequence, count: int) -> None:
    """Take what a row's drafts use."""
    planner.tokens.take(count)
    if planner.is_careful:
        planner.reads.take(count)
    sequence.num_drafts = count
    end = sequence.num_scheduled + count
    if end > sequence.capacity:
        planner.state.cache.extend(sequence, end)


def take_result(state: State, sequence: Sequence, start: int, num_drafted: int, num_ids: int) -> None:
    """A row of drafts gave so many ids, the accepted drafts and its own draw: drop what stands on rejected ones.

    To be called before its ids are appended.
    """
    sequence.num_pending += num_ids - 1
    assert sequence.track is not None
    sequence.track.learn(num_drafted, num_ids - 1, sequence.num_known)
    if sequence.request.status != Status.RUNNING:
        return  # preempted in flight: its blocks are gone, its ids count
    sequence.num_drafts = 0
    sequence.num_computed = sequence.num_scheduled = start + num_ids
    for group, index in state.cache.trim(sequence):
        state.table_edits.extend((sequence.slot, group, index, DROP_BLOCK))
