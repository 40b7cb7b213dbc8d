"""SamplingBody: the fields of all endpoints that generate text.

Owns: their names, types and bounds on length. Does not: check ranges of sampling fields (SamplingParams does).
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, FailFast, Field, WithJsonSchema

from octavo.server.bodies.checks import Body, sift
from octavo.server.bodies.served import ServedFields
from octavo.server.bodies.structure import StructureFields
from octavo.server.http.errors import bad_field

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
MAX_BIASES = 1024
MAX_STOP_IDS = 1024
MAX_BAD_WORDS = 128
MAX_BREAKERS = 64
MAX_WORD_CHARACTERS = 256
MAX_ALLOWED_IDS = 65_536
N_PREDICT = "llama.cpp's name for max_tokens; below 0 for as many as fit"
MAX_PROMPT_SCORES = 1_048_576  # log-probabilities of prompts in one answer, 50 MB of JSON


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _early_stopping(value: object) -> object:
    if value is not None and not isinstance(value, bool) and value != "never":
        raise ValueError('give true, false or "never"')
    return value


Stops = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]],
    Field(max_length=MAX_STOPS),
    BeforeValidator(_listed, json_schema_input_type=str | list[str]),
]
Word = Annotated[str, Field(min_length=1, max_length=MAX_WORD_CHARACTERS)]
EarlyStopping = Annotated[
    object,
    BeforeValidator(_early_stopping),
    WithJsonSchema({"anyOf": [{"type": "boolean"}, {"const": "never"}, {"type": "null"}]}),
]


class StreamOptions(Body):
    """What a stream holds besides the text."""

    include_usage: bool = False
    continuous_usage_stats: bool = Field(False, description="with include_usage: the usage so far in every chunk")


class SamplingBody(ServedFields, StructureFields):
    """The fields that chat and text completions share. A field left out takes the model's own default."""

    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    dry_multiplier: float | None = Field(None, description="DRY: strength of the penalty on repetitions; 0 = off")
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_range: int | None = Field(None, description="DRY: how many of the last tokens are looked at; 0 = all")
    dry_sequence_breakers: list[Word] | None = Field(
        None, max_length=MAX_BREAKERS, description="DRY: texts that no repetition reaches across"
    )
    bad_words: list[Word] = Field([], max_length=MAX_BAD_WORDS, description="texts that may not be said")
    allowed_token_ids: Annotated[list[int], FailFast()] = Field(
        [], max_length=MAX_ALLOWED_IDS, description="the only ids that may be sampled; empty = all"
    )
    logit_bias: dict[Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,9})$")], float] = Field({}, max_length=MAX_BIASES)
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


def check_stream_options(fields: dict[str, object]) -> None:
    """Refuse stream_options without stream. Raises ApiError."""
    if fields.get("stream_options") and not fields.get("stream"):
        raise bad_field("stream_options", "stream_options needs stream to be true; leave it out")


def sift_stream_options(fields: dict[str, object]) -> dict[str, object]:
    """Return the fields, with those of stream_options checked. Raises ApiError."""
    check_stream_options(fields)
    options = fields.get("stream_options")
    if not isinstance(options, dict):
        return fields
    return {**fields, "stream_options": sift(options, {}, StreamOptions, "stream_options.")}
