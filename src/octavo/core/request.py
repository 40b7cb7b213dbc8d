"""What was asked (Request, frozen) and where it stands (RequestState, Sequence).

Owns: the request's fields and their ranges; the per-sequence counters that the scheduler moves.
Does not: decide anything, hold text, or know tensors.
Invariants: num_computed <= num_scheduled <= num_known; num_known = num_committed + num_pending;
a sequence that is not running holds no blocks and no slot.
"""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass
from enum import IntEnum, IntFlag

from octavo.errors import InvalidRequestError


class FinishReason(IntEnum):
    """Why a request ended; exactly one per request."""

    STOP = 0  # end-of-sequence id, a stop id or a stop string
    LENGTH = 1
    CANCELLED = 2
    TIMEOUT = 3  # queue_timeout or deadline passed
    ERROR = 4


class Want(IntFlag):
    """What a request wants computed."""

    SAMPLE = 1
    SCORE = 2  # log-probabilities of its own prompt
    POOL = 4  # an embedding


class Status(IntEnum):
    """Where a request stands."""

    WAITING = 0
    RUNNING = 1
    FINISHED = 2


@dataclass(frozen=True, slots=True)
class Span:
    """One media item of a prompt: positions [start, start + length) and its content key."""

    start: int
    length: int
    key: bytes


def _check(ok: bool, param: str, value: object, remedy: str) -> None:
    if not ok:
        raise InvalidRequestError(f"{param} is {value!r}; {remedy}", param)


def _check_number(param: str, value: object, low: float, high: float, remedy: str) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    _check(is_number and math.isfinite(value) and low <= value <= high, param, value, remedy)  # type: ignore[arg-type, operator]


