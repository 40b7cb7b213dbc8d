"""ServedFields: priority, timeouts, objectives and other fields that all computing endpoints share.

Owns: those fields. Does not: know the rest of a body.
"""

from __future__ import annotations

from pydantic import Field

from octavo.server.bodies.checks import Body

MAX_TIMEOUT_S = 86_400.0


class ServedFields(Body):
    """The fields of everything that the engine computes."""

    model: str | None = Field(None, description="the served model's name; may be left out")
    priority: int | None = Field(
        None,
        ge=-(2**31),
        lt=2**31,
        description="smaller is more urgent, 0 unless the key says otherwise; for the scheduling policy (fcfs and fifo "
        "do not look at it), and what is above 0 is refused first under load",
    )
    cache_salt: str | None = Field(None, min_length=1, max_length=256)
    timeout: float | None = Field(None, gt=0, le=MAX_TIMEOUT_S, description="seconds until the request is given up")
    queue_timeout: float | None = Field(
        None,
        gt=0,
        le=MAX_TIMEOUT_S,
        description="seconds until the request is given up if it has not started; the server may have a shorter bound",
    )
    ttft_objective: float | None = Field(
        None, gt=0, le=MAX_TIMEOUT_S, description="seconds to the first token that the deadline policy aims at"
    )
    tpot_objective: float | None = Field(
        None, gt=0, le=MAX_TIMEOUT_S, description="seconds for each later token that the deadline policy aims at"
    )
