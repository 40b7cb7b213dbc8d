"""LiteLLM's proxy before the server, asked with OpenAI's and Anthropic's packages: two turns, errors, fallbacks."""

import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import openai
from anthropic import Anthropic
from checking import MODEL, URL, run
from openai import OpenAI

CLIENT = "LiteLLM proxy"
PACKAGES = ["litellm[proxy]", "openai", "anthropic"]
ENVIRONMENT = "litellm"
SERVER = ["--model", "scripted:agents.yaml", "--served-model-name", "scripted"]
READY_S = 300.0  # it takes 15 s on an idle machine
KEY = "sk-" + secrets.token_hex(32)

CONFIG = {
    "model_list": [
        {"model_name": name, "litellm_params": {"model": f"{route}/{MODEL}", "api_base": base, "api_key": "none"}}
        for name, route, base in (
            ("by-openai", "openai", f"{URL}/v1"),
            ("by-vllm", "hosted_vllm", f"{URL}/v1"),
            ("by-anthropic", "anthropic", URL),
            ("falls-back", "openai", f"{URL}/v1"),
        )
    ],
    "litellm_settings": {"num_retries": 0, "telemetry": False},
    "router_settings": {"context_window_fallbacks": [{"falls-back": ["by-vllm"]}], "num_retries": 0},
}
NAMES = ("by-openai", "by-vllm", "by-anthropic")
ASK = [{"role": "user", "content": "Hello."}]
WEATHER = [{"role": "user", "content": "How is the weather in Paris?"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "description": "It.", "parameters": PARAMETERS}}]
LONG = [{"role": "user", "content": "hi " * 60_000}]
proxy_url = ""


@contextmanager
def proxy() -> Iterator[str]:
    """A proxy on a free port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.yaml"
        config.write_text(json.dumps(CONFIG))  # JSON is YAML
        command = [str(Path(sys.executable).with_name("litellm")), "--config", str(config)]
        command += ["--host", "127.0.0.1", "--port", str(port), "--telemetry", "False"]
        environ = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MASTER_KEY": KEY}
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, env=environ)
        try:
            _wait(process, url)
            yield url
        finally:
            process.terminate()
            process.wait(30)


def _wait(process: subprocess.Popen, url: str) -> None:
    end = time.monotonic() + READY_S
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health/liveliness", timeout=5):
                return
        except OSError:
            time.sleep(0.3)
    raise RuntimeError(f"the proxy did not start (status {process.poll()})")


def client() -> OpenAI:
    """OpenAI's client of the proxy."""
    return OpenAI(base_url=f"{proxy_url}/v1", api_key=KEY, max_retries=0, timeout=120)


def check_completion() -> None:
    """Whole answers by three routes."""
    for name in NAMES:
        answer = client().chat.completions.create(model=name, messages=ASK)
        assert answer.choices[0].message.content == "Hello there, and good day.", (name, answer)
        assert answer.usage.completion_tokens > 0, (name, answer)


def check_stream() -> None:
    """Streamed answers by three routes, with usage."""
    for name in NAMES:
        fields = {"model": name, "messages": ASK, "stream_options": {"include_usage": True}}
        chunks = list(client().chat.completions.create(**fields, stream=True))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == "Hello there, and good day.", (name, text)
        assert any(chunk.usage for chunk in chunks), name


def check_tool_turns() -> None:
    """The proxy's own message goes back with the tool's result, by three routes, to each of them."""
    for name in NAMES:
        first = client().chat.completions.create(model=name, messages=WEATHER, tools=TOOLS).choices[0].message
        (call,) = first.tool_calls
        assert json.loads(call.function.arguments) == {"city": "Paris"}, (name, call)
        result = {"role": "tool", "tool_call_id": call.id, "content": "Sun"}
        for message in (first, first.model_dump()):
            for other in NAMES:
                turns = [*WEATHER, message, result]
                answer = client().chat.completions.create(model=other, messages=turns, tools=TOOLS)
                assert answer.choices[0].message.content == "It is sunny in Paris.", (name, other, answer)


def check_thinking_turns() -> None:
    """thinking_blocks of an answer by Anthropic's route go back by each of them."""
    ask = [{"role": "user", "content": "Please think: two and two?"}]
    first = client().chat.completions.create(model="by-anthropic", messages=ask, max_tokens=300).choices[0].message
    dumped = first.model_dump()
    assert first.content == "Four." and dumped["thinking_blocks"], dumped
    for name in NAMES:
        answer = client().chat.completions.create(model=name, messages=[*ask, dumped, *ASK])
        assert answer.choices[0].message.content == "Hello there, and good day.", name


def check_anthropic_messages() -> None:
    """The proxy's /v1/messages before a chat route: Anthropic's package, two turns of a tool."""
    tool = {"name": "get_weather", "description": "It.", "input_schema": PARAMETERS}
    with Anthropic(base_url=proxy_url, api_key=KEY, max_retries=0, timeout=120) as other:
        for name in NAMES:
            fields = {"model": name, "max_tokens": 300, "tools": [tool]}
            first = other.messages.create(messages=WEATHER, **fields)
            call = next(block for block in first.content if block.type == "tool_use")
            result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "Sun"}]}
            turns = [*WEATHER, {"role": "assistant", "content": first.content}, result]
            second = other.messages.create(messages=turns, **fields)
            assert second.content[-1].text == "It is sunny in Paris.", (name, second)


def check_context_window() -> None:
    """A prompt that is too long has an error of its own, which context_window_fallbacks wait for."""
    for name in ("by-openai", "falls-back"):
        try:
            client().chat.completions.create(model=name, messages=LONG)
        except openai.BadRequestError as error:
            assert "ContextWindowExceededError" in str(error), error
            assert name != "falls-back" or "by-vllm" in str(error), error
        else:
            raise AssertionError("it was answered")


def check_errors() -> None:
    """A mistake is the same mistake behind the proxy."""
    try:
        client().chat.completions.create(model="by-openai", messages=ASK, temperature=-1)
    except openai.BadRequestError as error:
        assert "temperature" in str(error)
    else:
        raise AssertionError("a negative temperature was taken")


if __name__ == "__main__":
    with proxy() as proxy_url:
        sys.exit(run(__name__))
