"""Node's own fetch on the bytes of streams: no package, as a web page reads them."""

import json
import shutil
import subprocess
import sys

from checking import MODEL, URL, Skip, run

CLIENT = "node fetch"
PACKAGES = []
FAST = True
VERSION = ""
if shutil.which("node"):
    VERSION = subprocess.run(["node", "--version"], capture_output=True, text=True, check=True).stdout.strip()

READ = """
const [url, body] = process.argv.slice(1);
const answer = await fetch(url, {method: "POST", headers: {"content-type": "application/json"}, body});
const decoder = new TextDecoder();
let text = "", reads = 0;
for await (const bytes of answer.body) { text += decoder.decode(bytes, {stream: true}); reads++; }
const events = text.split("\\n\\n").filter(block => block.startsWith("data: ")).map(block => block.slice(6));
const done = events.pop();
const chunks = events.map(event => JSON.parse(event));
const content = chunks.map(chunk => chunk.choices[0]?.delta?.content ?? "").join("");
console.log(JSON.stringify({status: answer.status, type: answer.headers.get("content-type"), done, reads, content}));
"""
LEAVE = """
const [url, body] = process.argv.slice(1);
const leaving = new AbortController();
const answer = await fetch(url, {method: "POST", headers: {"content-type": "application/json"}, body,
  signal: leaving.signal});
const reader = answer.body.getReader();
await reader.read();
leaving.abort();
console.log(JSON.stringify({left: true}));
"""


def node(program: str, **fields: object) -> dict[str, object]:
    """What a program prints last."""
    if not shutil.which("node"):
        raise Skip("no node here")
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Say hé 日本"}], "stream": True, **fields}
    command = ["node", "--input-type=module", "-e", program, f"{URL}/v1/chat/completions", json.dumps(body)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return json.loads(done.stdout)


def check_stream() -> None:
    """Events come in several reads, parse one by one and end with [DONE]."""
    seen = node(READ, max_tokens=24)
    assert seen["status"] == 200 and str(seen["type"]).startswith("text/event-stream")
    assert seen["done"] == "[DONE]" and seen["content"] and seen["reads"] > 1, seen


def check_leaving() -> None:
    """A reader that aborts in mid-stream leaves the server answering."""
    assert node(LEAVE, max_tokens=200)["left"]
    assert node(READ, max_tokens=4)["status"] == 200


if __name__ == "__main__":
    sys.exit(run(__name__))
