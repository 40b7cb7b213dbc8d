"""Request and SamplingParams: what a client submits. Both are frozen and check their fields.

Owns: the fields, each declared with its default, its range and the remedy in its error; the reasons why requests end.
Does not: sample, know a vocabulary (see limits and the front end), hold text, or track a request's progress
(request_state).
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from enum import IntEnum, IntFlag
from types import NoneType
from typing import Annotated, Any, Self, get_args, get_origin, get_type_hints

from octavo.errors import ErrorKind, InvalidRequestError

_MAX_SHOWN = 200  # characters of a value in a message
_INT32 = 2**31 - 1  # integers are sent and kept as 32-bit columns
MAX_GRAMMAR = 1 << 20  # characters
DEFAULT_MAX_TOKENS = 16  # as in OpenAI's completions and vLLM's SamplingParams
MODEL_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # a generation config may set these

# Field names of other libraries that SamplingParams does not have -> the remedy.
_OTHER_NAMES = {
    "structured_outputs": "give grammar=grammar_from(json_schema=...)",
    "guided_decoding": "give grammar=grammar_from(json_schema=...)",
    "response_format": "give grammar=grammar_from(json_schema=...)",
    "bad_words": "give their token ids as bad_words_ids",
    "use_beam_search": "give beam_width",
    "max_new_tokens": "give max_tokens",
    "max_completion_tokens": "give max_tokens",
    "stop_sequences": "give stop",
    "do_sample": "give temperature, 0 for greedy",
    "repeat_penalty": "give repetition_penalty",
    "nsigma": "give top_n_sigma",
    "mirostat_mode": "give mirostat",
}


def check(ok: bool, param: str, value: object, remedy: str) -> None:
    """Raise InvalidRequestError with the field, its value and the remedy unless `ok`."""
    if not ok:
        shown = repr(value)
        shown = shown if len(shown) <= _MAX_SHOWN else shown[: _MAX_SHOWN - 3] + "..."
        raise InvalidRequestError(f"{param} is {shown}; {remedy}", param)


def sampling_defaults(generation: Mapping[str, float]) -> dict[str, Any]:
    """Return the sampling fields that a model's generation config sets; all others keep SamplingParams' defaults.

    The command line, the HTTP interfaces and the library use these values for fields that a request does not set.
    Raises InvalidRequestError if a value is out of range.
    """
    defaults: dict[str, Any] = {name: generation[name] for name in MODEL_FIELDS if generation.get(name) is not None}
    if "top_k" in defaults:
        defaults["top_k"] = int(defaults["top_k"])
    SamplingParams(**defaults)
    return defaults


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_id(value: Any) -> bool:
    return _is_int(value) and value >= 0


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


# --- checks: each is called with a field's name and value, and returns the value to keep ---------------------------

_IDS_REMEDY = "give token ids of the model's vocabulary"
_TRUNCATE_REMEDY = "give how many of the prompt's last tokens to keep, or -1 for all that fit"


@dataclass(frozen=True, slots=True)
class _Integer:
    """Check of an integer from `minimum` to `maximum`."""

    minimum: int
    remedy: str
    maximum: int = _INT32

    def __call__(self, name: str, value: Any) -> object:
        if not (_is_int(value) and self.minimum <= value <= self.maximum):
            is_too_large = _is_int(value) and value > self.maximum == _INT32
            check(False, name, value, f"give less than {2**31}" if is_too_large else self.remedy)
        return value


@dataclass(frozen=True, slots=True)
class _Number:
    """Check of a finite number from `minimum` to `maximum`."""

    minimum: float
    maximum: float
    remedy: str

    def __call__(self, name: str, value: Any) -> object:
        if not (_is_number(value) and self.minimum <= value <= self.maximum):
            check(False, name, value, self.remedy)
        return value


def _entries(name: str, value: Any, entries: str) -> Any:
    """Return a list field's value as a tuple or list; None becomes an empty tuple."""
    value = () if value is None else value
    if not isinstance(value, (tuple, list)):
        check(False, name, value, f"give a tuple of {entries}")
    return value


def _accept_ids(name: str, value: Any) -> object:
    ids = _entries(name, value, "token ids")
    is_plain = set(map(type, ids)) <= {int}  # a list of a whole vocabulary is checked in a millisecond
    if ids and not (min(ids) >= 0 if is_plain else all(map(_is_id, ids))):
        check(False, name, ids, _IDS_REMEDY)
    return ids


def _accept_stop(name: str, value: Any) -> object:
    stop = _entries(name, (value,) if isinstance(value, str) else value, "strings")
    check(all(isinstance(s, str) and s for s in stop), name, stop, "give non-empty strings")
    return stop


