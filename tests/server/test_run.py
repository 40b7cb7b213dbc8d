"""A real server on a loopback port: the openai client, signals, slow heads, refusals to listen."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest

from octavo.config import Config, ServingConfig
from octavo.errors import ConfigError, QueueFullError
from octavo.machine import is_loopback
from octavo.server.api.sampling import MAX_STOPS
from octavo.server.http.limits import HttpLimits
from octavo.server.http.listener import open_socket, url_of
from octavo.server.http.server import HttpServer
from tests.server.fakes import FakeClient, Harness, events, keyed

KEY = "sk-test"


@dataclass
class Running:
    url: str
    loop: asyncio.AbstractEventLoop
    server: HttpServer
    engine: FakeClient
    context: Any

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.server.stop)


@contextmanager
def running(
    config: Config | None = None,
    drain_timeout_s: float = 5.0,
    limits: HttpLimits | None = None,
    loop_factory: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop,
) -> Iterator[Running]:
    """Serve in a thread; gone when the block ends."""
    listener = open_socket(ServingConfig(port=0))
    ready: list[Running] = []
    begun = threading.Event()

    async def main() -> None:
        harness = Harness(config=config or keyed(KEY), limits=limits or HttpLimits())
        web = harness.config.web
        server = HttpServer(harness.app, listener, harness.context.lifecycle, drain_timeout_s, web)
        ready.append(
            Running(url_of(listener, web), asyncio.get_running_loop(), server, harness.engine, harness.context)
        )
        begun.set()
        await server.run()

    def run() -> None:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(main())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert begun.wait(60)
    try:
        yield ready[0]
    finally:
        if thread.is_alive():
            ready[0].stop()
            ready[0].stop()
        thread.join(60)
        listener.close()
        assert not thread.is_alive()


@contextmanager
def client_of(server: Running, **options: Any) -> Iterator[openai.OpenAI]:
    fields = {"base_url": server.url + "/v1", "api_key": KEY, "max_retries": 0, **options}
    with openai.OpenAI(**fields) as client:
        yield client


def test_I02_the_openai_client_is_served() -> None:
    with running() as server, client_of(server) as client:
        assert [model.id for model in client.models.list()] == ["tiny"]
        messages: Any = [{"role": "user", "content": "hi"}]
        whole = client.chat.completions.create(model="tiny", messages=messages, logprobs=True, top_logprobs=2)
        assert whole.choices[0].message.content == "Hello é!"
        assert whole.usage is not None and whole.usage.completion_tokens == 10
        assert whole.usage.prompt_tokens_details is not None
        assert whole.choices[0].logprobs is not None and whole.choices[0].logprobs.content is not None
        text, last = "", None
        options: Any = {"include_usage": True}
        for chunk in client.chat.completions.create(
            model="tiny", messages=messages, stream=True, stream_options=options
        ):
            if chunk.choices:
                text += chunk.choices[0].delta.content or ""
            last = chunk
        assert text == "Hello é!" and last is not None and last.usage is not None
        batch = client.completions.create(model="tiny", prompt=["a", "b"], max_tokens=3)
        assert [choice.text for choice in batch.choices] == ["Hel", "Hel"]
        streamed = client.completions.create(model="tiny", prompt="a", stream=True)
        assert "".join(chunk.choices[0].text for chunk in streamed) == "Hello é!"


def test_I02_the_openai_client_understands_the_errors() -> None:
    messages: Any = [{"role": "user", "content": "hi"}]
    with running() as server, client_of(server) as client:
        with pytest.raises(openai.BadRequestError) as bad:
            client.chat.completions.create(model="tiny", messages=messages, stop=["x"] * (MAX_STOPS + 1))
        assert (bad.value.param, bad.value.code) == ("stop", "invalid_value")
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="gpt-9", messages=messages)
        with client_of(server, api_key="sk-wrong") as stranger, pytest.raises(openai.AuthenticationError):
            stranger.models.list()
        server.engine.submit_error = QueueFullError("full")
        with pytest.raises(openai.RateLimitError):
            client.chat.completions.create(model="tiny", messages=messages)


def test_a_real_disconnect_cancels_in_the_engine() -> None:
    with running() as server:
        server.engine.is_held = True
        body = {"prompt": "hi", "stream": True}
        headers = {"authorization": f"Bearer {KEY}"}
        with httpx.stream("POST", server.url + "/v1/completions", json=body, headers=headers):
            pass
        deadline = time.monotonic() + 60
        while not server.engine.cancelled and time.monotonic() < deadline:
            time.sleep(0.005)
        assert len(server.engine.cancelled) == 1


def test_S19_stopping_twice_answers_everyone_and_refuses_at_once() -> None:
    with running(config=Config(), drain_timeout_s=30) as server:
        server.engine.is_held = True
        texts: list[str] = []

        def read() -> None:
            with httpx.stream(
                "POST", server.url + "/v1/completions", json={"prompt": "hi", "stream": True}
            ) as response:
                texts.append(response.read().decode())

        readers = [threading.Thread(target=read) for _ in range(4)]
        for reader in readers:
            reader.start()
        deadline = time.monotonic() + 60
        while len(server.engine.requests) < 4 and time.monotonic() < deadline:
            time.sleep(0.005)
        server.stop()
        time.sleep(0.05)
        ready = httpx.get(server.url + "/readyz")
        assert ready.status_code == 503 and ready.json()["error"]["code"] == "draining"
        server.stop()
        for reader in readers:
            reader.join(60)
        assert len(texts) == 4
        for text in texts:
            error, done = events(text)
            assert error["error"]["code"] == "draining" and done == "[DONE]"


def port_of(server: Running) -> int:
    return int(server.url.rsplit(":", 1)[1])


def test_slow_heads_are_cut() -> None:
    with running(config=Config(), limits=HttpLimits(head_timeout_s=0.1)) as server:
        for head in (b"", b"GET /livez HTTP/1.1\r\nx-slow: "):
            with socket.create_connection(("127.0.0.1", port_of(server)), timeout=60) as slow:
                slow.sendall(head)
                assert slow.recv(100) == b""
        with httpx.Client() as client:
            for _ in range(3):  # a connection that is kept alive expects a new head each time
                assert client.get(server.url + "/livez").status_code == 200
                time.sleep(0.15)


def test_endless_heads_are_cut() -> None:
    with (
        running(config=Config()) as server,
        socket.create_connection(("127.0.0.1", port_of(server)), timeout=60) as endless,
    ):
        endless.sendall(b"GET /livez HTTP/1.1\r\n" + b"x: y\r\n" * 20_000)
        with pytest.raises(OSError):
            for _ in range(200):
                endless.sendall(b"x: y\r\n")
                time.sleep(0.01)


def test_listening_beyond_loopback_needs_a_key() -> None:
    for host in ("::", "192.0.2.1", "example.org", ""):
        with pytest.raises(ConfigError, match="--insecure"):
            open_socket(ServingConfig(host=host, port=0))
    for key in ("", " ", "\t\n"):
        with pytest.raises(ConfigError, match="empty"):
            open_socket(ServingConfig(port=0, api_key=(key,)))
    assert is_loopback("127.0.0.9") and is_loopback("::1") and is_loopback("localhost")
    with open_socket(ServingConfig(port=0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} is in use; give another --port"):
            open_socket(ServingConfig(port=port))


def test_a_key_that_is_soon_guessed_is_refused_where_others_reach_the_address(caplog: pytest.LogCaptureFixture) -> None:
    for keys in (("a",), ("k" * 15,), ("k" * 40, "sk-topsecret")):
        shortest = min(map(len, keys))
        with pytest.raises(ConfigError, match=f"has {shortest} characters.*at least 16, such as openssl") as refused:
            open_socket(ServingConfig(host="192.0.2.1", port=0, api_key=keys))
        assert "topsecret" not in str(refused.value)
    with pytest.raises(ConfigError, match="cannot listen on 192"):
        open_socket(ServingConfig(host="192.0.2.1", port=0, api_key=("k" * 16,)))
    assert not caplog.records
    open_socket(ServingConfig(port=0, api_key=("sk-topsecret",))).close()
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("an --api-key has 12 characters, and can be guessed; give one of at least 16")
    open_socket(ServingConfig(port=0, api_key=("k" * 16,))).close()
    assert len(caplog.records) == 1


SIGTERM_SCRIPT = """
import asyncio
from tests.server.fakes import Harness
from octavo.config import ServingConfig
from octavo.server.http.listener import open_socket, url_of
from octavo.server.http.server import HttpServer
async def serve():
    harness, listener = Harness(), open_socket(ServingConfig(port=0))
    server = HttpServer(harness.app, listener, harness.context.lifecycle, drain_timeout_s=2.0)
    print(url_of(listener), flush=True)
    await server.run()
    listener.close()
asyncio.run(serve())
print("ended")
"""


def test_sigterm_ends_a_server_cleanly() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-c", SIGTERM_SCRIPT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            answer = httpx.post(url + "/v1/completions", json={"prompt": "hi"})
            assert answer.json()["choices"][0]["text"] == "Hello é!"
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
            assert process.stdout.read() == "ended\n"
        finally:
            process.kill()


def test_importing_the_server_loads_little_and_no_torch() -> None:
    """694 modules with Python 3.11; their number says what the time would, on any machine."""
    script = (
        "import octavo.server.app, octavo.server.http.server; octavo.server.app.find_endpoints();"
        "import sys; print(len(sys.modules), *({'torch', 'numpy', 'transformers', 'tokenizers'} & set(sys.modules)))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment)
    num_modules, *heavy = out.stdout.split()
    assert not heavy
    assert int(num_modules) < 800
