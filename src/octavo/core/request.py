"""Request (what was submitted, frozen), RequestState and Sequence (how far the scheduler is with it).

Owns: the request's fields and their ranges; the per-sequence counters that the scheduler moves.
Does not: decide anything, hold text, or know tensors.
Invariants: num_computed <= num_scheduled <= num_known; num_known = num_committed + num_pending;
a sequence that is not running holds no blocks and no slot.
"""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, field
from enum import IntEnum, IntFlag
from typing import NamedTuple

from octavo.core.beam_search import BeamGroup
from octavo.core.ngrams import DraftHistory
from octavo.core.sampling_params import SamplingParams, check
from octavo.errors import ErrorKind, InvalidRequestError

__all__ = [
    "FinishError", "FinishReason", "Request", "RequestState", "SamplingParams", "Sequence", "Span", "Status", "Want",
]  # fmt: skip


MAX_RETURNS = 3  # preemptions after which a request is the last to go (PolicyGuard.victim_rank, start.growth_blocks)


class FinishReason(IntEnum):
    """Why a request ended; exactly one per request."""

    STOP = 0  # end-of-sequence id, a stop id or a stop string
    LENGTH = 1
    CANCELLED = 2
    TIMEOUT = 3  # queue_timeout or deadline passed
    ERROR = 4


@dataclass(frozen=True, slots=True)
class FinishError:
    """The error of a request that failed: a kind for programs, a message for people."""

    kind: ErrorKind
    message: str


class Want(IntFlag):
    """What a request wants computed."""

    SAMPLE = 1
    SCORE = 2  # log-probabilities of its own prompt
    POOL = 4  # an embedding


_SAMPLE, _SCORE, _POOL = (want.value for want in (Want.SAMPLE, Want.SCORE, Want.POOL))


class Status(IntEnum):
    """Which queue a request is in."""

    WAITING = 0
    RUNNING = 1
    FINISHED = 2


