"""CompletionBody: what POST /v1/completions takes."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema

from octavo.server.bodies.checks import Refused, read
from octavo.server.bodies.sampling import N_PREDICT, SamplingBody, sift_stream_options

REFUSED_COMPLETION: Refused = {}


def _is_id(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**31


def read_texts_or_ids(value: object) -> list[str | list[int]]:
    """Normalise the four shapes of `prompt` to a list of texts or id lists. Raises ValueError."""
    message = "give a string, a list of strings, a list of token ids (0 or more) or a list of lists of token ids"
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise ValueError(message)
    if not value:
        raise ValueError("it is empty; " + message)
    if all(map(_is_id, value)):
        return [value]
    for item in value:
        if not isinstance(item, str) and not (isinstance(item, list) and all(map(_is_id, item))):
            raise ValueError(message)
    return value


Prompts = Annotated[
    list[Any],  # texts and lists of ids: the validator below has looked at them
    BeforeValidator(read_texts_or_ids),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}},
                {"type": "array", "items": {"type": "integer"}},
                {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
            ]
        }
    ),
]


class CompletionBody(SamplingBody):
    """POST /v1/completions."""

    prompt: Prompts
    best_of: int | None = Field(None, description="choices to make, of which the n likeliest per token are returned")
    n_predict: int | None = Field(None, description=N_PREDICT)
    add_special_tokens: bool = Field(True, description="put the tokenizer's own tokens around a prompt of text")
    logprobs: int | None = None
    echo: bool = False


def read_completion(fields: dict[str, object]) -> CompletionBody:
    """Check a completion body. Raises ApiError naming the field."""
    return read(CompletionBody, sift_stream_options(fields), REFUSED_COMPLETION)
