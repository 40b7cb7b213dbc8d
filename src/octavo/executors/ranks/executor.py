"""RankedExecutor: the executor of rank 0, which broadcasts each plan and runs its own share.

Owns: opening all ranks, the order of plans and answers, the comparison of digests, and which ids the stages that do
not sample lack. Does not: compute, watch the processes (group does), or know the model.
Rank 0 is in the last stage, so that it samples, and no result has to be sent to it.
Invariants: every rank gets the same plans in the same order. An answer that is missing or unequal, or an error of one
rank on which the ranks have not voted, ends the epoch with EngineDeadError. With several stages rank 0 runs its share
when the result is collected: by then the plans after it have been sent, and earlier stages compute them.
"""

from __future__ import annotations

import os
import time
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import msgspec

from octavo.config import ParallelConfig
from octavo.core.plan import ROW_BEAM, ROW_SAMPLE, StepPlan, StepResult
from octavo.errors import EngineDeadError, EngineError
from octavo.executors.protocol import Capacity, ExecutorSpec, PoolBlocks, RankPlace, Ticket
from octavo.executors.ranks import frames
from octavo.executors.ranks.frames import Begin, Done, Failure, Kind, RankRefusal
from octavo.executors.ranks.group import RankGroup, RankPeer
from octavo.executors.ranks.process import OwnRank
from octavo.grammar.matcher import Masks

SETTLE_S = 5.0  # time in which an opening rank may name the reason for which another one failed


@dataclass(slots=True)
class RankedTicket:
    """A plan that was sent to all ranks; `own` is the ticket of rank 0's share once that has begun."""

    plan: StepPlan
    digest: bytes
    own: Ticket | None = None
    error: Exception | None = None
    has_begun: bool = False
    masks: Masks | None = field(default=None, repr=False)


