"""A client that asks again: the same Idempotency-Key, and Last-Event-ID where it had events, until it has an answer."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

PAUSE_S = 0.05


@dataclass
class Retrying:
    """One request with a key, over as many connections as it takes."""

    port: int
    key: str
    fields: dict[str, Any]
    path: str = "/v1/completions"
    headers: str = ""
    num_connections: int = 0
    statuses: list[int] = field(default_factory=list)
    events: list[Any] = field(default_factory=list)
    last_id: str | None = None
    ids: set[str] = field(default_factory=set)  # the answer's id as each connection told it: one for each execution
    whole: Any = None
    is_done: bool = False

    async def run(self, within_s: float = 60.0) -> Retrying:
        """Ask until there is an answer; give up after `within_s`."""
        try:
            async with asyncio.timeout(within_s):
                while not self.is_done:
                    await self._once()
                    if not self.is_done:
                        await asyncio.sleep(PAUSE_S)
        except TimeoutError:
            pass  # is_done says it
        return self

    @property
    def choices(self) -> dict[int, tuple[str, Any, Any]]:
        """Text, log-probabilities and end of each choice."""
        if self.whole is not None:
            return {c["index"]: (c["text"], _columns(c["logprobs"]), c["finish_reason"]) for c in self.whole["choices"]}
        found: dict[int, tuple[str, Any, Any]] = {}
        for event in self.events:
            for choice in event["choices"]:
                text, logprobs, end = found.get(choice["index"], ("", [], None))
                assert end is None, "a choice went on behind its end"
                end = choice["finish_reason"]
                found[choice["index"]] = (text + choice["text"], logprobs + _columns(choice["logprobs"]), end)
        return found

    async def _once(self) -> None:
        self.num_connections += 1
        body = json.dumps(self.fields).encode()
        head = f"POST {self.path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{self.headers}"
        head += f"idempotency-key: {self.key}\r\n"
        if self.last_id is not None:
            head += f"last-event-id: {self.last_id}\r\n"
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 22)
        except OSError:
            return
        try:
            writer.write(head.encode() + f"content-length: {len(body)}\r\n\r\n".encode() + body)
            first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().rstrip().split("\r\n")
            status = int(first.split()[1])
            self.statuses.append(status)
            is_stream = any(line.lower().startswith("content-type: text/event-stream") for line in lines)
            if status == 200 and is_stream:
                await self._read_events(reader)
            elif status == 200:
                length = next(int(line[16:]) for line in lines if line.lower().startswith("content-length: "))
                self.whole = json.loads(await reader.readexactly(length))
                self.ids.add(self.whole["id"])
                self.is_done = True
        except (OSError, asyncio.IncompleteReadError):
            pass  # cut: it asks again
        finally:
            writer.close()

    async def _read_events(self, reader: asyncio.StreamReader) -> None:
        event_id, data = None, b""
        while line := await reader.readline():
            if line.startswith(b"id: ") and line.endswith(b"\n"):
                event_id = line[4:].strip().decode()
            elif line.startswith(b"data: ") and line.endswith(b"\n"):
                data = line[6:].strip()
            elif line == b"\n" and data:
                if data == b"[DONE]":
                    self.is_done = True
                    return
                event = json.loads(data)
                if "error" in event:
                    return
                self.events.append(event)
                self.ids.add(event["id"])
                self.last_id = event_id or self.last_id
                event_id, data = None, b""


def _columns(logprobs: Any) -> list[Any]:
    if not logprobs:
        return []
    return list(zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["text_offset"], strict=True))
