"""Composition: which kinds of row may share a step, if the configuration separates kinds (S12, S13).

Owns: the alternation of text and media, and of prefills and decodes. Does not: plan. Without separation the state has
no Composition, and a step has no Turn.
Invariants: work of one modality waits for at most one step of the other. Decodes wait for at most `max_prefill_run`
prefill steps. If the kind that is due has nothing to run, the next kind gets the step.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.core.limits import Limits
from octavo.core.plan import WaitReason
from octavo.core.request_state import RequestState


@dataclass(frozen=True, slots=True)
class Turn:
    """The kind of rows that a step may contain; None means any."""

    has_media: bool | None = None
    is_decoding: bool | None = None

    def refusal(self, request: RequestState, is_decoding: bool) -> WaitReason | None:
        """Return why the step may not have a row of this request; None if it may."""
        if self.has_media is not None and bool(request.request.spans) is not self.has_media:
            return WaitReason.MODALITY
        if self.is_decoding is not None and is_decoding is not self.is_decoding:
            return WaitReason.COMPOSITION
        return None


class Composition:
    """The kind of step that is due."""

    __slots__ = ("_limits", "media_next", "num_prefills")

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.media_next = False
        self.num_prefills = 0  # prefill steps since the last decode step

    def turns(self) -> list[Turn]:
        """Return the kinds of step in the order to try; the scheduler plans the first kind that has a row."""
        media = (self.media_next, not self.media_next) if self._limits.separate_modalities else (None,)
        decode_first = self.num_prefills >= self._limits.max_prefill_run
        phases = (decode_first, not decode_first) if self._limits.composition == "separate" else (None,)
        return [Turn(has_media, is_decoding) for is_decoding in phases for has_media in media]

    def count(self, turn: Turn) -> None:
        """Note that a step of this kind was planned."""
        if turn.has_media is not None:
            self.media_next = not turn.has_media
        if turn.is_decoding is not None:
            self.num_prefills = 0 if turn.is_decoding else self.num_prefills + 1
