"""The choices of one request within a plan: forks from a root's logits, and those that come in by themselves.

Owns: when a choice enters, and what it shares. Does not: decide between requests (planning, intake) or move beams
(searching).
Invariants: a fork shares every block of its root and samples from the same logits; a choice that could not be forked
enters behind its siblings, by a prefix match, as after a preemption.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.core.eviction import evict, is_release_due
from octavo.core.kv.cache import Match
from octavo.core.plan import ROW_FORK, ROW_SAMPLE, EventKind, WaitReason
from octavo.core.request import RequestState, Sequence

if TYPE_CHECKING:
    from octavo.core.planning import Planner


class Choices:
    """Forks and late choices of one plan."""

    __slots__ = ("planner",)

    def __init__(self, planner: Planner) -> None:
        self.planner = planner

    def fork(self, request: RequestState, root: Sequence) -> bool:
        """The root samples behind its prompt: the other choices share its blocks and sample from the same logits."""
        planner, cache = self.planner, self.planner.state.cache
        children = [child for child in request.sequences if not child.is_entered]
        children = [child for child in children if child.num_committed == root.num_prompt]
        if not children or not cache.sharing:
            return False
        if cache.num_free() < len(children):  # each will write a block of its own
            planner.state.stop_decoding(request)  # until they have come in by themselves
            self._wait(request, len(children))
            return False
        end = root.num_scheduled
        for child in children:
            cache.fork(root, child)
            child.num_computed = 0  # until the root's row is committed
            planner.announce(child)
            cache.announce(child)
            planner.rows.append(child)
            planner.starts.append(end)
            planner.counts.append(0)
            planner.flags.append(ROW_SAMPLE | ROW_FORK)
            child.num_pending += 1
            child.in_flight += 1
        planner.state.totals.num_forks += len(children)
        return True

    def ready(self, request: RequestState) -> list[Sequence]:
        """The sequences of a running request, with room for the next token of each made at once.

        So a request that has to go for lack of room goes whole, before any of its rows is made. None if it went.
        """
        if not request.can_run_ahead and request.in_flight:
            return []
        planner, cache = self.planner, self.planner.state.cache
        next_ones = [one for one in request.sequences if one.is_entered and one.num_known == one.num_scheduled + 1]
        if request.is_decoding and any(one.num_scheduled >= one.block_end for one in next_ones):
            while not cache.fits_together(next_ones):
                if is_release_due(planner) or not evict(planner, request):
                    return []
        return request.sequences[:]

    def enter(self, request: RequestState, sequence: Sequence) -> bool:
        """Let in a choice that was not forked, once its siblings have computed what it shares with them."""
        planner = self.planner
        siblings = [other for other in request.sequences if other.is_entered]
        if any(other.num_scheduled < other.num_committed for other in siblings):
            self.keep_room(request, sequence)
            return False
        match = self._match(sequence)
        if match is not None and (self._is_one_too_many(sequence, match) or self._is_promised(request, match)):
            self.keep_room(request, sequence)
            return False
        while match is None:
            if siblings:  # they will end, and then there is room
                self._wait(request, 1)
                self.keep_room(request, sequence)
                return False
            if not evict(planner, request):
                return False
            match = self._match(sequence)
        planner.announce(sequence)
        planner.published += planner.state.cache.adopt(sequence, match)
        planner.state.cache.count_hit(sequence.num_known, match.num_tokens)
        request.wait_reason = -1
        return True

    def _is_one_too_many(self, sequence: Sequence, match: Match) -> bool:
        """Whether the choice would be computed in parts, and enough sequences are already."""
        planner, cap = self.planner, self.planner.state.limits.max_partial_prefills
        todo = sequence.num_known - match.num_tokens
        if not cap or planner.chunk(todo) == todo:
            return False
        running = (one for request in planner.state.running.requests for one in request.sequences)
        return sum(one.is_entered and one.num_scheduled < one.num_committed for one in running) >= cap

    def _is_promised(self, request: RequestState, match: Match) -> bool:
        """Whether another row of this very plan is to write what was found: that row may still be taken back."""
        promised = {
            (entry.group, entry.block) for entry in self.planner.published if entry.owner.request is not request
        }
        return any((group, block) in promised for group, blocks in enumerate(match.blocks) for block in blocks)

    def keep_room(self, request: RequestState, sequence: Sequence) -> None:
        """Keep blocks for a choice that is still to come from those who might be let in: at least its own tail."""
        cache = self.planner.state.cache
        shared = sequence.num_prompt - 1 if cache.sharing else 0
        own = cache.num_blocks_for(sequence.num_known) - shared // cache.block_size
        self.planner.keep(request, [max(1, own)] * cache.num_groups)

    def _match(self, sequence: Sequence) -> Match | None:
        """What a choice finds in the cache, if there is room for its next chunk behind that."""
        planner, cache = self.planner, self.planner.state.cache
        match = cache.match(sequence, sequence.request.match_cap(sequence), use_host=cache.may_load)
        end = match.num_tokens + planner.chunk(sequence.num_known - match.num_tokens)
        return match if min(cache.room_after(match, cache.peak_blocks(end))) >= 0 else None

    def _wait(self, request: RequestState, needed: int) -> None:
        planner, reason = self.planner, WaitReason.FORK_BLOCKS
        planner.held[reason] = planner.held.get(reason, 0) + 1
        available = planner.state.cache.num_free()
        request.wait_numbers = (needed, available, planner.state.step)
        if request.wait_reason != reason:
            request.wait_reason = reason
            planner.event(EventKind.DEFERRED, request, reason=reason, needed=needed, available=available)


def is_caught_up(request: RequestState, sequence: Sequence, may_fork: bool) -> bool:
    """Whether, with this sequence's row, every choice has all it knows scheduled, or will fork from this one."""
    at_fork = may_fork and sequence.num_known == sequence.num_prompt  # nothing sampled yet, in flight neither
    return all(
        other is sequence
        or (other.is_entered and other.num_scheduled >= other.num_committed)
        or (at_fork and not other.is_entered and other.num_committed == sequence.num_prompt)
        for other in request.sequences
    )
