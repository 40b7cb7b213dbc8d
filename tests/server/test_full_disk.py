"""A disk without room: what is asked is refused with the cause, nothing is left half made, batches wait for room."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import shutil
from io import FileIO
from pathlib import Path
from typing import Any

import pytest

from octavo.server.api.batches import run as runner
from octavo.server.api.batches import service, store
from octavo.server.api.batches.endpoints import clean_name
from tests.server.fakes import Harness, Wire
from tests.server.test_batches import ask, configured, content, create, lines, over, serving, upload

LOCAL = {"host": "127.0.0.1"}
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Disk:
    """Fails writes with `code` while it is set, after half of what is to be written."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.code = 0
        self.num_failed = 0
        whole = runner.write_whole

        def write_whole(file: FileIO, data: bytes) -> None:
            if self.code:
                file.write(data[: len(data) // 2])
                self.fail()
            whole(file, data)

        def copy(source: Any, target: Any, length: int) -> None:
            if self.code:
                target.write(source.read(10))
                self.fail()
            target.write(source.read())

        monkeypatch.setattr(runner, "write_whole", write_whole)
        monkeypatch.setattr(store, "write_whole", write_whole)
        monkeypatch.setattr(shutil, "copyfileobj", copy)
        monkeypatch.setattr(service, "_RETRY_S", 0.01)

    def fail(self) -> None:
        self.num_failed += 1
        raise OSError(self.code, os.strerror(self.code))


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("*/*")}


@pytest.mark.parametrize("code", FULL)
async def test_an_upload_without_room_is_answered_with_the_cause(
    tmp_path: Path, disk: Disk, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(configured(tmp_path)) as harness:
        disk.code = code
        answer = await upload(harness, lines(ask("a")))
        assert answer.status_code == 507 and answer.headers["x-should-retry"] == "false"
        error = answer.json()["error"]
        assert error["code"] == "disk_full" and os.strerror(code) in error["message"]
        assert (await harness.get("/v1/files")).json()["data"] == [] and names(tmp_path) == set()
        told = [record for record in caplog.records if record.name == "octavo.server.http.middleware"]
        assert len(told) == 1 and told[0].levelno == logging.ERROR and not told[0].exc_info
        disk.code = 0
        assert (await upload(harness, lines(ask("a")))).status_code == 200


async def test_a_batch_that_cannot_be_kept_is_not_there(tmp_path: Path, disk: Disk) -> None:
    async with serving(configured(tmp_path)) as harness:
        file_id = (await upload(harness, lines(ask("a")))).json()["id"]
        before = names(tmp_path)
        disk.code = errno.ENOSPC
        answer = await create(harness, file_id)
        assert answer.status_code == 507 and answer.json()["error"]["code"] == "disk_full"
        assert (await harness.get("/v1/batches")).json()["data"] == [] and names(tmp_path) == before
        disk.code = 0
        await asyncio.sleep(0.05)
        assert harness.engine.requests == []
        assert (await over(harness, (await create(harness, file_id)).json()["id"]))["status"] == "completed"


async def paused(harness: Harness, batch_id: str) -> dict[str, Any]:
    async with asyncio.timeout(60):
        while True:
            batch: dict[str, Any] = (await harness.get(f"/v1/batches/{batch_id}")).json()
            if batch["errors"]:
                return batch
            await asyncio.sleep(0.005)


async def test_a_running_batch_waits_for_room_and_loses_no_answer(
    tmp_path: Path, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(configured(tmp_path)) as harness:
        harness.engine.is_held = True
        file_id = (await upload(harness, lines(*(ask(f"r{i}") for i in range(20))))).json()["id"]
        batch_id = (await create(harness, file_id)).json()["id"]
        async with asyncio.timeout(60):
            await harness.engine.submitted.wait()
        disk.code, harness.engine.is_held = errno.ENOSPC, False
        for request in harness.engine.requests:
            harness.engine.answer(request)
        batch = await paused(harness, batch_id)
        assert batch["status"] == "in_progress"
        [error] = batch["errors"]["data"]
        assert error["code"] == "disk_full" and "No space left" in error["message"]
        tries = disk.num_failed
        async with asyncio.timeout(60):
            while disk.num_failed < tries + 2:
                await asyncio.sleep(0.005)
        refused = await harness.request("POST", f"/v1/batches/{batch_id}/cancel")
        assert refused.status_code == 507
        assert (await harness.get(f"/v1/batches/{batch_id}")).json()["status"] == "in_progress"
        disk.code = 0
        batch = await over(harness, batch_id)
        assert batch["status"] == "completed" and batch["errors"] is None
        assert batch["request_counts"] == {"total": 20, "completed": 20, "failed": 0}
        answers = await content(harness, batch["output_file_id"])
        assert sorted(line["custom_id"] for line in answers) == sorted(f"r{i}" for i in range(20))
        assert len(harness.engine.requests) == 20
    assert sum("waits until there is room" in record.message for record in caplog.records) <= 2
    async with serving(configured(tmp_path)) as harness:
        assert (await harness.get(f"/v1/batches/{batch_id}")).json()["errors"] is None


async def test_a_server_that_ends_with_a_full_disk_does_not_wait_and_goes_on_later(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "_CLOSE_S", 0.1)
    async with serving(configured(tmp_path)) as harness:
        file_id = (await upload(harness, lines(*(ask(f"r{i}") for i in range(400))))).json()["id"]
        harness.engine.is_held = True
        batch_id = (await create(harness, file_id)).json()["id"]
        async with asyncio.timeout(60):
            await harness.engine.submitted.wait()
        disk.code, harness.engine.is_held = errno.ENOSPC, False
        for request in harness.engine.requests:
            harness.engine.answer(request)
        await paused(harness, batch_id)
        begun = asyncio.get_running_loop().time()
    assert asyncio.get_running_loop().time() - begun < 5
    disk.code = 0
    async with serving(configured(tmp_path)) as harness:
        batch = await over(harness, batch_id)
        assert batch["request_counts"] == {"total": 400, "completed": 400, "failed": 0}
        assert len({line["custom_id"] for line in await content(harness, batch["output_file_id"])}) == 400


async def test_a_batch_whose_files_fail_otherwise_says_so(tmp_path: Path, disk: Disk) -> None:
    async with serving(configured(tmp_path)) as harness:
        file_id = (await upload(harness, lines(ask("a")))).json()["id"]
        harness.engine.is_held = True
        batch_id = (await create(harness, file_id)).json()["id"]
        async with asyncio.timeout(60):
            await harness.engine.submitted.wait()
        monkey, disk.code = harness.engine.requests[0], errno.EIO
        harness.engine.answer(monkey)
        async with asyncio.timeout(60):
            while not disk.num_failed:
                await asyncio.sleep(0.005)
        disk.code = 0
        batch = await over(harness, batch_id)
        [error] = batch["errors"]["data"]
        assert batch["status"] == "failed" and "Input/output error" in error["message"]


async def test_other_failures_of_files_are_faults_of_ours_and_logged(
    tmp_path: Path, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(configured(tmp_path)) as harness:
        disk.code = errno.EIO
        answer = await upload(harness, lines(ask("a")))
        assert answer.status_code == 500 and answer.json()["error"]["code"] == "internal_error"
        assert any(record.exc_info for record in caplog.records) and names(tmp_path) == set()


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("in.jsonl", "in.jsonl"),
        ("../../etc/passwd", "passwd"),
        ("..\\..\\windows\\x.jsonl", "x.jsonl"),
        ("a\x00b\r\nc\u202e.jsonl", "abc.jsonl"),
        ("../", "file"),
        ("..", "file"),
        (" . ", "file"),
        ("\x00", "file"),
        ("", "file"),
        ("x" * 5000, "x" * 255),
        ("имя файла.jsonl", "имя файла.jsonl"),
        ("\ud800a", "a"),
    ],
)
def test_names_of_files_are_names(given: str, kept: str) -> None:
    assert clean_name(given) == kept


async def test_names_of_uploads_are_cleaned_where_they_are_told(tmp_path: Path) -> None:
    async with serving(configured(tmp_path)) as harness:
        files = {"file": ("../../a\\b\u202e.jsonl", lines(ask("a")))}
        answer = await harness.request("POST", "/v1/files", files=files, data={"purpose": "batch"})
        assert answer.json()["filename"] == "b.jsonl"
        shown = await harness.get(f"/v1/files/{answer.json()['id']}/content")
        assert shown.headers["content-disposition"] == f'attachment; filename="{answer.json()["id"]}.jsonl"'


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"priority": -999}, "body.priority"),
        ({"priority": 9}, "body.priority"),
        ({"background": True}, "body.background"),
    ],
)
async def test_a_line_of_a_batch_may_not_go_before_others(tmp_path: Path, fields: dict[str, Any], param: str) -> None:
    async with serving(configured(tmp_path)) as harness:
        file_id = (await upload(harness, lines(ask("a"), ask("b", **fields)))).json()["id"]
        batch = await over(harness, (await create(harness, file_id)).json()["id"])
        [error] = batch["errors"]["data"]
        assert batch["status"] == "failed" and error["line"] == 2 and error["param"] == param
        assert "line 2" in error["message"] and harness.engine.requests == []


async def test_a_line_of_a_batch_may_be_less_urgent(tmp_path: Path) -> None:
    async with serving(configured(tmp_path)) as harness:
        file_id = (await upload(harness, lines(ask("a", priority=10), ask("b", priority=30)))).json()["id"]
        batch = await over(harness, (await create(harness, file_id)).json()["id"])
        assert batch["status"] == "completed"
        assert sorted(request.priority for request in harness.engine.requests) == [10, 30]


async def test_a_client_that_left_is_no_failure(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An error of sending is the client's; the same error from elsewhere is ours."""
    harness = Harness()
    wire = Wire(harness.app, "/v1/completions", {"prompt": "hi"}, {"content-type": "application/json", **LOCAL})
    tries = 0

    async def send(message: object) -> None:
        nonlocal tries
        tries += 1
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with caplog.at_level(logging.INFO):
        await harness.app(wire.scope, wire.receive, send)
    assert tries == 1 and not [record for record in caplog.records if record.levelno >= logging.WARNING]
