"""A server of completions that does as told: an asyncio server, and the same as a program for `ServerProcess`.

Behaviours: "stream" (one token a chunk), "plain" (a JSON error of status 400), "cut" (closes in mid-stream),
"error" (an error object in the stream), "silent" (never answers), "bare" (no usage, one body without chunks),
"short" (its usage is one token less than asked for).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys


class FakeServer:
    def __init__(self, behaviour: str = "stream", text: str = "x") -> None:
        self.behaviour, self.text = behaviour, text
        self.bodies: list[dict] = []
        self.num_open = self.max_open = 0
        self.release = asyncio.Event()
        self.release.set()

    async def __aenter__(self) -> FakeServer:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_) -> None:
        self.release.set()
        self.server.close()
        await self.server.wait_closed()

    async def _serve(self, reader, writer) -> None:
        with contextlib.closing(writer), contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = next(int(line.split(":")[1]) for line in head.splitlines() if line.lower().startswith("content-l"))
            body = await reader.readexactly(length)
            if head.startswith("GET"):
                answer = json.dumps({"data": [{"id": "tiny"}]}).encode()
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(answer) + answer)
            else:
                self.num_open += 1
                self.max_open = max(self.max_open, self.num_open)
                await self.release.wait()
                await self._complete(json.loads(body), writer)
                self.num_open -= 1
            await writer.drain()

    async def _complete(self, body: dict, writer) -> None:
        self.bodies.append(body)
        if self.behaviour == "silent":
            await asyncio.sleep(60)
        if self.behaviour == "plain":
            writer.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 3\r\n\r\nbad")
            return
        count, prompt = body["max_tokens"], body["prompt"]
        is_bare = self.behaviour == "bare"
        coding = b"" if is_bare else b"transfer-encoding: chunked\r\n"
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n" + coding + b"\r\n")

        def put(event: bytes) -> None:
            data = b"data: " + event + b"\n\n"
            writer.write(data if is_bare else b"%x\r\n" % len(data) + data + b"\r\n")

        for number in range(count):
            end = "length" if number == count - 1 else None
            if self.behaviour in ("cut", "error") and number == 1:
                break
            put(json.dumps({"choices": [{"text": self.text, "finish_reason": end}]}).encode())
            await asyncio.sleep(0)
        if self.behaviour == "cut":
            return
        if self.behaviour == "error":
            put(json.dumps({"error": {"message": "the engine died"}}).encode())
        elif not is_bare:
            usage = {"completion_tokens": count - (self.behaviour == "short"), "prompt_tokens": len(prompt)}
            put(json.dumps({"choices": [], "usage": usage}).encode())
        put(b"[DONE]")
        if not is_bare:
            writer.write(b"0\r\n\r\n")


async def _main(port: int, behaviour: str = "stream") -> None:
    fake = FakeServer(behaviour)
    server = await asyncio.start_server(fake._serve, "127.0.0.1", port)
    print(f"serving on {port}", flush=True)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_main(int(sys.argv[1]), *sys.argv[2:]))