@dataclass(frozen=True, slots=True)
class Span:
    """One media item of a prompt: positions [start, start + length) and its content key."""

    start: int
    length: int
    key: bytes


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt with its parameters, as the scheduler sees it.

    Carries token ids (`prompt_token_ids`), or only `num_prompt_tokens` and `block_keys` (recordings, simulation,
    public traces). `block_keys` holds the key of each full prompt block if the frontend computed them, else None: they
    are computed on admission; without ids they may include the outputs' blocks. `emitted_token_ids` are outputs of an
    earlier epoch: the request resumes after them, with the prompt's boundary kept. Times are seconds on the
    scheduler's clock: `deadline` is a point in time, `queue_timeout` counts from `arrival` to the first admission.
    `cache_salt` separates tenants in the prefix cache. `score_from` is the first prompt position whose log-
    probability a SCORE request asks for. `ttft_objective` and `tpot_objective` are what the deadline policy aims
    at: seconds to the first token, and for each token after it.
    """

    request_id: str
    prompt_token_ids: array[int] | None
    params: SamplingParams = field(default_factory=SamplingParams)
    arrival: float = 0.0
    num_prompt_tokens: int = 0
    block_keys: tuple[bytes, ...] | None = None
    emitted_token_ids: array[int] | None = None
    eos_token_ids: tuple[int, ...] = ()
    wants: Want = Want.SAMPLE
    priority: int = 0
    tenant: str = ""
    cache_salt: bytes = b""
    adapter_id: int = 0
    spans: tuple[Span, ...] = ()
    score_from: int = 1
    deadline: float | None = None
    queue_timeout: float | None = None
    ttft_objective: float | None = None
    tpot_objective: float | None = None

    def __post_init__(self) -> None:
        for name in ("arrival", "deadline", "queue_timeout", "ttft_objective", "tpot_objective"):
            value = getattr(self, name)
            check(value is None or not math.isnan(value), name, value, "give a time in seconds")
        if self.prompt_token_ids is not None:
            if not isinstance(self.prompt_token_ids, array) or self.prompt_token_ids.typecode != "i":
                object.__setattr__(self, "prompt_token_ids", _pack_ids(self.prompt_token_ids, "prompt_token_ids"))
            assert self.prompt_token_ids is not None
            object.__setattr__(self, "num_prompt_tokens", len(self.prompt_token_ids))

    @property
    def queue_until(self) -> float | None:
        """The time at which its queue timeout ends it unless it was admitted; None for a request that has outputs."""
        if self.queue_timeout is None or self.emitted_token_ids:
            return None
        return self.arrival + self.queue_timeout


def _pack_ids(ids: object, param: str) -> array[int]:
    try:
        return array("i", ids)  # type: ignore[call-overload, no-any-return]
    except (TypeError, OverflowError) as error:
        raise InvalidRequestError(f"{param} must be a list of 32-bit token ids ({error})", param) from None


class Sequence:
    """One live continuation of a request: its counters, block tables and executor slot.

    `token_ids` holds committed ids (prompt and outputs), or None for a request known by length only.
    `num_pending` counts ids sampled by plans still in flight, without drafts. Positions [0, num_computed) have
    committed KV; [num_computed, num_scheduled) are being written by plans in flight. `is_entered`: the executor
    knows it. `host_tables` hold its blocks while it is swapped out. `candidates` wait for a beam's siblings.
    `num_drafts`: positions after num_scheduled that drafts in flight write; `draft_history`: where drafts come from.
    """

    __slots__ = (
        "candidates", "capacity", "choice", "draft_history", "first_live", "host_tables", "in_flight", "in_place_end",
        "is_entered", "keys", "limit", "num_committed", "num_computed", "num_drafts", "num_pending", "num_prompt",
        "num_published", "num_scheduled", "request", "retried_at", "slot", "stale", "tables", "token_ids",
    )  # fmt: skip

    def __init__(self, request: RequestState, choice: int, num_groups: int) -> None:
        asked = request.request
        self.request = request
        self.choice = choice
        self.slot = -1
        self.is_entered = False
        self.num_prompt = asked.num_prompt_tokens
        self.token_ids: array[int] | None = None
        if asked.prompt_token_ids is not None:
            self.token_ids = asked.prompt_token_ids[:]
            if asked.emitted_token_ids is not None:
                self.token_ids.extend(asked.emitted_token_ids)
        self.num_committed = self.num_prompt + len(asked.emitted_token_ids or ())
        self.num_pending = 0
        self.num_scheduled = 0
        self.num_computed = 0
        self.num_published = 0
        self.num_drafts = 0
        self.draft_history: DraftHistory | None = None
        self.capacity = 0
        self.in_flight = 0
        self.stale = 0  # rows in flight whose results must be dropped
        self.retried_at = -1  # committed ids when a row of it failed last
        self.in_place_end = 0  # below it a decode needs no block, writes no shared one and ends nothing by length
        self.limit = 0
        self.keys: list[bytes] = []
        self.tables: list[list[int]] = [[] for _ in range(num_groups)]
        self.first_live = [0] * num_groups  # per group, the first table entry that still has a block
        self.host_tables: list[list[int]] = []
        self.candidates: tuple[tuple[int, ...], tuple[float, ...]] | None = None

    @property
    def num_known(self) -> int:
        """Prompt and output tokens, those still in flight included."""
        return self.num_committed + self.num_pending

    @property
    def num_outputs(self) -> int:
        """Output tokens committed."""
        return self.num_committed - self.num_prompt

    @property
    def is_void(self) -> bool:
        """Return True if its rows in flight change nothing: its request has ended, or they were discarded."""
        return self.stale > 0 or self.request.status == Status.FINISHED

    def reset_tables(self) -> None:
        """Note that the sequence holds no blocks, so none of its tokens are computed."""
        self.capacity = self.in_place_end = self.num_published = 0
        self.num_scheduled = self.num_computed = self.num_drafts = 0
        self.first_live = [0] * len(self.tables)

    def fork(self, choice: int) -> Sequence:
        """Return a sequence of the same request with the same ids, without blocks."""
        child = Sequence(self.request, choice, len(self.tables))
        child.token_ids = None if self.token_ids is None else self.token_ids[:]
        child.num_committed = self.num_committed
        child.limit = self.limit
        return child


@dataclass(frozen=True, slots=True)
class BlockShortage:
    """Why admission had no room for a request: `deficit` blocks were missing in `group`.

    `freed` is the pool's count of freed blocks at that time, `kept` the blocks that had to stay free.
    """

    reason: int
    group: int
    deficit: int
    freed: int
    kept: int


class PrefixSeen(NamedTuple):
    """What the cache had of a request when it was last looked up: tokens, the key that ended the match.

    `num_published` is the cache's count of published blocks at that time.
    """

    num_tokens: int
    missing: bytes | None
    num_published: int


class RequestState:
    """The scheduler's state of one request. `rank` = (the policy's key, order of arrival), unique among open requests.

    `sequences` are those that have not ended, oldest choice first. `num_scored` is the first prompt position whose
    log-probability must still be returned. `seen` is the last look into the cache, `shortage` what
    it lacked then: until that can have changed, no look is needed.
    `num_bypassed` counts the steps since its last admission in which a later request was admitted before it.
    `is_passable`: it waits at a gate that lets others be admitted before it (see gates).
    `can_run_ahead`: a row may be planned while the id before it is in flight; not for beams, and not where a grammar
    decides which ids may follow.
    """

    __slots__ = (
        "beams", "cached_tokens", "can_run_ahead", "first_scheduled_at", "has_several", "is_decoding", "is_passable",
        "is_swapped",
        "lane", "max_tokens", "may_draft", "name", "num_bypassed", "num_ended_outputs", "num_preemptions", "num_scored",
        "order", "pools", "rank", "request", "samples", "scores", "seen", "sequences", "shortage", "spare_slots",
        "status", "stop_ids", "ticket", "wait_numbers", "wait_reason",
    )  # fmt: skip

    def __init__(self, request: Request, order: int) -> None:
        self.request = request
        self.name = request.request_id
        self.order = order
        self.rank: tuple[tuple[float, ...], int] = ((), order)
        self.lane = ""
        self.status = Status.WAITING
        self.sequences: list[Sequence] = []
        self.beams: BeamGroup | None = None
        self.spare_slots: list[int] = []  # slots of beams that do not exist yet, or no longer
        params = request.params
        self.has_several = params.num_sequences > 1 or params.beam_width > 0
        # Looked at for every row, and a flag of an enum costs ten times as much.
        wants = int(request.wants)
        self.samples = bool(wants & _SAMPLE)
        self.scores = bool(wants & _SCORE)
        self.pools = bool(wants & _POOL)
        self.stop_ids = frozenset((*(() if params.ignore_eos else request.eos_token_ids), *params.stop_token_ids))
        self.can_run_ahead = not (params.grammar or params.beam_width)
        self.may_draft = False
        self.is_decoding = False
        self.is_passable = False
        self.is_swapped = False
        self.max_tokens = 0
        self.ticket = 0  # of its latest entry in the waiting queue
        self.num_scored = request.score_from
        self.cached_tokens = 0
        self.num_preemptions = 0
        self.num_ended_outputs = 0  # of choices that ended
        self.first_scheduled_at: float | None = None
        self.wait_numbers = (0, 0, 0)  # needed, available, step: as of the last look
        self.forget_waiting()

    def forget_waiting(self) -> None:
        """Reset what concerns one stay in the waiting queue: it starts, or ends."""
        self.num_bypassed = 0
        self.wait_reason = -1
        self.seen: PrefixSeen | None = None
        self.shortage: BlockShortage | None = None

    @property
    def in_flight(self) -> int:
        """Rows of this request in plans not yet committed."""
        return sum(sequence.in_flight for sequence in self.sequences)

    @property
    def num_slots(self) -> int:
        """Slots that it takes while it runs: one for each sequence, and for each beam that does not exist yet."""
        return max(len(self.sequences), self.request.params.beam_width)

    def awaits_id(self, sequence: Sequence) -> bool:
        """Return True if no row may follow the id in flight.

        It is the last one (the sequence ends by length), or the next row depends on it.
        """
        is_last = sequence.num_known >= sequence.limit and self.samples
        return is_last or (sequence.num_pending > 0 and not self.can_run_ahead)

    def match_cap(self, sequence: Sequence) -> int:
        """Return the longest usable prefix match: a score needs the logits before the first position to be scored."""
        if self.scores and self.num_scored < sequence.num_prompt:
            return self.num_scored - 1
        return sequence.num_known
