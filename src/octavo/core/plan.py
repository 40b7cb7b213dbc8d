"""The data that scheduler and executor exchange: StepPlan, StepResult, and the Events of a commit.

Owns: the columns, their meaning and their digest. Row is a lazy view of one row, for code off the hot path.
Does not: decide or compute. A plan is never changed after plan() has returned it.
An executor applies a plan in this order: freed slots, new sequences, id edits, swap-outs, host loads, block copies,
table edits, encoder frees, encode jobs, then the forward pass with its KV writes. Copies read the blocks as they were
before the step's KV writes. Freeing a free slot is harmless, and a new sequence resets its slot, so that a failed
step's effects can be sent again.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from hashlib import blake2b
from itertools import islice
from operator import attrgetter

from octavo.core.request import FinishError, FinishReason, SamplingParams

ROW_SAMPLE = 1  # sample one token from the logits of the row's last position
ROW_CARRY = 2  # the row's only input id is the id that its slot sampled last, maybe still on the device
ROW_SCORE = 4  # give log-probabilities of the prompt tokens after the row's positions
ROW_POOL = 8  # give the pooled hidden state at the row's last position
ROW_FORK = 16  # no tokens of its own: samples from the logits of the nearest row before it that has tokens
ROW_BEAM = 32  # with ROW_SAMPLE: return candidates; the next plan's id_edits have the ids that the beam search chose
DROP_BLOCK = -1  # block number of a table edit that drops the entry


class WaitReason(IntEnum):
    """Why a request waits, or a plan is empty."""

    TOKEN_BUDGET = 0
    SEQUENCE_CAP = 1
    KV_BLOCKS = 2
    HEADROOM = 3
    KV_READ_BUDGET = 4
    ENCODER_BUDGET = 5
    ADAPTER_SLOTS = 6
    PARTIAL_PREFILL_CAP = 7
    MODALITY = 8
    COMPOSITION = 9
    GRAMMAR = 10
    SWAP_SPACE = 11
    HOST_LOAD = 12
    FORK_BLOCKS = 13
    PREEMPTED_THIS_STEP = 14
    UNCOMMITTED = 15
    BARRIER = 16
    BEHIND = 17
    PAUSED = 18
    DRAINING = 19
    IDLE = 20
    EXCLUDED = 21  # outside plan(only=...)
    KV_TRANSFER = 22  # its KV has not arrived from another engine


class EventKind(IntEnum):
    """Kinds of scheduling decision."""

    ADMITTED = 0
    CHUNKED = 1
    DEFERRED = 2
    PREEMPTED = 3
    SWAPPED = 4
    RESUMED = 5
    FINISHED = 6
    CHOICE_FINISHED = 7


@dataclass(slots=True)  # not frozen: that takes four times as long to make
class Event:
    """One decision about one request; never changed. Each kind sets the first four fields and these:

    ADMITTED, RESUMED: num_tokens = granted, cached_tokens. CHUNKED: num_tokens = granted, needed = left.
    DEFERRED: reason, needed, available. PREEMPTED: by, num_tokens = tokens to recompute, reason.
    SWAPPED: by, num_tokens = positions kept on the host. FINISHED: finish_reason, stop_token_id, num_tokens = outputs,
    cached_tokens, error. CHOICE_FINISHED: choice, finish_reason, stop_token_id, num_tokens = outputs.
    FINISHED ends the request and every choice that is still open; CHOICE_FINISHED ends one choice before its request.
    """

    kind: EventKind
    request_id: str
    time: float
    step: int
    reason: WaitReason | None = None
    num_tokens: int = 0
    needed: int = 0
    available: int = 0
    by: str | None = None
    cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    error: FinishError | None = None
    choice: int = 0

    @property
    def message(self) -> str | None:
        """The text of the event's error, or None."""
        return None if self.error is None else self.error.message


@dataclass(frozen=True, slots=True)
class EncodeJob:
    """One media item to encode in a step: the slot that needs it, the index of its span, and its content key."""

    slot: int
    span: int
    key: bytes
    num_tokens: int


@dataclass(frozen=True, slots=True)
class NewSequence:
    """All data of a new or resumed sequence for the executor; the plan's edits have its block table.

    `token_ids` are all known ids, or None if the request has no token ids; outputs begin at num_prompt.
    """

    slot: int
    request_id: str
    choice: int
    num_prompt: int
    token_ids: array[int] | None
    params: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    adapter_id: int = 0


