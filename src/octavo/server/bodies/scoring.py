"""ScoreBody and RerankBody: the texts to compare.

Owns: their fields, and the pairs of a ScoreBody. Does not: compute.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, FailFast, Field

from octavo.server.bodies.checks import Refused, sift, validate
from octavo.server.bodies.embedding import IGNORED_HERE, MAX_INPUTS, PooledFields
from octavo.server.http.errors import bad_field

REFUSED_SCORE: Refused = {"use_activation": (), "activation": (), "encoding_format": ("float",)}
REFUSED_RERANK: Refused = {**REFUSED_SCORE, "rank_fields": (), "max_chunks_per_doc": (), "return_embeddings": (False,)}


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _documents(value: object) -> object:
    """Replace each document that is an object with a text by that text."""
    if not isinstance(value, list):
        return value
    return [item["text"] if isinstance(item, dict) and set(item) == {"text"} else item for item in value]


TextList = Annotated[
    list[str], FailFast(), Field(min_length=1), BeforeValidator(_listed, json_schema_input_type=str | list[str])
]


class ScoreBody(PooledFields):
    """POST /score and /v1/score."""

    text_1: TextList
    text_2: TextList

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """The pairs of indices into `text_1` and `text_2` to compare: one with all, or each with its own."""
        firsts = [0] * len(self.text_2) if len(self.text_1) == 1 else range(len(self.text_1))
        return list(zip(firsts, range(len(self.text_2)), strict=True))


class RerankBody(PooledFields):
    """POST /rerank, /v1/rerank and /v2/rerank."""

    query: str
    documents: Annotated[
        list[str],
        FailFast(),
        Field(min_length=1, max_length=MAX_INPUTS - 1),
        BeforeValidator(_documents, json_schema_input_type=list[str | dict[str, str]]),
    ]
    top_n: int | None = Field(None, ge=0, lt=2**31, description="so many of the best are given; 0 or none = all")
    return_documents: bool | None = Field(
        None, description="whether each result has its document (default: yes, but for /v2/rerank)"
    )
    max_tokens_per_doc: int | None = Field(
        None, ge=1, lt=2**31, description="how many tokens to keep at the beginning of each text"
    )


def read_score(fields: dict[str, object]) -> ScoreBody:
    """Check a score body. Raises ApiError naming the field."""
    body = validate(ScoreBody, sift(fields, REFUSED_SCORE, ScoreBody, ignored=IGNORED_HERE))
    first, second = len(body.text_1), len(body.text_2)
    if first not in (1, second):
        message = f"text_1 has {first} texts and text_2 has {second}; give one, or as many as text_2 has"
        raise bad_field("text_1", message)
    if first + second > MAX_INPUTS:
        name = "text_2" if second >= first else "text_1"
        raise bad_field(name, f"text_1 and text_2 have {first + second} texts; give at most {MAX_INPUTS} together")
    return body


def read_rerank(fields: dict[str, object]) -> RerankBody:
    """Check a rerank body. Raises ApiError naming the field."""
    body = validate(RerankBody, sift(fields, REFUSED_RERANK, RerankBody, ignored=IGNORED_HERE))
    if body.max_tokens_per_doc is not None and body.truncate_prompt_tokens is not None:
        message = "max_tokens_per_doc and truncate_prompt_tokens both shorten texts; give one of them"
        raise bad_field("max_tokens_per_doc", message)
    return body