def _accept_logit_bias(name: str, value: Any) -> object:
    pairs = "(token id, bias) pairs"
    biases = _entries(name, tuple(value.items()) if isinstance(value, Mapping) else value, pairs)
    for entry in biases:
        check(isinstance(entry, (tuple, list)) and len(entry) == 2, name, biases, f"give a tuple of {pairs}")
        token, bias = entry
        check(_is_id(token), name, token, "use token ids of the model's vocabulary as keys")
        is_in_range = _is_number(bias) and -100.0 <= bias <= 100.0
        check(is_in_range, name, bias, f"give token {token} a bias from -100 to 100")
    return biases


def _accept_bad_words(name: str, value: Any) -> object:
    sequences = "non-empty tuples of token ids"
    banned = _entries(name, value, sequences)
    for ids in banned:
        check(isinstance(ids, (tuple, list)) and len(ids) > 0, name, ids, f"give a tuple of {sequences}")
        check(all(map(_is_id, ids)), name, ids, _IDS_REMEDY)
    return banned


def _accept_early_stopping(name: str, value: Any) -> object:
    check(isinstance(value, bool) or value == "never", name, value, 'give true, false or "never"')
    return value


_TokenIds = Annotated[tuple[int, ...], _accept_ids]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample one request. The constructor checks every field; it raises InvalidRequestError with the field name.

    `max_tokens=None` means as many tokens as fit; 0 is allowed with prompt_logprobs and generates nothing.
    `temperature=0` is greedy. `top_k=0` means off. `truncate_prompt_tokens=k` keeps the last k tokens of the prompt;
    -1 keeps as many as fit. `logprobs=k` requests the log-probabilities of the sampled token and of the k best tokens.
    If `seed` is None, the front end draws a seed, so that every request can be replayed.
    The output must not contain any sequence in `bad_words_ids`. `allowed_token_ids` are the only ids that may be
    sampled; if it is empty, all may. The `dry_*` fields set the DRY penalty against repetition: an id that would
    prolong a repetition of `dry_allowed_length` or more tokens loses dry_multiplier * dry_base ** (length - allowed).
    `top_n_sigma` keeps ids whose logit is within this number of standard deviations of the best. With probability
    `xtc_probability` a draw leaves out all ids of at least `xtc_threshold` except the least likely of these.
    `mirostat=2` draws with mirostat 2.0, and then no other truncation applies. `no_repeat_ngram_size` bans the
    repetition of any sequence of this many tokens.
    `stop` may be one string, and `logit_bias` may be a dict. For a list field, None means an empty list.
    `n` choices are returned. If `best_of` > n, `best_of` choices are generated, and the n choices of highest mean
    log-probability are returned. `beam_width` > 0 is beam search, which returns the n best beams; `length_penalty` and
    `early_stopping` (True, False or "never") work as in transformers. `shown_special_ids` appear in the text even if
    special tokens are skipped. The output obeys `grammar`, the text of a compiled grammar ("" = no grammar), and ends
    when it completes the grammar.
    """

    max_tokens: Annotated[int | None, _Integer(0, "give at least 1")] = DEFAULT_MAX_TOKENS
    min_tokens: Annotated[int, _Integer(0, "give 0 or more")] = 0
    temperature: Annotated[float, _Number(0.0, 100.0, "give a number from 0 (greedy) to 100")] = 1.0
    top_k: Annotated[int, _Integer(-1, "give 0 or -1 (off) or a positive whole number")] = 0
    top_p: Annotated[float, _Number(0.0, 1.0, "give a number from 0 (the likeliest token only) to 1 (off)")] = 1.0
    min_p: Annotated[float, _Number(0.0, 1.0, "give a number from 0 to 1")] = 0.0
    typical_p: Annotated[float, _Number(1e-9, 1.0, "give a number above 0, up to 1 (off)")] = 1.0
    top_n_sigma: Annotated[float, _Number(-1.0, 100.0, "give a number of deviations; 0 or -1 is off")] = 0.0
    xtc_probability: Annotated[float, _Number(0.0, 1.0, "give a number from 0 (off) to 1")] = 0.0
    xtc_threshold: Annotated[float, _Number(0.0, 1.0, "give a number from 0 to 1; above 0.5 XTC is off")] = 0.1
    mirostat: Annotated[int, _Integer(0, "give 0 (off) or 2", 2)] = 0
    mirostat_tau: Annotated[float, _Number(0.0, 100.0, "give the surprise to aim at, in bits")] = 5.0
    mirostat_eta: Annotated[float, _Number(0.0, 100.0, "give a number from 0 to 100")] = 0.1
    no_repeat_ngram_size: Annotated[int, _Integer(0, "give 0 (off) or a number of tokens up to 128", 128)] = 0
    presence_penalty: Annotated[float, _Number(-2.0, 2.0, "give a number from -2 to 2")] = 0.0
    frequency_penalty: Annotated[float, _Number(-2.0, 2.0, "give a number from -2 to 2")] = 0.0
    repetition_penalty: Annotated[float, _Number(1e-3, 100.0, "give a number above 0; 1 is off")] = 1.0
    dry_multiplier: Annotated[float, _Number(0.0, 100.0, "give a number from 0 (off) to 100")] = 0.0
    dry_base: Annotated[float, _Number(1.0, 100.0, "give a number from 1 to 100")] = 1.75
    dry_allowed_length: Annotated[int, _Integer(1, "give at least 1")] = 2
    dry_range: Annotated[int, _Integer(0, "give 0 (the whole context) or a number of tokens")] = 0
    dry_breaker_ids: _TokenIds = ()
    logit_bias: Annotated[tuple[tuple[int, float], ...], _accept_logit_bias] = ()
    bad_words_ids: Annotated[tuple[tuple[int, ...], ...], _accept_bad_words] = ()
    allowed_token_ids: _TokenIds = ()
    logprobs: Annotated[int | None, _Integer(0, "give a whole number from 0 to 20", 20)] = None
    prompt_logprobs: Annotated[int | None, _Integer(0, "give a whole number from 0 to 20", 20)] = None
    truncate_prompt_tokens: Annotated[int | None, _Integer(-1, _TRUNCATE_REMEDY)] = None
    seed: Annotated[int | None, _Integer(-(2**63), "give a 64-bit whole number", 2**64 - 1)] = None
    n: Annotated[int, _Integer(1, "give at least 1")] = 1
    best_of: Annotated[int | None, _Integer(1, "give at least n, or leave it out")] = None
    beam_width: Annotated[int, _Integer(0, "give a whole number from 0 (no beam search) to 64", 64)] = 0
    length_penalty: Annotated[float, _Number(-100.0, 100.0, "give a number from -100 to 100")] = 1.0
    early_stopping: Annotated[bool | str, _accept_early_stopping] = False
    stop: Annotated[tuple[str, ...], _accept_stop] = ()
    stop_token_ids: _TokenIds = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    shown_special_ids: _TokenIds = ()
    grammar: str = ""

    def __new__(cls, *_: object, **fields: object) -> Self:
        """Refuse unknown fields with an error that names the field to use instead."""
        for name in fields:
            if name not in cls.__dataclass_fields__:
                remedy = _OTHER_NAMES.get(name, f"give {', '.join(cls.__dataclass_fields__)}")
                raise InvalidRequestError(f"SamplingParams has no field {name}; {remedy}", name)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        for name, (accept, default) in _ACCEPT.items():
            value = getattr(self, name)
            if value is default or (value is None and name in _OPTIONAL):
                continue
            kept = accept(name, value)
            if kept is not value:
                object.__setattr__(self, name, kept)
        # fields whose range depends on other fields
        check(self.mirostat != 1, "mirostat", 1, "give 2 (mirostat 2.0); version 1 is not supported")
        check(self.truncate_prompt_tokens != 0, "truncate_prompt_tokens", 0, _TRUNCATE_REMEDY)
        if self.max_tokens == 0:
            check(self.prompt_logprobs is not None, "max_tokens", 0, "give at least 1")
            check(self.num_sequences == 1 and not self.beam_width, "max_tokens", 0, "give 1 choice where none is made")
        if self.max_tokens is not None:
            remedy = f"give at most max_tokens ({self.max_tokens})"
            check(self.min_tokens <= self.max_tokens, "min_tokens", self.min_tokens, remedy)
        if self.best_of is not None:
            check(self.best_of >= self.n, "best_of", self.best_of, f"give at least n ({self.n})")
        if self.beam_width:
            check(self.n <= self.beam_width, "n", self.n, f"give at most beam_width ({self.beam_width})")
            check(self.best_of is None, "best_of", self.best_of, "leave it out; beam search has beam_width")
        if self.grammar != "":
            self._check_grammar()

    def _check_grammar(self) -> None:
        shown = "..."  # the compiled text may be long, and no person wrote it
        check(isinstance(self.grammar, str), "grammar", self.grammar, "give the text of a compiled grammar")
        check(len(self.grammar) <= MAX_GRAMMAR, "grammar", shown, f"give at most {MAX_GRAMMAR} characters")
        check(self.beam_width == 0, "grammar", shown, "leave it out; beam search takes none")
        check(self.min_tokens == 0, "min_tokens", self.min_tokens, "leave it out; the grammar says when an output ends")
        check(not self.ignore_eos, "ignore_eos", self.ignore_eos, "leave it out; the grammar says when an output ends")

    def num_kept(self, max_model_len: int) -> int | None:
        """Return how many of a prompt's last tokens truncate_prompt_tokens keeps, or None for all.

        For -1 the kept tokens leave room for max_tokens, or for one token if max_tokens is None.
        """
        if self.truncate_prompt_tokens != -1:
            return self.truncate_prompt_tokens
        return max(1, max_model_len - (1 if self.max_tokens is None else self.max_tokens))

    @property
    def num_sequences(self) -> int:
        """The number of sequences that run: beams, or generated choices."""
        return self.beam_width or self.best_of or self.n

    @property
    def num_logprobs(self) -> int | None:
        """How many best log-probabilities the executor returns with each token; None: not even the token's own.

        It is 0 with best_of > n and no `logprobs`, because best_of ranks choices by their tokens' log-probabilities.
        """
        if self.logprobs is None and (self.best_of or self.n) > self.n:
            return 0
        return self.logprobs


_HINTS = get_type_hints(SamplingParams, include_extras=True)
_ACCEPT: dict[str, tuple[Callable[[str, Any], object], object]] = {  # each field's check, and its default
    entry.name: (_HINTS[entry.name].__metadata__[0], entry.default)
    for entry in fields(SamplingParams)
    if get_origin(_HINTS[entry.name]) is Annotated
}
NUMBER_FIELDS: Mapping[str, type[int | float]] = {  # each field that is one number -> its type
    name: int if isinstance(accept, _Integer) else float
    for name, (accept, _) in _ACCEPT.items()
    if isinstance(accept, _Integer | _Number)
}
_OPTIONAL = frozenset(name for name in _ACCEPT if NoneType in get_args(_HINTS[name].__origin__))


# --- the request --------------------------------------------------------------------------------------------------


class FinishReason(IntEnum):
    """Why a request, or one of its choices, ended."""

    STOP = 0  # end-of-sequence id, a stop id or a stop string
    LENGTH = 1
    CANCELLED = 2
    TIMEOUT = 3  # its queue_timeout or its deadline has passed
    ERROR = 4


@dataclass(frozen=True, slots=True)
class FinishError:
    """The error of a failed request: a kind for programs, and a message for people."""

    kind: ErrorKind
    message: str


class Want(IntFlag):
    """What the engine computes for a request."""

    SAMPLE = 1
    SCORE = 2  # log-probabilities of its own prompt
    POOL = 4  # an embedding


@dataclass(frozen=True, slots=True)
class Span:
    """One media item of a prompt: positions [start, start + length) and its content key."""

    start: int
    length: int
    key: bytes


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt with its parameters, as the scheduler sees it.

    A request has token ids (`prompt_token_ids`), or only `num_prompt_tokens` and `block_keys` (recordings, simulations,
    public traces). `block_keys` has the key of each full prompt block if the front end computed the keys, else None,
    and the scheduler computes them; a request without token ids may also have the keys of its outputs' blocks.
    `emitted_token_ids` are outputs of an earlier engine process: the request resumes after them, and they still count
    as outputs. Times are seconds on the scheduler's clock: `deadline` is a point in time; `queue_timeout` counts from
    `arrival` to the first admission. Requests with different `cache_salt` share no cached prefixes. `score_from` is
    the first prompt position whose log-probability a SCORE request returns. `ttft_objective` and `tpot_objective` are
    the deadline policy's targets: seconds to the first token, and seconds for each later token. `session` names the
    request's conversation, for the router of a fleet.
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
    session: str = ""

    def __post_init__(self) -> None:
        for name in ("arrival", "deadline", "queue_timeout", "ttft_objective", "tpot_objective"):
            value = getattr(self, name)
            if value is not None:
                check(not math.isnan(value), name, value, "give a time in seconds")
        if (ids := self.prompt_token_ids) is not None:
            if not isinstance(ids, array) or ids.typecode != "i":
                object.__setattr__(self, "prompt_token_ids", ids := _pack_ids(ids, "prompt_token_ids"))
            object.__setattr__(self, "num_prompt_tokens", len(ids))

    @property
    def queue_until(self) -> float | None:
        """When the queue timeout ends the request unless it was admitted before; None if the request has outputs."""
        if self.queue_timeout is None or self.emitted_token_ids:
            return None
        return self.arrival + self.queue_timeout


def _pack_ids(ids: object, param: str) -> array[int]:
    try:
        return array("i", ids)  # type: ignore[call-overload, no-any-return]
    except (TypeError, OverflowError) as error:
        raise InvalidRequestError(f"{param} must be a list of 32-bit token ids ({error})", param) from None