@dataclass(frozen=True, slots=True)
class Row:
    """Lazy view of one row: slot, half-open positions [start, start + count), its flags, and its drafts."""

    slot: int
    start: int
    count: int
    flags: int
    drafts: tuple[int, ...] = ()


int_column: Callable[[], array[int]] = partial(array, "i")  # an empty one


@dataclass(slots=True)
class StepPlan:
    """One step as packed int32 columns.

    slots, starts, counts and flags have one entry per row; num_drafts is empty or has one entry per row.
    A row with k drafts has the flag ROW_SAMPLE alone and k + 1 positions: one known id, then its k drafts, which are in
    draft_token_ids, row by row. The executor samples after each position. It returns the drafts that equal the samples
    before them, up to the first difference, and then one sample: 1 to k + 1 ids. The sequence's next row begins after
    the returned ids and overwrites the positions of rejected drafts.
    edits: flat (slot, group, index, block); an index equal to the table's length appends, a lower index replaces, and
    the block DROP_BLOCK drops the entry. id_edits: flat (slot, position, token id): ids that the host chose, each
    appended to its sequence. copies: flat (group, source, destination). swap_outs: flat (group, device block, host
    block). host_loads: flat (group, host block, device block). A plan has swap-outs or host loads, never both.
    encode_jobs run before the rows; encoder_frees are keys whose outputs may be dropped.
    shared_prefixes, if requested: (leading blocks, indices of the rows that share them), for cascade attention.
    num_common_blocks: leading blocks that all rows share. Both describe cache group 0.
    num_query_tokens and num_kv_read are totals over rows, in tokens. `is_fast_path`: every row has one token, within
    the captured range (S14). `waits`: an empty plan's (reason, number of requests) pairs. `wake_at`: the time of the
    next deadline, in seconds. `events`: the decisions since the last commit or plan, not part of the digest.
    """

    step: int
    now: float
    slots: array[int] = field(default_factory=int_column)
    starts: array[int] = field(default_factory=int_column)
    counts: array[int] = field(default_factory=int_column)
    flags: array[int] = field(default_factory=int_column)
    num_drafts: array[int] = field(default_factory=int_column)
    draft_token_ids: array[int] = field(default_factory=int_column)
    edits: array[int] = field(default_factory=int_column)
    copies: array[int] = field(default_factory=int_column)
    swap_outs: array[int] = field(default_factory=int_column)
    host_loads: array[int] = field(default_factory=int_column)
    freed_slots: array[int] = field(default_factory=int_column)
    id_edits: array[int] = field(default_factory=int_column)
    encode_jobs: tuple[EncodeJob, ...] = ()
    encoder_frees: tuple[bytes, ...] = ()
    shared_prefixes: tuple[tuple[int, tuple[int, ...]], ...] = ()
    num_common_blocks: int = 0
    new_sequences: tuple[NewSequence, ...] = ()
    finished_ids: tuple[str, ...] = ()
    preempted_ids: tuple[str, ...] = ()
    num_query_tokens: int = 0
    num_kv_read: int = 0
    is_fast_path: bool = False
    waits: tuple[tuple[WaitReason, int], ...] = ()
    wake_at: float | None = None
    events: tuple[Event, ...] = ()

    @property
    def num_rows(self) -> int:
        """The number of rows in this step."""
        return len(self.slots)

    @property
    def is_empty(self) -> bool:
        """Return True if there is nothing to submit: neither rows nor effects."""
        return not self.slots and not any(_EFFECTS(self))

    def rows(self) -> Iterator[Row]:
        """Return views of the rows, in order."""
        columns = (self.slots, self.starts, self.counts, self.flags)
        return map(Row, *columns, self._drafts()) if self.num_drafts else map(Row, *columns)

    def _drafts(self) -> Iterator[tuple[int, ...]]:
        """Yield the drafts of each row."""
        ids = iter(self.draft_token_ids)
        for count in self.num_drafts:
            yield tuple(islice(ids, count))

    def digest(self, with_ids: bool = True) -> bytes:
        """Return a 16-byte digest of everything that an executor acts on; equal on every rank, run and replay.

        Without ids the digest leaves out token ids, media keys and sampling parameters, so that a replay which knows
        only the requests' lengths and block keys has the same digest.
        """
        columns = list(_COLUMNS(self))
        if not with_ids:
            columns[5], columns[-1] = array("i"), _without_every_third(self.id_edits)
        parts = [struct.pack("<q", len(column)) + column.tobytes() if column else _NO_ENTRIES for column in columns]
        for new in self.new_sequences:
            ids = new.token_ids.tobytes() if new.token_ids is not None and with_ids else b"-"
            texts = (len(ids), new.params, new.eos_token_ids) if with_ids else ()
            parts.append(repr((new.slot, new.request_id, new.choice, new.num_prompt, *texts, new.adapter_id)).encode())
            parts.append(ids)
        jobs: tuple[object, ...] = (self.encode_jobs, self.encoder_frees)
        if not with_ids:
            jobs = (tuple((job.slot, job.span, job.num_tokens) for job in self.encode_jobs), len(self.encoder_frees))
        parts.append(repr((self.step, self.finished_ids, self.preempted_ids, *jobs)).encode())
        return blake2b(b"".join(parts), digest_size=16).digest()


