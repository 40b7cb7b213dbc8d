"""The fields of all endpoints that compute, and the sampling fields of the endpoints that generate text.

Owns: the table of sampling fields with their names in each API; the types and length bounds of the other fields; making
SamplingParams from a body.
Does not: repeat the ranges of SamplingParams, or check ids against the vocabulary (Sessions does).
Invariant: a number of SamplingParams becomes a field of an API by its row in SAMPLING_FIELDS only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import BeforeValidator, FailFast, Field, WithJsonSchema, create_model

from octavo.core.request import NUMBER_FIELDS, SamplingParams
from octavo.errors import InvalidRequestError
from octavo.frontend.sessions import check_stream
from octavo.server.api.fields import TEXT_OR_TEXTS, TOKEN_ID_KEY, Body, reject_unsupported
from octavo.server.api.structured_output import StructureFields, given_structures
from octavo.server.api.tools import ToolFields
from octavo.server.http.body import off_loop
from octavo.server.http.errors import bad_field, from_exception

if TYPE_CHECKING:
    from octavo.text.tokenizer import Tokenizer

MAX_TIMEOUT_S = 86_400.0


class ServedFields(Body):
    """The fields of every request that the engine computes."""

    model: str | None = Field(None, description="the served model's name; may be left out")
    priority: int | None = Field(
        None,
        ge=-(2**31),
        lt=2**31,
        description="smaller is more urgent, 0 unless the key says otherwise; for the scheduling policy (fcfs and fifo "
        "do not look at it), and what is above 0 is refused first under load",
    )
    cache_salt: str | None = Field(None, min_length=1, max_length=256)
    timeout: float | None = Field(None, gt=0, le=MAX_TIMEOUT_S, description="seconds until the request is given up")
    queue_timeout: float | None = Field(
        None,
        gt=0,
        le=MAX_TIMEOUT_S,
        description="seconds until the request is given up if it has not started; the server may have a shorter bound",
    )
    ttft_objective: float | None = Field(
        None, gt=0, le=MAX_TIMEOUT_S, description="seconds to the first token that the deadline policy aims at"
    )
    tpot_objective: float | None = Field(
        None, gt=0, le=MAX_TIMEOUT_S, description="seconds for each later token that the deadline policy aims at"
    )


MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
MAX_BIASES = 1024
MAX_STOP_IDS = 1024
MAX_BAD_WORDS = 128
MAX_BREAKERS = 64
MAX_WORD_CHARACTERS = 256
MAX_ALLOWED_IDS = 65_536
N_PREDICT = "llama.cpp's name for max_tokens; below 0 for as many as fit"
MAX_PROMPT_SCORES = 1_048_576  # log-probabilities of prompt tokens in one answer: 50 MB of JSON


def _early_stopping(value: object) -> object:
    if value is not None and not isinstance(value, bool) and value != "never":
        raise ValueError('give true, false or "never"')
    return value


Stops = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]],
    Field(max_length=MAX_STOPS),
    TEXT_OR_TEXTS,
]
Word = Annotated[str, Field(min_length=1, max_length=MAX_WORD_CHARACTERS)]
EarlyStopping = Annotated[
    object,
    BeforeValidator(_early_stopping),
    WithJsonSchema({"anyOf": [{"type": "boolean"}, {"const": "never"}, {"type": "null"}]}),
]


class StreamOptions(Body):
    """Options for what a stream contains in addition to the text."""

    include_usage: bool = False
    continuous_usage_stats: bool = Field(False, description="with include_usage: the usage so far in every chunk")


@dataclass(frozen=True, slots=True)
class SamplingField:
    """A number of SamplingParams that a request may set. `name` is its name there and in OpenAI's APIs.

    Its type, range and default are those of SamplingParams. `ollama` is its name in Ollama's options, or None if Ollama
    has no such option. `in_messages`: /v1/messages has it under the same name.
    """

    name: str
    description: str | None = None
    ollama: str | None = None
    in_messages: bool = False


SAMPLING_FIELDS = (
    SamplingField("temperature", ollama="temperature", in_messages=True),
    SamplingField("top_p", ollama="top_p", in_messages=True),
    SamplingField("top_k", ollama="top_k", in_messages=True),
    SamplingField("min_p", ollama="min_p", in_messages=True),
    SamplingField("typical_p", ollama="typical_p"),
    SamplingField("top_n_sigma", "ids within so many standard deviations of the best; 0 = off"),
    SamplingField("xtc_probability", "XTC: how often the top choices are left out; 0 = off"),
    SamplingField("xtc_threshold", "XTC: the least probability of a top choice"),
    SamplingField("mirostat", "2: mirostat 2.0 in place of top_k, top_p and the like; 0 = off", "mirostat"),
    SamplingField("mirostat_tau", "mirostat: the surprise that is aimed at, in bits", "mirostat_tau"),
    SamplingField("mirostat_eta", "mirostat: how fast it is reached", "mirostat_eta"),
    SamplingField("no_repeat_ngram_size", "sequences of so many tokens occur once; 0 = off"),
    SamplingField("presence_penalty", ollama="presence_penalty"),
    SamplingField("frequency_penalty", ollama="frequency_penalty"),
    SamplingField("repetition_penalty", ollama="repeat_penalty"),
    SamplingField("dry_multiplier", "DRY: strength of the penalty on repetitions; 0 = off"),
    SamplingField("dry_base"),
    SamplingField("dry_allowed_length"),
    SamplingField("dry_range", "DRY: how many of the last tokens are looked at; 0 = all"),
)
OLLAMA_NAMES = {each.name: each.ollama for each in SAMPLING_FIELDS if each.ollama is not None}
MESSAGES_NAMES = {each.name: each.name for each in SAMPLING_FIELDS if each.in_messages}
F = TypeVar("F", bound=Body)


def with_numbers(
    names: Mapping[str, str], describe: Callable[[str], str | None] = lambda name: None
) -> Callable[[type[F]], type[F]]:
    """Return a decorator that adds numbers of SamplingParams to a body. `names` maps each to the body's field name."""

    def add(body: type[F]) -> type[F]:
        fields: dict[str, Any] = {
            shown: (NUMBER_FIELDS[name] | None, Field(None, description=describe(name)))
            for name, shown in names.items()
        }
        return create_model(body.__name__, __base__=body, __doc__=body.__doc__, __module__=body.__module__, **fields)

    return add


