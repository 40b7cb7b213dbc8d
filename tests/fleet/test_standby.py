"""A standby front: it holds what the front's journal has, takes over when the front is gone, and not before."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.fleet.fronts import LOCAL, TOKEN, until
from tests.frontend.test_journal import ADMITTED, accept, contents, start, state_contents, tokens

from octavo.core.request import FinishReason
from octavo.engine.client import finished
from octavo.errors import ConfigError
from octavo.fleet import standby as standby_module
from octavo.fleet.security import HostPort, LinkSecurity
from octavo.fleet.standby import FrontTerm, JournalFeed, StandbyFront
from octavo.frontend import journal as journal_module
from octavo.frontend.journal import Journal
from octavo.frontend.journal_files import BootClock, numbered
from octavo.frontend.journal_state import recover

NEVER_S = 1000.0


class Pair:
    """A front's journal and its feed; `address` is where standbys connect."""

    def __init__(self, folder: Path, *, term: int = 0, waits: bool = False) -> None:
        self.folder = folder / "standby"
        self.folder.mkdir(exist_ok=True)
        self.journal = Journal(folder / "front", "m", waits_for_followers=waits)
        self.security = LinkSecurity(folder, TOKEN)
        self.feed = JournalFeed(self.journal, self.security, term)
        self.lines: list[str] = []
        self.address = LOCAL

    def held(self) -> object:
        """What the standby would know now."""
        return state_contents(recover(self.folder, "m", BootClock.now()).state)

    async def same(self) -> None:
        """Wait until the standby holds what the journal has."""
        await until(lambda: self.held() == contents(self.journal))

    @asynccontextmanager
    async def standby(self, takeover_s: float = NEVER_S, model: str = "m") -> AsyncIterator[asyncio.Task[int]]:
        front = StandbyFront(self.folder, model, self.address, self.lines.append)
        task = asyncio.create_task(front.run(self.security, takeover_s))
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def pair(folder: Path, **options: object) -> AsyncIterator[Pair]:
    made = Pair(folder, **options)  # type: ignore[arg-type]
    made.address = await made.feed.listen(LOCAL)
    try:
        yield made
    finally:
        made.feed.close()
        made.journal.close()


async def test_the_copy_has_earlier_runs_and_follows_each_record(tmp_path: Path) -> None:
    async with pair(tmp_path) as front:
        start(front.journal, "a", "one")
        accept(front.journal, tokens("a", (0, 0, 7), decisions=(ADMITTED,)))
        async with front.standby():
            await front.same()
            accept(front.journal, tokens("a", (0, 1, 8), (0, 2, 9)))
            start(front.journal, "b", "two", n=2, logprobs=1)
            accept(front.journal, tokens("b", (0, 0, 4), (1, 0, 5), logprobs=[None, None]))
            await front.same()
            accept(front.journal, tokens("a", (0, 3, 3), decisions=(finished("a", FinishReason.STOP, time=2.0),)))
            run = start(front.journal, "c", "three")
            front.journal.forget(run)
            await front.same()
            assert len(contents(front.journal)) == 2
        assert front.held() == contents(front.journal)


async def test_it_takes_over_with_a_higher_term_and_goes_on_where_the_front_ended(tmp_path: Path) -> None:
    async with pair(tmp_path, term=6) as front:
        start(front.journal, "a")
        async with front.standby(1.0) as standby:
            await until(lambda: any("follows the front" in line for line in front.lines))
            accept(front.journal, tokens("a", (0, 0, 7), (0, 1, 8)))
            await front.same()
            before = contents(front.journal)
            front.feed.close()
            assert await asyncio.wait_for(standby, 30.0) == 7
    assert FrontTerm.read(front.folder) == FrontTerm(7, is_front=True)
    later = Journal(front.folder, "m")
    try:
        assert contents(later) == before
        accept(later, tokens("a", (0, 2, 9)))
    finally:
        later.close()


async def test_a_front_that_returns_is_followed_again(tmp_path: Path) -> None:
    async with pair(tmp_path) as front:
        start(front.journal, "a")
        async with front.standby() as standby:
            await front.same()
            for follower in tuple(front.feed.followers):
                follower.abort("the test cuts it")
            accept(front.journal, tokens("a", (0, 0, 7)))
            await front.same()
            assert not standby.done() and len(numbered(front.folder)) == 1, "the second copy replaced the first"


async def test_without_a_whole_copy_it_never_takes_over(tmp_path: Path) -> None:
    async with pair(tmp_path) as front:
        address = front.address
    standby = StandbyFront(tmp_path / "standby", "m", address, front.lines.append)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(standby.run(front.security, 0.1), 2.0)
    assert FrontTerm.read(tmp_path / "standby") == FrontTerm()
    assert any("cannot follow" in line for line in front.lines)


async def test_a_standby_of_another_model_or_token_is_refused(tmp_path: Path) -> None:
    async with pair(tmp_path) as front:
        async with front.standby(model="other"):
            await until(lambda: any("it serves 'other', this front 'm'" in line for line in front.lines))
        stranger = StandbyFront(front.folder, "m", front.address, front.lines.append)
        task = asyncio.create_task(stranger.run(LinkSecurity(tmp_path, b"another token of tests"), NEVER_S))
        await until(lambda: any("cannot follow" in line for line in front.lines))
        task.cancel()
        assert not front.feed.followers


async def test_an_answer_waits_for_the_standby_but_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standby_module, "HELD_LIMIT_S", 1.0)
    async with pair(tmp_path, waits=True) as front:
        await front.journal.synced()  # no standby: nothing to wait for
        async with front.standby():
            await until(lambda: any("follows the front" in line for line in front.lines))
            for name in "abcd":
                start(front.journal, name, name)
                await front.journal.synced()
                assert front.held() == contents(front.journal)
            (follower,) = front.feed.followers
            assert follower._link is not None and follower._link._transport is not None
            follower._link._transport.pause_reading()  # the standby answers, and nothing arrives
            start(front.journal, "e", "e")
            await asyncio.wait_for(front.journal.synced(), 30.0)
            await until(lambda: any("connection to the front" in line for line in front.lines))
            await front.same()


async def test_a_copy_that_grew_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "COMPACT_BYTES", 2000)
    monkeypatch.setattr(journal_module, "COPY_BYTES", 1)  # every ended run is a part of its own

    def size() -> int:
        return sum(path.stat().st_size for _, path in numbered(front.folder))

    async with pair(tmp_path) as front, front.standby():
        await until(lambda: bool(front.feed.followers))
        for number in range(40):
            name = f"r{number}"
            run = start(front.journal, name, name)
            accept(front.journal, tokens(name, (0, 0, 7), decisions=(finished(name, FinishReason.STOP, time=2.0),)))
            if number < 35:
                front.journal.forget(run)
        await front.same()
        large = size()
        await until(_ticks(front.journal, lambda: size() < large / 2))
        await front.same()
        assert len(contents(front.journal)) == 5


def _ticks(journal: Journal, is_done: Callable[[], bool]) -> Callable[[], bool]:
    def tick() -> bool:
        journal.tick()
        return is_done()

    return tick


def test_a_damaged_term_is_reported(tmp_path: Path) -> None:
    (tmp_path / "term").write_text("7")
    with pytest.raises(ConfigError, match="term cannot be read"):
        FrontTerm.read(tmp_path)


def test_addresses_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--journal-address"):
        LinkSecurity(tmp_path).check(HostPort("192.0.2.1", 1), "--journal-address")
