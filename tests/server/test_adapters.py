"""Adapters over HTTP, on a real server: names in every API, loading and unloading under load, refusals."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.cli.servers import AdminError, call_admin
from tests.adapters import RandomAdapter
from tests.fake_server import FakeServer, RealServer
from tests.reliability.retrying import Retrying
from tests.tiny_models import make_tiny_model

FLAGS = ("--dtype", "float32", "--threads", "1", "--max-loras", "2", "--allow-runtime-lora-updating")
NAMES = ("a", "b", "c")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    model = make_tiny_model("smollm2", folder / "base", max_position_embeddings=1024)
    for seed, name in enumerate(NAMES):
        RandomAdapter.of(model, seed, rank=8).write(folder / name)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RealServer]:
    with RealServer(str(folder / "base"), folder / "log", *FLAGS, "--lora-modules", f"a={folder / 'a'}") as server:
        yield server


def change(server: FakeServer, verb: str, **body: str) -> str:
    """Load or unload an adapter; what the server answers."""
    request = urllib.request.Request(
        f"{server.url}/v1/{verb}_lora_adapter", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return answer.read().decode()


def complete(server: FakeServer, model: str, max_tokens: int = 12) -> Any:
    body = {"model": model, "prompt": "the cat sat", "max_tokens": max_tokens, "temperature": 0, "seed": 1}
    status, _, answer = server.post("/v1/completions", {**body, "ignore_eos": True}, timeout_s=120)
    assert status == 200, answer
    assert answer["model"] == model
    return answer["choices"][0]["text"]


def test_an_adapter_is_a_model_of_every_api(server: RealServer) -> None:
    cards = {card["id"]: card for card in server.get("/v1/models")[2]["data"]}
    assert cards["a"]["parent"] == "base" and cards["base"]["parent"] is None
    assert server.get("/v1/models/a")[2]["root"].endswith("/a")
    assert complete(server, "a") != complete(server, "base")
    messages = [{"role": "user", "content": "hello"}]
    bodies = {
        "/v1/chat/completions": {"messages": messages, "max_tokens": 4},
        "/v1/responses": {"input": "hello", "max_output_tokens": 16},
        "/v1/messages": {"messages": messages, "max_tokens": 4},
        "/api/chat": {"messages": messages, "stream": False, "options": {"num_predict": 4}},
        "/tokenize": {"prompt": "hello"},
    }
    for path, body in bodies.items():
        for model, expected in (("a", 200), ("nothing", 404)):
            status, _, answer = server.post(path, {"model": model, **body})
            assert status == expected, (path, answer)
            if path != "/tokenize" and status == 200:
                assert answer["model"] == "a"


def test_adapters_are_loaded_and_unloaded_under_load(server: RealServer, folder: Path) -> None:
    plain, of_a = complete(server, "base", 60), complete(server, "a", 60)
    wrong: list[object] = []
    is_over = threading.Event()

    def load(model: str, expected: str) -> None:
        while not is_over.is_set():
            try:
                if (text := complete(server, model, 60)) != expected:
                    wrong.append((model, text))
            except Exception as error:  # whatever a client meets is asserted on below
                wrong.append(error)

    threads = [threading.Thread(target=load, args=pair) for pair in (("base", plain), ("a", of_a)) * 2]
    for thread in threads:
        thread.start()
    of_b = []
    for turn in range(4):
        assert change(server, "load", lora_name="b", lora_path=str(folder / "b")) == (
            "Success: LoRA adapter 'b' added successfully."
        )
        reading = threading.Thread(target=lambda: of_b.append(complete(server, "b", 120)))
        reading.start()
        while not any(row["num_outputs"] for row in open_requests(server) if row["num_prompt"]) and reading.is_alive():
            pass
        of_b.append(complete(server, "b", 120))
        if turn == 2:
            os.kill(server.pid("engine"), signal.SIGKILL)
        assert "removed" in change(server, "unload", lora_name="b")
        reading.join(60)
        assert server.post("/v1/completions", {"model": "b", "prompt": "x"})[0] == 404
    is_over.set()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert len(of_b) == 8 and len(set(of_b)) == 1 and of_b[0] != plain


def open_requests(server: FakeServer) -> list[Any]:
    answer = call_admin(server.admin, "explain")
    return [{"num_outputs": row.get("num_outputs", 0), "num_prompt": 1} for row in answer.get("open", [])]


def test_admin_loads_and_unloads_too(server: RealServer, folder: Path) -> None:
    names = [row["name"] for row in call_admin(server.admin, "load_adapter", f"c={folder / 'c'}")]
    assert names == ["a", "c"]
    assert complete(server, "c") != complete(server, "a")
    assert [row["name"] for row in call_admin(server.admin, "unload_adapter", "c")] == ["a"]
    for verb, argument, reason in (
        ("unload_adapter", "c", "there is no adapter 'c'; there are: a"),
        ("load_adapter", "c", "is no NAME=PATH"),
        ("load_adapter", f"base={folder / 'c'}", "the name 'base' is in use"),
    ):
        with pytest.raises(AdminError, match=reason):
            call_admin(server.admin, verb, argument)


def test_damaged_and_unknown_adapters_are_refused(server: RealServer, folder: Path, tmp_path: Path) -> None:
    damaged = RandomAdapter.of(folder / "base", 9).write(tmp_path / "damaged")
    file = damaged / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(iter(tensors))
    save_file({**tensors, name: torch.zeros(3, 5)}, file)
    status, _, answer = server.post("/v1/load_lora_adapter", {"lora_name": "d", "lora_path": str(damaged)})
    assert status == 400 and name in answer["error"]["message"] and "has shape [3, 5]" in answer["error"]["message"]
    for verb, body, expected in (
        ("load", {"lora_name": "a", "lora_path": str(folder / "a")}, 400),
        ("load", {"lora_name": "d", "lora_path": str(tmp_path / "nothing")}, 400),
        ("load", {"lora_name": "d"}, 400),
        ("unload", {"lora_name": "d"}, 404),
    ):
        assert server.post(f"/v1/{verb}_lora_adapter", body)[0] == expected, body
    assert complete(server, "a")


def test_without_the_flag_clients_cannot_load(folder: Path, tmp_path: Path) -> None:
    with RealServer(str(folder / "base"), tmp_path / "log", "--threads", "1", "--enable-lora") as server:
        body = {"lora_name": "a", "lora_path": str(folder / "a")}
        status, _, answer = server.post("/v1/load_lora_adapter", body)
        assert status == 403 and answer["error"]["code"] == "adapters_not_allowed"
        assert call_admin(server.admin, "load_adapter", f"a={folder / 'a'}")
        assert complete(server, "a")


def test_requests_of_a_loaded_adapter_go_on_after_a_kill_of_the_api_process(folder: Path, tmp_path: Path) -> None:
    flags = (*FLAGS, "--enable-lora", "--journal", str(tmp_path / "journal"), "--speculate", "none")
    with RealServer(str(folder / "base"), tmp_path / "log", *flags) as server:
        call_admin(server.admin, "load_adapter", f"b={folder / 'b'}")
        port = urlsplit(server.url).port
        assert port is not None
        body = {
            "model": "b",
            "prompt": "the cat",
            "max_tokens": 900,
            "ignore_eos": True,
            "seed": 4,
            "n": 4,  # and no drafts: an answer that takes long enough to be cut
            "stream": True,
        }
        plain, killed = Retrying(port, "plain", body), Retrying(port, "killed", body)

        async def run() -> None:
            await plain.run(60)
            api = await asyncio.to_thread(server.pid, "api")
            working = asyncio.create_task(killed.run(60))
            while not killed.events:
                await asyncio.sleep(0.002)
            os.kill(api, signal.SIGKILL)
            await working

        asyncio.run(run())
        assert killed.is_done and killed.num_connections > 1 and killed.choices == plain.choices
        assert [card["id"] for card in server.get("/v1/models")[2]["data"]] == ["base", "b"]
        assert complete(server, "b") != complete(server, "base")
