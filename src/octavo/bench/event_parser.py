"""An incremental parser of an HTTP/1.1 response with server-sent events.

Owns: status, chunked and plain bodies, the split into events. Does not: read a socket, or know what events mean.
Written by hand because a client that measures must cost little: one pass over the bytes, no objects per header.
Sources: RFC 9112 (chunked transfer coding), the HTML standard (event streams).
"""

from __future__ import annotations

MAX_HEAD_BYTES = 65_536
MAX_BODY_BYTES = 1 << 20  # of an answer that is no stream, and of one event


class ProtocolError(Exception):
    """The server's bytes are no HTTP/1.1 response that this parser understands."""


class EventParser:
    """Takes bytes; returns the data of the events that became complete.

    `status` is 0 until the head is complete. A body that is no event stream is kept in `body`. `last_id` is that of the
    last complete event that had one.
    """

    def __init__(self) -> None:
        self.status = 0
        self.is_ended = False
        self.is_stream = False
        self.body = b""
        self.last_id = b""
        self._raw = bytearray()
        self._is_chunked = False
        self._left: int | None = 0  # bytes left of the chunk or of the plain body; None: until the end
        self._is_behind_chunk = False

    def feed(self, data: bytes) -> list[bytes]:
        """Take bytes from the socket. Raises ProtocolError."""
        self._raw += data
        if not self.status and not self._read_head():
            return []
        self._take_body()
        return self._split() if self.is_stream else []

    def _read_head(self) -> bool:
        end = self._raw.find(b"\r\n\r\n")
        if end < 0:
            if len(self._raw) > MAX_HEAD_BYTES:
                raise ProtocolError(f"a response head of more than {MAX_HEAD_BYTES} bytes")
            return False
        lines = bytes(self._raw[:end]).split(b"\r\n")
        del self._raw[: end + 4]
        words = lines[0].split(None, 2)
        if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit():
            raise ProtocolError(f"no HTTP/1.1 response: {lines[0][:80]!r}")
        fields = dict(_field(line) for line in lines[1:])
        self.status = int(words[1])
        self.is_stream = self.status == 200 and fields.get(b"content-type", b"").startswith(b"text/event-stream")
        self._is_chunked = fields.get(b"transfer-encoding", b"").lower() == b"chunked"
        length = fields.get(b"content-length", b"")
        self._left = 0 if self._is_chunked else int(length) if length.isdigit() else None
        self.is_ended = self._left == 0 and not self._is_chunked
        return True

    def _take_body(self) -> None:
        if not self._is_chunked:
            count = len(self._raw) if self._left is None else min(self._left, len(self._raw))
            self._move(count)
            if self._left is not None:
                self._left -= count
                self.is_ended = self._left == 0
            return
        while not self.is_ended:
            if self._left:
                count = min(self._left, len(self._raw))
                self._move(count)
                self._left -= count
                if self._left:
                    return
                self._is_behind_chunk = True
            if not self._begin_chunk():
                return

    def _begin_chunk(self) -> bool:
        """Read the line with the next chunk's size, and the line end before it; return False if it is incomplete."""
        start = 2 if self._is_behind_chunk else 0
        end = self._raw.find(b"\r\n", start)
        if end < 0:
            return False
        try:
            size = int(self._raw[start:end].partition(b";")[0], 16)
        except ValueError:
            raise ProtocolError(f"no chunk size: {bytes(self._raw[start:end])[:40]!r}") from None
        del self._raw[: end + 2]
        self._left, self._is_behind_chunk, self.is_ended = size, False, size == 0
        return True

    def _move(self, count: int) -> None:
        self.body += bytes(self._raw[:count])
        del self._raw[:count]
        if len(self.body) > MAX_BODY_BYTES:
            raise ProtocolError(f"an answer or an event of more than {MAX_BODY_BYTES} bytes")

    def _split(self) -> list[bytes]:
        body = self.body.replace(b"\r\n", b"\n") if b"\r" in self.body else self.body
        *whole, self.body = body.split(b"\n\n")
        return [data for data in map(self._data_of, whole) if data]

    def _data_of(self, event: bytes) -> bytes:
        """Return the data lines of one event, joined; empty for comments."""
        if event.startswith(b"data:") and b"\n" not in event:
            return event[5:].strip()
        data = []
        for line in event.split(b"\n"):
            if line.startswith(b"data:"):
                data.append(line[5:].strip())
            elif line.startswith(b"id:"):
                self.last_id = line[3:].strip()
        return b"\n".join(data)


def _field(line: bytes) -> tuple[bytes, bytes]:
    name, _, value = line.partition(b":")
    return name.strip().lower(), value.strip()