@with_numbers(
    {each.name: each.name for each in SAMPLING_FIELDS},
    {each.name: each.description for each in SAMPLING_FIELDS}.get,
)
class SamplingNumbers(ServedFields, StructureFields):
    """The fields of SAMPLING_FIELDS, and the bounds on the answer's length."""

    max_tokens: int | None = None
    min_tokens: int | None = None


class SamplingBody(SamplingNumbers):
    """The fields that chat and text completions share. A field that is absent takes the model's own default."""

    nsigma: float | None = Field(None, description="Aphrodite's name for top_n_sigma")
    mirostat_mode: int | None = Field(None, description="Aphrodite's name for mirostat")
    dry_sequence_breakers: list[Word] | None = Field(
        None, max_length=MAX_BREAKERS, description="DRY: texts that no repetition reaches across"
    )
    bad_words: list[Word] = Field([], max_length=MAX_BAD_WORDS, description="texts that are never generated")
    allowed_token_ids: Annotated[list[int], FailFast()] = Field(
        [], max_length=MAX_ALLOWED_IDS, description="the only ids that may be sampled; empty = all"
    )
    logit_bias: dict[Annotated[str, Field(pattern=TOKEN_ID_KEY)], float] = Field({}, max_length=MAX_BIASES)
    seed: int | None = None
    n: int | None = Field(None, description="choices to return")
    use_beam_search: bool = Field(False, description="beam search of n beams, or of best_of where that is given")
    length_penalty: float | None = Field(None, description="of beam search: scores are divided by length ** this")
    early_stopping: EarlyStopping = Field(None, description="of beam search, as in transformers")
    stop: Stops = Field([])
    stop_token_ids: list[int] = Field([], max_length=MAX_STOP_IDS)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    prompt_logprobs: int | None = Field(
        None, description="log-probabilities of the prompt's tokens, each with so many of the best beside it"
    )
    truncate_prompt_tokens: int | None = Field(
        None, description="how many of the prompt's last tokens are kept; -1 keeps all that fit"
    )
    return_token_ids: bool = Field(False, description="give the ids of the prompt and of the answer too")
    return_tokens_as_token_ids: bool = Field(
        False, description='show the tokens of log-probabilities as "token_id:5", not as text'
    )
    stream: bool = False
    stream_options: StreamOptions | None = None

    def own_params(self) -> tuple[dict[str, Any], dict[str, str]]:
        """Return this API's values for max_tokens, logprobs and prompt_logprobs, and the client's field name for each.

        Raises ApiError.
        """
        raise NotImplementedError

    @property
    def num_candidates(self) -> int | None:
        """The number of choices to generate, of which the best n are returned; None means n."""
        return None


