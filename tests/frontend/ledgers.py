"""A ledger whose engines are in no process: they note what they are sent, and answer nothing."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from octavo.core.request import FinishReason, Request
from octavo.frontend.open_request import BoundEngine, OpenRequest
from octavo.frontend.open_requests import OpenRequests
from octavo.media.item import MediaItem


class SilentLink:
    """An EngineLink that notes what it is sent."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.sent: list[Request] = []
        self.cancelled: list[str] = []

    def send(self, request: Request, media: object = ()) -> Any:
        self.sent.append(request)
        return SimpleNamespace(add_done_callback=lambda callback: None)

    def post_cancel(
        self, request_ids: Iterable[str], reason: FinishReason = FinishReason.CANCELLED, choice: int | None = None
    ) -> None:
        self.cancelled += request_ids


class Begun(OpenRequests):
    """A ledger with a current engine from the start; what is added is sent to it."""

    def __init__(self, epoch: int = 0, **options: Any) -> None:
        super().__init__(epoch, **options)
        self.begin_epoch(SilentLink(epoch))

    def add(self, request: Request, media: tuple[MediaItem, ...] = ()) -> OpenRequest:
        state = super().add(request, media)
        self._send_or_hold(state)
        return state

    @property
    def engine(self) -> BoundEngine:
        """The only engine."""
        (engine,) = self.engines
        return engine


def begin(ledger: OpenRequests, epoch: int) -> list[Request]:
    """Lose the engine if there is one, and begin another; what it is sent."""
    ledger.lose_engine(())
    link = SilentLink(epoch)
    ledger.begin_epoch(link)
    return link.sent


def is_holding(requests: OpenRequests) -> bool:
    """Whether a suspect runs alone."""
    return any(engine.suspect is not None for engine in requests.engines)


def has_engine(requests: OpenRequests, name: str) -> bool:
    """Whether the request is open and bound to an engine."""
    state = requests.get_open(name)
    return state is not None and state.engine is not None
