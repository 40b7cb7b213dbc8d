"""A standby front: it keeps a copy of the front's journal, and serves in its place once the front is gone.

Owns: JournalFeed, which streams a front's journal to standbys; StandbyFront, which follows a front and decides when to
take over; the file of the front's term beside the journal. Does not: serve, read a journal's records (the front that
takes over does, as after a restart), or tell clients where the front is.
Invariants: the copy on the disk is whole: the next one replaces it once it is complete. A standby that has no whole
copy never takes over. Its term is then higher than that of the front it follows, so engines that join it refuse the
earlier front from then on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from octavo.errors import ConfigError, OctavoError
from octavo.fleet.connections import DialPauses, LinkListener, dial
from octavo.fleet.link import (
    FOLLOW,
    VERSION,
    CopyComplete,
    CopyHeld,
    CopyStarts,
    Link,
    LinkEnds,
    LinkMessage,
    Ping,
    Pong,
    Refused,
    StandbyHello,
    Welcome,
)
from octavo.fleet.security import HostPort, LinkSecurity
from octavo.frontend.journal import Journal
from octavo.frontend.journal_files import Disk, JournalSegment, copy_head, numbered, replace_segments, segment_path

_LOG = logging.getLogger(__name__)
HELD_LIMIT_S = 2.0  # a standby that has not acknowledged within this time is given up, so that no answer waits for it
LOOK_S = 0.1
_TERM_FILE = "term"


class FrontTerm(msgspec.Struct):
    """The contents of the term's file: the term of the front whose journal is in the folder, and its role."""

    term: int = 0
    is_front: bool = False

    @classmethod
    def read(cls, folder: Path) -> FrontTerm:
        """Read a journal's folder. Raises ConfigError if the file is damaged."""
        path = folder / _TERM_FILE
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except FileNotFoundError:
            return cls()
        except (OSError, msgspec.MsgspecError) as error:
            raise ConfigError(
                f"{path} cannot be read ({error}); remove it if no other front of this fleet runs"
            ) from None

    def write(self, folder: Path) -> None:
        """Replace the file, durably. Raises OSError."""
        path = folder / _TERM_FILE
        unfinished = path.with_suffix(".tmp")
        with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(msgspec.json.encode(self))
            file.flush()
            os.fsync(file.fileno())
        unfinished.rename(path)


# --- the front's side


class JournalFeed:
    """Streams a journal to the standbys that connect. For the journal's event loop."""

    def __init__(self, journal: Journal, security: LinkSecurity, term: int) -> None:
        self.journal = journal
        self.term = term
        self.followers: set[_Follower] = set()
        self._listener = LinkListener(security, FOLLOW, partial(_Follower, self))

    async def listen(self, address: HostPort) -> HostPort:
        """Wait for standbys; return the address with its port. Raises ConfigError."""
        return await self._listener.open(address, "--journal-address")

    def close(self) -> None:
        """End all connections. Idempotent."""
        self._listener.close()
        for follower in tuple(self.followers):
            follower.abort("the front was stopped")


class _Follower(LinkEnds):
    """One standby as the front sees it: a JournalFollower."""

    def __init__(self, feed: JournalFeed) -> None:
        self._feed = feed
        self._link: Link | None = None
        self._name = "a standby"
        self._num_sent = self._num_held = 0  # bytes
        self._held = asyncio.Event()  # something was acknowledged, or the connection ended
        self._tasks: list[asyncio.Task[None]] = []

    def abort(self, why: str) -> None:
        """End the connection."""
        if self._link is not None:
            self._link.abort(why)

    # --- JournalFollower

    def take(self, data: bytes) -> None:
        """Send records."""
        if self._link is not None:
            self._num_sent += len(data)
            self._link.send_frames(self._feed.term, data)

    def copy_starts(self) -> None:
        """Announce that a new copy begins with the next record."""
        if self._link is not None:
            self._link.send(CopyStarts())

    def copy_complete(self) -> None:
        """Announce that the copy has all runs."""
        if self._link is not None:
            self._link.send(CopyComplete())
            _LOG.warning("%s has a whole copy of the journal", self._name)

    async def held(self) -> None:
        """Wait until the standby holds all that was sent so far; give it up after HELD_LIMIT_S."""
        target, link = self._num_sent, self._link
        try:
            async with asyncio.timeout(HELD_LIMIT_S):
                while self._link is not None and self._num_held < target:
                    self._held.clear()
                    await self._held.wait()
        except TimeoutError:
            if link is not None:
                link.abort(f"it did not acknowledge within {HELD_LIMIT_S:g} s")

    # --- LinkEnds

    def message(self, link: Link, message: LinkMessage) -> None:
        """Handle a message of the standby."""
        if isinstance(message, StandbyHello) and self._link is None:
            self._begin(link, message)
        elif isinstance(message, CopyHeld) and self._link is link:
            self._num_held = message.num_bytes
            self._held.set()
        elif not (isinstance(message, Pong) and self._link is link):
            link.abort(f"a {type(message).__name__} message of a standby")

    def frames(self, link: Link, epoch: int, data: bytes) -> None:
        """Refuse: a standby sends none."""
        link.abort("frames of a standby")

    def ended(self, link: Link, why: str) -> None:
        """Forget the standby."""
        if self._link is not None:
            _LOG.warning("%s is lost: %s", self._name, why)
            self._link = None
            self._feed.followers.discard(self)
            self._feed.journal.unfollow(self)
        self._held.set()
        for task in self._tasks:
            task.cancel()

    def _begin(self, link: Link, hello: StandbyHello) -> None:
        feed = self._feed
        why = None
        if hello.version != VERSION:
            why = f"it speaks version {hello.version} of the fleet's protocol, this front {VERSION}"
        elif hello.model != feed.journal.model:
            why = f"it serves {hello.model!r}, this front {feed.journal.model!r}"
        if why is not None:
            _LOG.error("a standby at %s is refused: %s", link.peer, why)
            link.close(why)
            return
        self._link, self._name = link, f"the standby at {link.peer}"
        feed.followers.add(self)
        link.send(Welcome(VERSION, "", feed.term))
        self._tasks.append(asyncio.create_task(link.run_pings(lambda: None), name="octavo-standby-pings"))
        self._tasks.append(asyncio.create_task(feed.journal.follow(self), name="octavo-standby-copy"))


