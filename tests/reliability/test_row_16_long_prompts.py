"""Row 16: a megabyte of prompt is refused before it is tokenized, and nobody else waits for that."""

import asyncio
import json
import random
import socket
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from threading import Thread
from typing import Any

import pytest

from tests.reliability.lag_api import Api, watched_api
from tests.reliability.load import Outcome, ask, quantile
from tests.reliability.scorecard import Score

SIZE = 1_000_000
SIZE_OF_PROBED = 600_000
CHAT = "/v1/chat/completions"
LIGHT = {"prompt": "hello"}


def _wild(rng: random.Random) -> str:
    return "".join(chr(rng.randrange(0x4E00, 0x9FFF)) for _ in range(10_000)) * (SIZE // 10_000)


KINDS: dict[str, Callable[[random.Random], str]] = {
    "english": lambda rng: "The quick brown fox jumps over the lazy dog, and so on. " * (SIZE // 56 + 1),
    "one letter": lambda rng: "a" * SIZE,
    "words": lambda rng: "a b " * (SIZE // 4),
    "digits": lambda rng: "1" * SIZE,
    "spaces": lambda rng: " " * SIZE,
    "chinese": _wild,
    "combining": lambda rng: "e\u0301" * (SIZE // 2),
    "special": lambda rng: "<|im_end|>" * (SIZE // 10),
}


def _asked(number: int, size: int = SIZE) -> tuple[str, dict[str, Any]]:
    rng = random.Random(number)
    text = list(KINDS.values())[number % len(KINDS)](rng)[:size]
    if number // len(KINDS) % 2:
        return "/v1/completions", {"prompt": text}
    return CHAT, {"messages": [{"role": "user", "content": text}]}


class Heavy(Thread):
    """Sends bodies made beforehand, one after the other, so that nothing but the server works beside the light ones."""

    def __init__(self, port: int, requests: list[tuple[str, bytes]]) -> None:
        super().__init__(daemon=True)
        self._port = port
        self._requests = requests
        self.answers: list[tuple[int, str]] = []  # status and code

    def run(self) -> None:
        for path, body in self._requests:
            head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
            head += f"content-length: {len(body)}\r\n\r\n"
            received = b""
            with socket.create_connection(("127.0.0.1", self._port), timeout=60) as sock, suppress(ConnectionError):
                sock.sendall(head.encode() + body)
                while data := sock.recv(65_536):
                    received += data
            status = int(received.split(b" ", 2)[1]) if received else 0
            code = json.loads(received.split(b"\r\n\r\n", 1)[1])["error"]["code"] if status >= 400 else ""
            self.answers.append((status, code))


async def _light(port: int, is_done: Callable[[], bool]) -> list[Outcome]:
    found = []
    while not is_done():
        found.append(await ask(port, LIGHT))
        await asyncio.sleep(0.01)
    return found


def _beside(api: Api, bodies: list[tuple[str, bytes]]) -> tuple[list[tuple[int, str]], list[Outcome], dict[str, float]]:
    """Answers to these, outcomes of light requests meanwhile, and what the loop saw; without any, of a second."""
    api.report()
    threads = [Heavy(api.port, bodies[index::4]) for index in range(4)] if bodies else []
    end = time.monotonic() + 1
    for thread in threads:
        thread.start()
    light = asyncio.run(
        _light(api.port, lambda: time.monotonic() > end and not any(thread.is_alive() for thread in threads))
    )
    return [answer for thread in threads for answer in thread.answers], light, api.report()


@pytest.mark.timeout(600)
def test_row_16_what_cannot_fit_is_refused_before_it_is_tokenized(score: Score) -> None:
    count = score.dose(16, 100)
    # Those of a million are too long whatever they say; of the others, parts are tokenized until there are too many.
    sizes = [SIZE] * count + [SIZE_OF_PROBED] * (count // 2)
    bodies = [(path, json.dumps(fields).encode()) for path, fields in map(_asked, range(len(sizes)), sizes)]
    with watched_api() as api:
        _beside(api, bodies[:4])  # the sandbox process and the threads are started
        _, calm, calm_loop = _beside(api, [])
        heavy, light, loop = _beside(api, bodies)
        assert api.is_alive
    refused = [answer == (400, "context_length_exceeded") for answer in heavy]
    score.share("prompts of a million characters, or 600,000, refused with 400", sum(refused), len(sizes))
    score.share("light requests served", sum(outcome.status == 200 for outcome in light), len(light))
    score.count("share of the characters that was tokenized, in %", round(100 * loop["characters"] / sum(sizes)), 10)
    score.time("event loop late, p99.9 in ms", 1000 * loop["late_p999_s"], 50)
    score.tell("event loop late by work of its own process, p99.9 in ms", f"{1000 * loop['own_p999_s']:.1f}")
    score.tell("event loop late at most, in ms", f"{1000 * loop['late_max_s']:.1f}")
    score.tell("event loop late without them, p99.9 in ms", f"{1000 * calm_loop['late_p999_s']:.1f}")
    for name, outcomes in (("beside them", light), ("without them", calm)):
        times = [1000 * outcome.total_s for outcome in outcomes]
        score.tell(
            f"a light request {name}, p50 / p99 in ms", f"{quantile(times, 0.5):.1f} / {quantile(times, 0.99):.1f}"
        )


@pytest.mark.timeout(600)
def test_row_16_huge_bodies_of_small_values_do_not_stop_the_loop_either(score: Score) -> None:
    """Eight megabytes of lists, of ids, of constants: the library's JSON reader alone would stop it for a second."""
    bodies: list[tuple[dict[str, Any], str]] = [
        ({"prompt": [[]] * 1_500_000}, "body_too_complex"),
        ({"prompt": [5] * 900_000}, "context_length_exceeded"),
        ({"prompt": [None] * 900_000}, "invalid_value"),
        ({"prompt": "hi", "stop": ["x"] * 1_000_000}, "body_too_complex"),
        ({"prompt": "hi", "logit_bias": {str(i): 1 for i in range(400_000)}}, "body_too_complex"),
        ({"prompt": "hi", "allowed_token_ids": ["x"] * 60_000}, "invalid_value"),
    ]

    chosen = [("/v1/completions", json.dumps(fields).encode()) for fields, _ in bodies] * score.dose(1, 5)
    with watched_api() as api:
        _beside(api, chosen[1:2])
        answers, light, loop = _beside(api, chosen)
    assert Counter(answers) == Counter((400, code) for _, code in bodies * score.dose(1, 5))
    score.share("huge bodies of small values refused with 400", len(answers), len(chosen))
    score.share("light requests served", sum(outcome.status == 200 for outcome in light), len(light))
    score.time("event loop late beside huge JSON, p99.9 in ms", 1000 * loop["late_p999_s"], 50)
    own = f"{1000 * loop['own_p999_s']:.1f}"
    score.tell("event loop late beside huge JSON by its own process's work, p99.9 in ms", own)
    score.tell("event loop late beside huge JSON, maximum in ms", f"{1000 * loop['late_max_s']:.1f}")
