"""From a body to SamplingParams: the only translation of HTTP names to the engine's.

Owns: names, the bound on choices.
Does not: repeat SamplingParams' ranges, or check ids against the vocabulary (Sessions does).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from octavo.core.request import DEFAULT_MAX_TOKENS, MODEL_FIELDS, SamplingParams
from octavo.errors import InvalidRequestError
from octavo.frontend.sessions import check_stream
from octavo.server.api.completions.bodies import ChatBody, CompletionBody
from octavo.server.bodies.sampling import MAX_PROMPT_SCORES, SamplingBody
from octavo.server.bodies.structure import given_structures
from octavo.server.http.body import off_loop
from octavo.server.http.errors import bad_field, from_exception
from octavo.text.dialect import Dialect

if TYPE_CHECKING:
    from octavo.text.tokenizer import Tokenizer

B = TypeVar("B", bound=SamplingBody)
HERE_CHARACTERS, HERE_WORDS, HERE_IDS = 512, 8, 256  # up to these the event loop reads a body, in a millisecond
_DRY = ("dry_multiplier", "dry_base", "dry_allowed_length", "dry_range")
_PENALTIES = ("presence_penalty", "frequency_penalty")
_AS_ASKED = (*MODEL_FIELDS, *_DRY, *_PENALTIES, "typical_p", "min_tokens", "seed", "truncate_prompt_tokens")
_OF_BEAMS: Mapping[str, object] = {"length_penalty": 1.0, "early_stopping": False}  # field -> its neutral value


def spellings(body: SamplingBody) -> dict[str, str]:
    """Return the client's spelling of fields that SamplingParams names otherwise."""
    width = "best_of" if isinstance(body, CompletionBody) and body.best_of is not None else "n"
    structures = given_structures(body)
    return {
        "beam_width": width,
        "bad_words_ids": "bad_words",
        "dry_breaker_ids": "dry_sequence_breakers",
        "grammar": structures[0][0] if structures else "tool_choice",
    }


async def read_params(body: B, read: Callable[[B], SamplingParams]) -> SamplingParams:
    """Read a body's parameters; on another thread if it has many words to tokenize, or long lists."""
    num_characters = sum(map(len, body.bad_words)) + sum(map(len, body.dry_sequence_breakers or ()))
    is_short = num_characters <= HERE_CHARACTERS and len(body.bad_words) <= HERE_WORDS
    is_short &= len(body.allowed_token_ids) + len(body.logit_bias) + len(body.stop_token_ids) <= HERE_IDS
    return read(body) if is_short else await off_loop(lambda: read(body))


def check_scores(num_tokens: int, num_top: int | None) -> None:
    """Refuse more log-probabilities of prompts than an answer may hold; None: none are requested. Raises ApiError."""
    if num_top is not None and num_tokens * (1 + num_top) > MAX_PROMPT_SCORES:
        message = f"prompt_logprobs are {num_top} beside each of {num_tokens} prompt tokens; an answer holds "
        raise bad_field("prompt_logprobs", f"{message}{MAX_PROMPT_SCORES} of them, so give fewer or shorter prompts")


def _of_n_predict(count: int) -> int | None:
    return None if count < 0 else count


