"""Several models behind one endpoint: each API answers with the right one, loaded on demand, unloaded when idle."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import ollama
import openai
import pytest

from tests.fake_server import RealServer
from tests.observe.metrics.test_metrics import parse, value
from tests.quick import one_in
from tests.server.several_models import LONG_S, SeveralModels, write_script

USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeveralModels]:
    """Three models that stay loaded."""
    folder = tmp_path_factory.mktemp("several")
    slow = write_script(folder, "slow", first_delay_ms=0, delay_ms=20, say="word " * 40)
    with SeveralModels(folder, (write_script(folder, "red"), write_script(folder, "blue"), slow)) as running:
        yield running


def _text(body: Any) -> str:
    """Whatever an API's answer says."""
    return json.dumps(body)


def _said(stream: str) -> tuple[set[str], str]:
    """The ids and the text of a streamed chat completion."""
    chunks = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    texts = [choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]]
    return {chunk["id"] for chunk in chunks}, "".join(texts)


@pytest.mark.parametrize("name", ["red", "blue", None])
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"messages": USER}),
        ("/v1/completions", {"prompt": "hi", "max_tokens": 20}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"messages": USER, "max_tokens": 20}),
        ("/api/chat", {"messages": USER, "stream": False}),
        ("/api/generate", {"prompt": "hi", "stream": False}),
    ],
)
def test_each_api_answers_with_the_model_that_is_named(
    server: SeveralModels, path: str, fields: dict[str, Any], name: str | None
) -> None:
    answer = server.post(path, fields if name is None else {**fields, "model": name})
    assert answer.status_code == 200, answer.text
    body, wanted = answer.json(), name or "red"
    assert f"I am {wanted}." in _text(body) and body["model"] == wanted


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"messages": USER}),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"messages": USER, "max_tokens": 20}),
        ("/v1/embeddings", {"input": "hi"}),
        ("/api/chat", {"messages": USER}),
        ("/api/show", {}),
        ("/tokenize", {"prompt": "hi"}),
    ],
)
def test_an_unknown_model_is_refused_with_the_names(server: SeveralModels, path: str, fields: dict[str, Any]) -> None:
    answer = server.post(path, {**fields, "model": "green"})
    assert answer.status_code == 404
    assert "this server has: red, blue, slow" in answer.text


def test_models_without_text_are_found_too(server: SeveralModels) -> None:
    for name in ("red", "blue"):
        found = server.post("/v1/embeddings", {"model": name, "input": "hi"}).json()
        assert found["model"] == name and len(found["data"]) == 1
        assert server.post("/tokenize", {"model": name, "prompt": "hi"}).json()["count"] > 0
        assert server.client.get("/tokenizer_info", params={"model": name}).status_code == 200
        shown = server.post("/api/show", {"model": f"{name}:latest"}).json()
        assert shown["model_info"]["general.basename"] == name
    assert server.client.get("/tokenizer_info", params={"model": "green"}).status_code == 404


def test_openais_and_ollamas_clients(server: SeveralModels) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        assert [model.id for model in client.models.list()] == ["red", "blue", "slow"]
        for name in ("blue", "red"):
            made = client.chat.completions.create(model=name, messages=USER, stream=True)  # type: ignore[call-overload]
            assert "".join(chunk.choices[0].delta.content or "" for chunk in made) == f"I am {name}."
        with pytest.raises(openai.NotFoundError, match="red, blue, slow"):
            client.chat.completions.create(model="green", messages=USER)  # type: ignore[arg-type]
    other = ollama.Client(server.url)
    server.closing.append(other._client)
    assert [model.model for model in other.list().models] == ["red", "blue", "slow"]
    assert other.chat("blue", USER).message.content == "I am blue."
    assert {"red", "blue"} <= {model.model for model in other.ps().models}


def test_a_retry_an_explanation_and_a_cancellation_find_their_model(server: SeveralModels) -> None:
    first, again = (server.chat("blue", headers=None) for _ in range(2))
    assert first.json()["id"] != again.json()["id"]
    body = {"model": "blue", "messages": USER}
    kept = [server.post("/v1/chat/completions", body, headers={"Idempotency-Key": "k1"}).json() for _ in range(2)]
    assert kept[0] == kept[1] and "I am blue." in _text(kept[0])
    answers: list[Any] = []
    request = threading.Thread(
        target=lambda: answers.append(
            server.post("/v1/chat/completions", {"model": "slow", "messages": USER}, headers={"X-Request-Id": "mine"})
        )
    )
    request.start()
    end = time.monotonic() + LONG_S
    while time.monotonic() < end:  # the model's engine begins first
        explained = server.client.get("/v1/requests/chatcmpl-mine/explain")
        explained = explained if explained.status_code == 200 else server.client.get("/v1/requests/mine/explain")
        if explained.status_code == 200:
            break
    assert explained.status_code == 200, explained.text
    assert "mine" in _text(server.verb("explain")["models"]["slow"])
    assert server.client.post(f"/v1/requests/{explained.json()['id']}/cancel").status_code == 200
    request.join(LONG_S)
    assert answers[0].status_code == 499 and answers[0].json()["error"]["code"] == "cancelled"
    again_explained = server.client.get(f"/v1/requests/{explained.json()['id']}/explain").json()
    assert "ended" in _text(again_explained)


