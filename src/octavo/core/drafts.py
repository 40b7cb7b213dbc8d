"""Speculative decoding: gives drafts to the rows of a plan, and takes the results.

Owns: the choice of drafts for granted rows (prompt lookup, or those of a DraftSource), and the result of a row with
drafts. Does not: run a draft model, sample, or accept drafts.
The executor accepts a draft if plain sampling draws the same token at that position (P02), or by rejection sampling.
Invariants: drafts use only the plan's spare tokens, reads and blocks; the headroom and one block for each running
sequence stay free. No request is preempted for drafts. num_scheduled and num_known do not count draft positions; until
the commit a block table covers num_scheduled + num_drafts positions.
"""

from __future__ import annotations

from array import array

from octavo.core.ngrams import MIN_MATCH, NO_LOOKUP, DraftHistory, Lookup
from octavo.core.plan import DROP_BLOCK, ROW_SAMPLE
from octavo.core.proposals import DraftRow, DraftSource
from octavo.core.request import Request
from octavo.core.request_state import RequestState, Sequence, Status
from octavo.core.state import State
from octavo.core.step import Step

CATCH_UP = 1024  # most ids of a sequence indexed in one plan; a long prompt takes several plans
QUIET = 8  # tokens for which a row that a source gave no drafts does not wait for commits


class Drafter:
    """Proposes drafts: the ids that followed the same ids earlier in the sequence, or a DraftSource's."""

    __slots__ = ("_min_match", "_source")

    def __init__(self, source: DraftSource | None = None) -> None:
        self._source = source
        self._min_match = MIN_MATCH if source is None else source.min_match

    def knows(self, request: Request) -> bool:
        """Return True if drafts can be proposed: the request's ids are known, or the source needs only lengths."""
        return request.prompt_token_ids is not None or (self._source is not None and self._source.knows_lengths)

    def propose(self, rows: list[tuple[Sequence, int]], num_rows: int) -> list[array[int]]:
        """Return, for each sequence, up to as many ids as given that may follow its committed ids.

        The plan has `num_rows` rows, others included.
        """
        found = [self._look_up(*row) if self._min_match else NO_LOOKUP for row in rows]
        if self._source is None:
            return [lookup.ids for lookup in found]
        drafts = [array("i")] * len(rows)
        wanted = [index for index, (_, count) in enumerate(rows) if count > 0]
        made = self._source.propose([_draft_row(*rows[index], found[index]) for index in wanted], num_rows)
        for index, ids in zip(wanted, made, strict=True):
            drafts[index] = ids
        return drafts

    def _look_up(self, sequence: Sequence, count: int) -> Lookup:
        history, ids = sequence.draft_history, sequence.token_ids
        assert history is not None and ids is not None
        assert len(ids) == sequence.num_scheduled, "drafts continue ids that the host knows"
        if not history.index.add(ids, CATCH_UP) or count < 1:
            return NO_LOOKUP
        return history.index.draft(ids, count, self._min_match)


def _draft_row(sequence: Sequence, count: int, lookup: Lookup) -> DraftRow:
    request = sequence.request.request
    ids = array("i") if sequence.token_ids is None else sequence.token_ids
    return DraftRow(request, sequence.slot, sequence.choice, ids, count, sequence.limit - sequence.num_known, lookup)


def allows(request: Request) -> bool:
    """Return True if a request may have drafts: no beam search, no penalties, no DRY, no mirostat.

    Penalties and DRY depend on counts of ids, which would have to include the drafts, and mirostat on the draw before.
    Bad words and n-grams are allowed: they depend on the preceding ids, which include the drafts.
    """
    params = request.params
    return (
        not params.beam_width
        and params.presence_penalty == params.frequency_penalty == 0
        and params.repetition_penalty == 1
        and not params.dry_multiplier
        and not params.mirostat
    )


def must_wait(state: State, request: RequestState) -> bool:
    """Return True if a request's next row must wait for a commit.

    The commit is that of its drafts in flight, or of the sampled id that new drafts would follow.
    """
    is_quiet = state.num_sequences <= state.limits.max_draft_rows
    for sequence in request.sequences:
        if sequence.num_drafts:
            return True
        if is_quiet and sequence.num_pending and request.is_decoding and _is_due(sequence, True):
            return True
    return False


def _is_due(sequence: Sequence, can_run_ahead: bool = False) -> bool:
    """Return True if the sequence should get drafts; with `can_run_ahead`, if it should even wait for a commit."""
    history = sequence.draft_history
    if history is None:
        return True
    return sequence.num_known >= (max(history.resume_at, history.wait_at) if can_run_ahead else history.resume_at)


def add_drafts(step: Step, drafter: Drafter) -> None:
    """Add drafts to decode rows whose ids the host knows, within what is left of the plan's budgets."""
    if not 0 < len(step.rows) <= step.state.limits.max_draft_rows:
        return
    limits, indices, wanted = step.state.limits, [], []
    has_source = limits.has_draft_model or limits.has_paced_lookup
    for index, sequence in enumerate(step.rows):
        request = sequence.request
        is_plain = step.counts[index] == 1 and step.flags[index] == ROW_SAMPLE and request.is_decoding
        if is_plain and request.may_draft and sequence.num_outputs and _is_due(sequence):
            if sequence.draft_history is None:
                sequence.draft_history = DraftHistory()
            most = limits.max_draft_tokens
            if not limits.has_paced_lookup:
                most = sequence.draft_history.num_wanted(most)
            indices.append(index)
            wanted.append((sequence, min(most, _num_that_fit(step, sequence))))
    if not indices:
        return
    for index, proposed in zip(indices, drafter.propose(wanted, len(step.rows)), strict=True):
        sequence = step.rows[index]
        drafts = _cut(proposed, _num_that_fit(step, sequence), sequence)
        if drafts:
            step.add_drafts(index, drafts)
        elif has_source and sequence.draft_history is not None:
            sequence.draft_history.wait_at = sequence.num_known + QUIET


def _cut(drafts: array[int], most: int, sequence: Sequence) -> array[int]:
    """Return at most `most` of the drafts, up to the first stop id, since nothing follows it."""
    for index, token in enumerate(drafts[: max(0, most)]):
        if token in sequence.request.stop_ids:
            return drafts[: index + 1]
    return drafts[: max(0, most)]


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
    sequence.draft_history.learn(num_drafted, num_ids - 1, sequence.num_known, not state.limits.has_paced_lookup)
    if sequence.request.status != Status.RUNNING:
        return  # preempted in flight: its blocks are released, and its ids are kept
    sequence.num_drafts = 0
    sequence.num_computed = sequence.num_scheduled = start + num_ids
    for group, index in state.cache.trim(sequence):
        state.updates.table_edits.extend((sequence.slot, group, index, DROP_BLOCK))
