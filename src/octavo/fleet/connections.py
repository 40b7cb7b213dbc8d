"""Opening links: LinkListener waits for them, `dial` connects, `read_hosts` reads the addresses to dial from a file.

Owns: the bounds on strangers. They hold at most MAX_PENDING connections, for HANDSHAKE_LIMIT_S each, and the oldest
makes room for the newest, so that one who has the token gets in beside any number that wait. An address with
MAX_WRONG_PROOFS within WRONG_PROOFS_S is refused for as long. Does not: choose what links carry.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from pathlib import Path

from octavo.errors import ConfigError
from octavo.fleet.link import Link, LinkEnds
from octavo.fleet.security import HostPort, LinkSecurity, parse_address
from octavo.sealing import HANDSHAKE_LIMIT_S, SealError

_LOG = logging.getLogger(__name__)
MAX_HOSTS = 1024  # lines of addresses in a file
MAX_PENDING = 64
MAX_WRONG_PROOFS = 20
WRONG_PROOFS_S = 10.0
MAX_ADDRESSES = 1024  # whose wrong proofs are counted
DIAL_LIMIT_S = 5.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0


class LinkListener:
    """Waits for links of one purpose. `make_ends` makes what a link calls; `opened` is called after the handshake."""

    def __init__(
        self,
        security: LinkSecurity,
        purpose: str,
        make_ends: Callable[[], LinkEnds],
        opened: Callable[[Link], object] = lambda link: None,
    ) -> None:
        self.num_refused = 0  # connections without the token, or from an address with too many of them
        self.pending: dict[Link, None] = {}
        self._security = security
        self._purpose = purpose
        self._make_ends = make_ends
        self._opened = opened
        self._token = b""
        self._port = 0
        self._server: asyncio.Server | None = None
        self._wrong_proofs: OrderedDict[str, deque[float]] = OrderedDict()

    async def open(self, address: HostPort, flag: str) -> HostPort:
        """Listen; return the address with its port. Raises ConfigError naming the flag."""
        self._security.check(address, flag)
        context = self._security.server_context()
        limit_s = None if context is None else HANDSHAKE_LIMIT_S
        try:
            self._server = await asyncio.get_running_loop().create_server(
                self._accept,
                address.host,
                address.port,
                ssl=context,
                ssl_handshake_timeout=limit_s,
                start_serving=False,
            )
        except OSError as error:
            why = error.strerror or str(error)
            message = f"{flag} is {str(address)!r}, where nothing can listen ({why}); give another address"
            raise ConfigError(message) from None
        self._port = self._server.sockets[0].getsockname()[1]
        self._token = self._security.listening_token(self._port)
        await self._server.start_serving()
        return HostPort(address.host, self._port)

    def close(self) -> None:
        """Stop waiting; links that are open stay. Idempotent."""
        if self._server is not None:
            self._server.close()
            self._security.forget(self._port)
            self._server = None
        for link in tuple(self.pending):
            link.abort("it was stopped")

    # --- called by links

    def may_begin(self, peer: str) -> bool:
        """Return False for an address with too many wrong proofs."""
        times, now = self._wrong_proofs.get(peer), time.monotonic()
        if times is None:
            return True
        while times and times[0] <= now - WRONG_PROOFS_S:
            times.popleft()
        if len(times) < MAX_WRONG_PROOFS:
            return True
        self.num_refused += 1
        return False

    def refused(self, peer: str, why: str) -> None:
        """Count a connection whose other side failed to prove the token."""
        self.num_refused += 1
        _LOG.warning("a connection from %s was refused: %s", peer, why)
        times = self._wrong_proofs.setdefault(peer, deque(maxlen=MAX_WRONG_PROOFS))
        times.append(time.monotonic())
        self._wrong_proofs.move_to_end(peer)
        if len(self._wrong_proofs) > MAX_ADDRESSES:
            self._wrong_proofs.popitem(last=False)

    def _accept(self) -> Link:
        link = Link(self._token, self._purpose, self._make_ends(), is_dialler=False)
        link.gate = self
        if len(self.pending) >= MAX_PENDING:
            oldest = next(iter(self.pending))
            del self.pending[oldest]
            oldest.abort("too many connections without a handshake")
        self.pending[link] = None
        link.opened.add_done_callback(lambda opened: self._shook(link, opened))
        return link

    def _shook(self, link: Link, opened: asyncio.Future[None]) -> None:
        self.pending.pop(link, None)
        if opened.exception() is None:
            self._opened(link)


async def dial(address: HostPort, security: LinkSecurity, purpose: str, ends: LinkEnds) -> Link:
    """Return an open link. Raises ConfigError without a token, SealError, and OSError with a text."""
    token, context = security.dialling_token(address), security.client_context()
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(DIAL_LIMIT_S):
            _, link = await loop.create_connection(
                lambda: Link(token, purpose, ends, is_dialler=True), address.host, address.port, ssl=context
            )
    except TimeoutError:
        raise SealError(f"no answer within {DIAL_LIMIT_S:g} s") from None
    await link.opened  # the link limits its time
    return link


class DialPauses:
    """Waits between attempts to dial: from FIRST_PAUSE_S, doubled up to LONGEST_PAUSE_S, drawn from the upper half."""

    def __init__(self) -> None:
        self._pause_s = FIRST_PAUSE_S

    def reset(self) -> None:
        """Begin again with the shortest wait, because an attempt succeeded."""
        self._pause_s = FIRST_PAUSE_S

    async def wait(self) -> None:
        """Wait before the next attempt."""
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, LONGEST_PAUSE_S)
        await asyncio.sleep(pause_s * (0.5 + 0.5 * random.random()))


def read_hosts(path: Path) -> list[HostPort]:
    """Return the HOST:PORT on each line of `octavo fleet --hosts`, in order; text after # is a comment.

    Raises ConfigError naming the file and the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(f"--hosts is {str(path)!r}, which cannot be read ({reason}); give a file") from None
    found: dict[HostPort, int] = {}
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        address = parse_address(text, f"{path}, line {number},")
        if address in found:
            raise ConfigError(f"{path}, line {number}: {address} is on line {found[address]} too; remove one of them")
        found[address] = number
    if not found:
        raise ConfigError(f"--hosts is {str(path)!r}, which has no address; give HOST:PORT on each line")
    if len(found) > MAX_HOSTS:
        raise ConfigError(f"{path} has {len(found)} addresses; at most {MAX_HOSTS} are supported")
    return list(found)
