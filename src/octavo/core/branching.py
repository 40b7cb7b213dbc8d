"""Requests with several sequences (n > 1, or beam search): how choices fork or enter late, and how beams move.

Owns: when a choice enters a plan, and which blocks it shares; how a beam search step moves sequences, blocks and slots.
Does not: decide between requests (run, start), or choose beams (beam_search). A request with one sequence never gets
here.
Invariants: a fork shares every block of its parent and samples from the same logits. A choice that could not fork
enters after its siblings, by a prefix match; so does a choice after a preemption. In a beam step all forks take their
parents' blocks before any beam is dropped or grows, so that no live beam is overwritten.
"""

from __future__ import annotations

from array import array

from octavo.core.beam_search import BeamGroup, Hypothesis
from octavo.core.kv.cache import KVCache
from octavo.core.kv.prefix import Match
from octavo.core.plan import EventKind, WaitReason
from octavo.core.request import FinishReason
from octavo.core.request_state import RequestState, Sequence
from octavo.core.state import State
from octavo.core.step import Step


def add_sequences(request: RequestState, root: Sequence) -> None:
    """Add the other choices to a new request with n > 1; for beam search, add the beam group and no sequence."""
    params = request.request.params
    if not params.beam_width:
        request.sequences += [root.fork(choice) for choice in range(1, params.num_sequences)]
        return
    request.beams = BeamGroup(params, root.limit - root.num_prompt, request.stop_ids)


# --- choices in a plan ----------------------------------------------------------------------------------------


def fork_choices(step: Step, request: RequestState, root: Sequence) -> bool:
    """Fork the choices that have not entered from `root`, whose row samples its first token.

    Return False if no choice was forked.
    """
    state, cache = step.state, step.state.cache
    children = [child for child in request.sequences if not child.is_entered]
    children = [child for child in children if child.num_committed == root.num_prompt]
    if not children or not cache.sharing:
        return False
    if cache.num_free() < len(children):  # each child will write a block of its own
        state.set_decoding(request, False)  # until every child has entered late
        step.defer(request, WaitReason.FORK_BLOCKS, len(children), cache.num_free())
        return False
    for child in children:
        cache.fork(root, child)
        child.num_computed = 0  # until the root's row is committed
        step.enter(child)
        cache.enter_tables(child)
        step.add_fork(child)
    state.totals.num_forks += len(children)
    return True


def ready_choices(step: Step, request: RequestState) -> list[Sequence]:
    """Make room for the next token of every sequence of a running request; return the sequences.

    Return no sequences if the request has to wait, or was itself preempted to make room. The room is made at once, so
    that a request is preempted before it has any row.
    """
    if not request.can_run_ahead and request.in_flight:
        return []
    cache = step.state.cache
    next_ones = [one for one in request.sequences if one.is_entered and one.num_known == one.num_scheduled + 1]
    if request.is_decoding and any(one.num_scheduled >= one.in_place_end for one in next_ones):
        while not cache.fits_together(next_ones):
            if not step.evict(request):
                return []
    return request.sequences[:]


def enter_late(step: Step, request: RequestState, sequence: Sequence) -> bool:
    """Enter a choice that was not forked, once its siblings have computed the shared tokens.

    Return False if the choice has to wait.
    """
    siblings = [other for other in request.sequences if other.is_entered]
    if any(other.num_scheduled < other.num_committed for other in siblings):
        reserve_room(step, sequence)
        return False
    match = _match(step, sequence)
    if match is not None and (_is_one_too_many(step, sequence, match) or _is_promised(step, sequence, match)):
        reserve_room(step, sequence)
        return False
    while match is None:
        if siblings:  # when a sibling ends, its blocks make room
            step.defer(request, WaitReason.FORK_BLOCKS, 1, step.state.cache.num_free())
            reserve_room(step, sequence)
            return False
        if not step.evict(request, may_wait=False):
            return False
        match = _match(step, sequence)
    step.state.cache.adopt(sequence, match)
    step.enter(sequence)
    request.wait_reason = -1
    return True


def reserve_room(step: Step, sequence: Sequence) -> None:
    """Reserve blocks for a choice that has not entered."""
    step.reserve(sequence.request, own_blocks(step.state.cache, sequence))


def own_blocks(cache: KVCache, sequence: Sequence) -> list[int]:
    """Return the blocks per group that a choice needs for itself, without the shared prompt blocks: at least one."""
    shared = sequence.num_prompt - 1 if cache.sharing else 0
    own = cache.num_blocks_for(sequence.num_known) - shared // cache.block_size
    return [max(1, own)] * cache.num_groups


