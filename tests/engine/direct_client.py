"""An EngineClient over one SocketClient, without a supervisor: the end of the connection is that of all requests."""

from __future__ import annotations

import socket
import sys
from collections.abc import AsyncIterator, Iterable, Mapping
from pathlib import Path
from typing import Any

from octavo.core.request import FinishReason, Request
from octavo.engine.client import Accepted, TokenOutput
from octavo.errors import EngineDeadError
from octavo.frontend.engine_process import EngineProcess
from octavo.frontend.open_requests import OpenRequests
from octavo.frontend.socket_client import SocketClient
from octavo.media.item import MediaItem


def dial(path: Path) -> socket.socket:
    """Connect to a server at a path."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(path))
    return connection


class DirectClient:
    """What it does not have itself is the SocketClient's."""

    def __init__(self, requests: OpenRequests, socket: SocketClient) -> None:
        self.requests = requests
        self.socket = socket
        requests.begin_epoch(socket)
        socket._reading.add_done_callback(
            lambda _: requests.end_all(FinishReason.ERROR, EngineDeadError(str(socket._end)))
        )

    @classmethod
    async def over(cls, connection: socket.socket, epoch: int) -> DirectClient:
        requests = OpenRequests(resumes=False)
        return cls(requests, await SocketClient.over(connection, epoch, requests.accept))

    async def submit(self, request: Request, media: tuple[MediaItem, ...] = ()) -> Accepted:
        if not self.socket.is_alive:
            raise EngineDeadError(str(self.socket._end))
        return await self.requests.submit(request, media)

    def outputs(
        self, request_id: str, final_only: bool = False, max_ids: int = sys.maxsize
    ) -> AsyncIterator[TokenOutput]:
        return self.requests.outputs(request_id, final_only, max_ids)

    def cancel(
        self, request_ids: Iterable[str], reason: FinishReason = FinishReason.CANCELLED, choice: int | None = None
    ) -> int:
        return self.requests.cancel(request_ids, reason, choice)

    async def statistics(self) -> Mapping[str, Any]:
        statistics: Any = await self.socket.control("statistics")
        return statistics

    def __getattr__(self, name: str) -> Any:
        return getattr(self.socket, name)


async def start_engine(*arguments: Any, **options: Any) -> EngineProcess:
    """An engine process whose client is a DirectClient."""
    requests = OpenRequests(resumes=False)
    child = await EngineProcess.start(*arguments, receive=requests.accept, **options)
    child.client = DirectClient(requests, child.client)  # type: ignore[assignment]
    return child