def check_stream_options(fields: dict[str, object]) -> None:
    """Refuse stream_options if stream is not true. Raises ApiError."""
    if fields.get("stream_options") and not fields.get("stream"):
        raise bad_field("stream_options", "stream_options needs stream to be true; leave it out")


def read_stream_options(fields: dict[str, object]) -> dict[str, object]:
    """Return the fields with those of stream_options checked. Raises ApiError."""
    check_stream_options(fields)
    options = fields.get("stream_options")
    if not isinstance(options, dict):
        return fields
    return {**fields, "stream_options": reject_unsupported(options, {}, StreamOptions, "stream_options.")}


B = TypeVar("B", bound=SamplingBody)
HERE_CHARACTERS, HERE_WORDS, HERE_IDS = 512, 8, 256  # a body up to these sizes is read in the event loop, within 1 ms
_SAME_NAME = (*(each.name for each in SAMPLING_FIELDS), "min_tokens", "seed", "truncate_prompt_tokens")
_OTHER_NAMES = {"top_n_sigma": "nsigma", "mirostat": "mirostat_mode"}  # read if the field itself is absent
_BEAM_FIELDS: Mapping[str, object] = {"length_penalty": 1.0, "early_stopping": False}  # field -> its neutral value


def spellings(body: SamplingBody) -> dict[str, str]:
    """Return a map from fields of SamplingParams to the client's fields, for names that differ."""
    structures = given_structures(body)
    return {
        "beam_width": "n" if body.num_candidates is None else "best_of",
        "bad_words_ids": "bad_words",
        "dry_breaker_ids": "dry_sequence_breakers",
        "grammar": structures[0][0] if structures else "tool_choice",
    }


def check_scores(num_tokens: int, num_top: int | None) -> None:
    """Refuse more prompt log-probabilities than an answer may hold; None requests none. Raises ApiError."""
    if num_top is not None and num_tokens * (1 + num_top) > MAX_PROMPT_SCORES:
        message = f"prompt_logprobs are {num_top} beside each of {num_tokens} prompt tokens; an answer holds "
        raise bad_field("prompt_logprobs", f"{message}{MAX_PROMPT_SCORES} of them, so give fewer or shorter prompts")


