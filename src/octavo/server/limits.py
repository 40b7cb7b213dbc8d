"""HttpLimits: bounds of heads, bodies, connections and times. Does not: enforce them."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class JsonLimits:
    """Bounds of one JSON body. `max_parts` counts strings, objects and lists; `max_values` numbers and constants."""

    max_depth: int = 64
    max_parts: int = 65_536
    max_values: int = 1 << 20


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Bounds of one request, one connection and all of them.

    A body without a valid key, if keys are set, must arrive within `stranger_body_timeout_s`, and at most
    `max_stranger_bodies` of them may be unfinished.
    More than `max_header_bytes` are answered 431; a head over `max_head_bytes` is cut. The application answers a slow
    body after `body_timeout_s`; a connection whose body is not read is cut `body_grace_s` later.
    `max_upload_bytes` bounds a file (--max-upload-bytes with --batch-dir, else 0); after `upload_grace_s` it must have
    arrived at `min_upload_bytes_per_s` on average.
    A client that does not read its stream is cut after `stall_timeout_s`, or once `max_unread_bytes` wait for it.
    """

    max_body_bytes: int = 8 * 1024 * 1024
    max_upload_bytes: int = 0
    max_header_bytes: int = 16 * 1024
    max_headers: int = 100
    json: JsonLimits = field(default_factory=JsonLimits)
    max_prompts: int = 256
    max_choices: int = 16
    max_head_bytes: int = 64 * 1024
    head_timeout_s: float = 10.0
    handshake_timeout_s: float = 5.0
    max_connections: int = 1024
    max_pipelined: int = 4
    body_timeout_s: float = 30.0
    body_grace_s: float = 5.0
    upload_grace_s: float = 5.0
    min_upload_bytes_per_s: int = 8192
    stranger_body_timeout_s: float = 2.0
    max_stranger_bodies: int = 16
    stall_timeout_s: float = 30.0
    max_unread_bytes: int = 128 * 1024
    keep_alive_s: float = 10.0