# --- the standby's side


class StandbyFront(LinkEnds):
    """Follows a front until it is gone. Use it once, in an event loop; the journal's folder must be locked."""

    def __init__(self, folder: Path, model: str, front: HostPort, report: Callable[[str], object]) -> None:
        self.num_copies = 0  # whole copies
        self._folder = folder
        self._model = model
        self._front = front
        self._report = report
        self._disk = Disk()
        self._link: Link | None = None
        self._ended = asyncio.Event()
        self._seen_at = time.monotonic()  # when the front was last connected
        self._front_term = 0
        self._segment: JournalSegment | None = None
        self._number = 0
        self._starts = False  # the next records begin with a head
        self._num_bytes = 0  # of frames on the present connection
        self._watching: asyncio.Task[None] | None = None

    async def run(self, security: LinkSecurity, takeover_s: float) -> int:
        """Follow the front; once it is gone for `takeover_s` and there is a whole copy, return the new term.

        Raises ConfigError.
        """
        own = FrontTerm.read(self._folder)
        FrontTerm(own.term).write(self._folder)
        following = asyncio.create_task(self._follow(security), name="octavo-standby")
        try:
            while not self._may_take_over(takeover_s):
                if following.done():
                    following.result()
                await asyncio.sleep(LOOK_S)
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            if self._link is not None:
                self._link.abort("this standby ends")
            self._close_segment()
        term = max(own.term, self._front_term) + 1
        FrontTerm(term, is_front=True).write(self._folder)
        return term

    def _may_take_over(self, takeover_s: float) -> bool:
        if self._link is not None:
            self._seen_at = time.monotonic()
        return self.num_copies > 0 and time.monotonic() - self._seen_at > takeover_s

    async def _follow(self, security: LinkSecurity) -> None:
        pauses, last = DialPauses(), ""
        while True:
            self._ended.clear()
            try:
                link = await dial(self._front, security, FOLLOW, self)
                link.send(StandbyHello(VERSION, self._model))
                await self._ended.wait()
                last = ""
            except ConfigError as error:
                if security.token is not None:
                    raise
                last = self._say(str(error), last)  # the front on this machine has not written its token yet
            except (OSError, OctavoError) as error:
                last = self._say(str(error), last)
            await pauses.wait()
            if self.num_copies:
                pauses.reset()

    def _say(self, why: str, last: str) -> str:
        if why != last:
            self._report(f"cannot follow the front at {self._front}: {why}")
        return why

    # --- LinkEnds

    def message(self, link: Link, message: LinkMessage) -> None:
        """Handle a message of the front."""
        if isinstance(message, Welcome):
            self._link, self._front_term, self._num_bytes = link, message.term, 0
            self._watching = asyncio.create_task(link.watch_pings(), name="octavo-standby-watch")
        elif isinstance(message, Refused):
            self._report(f"the front at {self._front} refused this standby: {message.why}")
            link.abort(message.why)
        elif link is not self._link:
            link.abort("the first message was no Welcome")
        elif isinstance(message, Ping):
            link.send(Pong(message.number, None))
        elif isinstance(message, CopyStarts):
            self._close_segment()
            self._starts = True
        elif isinstance(message, CopyComplete) and self._segment is not None:
            self._completed(link, self._segment)

    def frames(self, link: Link, epoch: int, data: bytes) -> None:
        """Write records."""
        if link is not self._link:
            link.abort("records before the Welcome")
            return
        self._num_bytes += len(data)
        try:
            if self._starts:
                self._begin_segment(data)
            elif self._segment is not None:
                self._segment.add(data)
        except (OSError, ValueError) as error:
            self._report(f"the copy of the journal cannot be written: {error}")
            link.abort("the standby cannot write")
            return
        link.send(CopyHeld(self._num_bytes))

    def ended(self, link: Link, why: str) -> None:
        """Keep what was received; a copy that was not complete is dropped with the next one."""
        if link is self._link:
            self._link = None
            self._report(f"the connection to the front at {self._front} ended: {why}")
        if self._watching is not None:
            self._watching.cancel()
        self._ended.set()

    # --- the copy

    def _begin_segment(self, data: bytes) -> None:
        """Open the segment of a new copy; `data` is its head. Raises OSError, ValueError."""
        self._starts = False
        self._number = max((number for number, _ in numbered(self._folder)), default=0) + 1
        unfinished = segment_path(self._folder, self._number).with_suffix(".tmp")
        unfinished.unlink(missing_ok=True)
        self._segment = JournalSegment(unfinished, copy_head(data, self._number), self._disk)

    def _completed(self, link: Link, segment: JournalSegment) -> None:
        """Put a whole copy in the place of the earlier one."""
        try:
            segment.sync()
            replace_segments(self._folder, segment, self._number)
        except OSError as error:
            self._report(f"the copy of the journal cannot be completed: {error}")
            link.abort("the standby cannot write")
            return
        self.num_copies += 1
        if self.num_copies == 1:
            self._report(f"standby   follows the front at {self._front}, term {self._front_term}")

    def _close_segment(self) -> None:
        if self._segment is not None:
            with contextlib.suppress(OSError):
                self._segment.sync()
            self._segment.close()
            self._segment = None
