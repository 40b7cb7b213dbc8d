"""Row 38: one tenant fills storage, upload places and kept answers; it is refused alone, and none sees another's."""

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from octavo.config import BatchConfig, Config, ResponsesConfig, RetryConfig, ServingConfig, StatisticsConfig
from octavo.core.limits import Limits
from octavo.core.scheduler import Scheduler
from octavo.engine.loop import EngineLoop
from octavo.engine.observation import observe_engine
from octavo.executors.protocol import ExecutorSpec
from octavo.frontend.local_client import LocalClient
from octavo.frontend.sessions import Sessions
from octavo.server.app import create_app
from octavo.server.http.endpoints import find_endpoints
from octavo.server.http.limits import HttpLimits
from tests.fake_model import FakeExecutor
from tests.reliability.load import ask
from tests.reliability.scorecard import Score
from tests.server.fakes import Harness, make_text
from tests.server.test_run import Running, running

GREEDY, QUIET, OTHER = "greedy", "quiet", "other"
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


def config_of(tmp_path: Path, **sizes: int) -> Config:
    path = tmp_path / "keys.yaml"
    names = (GREEDY, QUIET, OTHER)
    path.write_text("keys: [" + ", ".join(f"{{name: {name}, key: sk-of-{name}}}" for name in names) + "]")
    path.chmod(0o600)
    (tmp_path / "batches").mkdir()
    size = sizes.get("size", 1000)
    return Config(
        serving=ServingConfig(api_key_file=str(path)),
        batch=BatchConfig(batch_dir=str(tmp_path / "batches"), max_files=size),
        retry=RetryConfig(max_kept=size),
        responses=ResponsesConfig(max_stored_responses=size),
    )


def key_of(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer sk-of-{name}"}


class Client:
    """One tenant's client over real connections; counts what it is refused."""

    def __init__(self, http: httpx.AsyncClient, name: str) -> None:
        self.refused: Counter[str] = Counter()
        self.num_requests = 0
        self._http = http
        self._headers = key_of(name)

    async def ask(self, method: str, path: str, **options: Any) -> Any:
        headers = {**self._headers, **options.pop("headers", {})}
        answer = await self._http.request(method, path, headers=headers, **options)
        self.num_requests += 1
        found = answer.json()
        if answer.status_code >= 400:
            self.refused[found["error"]["code"]] += 1
        return found

    async def upload(self) -> Any:
        return await self.ask("POST", "/v1/files", files={"file": ("a", b"xx")}, data={"purpose": "batch"})

    async def chat(self, key: str) -> Any:
        return await self.ask("POST", "/v1/chat/completions", json=CHAT, headers={"idempotency-key": key})


async def trickle(port: int, seconds: float) -> bytes:
    """An upload that begins and then sends a byte now and then; what it is answered."""
    head = "".join(f"{name}: {value}\r\n" for name, value in {
        "host": "127.0.0.1", **key_of(GREEDY), "content-type": "multipart/form-data; boundary=b",
        "content-length": "100000", "connection": "close"}.items())  # fmt: skip
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"POST /v1/files HTTP/1.1\r\n{head}\r\n--b\r\n".encode())
    answer = asyncio.create_task(reader.read(4096))
    with contextlib.suppress(ConnectionError):
        end = time.monotonic() + seconds
        while time.monotonic() < end and not answer.done():
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.1)
    writer.close()
    return await answer


