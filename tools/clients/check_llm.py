"""Simon Willison's llm with a model in its extra-openai-models.yaml."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from checking import MODEL, URL, run

CLIENT = "llm"
PACKAGES = ["llm"]

FOLDER = Path(tempfile.mkdtemp(prefix="octavo-llm-"))
(FOLDER / "extra-openai-models.yaml").write_text(
    json.dumps([{"model_id": "local", "model_name": MODEL, "api_base": f"{URL}/v1", "supports_schema": True,
                 "supports_tools": True, "can_stream": True}])
)  # fmt: skip


def llm(*arguments: str, stdin: str = "") -> str:
    """What the command prints."""
    environ = os.environ | {"LLM_USER_PATH": str(FOLDER), "OPENAI_API_KEY": "none"}
    command = [sys.executable, "-m", "llm", *arguments]
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, env=environ, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def check_prompt() -> None:
    """A streamed answer on the terminal."""
    assert llm("prompt", "-m", "local", "-o", "max_tokens", "16", "Say hello.").strip()


def check_no_stream() -> None:
    """The same without streaming, with a system prompt and text piped in."""
    fields = ("-m", "local", "--no-stream", "-o", "max_tokens", "16", "-o", "temperature", "0", "-s", "Be brief.")
    assert llm("prompt", *fields, stdin="Say hello.").strip()


def check_schema() -> None:
    """--schema gives JSON that fits."""
    schema = '{"type": "object", "properties": {"is_red": {"type": "boolean"}}, "required": ["is_red"], ' \
             '"additionalProperties": false}'  # fmt: skip
    answer = llm("prompt", "-m", "local", "-o", "max_tokens", "60", "--schema", schema, "Is a tomato red?")
    assert isinstance(json.loads(answer)["is_red"], bool)


def check_conversation() -> None:
    """A conversation is continued from llm's own log."""
    llm("prompt", "-m", "local", "-o", "max_tokens", "8", "Say hello.")
    assert llm("prompt", "-c", "-o", "max_tokens", "8", "And again.").strip()


def check_tool() -> None:
    """A function is offered as a tool; the answer comes, called or not."""
    function = "def multiply(a: int, b: int) -> int:\n    'Multiply two numbers'\n    return a * b\n"
    fields = ("-m", "local", "-o", "max_tokens", "32", "--functions", function, "--chain-limit", "2")
    llm("prompt", *fields, "What is 3 times 4?")


if __name__ == "__main__":
    sys.exit(run(__name__))
