"""Speculation by prompt lookup: which rows of a plan carry drafts, how many, and what became of them.

Owns: the choice of drafts for rows that are granted, and the result of a row with drafts. Does not: sample, or accept
(the executor does: a draft is accepted if it is the token that plain sampling draws at its position, P02).
Invariants: drafts take only what a plan has left (tokens, reads, blocks beyond the headroom and one for each running
sequence), and nothing is preempted for them; their positions are held, not scheduled: num_scheduled and num_known
count positions that are sure, and tables reach ceil((num_scheduled + num_drafts) / block size) until the commit.
"""

from __future__ import annotations

from array import array

from octavo.core.ngrams import DraftHistory
from octavo.core.plan import DROP_BLOCK, ROW_SAMPLE
from octavo.core.request import Request
from octavo.core.request_state import RequestState, Sequence, Status
from octavo.core.state import State
from octavo.core.step import Step

CATCH_UP = 1024  # ids indexed in one plan: a long prompt is indexed over several


class Drafter:
    """Source of drafts: what followed the same ids earlier in the sequence."""

    __slots__ = ()

    def knows(self, request: Request) -> bool:
        """Return True if it can draft for a request: not for one known by length only."""
        return request.prompt_token_ids is not None

    def propose(self, sequence: Sequence, count: int) -> array[int]:
        """Return at most `count` ids (maybe none) that may follow a sequence's committed ids."""
        history, ids = sequence.draft_history, sequence.token_ids
        assert history is not None and ids is not None
        assert len(ids) == sequence.num_scheduled, "drafts continue ids that the host knows"
        if not history.index.add(ids, CATCH_UP) or count < 1:
            return array("i")
        return history.index.draft(ids, count)


def allows(request: Request) -> bool:
    """Return True if a request may have drafts at all.

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
    """Return True if a request's next row waits for a commit: of its drafts, or of the id that drafts would follow."""
    is_quiet = state.num_sequences <= state.limits.max_draft_rows
    for sequence in request.sequences:
        if sequence.num_drafts:
            return True
        if is_quiet and sequence.num_pending and request.is_decoding and _is_due(sequence):
            return True
    return False


def _is_due(sequence: Sequence) -> bool:
    return sequence.draft_history is None or sequence.num_known >= sequence.draft_history.resume_at


def add_drafts(step: Step, drafter: Drafter) -> None:
    """Give drafts to the rows that decode from ids the host knows, within the rest of the plan's budgets."""
    if not 0 < len(step.rows) <= step.state.limits.max_draft_rows:
        return
    for index, sequence in enumerate(step.rows):
        request = sequence.request
        is_plain = step.counts[index] == 1 and step.flags[index] == ROW_SAMPLE and request.is_decoding
        if is_plain and request.may_draft and sequence.num_outputs and _is_due(sequence):
            drafts = _propose(step, drafter, sequence)
            if drafts:
                step.add_drafts(index, drafts)


def _propose(step: Step, drafter: Drafter, sequence: Sequence) -> array[int]:
    """Return drafts for a row that has just been granted its one token."""
    if sequence.draft_history is None:
        sequence.draft_history = DraftHistory()
    wanted = sequence.draft_history.num_wanted(step.state.limits.max_draft_tokens)
    drafts = drafter.propose(sequence, min(wanted, _num_that_fit(step, sequence)))
    for index, token in enumerate(drafts):
        if token in sequence.request.stop_ids:
            return drafts[: index + 1]  # nothing follows a stop
    return drafts


def _num_that_fit(step: Step, sequence: Sequence) -> int:
    """Return how many drafts there are tokens, reads, positions and blocks for."""
    state, end = step.state, sequence.num_scheduled
    count = min(step.tokens_left, sequence.limit - sequence.num_known)
    if step.has_read_limit:
        count = min(count, step.reads_left)
    for pool, kept, floor in zip(state.cache.pools, step.outstanding, state.headroom, strict=True):
        spare = pool.num_free - kept - floor - state.num_sequences
        count = min(count, sequence.capacity - end + max(0, spare) * state.cache.block_size)
    return count


def take_result(state: State, sequence: Sequence, start: int, num_drafted: int, num_ids: int) -> None:
    """Drop the KV of rejected drafts, before the row's ids (accepted drafts and one draw) are appended."""
    sequence.num_pending += num_ids - 1
    assert sequence.draft_history is not None
    sequence.draft_history.learn(num_drafted, num_ids - 1, sequence.num_known)
    if sequence.request.status != Status.RUNNING:
        return  # preempted in flight: its blocks are released, its ids count
    sequence.num_drafts = 0
    sequence.num_computed = sequence.num_scheduled = start + num_ids
    for group, index in state.cache.trim(sequence):
        state.updates.table_edits.extend((sequence.slot, group, index, DROP_BLOCK))