def _match(step: Step, sequence: Sequence) -> Match | None:
    """Return the cached prefix of a choice, or None if the pool lacks room for the choice's next chunk."""
    cache = step.state.cache
    match = cache.match(sequence, sequence.request.match_cap(sequence), use_host=cache.may_load)
    end = match.num_tokens + step.chunk(sequence.num_known - match.num_tokens)
    return match if min(cache.room_after(match, cache.peak_blocks(end))) >= 0 else None


def _is_one_too_many(step: Step, sequence: Sequence, match: Match) -> bool:
    """Return True if the choice needs several chunks, and max_partial_prefills sequences already prefill."""
    cap, todo = step.state.limits.max_partial_prefills, sequence.num_known - match.num_tokens
    if not cap or step.chunk(todo) == todo:
        return False
    running = (one for request in step.state.running.requests for one in request.sequences)
    return sum(one.is_entered and one.num_scheduled < one.num_committed for one in running) >= cap


def _is_promised(step: Step, sequence: Sequence, match: Match) -> bool:
    """Return True if another request's row in this plan writes a block of the match; the plan may yet drop the row."""
    request = sequence.request
    others = [made for made in step.effects.published if made.owner.request is not request]
    promised = {place for made in others for place in made.places}
    return any((group, block) in promised for group, blocks in enumerate(match.blocks) for block in blocks)


# --- beams in a commit ----------------------------------------------------------------------------------------


def advance_beams(state: State, request: RequestState) -> list[Hypothesis] | None:
    """Extend a beam search by one token; every beam must have its candidates.

    When the search is over, return its n best hypotheses, best first; else return None.
    """
    group, parents = request.beams, tuple(request.sequences)
    assert group is not None
    candidates = [beam.candidates for beam in parents if beam.candidates is not None]
    chosen = group.advance(candidates, [_outputs(beam) for beam in parents])
    for beam in parents:
        beam.candidates = None
    if not chosen:
        return group.best(request.request.params.n)
    beams = _fork_beams(state, parents, chosen)
    for beam in parents:
        if beam not in beams:
            state.drop_sequence(beam, keep_slot=True)
    request.sequences = beams
    for choice, (beam, (_, token)) in enumerate(zip(beams, chosen, strict=True)):
        beam.choice = choice
        if beam.slot >= 0:
            state.updates.id_edits.extend((beam.slot, beam.num_committed, token))
        else:
            beam.slot = request.spare_slots.pop()
            state.slot_owner[beam.slot] = beam
            state.updates.sequences.append(beam)
        if beam.token_ids is not None:
            beam.token_ids.append(token)
        beam.num_committed += 1
    return None


def _fork_beams(state: State, parents: tuple[Sequence, ...], chosen: list[tuple[int, int]]) -> list[Sequence]:
    """Return one sequence for each chosen beam: a parent's first child reuses the parent, every other is a fork."""
    beams: list[Sequence] = []
    for index, _ in chosen:
        parent = parents[index]
        if parent in beams:
            beam = parent.fork(len(beams))
            state.cache.fork(parent, beam)
            state.totals.num_forks += 1
        else:
            beam = parent
        beams.append(beam)
    return beams


def finish_beams(state: State, request: RequestState, best: list[Hypothesis], now: float) -> None:
    """Log the end of each choice, then finish the request; without a hypothesis (all ids barred) it has no output."""
    ends = [_end_of(request, beam) for beam in best] or [(FinishReason.LENGTH, None)]
    for choice, (beam, (reason, stop_id)) in enumerate(zip(best[1:], ends[1:], strict=True), start=1):
        state.log(
            EventKind.CHOICE_FINISHED, request, now, num_tokens=len(beam.token_ids), finish_reason=reason,
            stop_token_id=stop_id, choice=choice,
        )  # fmt: skip
    request.num_ended_outputs = sum(len(beam.token_ids) for beam in best)
    state.finish(request, now, *ends[0])


def _end_of(request: RequestState, beam: Hypothesis) -> tuple[FinishReason, int | None]:
    """Return why a beam ended, and its stop id if the request's stop_token_ids has that id, else None."""
    stop_id = beam.stop_token_id
    reason = FinishReason.LENGTH if stop_id is None else FinishReason.STOP
    return reason, stop_id if stop_id in request.request.params.stop_token_ids else None


def _outputs(beam: Sequence) -> array[int]:
    if beam.token_ids is None:
        return array("i", [-1]) * beam.num_outputs
    return beam.token_ids[beam.num_prompt :]
