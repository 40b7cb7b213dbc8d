"""How one request is sampled: SamplingParams, with the range of every field.

Owns: the fields and their checks. Does not: sample, or know a vocabulary (see admission and the front end).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from octavo.errors import InvalidRequestError

_MAX_SHOWN = 200  # characters of a value in a message


def check(ok: bool, param: str, value: object, remedy: str) -> None:
    """Raise InvalidRequestError with the field, its value and the remedy unless `ok`."""
    if not ok:
        shown = repr(value)
        shown = shown if len(shown) <= _MAX_SHOWN else shown[: _MAX_SHOWN - 3] + "..."
        raise InvalidRequestError(f"{param} is {shown}; {remedy}", param)


def is_int(value: object) -> bool:
    """Whether a value is a whole number; True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


MAX_GRAMMAR = 1 << 20  # characters
DEFAULT_MAX_TOKENS = 16  # as OpenAI's completions and vLLM's SamplingParams have it
_INT32 = 2**31 - 1  # whole numbers travel and are kept as 32-bit columns

_MAX_TOKENS = "give at least 1"
# Whole numbers: field -> (least, greatest, remedy). Those of _OPTIONAL may be None.
_WHOLE: dict[str, tuple[int, int, str]] = {
    "max_tokens": (0, _INT32, _MAX_TOKENS),
    "min_tokens": (0, _INT32, "give 0 or more"),
    "top_k": (-1, _INT32, "give 0 or -1 (off) or a positive whole number"),
    "logprobs": (0, 20, "give a whole number from 0 to 20"),
    "prompt_logprobs": (0, 20, "give a whole number from 0 to 20"),
    "truncate_prompt_tokens": (-1, _INT32, "give how many of the prompt's last tokens to keep, or -1 for all that fit"),
    "seed": (-(2**63), 2**64 - 1, "give a 64-bit whole number"),
    "n": (1, _INT32, "give at least 1"),
    "best_of": (1, _INT32, "give at least n, or leave it out"),
    "beam_width": (0, 64, "give a whole number from 0 (no beam search) to 64"),
    "dry_allowed_length": (1, _INT32, "give at least 1"),
    "dry_range": (0, _INT32, "give 0 (the whole context) or a number of tokens"),
}
_OPTIONAL = ("max_tokens", "logprobs", "prompt_logprobs", "truncate_prompt_tokens", "seed", "best_of")
# Other numbers: field -> (least, greatest, remedy).
_REAL: dict[str, tuple[float, float, str]] = {
    "temperature": (0.0, 100.0, "give a number from 0 (greedy) to 100"),
    "top_p": (0.0, 1.0, "give a number from 0 (the likeliest token only) to 1 (off)"),
    "min_p": (0.0, 1.0, "give a number from 0 to 1"),
    "typical_p": (1e-9, 1.0, "give a number above 0, up to 1 (off)"),
    "presence_penalty": (-2.0, 2.0, "give a number from -2 to 2"),
    "frequency_penalty": (-2.0, 2.0, "give a number from -2 to 2"),
    "repetition_penalty": (1e-3, 100.0, "give a number above 0; 1 is off"),
    "dry_multiplier": (0.0, 100.0, "give a number from 0 (off) to 100"),
    "dry_base": (1.0, 100.0, "give a number from 1 to 100"),
    "length_penalty": (-100.0, 100.0, "give a number from -100 to 100"),
}
# Lists: field -> what they hold. None is an empty one; of `stop` one string, of `logit_bias` a dict is taken too.
_ENTRIES = {
    "logit_bias": "(token id, bias) pairs",
    "stop": "strings",
    "stop_token_ids": "token ids",
    "bad_words_ids": "non-empty tuples of token ids",
    "allowed_token_ids": "token ids",
    "dry_breaker_ids": "token ids",
    "shown_special_ids": "token ids",
}

