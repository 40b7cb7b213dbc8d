"""What crosses between scheduler and executor: StepPlan, StepResult, and the events of a commit.

Owns: the columns, their meaning and their digest. Row is a lazy view for policies and tests.
Does not: decide or compute. A plan is never written to after plan() returned it.
Effects of a plan run in this order: freed slots, new sequences, id edits, swap-out, host load, block copy,
then table edits, encoder frees, encode jobs and the forward pass with its KV writes. Copies read the blocks as they
were before the step. Freeing a free slot is harmless, and a new sequence resets its slot, so that effects of a failed
step can be sent again.
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
ROW_CARRY = 2  # the row's single input id is the one its slot sampled last, maybe still on the device
ROW_SCORE = 4  # give log-probabilities of the prompt tokens after the row's positions
ROW_POOL = 8  # give the pooled hidden state at the row's last position
ROW_FORK = 16  # no tokens of its own: samples from the logits of the nearest row before it that has tokens
ROW_BEAM = 32  # with ROW_SAMPLE: give candidates only; the ids chosen from them are in id_edits of the next plan
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


@dataclass(frozen=True, slots=True)
class Event:
    """One decision about one request. Fields beyond the first four are set where the kind has them.

    ADMITTED, RESUMED: num_tokens = granted, cached_tokens. CHUNKED: num_tokens = granted, needed = left.
    DEFERRED: reason, needed, available. PREEMPTED: by, num_tokens = tokens to recompute, reason.
    SWAPPED: by, num_tokens = positions kept on the host. FINISHED: finish_reason, stop_token_id, num_tokens =
    outputs, cached_tokens, error; it ends the request and every choice that has not ended before.
    CHOICE_FINISHED: one choice ends before its request: choice, finish_reason, stop_token_id, num_tokens.
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
        """The text of its error."""
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
    """A sequence that enters the executor (new or resumed), in full; its table is in the plan's edits.

    `token_ids` are all known ids (None for a request known by length only); outputs begin at num_prompt.
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

    Rows: slots, starts, counts, flags, one entry per row; num_drafts is empty or one entry per row. The last
    num_drafts of a row's positions hold drafts, not known ids: draft_token_ids has them, row by row. Such a row begins
    with one known id, has ROW_SAMPLE alone, and samples after each of its positions, with that position's draw. It
    gives the drafts that equal the draws before them, from the first on, and then one draw: 1 to 1 + num_drafts ids.
    The next row of its sequence begins after these ids; positions that it wrote beyond them are written again.
    edits: flat (slot, group, index, block); index = the table's length appends, a lower one replaces,
    block DROP_BLOCK drops. id_edits: flat (slot, position, token id): known ids that the host chose, each after
    its sequence's last. copies: flat (group, source, destination). swap_outs: flat (group, device block, host
    block). host_loads: flat (group, host block, device block). A plan has swap-outs or host loads, never both.
    encode_jobs run before the rows; encoder_frees are keys whose outputs may be dropped.
    shared_prefixes, if requested: (leading blocks, indices of the rows that share them), for cascade attention;
    num_common_blocks: leading blocks that all rows share, per group 0.
    num_query_tokens and num_kv_read are totals over rows, in tokens. `is_fast_path`: every row is one
    token within the captured range (S14). `waits`: (reason, requests) pairs of an empty plan, `wake_at`
    the next deadline in seconds. `events` are the decisions taken since the last commit or plan; they
    are not part of the digest.
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
        """Rows in this step."""
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
        """Return 16 bytes over everything an executor acts on; equal on every rank, run and replay.

        Without ids the digest covers the decisions alone, so that a replay which knows requests by their lengths and
        block keys has the same: it leaves out what the tokens and media are, and how they are sampled.
        """
        state = blake2b(digest_size=16)
        columns = list(_COLUMNS(self))
        if not with_ids:
            columns[5], columns[-1] = array("i"), _without_every_third(self.id_edits)
        for column in columns:
            state.update(struct.pack("<q", len(column)))
            state.update(column.tobytes())
        for new in self.new_sequences:
            ids = new.token_ids.tobytes() if new.token_ids is not None and with_ids else b"-"
            texts = (len(ids), new.params, new.eos_token_ids) if with_ids else ()
            state.update(repr((new.slot, new.request_id, new.choice, new.num_prompt, *texts, new.adapter_id)).encode())
            state.update(ids)
        jobs: tuple[object, ...] = (self.encode_jobs, self.encoder_frees)
        if not with_ids:
            jobs = (tuple((job.slot, job.span, job.num_tokens) for job in self.encode_jobs), len(self.encoder_frees))
        state.update(repr((self.step, self.finished_ids, self.preempted_ids, *jobs)).encode())
        return state.digest()


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
    """Log-probabilities at one position: the token's own, its rank (1 = best), and the best ones."""

    token_id: int
    logprob: float
    rank: int
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(slots=True)
class StepTimings:
    """Seconds that a step spent in its parts."""

    prepare_s: float = 0.0
    forward_s: float = 0.0
    sample_s: float = 0.0


@dataclass(slots=True)
class StepResult:
    """What a step produced.

    `token_ids`: the sampled ids of the rows that wanted one, in row order, one each unless
    `num_token_ids` (one entry per sampling row) differs: 0 where a row has to be repeated, more than one for
    accepted drafts (an executor that gives one for each row is right too). None from an executor that knows only
    durations. `logprobs` is None or aligned with `token_ids`. `scores`: (row index, first position,
    entries) for rows with ROW_SCORE. `pooled`: (row index, float32 bytes). `errors`: (row index, reason)
    for rows whose own result is unusable: their tokens are ignored, and they are computed again once. `dead_ends`: the
    same for rows whose numbers are sound but leave nothing to sample: their requests end with that error. A row with
    ROW_BEAM has its candidates in `logprobs`: top_ids and top_logprobs, best first, at least twice the beam width,
    log-probabilities after the processors (penalties, biases, bans) as transformers' beam search has them; its token
    id is the best one's.
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
    """A step that produced nothing: commit it in place of a result, and everything is put back.

    `is_memory`: the executor ran out of memory; a smaller step may work.
    """

    message: str
    is_memory: bool = False


@dataclass(slots=True)
class Events:
    """What a commit made known, in order: tokens as columns, then decisions.

    Columns have one entry per new token: request_ids, choices, positions (0 = the first output),
    token_ids; `logprobs` is None or aligned. `scores` and `pooled` are (request id, ...) entries.
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
        """True if nothing became known, and nothing was decided."""
        return not (self.request_ids or self.decisions or self.scores or self.pooled)
