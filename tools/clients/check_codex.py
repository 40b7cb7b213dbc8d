"""OpenAI's Codex CLI over /v1/responses: an answer, a command that it runs, a resumed session, errors."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from checking import MODEL, NODE, URL, run

CLIENT = "Codex CLI"
PACKAGES = []
NODE_PACKAGES = ["@openai/codex"]
SERVER = ["--model", "scripted:agents.yaml", "--served-model-name", "scripted"]

HOME = Path(tempfile.mkdtemp(prefix="octavo-codex-"))
PROJECT = HOME / "project"
PROJECT.mkdir()
(HOME / "config.toml").write_text(f"""
model = "{MODEL}"
model_provider = "octavo"
model_context_window = 131072

[model_providers.octavo]
name = "Octavo"
base_url = "{URL}/v1"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
""")


def codex(*arguments: str, prompt: str) -> list[dict]:
    """Run `codex exec`; return its events. The prompt is read from stdin, as an argument may not be that long."""
    program = NODE / "node_modules" / ".bin" / "codex"
    # The script's only command is an echo; a sandbox cannot be had in every container.
    command = [str(program), "exec", "--json", "--skip-git-repo-check", "--sandbox", "danger-full-access", *arguments]
    done = subprocess.run(
        [*command, "-"],
        input=prompt,
        capture_output=True,
        text=True,
        cwd=PROJECT,
        env=os.environ | {"CODEX_HOME": str(HOME)},
        timeout=120,
        check=False,
    )
    print(done.stdout, done.stderr, file=sys.stderr)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def items(events: list[dict], kind: str) -> list[dict]:
    """The completed items of one type."""
    done = (event["item"] for event in events if event["type"] == "item.completed")
    return [item for item in done if item["type"] == kind]


def check_answer() -> None:
    """codex exec: an answer, and its usage."""
    events = codex(prompt="Hello.")
    assert [item["text"] for item in items(events, "agent_message")] == ["Hello there, and good day."], events
    assert events[-1]["type"] == "turn.completed" and events[-1]["usage"]["output_tokens"] > 0, events[-1]


def check_command() -> None:
    """The model asks for a command, Codex runs it and sends its output back in the second request of the turn."""
    events = codex(prompt="Run the command.")
    (command,) = items(events, "command_execution")
    assert command["exit_code"] == 0 and "from codex" in command["aggregated_output"], command
    assert items(events, "agent_message")[-1]["text"] == "It is sunny in Paris.", events


def check_resume() -> None:
    """codex exec resume: the whole history of a session with a command goes back with the next question."""
    events = codex(prompt="Run the command.")
    thread = events[0]["thread_id"]
    again = codex("resume", thread, prompt="Hello.")
    assert items(again, "agent_message")[-1]["text"] == "Hello there, and good day.", again


def check_output_schema() -> None:
    """--output-schema: the last message obeys it."""
    schema = PROJECT / "schema.json"
    fields = {"name": {"type": "string"}, "is_tall": {"type": "boolean"}}
    about = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    schema.write_text(json.dumps(about))
    events = codex("--output-schema", str(schema), prompt="Is anybody there?")
    assert json.loads(items(events, "agent_message")[-1]["text"]) == {"name": "Ada", "is_tall": True}, events


def check_errors() -> None:
    """A prompt that is too long is known by its code: the turn fails with Codex's own words for it."""
    events = codex(prompt="hi " * 60_000)
    assert events[-1]["type"] == "turn.failed", events[-1]
    assert "ran out of room in the model's context window" in events[-1]["error"]["message"], events[-1]


if __name__ == "__main__":
    sys.exit(run(__name__))