class RankedExecutor:
    """See executors.protocol.Executor.

    `begins` has what each other rank is to do, without the spec; `make_own` makes rank 0's own executor, which joins
    the others.
    """

    def __init__(
        self, parallel: ParallelConfig, group: RankGroup, begin: Begin, make_own: Callable[[Begin], OwnRank]
    ) -> None:
        self.group = group
        self._parallel = parallel
        self._begin = begin
        self._make_own = make_own
        self._own: OwnRank | None = None
        self._is_staged = parallel.pipeline_parallel_size > 1
        self._in_flight: deque[RankedTicket] = deque()  # not collected
        self._sampled = array("i")  # flat (slot, position, id) that the other stages lack
        self._device = ""
        self._last_step = -1
        self._step_s = 0.0

    def open(self, spec: ExecutorSpec) -> Capacity:
        """Open all ranks; the pool has the blocks that every rank can hold. Raises the first rank's error."""
        for peer in self.group.peers:
            begin = msgspec.structs.replace(self._begin, rank=peer.rank, spec=spec)
            self._send(peer, Kind.BEGIN, frames.pack(begin))
        try:
            own = self._own = self._make_own(msgspec.structs.replace(self._begin, rank=0, spec=spec))
            blocks = own.executor.load(spec)
            for peer in self.group.peers:
                blocks = blocks.least(frames.unpack(PoolBlocks, self._opening(peer, Kind.LOADED)))
            for peer in self.group.peers:
                self._send(peer, Kind.ALLOCATE, frames.pack(blocks))
            capacity = own.executor.allocate(blocks)
        except RuntimeError as error:  # of torch.distributed: another rank has ended; its own reason is better
            raise self._opening_error(error) from None
        self._device, weight_bytes = capacity.device, capacity.weight_bytes
        for peer in self.group.peers:
            other = frames.unpack(Capacity, self._opening(peer, Kind.OPENED))
            peer.device, peer.is_open = other.device, True
            weight_bytes += other.weight_bytes
        ranks = [RankPlace(0, "localhost", os.getpid(), capacity.device)]
        ranks += [RankPlace(peer.rank, peer.host, peer.pid, peer.device) for peer in self.group.peers]
        return replace(capacity, weight_bytes=weight_bytes, ranks=tuple(ranks))

    def submit(self, plan: StepPlan) -> Ticket:
        """Send the plan to all ranks, and run rank 0's share unless there are several stages."""
        self.group.check()
        ticket = RankedTicket(plan, b"")
        body = frames.encode_plan(plan)
        staged = frames.encode_plan(plan, self._sampled) if self._sampled else body
        self._sampled = array("i")
        for peer in self.group.peers:
            self._send(peer, Kind.PLAN, body if self._samples(peer) else staged)
        # as the ranks compute it: decoding makes floats of whole numbers, such as temperature=0, in new sequences
        ticket.digest = (frames.decode_plan(body)[0] if plan.new_sequences else plan).digest()
        self._last_step = plan.step
        self._in_flight.append(ticket)
        if not self._is_staged:
            self._run_share(ticket)
        return ticket

    def supply(self, ticket: Ticket, masks: object) -> None:
        """Send the masks to all ranks that sample; they are applied before the ticket's rows are sampled."""
        assert isinstance(ticket, RankedTicket) and isinstance(masks, Masks), "a ticket of submit, and masks"
        if ticket.error is not None:
            return  # no rank samples
        body = frames.encode_masks(masks)
        for peer in self.group.peers:
            if self._samples(peer):
                self._send(peer, Kind.MASKS, body)
        ticket.masks = masks
        if ticket.has_begun:
            self._supply_own(ticket, masks)

    def collect(self, ticket: Ticket) -> StepResult:
        """Return the result of rank 0's share, once every rank has executed the same. Raises EngineDeadError."""
        assert isinstance(ticket, RankedTicket) and ticket is self._in_flight[0], "tickets are collected in order"
        self._run_share(ticket)
        self._in_flight.popleft()
        result = self._collect_own(ticket)
        expected = ticket.digest if result is None else frames.result_digest(ticket.digest, result)
        for peer in self.group.peers:
            self._check_answer(peer, ticket, expected if self._samples(peer) else ticket.digest)
        if ticket.error is not None:
            raise ticket.error
        assert result is not None
        if self._is_staged:
            self._note_sampled(ticket.plan, result)
        return result

    def close(self) -> None:
        """End all ranks. Idempotent."""
        self.group.close()
        if self._own is not None:
            own, self._own = self._own, None
            own.executor.close()
            own.leave()

    def report(self) -> dict[str, dict[str, object]]:
        """Return the state of each rank by its number, for the engine's statistics."""
        names = ("rank", "where", "pid", "device", "state", "step", "step_s", "bytes")
        state = "running" if self.group.failure is None else "lost"
        rows = [(0, "localhost", os.getpid(), self._device, state, self._last_step, self._step_s, 0)]
        for peer in self.group.peers:
            num_bytes = peer.plans.num_bytes + peer.pings.num_bytes
            rows.append((peer.rank, peer.host, peer.pid, peer.device, state, peer.step, peer.step_s, num_bytes))
        return {str(row[0]): dict(zip(names, row, strict=True)) for row in rows}

    # --- one step

    def _run_share(self, ticket: RankedTicket) -> None:
        """Begin rank 0's share of the ticket's plan."""
        if ticket.has_begun:
            return
        ticket.has_begun, started_at = True, time.perf_counter()
        own = self._running()
        try:
            ticket.own = own.executor.submit(ticket.plan)
            if ticket.masks is not None:
                self._supply_own(ticket, ticket.masks)
        except Exception as error:  # the executor shell
            self._fail(ticket, own, error)
        self._step_s = time.perf_counter() - started_at

    def _supply_own(self, ticket: RankedTicket, masks: Masks) -> None:
        self._running().executor.supply(ticket.own, masks)

    def _collect_own(self, ticket: RankedTicket) -> StepResult | None:
        own = self._running()
        if ticket.error is not None:
            return None
        try:
            return own.executor.collect(ticket.own)
        except Exception as error:  # the executor shell
            self._fail(ticket, own, error)
            return None

    def _fail(self, ticket: RankedTicket, own: OwnRank, error: Exception) -> None:
        """Keep a failure that all ranks voted on; any other ends the epoch, since other ranks may wait for this one."""
        if not self.group.peers or own.has_voted_failure():
            ticket.error = error
            return
        why = f"rank 0 failed in step {ticket.plan.step}: {type(error).__name__}: {error}"
        raise self.group.lose_after(why) from error

    def _check_answer(self, peer: RankPeer, ticket: RankedTicket, expected: bytes) -> None:
        """Wait for a rank's answer and compare it. Raises EngineDeadError."""
        step = ticket.plan.step
        kind, body = self._receive(peer)
        if kind is Kind.FAILED and ticket.error is not None:
            frames.unpack(Failure, body)
            return
        if kind is not Kind.DONE or ticket.error is not None:
            what = frames.unpack(Failure, body).message if kind is Kind.FAILED else "it did not fail as rank 0 did"
            raise self.group.lose(f"{peer.name} differs in step {step}: {what}")
        done = Done.unpack(body)
        if done.step != step or done.digest != expected:
            raise self.group.lose(
                f"{peer.name} executed another step than rank 0: step {done.step} with digest {done.digest.hex()}, "
                f"expected step {step} with {expected.hex()}"
            )

    def _note_sampled(self, plan: StepPlan, result: StepResult) -> None:
        """Note the sampled ids of a step for the stages that do not sample. Beams' ids come with the next plan.

        A plan already sent may have given a slot to another sequence, whose ids must not be overwritten.
        """
        taken = {slot for later in self._in_flight for slot in later.plan.freed_slots}
        taken |= {new.slot for later in self._in_flight for new in later.plan.new_sequences}
        ids = result.token_ids or ()
        counts, at, sampling = result.num_token_ids, 0, 0
        for row in plan.rows():
            if not row.flags & ROW_SAMPLE:
                continue
            count = 1 if counts is None else counts[sampling]
            sampling += 1
            if not row.flags & ROW_BEAM and row.slot not in taken:
                first = row.start + row.count - len(row.drafts)
                for offset in range(count):
                    self._sampled.extend((row.slot, first + offset, ids[at + offset]))
            at += count

    # --- messages

    def _samples(self, peer: RankPeer) -> bool:
        return peer.rank < self._parallel.tensor_parallel_size

    def _send(self, peer: RankPeer, kind: Kind, body: bytes) -> None:
        try:
            peer.plans.send(kind, body)
        except (OSError, EngineError) as error:
            raise self._lost_connection(peer, error) from None

    def _receive(self, peer: RankPeer) -> tuple[Kind, bytes]:
        try:
            return peer.plans.receive()
        except (EOFError, OSError, EngineError) as error:
            raise self._lost_connection(peer, error) from None

    def _lost_connection(self, peer: RankPeer, error: Exception) -> EngineDeadError:
        """Return the error of a lost rank. The watching thread knows more about the end than the connection does."""
        return self.group.lose_after(f"{peer.name} ended: {error}")

    def _running(self) -> OwnRank:
        if self._own is None:
            raise EngineError("the executor is not open")
        return self._own

    # --- opening

    def _opening(self, peer: RankPeer, expected: Kind) -> bytes:
        """Wait for a frame of a rank that opens. Raises the rank's error."""
        kind, body = self._receive(peer)
        if kind is Kind.REFUSED:
            raise frames.unpack(RankRefusal, body).error(peer.name)
        if kind is not expected:
            raise self.group.lose(f"{peer.name} sent a frame {kind.name} while it opened")
        return body

    def _opening_error(self, error: RuntimeError) -> Exception:
        """Return why another rank could not open, if one says so within SETTLE_S; else the given error."""
        for peer in self.group.peers:
            peer.plans.set_timeout(SETTLE_S)
            try:
                kind, body = peer.plans.receive()
            except (EOFError, OSError, EngineError):
                continue
            if kind is Kind.REFUSED:
                return frames.unpack(RankRefusal, body).error(peer.name)
        return EngineDeadError(self.group.failure or f"the ranks cannot be opened together: {error}")
