"""GuideLLM against three routes: a run of a benchmark whose requests all succeed, with the server's token counts."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from checking import MODEL, URL, run

CLIENT = "GuideLLM"
PACKAGES = ["guidellm"]
SERVER = ["--model", "scripted:agents.yaml", "--served-model-name", "scripted"]
FOLDER = Path(tempfile.mkdtemp(prefix="octavo-guidellm-"))
PROMPTS = FOLDER / "prompts.jsonl"
PROMPTS.write_text("".join(json.dumps({"prompt": f"Hello {n}.", "output_tokens_count": 12}) + "\n" for n in range(8)))
TEXT_TOKENS = 12  # a scripted token is a byte, and every answer is longer


def benchmark(route: str, profile: str, count: int, *backend: str) -> dict:
    """Run a benchmark of so many requests; return its report."""
    report = FOLDER / "report.json"
    report.unlink(missing_ok=True)
    command = [str(Path(sys.executable).with_name("guidellm")), "run", "--disable-console"]
    server = f"kind=openai_http,target={URL},model={MODEL},request_format={route}"
    command += ["--backend", ",".join((server, *backend))]
    command += ["--profile", profile, "--constraint", f"kind=max_requests,count={count}"]
    command += ["--data", f"kind=json_file,path={PROMPTS}", "--output", f"kind=json,path={report}"]
    # A run whose requests all fail may hang with several workers.
    environ = os.environ | {"GUIDELLM__MAX_WORKER_PROCESSES": "1"}
    done = subprocess.run(
        command, cwd=FOLDER, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=180,
        check=False,
    )  # fmt: skip
    print(done.stdout, file=sys.stderr)
    assert done.returncode == 0 and report.exists(), done.stdout[-500:]
    (found,) = json.loads(report.read_text())["benchmarks"]
    return found


def all_succeed(found: dict, count: int) -> None:
    """Each request succeeded, and has the server's own counts."""
    requests = found["requests"]
    assert not requests["errored"], [request["info"]["error"] for request in requests["errored"]][:1]
    assert len(requests["successful"]) == count, {name: len(some or ()) for name, some in requests.items()}
    for request in requests["successful"]:
        assert request["output_metrics"]["text_tokens"] == TEXT_TOKENS, request["output_metrics"]
        assert request["input_metrics"]["text_tokens"] > 0, request["input_metrics"]


def check_completions() -> None:
    """/v1/completions, one request at a time."""
    all_succeed(benchmark("/v1/completions", "kind=synchronous", 3), 3)


def check_chat() -> None:
    """/v1/chat/completions, two streams at once."""
    all_succeed(benchmark("/v1/chat/completions", "kind=concurrent,streams=2", 6), 6)


def check_responses() -> None:
    """/v1/responses."""
    all_succeed(benchmark("/v1/responses", "kind=synchronous", 3), 3)


def check_whole() -> None:
    """Whole answers instead of streams."""
    all_succeed(benchmark("/v1/chat/completions", "kind=synchronous", 3, "stream=false"), 3)


if __name__ == "__main__":
    sys.exit(run(__name__))
