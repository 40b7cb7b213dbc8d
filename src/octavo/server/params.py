"""From a body to SamplingParams: the one place where HTTP names meet the engine's.

Owns: names, and defaults from the model's generation config.
Does not: repeat SamplingParams' ranges, or check ids against the vocabulary (Sessions does).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.core.request import SamplingParams
from octavo.errors import InvalidRequestError
from octavo.server.faults import bad_field, from_exception
from octavo.server.schema import ChatBody, CompletionBody, SamplingBody

_FROM_MODEL = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_AS_ASKED = (*_FROM_MODEL, "min_tokens", "presence_penalty", "frequency_penalty", "seed")


def model_defaults(generation: Mapping[str, float]) -> dict[str, Any]:
    """The sampling fields that a model's generation config sets. Raises InvalidRequestError when out of range."""
    defaults: dict[str, Any] = {name: generation[name] for name in _FROM_MODEL if generation.get(name) is not None}
    if "top_k" in defaults:
        defaults["top_k"] = int(defaults["top_k"])
    SamplingParams(**defaults)
    return defaults


def chat_params(body: ChatBody, defaults: Mapping[str, Any]) -> SamplingParams:
    """Sampling parameters of a chat completion. Raises ApiError naming the field."""
    renamed: dict[str, str] = {}
    max_tokens = body.max_tokens
    if body.max_completion_tokens is not None:
        if max_tokens is not None and max_tokens != body.max_completion_tokens:
            raise bad_field("max_tokens", "max_tokens and max_completion_tokens differ; give one of them")
        max_tokens, renamed["max_tokens"] = body.max_completion_tokens, "max_completion_tokens"
    logprobs = None
    if body.logprobs:
        logprobs, renamed["logprobs"] = body.top_logprobs or 0, "top_logprobs"
    elif body.top_logprobs:
        raise bad_field("top_logprobs", "top_logprobs needs logprobs to be true")
    return _params(body, {"max_tokens": max_tokens, "logprobs": logprobs}, defaults, renamed)


def completion_params(body: CompletionBody, defaults: Mapping[str, Any]) -> SamplingParams:
    """Sampling parameters of a text completion. Raises ApiError naming the field."""
    if body.echo and body.logprobs is not None:
        raise bad_field("echo", "echo together with logprobs is not supported yet; leave one out", "unsupported_field")
    return _params(body, {"max_tokens": body.max_tokens, "logprobs": body.logprobs}, defaults, {})


def _params(
    body: SamplingBody,
    asked: dict[str, int | None],
    defaults: Mapping[str, Any],
    renamed: Mapping[str, str],
) -> SamplingParams:
    given = {name: value for name in _AS_ASKED if (value := getattr(body, name)) is not None}
    biases = tuple((int(token), float(bias)) for token, bias in body.logit_bias.items())
    try:
        return SamplingParams(
            **{**defaults, **given, **asked},
            logit_bias=biases,
            stop=tuple(body.stop),
            stop_token_ids=tuple(body.stop_token_ids),
            include_stop_str_in_output=body.include_stop_str_in_output,
            ignore_eos=body.ignore_eos,
            skip_special_tokens=body.skip_special_tokens,
        )
    except InvalidRequestError as error:
        raise from_exception(error, renamed) from None
