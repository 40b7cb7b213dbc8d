"""What one tenant does is neither refused, shown nor charged to another: rights, rates, storage, kept answers."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from octavo.config import BatchConfig, Config, ResponsesConfig, RetryConfig, ServingConfig
from octavo.core.request import ErrorKind, FinishError, FinishReason
from octavo.server.api.batches import service as uploads_module
from octavo.server.api.batches import store as store_module
from octavo.server.api.responses import store as background_module
from octavo.server.feed import MAX_WATCHERS
from octavo.server.http import auth as logins_module
from octavo.server.http.auth import Logins
from octavo.server.http.endpoints import Limit, find_endpoints
from octavo.server.http.keys import KeyInfo, KeyRing
from octavo.server.http.lifecycle import RequestIndex
from octavo.server.http.limits import HttpLimits, Shares, largest_user
from tests.server.fakes import Harness
from tests.server.test_batches import ask, lines

ALICE, BOB, OPS = ({"authorization": f"Bearer sk-of-{name}"} for name in ("alice", "bob", "ops"))
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def key_file(tmp_path: Path, alice: str = "", bob: str = "") -> ServingConfig:
    path = tmp_path / "keys.yaml"
    entries = (f"name: alice, key: sk-of-alice{alice}", f"name: bob, key: sk-of-bob{bob}",
               "name: ops, key: sk-of-ops, metrics: true")  # fmt: skip
    path.write_text("keys: [" + ", ".join(f"{{{entry}}}" for entry in entries) + "]")
    path.chmod(0o600)
    return ServingConfig(api_key_file=str(path))


def harness_of(tmp_path: Path, alice: str = "", **parts: Any) -> Harness:
    return Harness(config=Config(serving=key_file(tmp_path, alice), **parts))


def code_of(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


async def test_metrics_and_the_details_of_health_need_a_right_where_there_are_several_keys(tmp_path: Path) -> None:
    harness = harness_of(tmp_path)
    await harness.chat(headers=ALICE)
    refused = await harness.get("/metrics", headers=BOB)
    assert code_of(refused) == (403, "metrics_not_allowed") and "metrics = true" in refused.text
    assert (await harness.get("/health", headers=BOB)).json() == {"status": "ready"}
    assert (await harness.get("/health")).json() == {"status": "ready"}
    assert (await harness.get("/metrics")).status_code == 401
    assert 'octavo_key_requests_total{key="alice"' in (await harness.get("/metrics", headers=OPS)).text
    assert (await harness.get("/health", headers=OPS)).json()["model"] == "tiny"


async def test_a_single_key_and_a_server_without_keys_have_every_right() -> None:
    single = Harness(config=Config(serving=ServingConfig(api_key=("sk-only-one",))))
    only = {"authorization": "Bearer sk-only-one"}
    assert (await single.get("/metrics", headers=only)).status_code == 200
    assert "open_requests" in (await single.get("/health", headers=only)).json()
    assert (await single.get("/health")).json() == {"status": "ready"}
    assert (await Harness().get("/metrics")).status_code == 200
    assert "open_requests" in (await Harness().get("/health")).json()
    two = Harness(config=Config(serving=ServingConfig(api_key=("sk-only-one", "sk-another"))))
    assert (await two.get("/metrics", headers=only)).status_code == 403


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "hi"}),
        ("/detokenize", {"tokens": [5, 6]}),
        ("/v1/messages/count_tokens", {"model": "tiny", **CHAT}),
        ("/v1/responses/input_tokens", {"input": "hi"}),
        ("/v1/embeddings", {"input": "hi"}),
        ("/score", {"text_1": "a", "text_2": "b"}),
        ("/rerank", {"query": "a", "documents": ["b"]}),
        ("/api/embed", {"model": "tiny", "input": "hi"}),
    ],
)
async def test_every_route_that_makes_work_counts_in_the_rate_of_its_key(
    tmp_path: Path, path: str, body: dict[str, Any]
) -> None:
    harness = harness_of(tmp_path, ", requests_per_minute: 2, tokens_per_minute: 1000")
    for left in ("1", "0"):
        answer = await harness.request("POST", path, json=body, headers=ALICE)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-ratelimit-remaining-requests"] == left
        assert int(answer.headers["x-ratelimit-remaining-tokens"]) < 1000
    refused = await harness.request("POST", path, json=body, headers=ALICE)
    assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
    assert (await harness.request("POST", path, json=body, headers=BOB)).status_code == 200


async def test_what_ends_or_frees_something_and_cheap_reading_is_not_limited(tmp_path: Path) -> None:
    harness = harness_of(tmp_path, ", requests_per_minute: 1")
    assert (await harness.chat(headers=ALICE)).status_code == 200
    assert (await harness.chat(headers=ALICE)).status_code == 429
    for method, path, status in (
        ("GET", "/v1/models", 200),
        ("GET", "/api/ps", 200),
        ("POST", "/v1/requests/none/cancel", 404),
        ("DELETE", "/v1/responses/none", 404),
        ("GET", "/v1/responses/none", 404),
    ):
        assert (await harness.request(method, path, headers=ALICE)).status_code == status, path
    assert (await harness.request("POST", "/api/show", json={"model": "tiny"}, headers=ALICE)).status_code == 429
    for path in (
        "/tokenizer_info",
        "/v1/requests/none/explain",
        "/v1/responses/none/input_items",
        "/v1/responses/none?stream=true",
    ):
        assert (await harness.get(path, headers=ALICE)).status_code == 429, path


async def test_tokens_that_are_only_counted_are_charged(tmp_path: Path) -> None:
    harness = harness_of(tmp_path, ", tokens_per_minute: 100")
    assert (await harness.request("POST", "/tokenize", json={"prompt": "x" * 150}, headers=ALICE)).status_code == 200
    refused = await harness.request("POST", "/tokenize", json={"prompt": "x"}, headers=ALICE)
    assert code_of(refused) == (429, "rate_limit_exceeded") and "100 tokens a minute" in refused.text


def test_a_new_post_counts_unless_it_is_excused() -> None:
    excused = {each.path for each in find_endpoints() if each.method == "POST" and each.limit is Limit.NONE}
    assert {path for path in excused if not path.endswith("/cancel")} == {"/login", "/logout"}


# --- shares


def ring_of(*tenants: str) -> KeyRing:
    return KeyRing([KeyInfo(f"{name}-key", name, digest=name.encode()) for name in tenants])


def test_a_tenant_can_always_use_an_even_part_of_half_of_a_bound() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        names = [f"t{number}" for number in range(rng.randint(1, 12))]
        shares, bound = Shares(ring_of(*names)), rng.randint(1, 400)
        used = {"gone": rng.randint(0, bound // 4)} if seed % 3 == 0 else {}
        for _ in range(300):
            name, amount = rng.choice(names), rng.randint(1, max(1, bound // 3))
            if amount <= shares.free(name, used, bound):
                used[name] = used.get(name, 0) + amount
        assert sum(used.values()) <= bound + used.get("gone", 0)
        for name in names:
            assert used.get(name, 0) + shares.free(name, used, bound) >= bound // (2 * len(names))


def test_one_tenant_has_all_and_of_two_none_has_more_than_three_quarters() -> None:
    assert Shares(KeyRing()).free("", {"": 3}, 10) == 7
    assert Shares(ring_of("a")).free("a", {}, 10) == 10
    assert Shares(ring_of("a", "b")).free("a", {}, 100) == 75
    assert Shares(ring_of("a", "b")).free("b", {"a": 75}, 100) == 25
    assert Shares(ring_of("a", "b")).free("a", {"a": 75, "b": 25}, 100) == 0
    assert largest_user({"a": 3, "b": 5}) == "b" and largest_user({"a": 3, "b": 5}, ["a"]) == "a"


# --- files, uploads and batches


@pytest.fixture
async def batches(tmp_path: Path) -> AsyncIterator[Harness]:
    """A server of three tenants with room for 40 files of 4,000 bytes together."""
    (tmp_path / "batches").mkdir()
    batch = BatchConfig(batch_dir=str(tmp_path / "batches"), max_files=40, max_batch_bytes=4000, max_pending_batches=3)
    limits = HttpLimits(max_upload_bytes=2000, upload_grace_s=2.0, min_upload_bytes_per_s=2000)
    config = Config(serving=key_file(tmp_path, ", max_files: 15, max_pending_batches: 2"), batch=batch)
    harness = Harness(config=config, limits=limits)
    running = asyncio.create_task(harness.context.batches.run())
    yield harness
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def upload(harness: Harness, who: dict[str, str], data: bytes = b"xx") -> httpx.Response:
    files = {"file": ("in.jsonl", data)}
    return await harness.request("POST", "/v1/files", files=files, data={"purpose": "batch"}, headers=who)


async def test_a_tenant_that_fills_the_files_leaves_the_others_their_room(batches: Harness) -> None:
    statuses = [(await upload(batches, BOB)).status_code for _ in range(40)]
    num_kept = statuses.count(200)
    assert num_kept == 40 - 2 * (40 // 6) and set(statuses[num_kept:]) == {400}
    refused = await upload(batches, BOB)
    assert code_of(refused) == (400, "storage_full")
    assert "you keep 28 files, and have room for 0 more (your share of the server's 40); delete some" in refused.text
    assert [(await upload(batches, who)).status_code for who in (ALICE, OPS) * 6] == [200] * 12
    mine = (await batches.get("/v1/files", headers=BOB)).json()["data"]
    await batches.request("DELETE", f"/v1/files/{mine[0]['id']}", headers=BOB)
    assert (await upload(batches, BOB)).status_code == 200


async def test_a_tenant_that_fills_the_bytes_leaves_the_others_theirs(batches: Harness) -> None:
    statuses = [(await upload(batches, BOB, b"x" * 400)).status_code for _ in range(10)]
    assert statuses.count(200) == (4000 - 2 * 666) // 400
    refused = await upload(batches, BOB, b"x" * 400)
    assert code_of(refused) == (400, "storage_full") and "your share of the server's 4000" in refused.text
    assert (await upload(batches, ALICE, b"x" * 600)).status_code == 200
    assert (await upload(batches, OPS, b"x" * 600)).status_code == 200


async def test_a_key_can_have_bounds_of_its_own(batches: Harness) -> None:
    statuses = [(await upload(batches, ALICE)).status_code for _ in range(16)]
    assert statuses == [200] * 15 + [400]
    refused = await upload(batches, ALICE)
    assert "you keep 15 files" in refused.text and "max_files of your key is 15" in refused.text
    batches.engine.is_held = True
    held = lines(ask("a"), ask("b"))
    for who, most in ((ALICE, 2), (BOB, 3)):
        if who is ALICE:
            for file in (await batches.get("/v1/files", headers=who)).json()["data"][:2]:
                await batches.request("DELETE", f"/v1/files/{file['id']}", headers=who)
        file_id = (await upload(batches, who, held)).json()["id"]
        body = {"input_file_id": file_id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        made = [await batches.request("POST", "/v1/batches", json=body, headers=who) for _ in range(most + 1)]
        assert [answer.status_code for answer in made] == [200] * most + [429]
        assert code_of(made[-1]) == (429, "too_many_batches") and f"{most} may be" in made[-1].text


async def test_batches_that_are_over_are_bounded_for_each_tenant(
    batches: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "MAX_ENDED_BATCHES", 2)
    store = batches.context.batches.store
    monkeypatch.setattr(store, "_config", replace(batches.config.batch, max_batch_bytes=1_000_000))
    made: dict[str, list[str]] = {"bob": [], "ops": []}
    inputs = {who["authorization"]: (await upload(batches, who, lines(ask("a")))).json()["id"] for who in (OPS, BOB)}
    for name, who in (("ops", OPS), *[("bob", BOB)] * 5):
        file_id = inputs[who["authorization"]]
        body = {"input_file_id": file_id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        batch = (await batches.request("POST", "/v1/batches", json=body, headers=who)).json()
        made[name].append(batch["id"])
        async with asyncio.timeout(60):
            while store.batches[batch["id"]].is_pending:
                await asyncio.sleep(0.005)
    assert [batch_id in store.batches for batch_id in made["bob"]] == [False, False, False, True, True]
    assert made["ops"][0] in store.batches
    left = sorted(path.stem for path in (Path(batches.config.batch.batch_dir or "") / "batches").glob("*.json"))
    assert left == sorted(store.batches)


async def test_answers_of_batches_count_in_what_a_tenant_keeps(batches: Harness) -> None:
    file_id = (await upload(batches, BOB, lines(*(ask(str(number)) for number in range(5))))).json()["id"]
    body = {"input_file_id": file_id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    answers: list[httpx.Response] = []
    store = batches.context.batches.store
    async with asyncio.timeout(60):
        while not answers or answers[-1].status_code == 200:
            answers.append(await batches.request("POST", "/v1/batches", json=body, headers=BOB))
            while any(batch.is_pending for batch in store.batches.values()):
                await asyncio.sleep(0.005)
    assert code_of(answers[-1]) == (400, "storage_full") and "room for the answers" in answers[-1].text
    assert 2 <= len(answers) <= 4, "each leaves some 1,700 bytes of answers, and 2,668 are free"
    assert (await upload(batches, ALICE, b"x" * 600)).status_code == 200
    batches.engine.is_held = True
    for file in (await batches.get("/v1/files", headers=BOB)).json()["data"]:
        if file["purpose"] == "batch_output":
            await batches.request("DELETE", f"/v1/files/{file['id']}", headers=BOB)
    made = [(await batches.request("POST", "/v1/batches", json=body, headers=BOB)).json()["id"] for _ in range(2)]
    async with asyncio.timeout(60):
        while store.batches[made[0]].status != "in_progress":
            await asyncio.sleep(0.005)
    store.path(store.batches[made[0]].output_id).write_bytes(b"x" * 3000 + b"\n")
    assert code_of(await upload(batches, BOB)) == (400, "storage_full"), "what a batch has written so far counts"
    await batches.request("POST", f"/v1/batches/{made[0]}/cancel", headers=BOB)
    async with asyncio.timeout(60):
        while store.batches[made[1]].is_pending:
            await asyncio.sleep(0.005)
    assert store.batches[made[1]].status == "failed" and store.batches[made[1]].errors[0].code == "storage_full"


async def test_a_batch_needs_room_for_its_files_too(batches: Harness) -> None:
    file_id = (await upload(batches, ALICE, lines(ask("a")))).json()["id"]
    body = {"input_file_id": file_id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    for _ in range(14):
        assert (await upload(batches, ALICE)).status_code == 200
    refused = await batches.request("POST", "/v1/batches", json=body, headers=ALICE)
    assert code_of(refused) == (400, "storage_full") and "max_files of your key is 15" in refused.text


async def test_slow_uploads_hold_only_their_own_tenants_places(
    batches: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads_module, "MAX_UPLOAD_WAIT_S", 0.05)
    head = {"content-type": "multipart/form-data; boundary=b", "content-length": "1500"}

    async def trickle() -> AsyncIterator[bytes]:
        yield b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n'
        for _ in range(400):
            yield b"x"
            await asyncio.sleep(0.02)

    def begin() -> asyncio.Task[httpx.Response]:
        return asyncio.create_task(batches.request("POST", "/v1/files", content=trickle(), headers={**BOB, **head}))

    slow = [begin() for _ in range(uploads_module.MAX_UPLOADS)]
    places = batches.context.batches.uploads._tenants
    async with asyncio.timeout(60):
        while "bob" not in places or places["bob"].num_users < len(slow):
            await asyncio.sleep(0)
    own, other = await asyncio.gather(upload(batches, BOB), upload(batches, ALICE))
    assert code_of(own) == (429, "too_many_uploads") and own.headers["retry-after"] == "1"
    assert other.status_code == 200
    crowd = [begin() for _ in range(uploads_module.MAX_WAITING_UPLOADS + 3)]
    refused = [await task for task in crowd]
    assert {code_of(answer) for answer in refused} == {(429, "too_many_uploads")}
    answers = [await task for task in slow]
    assert {code_of(answer) for answer in answers} == {(408, "body_timeout")}
    assert "2000 bytes a second" in answers[0].text
    assert (await upload(batches, BOB)).status_code == 200
    assert not batches.context.batches.uploads._tenants


# --- kept answers, stored responses, sessions, watchers, explanations


async def keyed_chat(harness: Harness, who: dict[str, str], key: str) -> str:
    answer = await harness.chat(headers={**who, "Idempotency-Key": key})
    assert answer.status_code == 200, answer.text
    answer_id: str = answer.json()["id"]
    return answer_id


@pytest.mark.parametrize("bounds", [{"max_kept": 20}, {"max_kept_bytes": 3000}])
async def test_a_tenants_kept_answers_never_take_anothers(tmp_path: Path, bounds: dict[str, int]) -> None:
    harness = harness_of(tmp_path, retry=RetryConfig(**bounds))
    first = {name: await keyed_chat(harness, BOB, name) for name in ("x", "y", "z")}
    for number in range(60):
        await keyed_chat(harness, ALICE, str(number))
    runs = harness.context.runs
    assert len(runs) <= 20 or runs.num_bytes <= 3000
    assert {name: await keyed_chat(harness, BOB, name) for name in first} == first
    assert runs.num_attached == 3
    await runs.close()


async def test_a_tenants_running_requests_leave_others_room_to_run_theirs(tmp_path: Path) -> None:
    harness = harness_of(tmp_path, retry=RetryConfig(max_kept=12))
    kept = await keyed_chat(harness, BOB, "kept")
    harness.engine.is_held = True

    def begin(who: dict[str, str], name: str) -> asyncio.Task[httpx.Response]:
        return asyncio.create_task(harness.chat(headers={**who, "Idempotency-Key": name}))

    own = [begin(ALICE, str(number)) for number in range(12)]
    async with asyncio.timeout(60):
        while sum(task.done() for task in own) < 4:
            await asyncio.sleep(0.001)
    refused = [task for task in own if task.done()]
    assert {code_of(task.result()) for task in refused} == {(429, "too_many_idempotency_keys")}
    assert "8 of your requests" in refused[0].result().text
    others = [begin(BOB, str(number)) for number in range(2)]
    async with asyncio.timeout(60):
        while len(harness.engine.requests) < 1 + 8 + 2:
            await asyncio.sleep(0.001)
    for request in harness.engine.requests[1:]:
        harness.engine.answer(request)
    assert {(await task).status_code for task in others} == {200}
    assert await keyed_chat(harness, BOB, "kept") == kept
    await asyncio.gather(*own)
    runs = harness.context.runs
    assert not runs._num_running and sum(runs._num_runs.values()) == len(runs)
    await runs.close()


async def test_runs_are_counted_right_however_they_end(tmp_path: Path) -> None:
    rng = random.Random(38)
    harness = harness_of(tmp_path, retry=RetryConfig(max_kept=9, max_kept_bytes=1500, orphan_timeout_s=0.01))
    runs = harness.context.runs
    for _ in range(30):
        harness.engine.is_held = rng.random() < 0.4
        failed = (FinishReason.ERROR, FinishError(ErrorKind.ENGINE, "no"))
        late = (FinishReason.TIMEOUT, FinishError(ErrorKind.DEADLINE, "late"))
        harness.engine.end = rng.choice((None, None, failed, late))
        tasks = [
            asyncio.create_task(
                harness.chat(headers={**rng.choice((ALICE, BOB)), "Idempotency-Key": str(rng.randrange(12))})
            )
            for _ in range(rng.randrange(1, 6))
        ]
        await asyncio.sleep(rng.random() * 0.02)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        kept = list(runs._runs.values())
        assert runs._num_runs == Counter(run.key.tenant for run in kept)
        assert runs._num_running == Counter(run.key.tenant for run in kept if not run.is_ended)
        assert runs._kept_bytes.total() == sum(run.num_bytes for run in kept if run.is_ended) <= 1500
        assert len(kept) <= 9
    async with asyncio.timeout(60):
        while runs._num_running:
            await asyncio.sleep(0.01)
    await runs.close()


async def test_uploads_whose_clients_leave_give_their_places_back(batches: Harness) -> None:
    head = {"content-type": "multipart/form-data; boundary=b"}

    async def forever() -> AsyncIterator[bytes]:
        yield b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n'
        await asyncio.Event().wait()

    for _ in range(3):
        tasks = [
            asyncio.create_task(batches.request("POST", "/v1/files", content=forever(), headers={**BOB, **head}))
            for _ in range(10)
        ]
        await asyncio.sleep(0.03)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert not batches.context.batches.uploads._tenants
    assert (await upload(batches, BOB)).status_code == 200


async def test_a_refusal_for_a_rate_has_the_form_of_its_interface(tmp_path: Path) -> None:
    harness = harness_of(tmp_path, ", requests_per_minute: 1")
    await harness.chat(headers=ALICE)
    counted = await harness.request("POST", "/v1/messages/count_tokens", json={"model": "tiny", **CHAT}, headers=ALICE)
    assert counted.status_code == 429 and counted.json()["type"] == "error"
    assert counted.json()["error"]["type"] == "rate_limit_error"
    shown = await harness.request("POST", "/api/show", json={"model": "tiny"}, headers=ALICE)
    assert shown.status_code == 429 and isinstance(shown.json()["error"], str)


async def test_a_tenants_stored_responses_never_take_anothers(tmp_path: Path) -> None:
    harness = harness_of(tmp_path, responses=ResponsesConfig(max_stored_responses=6))

    async def stored(who: dict[str, str]) -> str:
        answer = await harness.request("POST", "/v1/responses", json={"input": "hi"}, headers=who)
        response_id: str = answer.json()["id"]
        return response_id

    first = [await stored(BOB) for _ in range(3)]
    for _ in range(30):
        await stored(ALICE)
    assert [(await harness.get(f"/v1/responses/{each}", headers=BOB)).status_code for each in first] == [200] * 3


async def test_background_responses_of_others_stay_readable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_module, "MAX_RESUMABLE", 3)
    harness = harness_of(tmp_path)
    harness.context.background._max_keys = 3

    async def begin(who: dict[str, str]) -> str:
        body = {"input": "hi", "background": True}
        response_id: str = (await harness.request("POST", "/v1/responses", json=body, headers=who)).json()["id"]
        return response_id

    first = await begin(BOB)
    for _ in range(20):
        await begin(ALICE)
    events = await harness.get(f"/v1/responses/{first}?stream=true", headers=BOB)
    assert events.status_code == 200 and "response.completed" in events.text
    await harness.context.runs.close()


def test_sessions_of_one_key_never_end_anothers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logins_module, "MAX_SESSIONS", 12)
    serving = ServingConfig(api_key=("sk-alice-one", "sk-alice-two", "sk-bob-only"))
    logins = Logins(KeyRing.of(serving))
    sessions = [logins.log_in(b"sk-bob-only") for _ in range(4)]
    for number in range(60):
        assert logins.log_in(b"sk-alice-one" if number % 2 else b"sk-alice-two")
    assert all(session is not None and logins.find(session) is not None for session in sessions)
    assert len(logins._sessions) == 12


async def test_watchers_of_one_tenant_make_room_for_anothers() -> None:
    feed = Harness().context.feed
    alice, bob = KeyInfo("alice", "alice"), KeyInfo("bob", "bob")
    watchers = [feed.watch(alice) for _ in range(MAX_WATCHERS)]
    assert feed.watch(bob).holder is bob
    assert [watcher.is_over for watcher in watchers] == [True] + [False] * (MAX_WATCHERS - 1)
    for _ in range(MAX_WATCHERS // 2 - 1):
        feed.watch(bob)
    for holder in (alice, bob):
        with pytest.raises(Exception, match="watch already"):
            feed.watch(holder)
    assert len(feed._watchers) == MAX_WATCHERS
    for watcher in list(feed._watchers):
        feed.leave(watcher)
    assert feed._polling is not None
    feed._polling.cancel()
    await asyncio.gather(feed._polling, return_exceptions=True)


def test_explained_requests_of_one_tenant_never_push_out_anothers() -> None:
    directory = RequestIndex(6)
    for number in range(3):
        directory.add("bob", f"b{number}", [f"b{number}~1"])()
    for number in range(50):
        directory.add("alice", f"a{number}", [f"a{number}~1"])()
    assert [bool(directory.find_ended(f"b{number}", "bob")) for number in range(3)] == [True] * 3
    assert [number for number in range(50) if directory.find_ended(f"a{number}", "alice")] == [47, 48, 49]