def test_a_batch_of_two_models_and_a_stored_response_of_the_other(server: SeveralModels) -> None:
    first = server.post("/v1/responses", {"model": "red", "input": "hi"}).json()
    then = server.post("/v1/responses", {"model": "blue", "input": "go on", "previous_response_id": first["id"]}).json()
    assert "I am blue." in _text(then["output"])
    assert server.client.get(f"/v1/responses/{first['id']}").json()["model"] == "red"
    background = server.post("/v1/responses", {"model": "blue", "input": "hi", "background": True}).json()
    for _ in range(1000):
        found = server.client.get(f"/v1/responses/{background['id']}").json()
        if found["status"] == "completed":
            break
    assert "I am blue." in _text(found["output"])


def test_metrics_health_and_status_name_the_models(server: SeveralModels) -> None:
    for name in ("red", "blue"):
        server.says(name)
    text = server.client.get("/metrics").text
    families = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(families) == len(set(families)), "each family once, as Prometheus wants it"
    samples = parse(text)
    for name in ("red", "blue"):
        assert value(samples, "octavo_requests_finished_total", model_name=name, finished_reason="stop") >= 1
        assert value(samples, "octavo_engine_up", model_name=name) == 1
    assert server.client.get("/health").json()["models"]["blue"] == "ready"
    status = server.verb("status")
    assert status["engine"]["models"]["blue"]["engine"]["state"] == "ready"
    assert {"engine", "engine blue"} <= status["processes"].keys()


def test_a_model_is_loaded_on_demand_and_unloaded_when_idle(tmp_path: Path) -> None:
    models = (write_script(tmp_path, "red"), write_script(tmp_path, "blue"))
    with SeveralModels(tmp_path, models, keep_alive_s=0.3) as server:
        assert server.states()["blue"] == "unloaded"
        assert server.client.get("/readyz").status_code == 200
        server.until_state("red", "unloaded")
        assert server.client.get("/readyz").status_code == 200, "it would be loaded"
        assert "engine" not in server.verb("status")["processes"], "its process has ended"
        assert server.client.get("/api/ps").json() == {"models": []}
        assert server.says("blue") == "I am blue."
        [loaded] = server.client.get("/api/ps").json()["models"]
        assert loaded["name"] == "blue" and not loaded["expires_at"].startswith("9999")
        server.until_state("blue", "unloaded")
        for _ in range(3):  # loaded again, and unloaded again
            assert server.says("red") == "I am red."
            server.until_state("red", "unloaded")
        report = server.verb("status")["engine"]["models"]
        assert report["red"]["loads"] == 4 and report["blue"]["loads"] == 1


