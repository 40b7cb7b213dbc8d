"""Images on their way to the executor: over the wire, through the ledger and the journal, and again after a death."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.engine.fakes import GatedExecutor, make_limits, make_request, open_fake
from tests.frontend.ledgers import Begun
from tests.frontend.test_journal import began
from tests.media.items import make_item

from octavo.core.request import FinishReason, Request, Span
from octavo.core.scheduler import Scheduler
from octavo.engine import wire
from octavo.engine.client import finished
from octavo.engine.loop import EngineLoop
from octavo.errors import InvalidRequestError, QueueFullError
from octavo.frontend import open_requests
from octavo.frontend.journal import Journal
from octavo.frontend.open_requests import OpenRequests
from octavo.media.item import MediaItem, check_media

ONE, OTHER = make_item(1), make_item(2)


class NotingLink:
    """An EngineLink that notes what it is sent, with its media."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.sent: list[tuple[Request, tuple[MediaItem, ...]]] = []

    def send(self, request: Request, media: tuple[MediaItem, ...] = ()) -> Any:
        self.sent.append((request, media))
        return asyncio.get_running_loop().create_future()

    def post_cancel(
        self, request_ids: Iterable[str], reason: FinishReason = FinishReason.CANCELLED, choice: int | None = None
    ) -> None:
        pass


class MediaNoting(GatedExecutor):
    """A fake executor that notes the media it is given and asked to drop."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[str, tuple[MediaItem, ...]] = {}
        self.dropped: list[str] = []

    def add_media(self, request: Request, items: tuple[MediaItem, ...]) -> None:
        self.held[request.request_id] = items

    def drop_media(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            del self.held[request_id]
            self.dropped.append(request_id)


def with_image(name: str = "a", item: MediaItem = ONE, **options: Any) -> Request:
    return replace(make_request(name, **options), spans=(Span(0, 1, item.key),))


def test_media_survive_the_wire() -> None:
    body = wire.frame(wire.Submit.of(3, with_image(), (ONE, OTHER)))[4:]
    message = wire.decode_to_engine(body)
    assert isinstance(message, wire.Submit) and message.media == (ONE, OTHER) and message.request() == with_image()


def test_damaged_media_are_no_message() -> None:
    body = wire.frame(wire.Submit.of(3, with_image(), (ONE,)))[4:]
    shorter = body.replace(ONE.data[:4], b"")
    with pytest.raises(wire.WireError):
        wire.decode_to_engine(shorter)


async def test_the_next_engine_gets_the_media_again_and_an_ended_request_has_none() -> None:
    ledger, first, second = OpenRequests(), NotingLink(1), NotingLink(2)
    ledger.begin_epoch(first)
    submitting = asyncio.create_task(ledger.submit(with_image(), (ONE,)))
    await asyncio.sleep(0)
    ledger.lose_engine(())
    ledger.begin_epoch(second)
    assert [media for _, media in (*first.sent, *second.sent)] == [(ONE,), (ONE,)]
    state = ledger.get("a")
    assert state is not None
    ledger.finish(state, finished("a", FinishReason.STOP))
    assert state.media == ()
    await submitting


async def test_media_of_open_requests_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_requests, "MAX_MEDIA_BYTES", 2 * len(ONE.data))
    ledger = OpenRequests()
    ledger.add(with_image("a"), (ONE,))
    state = ledger.add(with_image("b"), (ONE,))
    with pytest.raises(QueueFullError, match=r"36 bytes of media, and this one has 18"):
        ledger.add(with_image("c"), (ONE,))
    ledger.finish(state, finished("b", FinishReason.STOP))
    ledger.add(with_image("c"), (ONE,))


def test_a_journal_keeps_media_until_the_request_ends(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", "m")
    ledger = Begun(1, observer=journal)
    for name, item in (("a", ONE), ("b", OTHER)):
        journal.begin(began(name), [name])
        ledger.add(with_image(name, item), (item,))
    state = ledger.get("b")
    assert state is not None
    ledger.finish(state, finished("b", FinishReason.STOP))
    journal.close()
    later = Journal(tmp_path / "j", "m")
    first, second = (run.requests[0].state for run in later.recovered)
    assert first.media == (ONE,) and first.request.spans == (Span(0, 1, ONE.key),)
    assert second.media == () and second.end is not None
    later.close()


def test_a_span_without_its_item_is_refused() -> None:
    check_media(with_image(), (OTHER, ONE))
    with pytest.raises(InvalidRequestError, match="media item 0 was not sent"):
        check_media(with_image(), (OTHER,))


def test_the_executor_has_media_from_admission_to_the_end() -> None:
    limits, executor = make_limits(encoder_budget=64, encoder_cache=64), MediaNoting()
    open_fake(executor, limits)
    loop = EngineLoop(Scheduler(limits), executor)
    answers: list[object] = []
    loop.submit(with_image("a", max_tokens=2), answers.append, (ONE,))
    loop.submit(with_image("b", OTHER, max_tokens=2), answers.append, (OTHER,))
    loop.submit(with_image("c", max_tokens=2), answers.append)
    loop._run_commands()
    assert executor.held == {"a": (ONE,), "b": (OTHER,)} and isinstance(answers[2], InvalidRequestError)
    loop.cancel(["b"])
    loop._run_commands()
    assert executor.dropped == ["b"]
    loop.stop()