class ParamsReader:
    """Makes SamplingParams for one model. `max_choices` bounds n and best_of.

    `shown_ids` are the special tokens that chat answers do not skip: first without tools, second with tools.
    """

    def __init__(
        self,
        defaults: Mapping[str, Any],
        tokenizer: Tokenizer,
        max_choices: int,
        shown_ids: tuple[tuple[int, ...], tuple[int, ...]],
    ) -> None:
        self._defaults = defaults
        self._tokenizer = tokenizer
        self._max_choices = max_choices
        self._shown_ids = shown_ids

    async def read(self, body: SamplingBody) -> SamplingParams:
        """Return a body's sampling parameters. Raises ApiError naming the field.

        A body with many words to tokenize or with long lists is read on another thread.
        """
        num_characters = sum(map(len, body.bad_words)) + sum(map(len, body.dry_sequence_breakers or ()))
        is_short = num_characters <= HERE_CHARACTERS and len(body.bad_words) <= HERE_WORDS
        is_short &= len(body.allowed_token_ids) + len(body.logit_bias) + len(body.stop_token_ids) <= HERE_IDS
        return self._params(body) if is_short else await off_loop(lambda: self._params(body))

    def _choices(self, body: SamplingBody) -> dict[str, Any]:
        """Return the parameters for n, best_of and beam search. Raises ApiError."""
        best_of = body.num_candidates
        for name, count in (("n", body.n), ("best_of", best_of)):
            if count is not None and count > self._max_choices:
                raise bad_field(name, f"{name} is {count}; give at most {self._max_choices}")
        n = 1 if body.n is None else body.n
        if body.use_beam_search:
            logprobs = getattr(body, "logprobs", None)  # a bool in a chat, a number in a completion
            if logprobs is not None and logprobs is not False:
                raise bad_field("logprobs", "logprobs: a beam search gives none; leave one of the two out")
            if best_of is not None and best_of < n:
                raise bad_field("best_of", f"best_of is {best_of}; give at least n ({n})")
            given = {name: value for name in _BEAM_FIELDS if (value := getattr(body, name)) is not None}
            return {"n": n, "beam_width": n if best_of is None else best_of, **given}
        for name, harmless in _BEAM_FIELDS.items():
            if getattr(body, name) not in (None, harmless):
                raise bad_field(name, f"{name} needs use_beam_search to be true")
        return {"n": n, "best_of": best_of}

    def _params(self, body: SamplingBody) -> SamplingParams:
        own, renamed = body.own_params()
        given = dict(self._defaults)
        for name in _SAME_NAME:
            value = getattr(body, name)
            if value is not None:
                given[name] = value
        for name, other in _OTHER_NAMES.items():
            value = getattr(body, other)
            if value is not None and getattr(body, name) is None:
                given[name], renamed[name] = value, other
        given |= own | self._choices(body)
        if isinstance(body, ToolFields):
            given["shown_special_ids"] = self._shown_ids[bool(body.tools and body.usable_tools)]
        breakers = body.dry_sequence_breakers
        if breakers is None and given.get("dry_multiplier"):
            breakers = list(DRY_BREAKERS)
        try:
            params = SamplingParams(
                **given,
                logit_bias=tuple(zip(map(int, body.logit_bias), map(float, body.logit_bias.values()), strict=True)),
                bad_words_ids=bad_word_ids(self._tokenizer, body.bad_words) if body.bad_words else (),
                allowed_token_ids=tuple(body.allowed_token_ids),
                dry_breaker_ids=breaker_ids(self._tokenizer, breakers) if breakers else (),
                stop=tuple(body.stop),
                stop_token_ids=tuple(body.stop_token_ids),
                include_stop_str_in_output=body.include_stop_str_in_output,
                ignore_eos=body.ignore_eos,
                skip_special_tokens=body.skip_special_tokens,
            )
            if body.stream:
                check_stream(params)
        except InvalidRequestError as error:
            raise from_exception(error, {**spellings(body), **renamed}) from None
        return params


DRY_BREAKERS = ("\n", ":", '"', "*")  # the default when DRY is on, as DRY's author proposed


def bad_word_ids(tokenizer: Tokenizer, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
    """Return each word's token ids at the start of a text and after a space. Raises ApiError."""
    found: dict[tuple[int, ...], None] = {}
    for index, word in enumerate(words):
        spellings = [tuple(tokenizer.encode(text, False)) for text in (word, " " + word.lstrip())]
        if not spellings[0]:
            raise bad_field(f"bad_words[{index}]", f"bad_words[{index}] is {word[:40]!r}, which makes no tokens")
        found.update(dict.fromkeys(ids for ids in spellings if ids))
    return tuple(found)


def breaker_ids(tokenizer: Tokenizer, texts: Iterable[str]) -> tuple[int, ...]:
    """Return the last token id of each text. No repetition reaches across these tokens."""
    encoded = (tokenizer.encode(text, False) for text in texts)
    return tuple(dict.fromkeys(ids[-1] for ids in encoded if ids))
