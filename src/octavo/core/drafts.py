"""Speculative decoding by prompt lookup: gives drafts to the rows of a plan, and takes the results.

Owns: the choice of drafts for granted rows, and the result of a row with drafts. Does not: sample, or accept drafts.
The executor accepts a draft if plain sampling draws the same token at that position (P02).
Invariants: drafts use only the plan's spare tokens, reads and blocks; the headroom and one block for each running
sequence stay free. No request is preempted for drafts. num_scheduled and num_known do not count draft positions; until
the commit a block table covers num_scheduled + num_drafts positions.
"""

from __future__ import annotations

from array import array

from octavo.core.ngrams import DraftHistory
from octavo.core.plan import DROP_BLOCK, ROW_SAMPLE
from octavo.core.request import Request
from octavo.core.request_state import RequestState, Sequence, Status
from octavo.core.state import State
from octavo.core.step import Step

CATCH_UP = 1024  # most ids of a sequence indexed in one plan; a long prompt takes several plans


class Drafter:
    """Proposes as drafts the ids that followed the same ids earlier in the sequence."""

    __slots__ = ()

    def knows(self, request: Request) -> bool:
        """Return True if the request's prompt ids are known, so that drafts can be proposed."""
        return request.prompt_token_ids is not None

    def propose(self, sequence: Sequence, count: int) -> array[int]:
        """Return up to `count` ids that may follow a sequence's committed ids."""
        history, ids = sequence.draft_history, sequence.token_ids
        assert history is not None and ids is not None
        assert len(ids) == sequence.num_scheduled, "drafts continue ids that the host knows"
        if not history.index.add(ids, CATCH_UP) or count < 1:
            return array("i")
        return history.index.draft(ids, count)


def allows(request: Request) -> bool:
    """Return True if a request may have drafts: no beam search, no penalties, no DRY.

    Penalties and DRY depend on counts of ids, which would have to include the drafts. Bad words are allowed: they
    depend on the preceding ids, which include the drafts.
    """
    params = request.params
    return (
        not params.beam_width
        and params.presence_penalty == params.frequency_penalty == 0
        and params.repetition_penalty == 1
        and not params.dry_multiplier
    )


def must_wait(state: State, request: RequestState) -> bool:
    """Return True if a request's next row must wait for a commit.

    The commit is that of its drafts in flight, or of the sampled id that new drafts would follow.
    """
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
    """Add drafts to decode rows whose ids the host knows, within what is left of the plan's budgets."""
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
            return drafts[: index + 1]  # nothing follows a stop id
    return drafts


def _num_that_fit(step: Step, sequence: Sequence) -> int:
    """Return the number of drafts for which the plan has tokens, reads, positions and blocks."""
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
        return  # preempted in flight: its blocks are released, and its ids are kept
    sequence.num_drafts = 0
    sequence.num_computed = sequence.num_scheduled = start + num_ids
    for group, index in state.cache.trim(sequence):
        state.updates.table_edits.extend((sequence.slot, group, index, DROP_BLOCK))
