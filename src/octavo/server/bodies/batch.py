"""BatchBody: the body of POST /v1/batches.

Owns: its fields. Does not: read the input file.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from octavo.server.api.responses.bodies import MAX_METADATA, MAX_METADATA_CHARACTERS, MAX_METADATA_KEY_CHARACTERS
from octavo.server.bodies.checks import Body, sift, validate

MAX_FILE_ID_CHARACTERS = 128


class OutputExpiry(Body):
    """How long the outputs are kept."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=3600, le=2_592_000)]


MetadataKey = Annotated[str, Field(max_length=MAX_METADATA_KEY_CHARACTERS)]
MetadataValue = Annotated[str, Field(max_length=MAX_METADATA_CHARACTERS)]


class BatchBody(Body):
    """POST /v1/batches."""

    input_file_id: Annotated[str, Field(min_length=1, max_length=MAX_FILE_ID_CHARACTERS)]
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
    completion_window: Literal["24h"]
    metadata: Annotated[dict[MetadataKey, MetadataValue], Field(max_length=MAX_METADATA)] | None = None
    output_expires_after: OutputExpiry | None = None


def read_batch(fields: dict[str, object]) -> BatchBody:
    """Check a batch. Raises ApiError naming the field."""
    return validate(BatchBody, sift(fields, {}, BatchBody, ignored={}))
