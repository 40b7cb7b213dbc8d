"""Count the files and functions of octavo that one streamed chat request runs: `python -m tools.request_path`.

Owns: the request (8 tokens, a scripted model, the engine and the app in this process) and the profile of all threads,
from the first byte that the app gets to the last that it sends; set-up, start and end are not counted.
Usage: python -m tools.request_path [--list] [--first]. `--list` prints each file with its functions; `--first` counts
the first request, which also does what is done once. The last line is one JSON object; its functions are code objects,
with lambdas and comprehensions, and vary by a few between runs. Run it with PYTHONPATH at another commit's src/ to
compare.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import octavo
from octavo.assembly import build_local
from octavo.config.sources import config_from_keywords
from octavo.server.app import create_app

ROOT = str(Path(octavo.__file__).parent) + "/"
NUM_TOKENS = 8
RULES = [{"contains": "Hello", "say": "12345678 and more"}]


class Profile:
    """Calls of octavo's functions in all threads, while `is_on`."""

    def __init__(self) -> None:
        self.is_on = False
        self.calls: Counter[CodeType] = Counter()
        self.num_crossings = 0

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Take in one event of sys.setprofile."""
        if event != "call" or not self.is_on or not frame.f_code.co_filename.startswith(ROOT):
            return
        self.calls[frame.f_code] += 1
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(ROOT):
            caller = caller.f_back
        if caller is not None and caller.f_code.co_filename != frame.f_code.co_filename:
            self.num_crossings += 1

    def by_file(self) -> dict[str, list[CodeType]]:
        """Functions by file, in the order of the source."""
        found: dict[str, list[CodeType]] = {}
        for code in sorted(self.calls, key=lambda code: (code.co_filename, code.co_firstlineno)):
            found.setdefault(code.co_filename.removeprefix(ROOT), []).append(code)
        return found


async def request(app: Any, model: str, profile: Profile | None) -> str:
    """POST one streamed chat completion to the app, as an ASGI server does; return the response's text."""
    body = {
        "model": model, "messages": [{"role": "user", "content": "Hello"}], "stream": True,
        "max_tokens": NUM_TOKENS,
    }  # fmt: skip
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": "/v1/chat/completions", "raw_path": b"/v1/chat/completions", "root_path": "", "query_string": b"",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
        "client": ("127.0.0.1", 50000), "server": ("127.0.0.1", 8000), "state": {},
    }  # fmt: skip
    incoming = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
    sent: list[bytes] = []

    async def receive() -> dict[str, Any]:
        if incoming:
            return incoming.pop()
        await asyncio.Event().wait()  # the client stays
        raise AssertionError

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start" and message["status"] != 200:
            raise SystemExit(f"status {message['status']}")
        if message["type"] == "http.response.body":
            sent.append(message["body"])
            if not message.get("more_body") and profile is not None:
                profile.is_on = False

    if profile is not None:
        profile.is_on = True
    await app(scope, receive, send)
    return b"".join(sent).decode()


async def measure(is_first: bool) -> Profile:
    """Build engine and app, and profile the first or the third request."""
    profile = Profile()
    threading.setprofile(profile)
    sys.setprofile(profile)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "script.json")
        path.write_text(json.dumps(RULES))
        config = config_from_keywords(f"scripted:{path}", {})
        engine = build_local(config)
        app = create_app(engine.sessions, engine.text, config, engine.client.statistics)
        for _ in range(0 if is_first else 2):
            await request(app, engine.text.name, None)
        answer = await request(app, engine.text.name, profile)
        sys.setprofile(None)
        threading.setprofile(None)
        await engine.client.close()
    chunks = [json.loads(line[6:]) for line in answer.split("\n") if line.startswith("data: {")]
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"])
    if len(text) != NUM_TOKENS:
        raise SystemExit(f"{NUM_TOKENS} tokens were expected, the answer is {answer!r}")
    return profile


def main() -> int:
    """Print the count, and with --list what is counted."""
    parser = argparse.ArgumentParser(prog="python -m tools.request_path", description=__doc__.split("\n")[0])
    parser.add_argument("--list", action="store_true", help="print each file with its functions and their calls")
    parser.add_argument("--first", action="store_true", help="count the first request of the process")
    given = parser.parse_args()
    profile = asyncio.run(measure(given.first))
    files = profile.by_file()
    if given.list:
        for name, codes in files.items():
            print(f"{name} ({len(codes)})")
            print("   ", ", ".join(f"{code.co_qualname} {profile.calls[code]}" for code in codes))
    num_named = sum(not code.co_name.startswith("<") for code in profile.calls)
    counts = {
        "files": len(files), "functions": len(profile.calls), "named_functions": num_named,
        "cross_file_calls": profile.num_crossings,
    }  # fmt: skip
    print(json.dumps(counts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
