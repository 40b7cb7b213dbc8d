"""Beam search on the scheduler's sequences: forks by parent, dead beams, and the end.

Owns: how a step of the search (see beam_search) moves sequences, blocks and slots. Does not: choose beams.
Invariant: every fork shares its parent's blocks before any beam is dropped or grows, so that no order of
forks can overwrite a beam that lives.
"""

from __future__ import annotations

from array import array

from octavo.core.beam_search import Hypothesis
from octavo.core.plan import EventKind
from octavo.core.request import FinishReason, RequestState, Sequence
from octavo.core.state import State


def advance(state: State, request: RequestState) -> bool:
    """Take one token further; every beam has its candidates. True when the search is over."""
    group, parents = request.beams, tuple(request.sequences)
    assert group is not None
    candidates = [beam.candidates for beam in parents if beam.candidates is not None]
    step = group.advance(candidates, [_outputs(beam) for beam in parents])
    for beam in parents:
        beam.candidates = None
    if step.is_over:
        return True
    beams = _fork(state, request, parents, step.next)
    lasting = [parents[index] for index in dict.fromkeys(index for index, _ in step.next)]
    for beam in parents:
        if beam not in lasting:
            state.drop_sequence(beam, keep_slot=True)
    request.sequences = beams
    for choice, (beam, (_, token)) in enumerate(zip(beams, step.next, strict=True)):
        beam.choice = choice
        if beam.slot >= 0:
            state.id_edits.extend((beam.slot, beam.num_committed, token))
        else:
            state.seat(beam, request.spare_slots.pop())
            state.announced.append(beam)
        if beam.token_ids is not None:
            beam.token_ids.append(token)
        beam.num_committed += 1
    return False


def _fork(
    state: State, request: RequestState, parents: tuple[Sequence, ...], chosen: list[tuple[int, int]]
) -> list[Sequence]:
    """One sequence for each beam chosen: a parent itself for its first child, a fork for every other."""
    used: dict[int, None] = {}
    beams = []
    for index, _ in chosen:
        parent = parents[index]
        if index not in used:
            used[index] = None
            beams.append(parent)
            continue
        child = parent.fork(len(beams))
        state.cache.fork(parent, child)
        state.totals.num_forks += 1
        beams.append(child)
    return beams


def best(request: RequestState) -> list[Hypothesis]:
    """The beams that the request asked for, best first."""
    assert request.beams is not None
    return request.beams.best(request.request.params.n)


def finish(state: State, request: RequestState, found: list[Hypothesis], now: float) -> None:
    """End a search's choices and then the request. No hypothesis at all (every id was barred) ends it empty."""
    for choice, beam in enumerate(found[1:], start=1):
        state.tell(
            EventKind.CHOICE_FINISHED,
            request,
            now,
            num_tokens=len(beam.token_ids),
            finish_reason=_reason(beam),
            stop_token_id=_asked_stop(request, beam),
            choice=choice,
        )
    request.num_ended_outputs = sum(len(beam.token_ids) for beam in found)
    if found:
        state.finish(request, now, _reason(found[0]), _asked_stop(request, found[0]))
    else:
        state.finish(request, now, FinishReason.LENGTH)


def _reason(beam: Hypothesis) -> FinishReason:
    return FinishReason.LENGTH if beam.stop_token_id is None else FinishReason.STOP


def _asked_stop(request: RequestState, beam: Hypothesis) -> int | None:
    """The stop id to report: one that was asked for, not the model's own end."""
    return beam.stop_token_id if beam.stop_token_id in request.request.params.stop_token_ids else None


def _outputs(beam: Sequence) -> array[int]:
    if beam.token_ids is None:
        return array("i", [-1]) * beam.num_outputs
    return beam.token_ids[beam.num_prompt :]
