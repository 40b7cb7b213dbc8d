"""OllamaEmbedBody and OllamaEmbeddingsBody: the bodies of POST /api/embed and of the older /api/embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import BeforeValidator, Field

from octavo.server.bodies.checks import Refused, sift, validate
from octavo.server.bodies.embedding import MAX_INPUTS
from octavo.server.bodies.served import ServedFields

IGNORED_EMBED: Mapping[str, str] = {
    "keep_alive": "the model stays loaded while the server runs",
    "options": "nothing is sampled, and how the model is loaded is the server's business",
}
REFUSED_EMBED: Refused = {}


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


class OllamaEmbedBody(ServedFields):
    """POST /api/embed."""

    input: Annotated[list[str], BeforeValidator(_listed, json_schema_input_type=str | list[str])] = Field(
        [], max_length=MAX_INPUTS
    )
    truncate: bool = Field(True, description="cut a text's end that does not fit; false: it is refused")
    dimensions: int | None = Field(
        None, ge=1, lt=2**31, description="how many numbers of each vector to return, scaled to length 1 again"
    )


class OllamaEmbeddingsBody(ServedFields):
    """POST /api/embeddings."""

    prompt: str = ""


def read_embed(fields: dict[str, object]) -> OllamaEmbedBody:
    """Check a body of /api/embed. Raises ApiError naming the field."""
    return validate(OllamaEmbedBody, sift(fields, REFUSED_EMBED, OllamaEmbedBody, ignored=IGNORED_EMBED))


def read_embeddings(fields: dict[str, object]) -> OllamaEmbeddingsBody:
    """Check a body of /api/embeddings. Raises ApiError naming the field."""
    return validate(OllamaEmbeddingsBody, sift(fields, REFUSED_EMBED, OllamaEmbeddingsBody, ignored=IGNORED_EMBED))
