"""EmbeddingBody: the body of POST /v1/embeddings.

Owns: its fields. Does not: tokenize or compare anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from octavo.server.api.completions.bodies import Prompts
from octavo.server.bodies.checks import Refused, sift, validate
from octavo.server.bodies.served import ServedFields
from octavo.server.http.errors import bad_field

MAX_INPUTS = 2048
IGNORED_HERE: Mapping[str, str] = {"user": "kept for the caller's own records; nothing here depends on it"}
REFUSED_EMBEDDING: Refused = {
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "normalize": (True,),
    "use_activation": (True,),
    "messages": (),
}


class PooledFields(ServedFields):
    """The fields of all endpoints that answer with vectors, or with scores made of them."""

    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, lt=2**31, description="how many tokens to keep at the end of each text; -1 = as many as fit"
    )
    add_special_tokens: bool = Field(True, description="put the tokenizer's own tokens around a text")


class EmbeddingBody(PooledFields):
    """POST /v1/embeddings."""

    input: Prompts
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(
        None, ge=1, lt=2**31, description="how many numbers of each vector to return, scaled to length 1 again"
    )


def read_embedding(fields: dict[str, object]) -> EmbeddingBody:
    """Check an embedding body. Raises ApiError naming the field."""
    body = validate(EmbeddingBody, sift(fields, REFUSED_EMBEDDING, EmbeddingBody, ignored=IGNORED_HERE))
    if len(body.input) > MAX_INPUTS:
        raise bad_field("input", f"input holds {len(body.input)} texts; give at most {MAX_INPUTS}")
    return body