async def flood(greedy: Client, port: int, size: int, is_over: asyncio.Event) -> list[bytes]:
    """Fill everything that is kept, more than there is of each."""

    async def many(work: Any) -> None:
        await asyncio.gather(*(lane(work, first) for first in range(4)))

    async def lane(work: Any, first: int) -> None:
        for number in range(first, size + size // 5, 4):
            await work(number)

    slow = [asyncio.create_task(trickle(port, 60)) for _ in range(8)]
    await asyncio.sleep(0.3)
    await greedy.upload()  # waits for a place, and gets one once the slow ones are cut, or 429
    await many(lambda _: greedy.upload())
    await many(lambda number: greedy.chat(f"k{number}"))
    await many(lambda _: greedy.ask("POST", "/v1/responses", json={"input": "hi", "max_output_tokens": 4}))
    is_over.set()
    return [await task for task in slow]


async def ordinary(quiet: Client, is_over: asyncio.Event) -> int:
    """What an ordinary client does; the number of answers of its own that it did not find again."""
    kept = [(key, (await quiet.chat(key))["id"]) for key in ("one", "two", "three")]
    stored = [(await quiet.ask("POST", "/v1/responses", json={"input": "hi"}))["id"] for _ in range(3)]
    num_lost = 0
    while not is_over.is_set():
        file = await quiet.upload()
        await quiet.ask("DELETE", f"/v1/files/{file['id']}")
        await asyncio.sleep(0.01)
    for key, answer_id in kept:
        num_lost += (await quiet.chat(key))["id"] != answer_id
    for response_id in stored:
        num_lost += (await quiet.ask("GET", f"/v1/responses/{response_id}")).get("id") != response_id
    return num_lost


async def both(server: Running, size: int) -> tuple[Client, Client, int, list[bytes]]:
    port, is_over = int(server.url.rpartition(":")[2]), asyncio.Event()
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        greedy, quiet = Client(http, GREEDY), Client(http, QUIET)
        slow, num_lost = await asyncio.gather(flood(greedy, port, size, is_over), ordinary(quiet, is_over))
    return greedy, quiet, num_lost, slow


@pytest.mark.timeout(300)
def test_row_38_a_tenant_that_fills_everything_is_refused_alone(tmp_path: Path, score: Score) -> None:
    size = score.dose(60, 1000)
    limits = HttpLimits(max_upload_bytes=1 << 20, upload_grace_s=1.0, body_timeout_s=10.0)
    with running(config_of(tmp_path, size=size), limits=limits) as server:
        greedy, quiet, num_lost, slow = asyncio.run(both(server, size))
        kept = {"files": len(server.context.batches.store.files), "answers": len(server.context.runs),
                "responses": len(server.context.responses)}  # fmt: skip
    print(kept, greedy.refused, Counter(answer[:12] for answer in slow))
    score.tell("requests of the filling tenant, and of the other", f"{greedy.num_requests}, {quiet.num_requests}")
    score.least("refusals of the filling tenant", greedy.refused.total(), 1)
    score.share(
        "its slow uploads cut", sum(b" 408 " in answer[:13] or b" 429 " in answer[:13] for answer in slow), len(slow)
    )
    score.count(f"the other tenant's refusals {dict(quiet.refused) or ''}".strip(), quiet.refused.total())
    score.count("answers of the other tenant that were lost", num_lost)
    score.count("kept beyond the bounds", sum(max(0, number - size) for number in kept.values()))


# --- connections

BODY = json.dumps({"model": "tiny", "stream": True, **CHAT})
HELD = {
    "bodies that do not come": f"content-length: {len(BODY)}\r\n\r\n",
    "answers that do not end": f"content-length: {len(BODY)}\r\n\r\n{BODY}",
}


async def beside(port: int, rest: str, num: int) -> tuple[Counter[int], list[bytes]]:
    """The other tenant's statuses while one holds all the connections that it gets, and what that one is answered."""
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer sk-of-{GREEDY}\r\n"
    peers = []
    statuses: Counter[int] = Counter()

    async def crowd() -> None:
        for _ in range(num):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            peers.append((reader, writer))
            with contextlib.suppress(ConnectionError):
                writer.write((head + rest).encode())
                await writer.drain()
            await asyncio.sleep(0.002)

    coming = asyncio.create_task(crowd())
    key = f"authorization: Bearer sk-of-{QUIET}\r\n"
    while not coming.done() or statuses.total() < 60:
        statuses[(await ask(port, None, "/v1/models", key)).status] += 1
        statuses[(await ask(port, {"prompt": "hi"}, "/tokenize", key)).status] += 1
        await asyncio.sleep(0.005)
    await coming
    answers = []
    for reader, writer in peers:
        writer.close()
        with contextlib.suppress(ConnectionError):
            answers.append(await reader.read(65_536))
    return statuses, answers


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", HELD)
def test_row_38_a_tenant_that_holds_connections_leaves_others_theirs(tmp_path: Path, score: Score, kind: str) -> None:
    places = score.dose(48, 300)
    limits = HttpLimits(max_connections=places)
    with running(config_of(tmp_path), limits=limits, drain_timeout_s=0.1) as server:
        server.engine.is_held = True
        statuses, answers = asyncio.run(beside(int(server.url.rpartition(":")[2]), HELD[kind], 3 * places))
        server.engine.is_held = False
    score.of(kind)
    score.tell("connections of one tenant, of all connections", f"{3 * places}, {places}")
    score.least("its refusals", sum(b"too_many_connections" in answer for answer in answers), 1)
    score.share("the other tenant's requests that were served", statuses[200], statuses.total())


# --- what a tenant is told


@contextlib.asynccontextmanager
async def served(tmp_path: Path) -> AsyncIterator[Harness]:
    """An app over the real scheduler."""
    limits = Limits(
        block_size=16, num_blocks=(64,), max_model_len=512, vocab_size=258, max_batch_tokens=64, max_sequences=2
    )
    executor = FakeExecutor(vocab_size=258, max_model_len=512)
    executor.open(ExecutorSpec(limits.max_sequences, limits.max_batch_tokens, 16, num_blocks=64))
    scheduler = Scheduler(limits)
    loop = EngineLoop(scheduler, executor)
    observe_engine(loop, scheduler, StatisticsConfig())
    client = LocalClient(loop)
    harness = Harness()
    harness.config = config_of(tmp_path)
    harness.app = create_app(
        Sessions(client, harness.text), make_text(), harness.config, client.statistics,
        limits=HttpLimits(max_upload_bytes=1 << 20),
    )  # fmt: skip
    harness.context = harness.app.state.context
    batches = asyncio.create_task(harness.context.batches.run())
    try:
        yield harness
    finally:
        batches.cancel()
        await asyncio.gather(batches, return_exceptions=True)
        await harness.context.runs.close()
        await client.close()


async def act(harness: Harness) -> dict[str, list[str]]:
    """Do all that leaves a trace; the secrets of it, by what stands in a path for them."""
    who = {**key_of(GREEDY), "user-agent": "greedy-agent"}
    line = {"custom_id": "greedy-line", "method": "POST", "url": "/v1/chat/completions", "body": CHAT}
    form = {"files": {"file": ("greedy-name.jsonl", json.dumps(line).encode())}, "data": {"purpose": "batch"}}
    file = (await harness.request("POST", "/v1/files", headers=who, **form)).json()
    body = {"input_file_id": file["id"], "endpoint": line["url"], "completion_window": "24h",
            "metadata": {"greedy-key": "greedy-value"}}  # fmt: skip
    batch = (await harness.request("POST", "/v1/batches", headers=who, json=body)).json()
    made = [await harness.request("POST", "/v1/responses", headers=who,
                                  json={"input": "greedy words", "max_output_tokens": 4, "background": is_background})
            for is_background in (False, True)]  # fmt: skip
    chat = await harness.chat(
        headers={**who, "x-request-id": "greedy-request", "idempotency-key": "greedy-key"}, **CHAT
    )
    assert chat.status_code == 200, chat.text
    return {
        "{request_id}": ["greedy-request"],
        "{response_id}": [answer.json()["id"] for answer in made],
        "{file_id}": [file["id"]],
        "{batch_id}": [batch["id"]],
    }


def asked_by(name: str, secrets: dict[str, list[str]]) -> list[tuple[str, str, dict[str, Any]]]:
    """Every route with every method, with another's ids where an id belongs; and bodies that name another's."""
    paths = {f"/v1/requests/{name}-own/explain"}
    for path in find_endpoints().access:
        holes = [hole for hole in secrets if hole in path] or [""]
        paths |= {path.replace(hole, each) if hole else path for hole in holes for each in secrets.get(hole, [""])}
    paths = {path.replace("{model_id:path}", "tiny").replace("{name}", "chat.js") for path in paths}
    asked: list[tuple[str, str, dict[str, Any]]] = []
    for path in sorted(paths):
        asked += [("GET", path, {}), ("POST", path, {"json": {"model": "tiny", **CHAT}}), ("DELETE", path, {})]
    for response_id in secrets["{response_id}"]:
        body = {"input": "go on", "previous_response_id": response_id, "max_output_tokens": 4}
        asked.append(("POST", "/v1/responses", {"json": body}))
    body = {"input_file_id": secrets["{file_id}"][0], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    return [*asked, ("POST", "/v1/batches", {"json": body})]


async def own_state(harness: Harness) -> Any:
    """What a queued request of the quiet tenant is explained with; None before it is queued."""
    answer = await harness.get(f"/v1/requests/{QUIET}-own/explain", headers=key_of(QUIET))
    return answer.json()["explanations"][0] if answer.status_code == 200 else None


async def test_row_38_no_route_tells_a_tenant_of_another(tmp_path: Path, score: Score) -> None:
    found: list[str] = []
    async with served(tmp_path) as harness:
        secrets = await act(harness)
        ids = [each for several in secrets.values() for each in several]
        await harness.context.sessions.client.control("pause")
        queued = [
            asyncio.create_task(
                harness.complete(
                    headers={**key_of(name), "x-request-id": f"{name}-{label}"}, prompt="p" * 300, max_tokens=200
                )
            )
            for name, label in [(GREEDY, str(number)) for number in range(6)] + [(QUIET, "own")]
        ]
        async with asyncio.timeout(60):
            while not (state := await own_state(harness)) or state["num_ahead"] < 6:
                await asyncio.sleep(0.01)
        await harness.context.sessions.client.control("resume")
        found += [f"explain: {each}" for each in (GREEDY, *ids) if each in json.dumps(state)]
        asked = asked_by(QUIET, secrets)
        for method, path, options in asked:
            answer = await harness.request(method, path, headers=key_of(QUIET), **options)
            given = [each for each in ids if each in path + json.dumps(options)]
            told = answer.text + str(answer.headers)
            for each in given:  # an error repeats what it was asked for
                told = told.replace(each, "")
            found += [f"{method} {path}: {each}" for each in (GREEDY, *ids) if each in told]
            found += [f"{method} {path}: {answer.status_code}"] if given and answer.status_code < 400 else []
        assert {(await task).status_code for task in queued} == {200}
        mine = [path for method, path, _ in asked_by(GREEDY, secrets)
                if method == "GET" and not path.endswith("/cancel") and any(each in path for each in ids)]  # fmt: skip
        owned = [await harness.get(path, headers=key_of(GREEDY)) for path in mine]
    print("\n".join(found))
    score.tell("requests of a tenant after and beside another's", len(asked))
    score.count("answers that reveal the other tenant, or give access to its data", len(found))
    score.least("requests of the other tenant ahead of its own, given as a number", state["num_ahead"], 6)
    score.share(
        "own data that the other tenant finds afterwards", [each.status_code for each in owned].count(200), len(mine)
    )
