"""StreamFormat: what surrounds the events of a stream in each interface.

Owns: media type, keep-alive, the last bytes, and how an error looks in mid-stream. Does not: know events.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from octavo.server.faults import ApiError


def _openai_error(error: ApiError) -> bytes:
    return b"data: " + msgspec.json.encode(error.body()) + b"\n\n"


@dataclass(frozen=True, slots=True)
class StreamFormat:
    """`error` gives the events of a failure; `keep_alive` is b"" where nothing may stand between events.

    `done` ends every stream, also one that failed. `has_ids`: whether a line with an event's id may precede it.
    `by_token`: whether each token's events stand alone, so that every reading of an answer has the same events.
    """

    media_type: str
    done: bytes
    keep_alive: bytes
    error: Callable[[ApiError], bytes]
    has_ids: bool = True
    by_token: bool = False


OPENAI = StreamFormat("text/event-stream", b"data: [DONE]\n\n", b": keep-alive\n\n", _openai_error)
