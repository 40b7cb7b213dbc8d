"""ResponseStore: bounds in number, bytes and age, tenants, chains."""

import asyncio
from typing import Any

import msgspec
import pytest

from octavo.config import Config, ResponsesConfig
from octavo.server.api.responses.store import InputItems, ResponseStore, Stored
from octavo.server.http.errors import ApiError

KIB = b" " * 1024


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def response_of(name: str, text: str = "out") -> Any:
    output = [{"id": f"msg_{name}", "type": "message", "text": text}]
    return {"id": name, "status": "completed", "output": output}


def given(name: str, padding: bytes = b"") -> InputItems:
    item = msgspec.json.encode({"id": f"in_{name}"})
    return InputItems(b"[" + item + padding + b"]", (f"in_{name}",))


def put(
    store: ResponseStore, name: str, tenant: str = "a", previous: Stored | None = None, padding: bytes = b""
) -> Any:
    store.put(tenant, response_of(name), given(name, padding), previous)
    return store.get(tenant, name) if has(store, name, tenant) else None


def has(store: ResponseStore, name: str, tenant: str = "a") -> bool:
    try:
        store.get(tenant, name)
    except ApiError as error:
        assert (error.status, error.code) == (404, "response_not_found")
        return False
    return True


def ids(stored: Stored) -> list[str]:
    return [item["id"] for items in stored.history() for item in msgspec.json.decode(items)]


async def test_a_response_comes_back_as_it_was() -> None:
    store = ResponseStore(ResponsesConfig())
    assert msgspec.json.decode(put(store, "r1").response()) == response_of("r1")
    assert ids(store.get("a", "r1")) == ["in_r1", "msg_r1"]


async def test_nobody_finds_anothers() -> None:
    store = ResponseStore(ResponsesConfig())
    put(store, "r1", "a")
    assert not has(store, "r1", "b")
    assert not store.delete("b", "r1")
    with pytest.raises(ApiError):
        store.turns("b", ["msg_r1"])
    assert has(store, "r1", "a")


async def test_a_chain_is_told_from_its_beginning_also_when_its_links_were_deleted() -> None:
    store = ResponseStore(ResponsesConfig())
    first = put(store, "r1")
    second = put(store, "r2", previous=first)
    put(store, "r3", previous=second)
    assert store.delete("a", "r2") and not has(store, "r2")
    assert ids(store.get("a", "r3")) == ["in_r1", "msg_r1", "in_r2", "msg_r2", "in_r3", "msg_r3"]
    assert [turn.ids for turn in store.turns("a", ["in_r2", "msg_r2", "in_r1"])] == [
        ("in_r2", "msg_r2"),
        ("in_r1", "msg_r1"),
    ]


async def test_what_nobody_goes_on_from_is_given_back() -> None:
    store = ResponseStore(ResponsesConfig())
    first = put(store, "r1")
    size = store.num_bytes
    second = put(store, "r2", previous=first)
    branch = put(store, "r3", previous=first)
    assert second is not None and branch is not None
    for name in ("r1", "r2"):
        store.delete("a", name)
    with pytest.raises(ApiError):
        store.turns("a", ["msg_r2"])
    assert store.turns("a", ["msg_r1"])  # r3 goes on from it
    store.delete("a", "r3")
    assert (len(store), store.num_bytes) == (0, 0) and size > 0
    with pytest.raises(ApiError):
        store.turns("a", ["msg_r1"])


async def test_the_least_recently_used_gives_way_beyond_the_number() -> None:
    store = ResponseStore(ResponsesConfig(max_stored_responses=3))
    for name in ("r1", "r2", "r3"):
        put(store, name)
    store.get("a", "r1")
    put(store, "r4")
    assert [has(store, name) for name in ("r1", "r2", "r3", "r4")] == [True, False, True, True]
    assert store.report()["given_way"] == 1