_ENTRIES = {"logit_bias": "(token id, bias) pairs", "stop": "strings", "stop_token_ids": "token ids"}


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample one request. Every field is checked when the object is made.

    `max_tokens=None` means as many as fit. `temperature=0` is greedy. `top_k=0` means off.
    `logprobs=k` asks for the sampled token's log-probability and the k best beside it.
    `seed=None` is replaced by a drawn seed in the front, so that a request is always replayable.
    Raises InvalidRequestError naming the field.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        for name in ("max_tokens", "min_tokens", "top_k", "n"):  # they travel and are kept as 32-bit columns
            value = getattr(self, name)
            if _is_int(value):
                _check(value < 2**31, name, value, f"give less than {2**31}")
        if self.max_tokens is not None:
            _check(
                _is_int(self.max_tokens) and self.max_tokens >= 1,
                "max_tokens",
                self.max_tokens,
                "give at least 1, or leave it out for as many as fit",
            )
        _check(_is_int(self.min_tokens) and self.min_tokens >= 0, "min_tokens", self.min_tokens, "give 0 or more")
        if self.max_tokens is not None:
            _check(
                self.min_tokens <= self.max_tokens,
                "min_tokens",
                self.min_tokens,
                f"give at most max_tokens ({self.max_tokens})",
            )
        _check_number("temperature", self.temperature, 0.0, 100.0, "give a number from 0 (greedy) to 100")
        _check(
            _is_int(self.top_k) and self.top_k >= -1,
            "top_k",
            self.top_k,
            "give 0 or -1 (off) or a positive whole number",
        )
        _check_number("top_p", self.top_p, 0.0, 1.0, "give a number above 0, up to 1")
        _check(self.top_p > 0, "top_p", self.top_p, "give a number above 0, up to 1")
        _check_number("min_p", self.min_p, 0.0, 1.0, "give a number from 0 to 1")
        _check_number("presence_penalty", self.presence_penalty, -2.0, 2.0, "give a number from -2 to 2")
        _check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0, "give a number from -2 to 2")
        _check_number("repetition_penalty", self.repetition_penalty, 1e-3, 100.0, "give a number above 0; 1 is off")
        for name in ("logit_bias", "stop", "stop_token_ids"):  # a str or a dict would be taken apart
            value = getattr(self, name)
            _check(isinstance(value, (tuple, list)), name, value, f"give a tuple of {_ENTRIES[name]}")
        _check(
            all(isinstance(entry, (tuple, list)) and len(entry) == 2 for entry in self.logit_bias),
            "logit_bias",
            self.logit_bias,
            f"give a tuple of {_ENTRIES['logit_bias']}",
        )
        for token, bias in self.logit_bias:
            _check(
                _is_int(token) and token >= 0, "logit_bias", token, "use token ids of the model's vocabulary as keys"
            )
            _check_number("logit_bias", bias, -100.0, 100.0, "give each bias a number from -100 to 100")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _check(
                value is None or (_is_int(value) and 0 <= value <= 20), name, value, "give a whole number from 0 to 20"
            )
        _check(
            self.seed is None or (_is_int(self.seed) and -(2**63) <= self.seed < 2**64),
            "seed",
            self.seed,
            "give a 64-bit whole number",
        )
        _check(_is_int(self.n) and self.n >= 1, "n", self.n, "give at least 1")
        _check(all(isinstance(s, str) and s for s in self.stop), "stop", self.stop, "give non-empty strings")
        _check(
            all(_is_int(t) and t >= 0 for t in self.stop_token_ids),
            "stop_token_ids",
            self.stop_token_ids,
            "give token ids of the model's vocabulary",
        )


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt with its parameters, as the scheduler sees it.

    Carries token ids (`prompt_token_ids`), or only `num_prompt_tokens` and `block_keys` (recordings,
    simulation, public traces). `block_keys` holds the digest of each full prompt block when the front
    computed them, else None and they are computed on admission. `emitted_token_ids` are outputs of an
    earlier epoch: the request resumes behind them, with the prompt's boundary kept. Times are seconds
    on the scheduler's clock: `deadline` is a point in time, `queue_timeout` counts from `arrival` to the
    first admission. `cache_salt` separates tenants in the prefix cache. `score_from` is the first prompt
    position whose log-probability a SCORE request asks for.
    """

    request_id: str
    prompt_token_ids: array[int] | None
    params: SamplingParams = SamplingParams()
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

    def __post_init__(self) -> None:
        for name in ("arrival", "deadline", "queue_timeout"):
            value = getattr(self, name)
            _check(value is None or not math.isnan(value), name, value, "give a time in seconds")
        if self.prompt_token_ids is not None:
            if not isinstance(self.prompt_token_ids, array) or self.prompt_token_ids.typecode != "i":
                object.__setattr__(self, "prompt_token_ids", _pack_ids(self.prompt_token_ids, "prompt_token_ids"))
            assert self.prompt_token_ids is not None
            object.__setattr__(self, "num_prompt_tokens", len(self.prompt_token_ids))


def _pack_ids(ids: object, param: str) -> array[int]:
    try:
        return array("i", ids)  # type: ignore[call-overload, no-any-return]
    except (TypeError, OverflowError) as error:
        raise InvalidRequestError(f"{param} must be a list of 32-bit token ids ({error})", param) from None


class Sequence:
    """One live continuation of a request: its counters, block tables and executor slot.

    `token_ids` holds committed ids (prompt and outputs), or None for a request known by length only.
    `num_pending` counts ids sampled by plans still in flight. Positions [0, num_computed) have
    committed KV; [num_computed, num_scheduled) are being written by plans in flight.
    """

    __slots__ = (
        "capacity",
        "choice",
        "hot_end",
        "in_flight",
        "keys",
        "limit",
        "num_committed",
        "num_computed",
        "num_pending",
        "num_prompt",
        "num_published",
        "num_scheduled",
        "request",
        "slot",
        "stale",
        "tables",
        "token_ids",
    )

    def __init__(self, request: RequestState, choice: int, num_groups: int) -> None:
        asked = request.request
        self.request = request
        self.choice = choice
        self.slot = -1
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
        self.capacity = 0
        self.in_flight = 0
        self.stale = 0  # rows in flight whose results must be dropped
        self.hot_end = 0  # below this position a decode needs no block and ends nothing by length
        self.limit = 0
        self.keys: list[bytes] = []
        self.tables: list[list[int]] = [[] for _ in range(num_groups)]

    @property
    def num_known(self) -> int:
        """Prompt and output tokens, those still in flight included."""
        return self.num_committed + self.num_pending


class RequestState:
    """Where one request stands. `rank` = (the policy's key, order of arrival), unique among live requests.

    `num_scored` is the first prompt position whose log-probability is still owed. `deferred_version` is the
    pool's version when the request last lacked blocks: unless it moved, there is nothing to look at again.
    """

    __slots__ = (
        "ahead_ok",
        "cached_tokens",
        "deferred_version",
        "first_scheduled_at",
        "is_decoding",
        "key",
        "max_tokens",
        "name",
        "num_preemptions",
        "num_scored",
        "order",
        "rank",
        "request",
        "sequences",
        "status",
        "stop_ids",
        "ticket",
        "wait_reason",
    )

    def __init__(self, request: Request, order: int) -> None:
        self.request = request
        self.name = request.request_id
        self.order = order
        self.key: tuple[float, ...] = ()
        self.rank: tuple[tuple[float, ...], int] = ((), order)
        self.status = Status.WAITING
        self.sequences: list[Sequence] = []
        self.stop_ids: frozenset[int] = frozenset()
        self.ahead_ok = True
        self.is_decoding = False
        self.max_tokens = 0
        self.ticket = 0  # of its latest entry in the waiting queue
        self.num_scored = request.score_from
        self.cached_tokens = 0
        self.num_preemptions = 0
        self.first_scheduled_at: float | None = None
        self.wait_reason = -1
        self.deferred_version = -1

    @property
    def in_flight(self) -> int:
        """Rows of this request in plans not yet committed."""
        return sum(sequence.in_flight for sequence in self.sequences)