# What other libraries call a field, or have and this one does not: name -> what to give instead.
_ELSEWHERE = {
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
}
# What a model's generation config says about sampling.
MODEL_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def sampling_defaults(generation: Mapping[str, float]) -> dict[str, Any]:
    """Return the sampling fields that a model's generation config sets; all others keep SamplingParams' defaults.

    The command line, the HTTP interfaces and the library all take what a request leaves out from here.
    Raises InvalidRequestError when a value is out of range.
    """
    defaults: dict[str, Any] = {name: generation[name] for name in MODEL_FIELDS if generation.get(name) is not None}
    if "top_k" in defaults:
        defaults["top_k"] = int(defaults["top_k"])
    SamplingParams(**defaults)
    return defaults


def _are_ids(values: Sequence[Any]) -> bool:
    """Whether all are whole numbers of 0 or more; lists of a whole vocabulary are looked at in a millisecond."""
    if set(map(type, values)) == {int}:
        return bool(min(values) >= 0)
    return all(is_int(value) and value >= 0 for value in values)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample one request. Every field is checked when the object is made.

    `max_tokens=None` means as many as fit; 0, with prompt_logprobs, that nothing else is wanted. `temperature=0` is
    greedy. `top_k=0` means off. `truncate_prompt_tokens=k` keeps the last k tokens of the prompt, -1 all that fit.
    `logprobs=k` asks for the sampled token's log-probability and the k best beside it.
    `seed=None` is replaced by a drawn seed in the front, so that a request is always replayable.
    `bad_words_ids`: sequences of ids that must not be completed; `allowed_token_ids`: the only ids that may be
    sampled (empty = all). `dry_*`: the DRY penalty against repeating what came before: an id that would prolong
    a repetition of `dry_allowed_length` or more tokens loses dry_multiplier * dry_base ** (length - allowed).
    `stop` may be one string, `logit_bias` a dict; None is an empty list everywhere.
    `n` choices are returned; with `best_of` > n so many are made and the n of highest mean log-probability kept.
    `beam_width` > 0 is beam search: n of so many beams are returned, `length_penalty` and `early_stopping`
    (True, False or "never") as in transformers. `shown_special_ids` are in the text although special tokens are
    skipped. `grammar` is what the output must obey, in the form that the grammar
    unit compiles to ("" = anything); an output that completes it ends. Raises InvalidRequestError naming the field.
    """

    max_tokens: int | None = DEFAULT_MAX_TOKENS
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_range: int = 0
    dry_breaker_ids: tuple[int, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    seed: int | None = None
    n: int = 1
    best_of: int | None = None
    beam_width: int = 0
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    shown_special_ids: tuple[int, ...] = ()
    grammar: str = ""

    def __new__(cls, *_: object, **fields: object) -> Self:
        """Refuse unknown fields with what to give instead; Python's own error would only name them."""
        for name in fields:
            if name not in cls.__dataclass_fields__:
                remedy = _ELSEWHERE.get(name, f"give {', '.join(cls.__dataclass_fields__)}")
                raise InvalidRequestError(f"SamplingParams has no field {name}; {remedy}", name)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        for name, (low, high, remedy) in _WHOLE.items():
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            if is_int(value) and value > high == _INT32:
                remedy = f"give less than {2**31}"
            check(is_int(value) and low <= value <= high, name, value, remedy)
        for name, (least, greatest, remedy) in _REAL.items():
            value = getattr(self, name)
            check(_is_number(value) and least <= value <= greatest, name, value, remedy)
        self._set_lists()
        self._check_lists()
        self._check_choices()
        if self.grammar != "":
            self._check_grammar()

    def _set_lists(self) -> None:
        """Bring the other accepted forms of lists into the one that is kept."""
        for name, entries in _ENTRIES.items():
            value: object = getattr(self, name)
            if isinstance(value, (tuple, list)):
                continue
            if value is None:
                value = ()
            elif name == "stop" and isinstance(value, str):
                value = (value,)
            elif name == "logit_bias" and isinstance(value, Mapping):
                value = tuple(value.items())
            check(isinstance(value, tuple), name, value, f"give a tuple of {entries}")
            object.__setattr__(self, name, value)

    def _check_lists(self) -> None:
        remedy = "give token ids of the model's vocabulary"
        for entry in self.logit_bias:
            ok = isinstance(entry, (tuple, list)) and len(entry) == 2
            check(ok, "logit_bias", self.logit_bias, f"give a tuple of {_ENTRIES['logit_bias']}")
            token, bias = entry
            check(is_int(token) and token >= 0, "logit_bias", token, "use token ids of the model's vocabulary as keys")
            ok = _is_number(bias) and -100.0 <= bias <= 100.0
            check(ok, "logit_bias", bias, "give each bias a number from -100 to 100")
        check(all(isinstance(s, str) and s for s in self.stop), "stop", self.stop, "give non-empty strings")
        for name in ("stop_token_ids", "allowed_token_ids", "dry_breaker_ids", "shown_special_ids"):
            ids = getattr(self, name)
            check(_are_ids(ids), name, ids, remedy)
        for word in self.bad_words_ids:
            ok = isinstance(word, (tuple, list)) and len(word) > 0
            check(ok, "bad_words_ids", word, f"give a tuple of {_ENTRIES['bad_words_ids']}")
            check(all(is_int(token) and token >= 0 for token in word), "bad_words_ids", word, remedy)

    def _check_choices(self) -> None:
        check(self.truncate_prompt_tokens != 0, "truncate_prompt_tokens", 0, _WHOLE["truncate_prompt_tokens"][2])
        if self.max_tokens == 0:
            check(self.prompt_logprobs is not None, "max_tokens", 0, _MAX_TOKENS)
            check(self.num_sequences == 1 and not self.beam_width, "max_tokens", 0, "give 1 choice where none is made")
        if self.max_tokens is not None:
            remedy = f"give at most max_tokens ({self.max_tokens})"
            check(self.min_tokens <= self.max_tokens, "min_tokens", self.min_tokens, remedy)
        if self.best_of is not None:
            check(self.best_of >= self.n, "best_of", self.best_of, f"give at least n ({self.n})")
        ok = isinstance(self.early_stopping, bool) or self.early_stopping == "never"
        check(ok, "early_stopping", self.early_stopping, 'give true, false or "never"')
        if self.beam_width:
            check(self.n <= self.beam_width, "n", self.n, f"give at most beam_width ({self.beam_width})")
            check(self.best_of is None, "best_of", self.best_of, "leave it out; beam search has beam_width")

    def _check_grammar(self) -> None:
        shown = "..."  # its text may be long, and is nothing that a person wrote
        check(isinstance(self.grammar, str), "grammar", self.grammar, "give the text of a compiled grammar")
        check(len(self.grammar) <= MAX_GRAMMAR, "grammar", shown, f"give at most {MAX_GRAMMAR} characters")
        check(self.beam_width == 0, "grammar", shown, "leave it out; beam search takes none")
        check(self.min_tokens == 0, "min_tokens", self.min_tokens, "leave it out; the grammar says when an output ends")
        check(not self.ignore_eos, "ignore_eos", self.ignore_eos, "leave it out; the grammar says when an output ends")

    def num_kept(self, max_model_len: int) -> int | None:
        """Return how many of a prompt's last tokens truncate_prompt_tokens keeps, None for all.

        -1 leaves room for max_tokens, or for one token where that is None.
        """
        if self.truncate_prompt_tokens != -1:
            return self.truncate_prompt_tokens
        return max(1, max_model_len - (1 if self.max_tokens is None else self.max_tokens))

    @property
    def num_sequences(self) -> int:
        """Sequences that run: beams, or choices made."""
        return self.beam_width or self.best_of or self.n

    @property
    def num_logprobs(self) -> int | None:
        """Log-probabilities that the executor must give with each token: best_of ranks by the token's own."""
        if self.logprobs is None and (self.best_of or self.n) > self.n:
            return 0
        return self.logprobs