class ParamsReader:
    """A maker of sampling parameters for one model. `max_choices` bounds n and best_of.

    `shown_ids` are the special tokens that a chat does not skip, without tools and with them.
    """

    def __init__(
        self,
        defaults: Mapping[str, Any],
        tokenizer: TextEncoder,
        max_choices: int,
        shown_ids: tuple[tuple[int, ...], tuple[int, ...]],
    ) -> None:
        self._defaults = defaults
        self._tokenizer = tokenizer
        self._max_choices = max_choices
        self._shown_ids = shown_ids

    def chat(self, body: ChatBody) -> SamplingParams:
        """Return the sampling parameters of a chat completion. Raises ApiError naming the field."""
        renamed: dict[str, str] = {}
        max_tokens = body.max_tokens
        if body.max_completion_tokens is not None:
            if max_tokens is not None and max_tokens != body.max_completion_tokens:
                raise bad_field("max_tokens", "max_tokens and max_completion_tokens differ; give one of them")
            max_tokens, renamed["max_tokens"] = body.max_completion_tokens, "max_completion_tokens"
        elif max_tokens is None and body.n_predict is not None:
            max_tokens, renamed["max_tokens"] = _of_n_predict(body.n_predict), "n_predict"
        logprobs = None
        if body.logprobs:
            logprobs, renamed["logprobs"] = body.top_logprobs or 0, "top_logprobs"
        elif body.top_logprobs:
            raise bad_field("top_logprobs", "top_logprobs needs logprobs to be true")
        asked = {
            "max_tokens": max_tokens,
            "logprobs": logprobs,
            "prompt_logprobs": body.prompt_logprobs,
            "shown_special_ids": self._shown_ids[bool(body.tools and body.usable_tools)],
            **self._choices(body, None),
        }
        return self._params(body, asked, renamed)

    def completion(self, body: CompletionBody) -> SamplingParams:
        """Return the sampling parameters of a text completion. Raises ApiError naming the field."""
        scored = body.prompt_logprobs
        if body.echo and (body.logprobs is not None or body.max_tokens == 0):
            scored = max(scored or 0, body.logprobs or 0)
        max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        is_renamed = body.max_tokens is None and body.n_predict is not None
        asked = {
            "max_tokens": _of_n_predict(body.n_predict or 0) if is_renamed else max_tokens,
            "logprobs": body.logprobs,
            "prompt_logprobs": scored,
            **self._choices(body, body.best_of),
        }
        return self._params(body, asked, {"max_tokens": "n_predict"} if is_renamed else {})

    def _choices(self, body: SamplingBody, best_of: int | None) -> dict[str, Any]:
        """Return the parameters of n, best_of and beam search. Raises ApiError."""
        for name, count in (("n", body.n), ("best_of", best_of)):
            if count is not None and count > self._max_choices:
                raise bad_field(name, f"{name} is {count}; give at most {self._max_choices}")
        n = 1 if body.n is None else body.n
        if body.use_beam_search:
            asked = getattr(body, "logprobs", None)  # a bool in a chat, a number in a completion
            if asked is not None and asked is not False:
                raise bad_field("logprobs", "logprobs: a beam search gives none; leave one of the two out")
            if best_of is not None and best_of < n:
                raise bad_field("best_of", f"best_of is {best_of}; give at least n ({n})")
            given = {name: value for name in _OF_BEAMS if (value := getattr(body, name)) is not None}
            return {"n": n, "beam_width": n if best_of is None else best_of, **given}
        for name, neutral in _OF_BEAMS.items():
            if getattr(body, name) not in (None, neutral):
                raise bad_field(name, f"{name} needs use_beam_search to be true")
        return {"n": n, "best_of": best_of}

    def _params(self, body: SamplingBody, asked: Mapping[str, Any], renamed: Mapping[str, str]) -> SamplingParams:
        given = dict(self._defaults)
        for name in _AS_ASKED:
            value = getattr(body, name)
            if value is not None:
                given[name] = value
        breakers = body.dry_sequence_breakers
        if breakers is None and body.dry_multiplier:
            breakers = list(DRY_BREAKERS)
        try:
            params = SamplingParams(
                **{**given, **asked},
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


def shown_ids(dialect: Dialect, has_tools: bool, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the special tokens that are not skipped: those that separate the parts of an answer."""
    ids = [tokenizer.backend.token_to_id(marker) for marker in dialect.markers(has_tools)]
    return tuple(sorted({token_id for token_id in ids if token_id in tokenizer.special_ids}))


DRY_BREAKERS = ("\n", ":", '"', "*")  # the default with DRY, as its author proposed


class TextEncoder(Protocol):
    """The part of a tokenizer that is used here."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text."""
        ...


def bad_word_ids(tokenizer: TextEncoder, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
    """Return the ids of each word at the start of a text and after a space. Raises ApiError."""
    found: dict[tuple[int, ...], None] = {}
    for index, word in enumerate(words):
        spellings = [tuple(tokenizer.encode(text, False)) for text in (word, " " + word.lstrip())]
        if not spellings[0]:
            raise bad_field(f"bad_words[{index}]", f"bad_words[{index}] is {word[:40]!r}, which makes no tokens")
        found.update(dict.fromkeys(ids for ids in spellings if ids))
    return tuple(found)


def breaker_ids(tokenizer: TextEncoder, texts: Iterable[str]) -> tuple[int, ...]:
    """Return the last id of each text: a repetition is counted from after it."""
    encoded = (tokenizer.encode(text, False) for text in texts)
    return tuple(dict.fromkeys(ids[-1] for ids in encoded if ids))
