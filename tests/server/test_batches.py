"""/v1/files and /v1/batches: what clients see, bounds, tenants, restarts."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest

from octavo.config import BatchConfig, Config, ServingConfig
from octavo.errors import ConfigError
from octavo.server.api.batches.store import BatchStore, FileRecord
from octavo.server.http.keys import KeyRing
from octavo.server.http.limits import Shares
from tests.server.fakes import Harness


def ask(name: str, **changes: Any) -> dict[str, Any]:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 20}
    return {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": {**body, **changes}}


def lines(*values: Any) -> bytes:
    return b"".join((v if isinstance(v, str) else json.dumps(v)).encode() + b"\n" for v in values)


def configured(folder: Path, *keys: str, **batch: Any) -> Config:
    return Config(batch=BatchConfig(batch_dir=str(folder), **batch), serving=ServingConfig(api_key=keys))


@asynccontextmanager
async def serving(config: Config, **options: Any) -> AsyncIterator[Harness]:
    harness = Harness(config=config, **options)
    running = asyncio.create_task(harness.context.batches.run())
    try:
        yield harness
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def upload(harness: Harness, data: bytes, **fields: str) -> httpx.Response:
    form = {"purpose": "batch", **fields}
    return await harness.request("POST", "/v1/files", files={"file": ("in.jsonl", data)}, data=form)


async def create(harness: Harness, file_id: str, **fields: Any) -> httpx.Response:
    body = {"input_file_id": file_id, "endpoint": "/v1/chat/completions", "completion_window": "24h", **fields}
    return await harness.request("POST", "/v1/batches", json=body)


async def over(harness: Harness, batch_id: str) -> dict[str, Any]:
    """The batch once it is over."""
    store = harness.context.batches.store
    async with asyncio.timeout(60):
        while store.batches[batch_id].is_pending:
            await asyncio.sleep(0.005)
    shown: dict[str, Any] = (await harness.get(f"/v1/batches/{batch_id}")).json()
    return shown


async def content(harness: Harness, file_id: str) -> list[Any]:
    answer = await harness.get(f"/v1/files/{file_id}/content")
    assert answer.status_code == 200, answer.text
    return [json.loads(line) for line in answer.text.splitlines()]


async def test_I07_openais_client_runs_a_batch(tmp_path: Path) -> None:
    async with serving(configured(tmp_path, "secret")) as harness:
        transport = httpx.ASGITransport(harness.app)
        async with httpx.AsyncClient(transport=transport) as http:
            client = openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="secret", http_client=http)
            file = await client.files.create(
                file=("in.jsonl", lines(ask("a"), ask("b", n=2), ask("c"))), purpose="batch"
            )
            assert (file.purpose, file.filename, file.status) == ("batch", "in.jsonl", "processed")
            batch = await client.batches.create(
                input_file_id=file.id,
                endpoint="/v1/chat/completions",
                completion_window="24h",
                metadata={"whose": "mine"},
            )
            assert (batch.status, batch.object, batch.metadata) == ("validating", "batch", {"whose": "mine"})
            async with asyncio.timeout(60):
                while (batch := await client.batches.retrieve(batch.id)).status != "completed":
                    await asyncio.sleep(0.01)
            assert batch.request_counts is not None and batch.output_file_id is not None
            assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (
                3,
                3,
                0,
            )
            assert batch.error_file_id is None and batch.errors is None and batch.in_progress_at and batch.completed_at
            text = (await client.files.content(batch.output_file_id)).text
            answers = {line["custom_id"]: line for line in map(json.loads, text.splitlines())}
            assert sorted(answers) == ["a", "b", "c"]
            response = answers["b"]["response"]
            assert answers["b"]["error"] is None and response["status_code"] == 200 and response["request_id"]
            assert [choice["message"]["content"] for choice in response["body"]["choices"]] == ["Hello é!"] * 2
            assert [listed.id async for listed in client.batches.list(limit=1)] == [batch.id]
            purposes = [listed.purpose async for listed in client.files.list()]
            assert purposes == ["batch_output", "batch"], "newest first"
            assert (await client.files.delete(file.id)).deleted
            with pytest.raises(openai.NotFoundError):
                await client.files.retrieve(file.id)


async def test_what_fails_stands_in_the_error_file(tmp_path: Path) -> None:
    async with serving(configured(tmp_path)) as harness:
        file = (
            await upload(harness, lines(ask("fine"), ask("wrong", max_tokens=-1), ask("other", model="gpt")))
        ).json()
        batch = await over(harness, (await create(harness, file["id"])).json()["id"])
        assert batch["status"] == "completed"
        assert batch["request_counts"] == {"total": 3, "completed": 1, "failed": 2}
        failed = {line["custom_id"]: line for line in await content(harness, batch["error_file_id"])}
        assert failed["wrong"]["response"]["status_code"] == 400
        assert failed["wrong"]["response"]["body"]["error"]["param"] == "max_tokens"
        assert failed["other"]["response"]["status_code"] == 404
        assert batch["usage"]["output_tokens"] > 0


async def test_a_file_with_wrong_lines_fails_the_batch_with_their_numbers(tmp_path: Path) -> None:
    async with serving(configured(tmp_path, max_batch_requests=3)) as harness:
        other = {**ask("c"), "url": "/v1/completions"}
        file = (await upload(harness, lines(ask("a"), "{not json", ask("a"), other))).json()
        batch = await over(harness, (await create(harness, file["id"])).json()["id"])
        assert batch["status"] == "failed" and batch["failed_at"]
        assert batch["errors"]["data"][0]["code"] == "too_many_requests"
        for data, code, line in (
            (lines(ask("a"), "{not json"), "invalid_json_line", 2),
            (lines(ask("a"), ask("a")), "duplicate_custom_id", 2),
            (lines(other), "invalid_request", 1),
            (lines(ask("a", stream=True)), "invalid_request", 1),
            (lines({**ask("a"), "more": 1}), "invalid_request", 1),
            (lines({**ask("a"), "method": "GET"}), "invalid_request", 1),
            (lines({"custom_id": ""}), "invalid_custom_id", 1),
            (b"\n\n", "empty_file", None),
        ):
            file = (await upload(harness, data)).json()
            batch = await over(harness, (await create(harness, file["id"])).json()["id"])
            error = batch["errors"]["data"][0]
            assert (batch["status"], error["code"], error["line"]) == ("failed", code, line)
        assert not harness.engine.requests


async def test_a_cancelled_batch_keeps_what_it_has(tmp_path: Path) -> None:
    async with serving(configured(tmp_path, batch_concurrency=1)) as harness:
        file = (await upload(harness, lines(*(ask(f"r{i}") for i in range(3))))).json()
        harness.engine.is_held = True
        batch_id = (await create(harness, file["id"])).json()["id"]
        async with asyncio.timeout(60):
            await harness.engine.submitted.wait()
        assert (await harness.request("DELETE", f"/v1/files/{file['id']}")).status_code == 409
        harness.engine.submitted.clear()
        harness.engine.answer(harness.engine.requests[0])
        async with asyncio.timeout(60):
            await harness.engine.submitted.wait()
        answer = await harness.request("POST", f"/v1/batches/{batch_id}/cancel")
        assert answer.json()["status"] in ("cancelling", "cancelled")
        batch = await over(harness, batch_id)
        assert batch["status"] == "cancelled" and batch["request_counts"]["completed"] == 1
        assert [line["custom_id"] for line in await content(harness, batch["output_file_id"])] == ["r0"]
        assert len(harness.engine.cancelled) == 1, "the open one was ended in the engine"
        again = await harness.request("POST", f"/v1/batches/{batch_id}/cancel")
        assert (again.status_code, again.json()["error"]["code"]) == (409, "batch_is_over")


async def test_a_batch_goes_on_after_a_restart(tmp_path: Path) -> None:
    config = configured(tmp_path, batch_concurrency=1)
    async with serving(config) as harness:
        file = (await upload(harness, lines(*(ask(f"r{i}") for i in range(4))))).json()
        harness.engine.is_held = True
        batch_id = (await create(harness, file["id"])).json()["id"]
        for number in range(2):
            async with asyncio.timeout(60):
                await harness.engine.submitted.wait()
            harness.engine.submitted.clear()
            harness.engine.answer(harness.engine.requests[number])
        async with asyncio.timeout(60):
            await harness.engine.submitted.wait()
        assert harness.context.batches.store.batches[batch_id].status == "in_progress"
        output = harness.context.batches.store.paths(harness.context.batches.store.batches[batch_id]).output
    with output.open("ab") as cut:
        cut.write(b'{"id": "batch_req_3", "custom_id": "r2", "resp')  # as if killed while it wrote
    async with serving(config) as harness:
        batch = await over(harness, batch_id)
        assert batch["status"] == "completed"
        assert batch["request_counts"] == {"total": 4, "completed": 4, "failed": 0}
        each = len("Hello é!".encode()) + 1
        assert batch["usage"]["output_tokens"] == 4 * each, "of both lives"
        got = [line["custom_id"] for line in await content(harness, batch["output_file_id"])]
        assert sorted(got) == ["r0", "r1", "r2", "r3"]
        assert len(harness.engine.requests) == 2, "only what had no answer was asked again"


async def test_a_batch_whose_time_is_over_says_so_of_each_request(tmp_path: Path) -> None:
    async with serving(configured(tmp_path)) as harness:
        file = (await upload(harness, lines(ask("a"), ask("b")))).json()
        harness.engine.is_held = True
        batch_id = (await create(harness, file["id"])).json()["id"]
        async with asyncio.timeout(60):
            await harness.engine.submitted.wait()
        store = harness.context.batches.store
        store.batches[batch_id].expires_at = 0
        store.save(store.batches[batch_id])
    async with serving(configured(tmp_path)) as harness:
        batch = await over(harness, batch_id)
        assert batch["status"] == "expired" and batch["request_counts"]["failed"] == 2
        codes = {line["error"]["code"] for line in await content(harness, batch["error_file_id"])}
        assert codes == {"batch_expired"}


async def test_tenants_see_their_own_alone(tmp_path: Path) -> None:
    async with serving(configured(tmp_path, "one", "two")) as harness:
        one, two = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
        form: dict[str, Any] = {"files": {"file": ("in.jsonl", lines(ask("a")))}, "data": {"purpose": "batch"}}
        file = (await harness.request("POST", "/v1/files", headers=one, **form)).json()
        body = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        stolen = await harness.request("POST", "/v1/batches", headers=two, json=body)
        assert (stolen.status_code, stolen.json()["error"]["param"]) == (400, "input_file_id")
        batch = (await harness.request("POST", "/v1/batches", headers=one, json=body)).json()
        async with asyncio.timeout(60):
            while harness.context.batches.store.batches[batch["id"]].is_pending:
                await asyncio.sleep(0.005)
        for path in (f"/v1/files/{file['id']}", f"/v1/files/{file['id']}/content", f"/v1/batches/{batch['id']}"):
            assert (await harness.get(path, headers=two)).status_code == 404
            assert (await harness.get(path, headers=one)).status_code == 200
        assert (await harness.get("/v1/files", headers=two)).json()["data"] == []
        assert (await harness.get("/v1/batches", headers=two)).json()["data"] == []
        request = harness.engine.requests[-1]
        assert request.priority == 10 and request.tenant, "behind interactive requests, in its tenant's name"


async def test_what_is_refused(tmp_path: Path) -> None:
    config = configured(tmp_path, max_upload_bytes=200_000, max_batch_bytes=300_000, max_files=2)
    async with serving(config) as harness:

        async def refused(answer: httpx.Response) -> tuple[int, str, str | None]:
            error = answer.json()["error"]
            return answer.status_code, error["code"], error["param"]

        assert await refused(await upload(harness, b"x" * 300_000)) == (413, "body_too_large", "file")
        assert await refused(await upload(harness, b"x", purpose="assistants")) == (400, "invalid_value", "purpose")
        told = await upload(harness, b"x", purpose="assistants", colour="red")
        assert told.status_code == 400 and told.headers["x-octavo-ignored"] == "colour"
        expiry = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "5"}
        assert (await refused(await upload(harness, b"x", **expiry)))[2] == "expires_after[seconds]"
        plain = await harness.request("POST", "/v1/files", json={"file": "x"})
        assert await refused(plain) == (400, "invalid_form", "file")
        broken = {"content-type": "multipart/form-data; boundary=x"}
        assert (await harness.request("POST", "/v1/files", content=b"nonsense", headers=broken)).status_code == 400
        for _ in range(2):
            kept = (await upload(harness, b"x" * 140_000)).json()
        assert await refused(await upload(harness, b"x")) == (400, "storage_full", "file")
        await harness.request("DELETE", f"/v1/files/{kept['id']}")
        assert await refused(await upload(harness, b"x" * 199_000)) == (400, "storage_full", "file")
        assert (await refused(await create(harness, "file-unknown")))[2] == "input_file_id"
        for field, value in (
            ("endpoint", "/v1/models"),
            ("completion_window", "1h"),
            ("metadata", {"k": 1}),
            ("metadata", {str(i): "" for i in range(17)}),
            ("output_expires_after", {"anchor": "created_at", "seconds": 1}),
        ):
            status, _, param = await refused(await create(harness, "file-x", **{field: value}))
            assert status == 400 and (param or "").startswith(field), param
        told = await create(harness, "file-x", colour="red")
        assert told.status_code == 400 and told.headers["x-octavo-ignored"] == "colour"
        assert (await harness.get("/v1/files?limit=0")).status_code == 400
        assert (await harness.get("/v1/files?after=nothing")).status_code == 400
        assert (await harness.get("/v1/files?order=up")).status_code == 400
        assert (await harness.get("/v1/batches/batch_x")).status_code == 404


async def test_without_a_folder_it_is_off_and_says_how_to_turn_it_on() -> None:
    harness = Harness()
    for method, path in (("GET", "/v1/files"), ("POST", "/v1/files"), ("GET", "/v1/batches"), ("GET", "/v1/files/x")):
        answer = await harness.request(method, path)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "batches_off") and "--batch-dir" in error["message"]


async def test_old_files_go_and_one_server_has_the_folder(tmp_path: Path) -> None:
    config = configured(tmp_path)
    async with serving(config) as harness:
        expiry = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
        short = (await upload(harness, b"x", **expiry)).json()
        long = (await upload(harness, b"y")).json()
        assert short["expires_at"] == short["created_at"] + 3600
        store = harness.context.batches.store
        store.expire(short["expires_at"])
        assert [file.id for file in store.files.values()] == [long["id"]]
        assert not store.path(short["id"]).exists()
        store.expire(long["created_at"] + config.batch.batch_keep_s)
        assert not store.files
        with pytest.raises(ConfigError, match="in use by another server"):
            Harness(config=replace(config))


def test_a_record_that_cannot_be_read_keeps_its_file(tmp_path: Path) -> None:
    """One of a later version, and one that names other files than its own."""
    folder = tmp_path / "batches" / "files"
    folder.mkdir(parents=True)
    thesis = tmp_path / "thesis.data"
    thesis.write_text("mine")
    names = [f"file-{digit * 32}" for digit in "ab"]
    wrong = FileRecord("../../thesis", "", "x", "batch", 4, 0)
    for name, record in zip(names, (b'{"version": 9}', msgspec.json.encode(wrong)), strict=True):
        (folder / f"{name}.json").write_bytes(record)
        (folder / f"{name}.data").write_text("theirs")
    store = BatchStore(BatchConfig(), tmp_path / "batches", Shares(KeyRing()))
    store.expire(time.time())
    store.close()
    assert not store.files and thesis.read_text() == "mine"
    assert [(folder / f"{name}.data").read_text() for name in names] == ["theirs"] * 2


async def test_what_a_crash_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    async with serving(configured(tmp_path)) as harness:
        kept = (await upload(harness, b"x")).json()["id"]
        gone = (await upload(harness, b"y")).json()["id"]
        store = harness.context.batches.store
        files = store.path(kept).parent
        (files / f"{gone}.json").unlink()
    for name in ("mine.data", "notes.txt", "file-0.json"):
        (files / name).write_text("{")
    (files / f"{kept}.new").write_text("{")
    async with serving(configured(tmp_path)) as harness:
        listed = (await harness.get("/v1/files")).json()["data"]
        assert [file["id"] for file in listed] == [kept]
        left = sorted(path.name for path in files.iterdir())
        assert left == sorted([f"{kept}.data", f"{kept}.json", "mine.data", "notes.txt", "file-0.json"])


async def test_pages_go_on_behind_an_id(tmp_path: Path) -> None:
    async with serving(configured(tmp_path)) as harness:
        ids = [(await upload(harness, b"x")).json()["id"] for _ in range(5)]
        first = (await harness.get("/v1/files?limit=2&order=asc")).json()
        assert [file["id"] for file in first["data"]] == ids[:2] and first["has_more"]
        rest = (await harness.get(f"/v1/files?order=asc&after={first['last_id']}")).json()
        assert [file["id"] for file in rest["data"]] == ids[2:] and not rest["has_more"]
