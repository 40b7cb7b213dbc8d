"""curl on the bytes: framing of streams, headers, errors."""

import json
import shutil
import subprocess
import sys
from typing import Any

from checking import MODEL, URL, Skip, run

CLIENT = "curl"
PACKAGES = []
FAST = True
VERSION = ""
if shutil.which("curl"):
    VERSION = subprocess.run(["curl", "--version"], capture_output=True, text=True, check=True).stdout.split()[1]


def curl(path: str, body: Any = None, *options: str) -> str:
    """What curl prints."""
    if not shutil.which("curl"):
        raise Skip("no curl here")
    command = ["curl", "--silent", "--show-error", "--max-time", "120", *options, URL + path]
    if body is not None:
        command += ["-H", "Content-Type: application/json", "--data-binary", json.dumps(body)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def ask(**fields: Any) -> dict[str, Any]:
    """A body of a chat."""
    return {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, **fields}


def check_chat() -> None:
    """A chat answer is JSON."""
    assert json.loads(curl("/v1/chat/completions", ask()))["choices"][0]["message"]["role"] == "assistant"


def check_stream_bytes() -> None:
    """A stream is data lines with blank ones between, and ends with [DONE]."""
    text = curl("/v1/chat/completions", ask(stream=True), "--no-buffer")
    blocks = [block for block in text.split("\n\n") if block and not block.startswith(":")]
    data = [line for block in blocks for line in block.split("\n") if line.startswith("data: ")]
    assert data[-1] == "data: [DONE]" and text.endswith("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in data[:-1]]
    assert chunks[-1]["choices"][0]["finish_reason"] in ("stop", "length")
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks[:-1])


def check_headers() -> None:
    """A stream's headers keep proxies from holding it back."""
    headers = curl("/v1/chat/completions", ask(stream=True), "--dump-header", "-", "--output", "/dev/null").lower()
    assert "content-type: text/event-stream" in headers and "x-accel-buffering: no" in headers


def check_refusals() -> None:
    """Bad JSON is 400, an unknown path 404, a wrong method 405."""
    status = ("--output", "/dev/null", "--write-out", "%{http_code}")
    assert curl("/v1/chat/completions", None, "--data", "{", "-H", "Content-Type: application/json", *status) == "400"
    assert curl("/v1/nothing", None, *status) == "404"
    assert curl("/v1/chat/completions", None, *status) == "405"


def check_probes() -> None:
    """Liveness, readiness, metrics."""
    for path in ("/livez", "/readyz", "/health"):
        assert curl(path, None, "--output", "/dev/null", "--write-out", "%{http_code}") == "200"
    assert "vllm:num_requests_running" in curl("/metrics")


if __name__ == "__main__":
    sys.exit(run(__name__))