async def test_requests_during_loading_and_unloading_are_not_lost(tmp_path: Path) -> None:
    models = tuple(write_script(tmp_path, name) for name in ("red", "blue", "green"))
    with SeveralModels(tmp_path, models, keep_alive_s=0.0, max_loaded_models=1) as server:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=LONG_S) as client:

            async def ask(number: int) -> bool:
                name = ("red", "blue", "green")[number % 3]
                await asyncio.sleep(0.1 * (number // 3))
                made = await client.chat.completions.create(model=name, messages=USER)  # type: ignore[arg-type]
                return made.choices[0].message.content == f"I am {name}."

            assert all(await asyncio.gather(*map(ask, range(24))))
        report = server.verb("status")["engine"]["models"]
        assert sum(model["loads"] for model in report.values()) >= 4
        assert sum(model["state"] == "ready" for model in report.values()) <= 1


def test_ollamas_keep_alive_loads_keeps_and_unloads(tmp_path: Path) -> None:
    models = (write_script(tmp_path, "red"), write_script(tmp_path, "blue"))
    with SeveralModels(tmp_path, models) as server:
        client = ollama.Client(server.url)
        server.closing.append(client._client)
        assert client.generate("blue", "").done_reason == "load"
        assert server.states()["blue"] == "ready"
        assert client.generate("blue", "", keep_alive=0).done_reason == "unload"
        server.until_state("blue", "unloaded")
        assert client.chat("blue", USER, keep_alive="1h").message.content == "I am blue."
        [blue] = [model for model in client.ps().models if model.model == "blue"]
        assert blue.expires_at is not None and blue.expires_at.year < 9999
        assert client.chat("blue", USER, keep_alive=0.1).message.content == "I am blue."
        server.until_state("blue", "unloaded")
        assert server.states()["red"] == "ready"
        with pytest.raises(ollama.ResponseError, match="keep_alive is 'soon'"):
            client.generate("blue", "", keep_alive="soon")


def test_a_model_that_cannot_be_loaded_says_why_and_the_others_serve_on(tmp_path: Path) -> None:
    models = (write_script(tmp_path, "red"), write_script(tmp_path, "blue"))
    with SeveralModels(tmp_path, models) as server:
        script = tmp_path / "blue.json"
        content = script.read_bytes()
        script.unlink()
        for _ in range(2):  # at once, and within the time in which it is not tried again
            answer = server.chat("blue")
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (503, "model_not_loaded")
            assert "model blue cannot be loaded: no script" in error["message"]
            assert int(answer.headers["retry-after"]) >= 1
        assert server.says("red") == "I am red."
        assert server.states() == {"red": "ready", "blue": "failed"}
        assert server.client.get("/readyz").status_code == 200
        assert "no script" in server.verb("status")["engine"]["models"]["blue"]["failure"]
        assert server.client.get("/metrics").status_code == 200
        script.write_bytes(content)
        end = time.monotonic() + LONG_S
        while (answer := server.chat("blue")).status_code == 503 and time.monotonic() < end:
            time.sleep(0.2)
        assert answer.status_code == 200 and server.states()["blue"] == "ready"


@pytest.mark.parametrize("ends", one_in(3, ["served", "unserved", "replaced"]))
def test_the_journal_puts_each_request_at_its_model(tmp_path: Path, ends: str) -> None:
    (tmp_path / "other").mkdir()
    red, green = write_script(tmp_path, "red"), write_script(tmp_path, "green")
    blue = write_script(tmp_path, "blue", say="word " * 60, delay_ms=10)
    body, key = {"model": "blue", "messages": USER, "stream": True}, {"Idempotency-Key": "k"}
    with SeveralModels(tmp_path, (red, blue), journal=str(tmp_path / "j")) as server:
        done = server.post("/v1/chat/completions", {**body, "model": "red"}, headers={"Idempotency-Key": "r"}).text
        with server.client.stream("POST", "/v1/chat/completions", json=body, headers=key) as stream:
            lines = stream.iter_lines()
            had = [next(lines) for _ in range(40)]
            server.kill()
    assert not any("[DONE]" in line for line in had)
    other = write_script(tmp_path / "other", "blue")
    models = {"unserved": (red, green), "replaced": (red, other), "served": (red, blue)}[ends]
    with SeveralModels(tmp_path, models, journal=str(tmp_path / "j")) as server:
        again = server.post("/v1/chat/completions", {**body, "model": "red"}, headers={"Idempotency-Key": "r"}).text
        assert _said(again) == _said(done), "an ended answer is kept, with its id"
        answer = server.post("/v1/chat/completions", body, headers=key)
        if ends == "served":
            whole, part = _said(answer.text), _said("\n".join(had))
            assert whole[1] == "word " * 60 and whole[1].startswith(part[1])
            assert whole[0] == part[0], "the run that had begun goes on, with its id"
        elif ends == "replaced":
            assert answer.status_code == 409 and "another model has this name" in answer.text
        else:
            assert answer.status_code == 404 and "red, green" in answer.text


def test_the_only_model_of_a_server_is_unloaded_too(tmp_path: Path) -> None:
    flags = ("--keep-alive", "0.3", "--kv-cache-tokens", "4096", "--served-model-name", "mine", "alias")
    with (
        RealServer(write_script(tmp_path, "red"), tmp_path / "log", *flags) as server,
        httpx.Client(base_url=server.url, timeout=LONG_S) as client,
    ):

        def states() -> list[str]:
            return [card["state"] for card in client.get("/v1/models").json()["data"]]

        for _ in range(2):
            end = time.monotonic() + LONG_S
            while states() != ["unloaded", "unloaded"]:
                assert time.monotonic() < end
                time.sleep(0.02)
            answer = client.post("/v1/chat/completions", json={"model": "alias", "messages": USER}).json()
            assert (answer["model"], answer["choices"][0]["message"]["content"]) == ("alias", "I am red.")
    assert "unloaded after 0.3 s without a request" in server.text


def test_the_feed_of_one_model_and_what_no_model_is(server: SeveralModels) -> None:
    server.says("blue")
    with server.client.stream("GET", "/dashboard/feed", params={"model": "blue"}) as stream:
        assert stream.status_code == 200
        assert any(line.startswith("data: ") for line in stream.iter_lines())
    assert server.client.get("/dashboard/feed", params={"model": "green"}).status_code == 404