_NO_ENTRIES = struct.pack("<q", 0)
_COLUMNS = attrgetter(
    "slots", "starts", "counts", "flags", "num_drafts", "draft_token_ids", "edits", "copies", "swap_outs", "host_loads",
    "freed_slots", "id_edits",
)  # fmt: skip
_EFFECTS = attrgetter(
    "freed_slots", "new_sequences", "edits", "copies", "swap_outs", "host_loads", "id_edits", "encode_jobs",
    "encoder_frees", "finished_ids", "preempted_ids",
)  # fmt: skip


def _without_every_third(flat: array[int]) -> array[int]:
    kept = flat[:]
    del kept[2::3]
    return kept


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: the token's own, its rank (1 = best), and those of the best ids."""

    token_id: int
    logprob: float
    rank: int
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(slots=True)
class StepTimings:
    """Seconds that a step took to prepare, to run the forward pass, and to sample."""

    prepare_s: float = 0.0
    forward_s: float = 0.0
    sample_s: float = 0.0


@dataclass(slots=True)
class StepResult:
    """What a step produced.

    `token_ids`: the sampled ids of the rows with ROW_SAMPLE, in row order; None if the executor knows only durations.
    `num_token_ids`: the number of ids of each sampling row; None means one each. 0 means that the row has to be
    computed again; a row with accepted drafts has more than one. An executor may also ignore drafts and return one id.
    `logprobs` is None or aligned with `token_ids`. `scores`: (row index, first position, entries) for rows with
    ROW_SCORE. `pooled`: (row index, float32 bytes).
    `errors`: (row index, reason) for rows with an unusable result; their tokens are ignored, and the row is computed
    again once. `dead_ends`: (row index, error) for rows with valid logits that allow no token; the request ends with
    that error. A row with ROW_BEAM returns its candidates in `logprobs` as top_ids and top_logprobs, best first: at
    least twice the beam width. Their log-probabilities are computed after penalties, biases and bans, as in
    transformers' beam search. The row's token id is that of the best candidate.
    """

    token_ids: array[int] | None
    num_token_ids: array[int] | None = None
    logprobs: list[TokenLogprobs | None] | None = None
    scores: tuple[tuple[int, int, tuple[TokenLogprobs, ...]], ...] = ()
    pooled: tuple[tuple[int, bytes], ...] = ()
    errors: tuple[tuple[int, str], ...] = ()
    dead_ends: tuple[tuple[int, FinishError], ...] = ()
    timings: StepTimings = field(default_factory=StepTimings)


@dataclass(frozen=True, slots=True)
class StepFailure:
    """The failure of a step. Committed instead of a result, it undoes the step's plan and all later plans in flight.

    `is_memory`: the executor ran out of memory; a smaller step may succeed.
    """

    message: str
    is_memory: bool = False


@dataclass(slots=True)
class Events:
    """The results of a commit, in order: new tokens as columns, then decisions.

    request_ids, choices, positions (0 = the first output) and token_ids have one entry per new token; `logprobs` is
    None or has one entry per new token. `scores` and `pooled` are (request id, ...) entries.
    """

    step: int
    time: float
    request_ids: list[str] = field(default_factory=list)
    choices: array[int] = field(default_factory=int_column)
    positions: array[int] = field(default_factory=int_column)
    token_ids: array[int] = field(default_factory=int_column)
    logprobs: list[TokenLogprobs | None] | None = None
    scores: tuple[tuple[str, int, tuple[TokenLogprobs, ...]], ...] = ()
    pooled: tuple[tuple[str, bytes], ...] = ()
    decisions: tuple[Event, ...] = ()

    @property
    def is_empty(self) -> bool:
        """True if there are no tokens, scores, pooled states or decisions."""
        return not (self.request_ids or self.decisions or self.scores or self.pooled)