async def test_a_chain_in_use_is_kept_whole() -> None:
    store = ResponseStore(ResponsesConfig(max_stored_responses=3))
    first = put(store, "r1")
    put(store, "r2", previous=first)
    put(store, "r3")
    store.get("a", "r2")
    put(store, "r4")
    assert [has(store, name) for name in ("r1", "r2", "r3")] == [True, True, False]


async def test_whoever_keeps_most_gives_way_beyond_the_bytes() -> None:
    store = ResponseStore(ResponsesConfig(max_stored_bytes=64 * 1024))
    put(store, "mine", "b")
    for index in range(40):
        put(store, f"r{index}", "a", padding=4 * KIB)
    assert has(store, "mine", "b") and store.num_bytes <= 64 * 1024
    assert has(store, "r39") and not has(store, "r0")


async def test_what_is_larger_than_the_bound_is_not_kept() -> None:
    store = ResponseStore(ResponsesConfig(max_stored_bytes=16 * 1024))
    assert put(store, "large", padding=20 * KIB) is None
    assert (len(store), store.num_bytes) == (0, 0)


async def test_nothing_is_kept_longer_than_its_time_since_the_last_use() -> None:
    clock = Clock()
    store = ResponseStore(ResponsesConfig(keep_responses_s=10.0), clock)
    put(store, "r1")
    clock.now += 6
    assert has(store, "r1")
    clock.now += 6
    put(store, "r2")
    assert has(store, "r1")
    clock.now += 11
    assert not has(store, "r1") and not has(store, "r2")
    assert store.num_bytes == 0


async def test_what_is_old_goes_by_itself() -> None:
    store = ResponseStore(ResponsesConfig(keep_responses_s=0.0))
    store.put("a", response_of("r1"), given("r1"), None)
    async with asyncio.timeout(60):
        while len(store):
            await asyncio.sleep(0.01)
    assert store.num_bytes == 0


async def test_the_same_response_again_takes_the_place_of_the_one_before() -> None:
    store = ResponseStore(ResponsesConfig())
    put(store, "r1")
    size = store.num_bytes
    put(store, "r1")
    assert (len(store), store.num_bytes) == (1, size)


async def test_the_books_balance_after_many_operations() -> None:
    import random

    rng = random.Random(5)
    clock = Clock()
    config = ResponsesConfig(max_stored_responses=12, max_stored_bytes=40 * 1024, keep_responses_s=50.0)
    store = ResponseStore(config, clock)
    names: list[tuple[str, str]] = []
    for index in range(600):
        clock.now += rng.random() * 5
        tenant = rng.choice("abc")
        known = [(t, n) for t, n in names if t == tenant and has(store, n, t)]
        choice = rng.random()
        if choice < 0.7:
            previous = store.get(*rng.choice(known)) if known and rng.random() < 0.7 else None
            store.put(tenant, response_of(f"r{index}"), given(f"r{index}", rng.randrange(4) * KIB), previous)
            names.append((tenant, f"r{index}"))
        elif known:
            assert store.delete(*rng.choice(known))
        assert len(store) <= 12 and store.num_bytes <= 40 * 1024
    for tenant, name in names:
        store.delete(tenant, name)
    assert (len(store), store.num_bytes, store._by_tenant) == (0, 0, {})


async def test_the_metrics_tell_how_much_is_stored() -> None:
    from tests.server.fakes import Harness

    harness = Harness(config=Config(responses=ResponsesConfig(max_stored_responses=2)))
    for _ in range(3):
        await harness.request("POST", "/v1/responses", json={"input": "hi"})
    text = (await harness.get("/metrics")).text
    assert 'octavo_stored_responses{model_name="tiny"} 2.0' in text
    assert 'octavo_stored_responses_given_way_total{model_name="tiny"} 1.0' in text
    assert 'octavo_background_responses{model_name="tiny"} 0.0' in text
    size = harness.context.responses.num_bytes
    assert f'octavo_stored_response_bytes{{model_name="tiny"}} {float(size)}' in text
