"""What a recording is made of: its header, and the calls of a scheduler with all that its decisions depend on.

Owns: the types that writers take and readers give. Does not: encode them (encoding, decoding), or call a scheduler.
Times are seconds on the engine's monotonic clock; `Header.began` is the wall time at `Header.clock`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from octavo.core.limits import Limits
from octavo.core.plan import StepFailure, StepPlan, StepResult
from octavo.core.request import FinishReason, Request

VERSION = 1


@dataclass(frozen=True, slots=True)
class Header:
    """Whose life a segment tells of.

    `began` is in Unix seconds, at `clock` on the engine's clock. `has_text`: token ids are in it. `settings` are the
    engine's, by the spelling of their flags; names and numbers only. `key_tokens` tokens stand under each block key.
    """

    model: str
    limits: Limits
    depth: int
    device: str = ""
    began: float = 0.0
    clock: float = 0.0
    has_text: bool = False
    settings: Mapping[str, object] = field(default_factory=dict)
    octavo: str = ""
    version: int = VERSION

    @property
    def key_tokens(self) -> int:
        """Tokens under each block key."""
        return self.limits.block_size


@dataclass(frozen=True, slots=True)
class KeyRun:
    """Block keys that a sequence got during a call: those from index `first` on, of request number `order`."""

    order: int
    choice: int
    first: int
    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Admit:
    """A request was taken. Without text it has no ids, and its stop ids are stand-ins (see masks)."""

    now: float
    request: Request
    keys: tuple[KeyRun, ...] = ()
    is_blind: bool = False  # the engine had no ids of it either


@dataclass(frozen=True, slots=True)
class Cancel:
    """Requests were ended from outside."""

    now: float
    request_ids: tuple[str, ...]
    reason: FinishReason
    message: str | None = None


@dataclass(frozen=True, slots=True)
class EndChoice:
    """One choice was ended from outside, as at a stop string."""

    now: float
    request_id: str
    choice: int
    reason: FinishReason
    message: str | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan was made: begun at `now`, done at `planned`. Its `plan` has columns and names, no events.

    `digest` leaves ids out unless the recording has text; b"" for a plan that was empty.
    """

    now: float
    planned: float
    plan: StepPlan
    digest: bytes
    only: frozenset[str] | None = None
    keys: tuple[KeyRun, ...] = ()


@dataclass(frozen=True, slots=True)
class Commit:
    """What step `step` gave: collected at `now`, taken in at `committed`."""

    now: float
    committed: float
    step: int
    outcome: StepResult | StepFailure
    keys: tuple[KeyRun, ...] = ()


@dataclass(frozen=True, slots=True)
class Control:
    """pause, resume, drain, reset_prefix_cache; or limit_step with its number of tokens."""

    verb: str
    num_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    """The recording's own end, with its reason; nothing behind it."""

    now: float
    reason: str


Call = Admit | Cancel | EndChoice | Plan | Commit | Control | Ended
